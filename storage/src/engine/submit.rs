//! Checks a batch before it may queue. This runs on the caller's thread, so the committer never sees a wrong
//! batch.

use std::collections::HashSet;

use crate::api::codec::RecordRef;
use crate::api::config::Limits;
use crate::api::error::InvalidBatch;
use crate::api::record::Batch;
use crate::api::records::Records;
use crate::base::crc::crc32c;
use crate::base::ids::{LogName, Timestamp};
use crate::format::digest::Secret;
use crate::format::frame::HEADER_BYTES;

/// Maximum number of requests joined into one: each has a position inside of one frame, and the shortest
/// frame is a header.
const MOST_JOINED: u64 = HEADER_BYTES as u64;

/// Maximum bytes of joined requests: up to this, the copy costs less than a request.
const JOINED_BYTES: u64 = 32 << 10;

/// Approximate memory of a log's part of a request besides its records, in bytes.
const REQUEST_OVERHEAD: u64 = 256;

/// Checks a batch against the limits. Returns its cost to the in-flight budget, in bytes.
pub(crate) fn validate(
    batch: &Batch,
    limits: &Limits,
    now: Timestamp,
    max_future_micros: i64,
) -> Result<u64, InvalidBatch> {
    if batch.logs.is_empty() && batch.checks.is_empty() && batch.cursors.is_empty() {
        return Err(InvalidBatch::Empty { log: None });
    }
    // Each is looked up by the committer, while all others wait.
    limits.check_number("checks", batch.checks.len())?;
    limits.check_number("cursors", batch.cursors.len())?;
    check_names(batch)?;
    check_cursors(batch)?;
    check_producers(batch)?;
    let mut count = 0;
    let mut bytes = 0;
    for records in &batch.logs {
        if records.records.is_empty() {
            return Err(InvalidBatch::Empty {
                log: Some(records.log.clone()),
            });
        }
        count += records.records.len();
        bytes += records.records.stored_bytes();
        if batch.joined > 0 {
            // The join checked these records.
            continue;
        }
        let small = records.records.largest() <= u64::from(limits.max_record_bytes);
        if small && !records.records.have_headers() && !records.records.have_times() {
            continue;
        }
        for (index, record) in records.records.iter().enumerate() {
            check_record(&records.log, index, &record, limits)?;
            check_time(&records.log, index, &record, now, max_future_micros)?;
        }
    }
    if count > u64::from(limits.max_batch_records) || bytes > u64::from(limits.max_batch_bytes) {
        return Err(InvalidBatch::RequestTooLarge {
            records: count,
            bytes,
            max_records: u64::from(limits.max_batch_records),
            max_bytes: u64::from(limits.max_batch_bytes),
        });
    }
    // Checksums last: they cost the most.
    for records in &batch.logs {
        let unseen = batch.joined == 0 && records.records.have_checksums();
        let sent = unseen.then_some(&records.records);
        for (index, record) in sent.into_iter().flat_map(Records::iter).enumerate() {
            check_sum(&records.log, index, &record)?;
        }
    }
    // Names and conditions take memory too.
    let parts = batch.logs.len() + batch.checks.len() + batch.cursors.len();
    Ok(bytes + (parts as u64 + u64::from(batch.joined)) * REQUEST_OVERHEAD)
}

/// Puts `next` behind `batch` if no client can see the difference, as [`Append::join`]. `most` returns the
/// maximum bytes of a record of a log that has its own limit.
///
/// [`Append::join`]: crate::Append::join
pub(crate) fn join(
    batch: &mut Batch,
    next: &Batch,
    limits: &Limits,
    most: impl FnOnce(&LogName) -> Option<u64>,
    now: Timestamp,
    max_future_micros: i64,
) -> bool {
    if !batch.leads_to(next) {
        return false;
    }
    let joined = batch.requests() + next.requests();
    let is_wrong = |batch| validate(batch, limits, now, max_future_micros).is_err();
    // Each request is checked when it comes; the first one, when the second is put behind it.
    if (batch.joined == 0 && is_wrong(batch)) || is_wrong(next) {
        return false;
    }
    let (first, more) = (&mut batch.logs[0].records, &next.logs[0].records);
    let stored = first.stored_bytes() + more.stored_bytes();
    if u64::from(joined) > MOST_JOINED
        || first.len() + more.len() > u64::from(limits.max_batch_records)
        || stored > JOINED_BYTES.min(limits.max_batch_bytes.into())
    {
        return false;
    }
    // For several requests, the committer does not report which of them has the record that is too large.
    let log = &next.logs[0].log;
    let largest = first.largest().max(more.largest());
    if most(log).is_some_and(|most| largest > most) {
        return false;
    }
    first.join(more);
    batch.joined = joined - 1;
    true
}

/// Digests of each log's records as they were sent, if producers sent them.
pub(crate) fn digests(batch: &Batch, secret: &Secret) -> Vec<u128> {
    match batch.logs.first() {
        Some(first) if first.producer.is_some() => batch
            .logs
            .iter()
            .map(|log| secret.digest(&log.records))
            .collect(),
        _ => Vec::new(),
    }
}

fn check_cursors(batch: &Batch) -> Result<(), InvalidBatch> {
    let mut seen = HashSet::new();
    for commit in &batch.cursors {
        if !seen.insert((&commit.log, &commit.cursor)) {
            return Err(InvalidBatch::DuplicateCursor {
                log: commit.log.clone(),
                cursor: commit.cursor.clone(),
            });
        }
    }
    Ok(())
}

