//! Decoding of appends.
//!
//! Hand-written code reads them, because a decoded batch would have an object for each record. Only the fields
//! around the records are read here. The records stay in the bytes that arrived, which are also the bytes that are
//! stored. prost reads the rare parts: conditions, checks, cursors, and records whose encoding is not the stored one.

use std::ops::Range;

use bytes::Bytes;
use prost::Message;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
use tonic::Status;
use wald_proto::codec::Sent;
use wald_proto::v1;
use wald_storage::{
    AppendError, Batch, Durability, Guard, InvalidBatch, Limits, LogCheck, LogId, LogName,
    LogRecords, Lsn, OneOrMore, Records,
};

use super::{condition, cursor_commit, durability, log_name, record};
use crate::status::{self, Access};

/// One record to append, as a batch of one.
pub(crate) fn append(
    request: &Sent<v1::AppendRequest>,
    limits: &Limits,
) -> Result<(Batch, Option<Durability>), Status> {
    let message = &request.bytes;
    // The first fields of the two messages are the same ones.
    let part = LogPart::of(message).ok_or_else(|| undecodable::<v1::AppendRequest>(message))?;
    let mut level = 0;
    for field in fields(message).flatten() {
        match (field.number, field.value) {
            (4, FieldValue::Number(number)) => level = enumeration(number),
            (4, _) => return Err(undecodable::<v1::AppendRequest>(message)),
            _ => {}
        }
    }
    let durability = durability(level)?;
    let (guard, producer) = condition(format_args!("condition"), part.condition)?;
    let log = log_name(format_args!("log"), part.log, Access::Write)?;
    let taken = match part.records {
        RecordPlaces::Together(range) if part.count == 1 => {
            Records::of_encoded(message.slice(range))
        }
        _ => None,
    };
    let records = match taken {
        Some(records) => records,
        None => {
            // Several parts are one record.
            let parts = record_fields(message).map(|(_, range)| (0, range));
            check_headers(message, parts, &log, limits)?;
            let request: v1::AppendRequest = decoded(message)?;
            std::iter::once(record(request.record.unwrap_or_default())).collect()
        }
    };
    let mut batch = Batch::from(vec![LogRecords {
        log,
        records,
        guard,
        producer,
    }]);
    batch.single = true;
    Ok((batch, durability))
}

/// Records of several logs, with conditions. A message with too many records is refused by
/// their number, before it is decoded: decoding takes up to 60 times the memory of the message.
pub(crate) fn append_batch(
    request: &Sent<v1::AppendBatchRequest>,
    limits: &Limits,
) -> Result<(Batch, Option<Durability>), Status> {
    let message = &request.bytes;
    let parts = BatchParts::of(message, limits.max_batch_records as usize);
    let parts = parts.ok_or_else(|| undecodable::<v1::AppendBatchRequest>(message))?;
    // Each log needs a record at least.
    let [batches, checks, cursors] = parts.numbers;
    for (what, count) in [
        ("batches", batches),
        ("checks", checks),
        ("cursors", cursors),
    ] {
        limits.check_number(what, count).map_err(invalid)?;
    }
    let durability = durability(parts.durability)?;
    let mut batch = Batch::from(Vec::with_capacity(parts.batches.len()));
    batch.checks.reserve(parts.checks.len());
    batch.cursors.reserve(parts.cursors.len());
    let mut records = 0;
    for (index, range) in parts.batches.iter().enumerate() {
        let part = message.slice(range.clone());
        let read = LogPart::of(&part).ok_or_else(|| undecodable::<v1::LogBatch>(&part))?;
        records += read.count;
        if records > u64::from(limits.max_batch_records) {
            let later = parts.batches.iter().skip(index + 1);
            let later =
                later.filter_map(|range| Some(LogPart::of(&message.slice(range.clone()))?.count));
            return Err(invalid(InvalidBatch::RequestTooLarge {
                records: records + later.sum::<u64>(),
                bytes: message.len() as u64,
                max_records: limits.max_batch_records.into(),
                max_bytes: limits.max_batch_bytes.into(),
            }));
        }
        batch.logs.push(log_records(index, &part, read, limits)?);
    }
    let undecodable = |_| undecodable::<v1::AppendBatchRequest>(message);
    for (index, range) in parts.checks.into_iter().enumerate() {
        let check = v1::LogCheck::decode(&message[range]).map_err(undecodable)?;
        batch.checks.push(LogCheck {
            log: log_name(
                format_args!("checks[{index}].log"),
                &check.log,
                Access::Write,
            )?,
            guard: Guard {
                expected_lsn: check.expected_lsn.map(Lsn::new),
                must_exist: check.must_exist,
                must_not_exist: check.must_not_exist,
                log_id: check.log_id.map(LogId::new),
                writer_epoch: None,
            },
        });
    }
    for (index, range) in parts.cursors.into_iter().enumerate() {
        let commit = v1::CursorCommit::decode(&message[range]).map_err(undecodable)?;
        let commit = cursor_commit(format_args!("cursors[{index}]"), commit)?;
        batch.cursors.push(commit);
    }
    Ok((batch, durability))
}

