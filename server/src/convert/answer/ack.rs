//! The answer to one request of a session, encoded: there are as many as records, where
//! each is sent alone.

use bytes::BufMut as _;
use prost::encoding::{WireType, encode_varint, encoded_len_varint};
use wald_proto::codec::Encoded;
use wald_storage::{Appended, LogAppended, LogName, Lsn, Position, RecoveryEpoch};

/// `AppendSessionResponse`.
const REQUEST_ID: u8 = 1;
const ACK: u8 = 2;
/// `AppendBatchResponse`.
const APPENDS: u8 = 1;
const DURABILITY: u8 = 2;
const POSITION: u8 = 3;
const RECOVERY_EPOCH: u8 = 4;
/// `LogAppend`.
const LOG: u8 = 1;
const FIRST_LSN: u8 = 2;
const NEXT_LSN: u8 = 3;
const TIMESTAMP: u8 = 4;
const DURABLE_LSN: u8 = 5;
const DEDUPLICATED: u8 = 6;
const LOG_ID: u8 = 7;

/// The ack of the request `request_id` on a session, whose batch was over `names`.
pub(crate) fn session_ack(
    request_id: u64,
    names: &[LogName],
    appended: &Appended,
    epoch: RecoveryEpoch,
) -> Encoded {
    let logs = || {
        names
            .iter()
            .zip(&appended.appends)
            .zip(&appended.durable_lsns)
    };
    let position = appended.position.map(Position::get);
    let durability = i32::from(super::durability(appended.durability));
    let durability = u64::from(durability.unsigned_abs());
    let ack_len = logs()
        .map(|((name, log), durable)| delimited_len(log_append_len(name, log, *durable)))
        .sum::<usize>()
        + uint_len(durability)
        + position.map_or(0, number_len)
        + uint_len(epoch.get());
    let mut out = Vec::with_capacity(uint_len(request_id) + delimited_len(ack_len));
    put_uint(REQUEST_ID, request_id, &mut out);
    put_length(ACK, ack_len, &mut out);
    for ((name, log), durable) in logs() {
        put_length(APPENDS, log_append_len(name, log, *durable), &mut out);
        put_length(LOG, name.as_str().len(), &mut out);
        out.extend_from_slice(name.as_str().as_bytes());
        put_number(FIRST_LSN, log.first_lsn.get(), &mut out);
        put_number(NEXT_LSN, log.next_lsn.get(), &mut out);
        if log.arrival.micros() != 0 {
            put_key(TIMESTAMP, WireType::SixtyFourBit, &mut out);
            out.put_i64_le(log.arrival.micros());
        }
        put_number(DURABLE_LSN, durable.get(), &mut out);
        put_uint(DEDUPLICATED, log.deduplicated.into(), &mut out);
        put_uint(LOG_ID, log.log_id.get(), &mut out);
    }
    put_uint(DURABILITY, durability, &mut out);
    if let Some(position) = position {
        put_number(POSITION, position, &mut out);
    }
    put_uint(RECOVERY_EPOCH, epoch.get(), &mut out);
    let mut ack = Encoded::default();
    ack.push(out);
    ack
}

fn log_append_len(name: &LogName, log: &LogAppended, durable: Lsn) -> usize {
    delimited_len(name.as_str().len())
        + number_len(log.first_lsn.get())
        + number_len(log.next_lsn.get())
        + if log.arrival.micros() == 0 { 0 } else { 9 }
        + number_len(durable.get())
        + uint_len(log.deduplicated.into())
        + uint_len(log.log_id.get())
}

/// Of a field that is there: its key, in one byte, and a number.
fn number_len(value: u64) -> usize {
    1 + encoded_len_varint(value)
}

/// The same of a field that is left out if it is 0.
fn uint_len(value: u64) -> usize {
    if value == 0 { 0 } else { number_len(value) }
}

/// A field of so many bytes, with its key and its length.
fn delimited_len(bytes: usize) -> usize {
    number_len(super::count(bytes)) + bytes
}

/// All these numbers of fields have keys of one byte.
fn put_key(field: u8, wire_type: WireType, out: &mut Vec<u8>) {
    out.push(field << 3 | wire_type as u8);
}

fn put_number(field: u8, value: u64, out: &mut Vec<u8>) {
    put_key(field, WireType::Varint, out);
    encode_varint(value, out);
}

fn put_uint(field: u8, value: u64, out: &mut Vec<u8>) {
    if value != 0 {
        put_number(field, value, out);
    }
}

fn put_length(field: u8, bytes: usize, out: &mut Vec<u8>) {
    put_key(field, WireType::LengthDelimited, out);
    encode_varint(super::count(bytes), out);
}
