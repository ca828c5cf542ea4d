//! Makes a store of a replica: of its files, and of the parts of the journal behind them.
//!
//! ```text
//!   files of a manifest                    parts, in order
//!   ┌ runs ┐┌ sealed segments ┐            ┌ life block, groups ┬ groups ┐┌ life block, groups ┐
//!   everything below its position          the newest segments, up to the replicated position
//! ```
//!
//! The parts become the end of the journal, byte for byte. A start then finds the end of a process that was killed. Parts
//! are read before files, because the owner of a busy store removes them within minutes.

use std::collections::HashSet;
use std::sync::Arc;

use super::frames::FrameCheck;
use super::restore::{UNFINISHED, begin_marked, finish, flush_names};
use super::view::{ViewFile, leap_beyond};
use super::{BackupView, Restored};
use crate::api::config::StorageConfig;
use crate::api::content::{ContentDigest, ContentHasher};
use crate::api::error::RestoreError;
use crate::api::replica::{JournalPart, MAX_REPLICA_LAG};
use crate::base::bounds::{LARGEST_SEGMENT, LIFE_BYTES};
use crate::base::ids::{Position, RecoveryEpoch, SegmentId};
use crate::disk::directory;
use crate::disk::directory::{
    BEGUN, DIRECTORIES, FORMAT, KEYS, LOCK, LastBegun, RESTORING, is_own_name,
};
use crate::disk::{Disk, DiskFile};
use crate::format::frame;
use crate::format::frame::FrameKind;
use crate::format::life::{Life, journal_path};

/// Positions that the next owner skips at least. The last owner may have assigned them to lost records. The
/// segment that it had begun then is not missed.
const BEYOND: u64 = LARGEST_SEGMENT + MAX_REPLICA_LAG;

/// The content of `RESTORING` while a node takes the store over.
const UNFINISHED_TAKE_OVER: &[u8] = b"a take-over is not finished\n";

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
    /// The store gets exactly the atomic units that end at or below this position, which the files do not exceed; `None` =
    /// all.
    pub until: Option<Position>,
}

/// The parts of a replica that were read and found whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplicaCheck {
    /// End of the journal.
    pub position: Position,
    /// Number of segments with parts that were read.
    pub segments: u64,
    /// Bytes of these parts.
    pub bytes: u64,
}

/// The segment that parts are written to, or only read.
pub(super) struct PartWriter {
    pub(super) life: Life,
    pub(super) base: Position,
    file: Option<Arc<dyn DiskFile>>,
    pub(super) end: Position,
    epoch: RecoveryEpoch,
    frames: Option<FrameCheck>,
    /// The beginning of the segment whose digest a key has signed.
    signed: Option<SignedBeginning>,
}

/// The first bytes of a segment, which must have a digest.
struct SignedBeginning {
    digest: ContentDigest,
    hasher: ContentHasher,
    /// Bytes that are still to come.
    left: u64,
}

