//! Scan: chunks of the engine as messages, with heartbeats in between.
//!
//! The transport pulls the stream. As long as the client's window is full, the engine reads at
//! most one message, so that a client that reads nothing costs no more.
//!
//! Where many follow one log, each message costs once for each of them, and appends would wait
//! for all of that. The more followers there are, the longer each waits after a message before
//! it reads the next, which is then larger. This begins with [`MANY`] followers. A follower that
//! fell behind does not wait.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::stream;
use tokio::sync::watch;
use tonic::Status;
use wald_proto::codec::Encoded;
use wald_proto::v1;
use wald_storage::{Clock, ReadError, Scan, ScanChunk, SystemClock, Timestamp};

use super::{Answers, Node};
use crate::answers::{AnswerShare, ScanRoom};
use crate::auth::{Amount, Caller, CountedUse, HeldRight, Lease, LogRight, TenantUsage, leased};
use crate::convert;
use crate::drain::{Phase, draining};
use crate::grpc::Framed;
use crate::metrics::{FollowerWait, ReadOp};
use crate::status;

/// `share`: the share of the client's connection in the memory of answers.
pub(super) async fn scan(
    node: &Arc<Node>,
    caller: &Caller,
    request: v1::ScanRequest,
    share: Option<AnswerShare>,
) -> Result<Answers<Framed>, Status> {
    let (mut delivery, lease) = Delivery::begin(node, caller, request).await?;
    if let Some(share) = share {
        let room = ScanRoom::new(share, delivery.tenant.clone());
        delivery.scan.read_in(Arc::clone(&room) as _);
        delivery.room = Some(room);
    }
    let answers = Box::pin(stream::unfold(delivery, Delivery::step));
    Ok(leased(lease, answers))
}

/// Number of followers of a log from which on they pause between messages.
pub(super) const MANY: usize = 20;

/// Time between two messages to one follower, for each that follows the same; up to 2,000 of
/// them together get at most 20,000 messages a second, a part of one processor.
const PAUSE_EACH: Duration = Duration::from_micros(50);

/// Most of it, however many follow.
const MOST_PAUSE: Duration = Duration::from_millis(100);

/// Time between two looks whether a scan waits for its rate while the server drains.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// A scan on its way to a client.
struct Delivery {
    node: Arc<Node>,
    scan: Box<dyn Scan>,
    /// The memory of its messages, and its place among the reads of its tenant.
    room: Option<Arc<ScanRoom>>,
    tenant: Option<Arc<TenantUsage>>,
    _follower: Option<CountedUse>,
    /// `None`: it does not follow.
    wait: Option<FollowerWait>,
    phase: watch::Receiver<Phase>,
    view: v1::RecordView,
    any_node: bool,
    follow: bool,
    /// The last message reached the end; the next records are still to come.
    caught_up: bool,
    /// Time at which the last message was read, if it reached the end then.
    at_end: Option<Instant>,
    ended: bool,
}

/// The contents of the next message.
enum Next {
    Chunk(Result<Option<ScanChunk>, ReadError>),
    Silence,
    Draining,
}

impl Delivery {
    /// The delivery, and the lease that ends it.
    async fn begin(
        node: &Arc<Node>,
        caller: &Caller,
        request: v1::ScanRequest,
    ) -> Result<(Self, Option<Lease>), Status> {
        let any_node = request.any_node;
        let store = node.reads(any_node)?;
        let (request, view) = convert::scan(request)?;
        let request = caller.allow(request)?;
        let follow = request.get().follow;
        let held = HeldRight::Logs(LogRight::Read, request.get().selector.clone());
        let lease = caller.lease(held);
        let tenant = caller.tenant().cloned();
        let follower = match &tenant {
            Some(tenant) if follow => Some(tenant.follow()?),
            _ => None,
        };
        let scan = store
            .engine
            .scan(request)
            .await
            .map_err(|error| status::read(&error))?;
        let delivery = Self {
            phase: node.phase.clone(),
            wait: follow.then(|| node.metrics.follower_waits.follow()),
            node: Arc::clone(node),
            scan,
            room: None,
            tenant,
            _follower: follower,
            view,
            any_node,
            follow,
            caught_up: false,
            at_end: None,
            ended: false,
        };
        Ok((delivery, lease))
    }

