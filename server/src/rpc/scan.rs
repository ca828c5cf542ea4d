//! Scan: chunks of the engine as messages, with heartbeats in between.
//!
//! The stream is pulled by the transport: as long as the client's window is full, the
//! engine is not asked, so that a reader which reads nothing costs nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::stream;
use tokio::sync::watch;
use tonic::Status;
use wald_proto::codec::Encoded;
use wald_proto::v1;
use wald_storage::{Clock, ReadError, Scan, ScanChunk, SystemClock};

use super::{Answers, Node, Store};
use crate::convert;
use crate::drain::{Phase, draining};
use crate::metrics::ReadOp;
use crate::status::{self, Access};

pub(super) fn scan(node: &Arc<Node>, request: v1::ScanRequest) -> Result<Answers<Encoded>, Status> {
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
        ended: false,
    };
    Ok(Box::pin(stream::unfold(delivery, Delivery::step)))
}

/// A scan on its way to a client.
struct Delivery {
    node: Arc<Node>,
    scan: Box<dyn Scan>,
    phase: watch::Receiver<Phase>,
    view: v1::RecordView,
    follow: bool,
    /// The last message reached the end: what comes next is waited for.
    caught_up: bool,
    ended: bool,
}

/// What the next message is made of.
enum Next {
    Chunk(Result<Option<ScanChunk>, ReadError>),
    Silence,
    Draining,
}

impl Delivery {
    /// One message and the rest, or the end.
    async fn step(mut self) -> Option<(Result<Encoded, Status>, Self)> {
        if self.ended {
            return None;
        }
        let asked = Instant::now();
        let next = tokio::select! {
            biased;
            () = draining(&mut self.phase), if self.follow => Next::Draining,
            chunk = self.scan.next() => Next::Chunk(chunk),
            () = tokio::time::sleep(self.node.heartbeat_interval) => Next::Silence,
        };
        let message = match next {
            Next::Chunk(Ok(Some(chunk))) => {
                if !self.caught_up {
                    self.node.metrics.read(ReadOp::Scan, asked.elapsed());
                }
                self.tell_lag(&chunk);
                self.caught_up = chunk.caught_up;
                let store = self.node.store(Access::Read);
                store.and_then(|store| convert::scan_response(chunk, self.view, store.epoch))
            }
            // A following scan also ends because the engine drains, which the caller
            // must not take for the end of the log.
            Next::Chunk(Ok(None)) if self.follow && self.leaving() => Err(status::draining()),
            Next::Chunk(Ok(None)) => return None,
            Next::Chunk(Err(error)) => Err(status::read(&error)),
            Next::Silence => self
                .node
                .store(Access::Read)
                .map(|store| self.heartbeat(store)),
            Next::Draining => Err(status::draining()),
        };
        self.ended = message.is_err();
        Some((message, self))
    }

    /// How late what was waited for comes; what was there before the wait tells nothing.
    fn tell_lag(&self, chunk: &ScanChunk) {
        if let Some(batch) = chunk.batches.first().filter(|_| self.caught_up) {
            let lag = SystemClock.now().micros() - batch.arrival.micros();
            let lag = Duration::from_micros(u64::try_from(lag).unwrap_or(0));
            self.node.metrics.delivered(lag);
        }
    }

    fn leaving(&self) -> bool {
        *self.phase.borrow() == Phase::Draining
    }

    fn heartbeat(&self, store: &Store) -> Encoded {
        Encoded::from(&v1::ScanResponse {
            cursor: self.scan.cursor(),
            recovery_epoch: store.epoch.get(),
            ..v1::ScanResponse::default()
        })
    }
}
