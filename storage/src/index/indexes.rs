//! Indexes of sealed segments: read when needed, kept while there is room.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use bytes::Bytes;

use super::large::LargeIndex;
use super::pages::Readers;
use super::sealed::{HEADER, IndexHead, Row, SealedIndex, index_path, old_path};
use crate::base::ids::{LogId, Position, SegmentId};
use crate::base::sync::Mutex;
use crate::disk::held_files::Backups;
use crate::disk::{Disk, is_out_of_descriptors, read_some, read_whole};
use crate::journal::segment::Segment;

/// Maximum size of all cached whole indexes, in bytes.
const CACHE_BYTES: usize = 32 << 20;
/// Files larger than this, in bytes, are searched for single logs without all of them in memory.
const LARGE: u64 = 4 << 20;
/// Files up to this size, in bytes, are always read whole, which costs little more than a search.
const SMALL: u64 = 64 << 10;
/// Number of uses of indexes after which one that was not among them makes room for others. A pass over all logs looks into
/// every run for each of them: if the runs do not fit together, the oldest would always be the next to be needed. It is more if
/// such a pass has more uses for one log, because more indexes are in memory.
const IN_USE: u64 = 10_000;
/// Maximum uses of one index for one log: of the index, of its summary, and one when it is kept.
const USES_OF_INDEX: u64 = 3;
/// Maximum memory for these searches and for files that are read from front to back, in bytes. It
/// suffices for about 2 GiB of files.
const LARGE_CACHE_BYTES: usize = 6 << 20;
/// Maximum bytes of indexes that readers made for segments with a damaged index, or that a start must not
/// write, and that stay in memory. Beyond it they are cached like indexes that were read.
const MOST_MADE_BYTES: usize = 64 << 20;
/// Maximum size of a new index that is cached, in bytes. A larger one, with hundreds of thousands of
/// logs, may not be read for a long time.
const KEPT_UNREAD: usize = 4 << 20;

/// A row, with its index or with an index of this log alone.
pub(crate) type FoundRow = (Arc<SealedIndex>, Row);

/// The indexes of all sealed segments.
pub(crate) struct Indexes {
    disk: Arc<dyn Disk>,
    state: Mutex<IndexesState>,
    readers: Arc<Readers>,
}

#[derive(Default)]
struct IndexesState {
    /// Indexes that no file holds (yet).
    pinned: HashMap<SegmentId, Arc<SealedIndex>>,
    /// Pinned indexes that readers made, or that a start must not write, with their bytes.
    made: HashMap<SegmentId, usize>,
    cached: HashMap<SegmentId, (Arc<SealedIndex>, u64)>,
    cached_bytes: usize,
    /// Summaries of files that were found good: large files, and files read from front to back.
    large: HashMap<SegmentId, (Arc<LargeIndex>, u64)>,
    /// Counts uses. The smallest number belongs to the least recently used index.
    uses: u64,
    /// Number of the use before which no cached index makes room for others.
    next_look: u64,
    /// Number of cached indexes that looks for the oldest have visited.
    #[cfg(test)]
    visited: usize,
}

impl Indexes {
    pub(crate) fn new(disk: Arc<dyn Disk>) -> Self {
        Self {
            disk,
            state: Mutex::default(),
            readers: Arc::default(),
        }
    }

    /// Keeps an index in memory until its file is written.
    pub(crate) fn pin(&self, index: Arc<SealedIndex>) {
        let mut state = self.state.lock();
        // The new file will differ from the old one.
        state.large.remove(&index.segment);
        state.made.remove(&index.segment);
        state.pinned.insert(index.segment, index);
    }

    /// Keeps an index that a reader made from its segment's frames, or that a start must not write. The next start
    /// makes it again.
    pub(crate) fn keep_made(&self, index: Arc<SealedIndex>) {
        let mut state = self.state.lock();
        let (id, bytes) = (index.segment, index.bytes().len());
        state.large.remove(&id);
        if bytes + state.made.values().sum::<usize>() > MOST_MADE_BYTES {
            state.keep(id, index);
            return;
        }
        state.made.insert(id, bytes);
        state.pinned.insert(id, index);
    }

    /// An index that was kept as [`Indexes::keep_made`] keeps it.
    pub(crate) fn made(&self, segment: SegmentId) -> Option<Arc<SealedIndex>> {
        let state = self.state.lock();
        let is_made = state.made.contains_key(&segment);
        state.pinned.get(&segment).filter(|_| is_made).cloned()
    }

