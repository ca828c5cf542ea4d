//! The answer to one request of a session, encoded: there are as many as records, where
//! each is sent alone.

use bytes::BufMut;
use prost::encoding::{WireType, encode_varint, encoded_len_varint};
use wald_proto::codec::Encode;
use wald_storage::{Appended, Durability, LogAppended, LogName, Lsn, Position, RecoveryEpoch};

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
const REPLICATED_LSN: u8 = 8;

/// The ack of one request on a session.
pub(crate) struct SessionAck<'a> {
    pub(crate) request_id: u64,
    /// The logs that it appended to, in the order of `appends`.
    pub(crate) names: &'a [LogName],
    pub(crate) appends: &'a [LogAppended],
    pub(crate) durable_lsns: &'a [Lsn],
    /// As many, or none without a replica.
    pub(crate) replicated_lsns: &'a [Lsn],
    pub(crate) durability: Durability,
    pub(crate) position: Option<Position>,
    pub(crate) epoch: RecoveryEpoch,
}

/// The lsns below which a log is safe.
#[derive(Clone, Copy)]
struct SafeLsns {
    durable: Lsn,
    replicated: Option<Lsn>,
}

impl<'a> SessionAck<'a> {
    /// The ack of a batch over `names` that was a request of its own.
    pub(crate) fn new(
        request_id: u64,
        names: &'a [LogName],
        appended: &'a Appended,
        epoch: RecoveryEpoch,
    ) -> Self {
        Self {
            request_id,
            names,
            appends: &appended.appends,
            durable_lsns: &appended.durable_lsns,
            replicated_lsns: &appended.replicated_lsns,
            durability: appended.durability,
            position: appended.position,
            epoch,
        }
    }

    fn logs(&self) -> impl Iterator<Item = (&LogName, &LogAppended, SafeLsns)> {
        let logs = self.names.iter().zip(self.appends).zip(self.durable_lsns);
        logs.enumerate().map(|(index, ((name, log), durable))| {
            let safe = SafeLsns {
                durable: *durable,
                replicated: self.replicated_lsns.get(index).copied(),
            };
            (name, log, safe)
        })
    }

    fn durability(&self) -> u64 {
        i32::from(super::proto_durability(self.durability))
            .unsigned_abs()
            .into()
    }

    /// Encoded length of the `AppendBatchResponse` in it.
    fn ack_len(&self) -> usize {
        self.logs()
            .map(|(name, log, safe)| delimited_len(log_append_len(name, log, safe)))
            .sum::<usize>()
            + uint_len(self.durability())
            + self.position.map_or(0, |at| number_len(at.get()))
            + uint_len(self.epoch.get())
    }
}

impl Encode for SessionAck<'_> {
    fn length(&self) -> usize {
        uint_len(self.request_id) + delimited_len(self.ack_len())
    }

    fn put(&self, out: &mut impl BufMut) {
        put_uint(REQUEST_ID, self.request_id, out);
        put_length(ACK, self.ack_len(), out);
        for (name, log, safe) in self.logs() {
            put_length(APPENDS, log_append_len(name, log, safe), out);
            put_length(LOG, name.as_str().len(), out);
            out.put_slice(name.as_str().as_bytes());
            put_number(FIRST_LSN, log.first_lsn.get(), out);
            put_number(NEXT_LSN, log.next_lsn.get(), out);
            if log.arrival.micros() != 0 {
                put_key(TIMESTAMP, WireType::SixtyFourBit, out);
                out.put_i64_le(log.arrival.micros());
            }
            put_number(DURABLE_LSN, safe.durable.get(), out);
            put_uint(DEDUPLICATED, log.deduplicated.into(), out);
            put_uint(LOG_ID, log.log_id.get(), out);
            if let Some(replicated) = safe.replicated {
                put_number(REPLICATED_LSN, replicated.get(), out);
            }
        }
        put_uint(DURABILITY, self.durability(), out);
        if let Some(position) = self.position {
            put_number(POSITION, position.get(), out);
        }
        put_uint(RECOVERY_EPOCH, self.epoch.get(), out);
    }
}

fn log_append_len(name: &LogName, log: &LogAppended, safe: SafeLsns) -> usize {
    delimited_len(name.as_str().len())
        + number_len(log.first_lsn.get())
        + number_len(log.next_lsn.get())
        + if log.arrival.micros() == 0 { 0 } else { 9 }
        + number_len(safe.durable.get())
        + safe.replicated.map_or(0, |lsn| number_len(lsn.get()))
        + uint_len(log.deduplicated.into())
        + uint_len(log.log_id.get())
}

/// Encoded length of a field with a value: its key, in one byte, and a number.
fn number_len(value: u64) -> usize {
    1 + encoded_len_varint(value)
}

/// Encoded length of a field that is left out if it is 0.
fn uint_len(value: u64) -> usize {
    if value == 0 { 0 } else { number_len(value) }
}

/// Encoded length of a field of this number of bytes, with its key and its length.
fn delimited_len(bytes: usize) -> usize {
    number_len(super::count(bytes)) + bytes
}

/// All these numbers of fields have keys of one byte.
fn put_key(field: u8, wire_type: WireType, out: &mut impl BufMut) {
    out.put_u8(field << 3 | wire_type as u8);
}

fn put_number(field: u8, value: u64, out: &mut impl BufMut) {
    put_key(field, WireType::Varint, out);
    encode_varint(value, out);
}

fn put_uint(field: u8, value: u64, out: &mut impl BufMut) {
    if value != 0 {
        put_number(field, value, out);
    }
}

fn put_length(field: u8, bytes: usize, out: &mut impl BufMut) {
    put_key(field, WireType::LengthDelimited, out);
    encode_varint(super::count(bytes), out);
}