    /// One message and the rest, or the end.
    async fn step(mut self) -> Option<(Result<Framed, Status>, Self)> {
        if self.ended {
            return None;
        }
        if let Some(wait) = &self.wait {
            wait.taken();
        }
        let now = Instant::now();
        let rest = self.rest(now);
        let asked = now + rest;
        let next = tokio::select! {
            biased;
            () = drained(&mut self.phase, self.follow, self.room.as_deref()) => Next::Draining,
            next = next(self.scan.as_mut(), rest) => next,
            () = tokio::time::sleep(self.node.heartbeat_interval) => Next::Silence,
        };
        let message = match next {
            Next::Chunk(Ok(Some(chunk))) => {
                let arrival = chunk.batches.first().map(|batch| batch.arrival);
                self.tell(asked, arrival, chunk.caught_up);
                self.at_end = chunk.caught_up.then(Instant::now);
                if let Some(tenant) = &self.tenant {
                    tenant.delivered(Amount::of(&chunk.batches));
                }
                self.message(chunk)
            }
            // A following scan also ends because the engine drains, which the caller
            // must not take for the end of the log.
            Next::Chunk(Ok(None)) if self.follow && self.leaving() => Err(status::draining()),
            Next::Chunk(Ok(None)) => return None,
            Next::Chunk(Err(error)) => Err(status::read(&error)),
            Next::Silence => {
                // The client may take its time until it pulls again.
                if let Some(room) = &self.room {
                    drop(room.take());
                }
                self.heartbeat()
            }
            Next::Draining => Err(status::draining()),
        };
        self.ended = message.is_err();
        if let Some(wait) = &self.wait {
            wait.handed();
        }
        Some((message, self))
    }

    /// Pause before the next message, which gathers the records since the last one reached the
    /// end.
    fn rest(&self, now: Instant) -> Duration {
        let followers = self.scan.followers();
        let Some(at_end) = self.at_end.filter(|_| followers >= MANY) else {
            return Duration::ZERO;
        };
        let followers = u32::try_from(followers).unwrap_or(u32::MAX);
        let pause = PAUSE_EACH.saturating_mul(followers).min(MOST_PAUSE);
        pause.saturating_sub(now.saturating_duration_since(at_end))
    }

    fn message(&self, chunk: ScanChunk) -> Result<Framed, Status> {
        // A newer copy has all replicated records of the epochs before.
        let epoch = self.node.reads(self.any_node)?.epoch;
        let held = self.room.as_ref().and_then(|room| room.take());
        let message = Framed::new(convert::scan_response(chunk, self.view, epoch)?)?;
        Ok(match held {
            Some(held) => message.in_room(held),
            None => message,
        })
    }

    /// Records the duration of a message that could be read at once, and the delay of one that
    /// was waited for.
    fn tell(&mut self, asked: Instant, arrival: Option<Timestamp>, caught_up: bool) {
        let metrics = &self.node.metrics;
        if !self.caught_up {
            metrics.read(ReadOp::Scan, asked.elapsed());
        } else if let Some(arrival) = arrival {
            let lag = SystemClock.now().micros() - arrival.micros();
            let lag = Duration::from_micros(u64::try_from(lag).unwrap_or(0));
            metrics.delivered(lag);
        }
        self.caught_up = caught_up;
    }

    fn leaving(&self) -> bool {
        *self.phase.borrow() == Phase::Draining
    }

    fn heartbeat(&self) -> Result<Framed, Status> {
        let epoch = self.node.reads(self.any_node)?.epoch;
        Framed::new(Encoded::from(&v1::ScanResponse {
            cursor: self.scan.cursor(),
            recovery_epoch: epoch.get(),
            ..v1::ScanResponse::default()
        }))
    }
}

