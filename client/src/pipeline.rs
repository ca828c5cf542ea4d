//! Batches underway on an append session: the common part of appenders and producers.
//!
//! ```text
//!  append() ──▶ (queue) ──▶ (gathering) ──▶ (in flight) ──────▶ ack ──▶ Pending
//!     │            bounded by linger,           │    ▲
//!  waits while     records and bytes            ▼    │ all unacked again, in order
//!  the window is full                     (connection lost)   (producers only)
//! ```
//!
//! One task drives it. The window's permits go with the records until they are acked, so
//! records that are queued, gathered and in flight together never take more memory than the
//! window. Acks and failures are reported in the order of the appends.

mod driver;
mod gather;

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use wald_proto::v1;
use wald_proto::v1::Durability;
use wald_proto::v1::record::Payload;

use self::driver::Driver;
pub(crate) use self::gather::BatchReply;
use self::gather::{Gathered, Gatherer, SealedBatch, Work};
use crate::client::Client;
use crate::error::{Error, ErrorKind, Outcome};
use crate::lsn::Lsn;

/// Bytes of the window that a record takes in addition to its payload and headers.
const RECORD_OVERHEAD_BYTES: usize = 64;

/// A pipelined record is appended.
#[derive(Debug, Clone, PartialEq)]
pub struct RecordAck {
    /// Its number in the log.
    pub lsn: Lsn,
    /// The durability reached.
    pub durability: Durability,
    /// A repeat of an append that was applied before.
    pub deduplicated: bool,
    /// Position of its batch in the journal; none while it is only accepted.
    pub position: Option<u64>,
    /// Rises with every unclean start of the server.
    pub recovery_epoch: u64,
    /// The log's number, unique for ever.
    pub log_id: u64,
}

/// The ack of a pipelined append, to be awaited. Acks resolve in the order of the appends.
/// Dropping it does not take the append back.
#[must_use = "only its ack says that it was appended"]
#[derive(Debug)]
pub struct Pending<T>(oneshot::Receiver<Result<T, Error>>);

impl<T> Future for Pending<T> {
    type Output = Result<T, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let told = ready!(Pin::new(&mut self.0).poll(cx));
        Poll::Ready(told.unwrap_or_else(|_| Err(Error::new(ErrorKind::Gone))))
    }
}

/// Settings for gathering batches and keeping them in flight.
#[derive(Debug, Clone)]
pub(crate) struct PipelineSettings {
    pub(crate) linger: Duration,
    pub(crate) batch_records: usize,
    pub(crate) batch_bytes: usize,
    pub(crate) window_bytes: u32,
    pub(crate) window_batches: usize,
    /// Maximum time without an ack while some are due. The session is given up after it.
    pub(crate) patience: Duration,
    pub(crate) durability: Durability,
}

/// Time that a record waits for others to share its batch, unless set otherwise.
pub const DEFAULT_LINGER: Duration = Duration::ZERO;
/// Batches of a producer that are not acked yet, at most, unless set otherwise.
pub const DEFAULT_BATCHES_IN_FLIGHT: usize = 512;
/// Bytes that are not acked yet, at most, unless set otherwise.
pub const DEFAULT_BYTES_IN_FLIGHT: u32 = 8 << 20;
/// Time without an ack after which a producer gives up, unless set otherwise.
pub const DEFAULT_RETRY_FOR: Duration = Duration::from_secs(60);

impl Default for PipelineSettings {
    fn default() -> Self {
        Self {
            linger: DEFAULT_LINGER,
            batch_records: 1_000,
            batch_bytes: 1 << 20,
            window_bytes: DEFAULT_BYTES_IN_FLIGHT,
            window_batches: DEFAULT_BATCHES_IN_FLIGHT,
            patience: DEFAULT_RETRY_FOR,
            durability: Durability::Unspecified,
        }
    }
}

/// The parts of a batch that identify its producer.
#[derive(Debug)]
pub(crate) struct Stamp {
    pub(crate) id: String,
    pub(crate) epoch: u64,
    pub(crate) next_sequence: u64,
    /// Writer epoch of batches that name no other.
    pub(crate) writer_epoch: Option<u64>,
    pub(crate) log_id: u64,
}

