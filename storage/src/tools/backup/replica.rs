//! Makes a store of a replica: of its files, and of the parts of the journal behind them.
//!
//! ```text
//!   files of a manifest                    parts, in order
//!   ┌ runs ┐┌ sealed segments ┐            ┌ life block, groups ┬ groups ┐┌ life block, groups ┐
//!   everything below its position          the newest segments, up to the replicated position
//! ```
//!
//! The parts become the end of the journal, byte for byte. A start then finds the end of a process that was killed.

use std::collections::HashSet;
use std::sync::Arc;

use super::restore::{begin, finish, flush_names, refuse_if_used};
use super::view::leap_beyond;
use super::{BackupView, Restored};
use crate::api::config::StorageConfig;
use crate::api::error::RestoreError;
use crate::api::replica::{JournalPart, MAX_REPLICA_LAG};
use crate::base::bounds::{LARGEST_SEGMENT, LIFE_BYTES};
use crate::base::ids::{Position, RecoveryEpoch, SegmentId};
use crate::disk::directory;
use crate::disk::directory::{BEGUN, DIRECTORIES, FORMAT, LastBegun};
use crate::disk::{Disk, DiskFile};
use crate::format::frame;
use crate::format::frame::FrameKind;
use crate::format::life::{Life, journal_path};

/// Positions that the next owner skips at least. The last owner may have assigned them to lost records. The
/// segment that it had begun then is not missed.
const BEYOND: u64 = LARGEST_SEGMENT + MAX_REPLICA_LAG;

/// Relation of a restored store to the replicated one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RestoredAs {
    /// A copy, beside the store: it skips many epochs and positions, so that both stay apart.
    Copy,
    /// The store itself: its last owner is fenced and writes no more.
    Store,
}

/// The content of a replica.
pub struct ReplicaContent<'a> {
    /// Identity of the store.
    pub store_id: u128,
    /// The files of the newest manifest, if there is one.
    pub files: Option<&'a BackupView>,
    /// Parts of the journal, in order. Parts that the files hold are skipped.
    pub parts: &'a mut dyn Iterator<Item = Result<JournalPart, RestoreError>>,
}

/// The segment that parts are written to.
struct PartWriter {
    life: Life,
    base: Position,
    file: Arc<dyn DiskFile>,
    end: Position,
    epoch: RecoveryEpoch,
}

/// Files and bytes written so far.
#[derive(Default)]
struct Done {
    position: Position,
    files: u64,
    bytes: u64,
}

/// The end of the journal so far.
#[derive(Clone, Copy)]
struct JournalEnd {
    segment: SegmentId,
    position: Position,
}

impl ReplicaContent<'_> {
    /// Makes a store of the replica in an empty directory. `progress` receives the number of bytes read from files
    /// since its last call.
    ///
    /// # Errors
    /// If the directory is not empty or in use, if a file does not match the manifest, if a part is missing between
    /// others, or if the file system fails. In these cases no start accepts the directory as a store.
    pub fn restore(
        mut self,
        target: &Arc<dyn Disk>,
        config: &StorageConfig,
        restored_as: RestoredAs,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Restored, RestoreError> {
        refuse_if_used(&**target)?;
        let lock = begin(&**target)?;
        let mut done = Done::default();
        let mut end = None;
        if let Some(files) = self.files {
            for (path, shown) in &files.files {
                if path == FORMAT || path == BEGUN {
                    continue;
                }
                done.bytes += files.copy(path, shown, &**target, progress)?;
                done.files += 1;
            }
            done.position = files.position();
            end = Some(JournalEnd {
                segment: files.last_segment(),
                position: files.position(),
            });
        }
        let epoch = self.write_parts(&**target, &mut end, &mut done)?;
        flush_names(&**target, &DIRECTORIES)?;
        let begun = match (restored_as, self.files, end) {
            (RestoredAs::Copy, Some(files), _) => files.made(BEGUN),
            (RestoredAs::Copy, None, Some(end)) => {
                let text = leap_beyond(&**target, epoch, end.segment, end.position)
                    .map_err(failed("drawing where the copy goes on", &**target))?;
                Some(text.into())
            }
            (RestoredAs::Store, _, Some(end)) => {
                let begun = LastBegun {
                    epoch,
                    segment: end.segment,
                    base: end.position.advance(BEYOND),
                };
                Some(begun.encode().into())
            }
            (_, None, None) | (RestoredAs::Store, Some(_), None) => None,
        };
        if let Some(text) = begun {
            super::write(&**target, BEGUN, &text).map_err(failed("writing BEGUN", &**target))?;
        }
        // A directory without FORMAT is no store: this file comes last.
        match self
            .files
            .and_then(|files| files.files.get_key_value(FORMAT).map(|of| (files, of)))
        {
            Some((files, (path, shown))) => {
                done.bytes += files.copy(path, shown, &**target, progress)?;
            }
            None => directory::write_format(&**target, self.store_id, config.largest_body())?,
        }
        done.files += 1;
        flush_names(&**target, &[""])?;
        let report = finish(target, config)?;
        drop(lock);
        Ok(Restored {
            position: done.position,
            files: done.files,
            bytes: done.bytes,
            report,
        })
    }

    /// Writes the parts behind the files. Returns the newest recovery epoch in them.
    fn write_parts(
        &mut self,
        target: &dyn Disk,
        end: &mut Option<JournalEnd>,
        done: &mut Done,
    ) -> Result<RecoveryEpoch, RestoreError> {
        let mut open: Option<PartWriter> = None;
        let mut epoch = RecoveryEpoch::FIRST;
        let mut seen = HashSet::new();
        for part in &mut *self.parts {
            let part = part?;
            // The files hold everything below their position. Their last segment may not have been finished then, and
            // the parts hold all of it.
            let begins = is_life(&part);
            let in_files = part.position < done.position && open.is_none();
            let replaces = begins && self.files.map(BackupView::last_segment) == Some(part.segment);
            if in_files && !replaces {
                continue;
            }
            let goes_on = open
                .as_ref()
                .is_some_and(|open| open.life.id == part.segment);
            if !goes_on {
                if let Some(left) = open.take() {
                    *end = Some(left.finish(target)?);
                    done.files += 1;
                }
                if !seen.insert(part.segment) {
                    return Err(hole(part.segment, "its parts are not in order"));
                }
                let before = end.filter(|_| !replaces);
                let begun = PartWriter::begin(target, &part, self.store_id, before)?;
                epoch = epoch.max(begun.epoch);
                open = Some(begun);
            }
            if let Some(open) = &mut open {
                open.write(target, &part)?;
                done.bytes += part.bytes.len() as u64;
            }
        }
        if let Some(left) = open {
            *end = Some(left.finish(target)?);
            done.files += 1;
        }
        let Some(end) = *end else { return Ok(epoch) };
        if end.position < done.position {
            return Err(hole(end.segment, "its parts end before its file does"));
        }
        done.position = end.position;
        Ok(epoch)
    }
}

