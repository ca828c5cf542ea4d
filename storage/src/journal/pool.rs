//! The pool: segment files that are made ready before the journal needs them.
//!
//! A ready segment lies in `journal/` under its id, filled with zeros once: allocation alone would cost
//! a second device flush per commit. Its life block and name are flushed, so a roll is a write like any
//! other. Unneeded files return through [`Pool::recycle`] and get a new life with a new salt.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::api::config::MIN_SEGMENT_BYTES;
use crate::api::error::FreeSpace;
use crate::base::bounds;
use crate::base::bounds::LIFE_BYTES;
use crate::base::clock::Clock;
use crate::base::ids::SegmentId;
use crate::base::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::base::sync::{Condvar, Mutex, MutexGuard};
use crate::disk::known_bad;
use crate::disk::known_bad::Mistake;
use crate::disk::{Disk, DiskFile, is_out_of_descriptors, is_out_of_space, is_shortage};
use crate::format::digest::Secret;
use crate::format::life::{ENCRYPTED, HAS_RUNS, Life, journal_path, pool_path};

const CHUNK: usize = 1 << 20;

/// Pause after a failed preparation before the next attempt.
const RETRY_AFTER: Duration = Duration::from_millis(250);

/// Bytes that stay free for the small files of a start. The pool does not grow ahead of need into these
/// bytes.
const KEEP_FREE_BYTES: u64 = 1 << 20;

/// Purpose of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    /// Records and new logs. They may not take the reserve.
    Growth,
    /// Trims by retention, at most one for each log. They continue when records are refused, and leave
    /// half of the reserve to requests of users.
    Expiry,
    /// Trims, deletions, settings. They continue when everything else is refused.
    Reserve,
    /// The first segment of a start. It may also take the space that is kept for sorting.
    Start,
    /// The segment that the journal enters so that the sorter can take the one before. May be the last
    /// ready one. If none is ready, a small one is made, even in the space kept for sorting.
    Leave,
}

/// A segment without frames.
pub(crate) struct ReadySegment {
    pub(crate) life: Life,
    pub(crate) file: Arc<dyn DiskFile>,
}

/// Free space that a run takes while the sorter writes the run. Nothing else takes that space until the
/// claim is dropped.
pub(crate) struct Claim<'a> {
    pool: &'a Pool,
    /// Bytes that the run will still take.
    left: AtomicU64,
    written: AtomicU64,
}

impl Claim<'_> {
    /// Notes bytes that were written and have left the free space.
    pub(crate) fn wrote(&self, bytes: u64) {
        let taken = bytes.min(self.left.load(Ordering::SeqCst));
        self.left.fetch_sub(taken, Ordering::SeqCst);
        self.pool.claimed.fetch_sub(taken, Ordering::SeqCst);
        self.written.fetch_add(bytes, Ordering::SeqCst);
        self.pool.claims_written.fetch_add(bytes, Ordering::SeqCst);
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let _state = self.pool.state.lock();
        let left = self.left.load(Ordering::SeqCst);
        let written = self.written.load(Ordering::SeqCst);
        self.pool.claimed.fetch_sub(left, Ordering::SeqCst);
        self.pool
            .claims_written
            .fetch_sub(written, Ordering::SeqCst);
        // A finished run frees more space than it takes.
        self.pool.changed.notify_all();
    }
}

pub(crate) struct Pool {
    disk: Arc<dyn Disk>,
    clock: Arc<dyn Clock>,
    store_id: u128,
    /// The key of digests, written to each segment.
    secret: Secret,
    segment_bytes: u64,
    /// Segments kept ready for the next rolls, in addition to the reserve.
    target: usize,
    /// Segments that [`Use::Growth`] may not take.
    reserve: usize,
    /// Segments from this id on declare that there may be sorted runs.
    marked_from: AtomicU64,
    /// Whether new segments declare that bodies may be encrypted.
    encrypted: AtomicBool,
    /// Free bytes that only sorting and a start may take. They are enough to write the largest run
    /// again, so that sorting frees space on a full disk.
    sorting_reserve: AtomicU64,
    /// Bytes that runs under way will still take, and bytes that they have taken.
    claimed: AtomicU64,
    claims_written: AtomicU64,
    state: Mutex<PoolState>,
    changed: Condvar,
}

