//! Time limits for a client that must send or take something.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, Sleep, sleep_until};

use crate::drain::{Phase, draining};

/// Longest wait for a client once the server is draining.
pub(crate) const AT_DRAIN: Duration = Duration::from_secs(2);

/// A wait for a client, bounded by a limit that [`Patience::poll_over`] gets, and by [`AT_DRAIN`] from
/// the moment when the server begins to drain.
///
/// A call that never waits pays nothing: timer and watch are made by the first wait.
pub(crate) struct Patience {
    phase: watch::Receiver<Phase>,
    /// Begin of the wait; `None` while nothing is waited for.
    since: Option<Instant>,
    timer: Option<Pin<Box<Timer>>>,
}

struct Timer {
    sleep: Pin<Box<Sleep>>,
    drain: Pin<Box<dyn Future<Output = ()> + Send + Sync>>,
    draining: bool,
}

impl Patience {
    pub(crate) fn new(phase: &watch::Receiver<Phase>) -> Self {
        Self {
            phase: phase.clone(),
            since: None,
            timer: None,
        }
    }

    /// The client has moved: the next wait begins from zero.
    pub(crate) fn moved(&mut self) {
        self.since = None;
    }

    /// Resolves when the client was waited for longer than `limit`.
    pub(crate) fn poll_over(&mut self, context: &mut Context<'_>, limit: Duration) -> Poll<()> {
        let since = *self.since.get_or_insert_with(Instant::now);
        let phase = &self.phase;
        let timer = self.timer.get_or_insert_with(|| {
            let mut phase = phase.clone();
            Box::pin(Timer {
                sleep: Box::pin(sleep_until(since + limit)),
                drain: Box::pin(async move { draining(&mut phase).await }),
                draining: false,
            })
        });
        if !timer.draining && timer.drain.as_mut().poll(context).is_ready() {
            timer.draining = true;
            self.since = Some(Instant::now());
        }
        let since = self.since.unwrap_or(since);
        let limit = if timer.draining {
            limit.min(AT_DRAIN)
        } else {
            limit
        };
        let end = since + limit;
        if timer.sleep.deadline() > end {
            timer.sleep.as_mut().reset(end);
        }
        loop {
            ready!(timer.sleep.as_mut().poll(context));
            if Instant::now() >= end {
                return Poll::Ready(());
            }
            // Armed for an earlier wait.
            timer.sleep.as_mut().reset(end);
        }
    }
}

/// While others wait for the memory that a message holds, its client must move so much of it.
const HURRY_BYTES_PER_SECOND: u64 = 64 << 10;

/// Progress of a client with a message, measured while others wait for the memory that it
/// holds.
///
/// A call that never waits pays nothing: the timer is made by the first wait.
#[derive(Debug, Default)]
pub(crate) struct Hurry {
    /// Bytes moved since `tick` was set.
    moved: u64,
    tick: Option<Pin<Box<Sleep>>>,
    /// Whether `tick` was set for an earlier message.
    is_old: bool,
}

impl Hurry {
    /// Another message begins.
    pub(crate) fn begin(&mut self) {
        self.is_old = true;
    }

    /// The client has moved `bytes` bytes of the message.
    pub(crate) fn moved(&mut self, bytes: u64) {
        self.moved += bytes;
    }

    /// Resolves when a client must hurry and has moved less than 64 KiB/s for `period` seconds.
    pub(crate) fn poll_late(
        &mut self,
        context: &mut Context<'_>,
        period: u64,
        must: impl Fn() -> bool,
    ) -> Poll<()> {
        let next = || Instant::now() + Duration::from_secs(period);
        let tick = (self.tick).get_or_insert_with(|| Box::pin(sleep_until(next())));
        if std::mem::take(&mut self.is_old) {
            self.moved = 0;
            tick.as_mut().reset(next());
        }
        loop {
            ready!(tick.as_mut().poll(context));
            if std::mem::take(&mut self.moved) < period * HURRY_BYTES_PER_SECOND && must() {
                return Poll::Ready(());
            }
            tick.as_mut().reset(next());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn wait_ends_at_its_limit_and_begins_again_when_the_client_moves() {
        let (_phase, receiver) = watch::channel(Phase::Serving);
        let mut patience = Patience::new(&receiver);
        let limit = Duration::from_secs(30);
        let begin = Instant::now();
        let early = tokio::time::timeout(
            Duration::from_secs(20),
            poll_fn(|context| patience.poll_over(context, limit)),
        );
        assert!(early.await.is_err());
        patience.moved();
        poll_fn(|context| patience.poll_over(context, limit)).await;
        let waited = begin.elapsed();
        assert!(waited >= Duration::from_secs(50), "{waited:?}");
        assert!(waited < Duration::from_secs(51), "{waited:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn wait_is_short_once_the_server_drains() {
        let (phase, receiver) = watch::channel(Phase::Serving);
        let mut patience = Patience::new(&receiver);
        let begin = Instant::now();
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_secs(5)).await;
            phase.send_replace(Phase::Draining);
            std::future::pending::<()>().await;
        });
        poll_fn(|context| patience.poll_over(context, Duration::from_secs(60))).await;
        let waited = begin.elapsed();
        assert!(waited >= Duration::from_secs(7), "{waited:?}");
        assert!(waited < Duration::from_secs(8), "{waited:?}");
    }
}
