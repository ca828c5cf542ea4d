//! proto <-> domain: the one place where the two vocabularies meet.
//!
//! Payloads are never copied here: prost decodes them to slices of the request's buffer,
//! and stored bodies are decoded to slices of the engine's. Only the TEXT view copies,
//! because text has to be checked and owned.
//!
//! A field of the contract that this version does not support is refused by name
//! ([`status::not_supported`]), never ignored. Requests may have output-only fields, which are
//! ignored, so that the records that a scan printed can be appended again.

mod answer;
mod backup;
mod caller;
pub(crate) mod intake;
#[cfg(feature = "object")]
mod replica;
mod settings;

use std::fmt;
use std::time::Duration;

use wald_proto::v1::{self, Reason};
use wald_storage::{
    CursorCommit, Durability, Guard, Header, LogId, LogName, LogTarget, Lsn, Name, Producer,
    ReadRequest, ReadStart, Record, ScanRequest, ScanStart, Selector, SyncTarget, Timestamp,
    Visibility,
};

use tonic::Status;

use crate::status::{self, Access};

pub(crate) use answer::rfc3339;
pub(crate) use answer::{
    MAX_RESPONSE_BYTES, ServerLimits, SessionAck, append_batch_response, append_response, cursor,
    damage_summary, decode, fence_response, log, log_producer, proto_duration, proto_timestamp,
    read_response, record_response, scan_response, segments, server_limits, tail_response, uuid,
    verify_response,
};
pub(crate) use backup::{backup_chunk, backup_manifest, kept_manifest, proto_manifest};
pub(crate) use caller::{caller, protection};
pub(crate) use intake::{SessionRequest, append, append_batch};
#[cfg(feature = "object")]
pub(crate) use replica::replica_status;
pub(crate) use settings::{
    engine_kind, log_config, log_config_change, proto_retention, proto_sync_mode, sync_modes,
};

/// Records of a page when the request does not say.
const DEFAULT_READ_RECORDS: u32 = 100;
/// Most records of a page. A decoded one takes about 120 bytes, also if it is empty.
const MOST_READ_RECORDS: u32 = 10_000;
/// Entries of a list when the request does not say, and at most.
const DEFAULT_PAGE: usize = 100;
const MAX_PAGE: usize = 1000;
/// Bytes of bodies asked of the engine for one message of a scan. Large enough that the
/// cost of a message does not count.
const SCAN_CHUNK_BYTES: u32 = 256 << 10;
/// Chunk size for the TEXT view, where each record grows by its lsn and its time: even empty
/// records stay below the limit of a response.
const TEXT_CHUNK_BYTES: u32 = 32 << 10;

/// A log's name in the field `field`; the field's name is written out only for an error.
pub(crate) fn log_name(
    field: fmt::Arguments<'_>,
    name: &str,
    access: Access,
) -> Result<LogName, Status> {
    LogName::new(name).map_err(|error| status::invalid_log_name(&field.to_string(), error, access))
}

/// A log by name, and by identity if it was given.
pub(crate) fn target(name: &str, log_id: Option<u64>, access: Access) -> Result<LogTarget, Status> {
    Ok(LogTarget {
        name: log_name(format_args!("log"), name, access)?,
        log_id: log_id.map(LogId::new),
    })
}

fn record(record: v1::Record) -> Record {
    let v1::Record {
        payload,
        headers,
        timestamp_us,
        crc32c,
        lsn: _,
        time: _,
    } = record;
    Record {
        data: match payload {
            Some(v1::record::Payload::Data(data)) => data,
            Some(v1::record::Payload::Text(text)) => text.into(),
            None => bytes::Bytes::new(),
        },
        headers: headers
            .into_iter()
            .map(|header| Header {
                key: header.key,
                value: header.value,
            })
            .collect(),
        timestamp: (timestamp_us != 0).then(|| Timestamp::from_micros(timestamp_us)),
        crc32c,
    }
}

fn condition(
    field: fmt::Arguments<'_>,
    condition: Option<v1::AppendCondition>,
) -> Result<(Guard, Option<Producer>), Status> {
    let v1::AppendCondition {
        expected_lsn,
        must_exist,
        must_not_exist,
        writer_epoch,
        producer,
        log_id,
    } = condition.unwrap_or_default();
    let guard = Guard {
        expected_lsn: expected_lsn.map(Lsn::new),
        must_exist,
        must_not_exist,
        log_id: log_id.map(LogId::new),
        writer_epoch,
    };
    let producer = match producer {
        Some(producer) => Some(Producer {
            id: Name::new(&producer.id).map_err(|error| {
                status::invalid_producer(&format!("{field}.producer.id"), error)
            })?,
            epoch: producer.epoch,
            sequence: producer.sequence,
        }),
        None => None,
    };
    Ok((guard, producer))
}