struct PoolState {
    /// Segments of the full size.
    ready: VecDeque<ReadySegment>,
    /// A smaller one that was taken and not begun. It precedes all that are ready, and only a purpose that a smaller segment
    /// is enough for takes it.
    small: Option<ReadySegment>,
    /// Ids of files in `pool/` that wait for a new life.
    free: Vec<SegmentId>,
    next_id: SegmentId,
    preparing: bool,
    /// A segment that needs only the flush of its name. No descriptor was available for the flush.
    unflushed: Option<ReadySegment>,
    failed: Option<LastFailure>,
    /// Space ran out, and the reserve has not been complete since.
    starved: bool,
    /// Records were refused for lack of space, and none were accepted since.
    refused: Option<NoSpace>,
    stopped: bool,
}

/// A refusal of records for lack of space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct NoSpace {
    /// Whether the records needed another segment in addition to a complete reserve.
    rolls: bool,
    /// Bytes of the missing segments.
    segment_bytes: u64,
}

/// The last preparation that failed.
struct LastFailure {
    at: Instant,
    kind: io::ErrorKind,
    /// Number of the system's error; `None` if the engine noticed the shortage.
    number: Option<i32>,
    text: String,
}

impl LastFailure {
    fn error(&self) -> io::Error {
        match self.number {
            Some(number) => io::Error::from_raw_os_error(number),
            None => io::Error::new(self.kind, self.text.clone()),
        }
    }
}

/// A segment could not be made ready.
struct Unready {
    error: io::Error,
    /// The segment, if only the flush of its name is missing for lack of a descriptor.
    unflushed: Option<ReadySegment>,
}

type ReadyResult = Result<ReadySegment, Unready>;

impl From<io::Error> for Unready {
    fn from(error: io::Error) -> Self {
        Self {
            error,
            unflushed: None,
        }
    }
}

impl Pool {
    pub(crate) fn new(
        disk: Arc<dyn Disk>,
        clock: Arc<dyn Clock>,
        (store_id, secret): (u128, Secret),
        segment_bytes: u64,
        (target, reserve): (usize, usize),
        next_id: SegmentId,
        free: Vec<SegmentId>,
    ) -> Self {
        Self {
            disk,
            clock,
            store_id,
            secret,
            segment_bytes,
            target,
            reserve,
            marked_from: AtomicU64::new(u64::MAX),
            encrypted: AtomicBool::new(false),
            sorting_reserve: AtomicU64::new(0),
            claimed: AtomicU64::new(0),
            claims_written: AtomicU64::new(0),
            state: Mutex::new(PoolState {
                ready: VecDeque::new(),
                small: None,
                free,
                next_id,
                preparing: false,
                unflushed: None,
                failed: None,
                starved: false,
                refused: None,
                stopped: false,
            }),
            changed: Condvar::new(),
        }
    }

    /// Takes a ready segment. If none is ready, makes one or waits for the one being made. If a
    /// full-size segment finds no space, [`Use::Reserve`], [`Use::Start`] and [`Use::Leave`] get a
    /// smaller one.
    ///
    /// # Errors
    /// Out of space or of file descriptors: nothing is lost, and a later attempt may succeed. After any
    /// other error the journal must fail, since a flush may be among the failed calls.
    pub(crate) fn take(&self, purpose: Use) -> io::Result<ReadySegment> {
        let keep = match purpose {
            Use::Growth => self.reserve,
            Use::Expiry => self.reserve.div_ceil(2),
            Use::Reserve | Use::Start | Use::Leave => 0,
        };
        let takes_small = matches!(purpose, Use::Reserve | Use::Start | Use::Leave);
        let mut state = self.state.lock();
        loop {
            if state.ready.len() > keep
                && let Some(ready) = state.ready.pop_front()
            {
                // Segments are begun in the order of their ids.
                if let Some(small) = state.small.take() {
                    self.drop_small(small.life.id);
                }
                self.note_shortage(&mut state);
                if purpose == Use::Growth {
                    state.refused = None;
                }
                self.changed.notify_all();
                return Ok(ready);
            }
            if state.preparing {
                self.changed.wait(&mut state);
                continue;
            }
            if takes_small && let Some(small) = state.small.take() {
                return Ok(small);
            }
            let prepared = match purpose {
                // The space for a full-size segment belongs to the sorter.
                Use::Leave if state.unflushed.is_none() => Err(io::ErrorKind::StorageFull.into()),
                _ => self.try_to_prepare(&mut state, purpose),
            };
            match prepared {
                // A segment that is made precedes this one.
                Err(error)
                    if takes_small && is_out_of_space(&error) && state.unflushed.is_none() =>
                {
                    let id = state.next_id;
                    state.next_id = id.next();
                    let made = self.make(id, &mut None, MIN_SEGMENT_BYTES, purpose);
                    return made.map_err(|unready| {
                        if unready.unflushed.is_some() {
                            self.drop_small(id);
                        }
                        unready.error
                    });
                }
                result => result?,
            }
        }
    }

