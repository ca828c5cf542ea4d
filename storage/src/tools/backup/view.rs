//! A backup shown as the directory that it was, without restoring it, and cut at a position on request. The
//! view is read-only.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;

use super::STEP;
use super::copy::CopyTail;
use super::frames::FrameCheck;
use super::kept::kept_path;
use crate::api::config::StorageConfig;
use crate::api::content::ContentDigest;
use crate::api::engine::{BackupFile, BackupManifest};
use crate::api::error::RestoreError;
use crate::base::bounds;
use crate::base::bounds::LARGEST_SEGMENT;
use crate::base::bounds::LIFE_BYTES;
use crate::base::ids::{Position, RecoveryEpoch, SegmentId};
use crate::disk::directory::{BEGUN, FORMAT, LastBegun, encode_format};
use crate::disk::{Disk, DiskFile, DiskLock, FileSystem, Unreadable};
use crate::format::frame;
use crate::format::life::{Life, id_of, journal_path};
use crate::index::checkpoint;
use crate::journal::run;
use crate::recovery;
use crate::recovery::{RecoveryReport, last_whole_unit};

/// Called with each piece of a file: its bytes, and their offset.
type EachPiece<'a> = dyn FnMut(&[u8], u64) -> Result<(), RestoreError> + 'a;

/// Minimum number of epochs that a restored store skips. The old store may have had unclean starts after the
/// backup, and their epochs must not repeat in the new one.
const EPOCHS_AHEAD: u64 = 1 << 10;
/// Minimum number of positions that a restored store skips behind the backup (a pebibyte): the old store
/// continued to write.
const POSITIONS_AHEAD: u64 = 1 << 50;
/// Skipped positions are a multiple of this.
const POSITIONS_STEP: u64 = 4096;
/// No index, checkpoint or FORMAT is larger, bytes.
const LARGEST_FILE: u64 = 1 << 40;

/// Path of the content with this digest in a backup's directory.
pub fn content_path(digest: ContentDigest) -> String {
    format!("files/{digest}")
}

/// One file of the view.
pub(super) struct ViewFile {
    /// Its entry in the manifest; `None` = no manifest has it.
    pub(super) file: Option<BackupFile>,
    /// Path of its content below the directory of the content; `None` = made here.
    pub(super) at: Option<String>,
    /// Bytes of the stored content.
    pub(super) bytes: u64,
    /// Size of the file in bytes: zeros follow the content.
    pub(super) size: u64,
    pub(super) made: Bytes,
}

impl ViewFile {
    fn made(text: Bytes) -> Self {
        Self {
            file: None,
            at: None,
            bytes: text.len() as u64,
            size: text.len() as u64,
            made: text,
        }
    }
}

/// A backup as a read-only directory.
pub struct BackupView {
    content: Arc<dyn Disk>,
    /// Whether the content may be gone by now.
    is_outdated: AtomicBool,
    pub(super) files: BTreeMap<String, ViewFile>,
    /// The position at which the view ends.
    pub(super) position: Position,
    /// The newest segment.
    last: SegmentId,
    /// Whether a key has signed the digest of the newest segment, and the view shows all of it.
    is_last_signed: bool,
}

/// Result of a verification.
#[derive(Debug, Clone)]
pub struct BackupCheck {
    /// Files of the manifest.
    pub files: u64,
    /// Bytes that were read.
    pub bytes: u64,
    /// Files that do not match their digest, or are missing: path and fault.
    pub bad_files: Vec<(String, String)>,
    /// Findings of a start from the backup.
    pub report: Option<RecoveryReport>,
}

/// A segment, as far as it is known without its frames.
struct SegmentOutline {
    id: SegmentId,
    path: String,
    /// `None` = its beginning is damaged.
    begun: Option<(Life, Position)>,
}

