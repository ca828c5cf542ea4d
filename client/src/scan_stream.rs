//! A scan underway, which outlives its connections.
//!
//! ```text
//!            open                    message                    lost
//!   (closed) ─────▶ (open) ─────────────────────────▶ (open) ──────────▶ (closed)
//!      ▲        begin at the start,     its events are queued,              │
//!      │        or at the last cursor   its cursor is kept                  │
//!      └───────────────────────── pause, longer each time ──────────────────┘
//! ```
//!
//! Events are queued and the cursor is kept in one step, when a whole message has arrived. The
//! next connection thus begins exactly after the last event that the caller gets.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use futures_core::Stream;
use futures_util::{StreamExt, stream};
use tonic::Streaming;
use wald_proto::v1::scan_request::{Selector, Start};
use wald_proto::v1::{self, Reason};

use crate::client::Client;
use crate::error::{Error, ErrorKind};
use crate::nodes::{ClientNode, NextNode};
use crate::retry::{FailedAttempts, Repeat};
use crate::scan::{Cursor, Scan, ScanEvent, events};
use crate::shared::looked_after;
use crate::token::TokenHeader;

/// The events of a scan. Ends after the last one, or after an error.
pub struct ScanStream {
    events: Pin<Box<dyn Stream<Item = Result<ScanEvent, Error>> + Send>>,
    cursor: Option<Cursor>,
}

/// The events of a [`Client::follow`]: existing records, and then records that are appended
/// later, across lost connections. Dropping it ends it.
pub type Follower = ScanStream;

impl ScanStream {
    pub(crate) fn new(scan: Scan) -> Self {
        let underway = Underway {
            remaining: match scan.request.max_records {
                0 => None,
                count => Some(count),
            },
            client: scan.client,
            request: scan.request,
            node: None,
            connection: None,
            queue: VecDeque::new(),
            place: NextStart::Start,
            begun: false,
            failures: FailedAttempts::default(),
            failing_since: None,
            pause: Duration::ZERO,
            used: None,
            ended: false,
        };
        let events = stream::unfold(underway, |mut underway| async move {
            let event = underway.next().await?;
            Some((event, underway))
        });
        Self {
            events: Box::pin(events.fuse()),
            cursor: None,
        }
    }

    /// The next event; none after the last.
    ///
    /// # Errors
    /// The error that ends the scan, after all retries. No event comes after it.
    pub async fn next(&mut self) -> Option<Result<ScanEvent, Error>> {
        StreamExt::next(self).await
    }

    /// Resumes exactly after the last [`ScanEvent::Progress`] that was taken. The caller can
    /// therefore handle all events before it stores the cursor. None before the first.
    pub fn cursor(&self) -> Option<&Cursor> {
        self.cursor.as_ref()
    }
}

impl Stream for ScanStream {
    type Item = Result<ScanEvent, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let event = ready!(self.events.as_mut().poll_next(cx));
        if let Some(Ok(ScanEvent::Progress(progress))) = &event
            && progress.cursor.is_some()
        {
            self.cursor.clone_from(&progress.cursor);
        }
        Poll::Ready(event)
    }
}

/// Place at which the next connection begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NextStart {
    /// The start that the caller set.
    Start,
    /// After the last message: the request holds its cursor.
    Cursor,
    /// Not known: going on could repeat or skip records.
    Lost,
}

struct Underway {
    client: Client,
    request: v1::ScanRequest,
    /// Records still to deliver, if bounded.
    remaining: Option<u64>,
    /// The server of the last connection, or of the attempt to make one.
    node: Option<Arc<ClientNode>>,
    connection: Option<Streaming<v1::ScanResponse>>,
    queue: VecDeque<ScanEvent>,
    place: NextStart,
    /// Whether the server has taken the scan once.
    begun: bool,
    /// Failures since the last message.
    failures: FailedAttempts,
    /// Begin of the first failed attempt, or of the one under way.
    failing_since: Option<Instant>,
    pause: Duration,
    /// The token of the last connection.
    used: Option<TokenHeader>,
    ended: bool,
}

impl Underway {
    async fn next(&mut self) -> Option<Result<ScanEvent, Error>> {
        loop {
            if let Some(event) = self.queue.pop_front() {
                return Some(Ok(event));
            }
            if self.ended {
                return None;
            }
            let step = match (self.connection.take(), self.node.clone()) {
                (Some(connection), Some(node)) => self.receive(connection, &node).await,
                _ => self.open().await,
            };
            if let Err(error) = step
                && let Err(error) = self.survive(error)
            {
                self.ended = true;
                return Some(Err(error));
            }
        }
    }

