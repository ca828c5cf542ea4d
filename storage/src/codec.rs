//! Records to and from their stored form, the protobuf encoding of
//! `wald.v1.RecordBatch.records`.
//!
//! The engine writes the few fields by hand into the journal's buffer: one copy of
//! the payload, no message objects. A test holds the result against prost.

use bytes::Bytes;

use crate::ids::Timestamp;
use crate::record::{Header, Record};
use crate::wire::{self, Value};

/// Field of `RecordBatch` that holds records, and fields of `Record` and `Header`.
const RECORDS: u32 = 3;
const DATA: u32 = 1;
const HEADERS: u32 = 2;
const TIMESTAMP: u32 = 3;
const CRC32C: u32 = 4;
const KEY: u32 = 1;
const VALUE: u32 = 2;

fn delimited_len(bytes: usize) -> usize {
    1 + wire::varint_len(bytes as u64) + bytes
}

fn header_len(header: &Header) -> usize {
    let field = |bytes: usize| if bytes == 0 { 0 } else { delimited_len(bytes) };
    field(header.key.len()) + field(header.value.len())
}

fn message_len(record: &Record, own_time: bool) -> usize {
    delimited_len(record.data.len())
        + record
            .headers
            .iter()
            .map(|h| delimited_len(header_len(h)))
            .sum::<usize>()
        + if own_time { 9 } else { 0 }
        + if record.crc32c.is_some() { 5 } else { 0 }
}

/// The most bytes that [`put_record`] writes for this record.
pub(crate) fn encoded_len(record: &Record) -> usize {
    delimited_len(message_len(record, true))
}