impl BackupView {
    /// Opens a backup: `content` is the directory with its files, as [`content_path`] names them. The manifest
    /// is not trusted: paths and sizes are checked here, content when it is read. With a position, the view has
    /// exactly the atomic units that end at or below it. The position at which a restored store continues is
    /// random, so each opening is for one restore.
    ///
    /// # Errors
    /// If the manifest is malformed, or a file is missing or not of its size. Also if the backup has nothing at
    /// the position or does not reach it.
    pub fn open(
        content: Arc<dyn Disk>,
        manifest: &BackupManifest,
        at: Option<Position>,
    ) -> Result<Self, RestoreError> {
        let mut view = Self {
            content,
            is_outdated: AtomicBool::new(false),
            files: files_of(manifest, content_path)?,
            position: manifest.position,
            last: SegmentId::FIRST,
            is_last_signed: false,
        };
        if !view.files.contains_key(FORMAT) {
            return Err(RestoreError::Manifest("it has no FORMAT".to_owned()));
        }
        let mut pieces = view.pieces(manifest.store_id)?;
        if let Some(at) = at {
            view.cut(&mut pieces, at)?;
        }
        let Some(last) = pieces.last() else {
            return Err(RestoreError::Manifest("it has no segment".to_owned()));
        };
        view.last = last.id;
        // The rows may be whole where the file is damaged.
        let is_damaged = (manifest.damage.iter()).any(|damage| damage.segment == Some(last.id));
        view.is_last_signed = manifest.signed_by.is_some() && at.is_none() && !is_damaged;
        // A short last segment would look like one with lost bytes.
        if let Some((life, _)) = last.begun
            && let Some(shown) = view.files.get_mut(&last.path)
        {
            shown.size = life.size.clamp(shown.bytes, LARGEST_SEGMENT);
        }
        // Files that the backup lacked at its end are missing after a restore, too.
        let lost = manifest.damage.iter().filter_map(|damage| damage.segment);
        let lost = lost.max().filter(|_| at.is_none());
        let segment = lost.map_or(last.id, |lost| lost.max(last.id));
        let text = leap_beyond(
            &*view.content,
            manifest.recovery_epoch,
            segment,
            manifest.position,
        )
        .map_err(RestoreError::io("drawing where a restored store goes on"))?;
        let text = Bytes::from(text);
        view.files.insert(BEGUN.to_owned(), ViewFile::made(text));
        Ok(view)
    }

    /// Shows the copy of a store that another node writes: the kept content of a manifest, and the tail behind it, in the
    /// directory `content`. A copy has no BEGUN: nothing goes on in it.
    ///
    /// # Errors
    /// If the manifest is malformed.
    pub fn of_copy(
        content: Arc<dyn Disk>,
        manifest: Option<&BackupManifest>,
        tail: &CopyTail,
        config: &StorageConfig,
    ) -> Result<Self, RestoreError> {
        let position = manifest.map_or(Position::ZERO, |manifest| manifest.position);
        let mut files = match manifest {
            Some(manifest) => files_of(manifest, kept_path)?,
            None => BTreeMap::new(),
        };
        let format = || {
            let text = encode_format(tail.store_id(), config.largest_body());
            ViewFile::made(Bytes::from(text))
        };
        files.entry(FORMAT.to_owned()).or_insert_with(format);
        let newer = tail.segments().filter(|segment| segment.end > position);
        for segment in newer {
            let shown = ViewFile {
                file: None,
                at: Some(segment.at.clone()),
                bytes: segment.end.since(segment.base),
                // A short segment would look like one with lost bytes.
                size: segment.size,
                made: Bytes::new(),
            };
            files.insert(journal_path(segment.id), shown);
        }
        let segments = files
            .keys()
            .filter_map(|path| path.strip_prefix("journal/"));
        let last = segments.filter_map(id_of).max();
        Ok(Self {
            content,
            is_outdated: AtomicBool::new(false),
            last: last.unwrap_or(SegmentId::FIRST),
            position: position.max(tail.end()),
            is_last_signed: false,
            files,
        })
    }

    /// The content may be removed from now on. Readers get an error, and not damage.
    pub fn outdate(&self) {
        self.is_outdated.store(true, Ordering::SeqCst);
    }

    /// The position at which the view ends: the end of the backup, or the end of the last unit at or below the
    /// requested position.
    pub fn position(&self) -> Position {
        self.position
    }

    /// The newest segment.
    pub(super) fn last_segment(&self) -> SegmentId {
        self.last
    }

    /// The newest segment, if a key has signed its digest.
    pub(super) fn signed_last(&self) -> Option<&BackupFile> {
        let shown = self.files.get(&journal_path(self.last));
        shown
            .and_then(|shown| shown.file.as_ref())
            .filter(|_| self.is_last_signed)
    }

    /// The content of a file that the view makes.
    pub(super) fn made(&self, path: &str) -> Option<Bytes> {
        self.files.get(path).map(|shown| shown.made.clone())
    }

