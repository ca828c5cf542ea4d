//! Events that the engine reports while it works. The service turns them into histograms; the engine knows no
//! metrics library.

use std::time::Duration;

/// A phase of an append in the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AppendPhase {
    /// From submit until the committer took the append.
    Queue,
    /// Check, assign, encode.
    Encode,
    /// The write call.
    Write,
    /// From the write until the flush that covers it returned.
    Flush,
    /// From that flush until the replica had the request.
    Replicate,
}

/// Activity during which a checksum did not match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChecksumSite {
    /// While opening the store.
    Recovery,
    /// While serving a read.
    Read,
    /// While verifying the store at the request of a caller.
    Verify,
    /// While reading sealed segments again automatically.
    Scrub,
}

/// A kind of engine thread, or a task that runs on one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Worker {
    /// Writes and flushes the journal.
    Commit,
    /// Writes indexes and checkpoints.
    Index,
    /// Makes segments ready.
    Pool,
    /// Checks that the data directory is still there.
    Guard,
    /// Expires records.
    Retention,
    /// Reads sealed segments again to find damage.
    Scrub,
    /// Sorts segments into runs.
    Sort,
    /// Reads records and takes backups.
    Reader,
    /// Verifies the store for a caller.
    Verify,
}

impl Worker {
    /// Every kind, in the order of the enum.
    pub const ALL: [Self; 9] = [
        Self::Commit,
        Self::Index,
        Self::Pool,
        Self::Guard,
        Self::Retention,
        Self::Scrub,
        Self::Sort,
        Self::Reader,
        Self::Verify,
    ];

    /// Name in logs and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Commit => "commit",
            Self::Index => "index",
            Self::Pool => "pool",
            Self::Guard => "guard",
            Self::Retention => "retention",
            Self::Scrub => "scrub",
            Self::Sort => "sort",
            Self::Reader => "reader",
            Self::Verify => "verify",
        }
    }
}

/// Result of one retention pass.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RetentionPass {
    /// Duration of the pass, the wait for its trims included.
    pub time: Duration,
    /// Trims made.
    pub trims: u64,
    /// Records that these trims removed.
    pub records: u64,
    /// Bytes of the frames that hold no kept record any more.
    pub bytes: u64,
}

/// Receives events. Its methods run on the engine's threads, so they must be quick.
pub trait Observer: Send + Sync + 'static {
    /// Each of `requests` requests spent `time` in `phase`. Encoding and writing are done for a whole group.
    fn phase(&self, _phase: AppendPhase, _time: Duration, _requests: u32) {}
    /// One flush of the journal returned.
    fn flush(&self, _time: Duration) {}
    /// One group was written.
    fn group(&self, _requests: u64, _records: u64, _bytes: u64) {}
    /// The journal went on to the next segment.
    fn roll(&self, _time: Duration) {}
    /// A checkpoint was written.
    fn checkpoint(&self, _time: Duration) {}
    /// A retention pass ended.
    fn retention(&self, _pass: &RetentionPass) {}
    /// Records were returned to a reader.
    fn read(&self, _records: u64, _bytes: u64) {}
    /// A checksum did not match.
    fn checksum_failure(&self, _site: ChecksumSite) {}
    /// A thread panicked, or a task on it.
    fn panicked(&self, _worker: Worker) {}
}

/// Observes nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoObserver;

impl Observer for NoObserver {}
