//! Appending to several logs, all or nothing.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use wald_proto::v1;
use wald_proto::v1::Durability;

use crate::client::Client;
use crate::cursor::CursorCommit;
use crate::error::Error;
use crate::lsn::Lsn;
use crate::nodes::ClientNode;
use crate::record::Record;
use crate::retry::Repeat;
use crate::shared::AppendContent;

/// Conditions on a log that is written. Every condition that is set must hold; otherwise
/// nothing is written.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Condition(v1::AppendCondition);

impl Condition {
    /// Nothing must hold.
    pub fn new() -> Self {
        Self::default()
    }

    /// The lsn that the first record must get, or POSITION_MISMATCH.
    pub fn expected_lsn(mut self, lsn: impl Into<Lsn>) -> Self {
        self.0.expected_lsn = Some(lsn.into().get());
        self
    }

    /// The log must exist, or LOG_MISSING.
    pub fn must_exist(mut self) -> Self {
        self.0.must_exist = true;
        self
    }

    /// The log must not exist, or LOG_EXISTS.
    pub fn must_not_exist(mut self) -> Self {
        self.0.must_not_exist = true;
        self
    }

    /// Equals the log's writer epoch, or FENCED.
    pub fn writer_epoch(mut self, epoch: u64) -> Self {
        self.0.writer_epoch = Some(epoch);
        self
    }

    /// Identifies the producer and the sequence number of this batch, which counts from 0 in
    /// each epoch. A repeat gets the original answer, also after restarts of either side. A
    /// [`Producer`](crate::Producer) counts automatically.
    pub fn producer(mut self, id: impl Into<String>, epoch: u64, sequence: u64) -> Self {
        self.0.producer = Some(v1::Producer {
            id: id.into(),
            epoch,
            sequence,
        });
        self
    }

    /// The log must have this number, or LOG_REPLACED.
    pub fn log_id(mut self, log_id: u64) -> Self {
        self.0.log_id = Some(log_id);
        self
    }

    /// Whether a repeat cannot be applied a second time.
    pub(crate) fn guards(&self) -> bool {
        self.0.expected_lsn.is_some() || self.0.must_not_exist || self.0.producer.is_some()
    }

    pub(crate) fn into_proto(self) -> Option<v1::AppendCondition> {
        (self != Self::default()).then_some(self.0)
    }
}

/// A condition on a log that is not written.
#[derive(Debug, Clone, PartialEq)]
pub struct Check(v1::LogCheck);

impl Check {
    /// A check of this log; says nothing yet.
    pub fn new(log: impl Into<String>) -> Self {
        Self(v1::LogCheck {
            log: log.into(),
            ..Default::default()
        })
    }

    /// Equals the log's tail, or POSITION_MISMATCH.
    pub fn expected_lsn(mut self, lsn: impl Into<Lsn>) -> Self {
        self.0.expected_lsn = Some(lsn.into().get());
        self
    }

    /// The log must exist, or LOG_MISSING.
    pub fn must_exist(mut self) -> Self {
        self.0.must_exist = true;
        self
    }

    /// The log must not exist, or LOG_EXISTS.
    pub fn must_not_exist(mut self) -> Self {
        self.0.must_not_exist = true;
        self
    }

    /// The log must have this number, or LOG_REPLACED.
    pub fn log_id(mut self, log_id: u64) -> Self {
        self.0.log_id = Some(log_id);
        self
    }
}

/// An append to one or more logs, all or nothing, to be awaited.
#[must_use = "nothing is sent until it is awaited"]
#[derive(Debug, Clone)]
pub struct AppendBatch {
    client: Client,
    pub(crate) request: v1::AppendBatchRequest,
    guarded: bool,
    timeout: Duration,
}

/// Everything in the request is applied.
#[derive(Debug, Clone, PartialEq)]
pub struct BatchAck {
    /// The result of each log, in the order of the request.
    pub appends: Vec<LogAck>,
    /// The durability reached.
    pub durability: Durability,
    /// Position of the batch in the journal; none while it is only accepted.
    pub position: Option<u64>,
    /// Rises with every unclean start of the server.
    pub recovery_epoch: u64,
}