    /// Returns a segment that was taken and not begun.
    pub(crate) fn give_back(&self, ready: ReadySegment) {
        let mut state = self.state.lock();
        // Records may need more than a smaller one has.
        match ready.life.size < self.segment_bytes {
            true => state.small = Some(ready),
            false => state.ready.push_front(ready),
        }
    }

    /// Removes a small segment that is not begun any more.
    fn drop_small(&self, id: SegmentId) {
        // If the file stays, or comes back after a power cut, a start recycles it: it has no frames.
        let _ = self.disk.remove(&journal_path(id));
    }

    /// Fills the reserve again if space had run out, so that records do not consume the segments of the
    /// reserve.
    ///
    /// # Errors
    /// As [`Pool::take`].
    pub(crate) fn restore_reserve(&self) -> io::Result<()> {
        let mut state = self.state.lock();
        while state.starved {
            if state.preparing {
                // The pool's own thread prepares a segment, which takes time.
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.try_to_prepare(&mut state, Use::Growth)?;
        }
        state.refused = state.refused.filter(|refused| refused.rolls);
        Ok(())
    }

    /// Describes the space that a refused request lacks. `rolls`: the request needs another segment.
    /// Warns when records are refused, and again when they need more segments.
    pub(crate) fn refuse(&self, purpose: Use, rolls: bool) -> FreeSpace {
        let mut state = self.state.lock();
        let space = self.space_for(&state, purpose, rolls);
        let segment_bytes = self.missing_bytes(&state, purpose, rolls);
        let is_news = (state.refused).is_none_or(|before| segment_bytes > before.segment_bytes);
        // A segment that is being made may still succeed.
        if purpose == Use::Growth && !state.preparing && is_news {
            state.refused = Some(NoSpace {
                rolls,
                segment_bytes,
            });
            tracing::warn!(
                free_bytes = space.free_bytes,
                needed_bytes = space.needed_bytes,
                "the disk is full, so appends are refused; they go on when needed_bytes are free, and trims and deletions go on; free space on the volume, or delete or trim logs"
            );
        }
        space
    }

    /// The space that records lack. `None` unless records were refused and it is still missing.
    pub(crate) fn refusal(&self) -> Option<FreeSpace> {
        let state = self.state.lock();
        let space = self.space_for(&state, Use::Growth, state.refused?.rolls);
        let is_there = space.free_bytes >= space.needed_bytes && space.free_bytes.is_some();
        (!is_there).then_some(space)
    }

    /// Free bytes, and free bytes that a request needs. `rolls`: it needs another segment.
    fn space_for(&self, state: &PoolState, purpose: Use, rolls: bool) -> FreeSpace {
        let bytes = self.missing_bytes(state, purpose, rolls);
        FreeSpace {
            free_bytes: self.free_bytes(),
            needed_bytes: Some(bytes + KEEP_FREE_BYTES + self.kept_for_sorting()),
        }
    }

    /// Bytes of the segments that a request needs made. `rolls`: it needs another segment.
    fn missing_bytes(&self, state: &PoolState, purpose: Use, rolls: bool) -> u64 {
        let segments = match purpose {
            Use::Growth => self.reserve + usize::from(rolls),
            Use::Expiry => self.reserve.div_ceil(2) + 1,
            Use::Reserve | Use::Start | Use::Leave => 0,
        };
        let there = state.ready.len() + state.free.len();
        match segments {
            // One small segment is enough.
            0 => MIN_SEGMENT_BYTES,
            _ => segments.saturating_sub(there) as u64 * self.segment_bytes,
        }
    }

    /// Whether space had run out, so that [`Pool::restore_reserve`] has work.
    pub(crate) fn is_starved(&self) -> bool {
        self.state.lock().starved
    }

    /// Lets the next attempt to make a segment ready run at once.
    pub(crate) fn try_again(&self) {
        self.state.lock().failed = None;
    }

    /// Marks the pool as starved if segments of the reserve are missing and the disk lacks space for
    /// them.
    fn note_shortage(&self, state: &mut PoolState) {
        let missing = self
            .reserve
            .saturating_sub(state.ready.len() + state.free.len());
        let need = missing as u64 * self.segment_bytes;
        state.starved |= missing > 0 && self.lacks(need);
    }

    /// Whether the file system reports less free space than `bytes`, the last MiB and the space kept
    /// for sorting together. `false` without a report: a write will fail instead.
    fn lacks(&self, bytes: u64) -> bool {
        let kept = KEEP_FREE_BYTES + self.kept_for_sorting();
        self.free_bytes()
            .is_some_and(|free| free < bytes.saturating_add(kept))
    }

    fn free_bytes(&self) -> Option<u64> {
        self.disk.free_bytes().ok().flatten()
    }

    /// Free bytes except those kept for sorting. `None` if the file system does not report free space.
    pub(crate) fn free_for_appends(&self) -> Option<u64> {
        let free = self.free_bytes()?;
        Some(free.saturating_sub(self.kept_for_sorting()))
    }

    /// Free bytes that are reserved for sorting now.
    fn kept_for_sorting(&self) -> u64 {
        if known_bad::makes(Mistake::SorterIgnoresSpace) {
            return 0;
        }
        let written = self.claims_written.load(Ordering::SeqCst);
        let unused = self.sorting_reserve.load(Ordering::SeqCst);
        let unused = unused.saturating_sub(written);
        unused.max(self.claimed.load(Ordering::SeqCst))
    }

    /// Keeps `bytes` of free space for sorting from now on.
    pub(crate) fn keep_for_sorting(&self, bytes: u64) {
        self.sorting_reserve.store(bytes, Ordering::SeqCst);
    }

    /// Free bytes that are kept for sorting while no run is being written.
    pub(crate) fn sorting_reserve(&self) -> u64 {
        self.sorting_reserve.load(Ordering::SeqCst)
    }

    /// Free bytes that another run may take. `None` if the file system does not report free space.
    pub(crate) fn room_for_sorting(&self) -> Option<u64> {
        if known_bad::makes(Mistake::SorterIgnoresSpace) {
            return Some(u64::MAX / 2);
        }
        let taken = KEEP_FREE_BYTES + self.claimed.load(Ordering::SeqCst);
        Some(self.free_bytes()?.saturating_sub(taken))
    }

    /// Claims free space for a run of about `bytes` bytes.
    pub(crate) fn claim(&self, bytes: u64) -> Claim<'_> {
        self.claimed.fetch_add(bytes, Ordering::SeqCst);
        Claim {
            pool: self,
            left: AtomicU64::new(bytes),
            written: AtomicU64::new(0),
        }
    }

