//! Pipelined appends: many in flight, acked in order.

use std::time::Duration;

use wald_proto::v1::Durability;

use crate::batch::{AppendBatch, BatchAck};
use crate::client::Client;
use crate::error::Error;
use crate::pipeline::{Pending, Pipeline, RecordAck, Reply, Settings};
use crate::record::Record;

/// Settings of an [`Appender`].
#[must_use = "nothing is appended until it is opened"]
#[derive(Debug, Clone)]
pub struct AppenderBuilder {
    client: Client,
    settings: Settings,
}

/// The settings that appenders and producers share.
macro_rules! pipeline_settings {
    () => {
        /// Waits so long for more records before a batch goes out. Default: 0, which sends what
        /// is there at once.
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

        /// How durable records must be before they are acked. Default: as the log's sync
        /// mode says.
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
            settings: Settings {
                // The window of bytes is bound enough: nothing is ever to be recognised again.
                window_batches: usize::MAX,
                ..Settings::default()
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

/// Pipelined appends over one session: nothing waits for the ack of what came before.
///
/// Records and batches are applied, and their acks resolve, in the order of the calls.
/// Consecutive records of one log share batches; each batch is all or nothing.
///
/// **The first failure ends it**, so that nothing is ever applied behind a hole: what was
/// acked before stays acked, the failing batch gets the error, and everything after it
/// [`ErrorKind::Behind`](crate::ErrorKind::Behind) with an outcome of its own. Nothing is
/// repeated: after a lost connection the outcome of what was in flight is unknown. A
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
/// Dropped instead of closed, it still sends what it was given, as long as the runtime
/// lives, but tells nobody but the [`Pending`]s.
#[derive(Debug)]
pub struct Appender(Pipeline);

impl Appender {
    /// Appends a record. Waits only while the window is full; its ack is to be awaited
    /// separately.
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
        self.0.batch(batch.request, Reply::Batch).await
    }

    /// Sends the gathered records, waits for all acks, and ends the session.
    ///
    /// # Errors
    /// The first failure.
    pub async fn close(self) -> Result<(), Error> {
        self.0.close().await
    }
}