/// A cursor's name in the field `field`.
pub(crate) fn cursor_name(
    field: fmt::Arguments<'_>,
    name: &str,
    access: Access,
) -> Result<Name, Status> {
    Name::new(name).map_err(|error| status::invalid_cursor_name(&field.to_string(), error, access))
}

/// The id of a producer to forget.
pub(crate) fn producer_id(id: &str) -> Result<Name, Status> {
    Name::new(id).map_err(|error| status::invalid_producer("producer_id", error))
}

/// A cursor to be moved, from the message in the field `field`.
pub(crate) fn cursor_commit(
    field: fmt::Arguments<'_>,
    commit: v1::CursorCommit,
) -> Result<CursorCommit, Status> {
    let v1::CursorCommit {
        log,
        cursor,
        lsn,
        expected_lsn,
        log_id,
    } = commit;
    Ok(CursorCommit {
        log: log_name(format_args!("{field}.log"), &log, Access::Write)?,
        cursor: cursor_name(format_args!("{field}.cursor"), &cursor, Access::Write)?,
        lsn: Lsn::new(lsn),
        expected_lsn: expected_lsn.map(Lsn::new),
        log_id: log_id.map(LogId::new),
    })
}

/// An enum number that this version does not know is a newer client's: refused by name.
fn durability(number: i32) -> Result<Option<Durability>, Status> {
    match v1::Durability::try_from(number) {
        Ok(v1::Durability::Unspecified) => Ok(None),
        Ok(v1::Durability::Accepted) => Ok(Some(Durability::Accepted)),
        Ok(v1::Durability::Written) => Ok(Some(Durability::Written)),
        Ok(v1::Durability::Durable) => Ok(Some(Durability::Durable)),
        Ok(v1::Durability::Replicated) => Ok(Some(Durability::Replicated)),
        Err(_) => Err(status::not_supported_value(
            "durability",
            number,
            Access::Write,
        )),
    }
}

/// Which records to see.
pub(crate) fn visibility(number: i32) -> Result<Option<Visibility>, Status> {
    match v1::Visibility::try_from(number) {
        Ok(v1::Visibility::Unspecified) => Ok(None),
        Ok(v1::Visibility::Durable) => Ok(Some(Visibility::Durable)),
        Ok(v1::Visibility::Written) => Ok(Some(Visibility::Written)),
        Ok(v1::Visibility::Accepted) => Ok(Some(Visibility::Accepted)),
        Ok(v1::Visibility::Replicated) => Ok(Some(Visibility::Replicated)),
        Err(_) => Err(status::not_supported_value(
            "visibility",
            number,
            Access::Read,
        )),
    }
}

/// The visibility of a read. Only replicated records can be read at any node.
fn visibility_at(number: i32, any_node: bool) -> Result<Option<Visibility>, Status> {
    match visibility(number)? {
        None if any_node => Ok(Some(Visibility::Replicated)),
        Some(lower) if any_node && lower != Visibility::Replicated => {
            let what = "a visibility below REPLICATED, which other nodes do not have,";
            Err(status::not_supported_value("any_node", what, Access::Read))
        }
        seen => Ok(seen),
    }
}

/// In which form to answer.
pub(crate) fn view(number: i32) -> Result<v1::RecordView, Status> {
    v1::RecordView::try_from(number)
        .map_err(|_| status::not_supported_value("view", number, Access::Read))
}

/// Target of a barrier.
pub(crate) fn sync_target(number: i32) -> Result<SyncTarget, Status> {
    match v1::SyncTarget::try_from(number) {
        Ok(v1::SyncTarget::Unspecified | v1::SyncTarget::Device) => Ok(SyncTarget::Device),
        Ok(v1::SyncTarget::Os) => Ok(SyncTarget::Os),
        Ok(v1::SyncTarget::Replicated) => Ok(SyncTarget::Replica),
        Err(_) => Err(status::not_supported_value("target", number, Access::Write)),
    }
}

