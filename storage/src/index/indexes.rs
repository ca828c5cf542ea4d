//! Indexes of sealed segments: read when they are needed, kept while there is room.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use bytes::Bytes;

use super::sealed::{SealedIndex, index_path};
use crate::disk::{Disk, read_whole};
use crate::ids::SegmentId;
use crate::journal::segment::Segment;
use crate::sync::Mutex;

/// Indexes read are kept up to this.
const CACHE_BYTES: usize = 32 << 20;
/// One that was just written is kept if it is not larger: of a segment that touches hundreds of
/// thousands of logs nobody may read for long.
const KEPT_UNREAD: usize = 4 << 20;

/// The indexes of all sealed segments.
pub(crate) struct Indexes {
    disk: Arc<dyn Disk>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Those that no file holds (yet).
    pinned: HashMap<SegmentId, Arc<SealedIndex>>,
    cached: HashMap<SegmentId, (Arc<SealedIndex>, u64)>,
    cached_bytes: usize,
    /// Counts uses: the smallest number is the least recently used.
    uses: u64,
}

impl Indexes {
    pub(crate) fn new(disk: Arc<dyn Disk>) -> Self {
        Self {
            disk,
            state: Mutex::default(),
        }
    }

    /// Keeps an index in memory until its file is written.
    pub(crate) fn pin(&self, index: Arc<SealedIndex>) {
        self.state.lock().pinned.insert(index.segment, index);
    }

    /// Its file is written: from now on it is read when it is needed.
    pub(crate) fn unpin(&self, segment: SegmentId) {
        let mut state = self.state.lock();
        let written = state.pinned.remove(&segment);
        if let Some(index) = written.filter(|index| index.bytes().len() <= KEPT_UNREAD) {
            state.keep(segment, index);
        }
    }

    /// Nothing is asked of these any more: a sorted run has taken their place.
    pub(crate) fn forget(&self, segments: impl IntoIterator<Item = SegmentId>) {
        let mut state = self.state.lock();
        for id in segments {
            state.pinned.remove(&id);
            if let Some((old, _)) = state.cached.remove(&id) {
                state.cached_bytes -= old.bytes().len();
            }
        }
    }

    /// The index of a sealed segment; `None` if there is none that is good.
    pub(crate) fn get(&self, segment: &Segment) -> Option<Arc<SealedIndex>> {
        let id = segment.life.id;
        {
            let mut state = self.state.lock();
            state.uses += 1;
            let use_number = state.uses;
            if let Some(index) = state.pinned.get(&id) {
                return Some(Arc::clone(index));
            }
            if let Some((index, used)) = state.cached.get_mut(&id) {
                *used = use_number;
                return Some(Arc::clone(index));
            }
        }
        let index = read(&*self.disk, id)
            .filter(|index| index.is_of(&segment.life, segment.base))
            .map(Arc::new)?;
        self.state.lock().keep(id, Arc::clone(&index));
        Some(index)
    }
}

impl State {
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
        // A quarter goes at a time, so that finding the oldest does not cost every miss.
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

/// Reads an index file; `None` if there is none that is good. One that cannot be read is
/// as good as damaged: what it tells is in the segment too.
pub(crate) fn read(disk: &dyn Disk, id: SegmentId) -> Option<SealedIndex> {
    match read_file(disk, id) {
        Ok(index) => index,
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            tracing::warn!(segment = %id, %error, "the index of a segment cannot be read");
            None
        }
    }
}

fn read_file(disk: &dyn Disk, id: SegmentId) -> io::Result<Option<SealedIndex>> {
    let bytes = read_whole(disk, &index_path(id))?;
    Ok(SealedIndex::decode(Bytes::from(bytes)))
}
