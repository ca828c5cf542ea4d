//! AppendSession: pipelined requests on one stream.
//!
//! ```text
//! requests ──▶ read while the window has room ──▶ submit, in order ──▶ pending
//!  (grpc/body.rs)                                   │ BUSY: held, then again    │ settled,
//!                                                   └───────────────────────────┤ in order
//! client ◀── transport pulls ◀── acks, and at last why the session ended ◀──────┘
//! ```
//!
//! Requests that have arrived together become one for the engine ([`join`]). A request beyond the rate of its tenant waits
//! before it is gathered, and nothing is read meanwhile. Its rights are checked again after the wait.
//!
//! One task drives it. Acks come in order, and it ends at the first failure: the engine's
//! [`Session`] refuses the requests behind it, nothing more is submitted, and dropping the tickets
//! cancels nothing. The window bounds the memory. An ack leaves the window once the transport has
//! taken it; as long as the client reads no acks, nothing more is read from it.
//!
//! A session of independent requests is the calls of a client on one stream. Each request is
//! refused or acked for itself, as soon as that is known: one that waits for a bucket delays none
//! that waits for the disk.

mod join;

use std::collections::VecDeque;
use std::future::{Future, pending, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::{Duration, Instant};

use futures_core::Stream;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use http::Extensions;
use tokio::sync::mpsc;
use tonic::Status;
use wald_proto::codec::Sent;
use wald_proto::v1;
use wald_storage::{AppendError, Appended, Batch, Limits, LogName, RecoveryEpoch, Session, Ticket};

use super::append::{SubmittedBatch, charge};
use super::{Answers, Node, refuse_late};
use crate::admission::Passage;
use crate::auth::{Caller, Engine, HeldRight, Lease};
use crate::convert::SessionRequest;
use crate::drain::draining;
use crate::grpc::{Admitted, Framed, Messages};
use crate::metrics::{Deadline, OpenSession};
use crate::status::{self, Access};
use join::{JoinedRequests, TakenRequest};

/// Pieces of acks that wait, and as many that the transport has taken and not sent; the window
/// bounds their bytes.
const ACKS: usize = 256;

/// Requests that are taken in, if there are as many, before anything else is looked at.
const AT_ONCE: usize = 128;

/// Maximum bytes of acks that are sent together: the size of an HTTP/2 frame, unless the client
/// permits more.
const TOGETHER_BYTES: usize = 16 << 10;

/// Bytes that a log of a batch takes until its ack is sent: its name twice and its answer.
const LOG_BYTES: u64 = 256;

/// Pause before a request is submitted again that the engine had no room for.
const BUSY_PAUSE: Duration = Duration::from_millis(5);

/// The next message to the client.
enum NextMessage {
    /// Acks, and the room of their requests, which is free once the transport has taken them.
    Acks(Framed, Passage),
    /// The end of the session.
    End(Result<(), Status>),
}

pub(super) fn append_session(
    node: &Arc<Node>,
    caller: Caller,
    extensions: &Extensions,
    received: Box<Messages>,
) -> Result<Answers<Framed>, Status> {
    let store = node.store(Access::Write)?;
    refuse_late(extensions)?;
    let (acks, told) = mpsc::channel(ACKS);
    let run = RunningSession {
        node: Arc::clone(node),
        engine: store.engine.clone(),
        lease: caller.lease(HeldRight::Principal),
        caller,
        limits: store.engine.profile().limits,
        epoch: store.epoch,
        deadline: extensions.get::<Deadline>().map(|deadline| deadline.at),
        acks,
        session: Session::new(),
        is_independent: None,
        pending: VecDeque::new(),
        independent: FuturesUnordered::new(),
        refused: VecDeque::new(),
        gathered: None,
        held: None,
        throttled: None,
        end: None,
        _open: node.metrics.session_opened(),
    };
    tokio::spawn(run.live(received));
    let ready = Vec::new().into_iter();
    Ok(Box::pin(Acks { told, ready }))
}

/// The messages that the transport sends.
struct Acks {
    told: mpsc::Receiver<NextMessage>,
    /// Taken from there together.
    ready: std::vec::IntoIter<NextMessage>,
}

impl Stream for Acks {
    type Item = Result<Framed, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.ready.as_slice().is_empty() {
            let mut told = Vec::new();
            let _count = ready!(this.told.poll_recv_many(context, &mut told, ACKS));
            this.ready = told.into_iter();
        }
        Poll::Ready(match this.ready.next() {
            Some(NextMessage::Acks(mut acks, _room)) => {
                // Each piece leaves in a write of its own.
                while let Some(NextMessage::Acks(more, _)) = this.ready.as_slice().first()
                    && acks.join(more, TOGETHER_BYTES)
                {
                    this.ready.next();
                }
                Some(Ok(acks))
            }
            Some(NextMessage::End(Ok(()))) => None,
            Some(NextMessage::End(Err(status))) => Some(Err(status)),
            // Only a panic ends the task without a word.
            None => Some(Err(Status::internal("the session was broken off"))),
        })
    }
}

