//! The queue of sealed segments that wait for their index, and the progress of indexes and checkpoints.
//!
//! The committer adds segments, and `upkeep::indexer` indexes them. The queue has two bounds: a roll waits while too
//! many segments have no index, and appends that need a new segment are refused while too many indexes are unwritten.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::api::error::HostShortage;
use crate::base::ids::{Position, SegmentId, Timestamp};
use crate::base::sync::atomic::{AtomicU64, Ordering};
use crate::base::sync::{Condvar, Mutex, MutexGuard};
use crate::disk::shortage;
use crate::index::sealed::SealedIndex;
use crate::journal::seal::{SealSink, Sealed};

/// Maximum number of sealed segments without an index. Beyond it a roll waits, because a start has to
/// read these segments.
const MOST_WAITING: usize = 2;

/// Pause after a failed write of an index or a checkpoint. It doubles with each failure, up to
/// [`LONGEST_PAUSE`].
const RETRY_AFTER: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Maximum bytes of unwritten indexes in memory. Beyond it no segment is begun for records.
const MOST_UNWRITTEN_BYTES: u64 = 128 << 20;
/// Maximum size of unwritten indexes in memory, in segments.
const MOST_UNWRITTEN_SEGMENTS: u64 = 2;

/// Maximum bytes of indexes of damaged segments that wait in memory until they are written with the
/// damage. Beyond it readers make an index from the frames of its segment.
const MOST_DAMAGED_BYTES: u64 = 64 << 20;

/// Pause before the indexes of damaged segments and a checkpoint are written, because damage often
/// affects several places. At least 10 times as long as the last checkpoint took.
const AFTER_DAMAGE: Duration = Duration::from_secs(1);
const AFTER_DAMAGE_SHARE: u32 = 10;

/// Progress of indexes and checkpoints.
#[derive(Default)]
pub(crate) struct IndexProgress {
    /// Indexes that were built and not yet written.
    pub(crate) unwritten: VecDeque<Arc<SealedIndex>>,
    /// Bases of segments and runs with damage found since their index was made. Each has the bytes of
    /// the index that is kept in memory for it.
    pub(crate) damaged: BTreeMap<Position, u64>,
    /// Bytes of segments whose indexes a start would read.
    pub(crate) since_checkpoint: u64,
    pub(crate) checkpoint_bytes: u64,
    /// Time that the last checkpoint took.
    pub(crate) checkpoint_took: Duration,
    /// The last segment that the newest checkpoint covers.
    pub(crate) covered: Option<SegmentId>,
    /// State of the journal at the end of the newest segment with an index.
    pub(crate) newest: Option<Newest>,
}

impl IndexProgress {
    /// Notes a damaged segment, whose index takes `bytes` of memory. Returns whether the index stays in
    /// memory until it is written again.
    pub(crate) fn note_damaged(&mut self, base: Position, bytes: u64) -> bool {
        let others = self.damaged.iter().filter(|(other, _)| **other != base);
        let others: u64 = others.map(|(_, bytes)| bytes).sum();
        let is_kept = bytes > 0 && others + bytes <= MOST_DAMAGED_BYTES;
        self.damaged.insert(base, if is_kept { bytes } else { 0 });
        is_kept
    }
}

#[derive(Default)]
pub(crate) struct SegmentQueue {
    pub(crate) waiting: VecDeque<Sealed>,
    /// With a replica: only segments that end at or below have an index. Until then memory lists their frames, which
    /// shows readers of replicated records where these end.
    pub(crate) replicated: Option<Position>,
    /// Whether a thread works on the queue.
    pub(crate) running: bool,
    /// The failure of the last index or checkpoint.
    pub(crate) stuck: Option<IndexWriteFailure>,
    /// Whether damage invalidated the checkpoints, and none was written since.
    pub(crate) has_damage: bool,
    pub(crate) checkpoint_took: Duration,
    pub(crate) stopped: bool,
}

impl SegmentQueue {
    /// Number of segments at the front that may get an index now.
    fn ready(&self) -> usize {
        let ready = |sealed: &Sealed| self.replicated.is_none_or(|to| sealed.end <= to);
        self.waiting.partition_point(ready)
    }

    /// Takes the next segment that may get an index now.
    pub(crate) fn take(&mut self) -> Option<Sealed> {
        match self.ready() {
            0 => None,
            _ => self.waiting.pop_front(),
        }
    }

    /// Maximum rest of the thread while no segment waits. `None`: until a segment waits.
    fn rest(&self) -> Option<Duration> {
        let after_damage = AFTER_DAMAGE.max(self.checkpoint_took * AFTER_DAMAGE_SHARE);
        match &self.stuck {
            Some(stuck) => Some(stuck.pause()),
            None => self.has_damage.then_some(after_damage),
        }
    }
}

/// An index or a checkpoint cannot be written.
pub(crate) struct IndexWriteFailure {
    pub(crate) error: io::Error,
    /// Failures in a row.
    pub(crate) tries: u32,
}

impl IndexWriteFailure {
    /// Pause before the next attempt.
    fn pause(&self) -> Duration {
        let doubled = RETRY_AFTER.saturating_mul(1 << (self.tries - 1).min(6));
        doubled.min(LONGEST_PAUSE)
    }
}

/// Sealed segments that wait for their index, and the state of that work.
#[derive(Default)]
pub(crate) struct IndexQueue {
    pub(crate) queue: Mutex<SegmentQueue>,
    pub(crate) changed: Condvar,
    /// Held while working: segments are indexed one at a time, in order.
    pub(crate) progress: Mutex<IndexProgress>,
    /// Bytes of indexes that no file holds yet.
    pub(crate) unwritten_bytes: AtomicU64,
}