    /// Whether space ran out and is not known to be available again.
    pub(crate) fn is_short(&self) -> bool {
        let state = self.state.lock();
        let failed = state.failed.as_ref();
        state.starved || failed.is_some_and(|failed| is_out_of_space(&failed.error()))
    }

    /// Whether the volume lacks free space for a complete pool, so that space may run out soon.
    pub(crate) fn is_nearly_short(&self) -> bool {
        self.lacks((self.target + self.reserve) as u64 * self.segment_bytes)
    }

    /// Bytes that [`Pool::lend`] can free.
    pub(crate) fn lendable(&self) -> u64 {
        match self.state.lock().ready.len() {
            0 | 1 => 0,
            _ => self.segment_bytes,
        }
    }

    /// Removes the last ready segment unless it is the only one. This gives sorting space on a volume
    /// that other programs or an older version filled. The caller holds a [`Claim`], so that only the
    /// sorter uses the space.
    ///
    /// # Errors
    /// Errors of the file system; the segment may be gone then.
    pub(crate) fn lend(&self) -> io::Result<()> {
        let mut state = self.state.lock();
        if state.ready.len() < 2 {
            return Ok(());
        }
        // A seal may already name the front segment.
        let Some(ready) = state.ready.pop_back() else {
            return Ok(());
        };
        self.disk.remove(&journal_path(ready.life.id))?;
        match self.disk.sync_directory("journal") {
            // The file system writes the change later. Until then a crash brings the segment back.
            Err(error) if is_out_of_descriptors(&error) => {}
            flushed => flushed?,
        }
        state.starved = true;
        Ok(())
    }