/// A request on a session.
pub(crate) struct SessionRequest {
    pub(crate) request_id: u64,
    /// Whether the session goes on if it is refused.
    pub(crate) independent: bool,
    pub(crate) content: SessionContent,
}

/// The content of a request on a session, still encoded.
pub(crate) enum SessionContent {
    Batch(Sent<v1::AppendBatchRequest>),
    /// One record.
    Append(Sent<v1::AppendRequest>),
    /// Both, which no request may have.
    Both,
}

impl SessionRequest {
    /// Reads the fields around the content.
    ///
    /// # Errors
    /// `MALFORMED_REQUEST`.
    pub(crate) fn read(request: &Sent<v1::AppendSessionRequest>) -> Result<Self, Status> {
        let message = &request.bytes;
        let undecodable = || undecodable::<v1::AppendSessionRequest>(message);
        let (mut request_id, mut independent) = (0, false);
        let (mut batch, mut append) = (MessageParts::default(), MessageParts::default());
        for field in fields(message) {
            let field = field.ok_or_else(undecodable)?;
            match (field.number, field.value) {
                (1, FieldValue::Number(number)) => request_id = number,
                (2, FieldValue::Bytes(range)) => {
                    batch.add(message, range).ok_or_else(undecodable)?;
                }
                (3, FieldValue::Number(number)) => independent = number != 0,
                (4, FieldValue::Bytes(range)) => {
                    append.add(message, range).ok_or_else(undecodable)?;
                }
                (1..=4, _) => return Err(undecodable()),
                _ => {}
            }
        }
        let content = match (batch.is_there, append.is_there) {
            (_, false) => SessionContent::Batch(Sent::new(batch.whole())),
            (false, true) => SessionContent::Append(Sent::new(append.whole())),
            (true, true) => SessionContent::Both,
        };
        Ok(Self {
            request_id,
            independent,
            content,
        })
    }

    /// Whether it has one record, not a batch.
    pub(crate) fn is_record(&self) -> bool {
        matches!(self.content, SessionContent::Append(_))
    }

    /// The batch in it.
    ///
    /// # Errors
    /// As [`append`] and [`append_batch`].
    pub(crate) fn batch(&self, limits: &Limits) -> Result<(Batch, Option<Durability>), Status> {
        match &self.content {
            SessionContent::Batch(batch) => append_batch(batch, limits),
            SessionContent::Append(request) => append(request, limits),
            SessionContent::Both => Err(status::malformed(
                "append",
                "a request has either batch or append",
                Access::Write,
            )),
        }
    }
}

/// A message in a field, which may come in several parts: by the rules of the encoding they are one message.
#[derive(Default)]
struct MessageParts {
    is_there: bool,
    first: Bytes,
    /// All parts, if there are several. Joined once: at each part, a message of many would take the square of its
    /// length.
    joined: Vec<u8>,
}

impl MessageParts {
    /// Adds a part. `None`: a part of several is not a whole field sequence.
    fn add(&mut self, message: &Bytes, range: Range<usize>) -> Option<()> {
        self.is_there = true;
        // An empty part adds nothing, and there may be millions of them.
        if range.is_empty() {
            return Some(());
        }
        if self.first.is_empty() {
            self.first = message.slice(range);
            return Some(());
        }
        // No field begins in one part and ends in the next.
        let first = if self.joined.is_empty() {
            &self.first[..]
        } else {
            &[]
        };
        for part in [first, &message[range]] {
            if fields(part).any(|field| field.is_none()) {
                return None;
            }
            self.joined.extend_from_slice(part);
        }
        Some(())
    }

    fn whole(self) -> Bytes {
        match self.joined.is_empty() {
            true => self.first,
            false => self.joined.into(),
        }
    }
}

