//! Batches underway on an append session: what appenders and producers have in common.
//!
//! ```text
//!  append() ──▶ (queue) ──▶ (gathering) ──▶ (in flight) ──────▶ ack ──▶ Pending
//!     │            bounded by linger,           │    ▲
//!  waits while     records and bytes            ▼    │ all unacked again, in order
//!  the window is full                     (connection lost)   (producers only)
//! ```
//!
//! One task drives it. The window's permits go with the records until they are acked, so
//! what is queued, gathered and in flight together never takes more memory than the window.
//! What is acked, and what fails, is told in the order of the appends.

use std::cmp::Ordering;
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::stream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout_at};
use tonic::{Status, Streaming};
use wald_proto::v1;
use wald_proto::v1::Durability;
use wald_proto::v1::record::Payload;

use crate::batch::{BatchAck, LogAck};
use crate::client::Client;
use crate::error::{Error, ErrorKind, Outcome};
use crate::lsn::Lsn;
use crate::retry::Repeat;

/// What a record takes of the window beside its payload and headers.
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
    /// Where its batch lies in the journal; none while it is only accepted.
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

/// How batches are made and kept in flight.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) linger: Duration,
    pub(crate) batch_records: usize,
    pub(crate) batch_bytes: usize,
    pub(crate) window_bytes: u32,
    pub(crate) window_batches: usize,
    /// So long without an ack, while some are due, and it is given up.
    pub(crate) patience: Duration,
    pub(crate) durability: Durability,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            linger: Duration::from_millis(1),
            batch_records: 1_000,
            batch_bytes: 1 << 20,
            window_bytes: 8 << 20,
            window_batches: 512,
            patience: Duration::from_secs(60),
            durability: Durability::Unspecified,
        }
    }
}