    /// Removes one unused file to free its space. Returns whether there was one.
    ///
    /// # Errors
    /// Errors of the file system.
    pub(crate) fn give_up(&self) -> io::Result<bool> {
        let mut state = self.state.lock();
        let (path, directory) = if let Some(free) = state.free.pop() {
            (pool_path(free), "pool")
        } else if let Some(ready) = state.ready.pop_back() {
            // No seal names it: the seal was taken back, or the segment would be in use.
            (journal_path(ready.life.id), "journal")
        } else {
            return Ok(false);
        };
        state.starved = true;
        match self.disk.remove(&path) {
            // The file was removed earlier: the disk had no room for its new life.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            removed => removed?,
        }
        self.disk.sync_directory(directory)?;
        Ok(true)
    }

    /// Makes one segment ready, unless an attempt failed within the last 250 ms.
    fn try_to_prepare(
        &self,
        state: &mut MutexGuard<'_, PoolState>,
        purpose: Use,
    ) -> io::Result<()> {
        if let Some(failed) = &state.failed
            && self.clock.monotonic().duration_since(failed.at) < RETRY_AFTER
        {
            return Err(failed.error());
        }
        self.prepare(state, purpose)
    }

    /// Makes one segment ready. Releases the lock while it works.
    fn prepare(&self, state: &mut MutexGuard<'_, PoolState>, purpose: Use) -> io::Result<()> {
        state.preparing = true;
        let failed_before = state.failed.take().is_some();
        // A panic must not leave `preparing` set: a driver would wait for ever.
        let unlocked = |state: &mut MutexGuard<'_, PoolState>,
                        work: &mut dyn FnMut() -> ReadyResult| {
            let work = AssertUnwindSafe(work);
            let made = MutexGuard::unlocked(state, || catch_unwind(work));
            state.preparing = false;
            self.changed.notify_all();
            made.unwrap_or_else(|panic| resume_unwind(panic))
        };
        let (free, result) = match state.unflushed.take() {
            // The id of this segment precedes the ids of all segments made later.
            Some(ready) => {
                let mut ready = Some(ready);
                let mut flush = || self.flush_name(ready.take().expect("it is flushed once"));
                (None, unlocked(state, &mut flush))
            }
            None => {
                let id = state.next_id;
                state.next_id = id.next();
                let mut free = state.free.pop();
                let size = self.segment_bytes;
                let grows = purpose == Use::Growth && state.ready.len() >= self.reserve;
                let mut make = || {
                    // A waiting file is free space too, and may be the space for sorting.
                    if grows && self.lacks(0) {
                        self.discard(&mut free)?;
                    }
                    self.make(id, &mut free, size, purpose)
                };
                let made = unlocked(state, &mut make);
                (free, made)
            }
        };
        match result {
            Ok(ready) => {
                if failed_before {
                    tracing::info!("another segment is ready again");
                }
                state.ready.push_back(ready);
                state.starved &= state.ready.len() < self.reserve;
                Ok(())
            }
            Err(Unready { error, unflushed }) => {
                // The file, if it still exists, can have a life later.
                state.free.extend(free.filter(|_| unflushed.is_none()));
                state.unflushed = unflushed;
                state.failed = Some(LastFailure {
                    at: self.clock.monotonic(),
                    kind: error.kind(),
                    number: error.raw_os_error(),
                    text: error.to_string(),
                });
                let first = !failed_before;
                if is_out_of_space(&error) {
                    state.starved |= state.ready.len() < self.reserve;
                    if first {
                        tracing::warn!(
                            %error,
                            "no space for another segment; without it appends will be refused, trims and deletions go on"
                        );
                    }
                } else if is_out_of_descriptors(&error) && first {
                    tracing::warn!(
                        %error,
                        "no file descriptor for another segment; without it appends will be refused; raise the limit of open files (ulimit -n, LimitNOFILE)"
                    );
                }
                Err(error)
            }
        }
    }