/// A page, the form of its records, and how long to wait for a first one.
pub(crate) fn read(
    request: &v1::ReadRequest,
) -> Result<(ReadRequest, v1::RecordView, Duration), Status> {
    use v1::read_request::Start;
    let start = match request.start {
        None => ReadStart::First,
        Some(Start::Lsn(lsn)) => ReadStart::Lsn(Lsn::new(lsn)),
        Some(Start::TimestampUs(micros)) => ReadStart::Time(Timestamp::from_micros(micros)),
        Some(Start::TailOffset(count)) => ReadStart::TailOffset(count),
    };
    let most = u32::try_from(MAX_RESPONSE_BYTES).unwrap_or(u32::MAX);
    let domain = ReadRequest {
        log: target(&request.log, request.log_id, Access::Read)?,
        start,
        max_records: match request.max_records {
            0 => DEFAULT_READ_RECORDS,
            given => given.min(MOST_READ_RECORDS),
        },
        max_bytes: match request.max_bytes {
            0 => most,
            given => given.min(most),
        },
        visibility: visibility_at(request.visibility, request.any_node)?,
    };
    // A negative wait is no wait.
    let wait = request
        .wait
        .and_then(|wait| Duration::try_from(wait).ok())
        .unwrap_or_default();
    Ok((domain, view(request.view)?, wait))
}

/// A scan and the form of its records.
pub(crate) fn scan(request: v1::ScanRequest) -> Result<(ScanRequest, v1::RecordView), Status> {
    use v1::scan_request::{Selector as Selected, Start};
    let view = view(request.view)?;
    let invalid = |field: &str, why: &str| {
        status::invalid_field(Reason::InvalidScan, field, why, Access::Read)
    };
    let selector = match request.selector {
        Some(Selected::Log(name)) => Selector::Log(target(&name, request.log_id, Access::Read)?),
        Some(Selected::Prefix(_) | Selected::All(_)) if request.log_id.is_some() => {
            return Err(invalid("log_id", "goes with one log only"));
        }
        Some(Selected::Prefix(prefix)) => Selector::Prefix(prefix),
        Some(Selected::All(v1::AllLogs {})) => Selector::All,
        None => return Err(invalid("selector", "give log, prefix or all")),
    };
    let start = match request.start {
        None => ScanStart::First,
        Some(Start::Lsn(lsn)) => ScanStart::Lsn(Lsn::new(lsn)),
        Some(Start::TimestampUs(micros)) => ScanStart::Time(Timestamp::from_micros(micros)),
        Some(Start::TailOffset(count)) => ScanStart::TailOffset(count),
        Some(Start::Cursor(cursor)) => ScanStart::Cursor(cursor),
    };
    let domain = ScanRequest {
        selector,
        start,
        until_lsn: request.until_lsn.map(Lsn::new),
        max_records: request.max_records,
        follow: request.follow,
        visibility: visibility_at(request.visibility, request.any_node)?,
        chunk_bytes: match view {
            v1::RecordView::Unspecified => SCAN_CHUNK_BYTES,
            v1::RecordView::Text => TEXT_CHUNK_BYTES,
        },
    };
    Ok((domain, view))
}

/// Number of entries on a page of a list.
pub(crate) fn page_size(asked: u32) -> usize {
    match usize::try_from(asked) {
        Ok(0) => DEFAULT_PAGE,
        Ok(asked) => asked.min(MAX_PAGE),
        Err(_) => MAX_PAGE,
    }
}

/// The token that continues a list after `last`. Opaque on purpose: hexadecimal, so that
/// nobody is tempted to build one.
pub(crate) fn page_token(last: &str) -> String {
    last.bytes().map(|byte| format!("{byte:02x}")).collect()
}

/// Cuts a list to one page, and returns the token of the next page: the name of the last entry, or nothing if `found`
/// does not exceed the page.
pub(crate) fn cut_to_page<T>(
    found: &mut Vec<T>,
    size: usize,
    name: impl FnOnce(&T) -> String,
) -> String {
    let more = found.len() > size;
    found.truncate(size);
    let last = found.last().filter(|_| more);
    last.map_or_else(String::new, |last| page_token(&name(last)))
}

/// The name that a token was made from; `None` for the first page.
pub(crate) fn parse_page_token(token: &str) -> Result<Option<String>, Status> {
    if token.is_empty() {
        return Ok(None);
    }
    let bytes: Option<Vec<u8>> = token
        .as_bytes()
        .chunks(2)
        .map(|pair| {
            let digits = std::str::from_utf8(pair).ok()?;
            (pair.len() == 2)
                .then(|| u8::from_str_radix(digits, 16).ok())
                .flatten()
        })
        .collect();
    bytes
        .and_then(|bytes| String::from_utf8(bytes).ok())
        .map(Some)
        .ok_or_else(|| {
            status::invalid_field(
                Reason::InvalidPageToken,
                "page_token",
                "use next_page_token of the page before, unchanged",
                Access::Read,
            )
        })
}

#[cfg(test)]
mod tests;