    /// Bytes of the content of all its files.
    pub fn bytes(&self) -> u64 {
        let files = self.files.values().filter_map(|shown| shown.file.as_ref());
        files.fold(0, |sum: u64, file| sum.saturating_add(file.bytes))
    }

    /// Reads all files and compares them with their digests, then reads them like a start. `progress` receives
    /// the number of bytes read since its last call.
    ///
    /// # Errors
    /// If the file system fails. Damage is no error: the check reports it.
    pub fn verify(
        self: &Arc<Self>,
        config: &StorageConfig,
        progress: &mut dyn FnMut(u64),
    ) -> Result<BackupCheck, RestoreError> {
        let mut check = BackupCheck {
            files: 0,
            bytes: 0,
            bad_files: Vec::new(),
            report: None,
        };
        for (path, shown) in &self.files {
            let Some(file) = &shown.file else { continue };
            check.files += 1;
            match self.read_content(file, &mut |bytes, _| {
                check.bytes += bytes.len() as u64;
                progress(bytes.len() as u64);
                Ok(())
            }) {
                Ok(()) => {}
                Err(RestoreError::Damaged { what, .. }) => {
                    check.bad_files.push((path.clone(), what));
                }
                Err(error) => return Err(error),
            }
        }
        if check.bad_files.is_empty() {
            let disk = Arc::clone(self) as Arc<dyn Disk>;
            check.report = Some(recovery::inspect(&disk, config)?);
        }
        Ok(check)
    }

    /// Reads all content of a file, a piece at a time with its offset, and compares it with the digest.
    pub(super) fn read_content(
        &self,
        file: &BackupFile,
        each: &mut EachPiece<'_>,
    ) -> Result<(), RestoreError> {
        let damaged = |what: &str| RestoreError::Damaged {
            path: file.path.clone(),
            what: format!("{} {what}", content_path(file.digest)),
        };
        let content = self.open_content(file)?;
        let mut digest = file.digest.hasher();
        let mut buffer = vec![0; STEP];
        let mut offset = 0;
        while offset < file.bytes {
            let most = usize::try_from(file.bytes - offset)
                .unwrap_or(STEP)
                .min(STEP);
            let length =
                content
                    .read_full_at(&mut buffer[..most], offset)
                    .map_err(RestoreError::io(format!(
                        "reading {}",
                        content_path(file.digest)
                    )))?;
            if length < most {
                return Err(damaged("is cut off"));
            }
            digest.update(&buffer[..length]);
            each(&buffer[..length], offset)?;
            offset += length as u64;
        }
        if digest.digest() != file.digest {
            return Err(damaged("does not match its digest"));
        }
        Ok(())
    }

