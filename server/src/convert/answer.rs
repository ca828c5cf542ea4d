//! Domain -> proto: answers.

mod ack;
mod stored;

use prost::Message;
use tonic::Status;
use wald_proto::codec::Encoded;
use wald_proto::v1;
use wald_storage::{
    Appended, Durability, Fenced, Finding, FindingKind, Gap, GapReason, Limits, LogAppended,
    LogInfo, LogName, LogStat, Lsn, NamedCursor, Page, Position, ProducerInfo, RecoveryEpoch,
    ScanChunk, SegmentContents, SegmentInfo, Severity, Statistics, StoredBatch, Timestamp,
    VerifyProgress,
};

use crate::status;

pub(crate) use ack::SessionAck;

/// A response stays below this, unless one record alone is larger.
pub(crate) const MAX_RESPONSE_BYTES: usize = 1 << 20;

/// Bytes of a response in addition to its records: names, lsns, cursor.
const RESPONSE_OVERHEAD_BYTES: usize = 1 << 10;

/// The answer to an append of one record.
pub(crate) fn append_response(appended: &Appended, epoch: RecoveryEpoch) -> v1::AppendResponse {
    record_response(appended.appends.first(), appended.position, appended, epoch)
}

/// The answer to an append of one record that `log` and `position` describe, and that was appended with others.
pub(crate) fn record_response(
    log: Option<&LogAppended>,
    position: Option<Position>,
    appended: &Appended,
    epoch: RecoveryEpoch,
) -> v1::AppendResponse {
    v1::AppendResponse {
        lsn: log.map(|log| log.first_lsn.get()),
        timestamp_us: log.map_or(0, |log| log.timestamp.micros()),
        durable_lsn: appended.durable_lsns.first().map(|lsn| lsn.get()),
        durability: proto_durability(appended.durability).into(),
        deduplicated: log.is_some_and(|log| log.deduplicated),
        position: position.map(Position::get),
        recovery_epoch: epoch.get(),
        log_id: log.map_or(0, |log| log.log_id.get()),
        replicated_lsn: appended.replicated_lsns.first().map(|lsn| lsn.get()),
    }
}

/// The answer to a batch over `names`, in the order of the request.
pub(crate) fn append_batch_response(
    names: &[LogName],
    appended: &Appended,
    epoch: RecoveryEpoch,
) -> v1::AppendBatchResponse {
    let appends = names
        .iter()
        .zip(&appended.appends)
        .zip(&appended.durable_lsns)
        .enumerate()
        .map(|(index, ((name, log), durable))| v1::LogAppend {
            log: name.as_str().to_owned(),
            first_lsn: Some(log.first_lsn.get()),
            next_lsn: Some(log.next_lsn.get()),
            timestamp_us: log.arrival.micros(),
            durable_lsn: Some(durable.get()),
            deduplicated: log.deduplicated,
            log_id: log.log_id.get(),
            replicated_lsn: appended.replicated_lsns.get(index).map(|lsn| lsn.get()),
        })
        .collect();
    v1::AppendBatchResponse {
        appends,
        durability: proto_durability(appended.durability).into(),
        position: appended.position.map(Position::get),
        recovery_epoch: epoch.get(),
    }
}

/// A durability as the contract has it.
pub(crate) fn proto_durability(level: Durability) -> v1::Durability {
    match level {
        Durability::Accepted => v1::Durability::Accepted,
        Durability::Written => v1::Durability::Written,
        Durability::Durable => v1::Durability::Durable,
        Durability::Replicated => v1::Durability::Replicated,
    }
}

/// The answer to a read: the page's batches as one, cut below the limit of a response.
pub(crate) fn read_response(
    page: &Page,
    view: v1::RecordView,
    epoch: RecoveryEpoch,
) -> Result<v1::ReadResponse, Status> {
    let mut merged = merge(&page.batches, view)?;
    // The page is one log without a hole, so it merges into one batch, or none.
    let mut batch = (!merged.is_empty()).then(|| merged.swap_remove(0));
    let mut next_lsn = page.next_lsn;
    if let Some(batch) = &mut batch {
        let fitting = fitting_records(&batch.records);
        if fitting < batch.records.len() {
            batch.records.truncate(fitting);
            next_lsn =
                Lsn::new(batch.first_lsn.unwrap_or_default()).advance(count(batch.records.len()));
        }
    }
    Ok(v1::ReadResponse {
        batch,
        next_lsn: Some(next_lsn.get()),
        tail_lsn: Some(page.tail_lsn.get()),
        durable_lsn: Some(page.durable_lsn.get()),
        first_lsn: Some(page.first_lsn.get()),
        recovery_epoch: epoch.get(),
        replicated_lsn: page.replicated_lsn.map(Lsn::get),
    })
}