impl Stamp {
    /// Makes the next batch of the producer of `request`.
    fn put_on(&mut self, request: &mut v1::AppendBatchRequest) {
        for batch in &mut request.batches {
            let condition = batch.condition.get_or_insert_default();
            condition.producer = Some(v1::Producer {
                id: self.id.clone(),
                epoch: self.epoch,
                sequence: self.next_sequence,
            });
            condition.writer_epoch = condition.writer_epoch.or(self.writer_epoch);
            condition.log_id = Some(self.log_id);
        }
        self.next_sequence += 1;
    }
}

/// The sending half of the queue.
#[derive(Debug)]
pub(crate) struct Pipeline {
    queue: mpsc::UnboundedSender<Work>,
    window: Arc<Semaphore>,
    window_bytes: u32,
    failure: Arc<OnceLock<Error>>,
    driver: JoinHandle<Result<(), Error>>,
}

impl Pipeline {
    /// Starts the driver. With a stamp, batches that fail temporarily are sent again.
    pub(crate) fn start(client: Client, settings: PipelineSettings, stamp: Option<Stamp>) -> Self {
        let (queue, work) = mpsc::unbounded_channel();
        let window = Arc::new(Semaphore::new(settings.window_bytes as usize));
        let failure = Arc::new(OnceLock::new());
        let window_bytes = settings.window_bytes;
        let driver = Driver::new(
            client,
            &settings,
            stamp,
            Gatherer::new(work, settings.clone()),
            Arc::clone(&window),
            Arc::clone(&failure),
        );
        Self {
            queue,
            window,
            window_bytes,
            failure,
            driver: tokio::spawn(Box::pin(driver.run())),
        }
    }

    /// Queues a record, which may share a batch with its neighbours of the same log.
    pub(crate) async fn record(
        &self,
        log: String,
        record: v1::Record,
    ) -> Result<Pending<RecordAck>, Error> {
        let bytes = size(&record);
        let permit = self.room(bytes).await?;
        let (reply, pending) = oneshot::channel();
        self.submit(Work::Record(Box::new(Gathered {
            log,
            records: vec![record],
            bytes,
            replies: vec![reply],
            permit,
            seal_at: Instant::now(),
        })))?;
        Ok(Pending(pending))
    }

    /// Queues a batch, which is not merged with others.
    pub(crate) async fn batch<T>(
        &self,
        request: v1::AppendBatchRequest,
        reply: impl FnOnce(oneshot::Sender<Result<T, Error>>) -> BatchReply,
    ) -> Result<Pending<T>, Error> {
        let records = request.batches.iter().flat_map(|batch| &batch.records);
        let bytes = RECORD_OVERHEAD_BYTES + records.map(size).sum::<usize>();
        let permit = self.room(bytes).await?;
        let (sender, pending) = oneshot::channel();
        self.submit(Work::Batch(SealedBatch {
            request,
            reply: reply(sender),
            permit,
        }))?;
        Ok(Pending(pending))
    }

    /// Sends the queued records, waits for all acks, and ends the session in good order.
    pub(crate) async fn close(self) -> Result<(), Error> {
        drop(self.queue);
        match self.driver.await {
            Ok(ended) => ended,
            Err(_) => Err(Error::new(ErrorKind::Gone)),
        }
    }

    /// Waits until the window has room for `bytes`; for more bytes than the whole window, until
    /// it is empty.
    async fn room(&self, bytes: usize) -> Result<OwnedSemaphorePermit, Error> {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let permits = bytes.min(self.window_bytes);
        let room = Arc::clone(&self.window).acquire_many_owned(permits).await;
        room.map_err(|_| self.ended())
    }

    fn submit(&self, work: Work) -> Result<(), Error> {
        self.queue.send(work).map_err(|_| self.ended())
    }

    /// The reason why no append is taken any more.
    fn ended(&self) -> Error {
        match self.failure.get() {
            Some(first) => behind(first, Outcome::NotApplied),
            None => Error::new(ErrorKind::Gone),
        }
    }
}

fn behind(first: &Error, outcome: Outcome) -> Error {
    Error::new(ErrorKind::Behind {
        first: first.clone(),
        outcome,
    })
}

/// Bytes that a record takes of the window.
fn size(record: &v1::Record) -> usize {
    let payload = match &record.payload {
        Some(Payload::Data(data)) => data.len(),
        Some(Payload::Text(text)) => text.len(),
        None => 0,
    };
    let headers = record.headers.iter();
    let headers: usize = headers
        .map(|header| header.key.len() + header.value.len())
        .sum();
    RECORD_OVERHEAD_BYTES + payload + headers
}