    fn make(
        &self,
        id: SegmentId,
        free: &mut Option<SegmentId>,
        size: u64,
        purpose: Use,
    ) -> Result<ReadySegment, Unready> {
        bounds::unused(id)?;
        let mut salt = [0; 8];
        self.disk.draw(&mut salt)?;
        let mut salt = u64::from_le_bytes(salt);
        if known_bad::makes(Mistake::NoSalt) {
            salt = 0;
        }
        let life = Life {
            id,
            size,
            salt,
            store_id: self.store_id,
        };
        let (path, file) = match self.reusable(free)? {
            Some(found) => found,
            None => self.create(id, size, purpose)?,
        };
        let mut features = match id.get() >= self.marked_from.load(Ordering::SeqCst) {
            true => HAS_RUNS,
            false => 0,
        };
        if self.encrypted.load(Ordering::SeqCst) {
            features |= ENCRYPTED;
        }
        let written = file
            .write_all_at(&life.encode_with(Some(&self.secret), features), 0)
            .and_then(|()| file.sync());
        if let Err(error) = written {
            // A recycled file is removed too: after a power cut it may have holes, and a smaller
            // segment then has its space.
            if is_out_of_space(&error) {
                self.disk.remove(&path)?;
                *free = None;
            }
            return Err(error.into());
        }
        if let Err(error) = self.disk.rename(&path, &journal_path(id)) {
            if is_out_of_space(&error) {
                self.disk.remove(&path)?;
                *free = None;
            }
            return Err(error.into());
        }
        self.flush_name(ReadySegment { life, file })
    }

    /// Makes the name of a segment durable, as the last step. Without a descriptor the segment is kept:
    /// a replacement would leave the file of this one in the journal.
    fn flush_name(&self, ready: ReadySegment) -> Result<ReadySegment, Unready> {
        let flushed = self
            .disk
            .sync_directory("journal")
            .and_then(|()| self.disk.sync_directory("pool"));
        match flushed {
            Ok(()) => Ok(ready),
            Err(error) => Err(Unready {
                unflushed: is_out_of_descriptors(&error).then_some(ready),
                error,
            }),
        }
    }

    /// Removes a file that waits for a new life.
    fn discard(&self, free: &mut Option<SegmentId>) -> io::Result<()> {
        let Some(id) = free.take() else { return Ok(()) };
        match self.disk.remove(&pool_path(id)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => self.disk.sync_directory("pool"),
        }
    }

    /// Returns a recycled file of the right size. Its stale bytes stay: no frame of an earlier life
    /// passes the new salt. Sets `free` to `None` if the file is gone. Otherwise it would block files
    /// that exist.
    fn reusable(
        &self,
        free: &mut Option<SegmentId>,
    ) -> io::Result<Option<(String, Arc<dyn DiskFile>)>> {
        let Some(id) = *free else { return Ok(None) };
        let path = pool_path(id);
        let file = match self.disk.open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                *free = None;
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        if file.size()? == self.segment_bytes && !self.keeps_plain_records(&*file)? {
            return Ok(Some((path, file)));
        }
        self.disk.remove(&path)?;
        *free = None;
        Ok(None)
    }

    /// Whether a file of an earlier life may have records that are not encrypted, although the store is.
    fn keeps_plain_records(&self, file: &dyn DiskFile) -> io::Result<bool> {
        if !self.encrypted.load(Ordering::SeqCst) {
            return Ok(false);
        }
        let mut head = vec![0; usize::try_from(LIFE_BYTES).map_err(io::Error::other)?];
        file.read_full_at(&mut head, 0)?;
        let is_new = head.iter().all(|byte| *byte == 0);
        Ok(!is_new && Life::features(&head) & ENCRYPTED == 0)
    }

    /// Removes the files in `pool/` that may have plain records. Returns the others.
    fn without_plain_records(&self, ids: &[SegmentId]) -> Vec<SegmentId> {
        let kept = |id: &SegmentId| {
            let path = pool_path(*id);
            let removed = self.disk.open(&path).and_then(|file| {
                let is_plain = self.keeps_plain_records(&*file)?;
                if is_plain {
                    self.disk.remove(&path)?;
                }
                Ok(is_plain)
            });
            // If a file cannot be read now, `reusable` looks again before the file gets a new life.
            !removed.unwrap_or(false)
        };
        ids.iter().copied().filter(kept).collect()
    }

    fn create(
        &self,
        id: SegmentId,
        size: u64,
        purpose: Use,
    ) -> io::Result<(String, Arc<dyn DiskFile>)> {
        // If the file system reports too little free space, no write is attempted. Only a start and the
        // sorter take the space that is kept for sorting.
        if !matches!(purpose, Use::Start | Use::Leave) && self.lacks(size) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let path = pool_path(id);
        let file = self.disk.create(&path)?;
        let zeros = vec![0; CHUNK];
        let mut offset = 0;
        while offset < size {
            let rest = usize::try_from(size - offset).unwrap_or(CHUNK);
            let chunk = &zeros[..rest.min(CHUNK)];
            if let Err(error) = file.write_all_at(chunk, offset) {
                if is_out_of_space(&error) {
                    self.disk.remove(&path)?;
                }
                return Err(error);
            }
            offset += chunk.len() as u64;
        }
        Ok((path, file))
    }