/// The next step of a session.
enum Step {
    /// The first pending request is settled.
    Settled(Result<Appended, AppendError>),
    /// Independent requests are settled.
    SettledAlone(Box<(PendingRequests, Result<Appended, AppendError>)>),
    /// The deadline has passed.
    Late,
    /// The server leaves.
    Left,
    /// The credential of the caller has ended, or a right that a waiting request needs.
    Refused(Status),
    /// Something was taken in.
    Taken,
}

/// A session under way.
struct RunningSession {
    node: Arc<Node>,
    engine: Engine,
    caller: Caller,
    /// Ends the session with the credential of its caller.
    lease: Option<Lease>,
    limits: Limits,
    epoch: RecoveryEpoch,
    deadline: Option<Instant>,
    acks: mpsc::Sender<NextMessage>,
    session: Session,
    /// Whether its requests are independent; `None` before the first.
    is_independent: Option<bool>,
    /// Submitted and not acked, in order.
    pending: VecDeque<PendingRequests>,
    /// Independent requests that are submitted and not answered.
    independent: FuturesUnordered<IndependentRequests>,
    /// Refusals of independent requests that are still to be sent, and the room of the requests.
    refused: VecDeque<(Framed, Passage)>,
    /// Read, and not submitted yet because more may join it.
    gathered: Option<TakenRequest>,
    /// Read before, and not submitted yet because the engine had no room.
    held: Option<HeldRequests>,
    /// Read last, and not submitted yet because its tenant has used up its rate.
    throttled: Option<ThrottledRequest>,
    /// Set when nothing more is read: how the session ends if all that is pending is acked.
    end: Option<Result<(), Status>>,
    _open: OpenSession,
}

/// Requests that the engine has no room for until, perhaps, then.
struct HeldRequests {
    taken: TakenRequest,
    again: Pin<Box<tokio::time::Sleep>>,
}

/// A request that the rate of its tenant lets pass later.
struct ThrottledRequest {
    taken: TakenRequest,
    passes: Pin<Box<dyn Future<Output = ()> + Send + Sync>>,
}

/// Requests that the engine has.
struct PendingRequests {
    requests: JoinedRequests,
    answer: SubmittedBatch,
    settled: Settled,
    room: Passage,
}

/// The engine's last answer.
enum Settled {
    Coming(Ticket),
    There(Result<Appended, AppendError>),
}

impl PendingRequests {
    /// The engine's last answer, when it comes.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<Appended, AppendError>> {
        match &mut self.settled {
            Settled::Coming(ticket) => Pin::new(ticket).poll(context),
            Settled::There(settled) => Poll::Ready(settled.clone()),
        }
    }
}

/// Requests that are answered when they are settled, whatever came before them.
struct IndependentRequests(Option<PendingRequests>);

impl Future for IndependentRequests {
    type Output = (PendingRequests, Result<Appended, AppendError>);

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(requests) = &mut self.0 else {
            return Poll::Pending;
        };
        let settled = ready!(requests.poll(context));
        match self.0.take() {
            Some(requests) => Poll::Ready((requests, settled)),
            None => Poll::Pending,
        }
    }
}

impl RunningSession {
    /// Serves the session until it has ended and the client has its result, or is gone.
    async fn live(mut self, mut received: Box<Messages>) {
        let acks = self.acks.clone();
        tokio::select! {
            biased;
            () = acks.closed() => {}
            () = async {
                let end = self.serve(&mut received).await;
                self.tell(NextMessage::End(end), &mut received).await;
                // Whatever the client still sends is dropped from here on.
                drop(received);
                pending().await
            } => {}
        }
        // The engine has these, whether or not a client waits for them. They take room until it
        // has released them.
        for PendingRequests { settled, room, .. } in std::mem::take(&mut self.pending) {
            if let Settled::Coming(ticket) = settled {
                let _ = ticket.await;
            }
            drop(room);
        }
        while self.independent.next().await.is_some() {}
    }

