//! Scan: chunks of the engine as messages, with heartbeats in between.
//!
//! The stream is pulled by the transport: as long as the client's window is full, the
//! engine is asked for one message at most, so that a reader which reads nothing costs that.
//!
//! Where many follow one log, each message costs once for each of them, and appends would wait
//! for all of that. So the more there are, the longer each waits after a message before it asks
//! for the next, which then has more; and from [`fan_out::MANY`] on they share what they are
//! given ([`super::fan_out`]).

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::stream;
use tokio::sync::watch;
use tonic::Status;
use wald_proto::codec::Encoded;
use wald_proto::v1;
use wald_storage::{Clock, Lsn, ReadError, Scan, ScanChunk, SystemClock, Timestamp};

use super::direct::Framed;
use super::fan_out::{self, Kept, Shared};
use super::{Answers, Node, Store};
use crate::convert;
use crate::drain::{Phase, draining};
use crate::metrics::ReadOp;
use crate::status::{self, Access};

pub(super) fn scan(node: &Arc<Node>, request: v1::ScanRequest) -> Result<Answers<Framed>, Status> {
    let store = node.store(Access::Read)?;
    let (request, view) = convert::scan(request)?;
    let follow = request.follow;
    let scan = store
        .engine
        .scan(request)
        .map_err(|error| status::read(&error))?;
    let delivery = Delivery {
        phase: node.phase.clone(),
        node: Arc::clone(node),
        scan,
        view,
        follow,
        caught_up: false,
        told: Instant::now(),
        shared: None,
        ended: false,
    };
    Ok(Box::pin(stream::unfold(delivery, Delivery::step)))
}

/// Time between two messages to one follower, for each that follows the same; up to 2,000 of
/// them together get at most 20,000 messages a second, a part of one processor.
const PAUSE_EACH: Duration = Duration::from_micros(50);

/// Most of it, however many follow. Who fell behind waits as long as those in front, and so
/// stays behind while appends are steady.
const MOST_PAUSE: Duration = Duration::from_millis(100);

/// A scan on its way to a client.
struct Delivery {
    node: Arc<Node>,
    scan: Box<dyn Scan>,
    phase: watch::Receiver<Phase>,
    view: v1::RecordView,
    follow: bool,
    /// The last message reached the end: what comes next is waited for.
    caught_up: bool,
    /// When the last message was made.
    told: Instant,
    /// With the others that follow the log, once there are many.
    shared: Option<Arc<Shared>>,
    ended: bool,
}

/// What the next message is made of.
enum Next {
    Chunk(Result<Option<ScanChunk>, ReadError>),
    /// It is there already.
    Kept(Kept),
    Silence,
    Draining,
}

impl Delivery {
    /// One message and the rest, or the end.
    async fn step(mut self) -> Option<(Result<Framed, Status>, Self)> {
        if self.ended {
            return None;
        }
        let asked = Instant::now();
        let rest = self.rest(asked);
        let from = self.join();
        let shared = self.shared.as_deref().zip(from);
        let next = tokio::select! {
            biased;
            () = draining(&mut self.phase), if self.follow => Next::Draining,
            next = next(self.scan.as_mut(), shared, rest) => next,
            () = tokio::time::sleep(self.node.heartbeat_interval) => Next::Silence,
        };
        let message = match next {
            Next::Chunk(Ok(Some(chunk))) => {
                if !self.caught_up {
                    self.node.metrics.read(ReadOp::Scan, asked.elapsed());
                }
                self.tell_lag(chunk.batches.first().map(|batch| batch.arrival));
                self.caught_up = chunk.caught_up;
                self.message(chunk, from)
            }
            Next::Kept(kept) => {
                self.tell_lag(Some(kept.arrival));
                self.caught_up = kept.after.caught_up;
                Ok(kept.message)
            }
            // A following scan also ends because the engine drains, which the caller
            // must not take for the end of the log.
            Next::Chunk(Ok(None)) if self.follow && self.leaving() => Err(status::draining()),
            Next::Chunk(Ok(None)) => return None,
            Next::Chunk(Err(error)) => Err(status::read(&error)),
            Next::Silence => self.heartbeat(),
            Next::Draining => Err(status::draining()),
        };
        self.ended = message.is_err();
        self.told = Instant::now();
        Some((message, self))
    }

    /// How long to wait before the next message.
    fn rest(&self, now: Instant) -> Duration {
        let followers = self.scan.followers();
        if followers < fan_out::MANY {
            return Duration::ZERO;
        }
        let followers = u32::try_from(followers).unwrap_or(u32::MAX);
        let pause = PAUSE_EACH.saturating_mul(followers).min(MOST_PAUSE);
        pause.saturating_sub(now.saturating_duration_since(self.told))
    }

    /// Where it stands in what it shares with others, if there are many.
    fn join(&mut self) -> Option<Lsn> {
        if self.scan.followers() < fan_out::MANY {
            self.shared = None;
            return None;
        }
        let place = self.scan.place()?;
        let fan_out = &self.node.fan_out;
        self.shared
            .get_or_insert_with(|| fan_out.join(&place, self.view));
        Some(place.next)
    }

    /// A chunk that began at `from`, if that is known.
    fn message(&mut self, chunk: ScanChunk, from: Option<Lsn>) -> Result<Framed, Status> {
        let epoch = self.node.store(Access::Read)?.epoch;
        let arrival = chunk.batches.first().map(|batch| batch.arrival);
        let shareable = chunk.gaps.is_empty();
        let message = convert::scan_response(chunk, self.view, epoch).and_then(Framed::new)?;
        if let (Some(shared), Some(from), Some(arrival), Some(after), true) =
            (&self.shared, from, arrival, self.scan.place(), shareable)
        {
            let message = message.clone();
            shared.keep(Kept {
                from,
                after,
                arrival,
                message,
                made: Instant::now(),
            });
        }
        Ok(message)
    }

    /// How late what was waited for comes; what was there before the wait tells nothing.
    fn tell_lag(&self, arrival: Option<Timestamp>) {
        if let Some(arrival) = arrival.filter(|_| self.caught_up) {
            let lag = SystemClock.now().micros() - arrival.micros();
            let lag = Duration::from_micros(u64::try_from(lag).unwrap_or(0));
            self.node.metrics.delivered(lag);
        }
    }

    fn leaving(&self) -> bool {
        *self.phase.borrow() == Phase::Draining
    }

    fn heartbeat(&self) -> Result<Framed, Status> {
        let store: &Store = self.node.store(Access::Read)?;
        Framed::new(Encoded::from(&v1::ScanResponse {
            cursor: self.scan.cursor(),
            recovery_epoch: store.epoch.get(),
            ..v1::ScanResponse::default()
        }))
    }
}

/// What comes next, not before so long. With others, what was given to one of them who stood
/// here, or up to where one of them stands.
async fn next(scan: &mut dyn Scan, shared: Option<(&Shared, Lsn)>, rest: Duration) -> Next {
    if !rest.is_zero() {
        tokio::time::sleep(rest).await;
    }
    let Some((shared, from)) = shared else {
        return Next::Chunk(scan.next().await);
    };
    if let Some(kept) = shared.take(from, scan) {
        return Next::Kept(kept);
    }
    let mut next = scan.next().await;
    // Nothing waits from here on: what was taken is given.
    if let Ok(Some(chunk)) = &mut next
        && chunk.gaps.is_empty()
        && !chunk.batches.is_empty()
    {
        if let Some(kept) = shared.take(from, scan) {
            return Next::Kept(kept);
        }
        shared.align(from, chunk, scan);
    }
    Next::Chunk(next)
}
