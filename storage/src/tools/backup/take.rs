//! Takes a backup: lists the files, computes their digests, and sends their content, step by step.

use std::collections::HashSet;
use std::io;
use std::sync::Arc;

use bytes::Bytes;

use super::frames::FrameCheck;
use crate::api::content::{ContentDigest, ContentHasher};
use crate::api::engine::{Backup, BackupDamage, BackupFile, BackupManifest, BackupPart, BoxFuture};
use crate::api::error::{BackupError, SyncError};
use crate::api::record::Durability;
use crate::base::bounds::LIFE_BYTES;
use crate::base::ids::Position;
use crate::base::threads::Workers;
use crate::disk::directory;
use crate::disk::held_files::AT_A_TIME;
use crate::disk::held_files::{KnownFile, Pin, PinPurpose};
use crate::disk::{Disk, DiskFile, read_again, read_some};
use crate::format::address;
use crate::format::frame::Crc;
use crate::format::life::journal_path;
use crate::index::checkpoint;
use crate::index::index_path;
use crate::index::run_file;
use crate::journal::inbox::Inbox;
use crate::journal::segment::Segment;
use crate::read::store::Store;
use crate::recovery::damage_in;
use crate::tools::backup::STEP;
use crate::upkeep::indexer::Indexer;
use crate::upkeep::indexer::Wanted;

/// One file to save.
struct BackupSource {
    /// Its name in the backup.
    path: String,
    kind: SourceKind,
    /// Whether reads bypass the page cache: bytes in it were wrong.
    again: bool,
}

enum SourceKind {
    /// A segment, up to this position.
    Segment(Arc<Segment>, Position),
    /// An index. A damaged index is left out.
    Index,
    /// A checkpoint. It is held open, since another may replace it. A damaged one is left out.
    Checkpoint(Arc<dyn DiskFile>),
    Format,
}

/// A file that is being read.
struct Reading {
    file: Arc<dyn DiskFile>,
    /// If its reads bypass the page cache: the disk, and the path on it.
    device: Option<(Arc<dyn Disk>, String)>,
    bytes: u64,
    offset: u64,
    digest: ContentHasher,
    check: ContentCheck,
}

/// Method of verifying the content.
enum ContentCheck {
    Frames(FrameCheck),
    /// The last four bytes are a checksum of all bytes before.
    Crc(Crc),
    Nothing,
}

/// The current phase.
enum TakeStage {
    Digesting,
    Sending,
}

/// A backup in progress.
struct BackupTake {
    store: Arc<Store>,
    pin: Pin,
    known: HashSet<ContentDigest>,
    /// The manifest of the files that the replica has.
    earlier: Option<Arc<BackupManifest>>,
    manifest: Arc<BackupManifest>,
    /// While digesting: all files. Afterwards: the files of the manifest, in its order.
    sources: Vec<BackupSource>,
    kept: Vec<bool>,
    /// Segments whose saved content is undamaged.
    whole: Vec<Arc<Segment>>,
    stage: TakeStage,
    /// Index of the current file.
    at: usize,
    reading: Option<Reading>,
}

/// Begins a backup.
///
/// # Errors
/// If the maximum number of backups runs, or the journal has failed.
pub(crate) async fn begin(
    store: &Arc<Store>,
    inbox: &Inbox,
    indexer: &Arc<Indexer>,
    workers: &Arc<Workers>,
    known: HashSet<ContentDigest>,
) -> Result<Box<dyn Backup>, BackupError> {
    let pin = pin(store, PinPurpose::Backup)?;
    let failed = |error| match error {
        SyncError::JournalFailed(error) => Err(BackupError::JournalFailed(error)),
        // Buffered records that cannot be written now are not in the backup.
        SyncError::Refused(_) | SyncError::LogNotFound { .. } => Ok(()),
    };
    // If there is no space for another segment, the content of the current one is saved as it is.
    let mut unfinished = false;
    if let Err(error) = inbox.leave_segment().await {
        failed(error)?;
        unfinished = true;
        if let Err(error) = inbox.barrier(Durability::Durable).await {
            failed(error)?;
        }
    }
    let take = move |store, indexer: &Indexer| {
        BackupTake::new(store, indexer, pin, (known, None), unfinished)
    };
    begun(store, indexer, workers, take).await
}