    fn open_content(&self, file: &BackupFile) -> Result<Arc<dyn DiskFile>, RestoreError> {
        let damaged = |what: String| RestoreError::Damaged {
            path: file.path.clone(),
            what,
        };
        let path = content_path(file.digest);
        let content = match self.content.open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(damaged(format!("{path} is missing")));
            }
            opened => opened.map_err(RestoreError::io(format!("opening {path}")))?,
        };
        let size = content
            .size()
            .map_err(RestoreError::io(format!("reading {path}")))?;
        if size != file.bytes {
            return Err(damaged(format!(
                "{path} has {size} bytes instead of {}",
                file.bytes
            )));
        }
        Ok(content)
    }

    /// The segments, in order.
    fn pieces(&self, store_id: u128) -> Result<Vec<SegmentOutline>, RestoreError> {
        let mut pieces = Vec::new();
        for (path, shown) in &self.files {
            let id = path.strip_prefix("journal/").and_then(id_of);
            let (Some(id), Some(file)) = (id, &shown.file) else {
                continue;
            };
            let begun = match self.open_content(file) {
                Ok(content) => begun(&*content, id, store_id)
                    .map_err(RestoreError::io(format!("reading {path}")))?,
                // Copying the file reports the damage, and `check_hidden` does if it would be left out.
                Err(RestoreError::Damaged { .. }) => None,
                Err(error) => return Err(error),
            };
            pieces.push(SegmentOutline {
                id,
                path: path.clone(),
                begun,
            });
        }
        pieces.sort_by_key(|piece| piece.id);
        Ok(pieces)
    }

    /// Hides all units that end beyond `at`.
    fn cut(&mut self, pieces: &mut Vec<SegmentOutline>, at: Position) -> Result<(), RestoreError> {
        if at > self.position {
            return Err(RestoreError::Beyond {
                asked: at,
                end: self.position,
            });
        }
        let first = self.first_end(pieces)?;
        let mut hidden: Vec<SegmentOutline> = Vec::new();
        let mut end = None;
        let mut is_reached = false;
        while let Some(last) = pieces.last() {
            let began = last.begun.filter(|(_, base)| base.advance(LIFE_BYTES) < at);
            if let Some((life, base)) = began
                && let Some(shown) = self.files.get(&last.path)
                && let Some(file) = &shown.file
                && let Some(whole) = self.last_unit(file, &life, base, at)?
            {
                is_reached = at <= base.advance(file.bytes);
                end = Some((whole, whole.since(base)));
                break;
            }
            hidden.extend(pieces.pop());
        }
        if !is_reached {
            self.check_hidden(&hidden)?;
        }
        let hidden: Vec<SegmentId> = hidden.iter().map(|piece| piece.id).collect();
        let (Some((end, length)), Some(last)) = (end, pieces.last()) else {
            return Err(RestoreError::Before { asked: at, first });
        };
        let mut cut = false;
        if let Some(shown) = self.files.get_mut(&last.path) {
            cut = length < shown.bytes;
            shown.bytes = shown.bytes.min(length);
            shown.size = shown.bytes;
        }
        // A cut segment has no index and no checkpoint. Runs lie before all segments, whatever their number is.
        let runs = self.files.keys().filter_map(|path| run_id(path));
        let runs: Vec<SegmentId> = runs.collect();
        let beyond =
            |id: SegmentId| !runs.contains(&id) && (id > last.id || (cut && id == last.id));
        self.files.retain(|path, _| {
            let name = path.rsplit('/').next().unwrap_or_default();
            match path.split('/').next() {
                Some("journal") => id_of(name).is_none_or(|id| !hidden.contains(&id)),
                Some("index") => index_id(name).is_none_or(|id| !beyond(id)),
                Some("checkpoint") => {
                    let id = checkpoint::id_of(name);
                    id.is_none_or(|id| id < last.id || (!cut && id == last.id))
                }
                _ => true,
            }
        });
        self.position = end;
        Ok(())
    }

    /// Compares the oldest of these segments with its digest, and the next ones up to the first whose beginning is good. They
    /// are in descending order, and no older segment reaches the position of the cut. A segment may be left out only if its
    /// place is certain: lost or changed content would otherwise shorten the restore without an error.
    fn check_hidden(&self, hidden: &[SegmentOutline]) -> Result<(), RestoreError> {
        for piece in hidden.iter().rev() {
            if let Some(file) = (self.files.get(&piece.path)).and_then(|shown| shown.file.as_ref())
            {
                self.read_content(file, &mut |_, _| Ok(()))?;
            }
            // Segments behind it lie beyond the position, too.
            if piece.begun.is_some() {
                break;
            }
        }
        Ok(())
    }

    /// End of the first unit of the journal: the link of its first segment.
    fn first_end(&self, pieces: &[SegmentOutline]) -> Result<Position, RestoreError> {
        for piece in pieces {
            let Some((life, base)) = piece.begun else {
                continue;
            };
            let file = self.files.get(&piece.path);
            let Some(file) = file.and_then(|shown| shown.file.as_ref()) else {
                continue;
            };
            let mut head = vec![0; STEP];
            let content = self.open_content(file)?;
            let length = content
                .read_full_at(&mut head, LIFE_BYTES)
                .map_err(RestoreError::io(format!("reading {}", piece.path)))?;
            let link = frame::decode_header(&head[..length], life.salt);
            let bytes = link.map_or(frame::HEADER_BYTES as u64, |link| link.frame_len());
            return Ok(base.advance(LIFE_BYTES + bytes));
        }
        Ok(Position::ZERO)
    }

    /// End of the last unit of a segment that ends at or below `at`.
    fn last_unit(
        &self,
        file: &BackupFile,
        life: &Life,
        base: Position,
        at: Position,
    ) -> Result<Option<Position>, RestoreError> {
        let end = base.advance(file.bytes);
        let mut frames = FrameCheck::new(*life, base, at);
        self.read_content(file, &mut |bytes, _| {
            frames.feed(bytes);
            Ok(())
        })?;
        if frames.is_sound(end) {
            return Ok(frames.whole());
        }
        let content = self.open_content(file)?;
        last_whole_unit((life, base), &*content, end, at)
            .map_err(RestoreError::io(format!("reading {}", file.path)))
    }
}

