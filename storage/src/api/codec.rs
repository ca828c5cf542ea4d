//! Records to and from their stored form, the protobuf encoding of
//! `wald.v1.RecordBatch.records`.
//!
//! The engine writes the few fields by hand into the journal's buffer: one copy of
//! the payload, no message objects. A test holds the result against prost.

use bytes::Bytes;

use crate::api::record::{Header, Record};
use crate::api::records::Records;
use crate::base::ids::Timestamp;
use crate::base::wire;
use crate::base::wire::Value;

/// Field of `RecordBatch` that holds records, and fields of `Record` and `Header`.
const RECORDS: u32 = 3;
const DATA: u32 = 1;
const HEADERS: u32 = 2;
const TIMESTAMP: u32 = 3;
const CRC32C: u32 = 4;
const KEY: u32 = 1;
const VALUE: u32 = 2;

/// The keys of these fields: their numbers are small.
const RECORDS_KEY: u8 = key(RECORDS, 2);
const DATA_KEY: u8 = key(DATA, 2);
const HEADERS_KEY: u8 = key(HEADERS, 2);
const TIMESTAMP_KEY: u8 = key(TIMESTAMP, 1);
const CRC32C_KEY: u8 = key(CRC32C, 5);
const KEY_KEY: u8 = key(KEY, 2);
const VALUE_KEY: u8 = key(VALUE, 2);

/// Bytes of a time and its key.
const TIMESTAMP_BYTES: usize = 9;

const fn key(field: u32, wire_type: u8) -> u8 {
    field.to_le_bytes()[0] << 3 | wire_type
}

fn delimited_len(bytes: usize) -> usize {
    1 + wire::varint_len(bytes as u64) + bytes
}

/// One record in its stored form, without the time that it will have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RecordRef<'a> {
    pub(crate) data: &'a [u8],
    /// Headers as they are stored.
    headers: &'a [u8],
    /// The producer's time.
    pub(crate) timestamp: Option<Timestamp>,
    pub(crate) crc32c: Option<u32>,
}

impl<'a> RecordRef<'a> {
    /// A record in the encoding that [`put_record`] writes; `None` if it is in another.
    pub(crate) fn checked(message: &'a [u8]) -> Option<Self> {
        let mut input = message;
        let data = take_field(&mut input, DATA_KEY)?;
        let mut record = Self {
            data,
            headers: &[],
            timestamp: None,
            crc32c: None,
        };
        // Most records have nothing else.
        if input.is_empty() {
            return Some(record);
        }
        let behind = input;
        while input.first() == Some(&HEADERS_KEY) {
            header_ref(take_field(&mut input, HEADERS_KEY)?)?;
        }
        record.headers = &behind[..behind.len() - input.len()];
        if let [TIMESTAMP_KEY, rest @ ..] = input {
            let (time, rest) = rest.split_first_chunk()?;
            let time = i64::from_le_bytes(*time);
            record.timestamp = Some(Timestamp::from_micros(time));
            input = rest;
        }
        if let [CRC32C_KEY, rest @ ..] = input {
            let (crc, rest) = rest.split_first_chunk()?;
            record.crc32c = Some(u32::from_le_bytes(*crc));
            input = rest;
        }
        input.is_empty().then_some(record)
    }

    pub(crate) fn has_headers(&self) -> bool {
        !self.headers.is_empty()
    }

    /// Key and value of each header.
    pub(crate) fn headers(&self) -> impl Iterator<Item = (&'a str, &'a [u8])> + use<'a> {
        let mut input = self.headers;
        std::iter::from_fn(move || header_ref(take_field(&mut input, HEADERS_KEY)?))
    }

    /// Keys and values of the headers, bytes.
    pub(crate) fn header_bytes(&self) -> u64 {
        self.headers()
            .map(|(key, value)| (key.len() + value.len()) as u64)
            .sum()
    }

    /// Data and headers, bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.data.len() as u64 + self.header_bytes()
    }

    fn message_len(&self, own_time: bool) -> usize {
        delimited_len(self.data.len())
            + self.headers.len()
            + if own_time { TIMESTAMP_BYTES } else { 0 }
            + if self.crc32c.is_some() { 5 } else { 0 }
    }
}

/// Takes a length-delimited field with this key off the front.
fn take_field<'a>(input: &mut &'a [u8], key: u8) -> Option<&'a [u8]> {
    if input.first() != Some(&key) {
        return None;
    }
    wire::take_entry(input)
}

/// Key and value of a header in its stored encoding.
fn header_ref(message: &[u8]) -> Option<(&str, &[u8])> {
    let mut input = message;
    let mut field = |key| match input.first() {
        // Left out if empty.
        Some(first) if *first == key => {
            take_field(&mut input, key).filter(|value| !value.is_empty())
        }
        _ => Some(&[][..]),
    };
    let (key, value) = (field(KEY_KEY)?, field(VALUE_KEY)?);
    let key = std::str::from_utf8(key).ok()?;
    input.is_empty().then_some((key, value))
}