/// Begins a backup of the finished files as they are. It needs no other backup to end, and leaves no segment. Segments that
/// have rotted keep their content in the manifest `earlier`.
///
/// # Errors
/// If the journal has failed.
pub(crate) async fn begin_finished(
    store: &Arc<Store>,
    indexer: &Arc<Indexer>,
    workers: &Arc<Workers>,
    known: HashSet<ContentDigest>,
    earlier: Option<Arc<BackupManifest>>,
) -> Result<Box<dyn Backup>, BackupError> {
    let pin = pin(store, PinPurpose::Replica)?;
    let take = move |store, indexer: &Indexer| {
        BackupTake::new(store, indexer, pin, (known, earlier), false)
    };
    begun(store, indexer, workers, take).await
}

fn pin(store: &Store, purpose: PinPurpose) -> Result<Pin, BackupError> {
    let pin = store
        .held_files
        .pin(store.journal.clock.monotonic(), purpose);
    pin.ok_or(BackupError::Busy { running: AT_A_TIME })
}

async fn begun(
    store: &Arc<Store>,
    indexer: &Arc<Indexer>,
    workers: &Arc<Workers>,
    take: impl FnOnce(Arc<Store>, &Indexer) -> Result<BackupTake, BackupError> + Send + 'static,
) -> Result<Box<dyn Backup>, BackupError> {
    let (store, indexer) = (Arc::clone(store), Arc::clone(indexer));
    let take = workers.run(move || take(store, &indexer)).await?;
    Ok(Box::new(Taking {
        workers: Arc::clone(workers),
        take: Some(Box::new(take)),
    }))
}

struct Taking {
    workers: Arc<Workers>,
    take: Option<Box<BackupTake>>,
}

impl Backup for Taking {
    fn next(&mut self) -> BoxFuture<'_, Result<Option<BackupPart>, BackupError>> {
        Box::pin(async move {
            let Some(mut take) = self.take.take() else {
                return Ok(None);
            };
            let step = move || {
                let part = take.step();
                (take, part)
            };
            let (take, part) = self.workers.run(step).await;
            if matches!(part, Ok(Some(_))) {
                self.take = Some(take);
            }
            part
        })
    }
}