/// Number of the records that fit into one response; at least one.
fn fitting_records(records: &[v1::Record]) -> usize {
    let mut bytes = RESPONSE_OVERHEAD_BYTES;
    for (index, record) in records.iter().enumerate() {
        // Tag and length take at most six bytes.
        bytes += record.encoded_len() + 6;
        if bytes > MAX_RESPONSE_BYTES && index > 0 {
            return index;
        }
    }
    records.len()
}

/// One message of a scan.
pub(crate) fn scan_response(
    chunk: ScanChunk,
    view: v1::RecordView,
    epoch: RecoveryEpoch,
) -> Result<Encoded, Status> {
    let mut message = scan_batches(&chunk.batches, view)?;
    let rest = v1::ScanResponse {
        batches: Vec::new(),
        gaps: chunk.gaps.into_iter().map(gap).collect(),
        caught_up: chunk.caught_up,
        cursor: chunk.cursor,
        tail_lsn: chunk.tail_lsn.map(Lsn::get),
        durable_lsn: chunk.durable_lsn.map(Lsn::get),
        recovery_epoch: epoch.get(),
        replicated_lsn: chunk.replicated_lsn.map(Lsn::get),
    };
    message.push(rest.encode_to_vec());
    Ok(message)
}

/// The batches of a message of a scan, and nothing else of it.
fn scan_batches(batches: &[StoredBatch], view: v1::RecordView) -> Result<Encoded, Status> {
    match view {
        v1::RecordView::Text => Ok(Encoded::from(&v1::ScanResponse {
            batches: merge(batches, view)?,
            ..v1::ScanResponse::default()
        })),
        _ => stored::batches(batches),
    }
}

fn gap(gap: Gap) -> v1::Gap {
    let reason = match gap.reason {
        GapReason::Trimmed => v1::GapReason::Trimmed,
        GapReason::Expired => v1::GapReason::Expired,
        GapReason::Quarantined => v1::GapReason::Quarantined,
        GapReason::Lost => v1::GapReason::Lost,
        GapReason::Deleted => v1::GapReason::Deleted,
    };
    v1::Gap {
        log: gap.log.map(|log| log.to_string()).unwrap_or_default(),
        from_lsn: gap.from.map(Lsn::get),
        to_lsn: gap.to.map(Lsn::get),
        reason: reason.into(),
    }
}

/// Stored batches as they are sent. Consecutive batches of one log become one.
///
/// A record without a time of its own has its batch's. Where batches with different
/// arrivals become one, the later ones' records get their time written down.
fn merge(stored: &[StoredBatch], view: v1::RecordView) -> Result<Vec<v1::RecordBatch>, Status> {
    let mut merged: Vec<v1::RecordBatch> = Vec::new();
    for batch in stored {
        let mut records = decode(batch)?;
        if view == v1::RecordView::Text {
            show_as_text(&mut records, batch);
        }
        match merged.last_mut() {
            Some(last) if continues(last, batch) => {
                if last.timestamp_us != batch.arrival.micros() {
                    for record in records.iter_mut().filter(|r| r.timestamp_us == 0) {
                        record.timestamp_us = batch.arrival.micros();
                    }
                }
                last.records.append(&mut records);
            }
            _ => merged.push(v1::RecordBatch {
                log: batch.log.as_str().to_owned(),
                first_lsn: Some(batch.first_lsn.get()),
                records,
                timestamp_us: batch.arrival.micros(),
                log_id: batch.log_id.get(),
            }),
        }
    }
    Ok(merged)
}

fn continues(last: &v1::RecordBatch, batch: &StoredBatch) -> bool {
    last.log_id == batch.log_id.get()
        && last.first_lsn.unwrap_or_default() + count(last.records.len()) == batch.first_lsn.get()
}

fn count(records: usize) -> u64 {
    u64::try_from(records).unwrap_or(u64::MAX)
}

/// The body is `RecordBatch.records` as it was encoded when it was appended; its checksum
/// held, so that one which does not decode means damage that the checksum missed.
pub(crate) fn decode(batch: &StoredBatch) -> Result<Vec<v1::Record>, Status> {
    v1::RecordBatch::decode(batch.body.clone())
        .ok()
        .map(|decoded| decoded.records)
        .filter(|records| count(records.len()) == u64::from(batch.count))
        .ok_or_else(|| does_not_decode(batch))
}

fn does_not_decode(batch: &StoredBatch) -> Status {
    status::read(&wald_storage::ReadError::Quarantined {
        log: batch.log.clone(),
        from: batch.first_lsn,
        to: Some(batch.next_lsn()),
    })
}