/// Digest of records as they were sent: a repeat has the same, whenever it arrives.
pub(crate) fn digest(records: &[Record]) -> u64 {
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    let mut put = |bytes: &[u8]| {
        hash.update(&(bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    for record in records {
        put(&record.data);
        put(&(record.headers.len() as u64).to_le_bytes());
        for header in &record.headers {
            put(header.key.as_bytes());
            put(&header.value);
        }
        match record.timestamp {
            Some(time) => put(&time.micros().to_le_bytes()),
            None => put(&[]),
        }
        match record.crc32c {
            Some(crc) => put(&crc.to_le_bytes()),
            None => put(&[]),
        }
    }
    hash.digest()
}

/// Writes one record. `own_time`: the time to store with it, where it differs from
/// its batch's.
pub(crate) fn put_record(out: &mut Vec<u8>, record: &Record, own_time: Option<Timestamp>) {
    wire::put_key(out, RECORDS, 2);
    wire::put_varint(out, message_len(record, own_time.is_some()) as u64);
    wire::put_bytes(out, DATA, &record.data);
    for header in &record.headers {
        wire::put_key(out, HEADERS, 2);
        wire::put_varint(out, header_len(header) as u64);
        if !header.key.is_empty() {
            wire::put_bytes(out, KEY, header.key.as_bytes());
        }
        if !header.value.is_empty() {
            wire::put_bytes(out, VALUE, &header.value);
        }
    }
    if let Some(time) = own_time {
        wire::put_fixed64(out, TIMESTAMP, time.micros().cast_unsigned());
    }
    if let Some(crc) = record.crc32c {
        wire::put_fixed32(out, CRC32C, crc);
    }
}

/// The entries of a body: where each ends, and the record in it; ends early at a malformed
/// one. Whoever looks for a record passes all before it, so this looks at nothing in them.
fn entries(body: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    const ENTRY: u8 = RECORDS.to_le_bytes()[0] << 3 | 2;
    let mut input = body;
    std::iter::from_fn(move || {
        let [ENTRY, rest @ ..] = input else {
            return None;
        };
        input = rest;
        let length = wire::take_varint(&mut input)?;
        let message = wire::take_bytes(&mut input, length)?;
        Some((body.len() - input.len(), message))
    })
}

/// Where each record of a body ends.
pub(crate) fn ends(body: &[u8]) -> impl Iterator<Item = usize> {
    entries(body).map(|(end, _)| end)
}

/// The times of their own that records of a body have, one after another; ends early at a
/// malformed one.
pub(crate) fn own_times(body: &[u8]) -> impl Iterator<Item = Option<Timestamp>> {
    entries(body).map(|(_, message)| {
        wire::fields(message).find_map(|field| match field {
            Some((TIMESTAMP, Value::Fixed64(time))) => {
                Some(Timestamp::from_micros(time.cast_signed()))
            }
            _ => None,
        })
    })
}

/// The records of a body; `None` if one is malformed.
pub(crate) fn records(body: &[u8]) -> Option<Vec<Record>> {
    let mut records = Vec::new();
    for field in wire::fields(body) {
        let (RECORDS, Value::Bytes(message)) = field? else {
            continue;
        };
        let mut record = Record::default();
        for field in wire::fields(message) {
            match field? {
                (DATA, Value::Bytes(data)) => record.data = Bytes::copy_from_slice(data),
                (HEADERS, Value::Bytes(header)) => record.headers.push(self::header(header)?),
                (TIMESTAMP, Value::Fixed64(time)) => {
                    record.timestamp = Some(Timestamp::from_micros(time.cast_signed()));
                }
                (CRC32C, Value::Fixed32(crc)) => record.crc32c = Some(crc),
                _ => {}
            }
        }
        records.push(record);
    }
    Some(records)
}

fn header(message: &[u8]) -> Option<Header> {
    let mut header = Header {
        key: String::new(),
        value: Bytes::new(),
    };
    for field in wire::fields(message) {
        match field? {
            (KEY, Value::Bytes(key)) => header.key = String::from_utf8(key.to_vec()).ok()?,
            (VALUE, Value::Bytes(value)) => header.value = Bytes::copy_from_slice(value),
            _ => {}
        }
    }
    Some(header)
}

/// The part of a body that holds records `skip .. skip + take`, without copying.
pub(crate) fn slice(body: &Bytes, skip: u64, take: u64) -> Bytes {
    let mut from = 0;
    let mut to = 0;
    for (index, end) in (0u64..).zip(ends(body)) {
        if index < skip {
            from = end;
        }
        if index >= skip.saturating_add(take) {
            break;
        }
        to = end;
    }
    body.slice(from..to.max(from))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use prost::Message;
    use wald_proto::v1;

    fn records() -> impl Strategy<Value = Vec<Record>> {
        let bytes = || proptest::collection::vec(any::<u8>(), 0..40).prop_map(Bytes::from);
        let header = (".{0,8}", bytes()).prop_map(|(key, value)| Header { key, value });
        let record = (
            bytes(),
            proptest::collection::vec(header, 0..4),
            proptest::option::of(1i64..),
            proptest::option::of(any::<u32>()),
        )
            .prop_map(|(data, headers, time, crc32c)| Record {
                data,
                headers,
                timestamp: time.map(Timestamp::from_micros),
                crc32c,
            });
        proptest::collection::vec(record, 1..6)
    }

    fn proto(record: &Record) -> v1::Record {
        v1::Record {
            payload: Some(v1::record::Payload::Data(record.data.clone())),
            headers: record
                .headers
                .iter()
                .map(|h| v1::Header {
                    key: h.key.clone(),
                    value: h.value.clone(),
                })
                .collect(),
            timestamp_us: record.timestamp.map_or(0, Timestamp::micros),
            crc32c: record.crc32c,
            ..v1::Record::default()
        }
    }

    proptest! {
        #[test]
        fn a_body_is_what_prost_writes_for_the_same_records(records in records()) {
            let mut body = Vec::new();
            let mut most = 0;
            for record in &records {
                most += encoded_len(record);
                put_record(&mut body, record, record.timestamp);
            }
            prop_assert!(body.len() <= most);
            let batch = v1::RecordBatch {
                records: records.iter().map(proto).collect(),
                ..v1::RecordBatch::default()
            };
            prop_assert_eq!(&batch.encode_to_vec(), &body);
            prop_assert_eq!(super::records(&body), Some(records.clone()));
            let times: Vec<_> = own_times(&body).collect();
            let given: Vec<_> = records.iter().map(|record| record.timestamp).collect();
            prop_assert_eq!(times, given);
        }

        #[test]
        fn a_slice_holds_exactly_the_records_asked_for(
            records in records(), skip in 0u64..7, take in 0u64..7,
        ) {
            let mut body = Vec::new();
            for record in &records {
                put_record(&mut body, record, record.timestamp);
            }
            let part = slice(&Bytes::from(body), skip, take);
            let decoded = v1::RecordBatch::decode(part).unwrap();
            let skip = usize::try_from(skip).unwrap();
            let take = usize::try_from(take).unwrap();
            let expected: Vec<_> = records.iter().skip(skip).take(take).map(proto).collect();
            prop_assert_eq!(decoded.records, expected);
        }
    }
}
