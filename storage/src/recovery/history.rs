//! Ends of recovery epochs: of the records of an epoch only those below its end survived.
//!
//! Each unclean end adds an entry. Readers and clients ask with the epoch that they know, mostly one of
//! the newest. So the list is bounded, and old entries become one.

use crate::base::ids::{Position, RecoveryEpoch};

/// An epoch that ended, and the end of its surviving records.
pub(crate) type EpochEnd = (RecoveryEpoch, Position);

/// Maximum number of ends that are kept. Each takes 16 bytes of memory and about 10 in a checkpoint.
const MOST_ENDS: usize = 1 << 15;

/// Adds an end.
pub(super) fn add_end(ends: &mut Vec<EpochEnd>, ended: RecoveryEpoch, end: Position) {
    ends.push((ended, end));
    bound_ends(ends);
}

/// Bounds the list. Beyond [`MOST_ENDS`] entries the older half becomes one. The first entry stays: it stands
/// for epochs before the store. The new entry has the lowest end, so a lost record never counts as surviving. A
/// surviving record may count as lost, so that its writer or reader takes it again.
pub(crate) fn bound_ends(ends: &mut Vec<EpochEnd>) {
    while ends.len() > MOST_ENDS {
        let older = 1..=MOST_ENDS / 2;
        let merged = (ends[*older.end()].0, ends[*older.start()].1);
        ends.splice(older, [merged]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_bounded_and_a_lost_record_never_counts_as_kept() {
        let end_of = |epoch: u64| Position::new(epoch * 100);
        let newest = 3 * MOST_ENDS as u64;
        let mut ends = Vec::new();
        for epoch in 0..=newest {
            add_end(&mut ends, RecoveryEpoch::new(epoch), end_of(epoch));
            assert!(ends.len() <= MOST_ENDS);
        }
        let survived = |epoch: u64| {
            let mut ends = ends.iter();
            let end = ends.find(|(ended, _)| *ended >= RecoveryEpoch::new(epoch));
            end.expect("the epoch ended").1
        };
        for epoch in (0..=newest).step_by(211) {
            assert!(survived(epoch) <= end_of(epoch), "epoch {epoch}");
            if epoch == 0 || epoch + MOST_ENDS as u64 / 2 > newest {
                assert_eq!(survived(epoch), end_of(epoch));
            }
        }
        // Records of the first epochs are known as before.
        assert_eq!(survived(newest / 2), end_of(1));
        assert!(ends.is_sorted());
    }
}
