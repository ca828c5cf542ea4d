//! Cursors: the place where a scan continues, in bytes that only this store can use.
//!
//! ```text
//! version u8 | kind u8 | selection u64 | epoch u64 | position u64 | a u64 | b u64 | crc u32
//! ```
//!
//! One log: `a` = log id, `b` = next lsn, `position` = the published position when the cursor was made, so that every
//! record below `b` lies below it. `a` = 0: no log of the name existed then, and the first one that came later is
//! read from its first record on.
//! Many logs: `position` = the frame to continue in, `a` = number of its records already returned, `b` = the time in
//! microseconds before which records are left out, or 0.
//! `selection` is a digest of the store's id and of the logs that the scan selects.

use bytes::Bytes;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::api::engine::Selector;
use crate::api::error::ReadError;
use crate::base::bounds;
use crate::base::crc::crc32c;
use crate::base::ids::{LogId, Lsn, Position, RecoveryEpoch, Timestamp};

const VERSION: u8 = 1;
const ONE_LOG: u8 = 1;
const MANY_LOGS: u8 = 2;
const LENGTH: usize = 2 + 5 * 8 + 4;

/// The log id in a cursor of a scan whose log did not exist.
pub(super) const NO_LOG: LogId = LogId::new(0);

/// The place where a scan continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ScanCursor {
    OneLog {
        epoch: RecoveryEpoch,
        position: Position,
        log_id: LogId,
        next: Lsn,
    },
    ManyLogs {
        epoch: RecoveryEpoch,
        position: Position,
        skip: u64,
        /// The scan leaves out earlier records, also those that are appended later.
        not_before: Option<Timestamp>,
    },
}

/// Digest of a selection. A cursor with another digest is refused.
pub(super) fn selection(store_id: u128, selector: &Selector) -> u64 {
    let low = u64::from_le_bytes(store_id.to_le_bytes()[..8].try_into().unwrap_or_default());
    match selector {
        Selector::Log(target) => xxh3_64_with_seed(target.name.as_str().as_bytes(), low ^ 1),
        Selector::Prefix(prefix) if !prefix.is_empty() => {
            xxh3_64_with_seed(prefix.as_bytes(), low ^ 2)
        }
        Selector::Prefix(_) | Selector::All => low ^ 3,
    }
}

impl ScanCursor {
    pub(super) fn encode(&self, selection: u64) -> Bytes {
        let (kind, numbers) = match *self {
            Self::OneLog {
                epoch,
                position,
                log_id,
                next,
            } => (
                ONE_LOG,
                [epoch.get(), position.get(), log_id.get(), next.get()],
            ),
            Self::ManyLogs {
                epoch,
                position,
                skip,
                not_before,
            } => {
                // 0 means no bound, so the time 0 becomes the next one.
                let nonzero = |time: Timestamp| time.micros().cast_unsigned().max(1);
                let time = not_before.map_or(0, nonzero);
                (MANY_LOGS, [epoch.get(), position.get(), skip, time])
            }
        };
        let mut out = Vec::with_capacity(LENGTH);
        out.extend_from_slice(&[VERSION, kind]);
        out.extend_from_slice(&selection.to_le_bytes());
        for number in numbers {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.extend_from_slice(&crc32c(&out).to_le_bytes());
        Bytes::from(out)
    }

    pub(super) fn decode(bytes: &[u8], selection: u64) -> Result<Self, ReadError> {
        let number = |index: usize| {
            let mut raw = [0; 8];
            raw.copy_from_slice(&bytes[2 + index * 8..10 + index * 8]);
            u64::from_le_bytes(raw)
        };
        if bytes.len() != LENGTH
            || bytes[0] != VERSION
            || crc32c(&bytes[..LENGTH - 4]).to_le_bytes() != bytes[LENGTH - 4..]
        {
            return Err(ReadError::BadCursor(
                "it is not one of Wald's, or not whole",
            ));
        }
        if number(0) != selection {
            return Err(ReadError::BadCursor(
                "it belongs to another selection or another store",
            ));
        }
        // A client can forge a cursor: its checksum is no secret.
        let beyond = || ReadError::BadCursor("it tells of a place that no store gets to");
        let epoch = bounds::epoch(number(1)).ok_or_else(beyond)?;
        let position = bounds::place(number(2)).ok_or_else(beyond)?;
        match bytes[1] {
            ONE_LOG => Ok(Self::OneLog {
                epoch,
                position,
                log_id: bounds::log(number(3)).ok_or_else(beyond)?,
                next: bounds::lsn(number(4)).ok_or_else(beyond)?,
            }),
            MANY_LOGS => Ok(Self::ManyLogs {
                epoch,
                position,
                skip: bounds::records(number(3)).ok_or_else(beyond)?,
                not_before: match number(4).cast_signed() {
                    0 => None,
                    micros => Some(Timestamp::from_micros(micros)),
                },
            }),
            _ => Err(ReadError::BadCursor(
                "it is of a kind that this version does not know",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_reads_back_for_its_own_selection_only() {
        let cursor = ScanCursor::OneLog {
            epoch: RecoveryEpoch::new(3),
            position: Position::new(9),
            log_id: LogId::new(4),
            next: Lsn::new(1 << 60),
        };
        let prefix = selection(7, &Selector::Prefix("a".to_owned()));
        let all = selection(7, &Selector::All);
        let bytes = cursor.encode(prefix);
        assert_eq!(ScanCursor::decode(&bytes, prefix).unwrap(), cursor);
        assert!(ScanCursor::decode(&bytes, all).is_err());
        assert!(
            ScanCursor::decode(&bytes, selection(8, &Selector::Prefix("a".to_owned()))).is_err()
        );
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.to_vec();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(ScanCursor::decode(&flipped, prefix).is_err(), "bit {bit}");
        }
        assert!(ScanCursor::decode(&bytes[1..], prefix).is_err());
    }

    #[test]
    fn a_cursor_of_many_logs_keeps_the_time_of_its_scan() {
        for (given, kept) in [(None, None), (Some(0), Some(1)), (Some(-5), Some(-5))] {
            let cursor = |micros: Option<i64>| ScanCursor::ManyLogs {
                epoch: RecoveryEpoch::new(3),
                position: Position::new(9),
                skip: 2,
                not_before: micros.map(Timestamp::from_micros),
            };
            let read = ScanCursor::decode(&cursor(given).encode(7), 7).unwrap();
            assert_eq!(read, cursor(kept));
        }
    }

    #[test]
    fn made_up_cursors_beyond_all_bounds_are_refused() {
        let all = selection(7, &Selector::All);
        let good = ScanCursor::ManyLogs {
            epoch: RecoveryEpoch::new(1),
            position: Position::new(9),
            skip: 3,
            not_before: None,
        };
        for field in 1..4 {
            let mut bytes = good.encode(all).to_vec();
            bytes[2 + field * 8..10 + field * 8].fill(0xFF);
            let crc = crc32c(&bytes[..LENGTH - 4]);
            bytes[LENGTH - 4..].copy_from_slice(&crc.to_le_bytes());
            assert!(ScanCursor::decode(&bytes, all).is_err(), "number {field}");
        }
    }
}