    async fn open(&mut self) -> Result<(), Error> {
        self.failing_since.get_or_insert_with(Instant::now);
        tokio::time::sleep(std::mem::take(&mut self.pause)).await;
        // The call that pins the start leaves servers by itself.
        self.node = None;
        self.pin_tail_offset().await?;
        let timeout = self.client.silence_timeout();
        let node = self.client.node();
        self.node = Some(Arc::clone(&node));
        let mut wal = node.wal();
        let (request, used) = self.client.request(self.request.clone());
        self.used = used;
        let opening = looked_after(wal.scan(request), node.health_service());
        let opened = tokio::time::timeout(timeout, opening).await;
        match opened {
            Ok(Ok(answer)) => {
                self.client.approach(&node, answer.metadata());
                self.connection = Some(answer.into_inner());
                self.begun = true;
                // From now on "the tail" is in the past, and only a cursor can name it.
                if self.place == NextStart::Start
                    && matches!(self.request.start, Some(Start::TailOffset(_)))
                {
                    self.place = NextStart::Lost;
                }
                Ok(())
            }
            Ok(Err(status)) => Err(node.error(&status, timeout)),
            Err(_) => Err(node.timed_out(timeout)),
        }
    }

    /// Turns "n before the tail" of one log into an lsn, so that a connection lost before the
    /// first message can be replaced without skipping records that arrived meanwhile.
    async fn pin_tail_offset(&mut self) -> Result<(), Error> {
        let (Some(Selector::Log(log)), Some(Start::TailOffset(offset))) =
            (&self.request.selector, &self.request.start)
        else {
            return Ok(());
        };
        // A copy is behind the owner, whose tail GetTail gives: only the node itself knows its own.
        if !self.request.follow || self.request.any_node {
            return Ok(());
        }
        let offset = *offset;
        let tail = self
            .client
            .get_tail(log.clone(), self.request.visibility(), self.request.log_id)
            .await;
        self.request.start = match tail {
            Ok(tail) => {
                let before_tail = tail.tail_lsn.get().saturating_sub(offset);
                Some(Start::Lsn(before_tail.max(tail.first_lsn.get())))
            }
            // All that will ever be in it is still to come.
            Err(error) if error.reason() == Some(Reason::LogNotFound) => None,
            Err(error) => return Err(error),
        };
        Ok(())
    }

    async fn receive(
        &mut self,
        mut connection: Streaming<v1::ScanResponse>,
        node: &ClientNode,
    ) -> Result<(), Error> {
        let timeout = self.client.silence_timeout();
        let message = match tokio::time::timeout(timeout, connection.message()).await {
            Ok(Ok(Some(message))) => message,
            Ok(Ok(None)) => return self.end(),
            Ok(Err(status)) => return Err(node.error(&status, timeout)),
            Err(_) => return Err(node.timed_out(timeout)),
        };
        let cursor = message.cursor.clone();
        // A heartbeat before the first piece has no cursor: the next connection begins where this one began.
        let is_bare = cursor.is_empty()
            && message.batches.is_empty()
            && message.gaps.is_empty()
            && !message.caught_up;
        let (events, count) = events(message)?;
        self.queue.extend(events);
        if !is_bare {
            self.place = if cursor.is_empty() {
                NextStart::Lost
            } else {
                NextStart::Cursor
            };
            self.request.start = Some(Start::Cursor(cursor));
        }
        if let Some(remaining) = &mut self.remaining {
            *remaining = remaining.saturating_sub(count);
            self.request.max_records = *remaining;
            // Asked again it would be 0, which is: without bound.
            self.ended = *remaining == 0;
        }
        self.failures = FailedAttempts::default();
        self.failing_since = None;
        self.connection = Some(connection);
        Ok(())
    }

    /// The server ended the stream in good order.
    fn end(&mut self) -> Result<(), Error> {
        let bounded = self.remaining.is_some() || self.request.until_lsn.is_some();
        if self.request.follow && !bounded {
            let detail = "the server ended the stream".to_owned();
            return Err(Error::new(ErrorKind::ConnectionLost(detail)));
        }
        self.ended = true;
        Ok(())
    }

    /// Prepares the next connection, if there can be one.
    fn survive(&mut self, error: Error) -> Result<(), Error> {
        let policy = self.client.retry_policy();
        let next = match &self.node {
            Some(node) => self.client.leave(node, &error),
            None => NextNode::Same,
        };
        // A follow that has begun has no end to its patience; the caller may have.
        let patient = self.request.follow && self.begun;
        let pause = self.failures.pause(policy, &error, next);
        let since = *self.failing_since.get_or_insert_with(Instant::now);
        let tired = self.failures.count >= policy.max_attempts
            || since.elapsed() + pause >= self.client.default_timeout();
        let tired = tired && !patient;
        let allowed = self
            .client
            .allows(Repeat::Read, &error, self.used.as_ref(), patient);
        if self.place == NextStart::Lost || tired || !allowed {
            return Err(error.of_read());
        }
        self.pause = pause;
        self.queue
            .push_back(ScanEvent::Interrupted(error.of_read()));
        Ok(())
    }
}
