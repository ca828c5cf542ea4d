//! Bounds of the numbers on disk.
//!
//! A checksum proves that bytes are the ones written, not which program wrote them. Each number that a store
//! reads goes through these functions first: no sum of two numbers that passed overflows, and nothing is
//! allocated by a number that did not pass. A number beyond its bound counts as damage, and no store gets
//! near one: at 1 GB/s positions last 146 years, and each unclean end takes 1 of 8 million epochs.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::base::ids::{LogId, Lsn, Position, RecoveryEpoch, SegmentId};

/// Recovery epochs are below this.
pub(crate) const EPOCHS: u64 = 1 << 23;
/// Positions of a journal are below this.
pub(crate) const POSITIONS: u64 = 1 << 62;
/// Lsns, and numbers of records, are below this.
pub(crate) const LSNS: u64 = 1 << 62;
/// Counters of log ids are below this where they are read. The first one of an epoch is at most 2^39
/// ([`LogId::first_counter`]), so 2^38 logs of an epoch read back, and another 2^38 can still be assigned.
pub(crate) const COUNTERS: u64 = (1 << 40) - (1 << 38);
/// Ids of segments are below this. A run has 4 GiB of addresses for each, from 2^63 on.
pub(crate) const SEGMENTS: u64 = (1 << 31) - (1 << 20);
/// Maximum bytes of a segment or a run: offsets in one are kept in 32 bits.
pub(crate) const LARGEST_SEGMENT: u64 = 1 << 32;
/// Positions left where a start goes on: more than any machine writes before the next start, and enough for a
/// restore to leap ahead.
pub(crate) const POSITIONS_LEFT: u64 = 1 << 52;
/// Addresses in sorted runs begin here.
pub(crate) const ADDRESSES: u64 = 1 << 63;

/// A recovery epoch; 0 counts as 1.
pub(crate) fn epoch(number: u64) -> Option<RecoveryEpoch> {
    (number < EPOCHS).then(|| RecoveryEpoch::new(number))
}

/// A position in the journal.
pub(crate) fn position(number: u64) -> Option<Position> {
    (number < POSITIONS).then(|| Position::new(number))
}

/// A position in the journal, or an address in a run.
pub(crate) fn place(number: u64) -> Option<Position> {
    let address = (ADDRESSES..ADDRESSES + (SEGMENTS << 32)).contains(&number);
    (number < POSITIONS || address).then(|| Position::new(number))
}

/// An lsn.
pub(crate) fn lsn(number: u64) -> Option<Lsn> {
    records(number).map(Lsn::new)
}

/// A number of records, or of bytes in all.
pub(crate) fn records(number: u64) -> Option<u64> {
    (number < LSNS).then_some(number)
}

/// The id of a segment; 0 is none.
pub(crate) fn segment(number: u64) -> Option<SegmentId> {
    (number < SEGMENTS).then(|| SegmentId::new(number))
}

/// A number for a new segment or run.
///
/// # Errors
/// If all numbers were given out: a start would not believe a larger one. Segments of the least
/// size have numbers for 128 TiB.
pub(crate) fn unused(id: SegmentId) -> io::Result<()> {
    match segment(id.get()) {
        Some(_) => Ok(()),
        None => Err(io::Error::other(format!(
            "all {SEGMENTS} segment numbers were given out; copy the logs to a new store with larger segments"
        ))),
    }
}

/// The id of a log; 0 is none.
pub(crate) fn log(number: u64) -> Option<LogId> {
    let id = LogId::new(number);
    (id.epoch().get() < EPOCHS).then_some(id)
}

/// The counter of the next log id.
pub(crate) fn counter(number: u64) -> Option<u64> {
    (number < COUNTERS).then_some(number)
}

/// An offset in a segment or a run, or a length there.
pub(crate) fn offset(number: u64) -> Option<u64> {
    (number <= LARGEST_SEGMENT).then_some(number)
}

/// The id in the name of a file: 16 hexadecimal digits, written as the store writes them.
pub(crate) fn named(name: &str, suffix: &str) -> Option<SegmentId> {
    let digits = name.strip_suffix(suffix)?;
    let lower = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    if digits.len() != 16 || !digits.bytes().all(lower) {
        return None;
    }
    u64::from_str_radix(digits, 16).ok().and_then(segment)
}

/// Bytes at the start of every segment. They hold the two copies of its life block.
pub(crate) const LIFE_BYTES: u64 = 8 << 10;

/// Maximum size of one atomic unit in a segment of `segment_bytes`, in bytes, including its directory
/// entries. It is half of the space for frames. A unit, the link before and the seal after it therefore
/// always fit a fresh segment.
pub(crate) fn largest_unit(segment_bytes: u64) -> u64 {
    (segment_bytes - LIFE_BYTES) / 2
}

/// Maximum size of a plain body, in bytes, unless the store's FORMAT allows more.
pub(crate) const LARGEST_BODY: u32 = 64 << 20;

/// Largest plain body of any store of this process, in bytes. It bounds the memory of the process, so
/// one number is enough for all stores that the process opens.
static ALLOWED: AtomicU32 = AtomicU32::new(LARGEST_BODY);

/// Raises the largest body that is decompressed to `largest_body` bytes.
pub(crate) fn allow_body(largest_body: u32) {
    ALLOWED.fetch_max(largest_body, Ordering::Relaxed);
}

/// Largest body that is decompressed, in bytes.
pub(crate) fn allowed_body() -> u32 {
    ALLOWED.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_accepted_numbers_do_not_overflow() {
        for number in [
            u64::MAX,
            1 << 63,
            POSITIONS,
            POSITIONS - 1,
            SEGMENTS,
            SEGMENTS - 1,
            0,
        ] {
            if let Some(position) = place(number) {
                position.advance(LARGEST_SEGMENT).advance(LARGEST_SEGMENT);
            }
            if let Some(id) = segment(number) {
                assert!(
                    place(crate::format::address::base_of(id.next()).get()).is_some()
                        || number == SEGMENTS - 1
                );
            }
            if let Some(log) = log(number) {
                let _next = log.epoch().next();
            }
            if let Some(lsn) = lsn(number) {
                lsn.advance(LSNS - 1);
            }
        }
        assert_eq!(epoch(EPOCHS), None);
        assert_eq!(log((EPOCHS - 1) << 40), None);
        assert!(log((EPOCHS - 2) << 40 | 7).is_some());
    }

    #[test]
    fn number_beyond_the_last_makes_no_segment() {
        assert!(unused(SegmentId::new(SEGMENTS - 1)).is_ok());
        assert!(unused(SegmentId::new(SEGMENTS)).is_err());
        let last = crate::format::address::base_of(SegmentId::new(SEGMENTS - 1));
        assert!(last.get().checked_add(LARGEST_SEGMENT).is_some());
    }

    #[test]
    fn names_are_as_the_store_writes_them() {
        assert_eq!(
            named("000000000000002a.seg", ".seg"),
            Some(SegmentId::new(42))
        );
        for other in [
            "000000000000002A.seg",
            "+00000000000002a.seg",
            "2a.seg",
            "ffffffffffffffff.seg",
            "",
        ] {
            assert_eq!(named(other, ".seg"), None, "{other}");
        }
    }
}