    /// Moves unused segment files of the journal to the pool. They may have a new life after
    /// [`Pool::reuse`]. A file that the device could not read in full is removed: a write to a part of
    /// an unreadable page fails, and would fail the journal.
    pub(crate) fn retire(&self, ids: &[SegmentId]) -> io::Result<()> {
        for id in ids {
            let path = journal_path(*id);
            let whole = self.disk.unreadable().of(&path).is_empty();
            let moved = whole.then(|| self.disk.rename(&path, &pool_path(*id)));
            match moved {
                None => self.disk.remove(&path)?,
                // On a full copy-on-write disk a removal can succeed where a rename fails.
                Some(Err(error)) if is_out_of_space(&error) => self.disk.remove(&path)?,
                Some(moved) => moved?,
            }
        }
        Ok(())
    }

    /// Moves unused segment files of the journal to the pool, for a new life.
    pub(crate) fn recycle(&self, ids: &[SegmentId]) -> io::Result<()> {
        if ids.is_empty() {
            return Ok(());
        }
        self.retire(ids)?;
        self.disk.sync_directory("pool")?;
        self.disk.sync_directory("journal")?;
        self.reuse(ids);
        Ok(())
    }

    /// Offers retired files for a new life. The caller has made their new names durable: a file must
    /// not return under its old name with a new life inside.
    pub(crate) fn reuse(&self, ids: &[SegmentId]) {
        let ids = self.without_plain_records(ids);
        self.state.lock().free.extend(ids);
    }

    /// Makes all new segments declare that bodies may be encrypted, and removes files that wait for a new life with plain
    /// records. Comes before the first segment is taken.
    pub(crate) fn mark_encrypted(&self) {
        self.encrypted.store(true, Ordering::SeqCst);
        let mut state = self.state.lock();
        state.free = self.without_plain_records(&state.free);
    }

    /// Makes new segments declare from now on that there may be sorted runs. Returns the id of the
    /// first such segment.
    pub(crate) fn mark(&self) -> SegmentId {
        let state = self.state.lock();
        let marked = self.marked_from.load(Ordering::SeqCst);
        let from = marked.min(state.next_id.get());
        self.marked_from.store(from, Ordering::SeqCst);
        SegmentId::new(from)
    }

    /// Draws an id for a file that is not a segment of the journal.
    pub(crate) fn draw_id(&self) -> SegmentId {
        let mut state = self.state.lock();
        let id = state.next_id;
        state.next_id = id.next();
        id
    }

    /// Number of additional files that may wait for a new life; 0 while the disk lacks space.
    pub(crate) fn room(&self) -> usize {
        if self.lacks(0) {
            return 0;
        }
        let state = self.state.lock();
        (self.target + self.reserve).saturating_sub(state.free.len())
    }

    /// Body of the pool's thread: keeps the pool filled until stopped. Waits while space or file
    /// descriptors are short.
    ///
    /// # Errors
    /// All errors except these shortages: the journal must fail.
    pub(crate) fn keep_filled(&self) -> io::Result<()> {
        let mut state = self.state.lock();
        while !state.stopped {
            if state.preparing || state.ready.len() >= self.target + self.reserve {
                self.changed.wait(&mut state);
                continue;
            }
            match self.prepare(&mut state, Use::Growth) {
                Err(error) if is_shortage(&error) => {
                    self.changed.wait_for(&mut state, RETRY_AFTER * 4);
                }
                result => result?,
            }
        }
        Ok(())
    }

    /// Fills the pool once.
    #[cfg(test)]
    pub(crate) fn fill(&self) -> io::Result<()> {
        let mut state = self.state.lock();
        while state.ready.len() < self.target + self.reserve {
            self.prepare(&mut state, Use::Growth)?;
        }
        Ok(())
    }

    pub(crate) fn stop(&self) {
        self.state.lock().stopped = true;
        self.changed.notify_all();
    }

    /// Ready segments, and files waiting for a new life.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.ready.len() as u64, state.free.len() as u64)
    }
}