impl PartWriter {
    /// Begins a segment with its first part. Its link must name `before`, the end of the journal so far.
    fn begin(
        target: &dyn Disk,
        part: &JournalPart,
        store_id: u128,
        before: Option<JournalEnd>,
    ) -> Result<Self, RestoreError> {
        let id = part.segment;
        let life_bytes = usize::try_from(LIFE_BYTES).unwrap_or(usize::MAX);
        let head = part.bytes.get(..life_bytes);
        let life = head.and_then(|head| Life::decode(head).ok());
        let life = life.filter(|life| life.id == id && life.store_id == store_id);
        let life =
            life.ok_or_else(|| hole(id, "its first part has no life block of this store"))?;
        let frames = &part.bytes[life_bytes..];
        let link = frame::decode_header(frames, life.salt);
        let link = link.filter(|link| link.kind == FrameKind::Link);
        let link = link.ok_or_else(|| hole(id, "its first part has no link"))?;
        if let Some(before) = before
            && (link.log_id.get(), link.first_lsn.get())
                != (before.segment.get(), before.position.get())
        {
            let (segment, position) = (before.segment, before.position);
            return Err(hole(
                id,
                &format!(
                    "it does not follow from segment {segment}, whose parts end at position {position}"
                ),
            ));
        }
        let path = journal_path(id);
        let file = match target.create(&path) {
            // The file of an unfinished segment is a part of this one.
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => target.open(&path),
            created => created,
        };
        Ok(Self {
            life,
            base: part.position,
            file: file.map_err(failed("writing a segment", target))?,
            end: part.position,
            epoch: RecoveryEpoch::new(u64::from(link.count)),
        })
    }

    fn write(&mut self, target: &dyn Disk, part: &JournalPart) -> Result<(), RestoreError> {
        let end = part.position.advance(part.bytes.len() as u64);
        if part.position != self.end || end.since(self.base) > self.life.size {
            let what = format!(
                "a part begins at position {}, and the part before ends at {}",
                part.position, self.end
            );
            return Err(hole(self.life.id, &what));
        }
        let written = self
            .file
            .write_all_at(&part.bytes, part.position.since(self.base));
        written.map_err(failed("writing a segment", target))?;
        self.end = end;
        Ok(())
    }

    /// Makes the segment durable. A short last segment would look like one with lost bytes.
    fn finish(self, target: &dyn Disk) -> Result<JournalEnd, RestoreError> {
        let sized = self.file.set_size(self.life.size);
        let synced = sized.and_then(|()| self.file.sync());
        synced.map_err(failed("writing a segment", target))?;
        Ok(JournalEnd {
            segment: self.life.id,
            position: self.end,
        })
    }
}

/// Whether a part begins with a life block.
fn is_life(part: &JournalPart) -> bool {
    Life::decode(&part.bytes).is_ok_and(|life| life.id == part.segment)
}

fn hole(segment: SegmentId, what: &str) -> RestoreError {
    RestoreError::Damaged {
        path: journal_path(segment),
        what: format!("the replica is incomplete: {what}"),
    }
}

fn failed(action: &str, target: &dyn Disk) -> impl FnOnce(std::io::Error) -> RestoreError {
    RestoreError::io(format!("{action} in {}", target.location()))
}
