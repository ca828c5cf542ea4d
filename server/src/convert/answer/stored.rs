//! Batches of a scan as they are sent, made from stored batches. Stored bodies already have the
//! encoding of `RecordBatch.records`, and are sent unchanged.

use bytes::{BufMut as _, Bytes};
use prost::Message;
use prost::encoding::{
    DecodeContext, WireType, decode_key, decode_varint, encode_key, encode_varint, skip_field,
};
use tonic::Status;
use wald_proto::codec::Encoded;
use wald_proto::v1;
use wald_storage::StoredBatch;

use super::{count, does_not_decode};

/// `ScanResponse.batches`, `RecordBatch.records`, `Record.timestamp_us`.
const BATCHES: u32 = 1;
const RECORDS: u32 = 3;
const TIMESTAMP: u32 = 3;

/// Key and value of a time.
const TIMESTAMP_BYTES: usize = 9;

/// Bodies from this on are sent from where they lie; smaller ones are gathered first.
const LARGE: usize = 4 << 10;

/// The field `batches` of a response. Batches of one log that follow each other become one.
///
/// A record without a time of its own has its batch's. Where batches with different
/// arrivals become one, the later ones' records get their time written down.
///
/// # Errors
/// The status of a damaged record, if a body does not hold as many records as its frame says:
/// its checksum held, so the checksum missed this damage. The contents of records are not
/// checked.
pub(super) fn batches(mut stored: &[StoredBatch]) -> Result<Encoded, Status> {
    let mut message = Encoded::default();
    while let Some(first) = stored.first() {
        let mut next = first.first_lsn;
        let follows = |batch: &&StoredBatch| {
            let follows = batch.log_id == first.log_id && batch.first_lsn == next;
            next = batch.next_lsn();
            follows
        };
        let (one, later) = stored.split_at(stored.iter().take_while(follows).count());
        put_batch(first, one, &mut message)?;
        stored = later;
    }
    Ok(message)
}

/// Consecutive batches of one log, as one.
fn put_batch(
    first: &StoredBatch,
    parts: &[StoredBatch],
    message: &mut Encoded,
) -> Result<(), Status> {
    let fields = v1::RecordBatch {
        log: first.log.as_str().to_owned(),
        first_lsn: Some(first.first_lsn.get()),
        records: Vec::new(),
        timestamp_us: first.arrival.micros(),
        log_id: first.log_id.get(),
    };
    let mut pieces = Vec::new();
    let mut small = fields.encode_to_vec();
    for part in parts {
        let found = if part.arrival != first.arrival {
            put_with_time(&part.body, part.arrival.micros(), &mut small)
        } else if part.body.len() < LARGE {
            small.extend_from_slice(&part.body);
            records(&part.body, |_, _| Some(()))
        } else {
            pieces.push(std::mem::take(&mut small).into());
            pieces.push(part.body.clone());
            records(&part.body, |_, _| Some(()))
        };
        if found != Some(u64::from(part.count)) {
            return Err(does_not_decode(part));
        }
    }
    pieces.push(small.into());
    let mut head = Vec::with_capacity(2 * size_of::<u64>());
    encode_key(BATCHES, WireType::LengthDelimited, &mut head);
    encode_varint(count(pieces.iter().map(Bytes::len).sum()), &mut head);
    message.push(head);
    pieces.into_iter().for_each(|piece| message.push(piece));
    Ok(())
}

/// Passes each record of a body to `each`, with its key and length and without. Returns their
/// number. `None`: this is not a body.
fn records(body: &[u8], mut each: impl FnMut(&[u8], &[u8]) -> Option<()>) -> Option<u64> {
    let (mut rest, mut found) = (body, 0);
    while !rest.is_empty() {
        let whole = rest;
        let (RECORDS, WireType::LengthDelimited) = decode_key(&mut rest).ok()? else {
            return None;
        };
        let length = usize::try_from(decode_varint(&mut rest).ok()?).ok()?;
        let (record, later) = rest.split_at_checked(length)?;
        each(&whole[..whole.len() - later.len()], record)?;
        rest = later;
        found += 1;
    }
    Some(found)
}

/// Adds the records of a body, each with the time `micros` if it has none.
fn put_with_time(body: &[u8], micros: i64, out: &mut Vec<u8>) -> Option<u64> {
    out.reserve(body.len());
    records(body, |whole, record| {
        if has_time(record)? {
            out.extend_from_slice(whole);
            return Some(());
        }
        encode_key(RECORDS, WireType::LengthDelimited, out);
        encode_varint(count(record.len() + TIMESTAMP_BYTES), out);
        out.extend_from_slice(record);
        encode_key(TIMESTAMP, WireType::SixtyFourBit, out);
        out.put_i64_le(micros);
        Some(())
    })
}

fn has_time(mut record: &[u8]) -> Option<bool> {
    while !record.is_empty() {
        let (field, wire_type) = decode_key(&mut record).ok()?;
        if field == TIMESTAMP {
            return Some(true);
        }
        skip_field(wire_type, field, &mut record, DecodeContext::default()).ok()?;
    }
    Some(false)
}