/// Maximum bytes that [`put_record`] writes for this record.
pub(crate) fn encoded_len(record: &RecordRef<'_>) -> usize {
    delimited_len(record.message_len(true))
}

/// Plain digest of records as they were sent. A repeat has the same digest, whenever it arrives.
///
/// Only batches of versions without keyed digests have it; [`crate::format::digest`] has the keyed ones.
pub(crate) fn digest(records: &Records) -> u64 {
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    sent_parts(records, |part| {
        hash.update(&(part.len() as u64).to_le_bytes());
        hash.update(part);
    });
    hash.digest()
}

/// Calls `put` with each part of the records as they were sent, in the order of a digest.
pub(crate) fn sent_parts(records: &Records, mut put: impl FnMut(&[u8])) {
    for record in records.iter() {
        put(record.data);
        put(&(record.headers().count() as u64).to_le_bytes());
        for (key, value) in record.headers() {
            put(key.as_bytes());
            put(value);
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
}

/// Writes one record. `own_time`: the time to store with it, where it differs from
/// its batch's.
pub(crate) fn put_record(out: &mut Vec<u8>, record: &RecordRef<'_>, own_time: Option<Timestamp>) {
    out.push(RECORDS_KEY);
    wire::put_varint(out, record.message_len(own_time.is_some()) as u64);
    wire::put_bytes(out, DATA, record.data);
    out.extend_from_slice(record.headers);
    if let Some(time) = own_time {
        wire::put_fixed64(out, TIMESTAMP, time.micros().cast_unsigned());
    }
    if let Some(crc) = record.crc32c {
        wire::put_fixed32(out, CRC32C, crc);
    }
}

/// Writes a record as its producer sent it.
pub(crate) fn put_sent(out: &mut Vec<u8>, record: &Record) {
    let mut headers = Vec::new();
    for header in &record.headers {
        let field = |bytes: usize| if bytes == 0 { 0 } else { delimited_len(bytes) };
        let length = field(header.key.len()) + field(header.value.len());
        headers.push(HEADERS_KEY);
        wire::put_varint(&mut headers, length as u64);
        if !header.key.is_empty() {
            wire::put_bytes(&mut headers, KEY, header.key.as_bytes());
        }
        if !header.value.is_empty() {
            wire::put_bytes(&mut headers, VALUE, &header.value);
        }
    }
    let sent = RecordRef {
        data: &record.data,
        headers: &headers,
        timestamp: record.timestamp,
        crc32c: record.crc32c,
    };
    put_record(out, &sent, sent.timestamp);
}

/// Sets the key of each entry to the key in a stored body.
pub(crate) fn set_keys(entries: &mut [u8]) {
    let mut rest = entries;
    while let [key, behind @ ..] = rest {
        *key = RECORDS_KEY;
        let mut input = &behind[..];
        let length = wire::take_varint(&mut input).unwrap_or(u64::MAX);
        let skip = behind.len() - input.len();
        let skip = usize::try_from(length).map_or(usize::MAX, |length| skip.saturating_add(length));
        rest = behind.get_mut(skip..).unwrap_or_default();
    }
}

/// The entries of a body: the end of each, and its record. Ends early at a malformed entry. A search for a
/// record passes all records before it, so this parses none of them.
fn entries(body: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let mut input = body;
    std::iter::from_fn(move || {
        let [RECORDS_KEY, rest @ ..] = input else {
            return None;
        };
        input = rest;
        let length = wire::take_varint(&mut input)?;
        let message = wire::take_bytes(&mut input, length)?;
        Some((body.len() - input.len(), message))
    })
}

/// Whether a body may hold `count` records: each takes at least two bytes. Code that serves records by their
/// number trusts the count in a header no further than that.
pub(crate) fn may_hold(body: &[u8], count: u32) -> bool {
    u64::from(count) * 2 <= body.len() as u64
}

/// The end of each record of a body.
pub(crate) fn ends(body: &[u8]) -> impl Iterator<Item = usize> {
    entries(body).map(|(end, _)| end)
}

/// The own time of each record of a body, `None` if it has none. Ends early at a malformed record.
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
        fn a_body_equals_the_prost_encoding_of_the_records(records in records()) {
            let mut body = Vec::new();
            let sent = Records::from(records.clone());
            for record in sent.iter() {
                put_record(&mut body, &record, record.timestamp);
            }
            prop_assert!(body.len() as u64 <= sent.stored_bytes());
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
            Records::from(records.clone()).put(&mut body);
            let part = slice(&Bytes::from(body), skip, take);
            let decoded = v1::RecordBatch::decode(part).unwrap();
            let skip = usize::try_from(skip).unwrap();
            let take = usize::try_from(take).unwrap();
            let expected: Vec<_> = records.iter().skip(skip).take(take).map(proto).collect();
            prop_assert_eq!(decoded.records, expected);
        }
    }
}