/// Resolves when the server drains and the scan would hold up its stop: it follows, or it waits for the rate of its
/// tenant.
async fn drained(phase: &mut watch::Receiver<Phase>, follows: bool, room: Option<&ScanRoom>) {
    draining(phase).await;
    while !follows && !room.is_some_and(ScanRoom::waits_for_rate) {
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

/// The next chunk, after the pause `rest`.
async fn next(scan: &mut dyn Scan, rest: Duration) -> Next {
    if !rest.is_zero() {
        tokio::time::sleep(rest).await;
    }
    Next::Chunk(scan.next().await)
}

#[cfg(test)]
mod tests {
    use super::super::tests::Fixture;
    use super::*;
    use crate::answers::AnswerBudget;

    /// A number of followers whose pause is much longer than the time between heartbeats.
    const FOLLOWERS: usize = 400;
    const PAUSE: Duration = Duration::from_millis(20);
    const BEAT: Duration = Duration::from_millis(1);

    impl Delivery {
        /// Behind the next message with records: the next record, and the number of heartbeats before the message.
        async fn records(mut self) -> (Self, u64, usize) {
            let mut heartbeats = 0;
            loop {
                let (message, delivery) = self.step().await.expect("it follows");
                let message: v1::ScanResponse = message.expect("nothing is wrong").decoded();
                self = delivery;
                if let Some(last) = message.batches.last() {
                    let next = last.first_lsn() + last.records.len() as u64;
                    return (self, next, heartbeats);
                }
                heartbeats += 1;
                assert!(heartbeats < 1000, "nothing but heartbeats");
            }
        }
    }

    fn following(log: &str) -> v1::ScanRequest {
        v1::ScanRequest {
            selector: Some(v1::scan_request::Selector::Log(log.to_owned())),
            follow: true,
            ..v1::ScanRequest::default()
        }
    }

    /// Followers of a log with one record, which all of them were given.
    async fn followers(fixture: &mut Fixture) -> Vec<Delivery> {
        fixture.append("a").await.unwrap();
        let mut followers = Vec::new();
        for _ in 0..FOLLOWERS {
            let (delivery, _) = Delivery::begin(&fixture.node, &Caller::anyone(), following("a"))
                .await
                .unwrap();
            let (delivery, ..) = delivery.records().await;
            // A scan is one of the followers only once it has waited.
            let (_heartbeat, delivery) = delivery.step().await.unwrap();
            followers.push(delivery);
        }
        assert_eq!(followers[0].scan.followers(), FOLLOWERS);
        followers
    }

    #[tokio::test]
    async fn heartbeats_do_not_put_off_what_there_is() {
        let mut fixture = Fixture::beating(BEAT).await;
        let mut all = followers(&mut fixture).await;
        let mut follower = all.pop().unwrap();
        fixture.append("a").await.unwrap();
        let began = Instant::now();
        follower.at_end = Some(began);
        let (_, next, heartbeats) = follower.records().await;
        assert_eq!(next, 2);
        assert!(heartbeats > 0 && began.elapsed() >= PAUSE);
    }

    #[tokio::test]
    async fn heartbeats_before_the_first_piece_of_one_log_have_no_cursor() {
        const BYTES: u64 = 4 << 20;
        let mut fixture = Fixture::beating(BEAT).await;
        fixture.append("a").await.unwrap();
        let budget = AnswerBudget::new(BYTES);
        let taken = AnswerShare::new(&budget).count(BYTES);
        let (mut delivery, _) = Delivery::begin(&fixture.node, &Caller::anyone(), following("a"))
            .await
            .unwrap();
        let room = ScanRoom::new(AnswerShare::new(&budget), None);
        delivery.scan.read_in(Arc::clone(&room) as _);
        delivery.room = Some(room);
        let (heartbeat, delivery) = delivery.step().await.unwrap();
        let heartbeat: v1::ScanResponse = heartbeat.unwrap().decoded();
        assert!(heartbeat.cursor.is_empty() && heartbeat.recovery_epoch > 0);
        drop(taken);
        let (_, next, _) = delivery.records().await;
        assert_eq!(next, 1);
    }

    #[tokio::test]
    async fn who_fell_behind_comes_level_without_waiting() {
        const MESSAGES: u64 = 5;
        let mut fixture = Fixture::beating(BEAT).await;
        let mut all = followers(&mut fixture).await;
        let (late, mut front) = (all.pop().unwrap(), all.pop().unwrap());
        for number in 0..MESSAGES {
            fixture.append("a").await.unwrap();
            let next;
            (front, next, _) = front.records().await;
            assert_eq!(next, number + 2);
        }
        assert_eq!(late.rest(Instant::now()), Duration::ZERO);
        let (late, next, _) = late.records().await;
        assert!(next == MESSAGES + 1 && late.caught_up);
    }
}
