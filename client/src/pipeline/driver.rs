//! The task that sends batches and takes their acks.

use std::cmp::Ordering;
use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::stream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, sleep_until};
use tonic::{Status, Streaming};
use wald_proto::v1;

use super::gather::{BatchReply, Gatherer, SealedBatch};
use super::{PipelineSettings, Stamp, behind};
use crate::batch::BatchAck;
use crate::client::Client;
use crate::error::{Error, ErrorKind, Outcome};
use crate::nodes::ClientNode;
use crate::retry::{FailedAttempts, Repeat, after};
use crate::shared::looked_after;
use crate::token::TokenHeader;

/// A batch that was sent and not acked.
struct InFlight {
    request_id: u64,
    /// Absent once it was sent, if it is never sent again.
    request: Option<v1::AppendBatchRequest>,
    reply: BatchReply,
    /// Whether it was on a connection that broke.
    doubtful: bool,
    /// Given back to the window with the ack.
    _permit: OwnedSemaphorePermit,
}

/// The end of a session.
enum SessionEnd {
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
            ..v1::AppendSessionRequest::default()
        }
    }
}

/// Drives the sessions, one after the other.
pub(super) struct Driver {
    client: Client,
    patience: Duration,
    window_batches: usize,
    stamp: Option<Stamp>,
    gatherer: Gatherer,
    in_flight: VecDeque<InFlight>,
    next_request_id: u64,
    /// Time of the last ack, or of a send or half-close while nothing else was in flight.
    progress: Instant,
    /// Failures since then.
    failures: FailedAttempts,
    /// The token of the last session.
    used: Option<TokenHeader>,
    window: Arc<Semaphore>,
    failure: Arc<OnceLock<Error>>,
}

impl Driver {
    /// `failure` gets the error that ends it, and `window` is closed then.
    pub(super) fn new(
        client: Client,
        settings: &PipelineSettings,
        stamp: Option<Stamp>,
        gatherer: Gatherer,
        window: Arc<Semaphore>,
        failure: Arc<OnceLock<Error>>,
    ) -> Self {
        Self {
            client,
            patience: settings.patience,
            window_batches: settings.window_batches,
            stamp,
            gatherer,
            in_flight: VecDeque::new(),
            next_request_id: 0,
            progress: Instant::now(),
            failures: FailedAttempts::default(),
            used: None,
            window,
            failure,
        }
    }

    pub(super) async fn run(mut self) -> Result<(), Error> {
        loop {
            // A session that broke while nothing was in flight is opened again once there is
            // something to send: no batch is in doubt.
            if self.in_flight.is_empty() {
                match self.gatherer.next().await {
                    Some(sealed) => self.launch(sealed),
                    None => return Ok(()),
                }
            }
            let node = self.client.node();
            match self.serve(&node).await {
                SessionEnd::Closed => return Ok(()),
                SessionEnd::Failed(error) if self.in_flight.is_empty() => {
                    self.client.leave(&node, &error);
                }
                SessionEnd::Failed(error) => {
                    if let Err(error) = self.survive(&node, error).await {
                        self.fail(&error).await;
                        return Err(error);
                    }
                }
            }
        }
    }

    /// Puts a batch in flight, still to be sent.
    fn launch(&mut self, mut sealed: SealedBatch) {
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

    /// One session: sends everything in flight, then the queued batches.
    async fn serve(&mut self, node: &Arc<ClientNode>) -> SessionEnd {
        let again = self.stamp.is_some();
        let (requests, mut outgoing) = mpsc::unbounded_channel();
        for batch in &mut self.in_flight {
            // Unless the session is gone already, which its answers tell.
            let _ = requests.send(batch.message(again));
        }
        let mut requests = Some(requests);
        let mut wal = node.wal();
        let (requests_of_session, used) = self
            .client
            .request(stream::poll_fn(move |cx| outgoing.poll_recv(cx)));
        self.used = used;
        let opening = wal.append_session(requests_of_session);
        let opening = looked_after(opening, node.health_service());
        tokio::pin!(opening);
        let mut answers = None;
        let began = Instant::now();
        loop {
            let room = self.in_flight.len() < self.window_batches;
            let give_up_at = after(self.progress, self.patience);
            // A session can be silent because a proxy has lost the server behind it. Another one then needs time, too. Not
            // much less than half: batches that are sent again count against the rate of a tenant again.
            let quiet_at = after(self.progress.max(began), self.patience / 2);
            tokio::select! {
                opened = &mut opening, if answers.is_none() => match opened {
                    Ok(opened) => {
                        self.client.approach(node, opened.metadata());
                        answers = Some(opened.into_inner());
                    }
                    Err(status) => return SessionEnd::Failed(node.error(&status, self.patience)),
                },
                message = next(&mut answers), if answers.is_some() => {
                    let acked = match message {
                        Ok(Some(message)) => self.ack(message),
                        Ok(None) if self.in_flight.is_empty() && requests.is_none() => {
                            return SessionEnd::Closed;
                        }
                        Ok(None) => {
                            let detail = "the server ended the session".to_owned();
                            Err(Error::new(ErrorKind::ConnectionLost(detail)))
                        }
                        Err(status) => Err(node.error(&status, self.patience)),
                    };
                    if let Err(error) = acked {
                        return SessionEnd::Failed(error);
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
                    // Half-closes: the server acks the requests it has, and ends the stream.
                    None => {
                        requests = None;
                        if self.in_flight.is_empty() {
                            self.progress = Instant::now();
                        }
                    }
                },
                () = sleep_until(quiet_at), if again && !self.in_flight.is_empty() => {
                    let detail = format!("no ack within {:?}", self.patience / 2);
                    return SessionEnd::Failed(Error::new(ErrorKind::ConnectionLost(detail)));
                }
                () = sleep_until(give_up_at), if !self.in_flight.is_empty() || requests.is_none() => {
                    if self.in_flight.is_empty() {
                        // Only the end of the stream is missing.
                        return SessionEnd::Closed;
                    }
                    return SessionEnd::Failed(node.timed_out(self.patience));
                }
            }
        }
    }

    /// Sends the result to the waiters of the first batch in flight.
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
        self.failures = FailedAttempts::default();
        Ok(())
    }

    /// Prepares the next session, if everything in flight may be sent again.
    async fn survive(&mut self, node: &Arc<ClientNode>, error: Error) -> Result<(), Error> {
        let pause = self.client.pause_after(node, &error, &mut self.failures);
        let give_up = Instant::now() + pause >= after(self.progress, self.patience);
        let used = self.used.as_ref();
        let allowed = self.client.allows(Repeat::Guarded, &error, used, true);
        if self.stamp.is_none() || give_up || !allowed {
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