/// The parts that were written.
struct WrittenParts {
    /// The newest recovery epoch in them.
    epoch: RecoveryEpoch,
    segments: HashSet<SegmentId>,
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
pub(super) struct JournalEnd {
    pub(super) segment: SegmentId,
    pub(super) position: Position,
}

impl ReplicaContent<'_> {
    /// Makes a store of the replica in an empty directory. `progress` receives the number of bytes read from files
    /// since its last call.
    ///
    /// # Errors
    /// If the directory is not empty or in use, if a file does not match the manifest, if a part is missing between
    /// others, if the parts do not reach the requested position, or if the file system fails. In these cases no start accepts
    /// the directory as a store. Everything that was written is removed again, if the file system allows it; content of a
    /// store that is taken over is kept for the next attempt.
    pub fn restore(
        self,
        target: &Arc<dyn Disk>,
        config: &StorageConfig,
        restored_as: RestoredAs,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Restored, RestoreError> {
        let nothing = &mut |_: &dyn Disk| Ok(());
        self.restore_with(nothing, target, config, restored_as, progress)
    }

    /// As [`ReplicaContent::restore`]. `keys` writes the key ring into the directory once it is marked as unfinished, and before
    /// it is a store: a directory with the store has its keys, and a take-over that is cut off leaves none behind.
    ///
    /// # Errors
    /// As [`ReplicaContent::restore`]; `Io` also if `keys` fails.
    pub fn restore_with(
        self,
        keys: &mut dyn FnMut(&dyn Disk) -> std::io::Result<()>,
        target: &Arc<dyn Disk>,
        config: &StorageConfig,
        restored_as: RestoredAs,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Restored, RestoreError> {
        let mark = match restored_as {
            RestoredAs::Copy => UNFINISHED,
            RestoredAs::Store => UNFINISHED_TAKE_OVER,
        };
        let lock = begin_marked(&**target, mark)?;
        let files = self.files;
        let restored = keys(&**target)
            .map_err(failed("writing the key ring", &**target))
            .and_then(|()| self.write(target, config, restored_as, progress));
        if restored.is_err() {
            if let (RestoredAs::Store, Some(files)) = (restored_as, files) {
                // Otherwise the next attempt fetches it again.
                let _ = files.give_back(&**target);
            }
            // RESTORING stays until the last file is gone.
            let _ = clear(&**target);
        }
        drop(lock);
        restored
    }

    /// Reads all parts, and verifies their frames and that they follow the files without a hole. Writes nothing.
    ///
    /// # Errors
    /// `Damaged` if a part is missing or does not verify; others as [`ReplicaContent::restore`].
    pub fn check(mut self) -> Result<ReplicaCheck, RestoreError> {
        let mut done = Done::default();
        let mut end = self.end_of_files(&mut done);
        let parts = self.write_parts(None, &mut end, &mut done)?;
        Ok(ReplicaCheck {
            position: done.position,
            segments: parts.segments.len() as u64,
            bytes: done.bytes,
        })
    }

    /// The end of the journal in the files.
    fn end_of_files(&self, done: &mut Done) -> Option<JournalEnd> {
        let files = self.files?;
        done.position = files.position();
        Some(JournalEnd {
            segment: files.last_segment(),
            position: files.position(),
        })
    }

    fn write(
        mut self,
        target: &Arc<dyn Disk>,
        config: &StorageConfig,
        restored_as: RestoredAs,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Restored, RestoreError> {
        let mut done = Done::default();
        let mut end = self.end_of_files(&mut done);
        let parts = self.write_parts(Some(&**target), &mut end, &mut done)?;
        let epoch = parts.epoch;
        // A copy is made in the directory of an operator: its content is compared with the digests.
        let mut place = |files: &BackupView, path: &str, shown: &ViewFile| match restored_as {
            RestoredAs::Store => files.take_or_copy(path, shown, &**target, progress),
            RestoredAs::Copy => files.copy(path, shown, &**target, progress),
        };
        if let Some(files) = self.files {
            let replaced: HashSet<String> = parts.segments.into_iter().map(journal_path).collect();
            for (path, shown) in &files.files {
                if path == FORMAT || path == BEGUN || replaced.contains(path) {
                    continue;
                }
                done.bytes += place(files, path, shown)?;
                done.files += 1;
            }
        }
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
                done.bytes += place(files, path, shown)?;
            }
            None => directory::write_format(&**target, self.store_id, config.largest_body())?,
        }
        done.files += 1;
        flush_names(&**target, &[""])?;
        let report = finish(target, config)?;
        Ok(Restored {
            position: done.position,
            files: done.files,
            bytes: done.bytes,
            report,
        })
    }

    /// Writes the parts behind the files, or only reads them without a target.
    fn write_parts(
        &mut self,
        target: Option<&dyn Disk>,
        end: &mut Option<JournalEnd>,
        done: &mut Done,
    ) -> Result<WrittenParts, RestoreError> {
        let mut open: Option<PartWriter> = None;
        let mut written = WrittenParts {
            epoch: RecoveryEpoch::FIRST,
            segments: HashSet::new(),
        };
        let mut reached = done.position;
        // End of the first unit: the link of its segment.
        let mut first = None;
        for part in &mut *self.parts {
            let part = part?;
            first = first.or_else(|| end_of_link(&part));
            reached = reached.max(part.position.advance(part.bytes.len() as u64));
            if self.until.is_some_and(|until| part.position >= until) {
                break;
            }
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
                    *end = left.finish(target, self.until)?.or(*end);
                    done.files += 1;
                }
                if !written.segments.insert(part.segment) {
                    return Err(hole(part.segment, "its parts are not in order"));
                }
                let before = end.filter(|_| !replaces);
                let file = match target {
                    Some(target) => Some((target, journal_path(part.segment))),
                    None => None,
                };
                let mut begun = PartWriter::begin(file, &part, self.store_id, before, self.until)?;
                if let Some(files) = self.files.filter(|_| replaces) {
                    begun.replace_last_of(files);
                }
                written.epoch = written.epoch.max(begun.epoch);
                open = Some(begun);
            }
            if let Some(open) = &mut open {
                open.write(target, &part)?;
                done.bytes += part.bytes.len() as u64;
            }
        }
        if let Some(left) = open {
            let segment = left.life.id;
            match left.finish(target, self.until)? {
                Some(left) => {
                    *end = Some(left);
                    done.files += 1;
                }
                None => drop(written.segments.remove(&segment)),
            }
        }
        if let Some(asked) = self.until {
            if reached < asked {
                return Err(RestoreError::Beyond {
                    asked,
                    end: reached,
                });
            }
            if end.is_none() {
                return Err(RestoreError::Before {
                    asked,
                    first: first.unwrap_or_default(),
                });
            }
        }
        let Some(end) = *end else { return Ok(written) };
        if end.position < done.position {
            return Err(hole(end.segment, "its parts end before its file does"));
        }
        done.position = end.position;
        Ok(written)
    }
}