    /// Bytes of the indexes that no file holds.
    #[cfg(test)]
    pub(crate) fn pinned_bytes(&self) -> u64 {
        let state = self.state.lock();
        state.pinned.values().map(|index| index.file_bytes()).sum()
    }

    /// Drops cached parts of a file that was set aside. An index yet to be written stays.
    pub(crate) fn close(&self, segment: SegmentId) {
        self.state.lock().close(segment);
    }

    /// Unpins an index whose file is written. From now on the file is read when needed.
    pub(crate) fn unpin(&self, segment: SegmentId) {
        let mut state = self.state.lock();
        let written = state.pinned.remove(&segment);
        state.made.remove(&segment);
        if let Some(index) = written.filter(|index| index.bytes().len() <= KEPT_UNREAD) {
            state.keep(segment, index);
        }
    }

    /// Drops the indexes of segments that a sorted run has replaced.
    pub(crate) fn forget(&self, segments: impl IntoIterator<Item = SegmentId>) {
        let mut state = self.state.lock();
        for id in segments {
            state.pinned.remove(&id);
            state.made.remove(&id);
            state.close(id);
        }
    }

    /// Returns the index of a sealed segment; `None` if there is no good one.
    ///
    /// # Errors
    /// If no file descriptor is left to read the index, so that its state is unknown.
    pub(crate) fn get(&self, segment: &Segment) -> io::Result<Option<Arc<SealedIndex>>> {
        let id = segment.life.id;
        if let Some(index) = self.state.lock().in_memory(id) {
            return Ok(Some(index));
        }
        let index = read(&*self.disk, id)?.filter(|index| index.is_of(&segment.life, segment.base));
        let Some(index) = index.map(Arc::new) else {
            return Ok(None);
        };
        if index.bytes().len() <= CACHE_BYTES / 2 {
            self.state.lock().keep(id, Arc::clone(&index));
        }
        Ok(Some(index))
    }

    /// Returns the index of a sealed segment, for reading from front to back. An index that is not in
    /// memory is read by windows, and its file is open only while a window is read. `None` if there is
    /// no good index.
    ///
    /// # Errors
    /// As [`Indexes::get`].
    pub(crate) fn stream(&self, segment: &Segment) -> io::Result<Option<Arc<SealedIndex>>> {
        let id = segment.life.id;
        let known = {
            let mut state = self.state.lock();
            // The file may be readable again after a passing error.
            let whole = |index: &Arc<SealedIndex>| !index.is_partial();
            if let Some(index) = state.in_memory(id).filter(whole) {
                return Ok(Some(index));
            }
            state.large(id)
        };
        let large = match known {
            Some(large) => Some(large),
            None => self.read_large(id)?,
        };
        let large = large.filter(|large| large.head().is_of(&segment.life, segment.base));
        if large.is_some() {
            self.state.lock().drop_partial(id);
        }
        let paged = |large| {
            let (disk, readers) = (Arc::clone(&self.disk), Arc::clone(&self.readers));
            Arc::new(SealedIndex::paged(large, disk, readers))
        };
        Ok(large.map(paged))
    }

