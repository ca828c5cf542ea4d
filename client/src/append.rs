//! Appending one record.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use wald_proto::v1;
use wald_proto::v1::Durability;

use crate::batch::Condition;
use crate::client::Client;
use crate::error::Error;
use crate::lsn::Lsn;
use crate::nodes::ClientNode;
use crate::record::Record;
use crate::retry::Repeat;
use crate::shared::AppendContent;

/// An append of one record, to be awaited.
#[must_use = "nothing is sent until it is awaited"]
#[derive(Debug, Clone)]
pub struct Append {
    client: Client,
    log: String,
    record: Record,
    condition: Condition,
    durability: Durability,
    timeout: Duration,
}

/// The record is appended.
#[derive(Debug, Clone, PartialEq)]
pub struct Ack {
    /// Its number in the log.
    pub lsn: Lsn,
    /// Its time, in microseconds since the Unix epoch, UTC.
    pub timestamp_us: i64,
    /// Every lsn of the log below it is flushed to the device.
    pub durable_lsn: Option<Lsn>,
    /// Every lsn of the log below it is in the bucket of a replica. None without a replica.
    pub replicated_lsn: Option<Lsn>,
    /// The durability reached.
    pub durability: Durability,
    /// A repeat of an append that was applied before.
    pub deduplicated: bool,
    /// Position of the record in the journal; none while it is only accepted.
    pub position: Option<u64>,
    /// Rises with every unclean start of the server.
    pub recovery_epoch: u64,
    /// The log's number, unique for ever.
    pub log_id: u64,
}

impl Client {
    /// Appends one record to a log.
    pub fn append(&self, log: impl Into<String>, record: impl Into<Record>) -> Append {
        Append {
            client: self.clone(),
            log: log.into(),
            record: record.into(),
            condition: Condition::new(),
            durability: Durability::Unspecified,
            timeout: self.default_timeout(),
        }
    }
}

impl Append {
    /// The lsn that the record must get, or POSITION_MISMATCH. With it a repeat cannot append
    /// twice, so the client repeats automatically.
    pub fn expected_lsn(mut self, lsn: impl Into<Lsn>) -> Self {
        self.condition = self.condition.expected_lsn(lsn);
        self
    }

    /// Equals the log's writer epoch, or FENCED.
    pub fn writer_epoch(mut self, epoch: u64) -> Self {
        self.condition = self.condition.writer_epoch(epoch);
        self
    }

    /// Identifies the producer and the sequence number of this batch. A repeat gets the
    /// original answer, so the client repeats the append automatically after a lost connection.
    pub fn producer(mut self, id: impl Into<String>, epoch: u64, sequence: u64) -> Self {
        self.condition = self.condition.producer(id, epoch, sequence);
        self
    }

    /// The log must have this number, or LOG_REPLACED.
    pub fn log_id(mut self, log_id: u64) -> Self {
        self.condition = self.condition.log_id(log_id);
        self
    }

    /// The conditions of the append. Replaces all conditions set before.
    pub fn condition(mut self, condition: Condition) -> Self {
        self.condition = condition;
        self
    }

    /// Durability that the record must reach before the answer. Default: set by the log's sync
    /// mode.
    pub fn durability(mut self, durability: Durability) -> Self {
        self.durability = durability;
        self
    }

    /// The deadline, over all attempts. Default: the client's.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }
}

impl IntoFuture for Append {
    type Output = Result<Ack, Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let repeat = Repeat::of_append(self.condition.guards());
            let request = Arc::new(AppendContent::Record(v1::AppendRequest {
                log: self.log,
                record: Some(self.record.into_proto()),
                condition: self.condition.into_proto(),
                durability: self.durability.into(),
            }));
            let send = |node: &Arc<ClientNode>, attempt| Arc::clone(node).append(attempt);
            let answer = self.client.call(request, repeat, self.timeout, send);
            let answer = (answer.await?.append_ack)
                .ok_or(Error::contract("AppendSessionResponse.append_ack"))?;
            Ok(Ack {
                lsn: answer
                    .lsn
                    .ok_or(Error::contract("AppendResponse.lsn"))?
                    .into(),
                timestamp_us: answer.timestamp_us,
                durable_lsn: answer.durable_lsn.map(Lsn::new),
                replicated_lsn: answer.replicated_lsn.map(Lsn::new),
                durability: answer.durability(),
                deduplicated: answer.deduplicated,
                position: answer.position,
                recovery_epoch: answer.recovery_epoch,
                log_id: answer.log_id,
            })
        })
    }
}
