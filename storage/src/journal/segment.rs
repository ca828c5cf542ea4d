//! The state of an open segment file.
//!
//! A position is the base of its segment plus the offset in the file.

use std::sync::{Arc, OnceLock};

use crate::api::engine::SegmentContents;
use crate::base::bounds::LIFE_BYTES;
use crate::base::ids::{Position, Timestamp};
use crate::base::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::base::sync::{Mutex, RwLock};
use crate::disk::DiskFile;
use crate::format::address::Hole;
use crate::format::life::Life;
use crate::format::life::journal_path;

/// Minimum bytes between two borders that a segment remembers: 2 KiB of memory for a segment of 64 MiB.
const BORDER_BYTES: u64 = 256 << 10;

/// A segment that holds frames.
pub(crate) struct Segment {
    pub(crate) life: Life,
    /// Position of the file's first byte.
    pub(crate) base: Position,
    /// Path of the file, if it is not under the segment's own name.
    misnamed: Option<String>,
    /// The open file while the segment is being written.
    writer: RwLock<Option<Arc<dyn DiskFile>>>,
    bytes: AtomicU64,
    /// End of the segment's frames; `None` while it is being written.
    pub(crate) end: RwLock<Option<Position>>,
    /// Whether an index lists its frames, instead of memory.
    indexed: AtomicBool,
    /// Whether a sorted run has replaced it: its file may have another life by now.
    retired: AtomicBool,
    /// Damage found, in order, not overlapping.
    pub(crate) holes: RwLock<Vec<Hole>>,
    /// Positions where frames begin, in order, [`BORDER_BYTES`] or more apart: as far as somebody had to walk.
    borders: Mutex<Vec<Position>>,
    /// Contents of the segment, once they were determined.
    pub(crate) contents: OnceLock<SegmentContents>,
    /// The latest stored time of its logs, once a reader has taken it from the index.
    pub(crate) latest: OnceLock<Timestamp>,
}

impl Segment {
    /// A segment to be written.
    pub(crate) fn begun(life: Life, base: Position, file: Arc<dyn DiskFile>) -> Self {
        let segment = Self::finished(life, base, None, life.size);
        *segment.writer.write() = Some(file);
        *segment.end.write() = None;
        segment
    }

    /// A segment that is no longer written and whose file takes `bytes`. `misnamed`: path of the file,
    /// if it is not under the segment's own name.
    pub(crate) fn finished(
        life: Life,
        base: Position,
        misnamed: Option<String>,
        bytes: u64,
    ) -> Self {
        Self {
            life,
            base,
            misnamed,
            writer: RwLock::default(),
            bytes: AtomicU64::new(bytes),
            end: RwLock::new(Some(base)),
            indexed: AtomicBool::new(false),
            retired: AtomicBool::new(false),
            holes: RwLock::default(),
            borders: Mutex::default(),
            contents: OnceLock::new(),
            latest: OnceLock::new(),
        }
    }

    /// Path of the file, built at each call: there may be many segments.
    pub(crate) fn path(&self) -> String {
        self.misnamed
            .clone()
            .unwrap_or_else(|| journal_path(self.life.id))
    }

    /// Whether the file is not under the segment's own name.
    pub(crate) fn is_misnamed(&self) -> bool {
        self.misnamed.is_some() && !crate::format::address::is_address(self.base)
    }

    /// The file while the segment is being written.
    pub(crate) fn writer(&self) -> Option<Arc<dyn DiskFile>> {
        self.writer.read().clone()
    }

    /// Ends writing. From now on the file is opened when it is read.
    pub(crate) fn close(&self) {
        *self.writer.write() = None;
    }

    /// Position of the first frame.
    pub(crate) fn first(&self) -> Position {
        self.base.advance(LIFE_BYTES)
    }

    /// Position of the next segment's first byte. It is beyond every position that this segment can
    /// have used.
    pub(crate) fn limit(&self) -> Position {
        self.base.advance(self.life.size)
    }

    /// Whether an index lists its frames, instead of memory.
    pub(crate) fn is_indexed(&self) -> bool {
        self.indexed.load(Ordering::SeqCst)
    }

    /// Marks the segment as listed by an index.
    pub(crate) fn set_indexed(&self) {
        self.indexed.store(true, Ordering::SeqCst);
    }

    /// Whether a sorted run has replaced it. Records that are missing from its file are in that run.
    pub(crate) fn is_retired(&self) -> bool {
        self.retired.load(Ordering::SeqCst)
    }

    /// Marks the segment as replaced by a sorted run. Called before the file is touched.
    pub(crate) fn retire(&self) {
        self.retired.store(true, Ordering::SeqCst);
    }

    pub(crate) fn offset(&self, position: Position) -> u64 {
        position.since(self.base)
    }

    /// Bytes that the file takes.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Notes that the file was cut to `bytes`.
    pub(crate) fn cut(&self, bytes: u64) {
        self.bytes.store(bytes, Ordering::Relaxed);
    }

    /// Whether damage is noted at a position.
    pub(crate) fn has_hole_at(&self, position: Position) -> bool {
        let holes = self.holes.read();
        holes
            .iter()
            .any(|hole| hole.from <= position && position < hole.to)
    }

    /// Whether all of `hole` is known to be damaged.
    pub(crate) fn is_hole(&self, hole: &Hole) -> bool {
        let holes = self.holes.read();
        let mut holes = holes.iter();
        holes.any(|known| known.from <= hole.from && hole.to <= known.to)
    }

    /// The last known position, `position` or before, where a frame begins.
    pub(crate) fn border_before(&self, position: Position) -> Position {
        let borders = self.borders.lock();
        let count = borders.partition_point(|border| *border <= position);
        let last = count.checked_sub(1).and_then(|last| borders.get(last));
        last.copied().unwrap_or_else(|| self.first())
    }

    /// Notes that a frame begins at `position`, and that its bytes are flushed. Returns whether this is far enough
    /// behind the last known one to be remembered.
    pub(crate) fn note_border(&self, position: Position) -> bool {
        let mut borders = self.borders.lock();
        let last = borders.last().copied().unwrap_or_else(|| self.first());
        let is_far = position >= last.advance(BORDER_BYTES);
        if is_far {
            borders.push(position);
        }
        is_far
    }

    /// Notes damage; merges holes that overlap or touch.
    pub(crate) fn add_hole(&self, hole: Hole) {
        let mut holes = self.holes.write();
        holes.push(hole);
        holes.sort_unstable_by_key(|hole| hole.from);
        let mut merged: Vec<Hole> = Vec::with_capacity(holes.len());
        for hole in holes.drain(..) {
            match merged.last_mut() {
                Some(last) if hole.from <= last.to => last.to = last.to.max(hole.to),
                _ => merged.push(hole),
            }
        }
        *holes = merged;
    }
}