impl PartWriter {
    /// Begins a segment with its first part, in a new file of this disk if one is given. Its link must name `before`, the
    /// end of the journal so far.
    pub(super) fn begin(
        target: Option<(&dyn Disk, String)>,
        part: &JournalPart,
        store_id: u128,
        before: Option<JournalEnd>,
        until: Option<Position>,
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
        let file = match target {
            None => None,
            Some((target, path)) => {
                let file = target.create(&path);
                Some(file.map_err(failed("writing a segment", target))?)
            }
        };
        // A restore of everything verifies its frames when all is written, and a copy when it is opened.
        let verifies = until.is_some() || file.is_none();
        let end = until.unwrap_or(Position::new(u64::MAX));
        Ok(Self {
            frames: verifies.then(|| FrameCheck::new(life, part.position, end)),
            life,
            base: part.position,
            file,
            end: part.position,
            epoch: RecoveryEpoch::new(u64::from(link.count)),
            signed: None,
        })
    }

    /// The parts replace the last segment of these files. If a key has signed its digest, they must begin with the signed bytes:
    /// no key signs parts.
    pub(super) fn replace_last_of(&mut self, files: &BackupView) {
        self.signed = files.signed_last().map(|file| SignedBeginning {
            digest: file.digest,
            hasher: file.digest.hasher(),
            left: file.bytes,
        });
    }

    pub(super) fn write(
        &mut self,
        target: Option<&dyn Disk>,
        part: &JournalPart,
    ) -> Result<(), RestoreError> {
        let end = part.position.advance(part.bytes.len() as u64);
        if part.position != self.end || end.since(self.base) > self.life.size {
            let what = format!(
                "a part begins at position {}, and the part before ends at {}",
                part.position, self.end
            );
            return Err(hole(self.life.id, &what));
        }
        if let Some(signed) = &mut self.signed {
            let length = usize::try_from(signed.left).unwrap_or(usize::MAX);
            let length = length.min(part.bytes.len());
            signed.hasher.update(&part.bytes[..length]);
            signed.left -= length as u64;
            if signed.left == 0 && length > 0 && signed.hasher.digest() != signed.digest {
                return Err(RestoreError::Damaged {
                    path: journal_path(self.life.id),
                    what: "rows of the replica differ from the signed file of this segment"
                        .to_owned(),
                });
            }
        }
        if let (Some(file), Some(target)) = (&self.file, target) {
            let written = file.write_all_at(&part.bytes, part.position.since(self.base));
            written.map_err(failed("writing a segment", target))?;
        }
        if let Some(frames) = &mut self.frames {
            frames.feed(&part.bytes);
            if !frames.is_good() {
                let what = format!(
                    "a frame in the part at position {} does not verify",
                    part.position
                );
                return Err(hole(self.life.id, &what));
            }
        }
        self.end = end;
        Ok(())
    }