    /// Reads, submits and acks; answers how the session ended.
    async fn serve(&mut self, received: &mut Messages) -> Result<(), Status> {
        let mut phase = self.node.phase.clone();
        let mut left = pin!(draining(&mut phase));
        let mut late = pin!(passed(self.deadline));
        loop {
            if self.pending.is_empty()
                && self.independent.is_empty()
                && self.held.is_none()
                && self.throttled.is_none()
                && let Some(end) = self.end.take()
            {
                return end;
            }
            let step =
                poll_fn(|context| self.poll_step(received, late.as_mut(), left.as_mut(), context));
            match step.await {
                Step::Settled(settled) => self.ack(settled, received).await?,
                Step::SettledAlone(answered) => {
                    let (requests, settled) = *answered;
                    self.answer(requests, settled, received).await?;
                }
                Step::Late => return Err(self.too_late()),
                Step::Left => self.leave(&status::append(&AppendError::Draining)),
                Step::Refused(status) => self.leave(&status),
                Step::Taken => {}
            }
            while let Some((refusals, room)) = self.refused.pop_front() {
                self.tell(NextMessage::Acks(refusals, room), received).await;
            }
        }
    }

    /// The next step; takes in requests that have arrived.
    fn poll_step(
        &mut self,
        received: &mut Messages,
        late: Pin<&mut impl Future<Output = ()>>,
        left: Pin<&mut impl Future<Output = ()>>,
        context: &mut Context<'_>,
    ) -> Poll<Step> {
        received.take_in(context);
        if let Some(first) = self.pending.front_mut()
            && let Poll::Ready(settled) = first.poll(context)
        {
            return Poll::Ready(Step::Settled(settled));
        }
        if let Poll::Ready(Some(answered)) = self.independent.poll_next_unpin(context) {
            return Poll::Ready(Step::SettledAlone(Box::new(answered)));
        }
        if late.poll(context).is_ready() {
            return Poll::Ready(Step::Late);
        }
        if self.end.is_none() && left.poll(context).is_ready() {
            return Poll::Ready(Step::Left);
        }
        if self.end.is_none()
            && let Some(lease) = &mut self.lease
            && let Poll::Ready(status) = lease.poll_ended(context)
        {
            return Poll::Ready(Step::Refused(status));
        }
        if let Some(held) = &mut self.held {
            ready!(held.again.as_mut().poll(context));
            self.submit_held();
            return Poll::Ready(Step::Taken);
        }
        let mut taken = 0;
        if self.throttled.is_some()
            && let Err(status) = self.renew_caller()
        {
            return Poll::Ready(Step::Refused(status));
        }
        if let Some(throttled) = &mut self.throttled {
            ready!(throttled.passes.as_mut().poll(context));
            received.restart_wait();
            self.gather_throttled();
            taken += 1;
        }
        while taken < AT_ONCE && self.reads() {
            match received.poll_message(context) {
                Poll::Ready(request) => self.take(request.transpose()),
                Poll::Pending => break,
            }
            taken += 1;
        }
        self.submit_gathered();
        match taken {
            0 => Poll::Pending,
            _ => Poll::Ready(Step::Taken),
        }
    }

    /// Takes in the request that was read.
    fn take(&mut self, request: Result<Option<Admitted>, Status>) {
        let (message, mut room) = match request {
            Ok(Some(request)) => request,
            Ok(None) => return self.end = Some(Ok(())),
            Err(status) => return self.end = Some(Err(status)),
        };
        let request = Sent::<v1::AppendSessionRequest>::new(message.payload());
        let request = match SessionRequest::read(&request) {
            Ok(request) => request,
            Err(status) => return self.end = Some(Err(status)),
        };
        let (request_id, is_independent) = (request.request_id, request.independent);
        let requests = JoinedRequests::of(request_id, request.is_record());
        if *self.is_independent.get_or_insert(is_independent) != is_independent {
            let why = "all requests of a session must have the same value";
            let status = status::malformed("independent", why, Access::Write);
            return self.end = Some(Err(status::in_session(&status, request_id)));
        }
        let at = Instant::now();
        if self.deadline.is_some_and(|deadline| at >= deadline) {
            let status = status::deadline_before_start();
            return self.end = Some(Err(status::in_session(&status, request_id)));
        }
        if let Err(status) = self.renew_caller() {
            // The request before this one fails first.
            let earlier = self.gathered.take_if(|_| !is_independent);
            let first = earlier.map_or(request_id, |earlier| earlier.requests.first);
            return self.end = Some(Err(status::in_session(&status, first)));
        }
        let allowed = (request.batch(&self.limits))
            .and_then(|(batch, durability)| Ok((self.caller.allow(batch)?, durability)))
            .and_then(|(batch, durability)| {
                // Other sessions wait for their rate.
                if is_independent && let Some(tenant) = self.caller.tenant() {
                    tenant.append(charge(batch.get()))?;
                }
                Ok((batch, durability))
            });
        match allowed {
            Ok((batch, durability)) => {
                room.enlarge(answer_bytes(batch.get()));
                let taken = TakenRequest {
                    requests,
                    batch,
                    durability,
                    at,
                    room,
                };
                match is_independent {
                    true => self.gather(taken),
                    false => self.gather_in_rate(taken),
                }
            }
            Err(status) if is_independent => self.refuse(&requests, &status, room),
            Err(status) => self.end = Some(Err(status::in_session(&status, request_id))),
        }
    }

