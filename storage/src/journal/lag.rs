//! The number of records that a replica does not have yet.
//!
//! ```text
//!  replicated                    durable          written
//!      ▼                            ▼                ▼
//!      ├── 3 ──┬──── 8 ────┬── 1 ───┼────── 5 ───────┤     one entry for each group: 12 records of lag
//! ```
//!
//! An append costs nothing here: each group adds one entry. When there are many, an entry holds twice as many groups, so the
//! memory has a bound and all entries are about equally fine.

use std::collections::VecDeque;

use crate::base::ids::Position;

/// Maximum number of entries, which take 32 KiB.
const MOST_ENTRIES: usize = 1024;
/// With fewer entries than these, new ones hold fewer groups again.
const FEW_ENTRIES: usize = MOST_ENTRIES / 4;

/// Records of one group, or of neighbours.
struct LagEntry {
    start: Position,
    end: Position,
    groups: u64,
    records: u64,
}

/// The groups that are written and not replicated.
pub(super) struct ReplicaLag {
    /// In order.
    entries: VecDeque<LagEntry>,
    /// Number of groups that a new entry may hold.
    groups: u64,
}

impl Default for ReplicaLag {
    fn default() -> Self {
        Self {
            entries: VecDeque::new(),
            groups: 1,
        }
    }
}

impl ReplicaLag {
    /// Adds the records of a group from `start` to `end`, which is beyond all groups before.
    pub(super) fn add(&mut self, (start, end): (Position, Position), records: u64) {
        if self.entries.len() < FEW_ENTRIES {
            self.groups = (self.groups / 2).max(1);
        }
        match self.entries.back_mut() {
            Some(last) if last.groups < self.groups => {
                last.end = end;
                last.groups += 1;
                last.records += records;
            }
            _ => {
                if self.entries.len() == MOST_ENTRIES {
                    self.merge();
                }
                self.entries.push_back(LagEntry {
                    start,
                    end,
                    groups: 1,
                    records,
                });
            }
        }
    }

    /// Merges neighbours, so that half of the entries are free.
    fn merge(&mut self) {
        self.groups *= 2;
        let pairs = self.entries.make_contiguous().chunks(2);
        self.entries = pairs
            .filter_map(|pair| {
                Some(LagEntry {
                    start: pair.first()?.start,
                    end: pair.last()?.end,
                    groups: pair.iter().map(|entry| entry.groups).sum(),
                    records: pair.iter().map(|entry| entry.records).sum(),
                })
            })
            .collect();
    }

    /// Everything below is replicated. An entry stays whole until its end is.
    pub(super) fn forget_below(&mut self, replicated: Position) {
        let gone = (self.entries).partition_point(|entry| entry.end <= replicated);
        self.entries.drain(..gone);
    }

    /// Records of all entries that begin below a position: those that are durable, if it is the durable one.
    pub(super) fn below(&self, durable: Position) -> u64 {
        let begun = self
            .entries
            .iter()
            .take_while(|entry| entry.start < durable);
        begun.map(|entry| entry.records).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(group: u64) -> Position {
        Position::new(group * 64)
    }

    #[test]
    fn records_count_exactly_in_few_groups_and_never_too_low_in_many() {
        let mut lag = ReplicaLag::default();
        let mut added = 0;
        let mut add = |lag: &mut ReplicaLag, count: u64| {
            for _ in 0..count {
                lag.add((at(added), at(added + 1)), added % 7);
                added += 1;
            }
        };
        let records = |from: u64, to: u64| (from..to).map(|group| group % 7).sum::<u64>();
        add(&mut lag, 1000);
        assert_eq!(lag.below(at(1000)), records(0, 1000));
        assert_eq!(lag.below(at(600)), records(0, 600));
        lag.forget_below(at(300));
        assert_eq!(lag.below(at(600)), records(300, 600));
        assert_eq!(lag.below(at(300)), 0);
        add(&mut lag, 200_000);
        assert!(lag.entries.len() <= MOST_ENTRIES);
        assert_eq!(lag.below(at(201_000)), records(300, 201_000));
        for replicated in [301, 99_999, 123_457, 200_998] {
            lag.forget_below(at(replicated));
            let (found, exact) = (lag.below(at(201_000)), records(replicated, 201_000));
            // One entry of at most 512 groups.
            assert!(exact <= found && found <= exact + records(0, 512));
        }
        lag.forget_below(at(201_000));
        assert_eq!(lag.below(at(201_000)), 0);
        // Entries are fine again, also if the replica is never quite up to date.
        add(&mut lag, 100);
        lag.forget_below(at(201_050));
        add(&mut lag, 100);
        assert_eq!(lag.below(at(201_150)), records(201_050, 201_150));
        lag.forget_below(at(201_177));
        assert_eq!(lag.below(at(201_200)), records(201_177, 201_200));
    }
}
