//! Records, as they are given and as they come back.

use bytes::Bytes;
use wald_proto::v1;
use wald_proto::v1::record::Payload;

use crate::error::Error;
use crate::lsn::Lsn;

/// A record to append.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Record(v1::Record);

impl Record {
    /// A record with this payload.
    pub fn new(data: impl Into<Bytes>) -> Self {
        Self(v1::Record {
            payload: Some(Payload::Data(data.into())),
            ..Default::default()
        })
    }

    /// Adds a header: a fact in addition to the payload.
    pub fn header(mut self, key: impl Into<String>, value: impl Into<Bytes>) -> Self {
        self.0.headers.push(v1::Header {
            key: key.into(),
            value: value.into(),
        });
        self
    }

    /// Sets the record's time, in microseconds since the Unix epoch, UTC. Default: the
    /// server's clock. At most a minute ahead of it.
    pub fn timestamp_us(mut self, timestamp_us: i64) -> Self {
        self.0.timestamp_us = timestamp_us;
        self
    }

    /// Sets the checksum of the payload, its CRC-32C. The server verifies it, stores it, and
    /// returns it to readers.
    pub fn crc32c(mut self, crc32c: u32) -> Self {
        self.0.crc32c = Some(crc32c);
        self
    }

    pub(crate) fn into_proto(self) -> v1::Record {
        self.0
    }
}

impl From<Bytes> for Record {
    fn from(data: Bytes) -> Self {
        Self::new(data)
    }
}

impl From<Vec<u8>> for Record {
    fn from(data: Vec<u8>) -> Self {
        Self::new(data)
    }
}

impl From<String> for Record {
    fn from(text: String) -> Self {
        Self::new(text)
    }
}

impl From<&'static str> for Record {
    fn from(text: &'static str) -> Self {
        Self::new(text)
    }
}

/// A record that was read.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredRecord {
    /// Its number in the log.
    pub lsn: Lsn,
    /// Its time, in microseconds since the Unix epoch, UTC; never goes back within a log.
    pub timestamp_us: i64,
    /// The payload; shares the memory of the answer it came in.
    pub data: Bytes,
    /// Facts in addition to the payload, in order.
    pub headers: Vec<v1::Header>,
    /// CRC-32C checksum of the payload, if the producer gave it.
    pub crc32c: Option<u32>,
}

/// Consecutive records of one log.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// The log's name.
    pub log: String,
    /// The log's number, unique for ever.
    pub log_id: u64,
    /// The records, in order, without a hole.
    pub records: Vec<StoredRecord>,
}

impl Batch {
    pub(crate) fn from_proto(batch: v1::RecordBatch) -> Result<Self, Error> {
        let mut lsn = match batch.first_lsn {
            Some(first_lsn) => Lsn::new(first_lsn),
            None if batch.records.is_empty() => Lsn::default(),
            None => return Err(Error::contract("RecordBatch.first_lsn")),
        };
        let mut records = Vec::with_capacity(batch.records.len());
        for record in batch.records {
            records.push(stored(record, lsn, batch.timestamp_us));
            lsn = lsn.next();
        }
        Ok(Self {
            log: batch.log,
            log_id: batch.log_id,
            records,
        })
    }
}

fn stored(record: v1::Record, lsn: Lsn, batch_timestamp_us: i64) -> StoredRecord {
    StoredRecord {
        lsn,
        timestamp_us: match record.timestamp_us {
            0 => batch_timestamp_us,
            own => own,
        },
        data: match record.payload {
            Some(Payload::Data(data)) => data,
            Some(Payload::Text(text)) => Bytes::from(text),
            None => Bytes::new(),
        },
        headers: record.headers,
        crc32c: record.crc32c,
    }
}