/// The newest segment with an index, as a checkpoint describes it.
pub(crate) struct Newest {
    pub(crate) id: SegmentId,
    pub(crate) before: Option<SegmentId>,
    pub(crate) end: Position,
    pub(crate) chain: u32,
    pub(crate) next_log_counter: u64,
    pub(crate) arrival: Timestamp,
    pub(crate) expiry: Timestamp,
}

impl IndexQueue {
    pub(crate) fn new(progress: IndexProgress, has_replica: bool) -> Self {
        let queue = SegmentQueue {
            replicated: has_replica.then_some(Position::ZERO),
            ..SegmentQueue::default()
        };
        Self {
            queue: Mutex::new(queue),
            progress: Mutex::new(progress),
            ..Self::default()
        }
    }

    /// The last segment that a checkpoint covers.
    pub(crate) fn covered(&self) -> Option<SegmentId> {
        self.progress.lock().covered
    }

    /// Stops indexing and checkpoints while the returned guard is held.
    pub(crate) fn hold(&self) -> MutexGuard<'_, IndexProgress> {
        self.progress.lock()
    }

    /// The reason why the last index or checkpoint could not be written, if it failed.
    pub(crate) fn trouble(&self) -> Option<String> {
        let queue = self.queue.lock();
        queue.stuck.as_ref().map(|stuck| stuck.error.to_string())
    }

    /// Waits for a segment, the next attempt, or the write after damage. `false`: stop.
    pub(crate) fn wait(&self) -> bool {
        let mut queue = self.queue.lock();
        while queue.ready() == 0 && !queue.stopped {
            match queue.rest() {
                None => self.changed.wait(&mut queue),
                Some(pause) if self.changed.wait_for(&mut queue, pause).timed_out() => break,
                Some(_) => {}
            }
        }
        !queue.stopped
    }

    /// Damage invalidated the checkpoints: the thread writes another, even in an idle store.
    pub(crate) fn wake(&self) {
        let mut queue = self.queue.lock();
        if !std::mem::replace(&mut queue.has_damage, true) {
            self.changed.notify_all();
        }
    }

    /// Segments that end at or below `end` are replicated, and may get an index.
    pub(crate) fn replicated(&self, end: Position) {
        let mut queue = self.queue.lock();
        let before = queue.ready();
        if let Some(replicated) = &mut queue.replicated {
            *replicated = end.max(*replicated);
        }
        // The pause before a next attempt begins again when its thread wakes.
        if queue.ready() > before {
            self.changed.notify_all();
        }
    }

    pub(crate) fn stop(&self) {
        self.queue.lock().stopped = true;
        self.changed.notify_all();
    }
}

impl SealSink for IndexQueue {
    fn has_room(&self, segment_bytes: u64) -> Result<(), HostShortage> {
        let most = MOST_UNWRITTEN_BYTES.min(MOST_UNWRITTEN_SEGMENTS * segment_bytes);
        if self.unwritten_bytes.load(Ordering::Relaxed) <= most {
            return Ok(());
        }
        match &self.queue.lock().stuck {
            Some(stuck) => Err(shortage(&stuck.error).unwrap_or(HostShortage::Space)),
            None => Ok(()),
        }
    }

    fn take_over(&self, sealed: Sealed) {
        let mut queue = self.queue.lock();
        queue.waiting.push_back(sealed);
        self.changed.notify_all();
        while queue.running
            && queue.stuck.is_none()
            && !queue.stopped
            && queue.ready() > MOST_WAITING
        {
            self.changed.wait(&mut queue);
        }
    }
}

/// A roll waits for the thread only while the thread runs, however the thread ends.
pub(crate) struct RunningMark<'a>(&'a IndexQueue);

impl<'a> RunningMark<'a> {
    pub(crate) fn new(index_queue: &'a IndexQueue) -> Self {
        index_queue.queue.lock().running = true;
        Self(index_queue)
    }
}

impl Drop for RunningMark<'_> {
    fn drop(&mut self) {
        self.0.queue.lock().running = false;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indexes_of_damaged_segments_take_bounded_memory_until_written() {
        let mut progress = IndexProgress::default();
        let (base, part) = (Position::new, MOST_DAMAGED_BYTES / 4);
        assert!(!progress.note_damaged(base(1), MOST_DAMAGED_BYTES + 1));
        for number in 1..=4 {
            assert!(progress.note_damaged(base(number), part), "{number}");
            assert!(progress.note_damaged(base(number), part), "{number} again");
        }
        assert!(!progress.note_damaged(base(5), 1), "the bound is reached");
        // All indexes that can be read are written later.
        assert_eq!(progress.damaged.len(), 5);
        progress.damaged.remove(&base(1));
        assert!(progress.note_damaged(base(6), part));
    }

    #[test]
    fn damage_wakes_the_thread_after_a_pause_that_follows_the_checkpoint() {
        let index_queue = IndexQueue::default();
        assert_eq!(index_queue.queue.lock().rest(), None);
        index_queue.wake();
        assert_eq!(index_queue.queue.lock().rest(), Some(AFTER_DAMAGE));
        index_queue.queue.lock().checkpoint_took = 2 * AFTER_DAMAGE;
        let rest = index_queue.queue.lock().rest();
        assert_eq!(rest, Some(2 * AFTER_DAMAGE_SHARE * AFTER_DAMAGE));
        let (error, tries) = (io::ErrorKind::StorageFull.into(), 1);
        index_queue.queue.lock().stuck = Some(IndexWriteFailure { error, tries });
        assert_eq!(index_queue.queue.lock().rest(), Some(RETRY_AFTER));
    }
}