impl BackupTake {
    fn new(
        store: Arc<Store>,
        indexer: &Indexer,
        pin: Pin,
        (known, earlier): (HashSet<ContentDigest>, Option<Arc<BackupManifest>>),
        unfinished: bool,
    ) -> Result<Self, BackupError> {
        let created = store.journal.clock.now();
        indexer.work(Wanted::ForBackup);
        if let Some(error) = store.journal.failure() {
            return Err(BackupError::JournalFailed(error));
        }
        // The checkpoint may have taken long.
        pin.take(store.journal.clock.monotonic())?;
        let durable = store.journal.durable();
        // Nothing is sorted, indexed or checkpointed meanwhile: the listed files match each other.
        let held = store.indexing.hold();
        let mut sources = vec![BackupSource {
            path: directory::FORMAT.to_owned(),
            kind: SourceKind::Format,
            again: false,
        }];
        let indexes: HashSet<String> = store
            .disk
            .list("index")
            .map_err(failed_at("index"))?
            .into_iter()
            .collect();
        for run in store.journal.runs() {
            let end = run.segment.end.read().unwrap_or(run.segment.base);
            let index = index_path(run.id());
            let name = index.rsplit('/').next().unwrap_or_default();
            let has_index = indexes.contains(name);
            sources.push(BackupSource {
                path: run.segment.path(),
                kind: SourceKind::Segment(Arc::clone(&run.segment), end),
                again: false,
            });
            if has_index {
                sources.push(BackupSource {
                    path: index,
                    kind: SourceKind::Index,
                    again: false,
                });
            }
        }
        let segments: Vec<Arc<Segment>> = store.journal.segments.read().values().cloned().collect();
        let mut last = None;
        for segment in segments {
            let finished = *segment.end.read();
            let end = match finished {
                Some(end) if end <= durable => end,
                _ if unfinished && segment.first() < durable => durable,
                _ => continue,
            };
            last = Some((segment.life.id, end));
            let id = segment.life.id;
            sources.push(BackupSource {
                path: journal_path(id),
                kind: SourceKind::Segment(segment, end),
                again: false,
            });
            let index = index_path(id);
            let name = index.rsplit('/').next().unwrap_or_default();
            if finished.is_some() && indexes.contains(name) {
                sources.push(BackupSource {
                    path: index,
                    kind: SourceKind::Index,
                    again: false,
                });
            }
        }
        let checkpoints = checkpoint::list(&*store.disk).map_err(failed_at("checkpoint"))?;
        let newest = checkpoints
            .into_iter()
            .rev()
            .find(|id| last.is_some_and(|(last, _)| *id <= last));
        if let Some(path) = newest.map(checkpoint::path)
            && let Ok(file) = store.disk.open(&path)
        {
            sources.push(BackupSource {
                path,
                kind: SourceKind::Checkpoint(file),
                again: false,
            });
        }
        let paths = sources.iter().map(|source| source.path.clone());
        let paths: HashSet<String> = paths.collect();
        store.held_files.forget_others(&paths);
        pin.hold(paths);
        drop(held);
        let manifest = BackupManifest {
            store_id: store.store_id,
            recovery_epoch: store.journal.recovery_epoch,
            position: last.map_or(Position::ZERO, |(_, end)| end),
            created,
            files: Vec::with_capacity(sources.len()),
            damage: Vec::new(),
            signed_by: None,
        };
        Ok(Self {
            store,
            pin,
            known,
            earlier,
            manifest: Arc::new(manifest),
            kept: vec![false; sources.len()],
            whole: Vec::new(),
            sources,
            stage: TakeStage::Digesting,
            at: 0,
            reading: None,
        })
    }

    fn step(&mut self) -> Result<Option<BackupPart>, BackupError> {
        self.pin.take(self.store.journal.clock.monotonic())?;
        match self.stage {
            TakeStage::Digesting => self.digest().map(Some),
            TakeStage::Sending => {
                let part = self.send()?;
                if part.is_none() {
                    self.pin.ended(self.store.journal.clock.now());
                }
                Ok(part)
            }
        }
    }

    /// Continues reading for the digests. Digests of content that the caller has may be known.
    fn digest(&mut self) -> Result<BackupPart, BackupError> {
        while let Some(source) = self.sources.get(self.at) {
            let Some(reading) = &mut self.reading else {
                self.begin_digest()?;
                continue;
            };
            let bytes = reading.step().map_err(failed_at(&source.path))?;
            if let Some(bytes) = bytes {
                return Ok(BackupPart::Read(bytes.len() as u64));
            }
            self.end_digest()?;
        }
        self.tell_known_damage();
        let mut kept = self.kept.iter();
        self.sources.retain(|_| kept.next() == Some(&true));
        let to_send = self.sources.iter().zip(&self.manifest.files);
        let to_send = to_send.filter(|(_, file)| !file.known);
        self.pin
            .hold(to_send.map(|(source, _)| source.path.clone()).collect());
        self.stage = TakeStage::Sending;
        self.at = 0;
        Ok(BackupPart::Manifest(Arc::clone(&self.manifest)))
    }