    /// Reads all of an index file once, piece by piece, and keeps only a summary.
    fn read_large(&self, id: SegmentId) -> io::Result<Option<Arc<LargeIndex>>> {
        let file = self.disk.open(&index_path(id));
        match file.and_then(|file| LargeIndex::read(&*file)) {
            Ok(large) => Ok(large.map(|large| {
                let large = Arc::new(large);
                self.state.lock().keep_large(id, Arc::clone(&large));
                large
            })),
            Err(error) if is_out_of_descriptors(&error) => Err(error),
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    tracing::warn!(segment = %id, %error, "the index of a segment cannot be read");
                }
                Ok(None)
            }
        }
    }

    /// Returns the row of a log in a sealed segment, if there is one. `None` if the segment has no good
    /// index.
    ///
    /// # Errors
    /// As [`Indexes::get`].
    pub(crate) fn find(
        &self,
        segment: &Segment,
        log: LogId,
    ) -> io::Result<Option<Option<FoundRow>>> {
        let index = match self.in_memory_or_large(segment)? {
            Some(KeptIndex::Whole(index)) => index,
            Some(KeptIndex::Large(large)) => {
                let id = segment.life.id;
                return match large.find(&*self.disk, id, log) {
                    Ok(found) => Ok(Some(found.map(|(index, row)| (Arc::new(index), row)))),
                    Err(error) if is_out_of_descriptors(&error) => Err(error),
                    Err(error) => {
                        // The file is read again, and made again if it is damaged.
                        self.state.lock().large.remove(&id);
                        if error.kind() != io::ErrorKind::NotFound {
                            tracing::warn!(segment = %id, %error, "the index of a segment cannot be read");
                        }
                        Ok(None)
                    }
                };
            }
            None => match self.get(segment)? {
                Some(index) => index,
                None => return Ok(None),
            },
        };
        Ok(Some(index.row(log).map(|row| (index, row))))
    }

    /// Returns the row of a log from an index in memory; `None` if the index is not in memory.
    pub(crate) fn find_in_memory(&self, segment: &Segment, log: LogId) -> Option<Option<FoundRow>> {
        let index = self.state.lock().in_memory(segment.life.id)?;
        Some(index.row(log).map(|row| (index, row)))
    }

    /// Returns an index without reading a large file into memory; `None` if the file must be read
    /// completely.
    fn in_memory_or_large(&self, segment: &Segment) -> io::Result<Option<KeptIndex>> {
        let id = segment.life.id;
        {
            let mut state = self.state.lock();
            if let Some(index) = state.in_memory(id) {
                return Ok(Some(KeptIndex::Whole(index)));
            }
            let large = state.large(id);
            let is_searched = |large: &Arc<LargeIndex>| !state.takes(large.file_bytes() as u64);
            if let Some(large) = large.filter(is_searched) {
                return Ok(Some(KeptIndex::Large(large)));
            }
        }
        let file = match self.disk.open(&index_path(id)) {
            Err(error) if is_out_of_descriptors(&error) => return Err(error),
            Err(_) => return Ok(None),
            Ok(file) => file,
        };
        let large = match file.size() {
            Ok(bytes) if !self.state.lock().takes(bytes) => LargeIndex::read(&*file).ok().flatten(),
            _ => None,
        };
        let Some(large) = large.filter(|large| large.head().is_of(&segment.life, segment.base))
        else {
            return Ok(None);
        };
        let large = Arc::new(large);
        self.state.lock().keep_large(id, Arc::clone(&large));
        Ok(Some(KeptIndex::Large(large)))
    }
}

/// The form in which an index is kept.
enum KeptIndex {
    Whole(Arc<SealedIndex>),
    Large(Arc<LargeIndex>),
}

impl IndexesState {
    /// Returns an index that is in memory as a whole.
    fn in_memory(&mut self, id: SegmentId) -> Option<Arc<SealedIndex>> {
        self.uses += 1;
        if let Some(index) = self.pinned.get(&id) {
            return Some(Arc::clone(index));
        }
        let (index, used) = self.cached.get_mut(&id)?;
        *used = self.uses;
        Some(Arc::clone(index))
    }

    /// Whether a file of this size is read whole: the cache then drops no index that is in use.
    fn takes(&mut self, bytes: u64) -> bool {
        bytes <= SMALL
            || bytes <= LARGE
                && (self.cached_bytes as u64 + bytes <= CACHE_BYTES as u64 || self.has_unused())
    }

    /// Whether a cached index is not in use. Looks at all of them, but not for each use: event loops wait for this lock.
    fn has_unused(&mut self) -> bool {
        if self.uses < self.next_look {
            return false;
        }
        #[cfg(test)]
        {
            self.visited += self.cached.len();
        }
        let in_memory = self.cached.len() + self.large.len();
        let in_use = IN_USE.max(in_memory as u64 * USES_OF_INDEX);
        let Some(oldest) = self.cached.values().map(|(_, used)| *used).min() else {
            return false;
        };
        let is_unused = oldest + in_use < self.uses;
        if !is_unused {
            self.next_look = (oldest + in_use).max(self.uses + in_use / 8);
        }
        is_unused
    }

    /// Drops a partial index, because its file turned out to be good.
    fn drop_partial(&mut self, id: SegmentId) {
        if self.pinned.get(&id).is_some_and(|index| index.is_partial()) {
            self.pinned.remove(&id);
            self.made.remove(&id);
        }
        let cached = self.cached.get(&id);
        if cached.is_some_and(|(index, _)| index.is_partial()) {
            self.close(id);
        }
    }

