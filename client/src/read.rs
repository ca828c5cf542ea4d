//! Reading a page of one log.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::time::Duration;

use wald_proto::v1;
use wald_proto::v1::Visibility;
use wald_proto::v1::read_request::Start;

use crate::client::Client;
use crate::error::Error;
use crate::lsn::Lsn;
use crate::ops::call;
use crate::record::{Batch, StoredRecord};
use crate::retry::Repeat;

/// A read of a bounded page of one log, to be awaited. Begins at the first record kept by
/// default.
#[must_use = "nothing is sent until it is awaited"]
#[derive(Debug, Clone)]
pub struct Read {
    client: Client,
    request: v1::ReadRequest,
    wait: Duration,
    timeout: Duration,
}

/// A page of one log.
#[derive(Debug, Clone, PartialEq)]
pub struct Page {
    /// The records, consecutive; may be none.
    pub records: Vec<StoredRecord>,
    /// The lsn to read next.
    pub next_lsn: Lsn,
    /// The tail, at the visibility read with.
    pub tail_lsn: Lsn,
    /// Every lsn of the log below it is flushed to the device.
    pub durable_lsn: Option<Lsn>,
    /// Every lsn of the log below it is in the bucket of a replica. None without a replica.
    pub replicated_lsn: Option<Lsn>,
    /// The first lsn kept.
    pub first_lsn: Option<Lsn>,
    /// Rises with every unclean start of the server.
    pub recovery_epoch: u64,
}

impl Client {
    /// Reads a page of a log.
    pub fn read(&self, log: impl Into<String>) -> Read {
        Read {
            client: self.clone(),
            request: v1::ReadRequest {
                log: log.into(),
                ..Default::default()
            },
            wait: Duration::ZERO,
            timeout: self.default_timeout(),
        }
    }
}

impl Read {
    /// Begins at this lsn.
    pub fn from_lsn(mut self, lsn: impl Into<Lsn>) -> Self {
        self.request.start = Some(Start::Lsn(lsn.into().get()));
        self
    }

    /// Begins at the first record with this time or a later one, in microseconds since the
    /// Unix epoch, UTC.
    pub fn from_timestamp_us(mut self, timestamp_us: i64) -> Self {
        self.request.start = Some(Start::TimestampUs(timestamp_us));
        self
    }

    /// Begins `count` records before the tail.
    pub fn last(mut self, count: u64) -> Self {
        self.request.start = Some(Start::TailOffset(count));
        self
    }

    /// Maximum number of records. Default: 100.
    pub fn max_records(mut self, count: u32) -> Self {
        self.request.max_records = count;
        self
    }

    /// Maximum bytes of records. Default: as many as keep the answer below 1 MiB.
    pub fn max_bytes(mut self, bytes: u32) -> Self {
        self.request.max_bytes = bytes;
        self
    }

    /// Waits so long for a first record if there is none. Comes on top of the deadline.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// Which records to see. Default: those that the log's sync mode acks.
    pub fn visibility(mut self, visibility: Visibility) -> Self {
        self.request.visibility = visibility.into();
        self
    }

    /// Any node of the store may answer from its copy, which is usually a second old, and at most twice its `lease_ttl`.
    /// Readers then do not load the owner if the client begins with a stand-by. Implies the visibility REPLICATED.
    pub fn any_node(mut self) -> Self {
        self.request.any_node = true;
        self
    }

    /// The log must have this number, or LOG_REPLACED.
    pub fn log_id(mut self, log_id: u64) -> Self {
        self.request.log_id = Some(log_id);
        self
    }

    /// The deadline, over all attempts. Default: the client's.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }
}

impl IntoFuture for Read {
    type Output = Result<Page, Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(mut self) -> Self::IntoFuture {
        Box::pin(async move {
            if !self.wait.is_zero() {
                // Only a wait of more than 290 billion years does not fit.
                self.request.wait = self.wait.try_into().ok();
            }
            let timeout = self.timeout.saturating_add(self.wait);
            let answer = call!(self.client, wal.read, Repeat::Read, self.request, timeout)?;
            let batch = answer.batch.map(Batch::from_proto).transpose()?;
            Ok(Page {
                records: batch.map(|batch| batch.records).unwrap_or_default(),
                next_lsn: answer
                    .next_lsn
                    .ok_or(Error::contract("ReadResponse.next_lsn"))?
                    .into(),
                tail_lsn: answer
                    .tail_lsn
                    .ok_or(Error::contract("ReadResponse.tail_lsn"))?
                    .into(),
                durable_lsn: answer.durable_lsn.map(Lsn::new),
                replicated_lsn: answer.replicated_lsn.map(Lsn::new),
                first_lsn: answer.first_lsn.map(Lsn::new),
                recovery_epoch: answer.recovery_epoch,
            })
        })
    }
}