    /// Refuses independent requests.
    fn refuse(&mut self, requests: &JoinedRequests, status: &Status, mut room: Passage) {
        let count = requests.count();
        let metrics = &self.node.metrics;
        metrics.requests_answered(requests.is_record, Some(status), count);
        // The answer can be larger than the request, and waits as long as the client does not read it.
        let bytes = (status.details().len() + status.message().len()) as u64;
        room.enlarge(count * bytes);
        match requests.refusals(status) {
            Ok(refusals) => self.refused.push_back((refusals, room)),
            Err(status) => self.end = Some(Err(status)),
        }
    }

    /// Whether more requests may be read.
    fn reads(&self) -> bool {
        self.end.is_none() && self.held.is_none() && self.throttled.is_none()
    }

    /// Gathers a request once the rate of its tenant lets it pass. Nothing is read meanwhile.
    fn gather_in_rate(&mut self, taken: TakenRequest) {
        let Some(tenant) = self.caller.tenant() else {
            return self.gather(taken);
        };
        let amount = charge(taken.batch.get());
        match tenant.append_in_turn(amount) {
            None => self.gather(taken),
            Some(turn) => {
                let passes = Box::pin(turn.come());
                self.throttled = Some(ThrottledRequest { taken, passes });
            }
        }
    }

    fn gather_throttled(&mut self) {
        if let Some(throttled) = self.throttled.take() {
            self.gather(throttled.taken);
        }
    }

    /// Puts a request behind those gathered if they can be one; otherwise those are submitted,
    /// and it is the first of the next.
    fn gather(&mut self, mut request: TakenRequest) {
        if let Some(gathered) = &mut self.gathered {
            let is_independent = self.is_independent == Some(true);
            match gathered.join(&self.engine, request, is_independent) {
                None => return,
                Some(alone) => request = alone,
            }
            self.submit_gathered();
        }
        self.gathered = Some(request);
    }

    /// Submits the gathered requests, unless an earlier one is held.
    fn submit_gathered(&mut self) {
        if self.held.is_none()
            && let Some(gathered) = self.gathered.take()
        {
            self.submit(gathered);
        }
    }

    /// Submits requests to the engine. Requests that it has no room for are held, and nothing
    /// is read meanwhile.
    fn submit(&mut self, taken: TakenRequest) {
        let TakenRequest {
            requests,
            batch,
            durability,
            at,
            room,
        } = taken;
        let answer = SubmittedBatch::new(batch.get(), at);
        if self.is_independent == Some(true) {
            let settled = Settled::Coming(self.engine.submit(None, batch, durability));
            return self
                .independent
                .push(IndependentRequests(Some(PendingRequests {
                    requests,
                    answer,
                    settled,
                    room,
                })));
        }
        let mut ticket = (self.engine).submit(Some(&self.session), batch, durability);
        if let Some(batch) = Engine::take_back(&mut ticket) {
            let taken = TakenRequest {
                requests,
                batch,
                durability,
                at,
                room,
            };
            let again = Box::pin(tokio::time::sleep(BUSY_PAUSE));
            self.held = Some(HeldRequests { taken, again });
            return;
        }
        let mut nobody = Context::from_waker(Waker::noop());
        let settled = match Pin::new(&mut ticket).poll(&mut nobody) {
            Poll::Ready(settled) => {
                if settled.is_err() {
                    // The pending requests are acked first, then this fails the session.
                    self.end = Some(Ok(()));
                }
                Settled::There(settled)
            }
            Poll::Pending => Settled::Coming(ticket),
        };
        self.pending.push_back(PendingRequests {
            requests,
            answer,
            settled,
            room,
        });
    }

    /// Submits the held requests again, and then the requests that came after them.
    fn submit_held(&mut self) {
        if self.held.is_some()
            && let Err(status) = self.renew_caller()
        {
            return self.leave(&status);
        }
        if let Some(held) = self.held.take() {
            self.submit(held.taken);
            self.submit_gathered();
        }
    }