    /// Drops the cached parts of a file.
    fn close(&mut self, id: SegmentId) {
        self.large.remove(&id);
        if let Some((old, _)) = self.cached.remove(&id) {
            self.cached_bytes -= old.bytes().len();
        }
    }

    /// Returns the summary of a file that was found good.
    fn large(&mut self, id: SegmentId) -> Option<Arc<LargeIndex>> {
        self.uses += 1;
        let (large, used) = self.large.get_mut(&id)?;
        *used = self.uses;
        Some(Arc::clone(large)).filter(|large| large.is_trusted())
    }

    fn keep_large(&mut self, id: SegmentId, index: Arc<LargeIndex>) {
        self.uses += 1;
        self.large.insert(id, (index, self.uses));
        let bytes = |large: &HashMap<_, (Arc<LargeIndex>, u64)>| -> usize {
            large.values().map(|(index, _)| index.bytes()).sum()
        };
        while self.large.len() > 1 && bytes(&self.large) > LARGE_CACHE_BYTES {
            let oldest = self.large.iter().min_by_key(|(_, (_, used))| *used);
            if let Some(oldest) = oldest.map(|(id, _)| *id) {
                self.large.remove(&oldest);
            }
        }
    }

    fn keep(&mut self, id: SegmentId, index: Arc<SealedIndex>) {
        let bytes = index.bytes().len();
        self.uses += 1;
        if let Some((old, _)) = self.cached.insert(id, (index, self.uses)) {
            self.cached_bytes -= old.bytes().len();
        }
        self.cached_bytes += bytes;
        if self.cached_bytes <= CACHE_BYTES {
            return;
        }
        // A quarter goes at a time, so that not every miss pays for finding the oldest.
        let mut by_use: Vec<(u64, SegmentId)> = self
            .cached
            .iter()
            .map(|(id, (_, used))| (*used, *id))
            .collect();
        by_use.sort_unstable();
        by_use.pop();
        for (_, id) in by_use {
            if self.cached_bytes <= CACHE_BYTES / 4 * 3 {
                break;
            }
            if let Some((old, _)) = self.cached.remove(&id) {
                self.cached_bytes -= old.bytes().len();
            }
        }
    }
}

/// Reads an index file; `None` if there is no good one. An unreadable file counts as damaged: its
/// segment holds the same facts.
///
/// # Errors
/// If no file descriptor is left: the index may be good, and the segment needs one too.
pub(crate) fn read(disk: &dyn Disk, id: SegmentId) -> io::Result<Option<SealedIndex>> {
    read_at(disk, &index_path(id))
}

/// Reads the index file at a path, as [`read`].
pub(crate) fn read_at(disk: &dyn Disk, path: &str) -> io::Result<Option<SealedIndex>> {
    match read_whole(disk, path) {
        Ok(bytes) => Ok(SealedIndex::decode(Bytes::from(bytes))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) if is_out_of_descriptors(&error) => Err(error),
        Err(error) => {
            tracing::warn!(path, %error, "the index of a segment cannot be read");
            Ok(None)
        }
    }
}

/// Returns the base of the segment or run of an index file; `None` if the base cannot be read.
///
/// # Errors
/// If no file descriptor is left.
pub(crate) fn base_of(disk: &dyn Disk, path: &str) -> io::Result<Option<Position>> {
    let head = disk
        .open(path)
        .and_then(|file| read_some(&*file, 0, HEADER as u64));
    match head {
        Ok(head) => Ok(IndexHead::decode(&head).map(|head| head.base)),
        Err(error) if is_out_of_descriptors(&error) => Err(error),
        Err(_) => Ok(None),
    }
}

