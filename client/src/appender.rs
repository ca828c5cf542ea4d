//! Pipelined appends: many in flight, acked in order.

use std::time::Duration;

use wald_proto::v1::Durability;

use crate::batch::{AppendBatch, BatchAck};
use crate::client::Client;
use crate::error::Error;
use crate::pipeline::{BatchReply, Pending, Pipeline, PipelineSettings, RecordAck};
use crate::record::Record;

/// Settings of an [`Appender`].
#[must_use = "nothing is appended until it is opened"]
#[derive(Debug, Clone)]
pub struct AppenderBuilder {
    client: Client,
    settings: PipelineSettings,
}

/// The settings that appenders and producers share.
macro_rules! pipeline_settings {
    () => {
        /// Maximum wait for more records before a batch is sent. Default: 0, which sends the
        /// gathered records at once.
        pub fn linger(mut self, linger: Duration) -> Self {
            self.settings.linger = linger;
            self
        }

        /// Most records of a batch that is gathered. Default: 1,000, which is also the most
        /// that a server takes unless configured otherwise.
        pub fn batch_records(mut self, records: usize) -> Self {
            self.settings.batch_records = records.max(1);
            self
        }

        /// Most bytes of a batch that is gathered; a single record may be larger. Default:
        /// 1 MiB. A server takes 4 MiB unless configured otherwise.
        pub fn batch_bytes(mut self, bytes: usize) -> Self {
            self.settings.batch_bytes = bytes;
            self
        }

        /// Most bytes of records that are not acked yet; beyond it an append waits until
        /// there is room. Bounds the memory, however slow the server is. Default: 8 MiB.
        pub fn window_bytes(mut self, bytes: u32) -> Self {
            self.settings.window_bytes = bytes.max(1);
            self
        }

        /// Durability that records must reach before they are acked. Default: set by the log's
        /// sync mode.
        pub fn durability(mut self, durability: Durability) -> Self {
            self.settings.durability = durability;
            self
        }
    };
}

pub(crate) use pipeline_settings;

impl Client {
    /// Appends many records without waiting for each; see [`Appender`].
    pub fn appender(&self) -> AppenderBuilder {
        AppenderBuilder {
            client: self.clone(),
            settings: PipelineSettings {
                // The window of bytes is bound enough: nothing is ever to be recognised again.
                window_batches: usize::MAX,
                ..PipelineSettings::default()
            },
        }
    }
}

impl AppenderBuilder {
    pipeline_settings!();

    /// Counts as lost if no ack comes for so long while some are due. Default: 60 s.
    pub fn ack_timeout(mut self, timeout: Duration) -> Self {
        self.settings.patience = timeout;
        self
    }

    /// Begins; the first append opens the session. Must be called within a tokio runtime.
    pub fn open(self) -> Appender {
        Appender(Pipeline::start(self.client, self.settings, None))
    }
}

/// Pipelined appends over one session: no append waits for the acks of earlier ones.
///
/// Records and batches are applied, and their acks resolve, in the order of the calls.
/// Consecutive records of one log share batches; each batch is all or nothing.
///
/// **The first failure ends it**, so that no batch is applied behind a failed one. Batches that
/// were acked before stay acked, the failing batch gets the error, and every later batch gets
/// [`ErrorKind::Behind`](crate::ErrorKind::Behind) with an outcome of its own. Nothing is
/// repeated: after a lost connection the outcome of batches in flight is unknown. A
/// [`Producer`](crate::Producer) repeats, without appending twice.
///
/// ```no_run
/// # async fn example(client: wald_client::Client) -> Result<(), wald_client::Error> {
/// let appender = client.appender().open();
/// let mut acks = Vec::new();
/// for n in 0..100_000 {
///     acks.push(appender.append("orders", format!("order {n}")).await?);
/// }
/// for ack in acks {
///     ack.await?;
/// }
/// appender.close().await?;
/// # Ok(())
/// # }
/// ```
///
/// An appender that is dropped instead of closed still sends its queued records, as long as the
/// runtime lives. Only the [`Pending`]s report the results.
#[derive(Debug)]
pub struct Appender(Pipeline);

impl Appender {
    /// Appends a record. Waits only while the window is full; await its ack separately.
    ///
    /// # Errors
    /// [`ErrorKind::Behind`](crate::ErrorKind::Behind), once something has failed; the
    /// record was not sent then.
    pub async fn append(
        &self,
        log: impl Into<String>,
        record: impl Into<Record>,
    ) -> Result<Pending<RecordAck>, Error> {
        self.0.record(log.into(), record.into().into_proto()).await
    }

    /// Appends a batch as [`Client::append_batch`] made it, with its conditions and its
    /// durability. Its timeout does not count.
    ///
    /// # Errors
    /// As [`append`](Self::append).
    pub async fn append_batch(&self, batch: AppendBatch) -> Result<Pending<BatchAck>, Error> {
        self.0.batch(batch.request, BatchReply::Batch).await
    }

    /// Sends the gathered records, waits for all acks, and ends the session.
    ///
    /// # Errors
    /// The first failure.
    pub async fn close(self) -> Result<(), Error> {
        self.0.close().await
    }
}