    /// Sends the acks of the first pending requests, or fails as they did.
    async fn ack(
        &mut self,
        settled: Result<Appended, AppendError>,
        received: &mut Messages,
    ) -> Result<(), Status> {
        let Some(first) = self.pending.pop_front() else {
            return Ok(());
        };
        let (requests, epoch) = (first.requests, self.epoch);
        let acks = |names: &[LogName], appended: &Appended| requests.acks(names, appended, epoch);
        let acks = first
            .answer
            .ack(&self.node, &self.caller, settled, acks)
            .map_err(|status| status::in_session(&status, requests.first))?;
        self.tell(NextMessage::Acks(acks?, first.room), received)
            .await;
        // The acked requests have made room.
        self.submit_held();
        Ok(())
    }

    /// Sends the acks of independent requests, or refuses them.
    async fn answer(
        &mut self,
        settled: PendingRequests,
        result: Result<Appended, AppendError>,
        received: &mut Messages,
    ) -> Result<(), Status> {
        let PendingRequests {
            requests,
            answer,
            settled: _,
            room,
        } = settled;
        let epoch = self.epoch;
        let acks = |names: &[LogName], appended: &Appended| requests.acks(names, appended, epoch);
        match answer.ack(&self.node, &self.caller, result, acks) {
            Ok(acks) => {
                let metrics = &self.node.metrics;
                metrics.requests_answered(requests.is_record, None, requests.count());
                self.tell(NextMessage::Acks(acks?, room), received).await;
            }
            Err(status) => self.refuse(&requests, &status, room),
        }
        Ok(())
    }

    /// Passes the next message to the client. Waits for the transport to take earlier acks, and
    /// receives meanwhile.
    async fn tell(&self, told: NextMessage, received: &mut Messages) {
        let Err(mpsc::error::TrySendError::Full(told)) = self.acks.try_send(told) else {
            return;
        };
        let mut sending = pin!(self.acks.send(told));
        // Fails only when the client is gone.
        let _ = poll_fn(|context| {
            received.take_in(context);
            sending.as_mut().poll(context)
        })
        .await;
    }

    /// Judges the caller again after a change of the rules, and checks the requests that were read and not submitted.
    /// Independent requests never wait.
    fn renew_caller(&mut self) -> Result<(), Status> {
        if self.is_independent == Some(true) {
            return self.caller.renew();
        }
        let held = self.held.as_mut().map(|held| &mut held.taken);
        let throttled = self
            .throttled
            .as_mut()
            .map(|throttled| &mut throttled.taken);
        let waiting = held.into_iter().chain(&mut self.gathered).chain(throttled);
        (self.caller).renew_with(waiting.map(|taken| &mut taken.batch))
    }

    /// Nothing more is taken in, for the reason of the status.
    fn leave(&mut self, status: &Status) {
        let first = self.first_unsubmitted();
        self.held = None;
        self.gathered = None;
        self.throttled = None;
        self.end = Some(Err(match first {
            Some(request_id) => status::in_session(status, request_id),
            None => status.clone(),
        }));
    }

    /// The number of the first request that was read and that the engine does not have.
    fn first_unsubmitted(&self) -> Option<u64> {
        let held = self.held.as_ref().map(|held| &held.taken);
        let throttled = self.throttled.as_ref().map(|throttled| &throttled.taken);
        held.or(self.gathered.as_ref())
            .or(throttled)
            .map(|taken| taken.requests.first)
    }

    /// The deadline of the stream has passed.
    fn too_late(&self) -> Status {
        if let Some(first) = self.pending.front() {
            let status = status::deadline_under_way(Access::Write);
            return status::in_session(&status, first.requests.first);
        }
        if !self.independent.is_empty() {
            return status::deadline_under_way(Access::Write);
        }
        let status = status::deadline_before_start();
        match self.first_unsubmitted() {
            Some(request_id) => status::in_session(&status, request_id),
            None => status,
        }
    }
}

/// Bytes that a batch keeps until its ack is sent, in addition to the bytes of every request:
/// its logs can be many, and their answers larger than their records.
fn answer_bytes(batch: &Batch) -> u64 {
    let parts = batch.logs.len() + batch.checks.len() + batch.cursors.len();
    u64::try_from(parts.saturating_sub(1)).unwrap_or(u64::MAX) * LOG_BYTES
}

/// Resolves at the deadline.
async fn passed(deadline: Option<Instant>) {
    match deadline {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => pending().await,
    }
}
