//! The tail of a store that another node writes, in files of a stand-by.
//!
//! ```text
//! rows of the bucket ─▶ CopyTail: standby/tail-<segment> ─┐
//! manifest ─▶ kept content: standby/<digest> ─────────────┴▶ BackupView::of_copy ─▶ readers
//! ```
//!
//! The files need not be durable: a stand-by that begins removes them, and reads the rows again.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use super::replica::{JournalEnd, PartWriter, hole, is_life};
use super::view::BackupView;
use crate::api::error::RestoreError;
use crate::api::replica::JournalPart;
use crate::base::ids::{Position, SegmentId};
use crate::disk::directory::{self, KEPT};
use crate::disk::{Disk, DiskLock};

/// Begin of the name of each file.
pub(super) const TAIL: &str = "tail-";

/// The newest segments of a store, as a stand-by has read them.
pub struct CopyTail {
    /// No other process has the directory.
    _lock: Box<dyn DiskLock>,
    disk: Arc<dyn Disk>,
    store_id: u128,
    segments: BTreeMap<SegmentId, PartWriter>,
}

/// A segment of a tail.
pub(super) struct CopiedSegment {
    pub(super) id: SegmentId,
    /// Path of its file.
    pub(super) at: String,
    pub(super) base: Position,
    pub(super) end: Position,
    /// Bytes of the whole segment.
    pub(super) size: u64,
}

fn path(id: SegmentId) -> String {
    format!("{KEPT}/{TAIL}{id}")
}

impl CopyTail {
    /// An empty tail in this directory. Removes the files of an earlier one.
    ///
    /// # Errors
    /// `Open` if another process uses the directory; others if the file system fails.
    pub fn new(disk: Arc<dyn Disk>, store_id: u128) -> Result<Self, RestoreError> {
        let lock = directory::lock(&*disk)?;
        let io = || RestoreError::io(format!("copying the tail to {}", disk.location()));
        disk.create_directory(KEPT).map_err(io())?;
        for name in directory::list(&*disk, KEPT).map_err(io())? {
            if name.starts_with(TAIL) {
                disk.remove(&format!("{KEPT}/{name}")).map_err(io())?;
            }
        }
        Ok(Self {
            _lock: lock,
            disk,
            store_id,
            segments: BTreeMap::new(),
        })
    }

    pub(super) fn disk(&self) -> &dyn Disk {
        &*self.disk
    }

    /// Takes the next part behind the parts before, or behind `files`, which hold everything below their position. Skips
    /// parts that the files hold.
    ///
    /// # Errors
    /// `Damaged` if a part is missing between others, or is none of this store; the tail must begin again then. Others if the file
    /// system fails.
    pub fn add(
        &mut self,
        part: &JournalPart,
        files: Option<&BackupView>,
    ) -> Result<(), RestoreError> {
        let id = part.segment;
        if let Some(open) = self.segments.get_mut(&id) {
            return open.write(Some(&*self.disk), part);
        }
        let last = self.segments.last_key_value();
        let mut replaced = None;
        let before = match (last, files) {
            (Some((last, _)), _) if *last > id => {
                return Err(hole(id, "its parts are not in order"));
            }
            (Some((last, open)), _) => Some(JournalEnd {
                segment: *last,
                position: open.end,
            }),
            (None, None) => None,
            (None, Some(files)) => {
                // The last segment of the files may not have been finished then. The parts hold all of it.
                let replaces = is_life(part) && files.last_segment() == id;
                if part.position < files.position() && !replaces {
                    return Ok(());
                }
                replaced = Some(files).filter(|_| replaces);
                (!replaces).then(|| JournalEnd {
                    segment: files.last_segment(),
                    position: files.position(),
                })
            }
        };
        let file = Some((&*self.disk, path(id)));
        let mut begun = PartWriter::begin(file, part, self.store_id, before, None)?;
        if let Some(files) = replaced {
            begun.replace_last_of(files);
        }
        begun.write(Some(&*self.disk), part)?;
        self.segments.insert(id, begun);
        Ok(())
    }

    /// Removes the segments that end below a position, since files hold them. Views of the tail must be outdated.
    ///
    /// # Errors
    /// If the file system fails.
    pub fn forget_below(&mut self, position: Position) -> Result<(), RestoreError> {
        let (disk, newest) = (
            Arc::clone(&self.disk),
            self.segments.keys().next_back().copied(),
        );
        let covered: Vec<SegmentId> = (self.segments.iter())
            .filter(|(id, open)| open.end <= position && Some(**id) != newest)
            .map(|(id, _)| *id)
            .collect();
        for id in covered {
            self.segments.remove(&id);
            match disk.remove(&path(id)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    let action = format!("removing {} in {}", path(id), disk.location());
                    return Err(RestoreError::io(action)(error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// End of the newest part; 0 without one.
    pub fn end(&self) -> Position {
        let last = self.segments.values().next_back();
        last.map_or(Position::ZERO, |open| open.end)
    }

    pub(super) fn store_id(&self) -> u128 {
        self.store_id
    }

    pub(super) fn segments(&self) -> impl Iterator<Item = CopiedSegment> {
        self.segments.iter().map(|(id, open)| CopiedSegment {
            id: *id,
            at: path(*id),
            base: open.base,
            end: open.end,
            size: open.life.size,
        })
    }
}