/// The result of one log's records.
#[derive(Debug, Clone, PartialEq)]
pub struct LogAck {
    /// The log's name.
    pub log: String,
    /// The lsn of the first record.
    pub first_lsn: Lsn,
    /// The lsn after the last record.
    pub next_lsn: Lsn,
    /// Time of the records without one of their own, in microseconds since the Unix epoch.
    pub timestamp_us: i64,
    /// Every lsn of the log below it is flushed to the device.
    pub durable_lsn: Option<Lsn>,
    /// Every lsn of the log below it is in the bucket of a replica. None without a replica.
    pub replicated_lsn: Option<Lsn>,
    /// A repeat of a batch that was applied before.
    pub deduplicated: bool,
    /// The log's number, unique for ever.
    pub log_id: u64,
}

impl Client {
    /// Appends to one or more logs, all or nothing.
    pub fn append_batch(&self) -> AppendBatch {
        AppendBatch {
            client: self.clone(),
            request: v1::AppendBatchRequest::default(),
            guarded: false,
            timeout: self.default_timeout(),
        }
    }
}

impl AppendBatch {
    /// Adds records for a log. Each log at most once.
    pub fn log<R>(self, log: impl Into<String>, records: R) -> Self
    where
        R: IntoIterator,
        R::Item: Into<Record>,
    {
        self.log_if(log, Condition::new(), records)
    }

    /// Adds records for a log, and their conditions. Each log at most once.
    pub fn log_if<R>(mut self, log: impl Into<String>, condition: Condition, records: R) -> Self
    where
        R: IntoIterator,
        R::Item: Into<Record>,
    {
        // All or nothing: if one log's records cannot be applied twice, no log's records can.
        self.guarded |= condition.guards();
        self.request.batches.push(v1::LogBatch {
            log: log.into(),
            records: records
                .into_iter()
                .map(|record| record.into().into_proto())
                .collect(),
            condition: condition.into_proto(),
        });
        self
    }

    /// Adds a condition on a log that is not written.
    pub fn check(mut self, check: Check) -> Self {
        self.request.checks.push(check.0);
        self
    }

    /// Moves a cursor in the same step: the position read and the records that result from it
    /// never diverge.
    pub fn cursor(mut self, commit: CursorCommit) -> Self {
        // Expecting where the cursor stands guards the whole, unless it is moved to there.
        self.guarded |= commit.guards();
        self.request.cursors.push(commit.into_proto());
        self
    }

    /// Durability that the records must reach before the answer. Default: set by the logs' sync
    /// modes.
    pub fn durability(mut self, durability: Durability) -> Self {
        self.request.durability = durability.into();
        self
    }

    /// The deadline, over all attempts. Default: the client's.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }
}

impl IntoFuture for AppendBatch {
    type Output = Result<BatchAck, Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let repeat = Repeat::of_append(self.guarded);
            let request = Arc::new(AppendContent::Batch(self.request));
            let send = |node: &Arc<ClientNode>, attempt| Arc::clone(node).append(attempt);
            let answer = self.client.call(request, repeat, self.timeout, send);
            let ack = answer.await?.ack;
            BatchAck::from_proto(ack.ok_or(Error::contract("AppendSessionResponse.ack"))?)
        })
    }
}

impl BatchAck {
    pub(crate) fn from_proto(answer: v1::AppendBatchResponse) -> Result<Self, Error> {
        Ok(Self {
            durability: answer.durability(),
            position: answer.position,
            recovery_epoch: answer.recovery_epoch,
            appends: answer
                .appends
                .into_iter()
                .map(log_ack)
                .collect::<Result<_, _>>()?,
        })
    }
}

fn log_ack(append: v1::LogAppend) -> Result<LogAck, Error> {
    Ok(LogAck {
        log: append.log,
        first_lsn: append
            .first_lsn
            .ok_or(Error::contract("LogAppend.first_lsn"))?
            .into(),
        next_lsn: append
            .next_lsn
            .ok_or(Error::contract("LogAppend.next_lsn"))?
            .into(),
        timestamp_us: append.timestamp_us,
        durable_lsn: append.durable_lsn.map(Lsn::new),
        replicated_lsn: append.replicated_lsn.map(Lsn::new),
        deduplicated: append.deduplicated,
        log_id: append.log_id,
    })
}