/// Either the whole batch is a repeat, or nothing of it. That is known only where every part names its
/// producer.
fn check_producers(batch: &Batch) -> Result<(), InvalidBatch> {
    let without = batch.logs.iter().find(|log| log.producer.is_none());
    match without {
        Some(log) if batch.logs.iter().any(|log| log.producer.is_some()) => {
            Err(InvalidBatch::ProducerMissing {
                log: log.log.clone(),
            })
        }
        _ => Ok(()),
    }
}

fn check_names(batch: &Batch) -> Result<(), InvalidBatch> {
    if batch.logs.len() + batch.checks.len() < 2 {
        return Ok(());
    }
    let names = batch
        .logs
        .iter()
        .map(|l| &l.log)
        .chain(batch.checks.iter().map(|c| &c.log));
    let mut seen = HashSet::new();
    for log in names {
        if !seen.insert(log) {
            return Err(InvalidBatch::DuplicateLog { log: log.clone() });
        }
    }
    Ok(())
}

fn check_record(
    log: &LogName,
    index: usize,
    record: &RecordRef<'_>,
    limits: &Limits,
) -> Result<(), InvalidBatch> {
    let (headers, bytes) = (record.headers().count(), record.header_bytes());
    if headers as u64 > u64::from(limits.max_headers) || bytes > u64::from(limits.max_header_bytes)
    {
        return Err(InvalidBatch::HeadersTooLarge {
            log: log.clone(),
            index,
            headers,
            bytes,
            max_headers: limits.max_headers,
            max_bytes: limits.max_header_bytes,
        });
    }
    let (bytes, limit) = (record.bytes(), u64::from(limits.max_record_bytes));
    if bytes > limit {
        return Err(InvalidBatch::RecordTooLarge {
            log: log.clone(),
            index,
            bytes,
            limit,
        });
    }
    Ok(())
}

fn check_time(
    log: &LogName,
    index: usize,
    record: &RecordRef<'_>,
    now: Timestamp,
    max_micros: i64,
) -> Result<(), InvalidBatch> {
    let Some(timestamp) = record.timestamp else {
        return Ok(());
    };
    let ahead_micros = timestamp.micros().saturating_sub(now.micros());
    if ahead_micros > max_micros {
        return Err(InvalidBatch::TimestampInFuture {
            log: log.clone(),
            index,
            timestamp,
            now,
            ahead_micros,
            max_micros,
        });
    }
    Ok(())
}

fn check_sum(log: &LogName, index: usize, record: &RecordRef<'_>) -> Result<(), InvalidBatch> {
    let Some(given) = record.crc32c else {
        return Ok(());
    };
    let actual = crc32c(record.data);
    if given != actual {
        return Err(InvalidBatch::ChecksumMismatch {
            log: log.clone(),
            index,
            given,
            actual,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::api::config::StorageConfig;
    use crate::api::record::{LogRecords, Record};

    fn batch(record: Record) -> Batch {
        let log = LogName::new("a").unwrap();
        let logs = vec![LogRecords {
            log,
            records: vec![record].into(),
            guard: Default::default(),
            producer: None,
        }];
        Batch {
            logs,
            ..Batch::default()
        }
    }

    fn check(batch: &Batch) -> Result<u64, InvalidBatch> {
        let limits = StorageConfig::default().limits();
        validate(
            batch,
            &limits,
            Timestamp::from_micros(1_000_000),
            60_000_000,
        )
    }

    #[test]
    fn a_wrong_checksum_is_reported_with_the_right_one() {
        let data = Bytes::from_static(b"123456789");
        let good = Record {
            data: data.clone(),
            crc32c: Some(0xE306_9283),
            ..Record::default()
        };
        assert!(check(&batch(good)).is_ok());
        let bad = Record {
            data,
            crc32c: Some(1),
            ..Record::default()
        };
        assert!(matches!(
            check(&batch(bad)),
            Err(InvalidBatch::ChecksumMismatch {
                given: 1,
                actual: 0xE306_9283,
                ..
            })
        ));
    }

    #[test]
    fn a_time_a_minute_ahead_passes_and_a_microsecond_more_does_not() {
        let at = |micros| {
            let timestamp = Some(Timestamp::from_micros(micros));
            batch(Record {
                timestamp,
                ..Record::default()
            })
        };
        assert!(check(&at(61_000_000)).is_ok());
        assert!(matches!(
            check(&at(61_000_001)),
            Err(InvalidBatch::TimestampInFuture { .. })
        ));
    }

    #[test]
    fn checks_pass_up_to_the_maximum_number_of_records() {
        let mut many = batch(Record::default());
        let limit = StorageConfig::default().max_batch_records;
        many.checks = (0..limit)
            .map(|number| crate::api::record::LogCheck {
                log: LogName::new(&format!("log/{number}")).unwrap(),
                guard: Default::default(),
            })
            .collect();
        assert!(check(&many).is_ok());
        many.checks.push(many.checks[0].clone());
        let refused = check(&many).unwrap_err();
        let told = "the request has 1001 checks; at most 1000 are allowed";
        assert_eq!(refused.to_string(), told);
    }

    #[test]
    fn a_log_named_twice_is_refused_also_as_a_check() {
        let mut twice = batch(Record::default());
        let log = twice.logs[0].log.clone();
        twice.checks.push(crate::api::record::LogCheck {
            log,
            guard: Default::default(),
        });
        assert!(matches!(
            check(&twice),
            Err(InvalidBatch::DuplicateLog { .. })
        ));
    }
}