    /// Whether a derived file records damage that the content in this backup does not have: a segment or run in
    /// it rotted after it was saved.
    fn has_rotted_since(&self) -> bool {
        let store = &self.store;
        let rotted = |segment: &Segment| {
            let (from, to) = store.reach_of(segment);
            let damages = store.damages.between(from, to);
            damages.iter().any(|damage| !store.is_carried(damage))
        };
        match (&self.sources[self.at].kind, self.at.checked_sub(1)) {
            (SourceKind::Index, Some(before)) => match &self.sources[before].kind {
                SourceKind::Segment(segment, _) => {
                    let whole = self.whole.iter();
                    let mut whole = whole.filter(|whole| whole.base == segment.base);
                    whole.any(|segment| rotted(segment))
                }
                _ => false,
            },
            (SourceKind::Checkpoint(_), _) => self.whole.iter().any(|segment| rotted(segment)),
            _ => false,
        }
    }

    fn begin_digest(&mut self) -> Result<(), BackupError> {
        if self.has_rotted_since() {
            // A start does not need this file.
            self.at += 1;
            return Ok(());
        }
        let source = &self.sources[self.at];
        match source.open(&self.store) {
            Ok(reading) => {
                // Content to be sent may have rotted since. It is read, so that the manifest is correct.
                // Content that the caller has is unchanged.
                let known = self.store.held_files.digest(&source.path, reading.bytes);
                let known = known.filter(|digest| self.known.contains(digest));
                match known {
                    Some(digest) => {
                        if let SourceKind::Segment(segment, _) = &source.kind {
                            self.whole.push(Arc::clone(segment));
                        }
                        self.keep(reading.bytes, digest);
                    }
                    None => self.reading = Some(reading),
                }
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if let SourceKind::Segment(segment, end) = &source.kind {
                    let (segment, end) = (Arc::clone(segment), *end);
                    if let Some(earlier) = self.earlier(&segment, end, None) {
                        self.keep_earlier(segment, earlier);
                        return Ok(());
                    }
                    let damage = damage_at(&self.store, &segment, segment.first(), end);
                    self.manifest().damage.push(damage);
                }
                self.at += 1;
                Ok(())
            }
            Err(error) => Err(failed_at(&source.path)(error)),
        }
    }

    /// Ends the current file after its last byte was read.
    fn end_digest(&mut self) -> Result<(), BackupError> {
        let Some(reading) = self.reading.take() else {
            return Ok(());
        };
        let source = &self.sources[self.at];
        let digest = reading.digest.digest();
        let bytes = reading.bytes;
        match (&source.kind, &reading.check) {
            (SourceKind::Segment(segment, end), ContentCheck::Frames(frames)) => {
                if frames.is_sound(*end) {
                    let known = KnownFile { bytes, digest };
                    self.store.held_files.remember(&source.path, known);
                    self.whole.push(Arc::clone(segment));
                } else if !source.again {
                    // The memory of that read may be wrong. All of the file is read a second time.
                    self.sources[self.at].again = true;
                    return Ok(());
                } else if let Some(earlier) = self.earlier(segment, *end, Some(digest)) {
                    let segment = Arc::clone(segment);
                    self.keep_earlier(segment, earlier);
                    return Ok(());
                } else {
                    let segment = Arc::clone(segment);
                    let found = match address::is_address(segment.base) {
                        true => run_file::holes_of(&*self.store.disk, &segment),
                        false => damage_in(&*self.store.disk, &segment, *end),
                    };
                    let found = found.map_err(failed_at(&source.path))?;
                    let damages = &self.store.damages;
                    let told = found
                        .iter()
                        .map(|h| damage_at(&self.store, &segment, h.from, h.to));
                    let new = |damage: &BackupDamage| {
                        let to = damage.to.unwrap_or(damage.from);
                        !damages.is_accepted(damage.from, to)
                    };
                    let mut found: Vec<_> = told.filter(new).collect();
                    found.dedup();
                    self.manifest().damage.extend(found);
                }
            }
            (SourceKind::Index, ContentCheck::Crc(crc)) if crc.is_good() => {
                let known = KnownFile { bytes, digest };
                self.store.held_files.remember(&source.path, known);
            }
            (SourceKind::Index | SourceKind::Checkpoint(_), ContentCheck::Crc(crc))
                if !crc.is_good() =>
            {
                // A start does not need this file.
                self.at += 1;
                return Ok(());
            }
            _ => {}
        }
        self.keep(bytes, digest);
        Ok(())
    }