/// The files of a manifest, each with the path of its content.
///
/// # Errors
/// If the manifest is malformed.
fn files_of(
    manifest: &BackupManifest,
    at: fn(ContentDigest) -> String,
) -> Result<BTreeMap<String, ViewFile>, RestoreError> {
    check_numbers(manifest)?;
    let mut files = BTreeMap::new();
    let mut digests = HashSet::new();
    for file in &manifest.files {
        let shown = ViewFile {
            file: Some(file.clone()),
            at: Some(at(file.digest)),
            bytes: file.bytes,
            size: file.bytes,
            made: Bytes::new(),
        };
        let refused = |what: &str| {
            let (path, bytes) = (&file.path, file.bytes);
            RestoreError::Manifest(format!("the file {path:?} of {bytes} bytes {what}"))
        };
        if !is_of_a_store(file) {
            return Err(refused("is none that a store has"));
        }
        if files.insert(file.path.clone(), shown).is_some() {
            return Err(refused("is there twice"));
        }
        // Each file has an id or a name of its own in its content.
        if !digests.insert(file.digest) {
            return Err(refused("has the same content as another"));
        }
    }
    Ok(files)
}

/// A BEGUN with which a restored store goes on far beyond the store that was saved: `epoch`, its newest segment, and the
/// end of its journal.
pub(super) fn leap_beyond(
    disk: &dyn Disk,
    epoch: RecoveryEpoch,
    segment: SegmentId,
    position: Position,
) -> io::Result<String> {
    let (epochs, positions) = leap(disk)?;
    let begun = LastBegun {
        // The first start adds one epoch.
        epoch: epoch.plus(epochs - 1),
        segment,
        base: position.advance(positions),
    };
    Ok(begun.encode())
}

/// Numbers of epochs and positions that a restored store skips: at least the minimum, less than twice the
/// minimum. They are random, so that two stores made of one backup do not give out the same ones.
fn leap(disk: &dyn Disk) -> io::Result<(u64, u64)> {
    let mut drawn = [[0; 8]; 2];
    for word in &mut drawn {
        disk.draw(word)?;
    }
    let [epochs, positions] = drawn.map(u64::from_le_bytes);
    let positions = positions % POSITIONS_AHEAD / POSITIONS_STEP * POSITIONS_STEP;
    Ok((
        EPOCHS_AHEAD + epochs % EPOCHS_AHEAD,
        POSITIONS_AHEAD + positions,
    ))
}

/// Refuses numbers that no store reaches: later code adds them up.
fn check_numbers(manifest: &BackupManifest) -> Result<(), RestoreError> {
    let beyond = |what: &str, number: u64, most: u64| match number <= most {
        true => Ok(()),
        false => Err(RestoreError::Manifest(format!(
            "{what} {number}, above {most}"
        ))),
    };
    // A restore skips this far, and a start after it also needs numbers.
    let epochs = bounds::EPOCHS - 1 - 2 * EPOCHS_AHEAD;
    beyond("recovery epoch", manifest.recovery_epoch.get(), epochs)?;
    let positions = bounds::POSITIONS - bounds::POSITIONS_LEFT - 2 * POSITIONS_AHEAD;
    beyond("position", manifest.position.get(), positions)?;
    for damage in &manifest.damage {
        let segment = damage.segment.map_or(0, SegmentId::get);
        beyond("damage in segment", segment, bounds::SEGMENTS - 1)?;
    }
    Ok(())
}

/// Life and base of a segment, if its beginning is good.
fn begun(
    content: &dyn DiskFile,
    id: SegmentId,
    store_id: u128,
) -> io::Result<Option<(Life, Position)>> {
    let mut head = vec![0; usize::try_from(LIFE_BYTES).unwrap_or(0)];
    let length = content.read_full_at(&mut head, 0)?;
    let Ok(life) = Life::decode(&head[..length]) else {
        return Ok(None);
    };
    if life.id != id || life.store_id != store_id {
        return Ok(None);
    }
    let base = recovery::base_of(&life, content)?;
    Ok(base.map(|base| (life, base)))
}

/// The id in the path of a run.
fn run_id(path: &str) -> Option<SegmentId> {
    path.strip_prefix("sorted/").and_then(id_of)
}

/// The id in the name of an index file.
fn index_id(name: &str) -> Option<SegmentId> {
    bounds::named(name, ".idx")
}