/// The records of one log of a batch.
fn log_records(
    index: usize,
    message: &Bytes,
    part: LogPart<'_>,
    limits: &Limits,
) -> Result<LogRecords, Status> {
    let field = format_args!("batches[{index}].condition");
    let (guard, producer) = condition(field, part.condition)?;
    let field = format_args!("batches[{index}].log");
    let log = log_name(field, part.log, Access::Write)?;
    let taken = match part.records {
        RecordPlaces::None => Some(Records::default()),
        RecordPlaces::Together(range) => Records::of_encoded(message.slice(range)),
        RecordPlaces::Apart => None,
    };
    let records = match taken {
        Some(records) => records,
        None => {
            check_headers(message, record_fields(message), &log, limits)?;
            let batch: v1::LogBatch = decoded(message)?;
            batch.records.into_iter().map(record).collect()
        }
    };
    Ok(LogRecords {
        log,
        records,
        guard,
        producer,
    })
}

/// Indexes and places of the records in a message whose field 2 they are.
fn record_fields(message: &[u8]) -> impl Iterator<Item = (usize, Range<usize>)> {
    let records = fields(message).flatten().filter_map(|field| match field {
        Field {
            number: 2,
            value: FieldValue::Bytes(range),
            ..
        } => Some(range),
        _ => None,
    });
    records.enumerate()
}

/// Refuses records with too many headers before they are decoded: an empty header takes two bytes in the message, and
/// 56 in memory. Parts with one index belong to one record.
fn check_headers(
    message: &[u8],
    records: impl Iterator<Item = (usize, Range<usize>)>,
    log: &LogName,
    limits: &Limits,
) -> Result<(), Status> {
    let (mut last, mut headers, mut bytes) = (None, 0, 0);
    for (index, range) in records {
        if last != Some(index) {
            (last, headers, bytes) = (Some(index), 0, 0);
        }
        let record = &message[range];
        for field in fields(record).flatten() {
            if let (2, FieldValue::Bytes(header)) = (field.number, field.value) {
                headers += 1;
                bytes += header_bytes(&record[header]);
            }
        }
        if headers > limits.max_headers as usize {
            return Err(invalid(InvalidBatch::HeadersTooLarge {
                log: log.clone(),
                index,
                headers,
                bytes,
                max_headers: limits.max_headers,
                max_bytes: limits.max_header_bytes,
            }));
        }
    }
    Ok(())
}

/// Bytes of the key and the value of a header.
fn header_bytes(header: &[u8]) -> u64 {
    let parts = fields(header).flatten().map(|field| match field.value {
        FieldValue::Bytes(range) => range.len() as u64,
        _ => 0,
    });
    parts.sum()
}

/// A message as prost reads it.
fn decoded<M: Message + Default>(message: &Bytes) -> Result<M, Status> {
    M::decode(message.clone()).map_err(|error| status::malformed("request", error, Access::Write))
}

fn invalid(batch: InvalidBatch) -> Status {
    status::append(&AppendError::Invalid(batch))
}

/// Maximum length of a message that prost reads again to explain the fault. prost makes an
/// object of each record before it reaches the fault.
const WORTH_ASKING: usize = 64 << 10;

/// Explains in prost's words why a message cannot be read.
fn undecodable<M: Message + Default>(message: &Bytes) -> Status {
    let said = (message.len() <= WORTH_ASKING).then(|| M::decode(message.clone()).err());
    let said = said.flatten();
    match said {
        Some(error) => status::malformed("request", error, Access::Write),
        None => status::malformed(
            "request",
            "failed to decode Protobuf message",
            Access::Write,
        ),
    }
}

/// Places of the records in a message.
enum RecordPlaces {
    None,
    /// One behind the other, keys included.
    Together(Range<usize>),
    /// With something between them.
    Apart,
}

/// The fields around the records of one log, in a `LogBatch`.
struct LogPart<'a> {
    log: &'a str,
    records: RecordPlaces,
    /// Number of the records.
    count: u64,
    condition: Option<v1::AppendCondition>,
}

impl<'a> LogPart<'a> {
    /// `None` if the message cannot be read.
    fn of(message: &'a Bytes) -> Option<Self> {
        let mut part = Self {
            log: "",
            records: RecordPlaces::None,
            count: 0,
            condition: None,
        };
        for field in fields(message) {
            let field = field?;
            match (field.number, field.value) {
                (1, FieldValue::Bytes(range)) => {
                    part.log = std::str::from_utf8(&message[range]).ok()?
                }
                (2, FieldValue::Bytes(_)) => {
                    part.count += 1;
                    part.records = match part.records {
                        RecordPlaces::None => RecordPlaces::Together(field.whole),
                        RecordPlaces::Together(before) if before.end == field.whole.start => {
                            RecordPlaces::Together(before.start..field.whole.end)
                        }
                        _ => RecordPlaces::Apart,
                    };
                }
                (3, FieldValue::Bytes(range)) => part
                    .condition
                    .get_or_insert_default()
                    .merge(&message[range])
                    .ok()?,
                (1..=3, _) => return None,
                _ => {}
            }
        }
        Some(part)
    }
}

