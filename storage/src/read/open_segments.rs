//! Open files and maps of finished segments.
//!
//! Their number is bounded, also under scans: the least recently used is closed first.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use bytes::Bytes;

use super::buffers::Buffers;
use super::reach::far;
use crate::api::config::ReadStrategy;
use crate::base::ids::{Position, SegmentId};
use crate::base::sync::Mutex;
use crate::disk::{Disk, DiskFile, DiskMap, is_out_of_descriptors, no_more_than_there_is};
use crate::journal::segment::Segment;

/// One open segment. It stays valid for its holders after it is closed here.
struct OpenSegment {
    file: Arc<dyn DiskFile>,
    /// A map of the whole file, if the strategy is to map.
    map: Option<Box<dyn DiskMap>>,
}

/// Segments open for reading.
pub(crate) struct OpenSegments {
    disk: Arc<dyn Disk>,
    strategy: ReadStrategy,
    most: usize,
    buffers: Arc<Buffers>,
    cache: Mutex<Cache>,
}

#[derive(Default)]
struct Cache {
    open: HashMap<SegmentId, (Arc<OpenSegment>, u64)>,
    /// Counts uses: the smallest number is the least recently used.
    uses: u64,
    evictions: u64,
}

impl Cache {
    fn get(&mut self, segment: &Segment) -> Option<Arc<OpenSegment>> {
        self.uses += 1;
        let (open, used) = self.open.get_mut(&segment.life.id)?;
        *used = self.uses;
        Some(Arc::clone(open))
    }

    /// Closes the least recently used segment. Returns whether there was one.
    fn evict(&mut self) -> bool {
        let oldest = self.open.iter().min_by_key(|(_, (_, used))| *used);
        let Some(oldest) = oldest.map(|(id, _)| *id) else {
            return false;
        };
        self.open.remove(&oldest);
        self.evictions += 1;
        true
    }
}

impl OpenSegments {
    /// Keeps at most `most` segments open.
    pub(crate) fn new(disk: Arc<dyn Disk>, strategy: ReadStrategy, most: usize) -> Self {
        Self {
            disk,
            strategy,
            most,
            buffers: Arc::default(),
            cache: Mutex::default(),
        }
    }

    /// Reads up to `length` bytes of a segment from a position on.
    pub(crate) fn read(&self, segment: &Segment, from: Position, length: u64) -> io::Result<Bytes> {
        let offset = segment.offset(from);
        let length = usize::try_from(length).map_err(io::Error::other)?;
        if let Some(file) = segment.writer() {
            return self.read_file(&*file, offset, length);
        }
        let open = self.get(segment)?;
        // Copied, so that no map outlives this call: the file may get a new life. A page of the map
        // that the device cannot read leaves the read to the file.
        let mapped = open.map.as_ref().map(|map| map.read(offset, length));
        match mapped {
            Some(Ok(bytes)) => Ok(bytes),
            Some(Err(_)) | None => self.read_file(&*open.file, offset, length),
        }
    }

    /// Reads `length` bytes of a segment, only if its file is open and the system has all of them in memory.
    ///
    /// # Errors
    /// `WouldBlock` if the file is not open, is mapped, or has fewer such bytes.
    pub(super) fn read_cached(
        &self,
        segment: &Segment,
        from: Position,
        length: u64,
    ) -> io::Result<Bytes> {
        let offset = segment.offset(from);
        let length = usize::try_from(length).map_err(io::Error::other)?;
        let written = segment.writer();
        let open = match &written {
            Some(_) => None,
            None => self.cache.lock().get(segment),
        };
        let file = match (&written, &open) {
            (Some(file), _) => &**file,
            // Mapped bytes may have left memory since.
            (_, Some(open)) if open.map.is_none() => &*open.file,
            _ => return Err(far()),
        };
        let bytes = self
            .buffers
            .filled(length, |buffer| file.read_cached_at(buffer, offset))?;
        // The other bytes are not in memory, or not in the file.
        if bytes.len() < length {
            return Err(far());
        }
        Ok(bytes)
    }

    fn read_file(&self, file: &dyn DiskFile, offset: u64, length: usize) -> io::Result<Bytes> {
        let length = no_more_than_there_is(file, offset, length as u64)?;
        self.buffers
            .filled(length, |buffer| file.read_full_at(buffer, offset))
    }

    /// Announces a read of `length` bytes from a position on, so that the system may begin with it. Mapped files need
    /// none: they were read when they were mapped.
    pub(crate) fn will_read(&self, segment: &Segment, from: Position, length: u64) {
        // The read itself will report errors.
        if let (ReadStrategy::Pread, Ok(open)) = (self.strategy, self.get(segment)) {
            open.file.will_read(segment.offset(from), length);
        }
    }

    fn get(&self, segment: &Segment) -> io::Result<Arc<OpenSegment>> {
        if let Some(open) = self.cache.lock().get(segment) {
            return Ok(open);
        }
        let file = self.open(segment)?;
        let map = match self.strategy {
            ReadStrategy::Mmap => file.map()?,
            ReadStrategy::Pread => None,
        };
        let open = Arc::new(OpenSegment { file, map });
        let mut cache = self.cache.lock();
        cache.uses += 1;
        let use_number = cache.uses;
        cache
            .open
            .insert(segment.life.id, (Arc::clone(&open), use_number));
        if segment.is_retired() {
            // Its file may have been closed and removed before it was entered here, and nothing closes it again.
            cache.open.remove(&segment.life.id);
        }
        while cache.open.len() > self.most && cache.evict() {}
        Ok(open)
    }

    /// Opens a segment. If no file descriptor is left, the least recently used segment gives up its
    /// own.
    fn open(&self, segment: &Segment) -> io::Result<Arc<dyn DiskFile>> {
        match self.disk.open(&segment.path()) {
            Err(error) if is_out_of_descriptors(&error) && self.cache.lock().evict() => {
                self.disk.open(&segment.path())
            }
            opened => opened,
        }
    }

    /// Closes files that are no longer read.
    pub(crate) fn close(&self, segments: impl IntoIterator<Item = SegmentId>) {
        let mut cache = self.cache.lock();
        for id in segments {
            cache.open.remove(&id);
        }
    }

    /// Number of open segments, and number of segments closed to make room.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let cache = self.cache.lock();
        (cache.open.len() as u64, cache.evictions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::SimDisk;
    use crate::format::life::Life;

    #[test]
    fn a_segment_that_a_run_replaced_does_not_stay_open() {
        let disk = SimDisk::new();
        let life = Life {
            id: SegmentId::FIRST,
            size: 4096,
            salt: 0,
            store_id: 0,
        };
        let segment = Segment::finished(life, Position::ZERO, None, 4096);
        disk.replace(&segment.path(), vec![7; 4096]);
        let open = OpenSegments::new(Arc::new(disk), ReadStrategy::Pread, 256);
        let read = || open.read(&segment, Position::new(9), 3).unwrap();
        assert_eq!((read(), open.counts().0), (vec![7; 3].into(), 1));
        // A reader opened the file before the sorter closed it, and enters it now.
        segment.retire();
        open.close([segment.life.id]);
        assert_eq!((read(), open.counts().0), (vec![7; 3].into(), 0));
    }
}