    /// The content that the earlier manifest names for the current file: a segment up to `end` that is missing, or has bad
    /// bytes with the digest `found` now. A finished segment never changes, so that content is good.
    fn earlier(
        &self,
        segment: &Segment,
        end: Position,
        found: Option<ContentDigest>,
    ) -> Option<KnownFile> {
        // The earlier manifest may itself have damage here.
        let earlier = self.earlier.as_ref()?;
        if !earlier.damage.is_empty() {
            return None;
        }
        // An accepted loss stays: logs may have gone on without these records.
        let (from, to) = self.store.reach_of(segment);
        let damages = self.store.damages.between(from, to);
        if damages.iter().any(|damage| damage.accepted) {
            return None;
        }
        let path = &self.sources[self.at].path;
        let bytes = match address::is_address(segment.base) {
            true => segment.life.size,
            false => segment.offset(end),
        };
        let mut files = earlier.files.iter();
        let file = files.find(|file| file.path == *path && file.bytes == bytes)?;
        let digest = file.digest;
        let is_good = Some(digest) != found && self.known.contains(&digest);
        is_good.then_some(KnownFile { bytes, digest })
    }

    /// Adds a segment to the manifest, with content that the replica has and this disk has lost.
    fn keep_earlier(&mut self, segment: Arc<Segment>, earlier: KnownFile) {
        let path = &self.sources[self.at].path;
        tracing::error!(path, "this file is damaged; the replica keeps its content");
        // Later manifests keep it, too, and the file is not read again for them.
        self.store.held_files.remember(path, earlier);
        self.whole.push(segment);
        self.keep(earlier.bytes, earlier.digest);
    }

    fn manifest(&mut self) -> &mut BackupManifest {
        Arc::make_mut(&mut self.manifest)
    }

    /// Adds the current file to the manifest.
    fn keep(&mut self, bytes: u64, digest: ContentDigest) {
        let known = self.known.contains(&digest);
        let path = self.sources[self.at].path.clone();
        self.kept[self.at] = true;
        self.at += 1;
        self.manifest().files.push(BackupFile {
            path,
            bytes,
            digest,
            known,
        });
    }

    /// Adds damage that a start or a read found before, with its records. It leaves out accepted losses, and
    /// damage of files that the backup holds undamaged, since they were saved before they rotted.
    fn tell_known_damage(&mut self) {
        let end = self.manifest.position;
        let mut known = self.store.damages.between(Position::ZERO, end);
        known.retain(|damage| {
            let journal = &self.store.journal;
            let is_at = |segment: &Arc<Segment>| match address::is_address(segment.base) {
                // A run without bad bytes may record that it lacks these records.
                true => {
                    let run = journal.run_at(damage.position);
                    let at = run.is_some_and(|run| run.id() == segment.life.id);
                    at && !self.store.is_carried(damage)
                }
                false => segment.has_hole_at(damage.position),
            };
            let missed = damage.missed_from().is_some();
            missed && !damage.accepted && !self.whole.iter().any(is_at)
        });
        let journal = Arc::clone(&self.store.journal);
        let damage = known.into_iter().map(|damage| BackupDamage {
            segment: match journal.run_at(damage.position) {
                // Numbers of runs are beyond the numbers of all segments: this is the last segment of the run.
                Some(run) => Some(run.head.last),
                None => journal.segment_at(damage.position).map(|s| s.life.id),
            },
            from: damage.position,
            to: None,
            records: damage
                .log
                .map(|log| (log.name.clone(), damage.from, damage.to)),
        });
        let damage: Vec<_> = damage.collect();
        self.manifest().damage.extend(damage);
    }