/// Whether a path is one that the store writes, in the same spelling, and the size is possible for such a file.
fn is_of_a_store(file: &BackupFile) -> bool {
    let own = match file.path.split_once('/') {
        None => file.path == FORMAT,
        Some(("journal", name)) => {
            return file.bytes <= LARGEST_SEGMENT
                && id_of(name).is_some_and(|id| journal_path(id) == file.path);
        }
        Some(("sorted", _)) => {
            return file.bytes <= LARGEST_SEGMENT
                && run_id(&file.path).is_some_and(|id| run::path(id) == file.path);
        }
        Some(("index", name)) => {
            index_id(name).is_some_and(|id| crate::index::index_path(id) == file.path)
        }
        Some(("checkpoint", name)) => {
            checkpoint::id_of(name).is_some_and(|id| checkpoint::path(id) == file.path)
        }
        Some(_) => false,
    };
    own && file.bytes <= LARGEST_FILE
}

/// One open file of a view.
struct OpenContent {
    content: Option<Arc<dyn DiskFile>>,
    made: Bytes,
    bytes: u64,
    size: u64,
}

impl DiskFile for OpenContent {
    fn size(&self) -> io::Result<u64> {
        Ok(self.size)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let most = usize::try_from(self.size.saturating_sub(offset)).unwrap_or(usize::MAX);
        let length = buffer.len().min(most);
        let buffer = &mut buffer[..length];
        let there = usize::try_from(self.bytes.saturating_sub(offset)).unwrap_or(usize::MAX);
        if there == 0 {
            buffer.fill(0);
            return Ok(length);
        }
        let length = length.min(there);
        match &self.content {
            Some(content) => content.read_at(&mut buffer[..length], offset),
            None => {
                let from = usize::try_from(offset).map_err(io::Error::other)?;
                let from = self.made.get(from..).unwrap_or(&[]);
                buffer[..length].copy_from_slice(&from[..length]);
                Ok(length)
            }
        }
    }

    fn note_unreadable(&self, bytes: Range<u64>) {
        if let Some(content) = &self.content {
            content.note_unreadable(bytes);
        }
    }

    fn write_at(&self, _bytes: &[u8], _offset: u64) -> io::Result<usize> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn set_size(&self, _bytes: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

impl Disk for BackupView {
    fn location(&self) -> String {
        self.content.location()
    }

    fn lock(&self, _path: &str, _holder: &str) -> io::Result<Result<Box<dyn DiskLock>, String>> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    /// No process can change the content: it gets its name when it is complete.
    fn lock_shared(&self, _path: &str) -> io::Result<Result<Option<Box<dyn DiskLock>>, String>> {
        Ok(Ok(None))
    }

    fn create_directory(&self, _path: &str) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn visit(&self, directory: &str, each: &mut dyn FnMut(&str)) -> io::Result<()> {
        let names = self.files.keys().filter_map(|path| {
            let (within, name) = path.rsplit_once('/').unwrap_or(("", path));
            (within == directory).then_some(name)
        });
        names.for_each(each);
        Ok(())
    }

    fn create(&self, _path: &str) -> io::Result<Arc<dyn DiskFile>> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn open(&self, path: &str) -> io::Result<Arc<dyn DiskFile>> {
        let shown = self.files.get(path).ok_or(io::ErrorKind::NotFound)?;
        let content = match &shown.at {
            Some(at) => match self.content.open(at) {
                Err(_) if self.is_outdated.load(Ordering::SeqCst) => {
                    return Err(io::ErrorKind::StaleNetworkFileHandle.into());
                }
                opened => Some(opened?),
            },
            None => None,
        };
        Ok(Arc::new(OpenContent {
            content,
            made: shown.made.clone(),
            bytes: shown.bytes,
            size: shown.size,
        }))
    }

    /// Nothing is written here, so the cache can be trusted.
    fn read_direct(&self, _path: &str, _from: u64, _bytes: u64) -> io::Result<Option<Bytes>> {
        Ok(None)
    }

    fn unreadable(&self) -> &Unreadable {
        self.content.unreadable()
    }

    fn rename(&self, _from: &str, _to: &str) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn remove(&self, _path: &str) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn sync_directory(&self, _directory: &str) -> io::Result<()> {
        Ok(())
    }

    fn free_bytes(&self) -> io::Result<Option<u64>> {
        Ok(Some(0))
    }

    fn file_system(&self) -> FileSystem {
        self.content.file_system()
    }
}