    /// Makes the segment durable, without the units that end beyond `until`; `None` if no unit is left, and no file. A short
    /// last segment would look like one with lost bytes.
    fn finish(
        self,
        target: Option<&dyn Disk>,
        until: Option<Position>,
    ) -> Result<Option<JournalEnd>, RestoreError> {
        let cut = until.is_some_and(|until| until < self.end);
        let whole = self.frames.as_ref().and_then(FrameCheck::whole);
        let end = match cut {
            true => whole,
            false => Some(self.end),
        };
        if let (Some(file), Some(target)) = (&self.file, target) {
            let kept = end.map(|end| end.since(self.base));
            let finished = match kept {
                Some(kept) => {
                    let cut = file.set_size(kept);
                    let sized = cut.and_then(|()| file.set_size(self.life.size));
                    sized.and_then(|()| file.sync())
                }
                None => target.remove(&journal_path(self.life.id)),
            };
            finished.map_err(failed("writing a segment", target))?;
        }
        Ok(end.map(|position| JournalEnd {
            segment: self.life.id,
            position,
        }))
    }
}

/// Removes the files of a take-over that was cut off, so that the directory is empty for the next one. Changes nothing in
/// any other directory. Returns whether there were such files.
///
/// # Errors
/// `Open` if another process uses the directory; `Io` if the file system fails.
pub fn clear_unfinished_take_over(target: &dyn Disk) -> Result<bool, RestoreError> {
    if !is_unfinished_take_over(target)? {
        return Ok(false);
    }
    let lock = directory::lock(target)?;
    // Another process may have finished it meanwhile.
    let is_unfinished = is_unfinished_take_over(target)?;
    if is_unfinished {
        let action = format!("removing an unfinished take-over in {}", target.location());
        clear(target).map_err(RestoreError::io(action))?;
    }
    drop(lock);
    Ok(is_unfinished)
}

fn is_unfinished_take_over(target: &dyn Disk) -> Result<bool, RestoreError> {
    let io = |action: &str| RestoreError::io(format!("{action} in {}", target.location()));
    let names = target.list("").map_err(io("listing files"))?;
    if !names.iter().any(|name| name == RESTORING) {
        return Ok(false);
    }
    let mut mark = [0; UNFINISHED_TAKE_OVER.len() + 1];
    let read = target
        .open(RESTORING)
        .and_then(|file| file.read_full_at(&mut mark, 0));
    let read = read.map_err(io("reading RESTORING"))?;
    let mark = &mark[..read];
    if mark == UNFINISHED_TAKE_OVER {
        return Ok(true);
    }
    // The mark is flushed before anything else is written: a part of it stands alone.
    let mut others = names
        .iter()
        .filter(|name| ![RESTORING, LOCK].contains(&name.as_str()));
    let mut is_alone = others.next().is_none();
    for directory in DIRECTORIES {
        let files = directory::list(target, directory).map_err(io("listing files"))?;
        is_alone &= files.is_empty();
    }
    Ok(is_alone && UNFINISHED_TAKE_OVER.starts_with(mark))
}

/// Removes all files of an unfinished restore. The mark and the lock come last, so that each moment before is refused.
fn clear(target: &dyn Disk) -> std::io::Result<()> {
    for directory in DIRECTORIES.into_iter().chain([KEYS]) {
        for name in directory::list(target, directory)? {
            target.remove(&format!("{directory}/{name}"))?;
        }
        match target.sync_directory(directory) {
            // The process ended before it made this directory.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            flushed => flushed?,
        }
    }
    let others = directory::list(target, "")?;
    let others = others.iter().map(String::as_str);
    let others = others.filter(|name| ![RESTORING, LOCK].contains(name) && is_own_name(name));
    for name in others.chain([RESTORING, LOCK]) {
        match target.remove(name) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        target.sync_directory("")?;
    }
    Ok(())
}

/// The end of the link with which the part begins its segment.
fn end_of_link(part: &JournalPart) -> Option<Position> {
    let life = Life::decode(&part.bytes).ok()?;
    let frames = part.bytes.get(usize::try_from(LIFE_BYTES).ok()?..)?;
    let link = frame::decode_header(frames, life.salt)?;
    Some(part.position.advance(LIFE_BYTES + link.frame_len()))
}

/// Whether a part begins with a life block.
pub(super) fn is_life(part: &JournalPart) -> bool {
    Life::decode(&part.bytes).is_ok_and(|life| life.id == part.segment)
}

pub(super) fn hole(segment: SegmentId, what: &str) -> RestoreError {
    RestoreError::Damaged {
        path: journal_path(segment),
        what: format!("the replica is incomplete: {what}"),
    }
}

fn failed(action: &str, target: &dyn Disk) -> impl FnOnce(std::io::Error) -> RestoreError {
    RestoreError::io(format!("{action} in {}", target.location()))
}