/// Sets the index of a damaged segment aside: no start relies on it any more, but every start that
/// reads the frames consults it. Returns whether there was an index.
///
/// # Errors
/// Errors of the file system. The directory is not flushed.
pub(crate) fn set_aside(backups: &Backups, id: SegmentId) -> io::Result<bool> {
    match backups.set_aside(&index_path(id), &old_path(id)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        moved => moved.map(|()| true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::SimDisk;

    #[test]
    fn pass_over_more_indexes_than_fit_reads_few_bytes_for_each_log() {
        const LOGS: u64 = 10_000;
        let disk = SimDisk::new();
        disk.create_directory("index").unwrap();
        let (mut bytes, mut segments) = (0, Vec::new());
        while bytes < 2 * CACHE_BYTES {
            let (life, base, index) = SealedIndex::of_logs(segments.len() as u64 + 1, LOGS);
            disk.replace(&index_path(life.id), index.bytes().to_vec());
            bytes += index.bytes().len();
            segments.push(Segment::finished(life, base, None, life.size));
        }
        let indexes = Indexes::new(Arc::new(disk.clone()));
        let read_for = |log: u64| {
            let before = disk.reads().1;
            for segment in &segments {
                let found = indexes.find(segment, LogId::new(log)).unwrap().unwrap();
                assert_eq!(found.unwrap().1.log_id, LogId::new(log));
            }
            disk.reads().1 - before
        };
        read_for(1);
        let most = segments.len() as u64 * SMALL;
        for log in [2, LOGS / 2, LOGS] {
            let read = read_for(log);
            assert!(
                read < most,
                "{read} bytes for log {log} in {} indexes",
                segments.len()
            );
        }
        assert!(indexes.state.lock().cached_bytes > CACHE_BYTES / 2);
        // Indexes that nobody uses any more give way.
        let last = segments.last().unwrap();
        for _ in 0..IN_USE {
            indexes.find(last, LogId::new(1)).unwrap();
        }
        assert!(indexes.find_in_memory(last, LogId::new(1)).is_some());
    }

    #[test]
    fn lookups_in_a_full_cache_do_not_look_at_all_of_it() {
        let disk = SimDisk::new();
        disk.create_directory("index").unwrap();
        let indexes = Indexes::new(Arc::new(disk.clone()));
        let add = |id, logs| {
            let (life, base, index) = SealedIndex::of_logs(id, logs);
            disk.replace(&index_path(life.id), index.bytes().to_vec());
            Segment::finished(life, base, None, life.size)
        };
        // Small ones fill the cache, and all of them stay in use.
        let mut small = Vec::new();
        while indexes.state.lock().cached_bytes < CACHE_BYTES - (64 << 10) {
            small.push(add(small.len() as u64 + 1, 500));
            indexes
                .find(&small[small.len() - 1], LogId::new(1))
                .unwrap();
        }
        assert!((500..3_000).contains(&small.len()), "{}", small.len());
        for segment in &small {
            indexes.find(segment, LogId::new(1)).unwrap();
        }
        let large = add(small.len() as u64 + 1, 10_000);
        for n in 0..5_000 {
            indexes.find(&large, LogId::new(1)).unwrap();
            indexes
                .find(&small[n % small.len()], LogId::new(1))
                .unwrap();
        }
        let visited = indexes.state.lock().visited;
        assert!(
            visited > 0 && visited < 100 * small.len(),
            "{visited} visits of {} indexes",
            small.len()
        );
    }

    #[test]
    fn indexes_that_readers_make_take_bounded_memory() {
        let indexes = Indexes::new(Arc::new(SimDisk::new()));
        let large = |id| Arc::new(SealedIndex::of_places(id, 500_000));
        let bytes = large(1).bytes().len();
        assert!(bytes < CACHE_BYTES / 2, "it may be cached: {bytes}");
        let most = MOST_MADE_BYTES / bytes;
        let kept = || {
            let state = indexes.state.lock();
            let of = |index: &Arc<SealedIndex>| index.bytes().len();
            let pinned: usize = state.pinned.values().map(of).sum();
            let cached: usize = state.cached.values().map(|(index, _)| of(index)).sum();
            assert_eq!(pinned, state.made.values().sum::<usize>());
            assert_eq!(cached, state.cached_bytes);
            (pinned, cached)
        };
        for id in 1..=2 * most as u64 + 8 {
            indexes.keep_made(large(id));
            let (pinned, cached) = kept();
            assert!(pinned <= MOST_MADE_BYTES, "{id}: {pinned} bytes");
            assert!(cached <= CACHE_BYTES, "{id}: {cached} bytes");
            assert!(indexes.state.lock().in_memory(SegmentId::new(id)).is_some());
        }
        assert_eq!(kept().0, most * bytes, "the bound is reached");
        // A segment that is sorted makes room.
        indexes.forget([SegmentId::new(1)]);
        assert_eq!(kept().0, (most - 1) * bytes);
        indexes.keep_made(large(1000));
        assert_eq!(kept().0, most * bytes);
    }
}