/// What makes a batch a producer's.
#[derive(Debug)]
pub(crate) struct Stamp {
    pub(crate) id: String,
    pub(crate) epoch: u64,
    pub(crate) next_sequence: u64,
    /// Of batches that name no other.
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

/// Where appends go in.
#[derive(Debug)]
pub(crate) struct Pipeline {
    queue: mpsc::UnboundedSender<Work>,
    window: Arc<Semaphore>,
    window_bytes: u32,
    failure: Arc<OnceLock<Error>>,
    driver: JoinHandle<Result<(), Error>>,
}

impl Pipeline {
    /// Starts the driver. With a stamp, what fails in passing is sent again.
    pub(crate) fn start(client: Client, settings: Settings, stamp: Option<Stamp>) -> Self {
        let (queue, work) = mpsc::unbounded_channel();
        let window = Arc::new(Semaphore::new(settings.window_bytes as usize));
        let failure = Arc::new(OnceLock::new());
        let window_bytes = settings.window_bytes;
        let driver = Driver {
            client,
            patience: settings.patience,
            window_batches: settings.window_batches,
            stamp,
            gatherer: Gatherer {
                work,
                put_back: None,
                gathered: None,
                settings,
            },
            in_flight: VecDeque::new(),
            next_request_id: 0,
            progress: Instant::now(),
            failures: 0,
            window: Arc::clone(&window),
            failure: Arc::clone(&failure),
        };
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

    /// Queues a batch, which stays as it is.
    pub(crate) async fn batch<T>(
        &self,
        request: v1::AppendBatchRequest,
        reply: impl FnOnce(oneshot::Sender<Result<T, Error>>) -> Reply,
    ) -> Result<Pending<T>, Error> {
        let records = request.batches.iter().flat_map(|batch| &batch.records);
        let bytes = RECORD_OVERHEAD_BYTES + records.map(size).sum::<usize>();
        let permit = self.room(bytes).await?;
        let (sender, pending) = oneshot::channel();
        self.submit(Work::Batch(Sealed {
            request,
            reply: reply(sender),
            permit,
        }))?;
        Ok(Pending(pending))
    }

    /// Sends what is queued, waits for all acks, and ends the session in good order.
    pub(crate) async fn close(self) -> Result<(), Error> {
        drop(self.queue);
        match self.driver.await {
            Ok(ended) => ended,
            Err(_) => Err(Error::new(ErrorKind::Gone)),
        }
    }

    /// Waits until the window has room for so many bytes; for more than all of it, until it
    /// is empty.
    async fn room(&self, bytes: usize) -> Result<OwnedSemaphorePermit, Error> {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let permits = bytes.min(self.window_bytes);
        let room = Arc::clone(&self.window).acquire_many_owned(permits).await;
        room.map_err(|_| self.ended())
    }

    fn submit(&self, work: Work) -> Result<(), Error> {
        self.queue.send(work).map_err(|_| self.ended())
    }

    /// Why nothing is taken any more.
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

/// What a record takes of the window.
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

/// What comes out of the queue.
#[derive(Debug)]
enum Work {
    /// One record, to be gathered with others.
    Record(Box<Gathered>),
    Batch(Sealed),
}

/// Records of one log that become one batch.
#[derive(Debug)]
struct Gathered {
    log: String,
    records: Vec<v1::Record>,
    bytes: usize,
    replies: Vec<oneshot::Sender<Result<RecordAck, Error>>>,
    permit: OwnedSemaphorePermit,
    seal_at: Instant,
}

/// A batch that does not change any more.
#[derive(Debug)]
struct Sealed {
    request: v1::AppendBatchRequest,
    reply: Reply,
    permit: OwnedSemaphorePermit,
}

/// Who waits for a batch.
#[derive(Debug)]
pub(crate) enum Reply {
    Records(Vec<oneshot::Sender<Result<RecordAck, Error>>>),
    Log(oneshot::Sender<Result<LogAck, Error>>),
    Batch(oneshot::Sender<Result<BatchAck, Error>>),
}

impl Reply {
    // Whoever dropped a Pending does not want to know: no send can fail in a way that matters.

    fn ack(self, mut ack: BatchAck) {
        match self {
            Self::Batch(reply) => {
                let _ = reply.send(Ok(ack));
            }
            Self::Log(reply) => {
                let append = ack.appends.pop();
                let _ = reply.send(append.ok_or(Error::contract("AppendBatchResponse.appends")));
            }
            Self::Records(replies) => {
                let Some(append) = ack.appends.pop() else {
                    let error = Error::contract("AppendBatchResponse.appends");
                    return Self::Records(replies).fail(error);
                };
                for (lsn, reply) in (append.first_lsn.get()..).zip(replies) {
                    let _ = reply.send(Ok(RecordAck {
                        lsn: Lsn::new(lsn),
                        durability: ack.durability,
                        deduplicated: append.deduplicated,
                        position: ack.position,
                        recovery_epoch: ack.recovery_epoch,
                        log_id: append.log_id,
                    }));
                }
            }
        }
    }

    fn fail(self, error: Error) {
        match self {
            Self::Records(replies) => {
                for reply in replies {
                    let _ = reply.send(Err(error.clone()));
                }
            }
            Self::Log(reply) => {
                let _ = reply.send(Err(error));
            }
            Self::Batch(reply) => {
                let _ = reply.send(Err(error));
            }
        }
    }
}

/// Makes batches of what is queued.
#[derive(Debug)]
struct Gatherer {
    work: mpsc::UnboundedReceiver<Work>,
    /// Taken from the queue, but not for the batch that is being gathered.
    put_back: Option<Work>,
    gathered: Option<Box<Gathered>>,
    settings: Settings,
}

impl Gatherer {
    /// The next batch; none once the queue is closed and empty. Loses nothing if it is
    /// dropped while it waits.
    async fn next(&mut self) -> Option<Sealed> {
        loop {
            let work = match (self.put_back.take(), &self.gathered) {
                (Some(work), _) => Some(work),
                (None, Some(gathered)) if self.is_full(gathered) => return self.seal(),
                (None, Some(gathered)) => {
                    match timeout_at(gathered.seal_at, self.work.recv()).await {
                        Ok(work) => work,
                        Err(_) => return self.seal(),
                    }
                }
                (None, None) => self.work.recv().await,
            };
            match (work, &mut self.gathered) {
                (None, _) => return self.seal(),
                (Some(Work::Batch(sealed)), None) => return Some(sealed),
                (Some(Work::Record(mut first)), None) => {
                    first.seal_at = Instant::now() + self.settings.linger;
                    self.gathered = Some(first);
                }
                (Some(Work::Record(more)), Some(gathered))
                    if more.log == gathered.log
                        && gathered.bytes + more.bytes <= self.settings.batch_bytes =>
                {
                    gathered.bytes += more.bytes;
                    gathered.records.extend(more.records);
                    gathered.replies.extend(more.replies);
                    gathered.permit.merge(more.permit);
                }
                (Some(work), Some(_)) => {
                    self.put_back = Some(work);
                    return self.seal();
                }
            }
        }
    }

    fn is_full(&self, gathered: &Gathered) -> bool {
        gathered.records.len() >= self.settings.batch_records
            || gathered.bytes >= self.settings.batch_bytes
    }

    fn seal(&mut self) -> Option<Sealed> {
        let gathered = self.gathered.take()?;
        Some(Sealed {
            request: v1::AppendBatchRequest {
                batches: vec![v1::LogBatch {
                    log: gathered.log,
                    records: gathered.records,
                    condition: None,
                }],
                durability: self.settings.durability.into(),
                ..Default::default()
            },
            reply: Reply::Records(gathered.replies),
            permit: gathered.permit,
        })
    }

    /// Fails everything that was not sent, and takes nothing any more.
    async fn fail(&mut self, first: &Error) {
        self.work.close();
        while let Some(sealed) = self.next().await {
            sealed.reply.fail(behind(first, Outcome::NotApplied));
        }
    }
}

/// A batch that was sent and not acked.
struct InFlight {
    request_id: u64,
    /// Absent once it was sent, if it is never sent again.
    request: Option<v1::AppendBatchRequest>,
    reply: Reply,
    /// Whether it was on a connection that broke.
    doubtful: bool,
    /// Given back to the window with the ack.
    _permit: OwnedSemaphorePermit,
}

/// How a session ended.
enum Ended {
    /// Everything is acked, and nothing more will come.
    Closed,
    Failed(Error),
}

impl InFlight {
    fn message(&mut self, again: bool) -> v1::AppendSessionRequest {
        let batch = match again {
            true => self.request.clone(),
            false => self.request.take(),
        };
        v1::AppendSessionRequest {
            request_id: self.request_id,
            batch,
        }
    }
}

/// Drives the sessions, one after the other.
struct Driver {
    client: Client,
    patience: Duration,
    window_batches: usize,
    stamp: Option<Stamp>,
    gatherer: Gatherer,
    in_flight: VecDeque<InFlight>,
    next_request_id: u64,
    /// When something was acked, or sent while nothing else was in flight.
    progress: Instant,
    /// Failures since then.
    failures: u32,
    window: Arc<Semaphore>,
    failure: Arc<OnceLock<Error>>,
}

impl Driver {
    async fn run(mut self) -> Result<(), Error> {
        loop {
            // A session that broke while nothing was in flight is opened again once there is
            // something to send: no batch is in doubt.
            if self.in_flight.is_empty() {
                match self.gatherer.next().await {
                    Some(sealed) => self.launch(sealed),
                    None => return Ok(()),
                }
            }
            match self.serve().await {
                Ended::Closed => return Ok(()),
                Ended::Failed(_) if self.in_flight.is_empty() => {}
                Ended::Failed(error) => {
                    if let Err(error) = self.survive(error).await {
                        self.fail(&error).await;
                        return Err(error);
                    }
                }
            }
        }
    }

    /// Puts a batch in flight, still to be sent.
    fn launch(&mut self, mut sealed: Sealed) {
        if let Some(stamp) = &mut self.stamp {
            stamp.put_on(&mut sealed.request);
        }
        if self.in_flight.is_empty() {
            self.progress = Instant::now();
        }
        self.in_flight.push_back(InFlight {
            request_id: self.next_request_id,
            request: Some(sealed.request),
            reply: sealed.reply,
            doubtful: false,
            _permit: sealed.permit,
        });
        self.next_request_id += 1;
    }

    /// One session: everything in flight is sent, then what comes out of the queue.
    async fn serve(&mut self) -> Ended {
        let again = self.stamp.is_some();
        let (requests, mut outgoing) = mpsc::unbounded_channel();
        for batch in &mut self.in_flight {
            // Unless the session is gone already, which its answers tell.
            let _ = requests.send(batch.message(again));
        }
        let mut requests = Some(requests);
        let mut wal = self.client.wal();
        let opening = wal.append_session(stream::poll_fn(move |cx| outgoing.poll_recv(cx)));
        tokio::pin!(opening);
        let mut answers = None;
        loop {
            let room = self.in_flight.len() < self.window_batches;
            let give_up_at = self.progress + self.patience;
            tokio::select! {
                opened = &mut opening, if answers.is_none() => match opened {
                    Ok(opened) => answers = Some(opened.into_inner()),
                    Err(status) => return Ended::Failed(self.client.error(&status, self.patience)),
                },
                message = next(&mut answers), if answers.is_some() => {
                    let acked = match message {
                        Ok(Some(message)) => self.ack(message),
                        Ok(None) if self.in_flight.is_empty() && requests.is_none() => {
                            return Ended::Closed;
                        }
                        Ok(None) => {
                            let detail = "the server ended the session".to_owned();
                            Err(Error::new(ErrorKind::ConnectionLost(detail)))
                        }
                        Err(status) => Err(self.client.error(&status, self.patience)),
                    };
                    if let Err(error) = acked {
                        return Ended::Failed(error);
                    }
                }
                sealed = self.gatherer.next(), if room && requests.is_some() => match sealed {
                    Some(sealed) => {
                        self.launch(sealed);
                        if let (Some(requests), Some(batch)) =
                            (&requests, self.in_flight.back_mut())
                        {
                            let _ = requests.send(batch.message(again));
                        }
                    }
                    // Half-closes: the server acks what it has, and ends the stream.
                    None => requests = None,
                },
                () = sleep_until(give_up_at), if !self.in_flight.is_empty() => {
                    return Ended::Failed(Error::new(ErrorKind::Timeout(self.patience)));
                }
            }
        }
    }

    /// Tells who waits for the first batch in flight.
    fn ack(&mut self, message: v1::AppendSessionResponse) -> Result<(), Error> {
        let expected = self.in_flight.front().map(|batch| batch.request_id);
        if expected != Some(message.request_id) {
            return Err(Error::contract("AppendSessionResponse.request_id in order"));
        }
        let ack = message
            .ack
            .ok_or(Error::contract("AppendSessionResponse.ack"))?;
        let ack = BatchAck::from_proto(ack)?;
        if let Some(batch) = self.in_flight.pop_front() {
            batch.reply.ack(ack);
        }
        self.progress = Instant::now();
        self.failures = 0;
        Ok(())
    }

    /// Prepares the next session, if everything in flight may be sent again.
    async fn survive(&mut self, error: Error) -> Result<(), Error> {
        self.failures += 1;
        let pause = self.client.retry_policy().pause(self.failures, &error);
        let give_up = Instant::now() + pause >= self.progress + self.patience;
        if self.stamp.is_none() || give_up || !Repeat::Guarded.allows(&error) {
            return Err(error);
        }
        if error.outcome() == Outcome::Unknown {
            for batch in &mut self.in_flight {
                batch.doubtful = true;
            }
        }
        tokio::time::sleep(pause).await;
        Ok(())
    }

    /// Tells everyone: the batch that failed why, those behind it that they are behind it.
    async fn fail(&mut self, error: &Error) {
        // Known before anything else is refused.
        let _ = self.failure.set(error.clone());
        self.window.close();
        // Acks that were due have come before; without a name it is the first of the others.
        let named = error.fact_number("request_id");
        let position = |id| self.in_flight.iter().position(|b| b.request_id == id);
        let failed = named.and_then(position).unwrap_or(0);
        for (place, batch) in self.in_flight.drain(..).enumerate() {
            let told = match (place.cmp(&failed), error.outcome()) {
                (Ordering::Equal, _) => error.clone(),
                (Ordering::Greater, outcome) => behind(error, outcome),
                (Ordering::Less, _) => behind(error, Outcome::Unknown),
            };
            batch.reply.fail(match batch.doubtful {
                true => told.after_unknown(),
                false => told,
            });
        }
        self.gatherer.fail(error).await;
    }
}

/// The next answer of a session that is open.
async fn next(
    answers: &mut Option<Streaming<v1::AppendSessionResponse>>,
) -> Result<Option<v1::AppendSessionResponse>, Status> {
    match answers {
        Some(answers) => answers.message().await,
        None => std::future::pending().await,
    }
}
