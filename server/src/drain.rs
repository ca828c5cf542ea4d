//! The life of the server as everyone in it sees it, and the way out.
//!
//! ```text
//! Starting --> Serving --> Leaving --> Draining --> (process ends)
//!    |  ^         |                  ^
//!  StandBy        |  not ready,      |
//!   | ^           |                  |
//! Forwarding      |                  |  GOAWAY, following scans end,
//!                 |  still accepting |  what was accepted is finished
//!                 +--> ReadOnly -----+
//!                      the journal failed and on_flush_failure = read_only
//! ```

use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::time::Instant;

/// A second signal this soon is an echo of the first: a terminal and a supervisor pass on
/// the same Ctrl-C, and fingers bounce.
const ECHO: Duration = Duration::from_secs(1);

/// Phase of the server's life. Only ever goes forward, but for a stand-by, which may lose its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// The store is being recovered.
    Starting,
    /// Another node owns the store, and calls cannot go on to it, or this one lags far behind.
    StandBy,
    /// Another node owns the store, and calls go on to it.
    Forwarding,
    /// Everything works.
    Serving,
    /// The journal failed; reads continue.
    ReadOnly,
    /// A stop was requested; load balancers get time to notice.
    Leaving,
    /// Finishing the accepted requests.
    Draining,
}

impl Phase {
    /// The reason why the server is not ready, for people; `None` if it is.
    pub(crate) fn not_ready(self) -> Option<&'static str> {
        match self {
            Self::Forwarding | Self::Serving => None,
            Self::Starting => Some("starting: the store is being recovered"),
            Self::StandBy => {
                Some("standing by: no owner takes calls, or this node has no copy of the store yet")
            }
            Self::ReadOnly => Some("the journal failed: read only until a restart"),
            Self::Leaving | Self::Draining => Some("shutting down"),
        }
    }
}

/// Resolves when draining begins. Never resolves if the sender is gone, because then the
/// process is ending anyway.
pub(crate) async fn draining(phase: &mut watch::Receiver<Phase>) {
    if phase
        .wait_for(|phase| *phase == Phase::Draining)
        .await
        .is_err()
    {
        std::future::pending().await
    }
}

/// The signals that the daemon reacts to.
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    /// A write beyond RLIMIT_FSIZE. It would end the process; once it is taken over the write
    /// fails instead, as one for which there is no space.
    _file_size: Signal,
    /// Time of the first signal to stop.
    first_stop: Option<Instant>,
}

/// Request that a signal makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Request {
    /// SIGTERM or SIGINT.
    Stop,
    /// SIGHUP.
    Reload,
}

impl Signals {
    /// Takes over the signals of the process.
    ///
    /// # Errors
    /// If the system does not allow it.
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            _file_size: signal(SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw()))?,
            first_stop: None,
        })
    }

    /// The next signal, but for echoes of the first to stop.
    pub(crate) async fn next(&mut self) -> Request {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => {}
                _ = self.interrupt.recv() => {}
                _ = self.hangup.recv() => return Request::Reload,
            }
            let now = Instant::now();
            let first = *self.first_stop.get_or_insert(now);
            if first == now || now - first >= ECHO {
                return Request::Stop;
            }
        }
    }

    /// Resolves at a signal to stop; others pass unseen.
    pub(crate) async fn stop(&mut self) {
        while self.next().await != Request::Stop {}
    }
}

/// A duration as a time to wait at most, where zero means no bound.
pub(crate) fn bound(duration: Duration) -> Option<Duration> {
    (!duration.is_zero()).then_some(duration)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_node_that_answers_calls_is_ready() {
        for ready in [Phase::Forwarding, Phase::Serving] {
            assert_eq!(ready.not_ready(), None);
        }
        for phase in [
            Phase::Starting,
            Phase::StandBy,
            Phase::ReadOnly,
            Phase::Leaving,
            Phase::Draining,
        ] {
            assert!(phase.not_ready().is_some());
        }
    }

    #[tokio::test]
    async fn draining_is_seen_by_those_who_come_late() {
        let (sender, mut receiver) = watch::channel(Phase::Serving);
        sender.send_replace(Phase::Draining);
        draining(&mut receiver).await;
    }
}