fn show_as_text(records: &mut [v1::Record], batch: &StoredBatch) {
    for (index, record) in records.iter_mut().enumerate() {
        record.lsn = Some(batch.first_lsn.advance(count(index)).get());
        let time = match record.timestamp_us {
            0 => batch.arrival,
            own => Timestamp::from_micros(own),
        };
        record.time = rfc3339(time);
        if let Some(v1::record::Payload::Data(data)) = &record.payload
            && let Ok(text) = std::str::from_utf8(data)
        {
            record.payload = Some(v1::record::Payload::Text(text.to_owned()));
        }
    }
}

/// RFC 3339 in UTC with microseconds; empty for a time outside the years it can say.
pub(crate) fn rfc3339(time: Timestamp) -> String {
    jiff::Timestamp::from_microsecond(time.micros())
        .map(|time| time.strftime("%Y-%m-%dT%H:%M:%S%.6fZ").to_string())
        .unwrap_or_default()
}

/// The state of a log.
pub(crate) fn tail_response(stat: &LogStat, epoch: RecoveryEpoch) -> v1::GetTailResponse {
    v1::GetTailResponse {
        first_lsn: Some(stat.info.first_lsn.get()),
        tail_lsn: Some(stat.info.tail_lsn.get()),
        durable_lsn: Some(stat.info.durable_lsn.get()),
        writer_epoch: Some(stat.info.writer_epoch),
        recovery_epoch: epoch.get(),
        log_id: stat.info.log_id.get(),
        survived_position: stat.survived_position.map(Position::get),
        replicated_lsn: stat.info.replicated_lsn.map(Lsn::get),
    }
}

/// A log whose older writers are shut out.
pub(crate) fn fence_response(fenced: &Fenced) -> v1::FenceResponse {
    v1::FenceResponse {
        tail_lsn: Some(fenced.tail_lsn.get()),
        writer_epoch: Some(fenced.writer_epoch),
        log_id: fenced.log_id.get(),
    }
}

/// A cursor of the log `log`.
pub(crate) fn cursor(log: &LogName, cursor: &NamedCursor) -> v1::Cursor {
    v1::Cursor {
        log: log.as_str().to_owned(),
        name: cursor.name.as_str().to_owned(),
        lsn: Some(cursor.lsn.get()),
        log_id: cursor.log_id.get(),
        update_time: Some(proto_timestamp(cursor.update_time)),
    }
}

/// A producer as administration shows it.
pub(crate) fn log_producer(info: &ProducerInfo) -> v1::LogProducer {
    v1::LogProducer {
        id: info.id.as_str().to_owned(),
        epoch: Some(info.epoch),
        next_sequence: Some(info.next_sequence),
        last_append_time: Some(proto_timestamp(info.last_append)),
    }
}

/// A log as administration shows it.
pub(crate) fn log(info: &LogInfo) -> v1::Log {
    v1::Log {
        name: info.name.as_str().to_owned(),
        log_id: info.log_id.get(),
        config: Some(super::settings::proto_log_config(&info.config)),
        first_lsn: Some(info.first_lsn.get()),
        tail_lsn: Some(info.tail_lsn.get()),
        durable_lsn: Some(info.durable_lsn.get()),
        writer_epoch: Some(info.writer_epoch),
        stored_bytes: info.stored_bytes,
        create_time: Some(proto_timestamp(info.create_time)),
        update_time: Some(proto_timestamp(info.update_time)),
        first_producer_epoch: info.first_producer_epoch,
        replicated_lsn: info.replicated_lsn.map(Lsn::get),
    }
}

/// Limits that are not of one request.
#[derive(Debug, Clone)]
pub(crate) struct ServerLimits {
    /// Maximum time by which a record's time may be ahead of the clock.
    pub(crate) max_timestamp_ahead: std::time::Duration,
    /// Batches of a producer whose repeats are recognised.
    pub(crate) producer_window: u64,
    /// Producers of one log.
    pub(crate) max_producers_per_log: u64,
    /// Cursors of one log.
    pub(crate) max_cursors_per_log: u64,
    /// Maximum bytes that a session may have under way.
    pub(crate) session_window_bytes: u64,
    /// Age at which an idle producer is forgotten; 0 = never.
    pub(crate) producer_max_idle: std::time::Duration,
}

/// Bounds of requests and logs.
pub(crate) fn server_limits(limits: &Limits, server: &ServerLimits) -> v1::ServerLimits {
    v1::ServerLimits {
        max_record_bytes: limits.max_record_bytes.into(),
        max_request_records: limits.max_batch_records,
        max_request_bytes: limits.max_batch_bytes.into(),
        max_log_name_bytes: u32::try_from(wald_storage::MAX_LOG_NAME_BYTES).unwrap_or(u32::MAX),
        max_headers: limits.max_headers,
        max_headers_bytes: limits.max_header_bytes,
        max_response_bytes: count(MAX_RESPONSE_BYTES),
        max_timestamp_ahead: Some(proto_duration(server.max_timestamp_ahead)),
        producer_window: u32::try_from(server.producer_window).unwrap_or(u32::MAX),
        max_producers_per_log: server.max_producers_per_log,
        max_cursors_per_log: server.max_cursors_per_log,
        session_window_bytes: server.session_window_bytes,
        producer_max_idle: Some(proto_duration(server.producer_max_idle)),
    }
}