    /// The next piece of content.
    fn send(&mut self) -> Result<Option<BackupPart>, BackupError> {
        while let Some(source) = self.sources.get(self.at) {
            let file = &self.manifest.files[self.at];
            if file.known {
                self.at += 1;
                continue;
            }
            let reading = match &mut self.reading {
                Some(reading) => reading,
                None => {
                    let mut opened = source.open(&self.store).map_err(failed_at(&source.path))?;
                    // The content was verified. The sent bytes are compared with the digest.
                    opened.check = ContentCheck::Nothing;
                    opened.bytes = opened.bytes.min(file.bytes);
                    self.reading.insert(opened)
                }
            };
            let offset = reading.offset;
            if let Some(data) = reading.step().map_err(failed_at(&source.path))? {
                let file = self.at;
                return Ok(Some(BackupPart::Chunk { file, offset, data }));
            }
            let same = reading.bytes == file.bytes && reading.digest.digest() == file.digest;
            if !same {
                self.store.held_files.forget(&source.path);
                return Err(BackupError::Changed {
                    path: source.path.clone(),
                });
            }
            self.reading = None;
            self.pin.let_go(&source.path);
            self.at += 1;
        }
        Ok(None)
    }
}

impl BackupSource {
    /// Opens the file, to be read from its start.
    fn open(&self, store: &Store) -> io::Result<Reading> {
        let (file, most, check) = match &self.kind {
            SourceKind::Segment(segment, end) => {
                let check = FrameCheck::new(segment.life, segment.base, *end);
                let file = store.disk.open(&segment.path())?;
                let most = match address::is_address(segment.base) {
                    // The whole file: its last bytes give the offset of its last frame.
                    true => segment.life.size,
                    false => segment.offset(*end),
                };
                (file, most, ContentCheck::Frames(check))
            }
            SourceKind::Index => (
                store.disk.open(&self.path)?,
                u64::MAX,
                ContentCheck::Crc(Crc::default()),
            ),
            SourceKind::Checkpoint(file) => (
                Arc::clone(file),
                u64::MAX,
                ContentCheck::Crc(Crc::default()),
            ),
            SourceKind::Format => (
                store.disk.open(&self.path)?,
                u64::MAX,
                ContentCheck::Nothing,
            ),
        };
        let bytes = file.size()?.min(most);
        let device = match &self.kind {
            SourceKind::Segment(segment, _) if self.again => {
                Some((Arc::clone(&store.disk), segment.path()))
            }
            _ => None,
        };
        Ok(Reading {
            file,
            device,
            bytes,
            offset: 0,
            digest: ContentHasher::new(),
            check,
        })
    }
}

impl Reading {
    /// The next bytes; `None` at the end.
    fn step(&mut self) -> io::Result<Option<Bytes>> {
        let left = self.bytes - self.offset;
        if left == 0 {
            return Ok(None);
        }
        let length = left.min(STEP as u64);
        let bytes = match &self.device {
            Some((disk, path)) => read_again(&**disk, path, self.offset, length)?,
            None => read_some(&*self.file, self.offset, length)?.into(),
        };
        if (bytes.len() as u64) < length {
            // The file was longer a moment ago.
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.offset += length;
        self.digest.update(&bytes);
        match &mut self.check {
            ContentCheck::Frames(frames) => frames.feed(&bytes),
            ContentCheck::Crc(crc) => crc.feed(&bytes),
            ContentCheck::Nothing => {}
        }
        Ok(Some(bytes))
    }
}

/// The damage of a file. For a run it covers all its segments: the damaged one is unknown.
fn damage_at(store: &Store, segment: &Segment, from: Position, to: Position) -> BackupDamage {
    let runs = store.journal.runs();
    let run = runs.iter().find(|run| run.segment.base == segment.base);
    let (from, to) = run.map_or((from, to), |run| {
        (run.head.first_base.advance(LIFE_BYTES), run.head.end)
    });
    BackupDamage {
        segment: Some(run.map_or(segment.life.id, |run| run.head.last)),
        from,
        to: Some(to),
        records: None,
    }
}

fn failed_at(path: &str) -> impl FnOnce(io::Error) -> BackupError {
    let path = path.to_owned();
    move |error| BackupError::Io {
        path,
        source: Arc::new(error),
    }
}
