//! Callers that write: appends that need no flush need no thread.
//!
//! A caller that gathers requests, such as an event loop in one of its turns, writes them when it has nothing more to
//! take in. To wake a thread takes longer than to write. But a caller does no work that may take long: drivers write
//! large queues, begin new segments, and write while the device is slow.
//!
//! A caller also flushes a request that waits alone for it, if flushes are short: two wake-ups of threads take about as
//! long as such a flush. Requests of several callers are left to the drivers, where the next ones gather meanwhile.

use std::time::{Duration, Instant};

/// Maximum bytes that a caller writes.
pub(super) const SHORT_BYTES: u64 = 128 << 10;

/// Upper bound on a group's overhead beyond the bytes charged to the budget.
pub(super) const MARGIN_BYTES: u64 = 16 << 10;

/// After a caller's write took at least `LONG_WRITE`, only drivers write, for `AFTER_LONG_WRITE`.
const LONG_WRITE: Duration = Duration::from_millis(20);
const AFTER_LONG_WRITE: Duration = Duration::from_secs(1);

/// Longest flush of a device on which callers flush. A longer one would hold up an event loop for much longer than the two
/// wake-ups of threads that it saves.
const SHORT_FLUSH: Duration = Duration::from_micros(300);

/// Decides which writes and flushes are short enough for callers.
#[derive(Default)]
pub(super) struct Callers {
    /// Bytes that the committer can write without an action that may take long.
    pub(super) room: u64,
    /// Callers write nothing before this time.
    pub(super) slow_until: Option<Instant>,
    /// Whether the last flush was short.
    pub(super) flushes_are_short: bool,
}

/// Most bytes before an append that a caller's flush makes durable, too. Appends that need no flush may leave a whole segment.
const MOST_UNFLUSHED: u64 = SHORT_BYTES;

impl Callers {
    /// Whether a caller may write `bytes` of appends at `now`.
    pub(super) fn may_write(&self, bytes: u64, now: Instant) -> bool {
        let slow = self.slow_until.is_some_and(|until| until > now);
        !slow && bytes <= SHORT_BYTES && bytes + MARGIN_BYTES <= self.room
    }

    /// Whether a caller may flush, if `unflushed` bytes have not been flushed.
    pub(super) fn may_flush(&self, unflushed: u64) -> bool {
        self.flushes_are_short && unflushed <= MOST_UNFLUSHED
    }

    /// Notes the time of a flush, by a caller or a driver. After a long one drivers flush, until they are short again.
    pub(super) fn flushed(&mut self, took: Duration) {
        self.flushes_are_short = took <= SHORT_FLUSH;
    }

    /// Notes the time of a caller's write, which ended at `now`.
    pub(super) fn wrote(&mut self, took: Duration, now: Instant) {
        if took >= LONG_WRITE {
            self.slow_until = Some(now + AFTER_LONG_WRITE);
        }
    }
}