/// Segment files.
pub(crate) fn segments(all: &[SegmentInfo]) -> Vec<v1::Segment> {
    all.iter().map(segment).collect()
}

fn segment(segment: &SegmentInfo) -> v1::Segment {
    let contents = |what: fn(SegmentContents) -> u64| segment.contents.map_or(0, what);
    v1::Segment {
        segment_id: segment.id,
        kind: match segment.sorted {
            Some(_) => v1::SegmentKind::Sorted,
            None => v1::SegmentKind::Journal,
        }
        .into(),
        state: match (segment.damaged, segment.sealed) {
            (true, _) => v1::SegmentState::Damaged,
            (false, true) => v1::SegmentState::Sealed,
            (false, false) => v1::SegmentState::Active,
        }
        .into(),
        base_position: Some(segment.base.get()),
        end_position: Some(segment.end.get()),
        file_bytes: segment.bytes,
        live_bytes: contents(|contents| contents.live_bytes.unwrap_or(0)),
        record_count: contents(|contents| contents.records),
        log_count: contents(|contents| contents.logs),
        seal_time: segment
            .contents
            .and_then(|contents| contents.left)
            .map(proto_timestamp),
        first_segment_id: segment.sorted.map(|(first, _)| first),
        last_segment_id: segment.sorted.map(|(_, last)| last),
    }
}

/// Progress of a verification.
pub(crate) fn verify_response(progress: &VerifyProgress, done: bool) -> v1::VerifyResponse {
    v1::VerifyResponse {
        checked_bytes: progress.checked_bytes,
        total_bytes: progress.total_bytes.max(progress.checked_bytes),
        findings: progress.findings.iter().map(finding).collect(),
        done,
    }
}

fn finding(finding: &Finding) -> v1::Finding {
    let kind = match finding.kind {
        FindingKind::Checksum => v1::FindingKind::Checksum,
        FindingKind::Chain => v1::FindingKind::Chain,
        FindingKind::Index => v1::FindingKind::Index,
        FindingKind::Digest => v1::FindingKind::Digest,
        FindingKind::Missing => v1::FindingKind::Missing,
        FindingKind::Unowned => v1::FindingKind::Unowned,
    };
    let severity = match finding.severity {
        Severity::Note => v1::FindingSeverity::Note,
        Severity::Damage => v1::FindingSeverity::Damage,
        Severity::Loss => v1::FindingSeverity::Loss,
    };
    v1::Finding {
        kind: kind.into(),
        segment_id: finding.segment,
        from_position: finding.positions.map(|(from, _)| from.get()),
        to_position: finding.positions.map(|(_, to)| to.get()),
        log: finding
            .log
            .as_ref()
            .map_or_else(String::new, |log| log.as_str().to_owned()),
        from_lsn: finding.lsns.map(|(from, _)| from.get()),
        to_lsn: finding.lsns.map(|(_, to)| to.get()),
        detail: finding.detail.clone(),
        file: finding.file.clone().unwrap_or_default(),
        severity: severity.into(),
        advice: finding.advice.to_owned(),
        log_id: finding.log_id.map_or(0, wald_storage::LogId::get),
    }
}

/// Summary of the known damage; `None` if there is none.
pub(crate) fn damage_summary(now: &Statistics) -> Option<v1::DamageSummary> {
    let some = now.quarantined_records > 0
        || now.damaged_logs > 0
        || now.unattributed_damages > 0
        || !now.held_back.is_empty();
    some.then_some(v1::DamageSummary {
        quarantined_records: now.quarantined_records,
        log_count: now.damaged_logs,
        unattributed_count: now.unattributed_damages,
        held_back: now.held_back.clone(),
    })
}

/// A time for administrative fields.
pub(crate) fn proto_timestamp(time: Timestamp) -> prost_types::Timestamp {
    let micros = time.micros();
    prost_types::Timestamp {
        seconds: micros.div_euclid(1_000_000),
        nanos: i32::try_from(micros.rem_euclid(1_000_000) * 1000).unwrap_or(0),
    }
}

/// A span; one that is too long for the wire is the longest.
pub(crate) fn proto_duration(span: std::time::Duration) -> prost_types::Duration {
    span.try_into().unwrap_or(prost_types::Duration {
        seconds: i64::MAX,
        nanos: 0,
    })
}

/// A store's identity in the form that people know.
pub(crate) fn uuid(id: u128) -> String {
    let hex = format!("{id:032x}");
    [
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..],
    ]
    .join("-")
}