/// The contents of an `AppendBatchRequest`.
#[derive(Default)]
struct BatchParts {
    /// Numbers of batches, checks and cursors, also of those that are not kept.
    numbers: [usize; 3],
    batches: OneOrMore<Range<usize>>,
    checks: Vec<Range<usize>>,
    durability: i32,
    cursors: Vec<Range<usize>>,
}

impl BatchParts {
    /// Keeps at most `most` of each kind: an empty one takes two bytes in the message. `None` if the message cannot be
    /// read.
    fn of(message: &Bytes, most: usize) -> Option<Self> {
        let mut parts = Self::default();
        let [batches, checks, cursors] = &mut parts.numbers;
        let kept = |number: &mut usize, range| {
            *number += 1;
            (*number <= most).then_some(range)
        };
        for field in fields(message) {
            let field = field?;
            match (field.number, field.value) {
                (1, FieldValue::Bytes(range)) => parts.batches.extend(kept(batches, range)),
                (2, FieldValue::Bytes(range)) => parts.checks.extend(kept(checks, range)),
                (3, FieldValue::Number(number)) => parts.durability = enumeration(number),
                (4, FieldValue::Bytes(range)) => parts.cursors.extend(kept(cursors, range)),
                (1..=4, _) => return None,
                _ => {}
            }
        }
        Some(parts)
    }
}

/// One field of a message.
struct Field {
    number: u32,
    value: FieldValue,
    /// Place of the field in the message, key included.
    whole: Range<usize>,
}

enum FieldValue {
    Number(u64),
    /// Place of the bytes in the message.
    Bytes(Range<usize>),
    /// A value of a type that no field here has.
    Other,
}

/// The fields of a message; the last is `None` where one cannot be read.
fn fields(message: &[u8]) -> impl Iterator<Item = Option<Field>> {
    let mut rest = message;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let field = take_field(message, &mut rest);
        if field.is_none() {
            rest = &[];
        }
        Some(field)
    })
}

#[inline]
fn take_field(message: &[u8], rest: &mut &[u8]) -> Option<Field> {
    let start = message.len() - rest.len();
    let (number, wire_type) = decode_key(rest).ok()?;
    let value = match wire_type {
        WireType::Varint => FieldValue::Number(decode_varint(rest).ok()?),
        WireType::LengthDelimited => {
            let length = usize::try_from(decode_varint(rest).ok()?).ok()?;
            let from = message.len() - rest.len();
            *rest = rest.get(length..)?;
            FieldValue::Bytes(from..from + length)
        }
        _ => {
            skip_field(wire_type, number, rest, DecodeContext::default()).ok()?;
            FieldValue::Other
        }
    };
    let whole = start..message.len() - rest.len();
    Some(Field {
        number,
        value,
        whole,
    })
}

/// An enumeration's number. Excess bits are cut off, as in prost.
fn enumeration(number: u64) -> i32 {
    let [a, b, c, d, ..] = number.to_le_bytes();
    i32::from_le_bytes([a, b, c, d])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_in_very_many_parts_is_joined_once() {
        const PARTS: usize = 500_000;
        // Numbers in a field that no message has.
        let part = [0x38, 0x7a].repeat(1 << 19);
        let mut bytes = vec![0x08, 5, 0x12];
        prost::encoding::encode_varint(part.len() as u64, &mut bytes);
        bytes.extend_from_slice(&part);
        for _ in 0..PARTS {
            bytes.extend_from_slice(&[0x12, 0, 0x12, 2, 0x38, 9]);
        }
        let request = Sent::<v1::AppendSessionRequest>::new(bytes.into());
        let request = SessionRequest::read(&request).unwrap();
        assert_eq!(request.request_id, 5);
        let SessionContent::Batch(batch) = request.content else {
            panic!("a batch was sent");
        };
        assert_eq!(batch.bytes.len(), part.len() + 2 * PARTS);
        assert_eq!(batch.bytes[..part.len()], part);
    }

    #[test]
    fn a_part_of_a_request_does_not_end_what_another_began() {
        // A key in one, its number in the next.
        let request = Bytes::from_static(&[0x12, 1, 0x18, 0x12, 1, 2]);
        let expected = v1::AppendSessionRequest::decode(request.clone()).unwrap_err();
        let status = SessionRequest::read(&Sent::new(request)).err().unwrap();
        assert_eq!(status.message(), format!("request: {expected}"));
    }
}
