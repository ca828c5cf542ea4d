//! Writes the archive for the sorter.

use std::io;
use std::sync::Arc;

use super::{ArchiveName, FileStage, lock_path};
use crate::api::error::OpenError;
use crate::base::ids::{LogId, SegmentId};
use crate::base::sync::Mutex;
use crate::base::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::base::wire;
use crate::disk::{Disk, DiskLock};
use crate::format::life::{ARCHIVED, SORTED_RUN};
use crate::format::pack::{Archived, Piece};
use crate::format::run_head::RunHead;
use crate::journal::run::Run;
use crate::logs::image::Image;
use crate::logs::image::put_images;
use crate::logs::producers::Producers;
use crate::upkeep::sorter::{RunWriter, draw_salt};

/// The archive of one store.
pub(crate) struct Archive {
    disk: Arc<dyn Disk>,
    store_id: u128,
    /// Whether no file is in doubt: the store may still have the records of such a file, too.
    settled: AtomicBool,
    /// Number of files being written: the sorter may begin another one meanwhile.
    writing: AtomicU64,
    /// Bytes written, and number of failures, since the start.
    pub(crate) written: AtomicU64,
    pub(crate) failures: AtomicU64,
    /// Reason of the newest failure.
    failing: Mutex<Option<String>>,
    _lock: Box<dyn DiskLock>,
}

impl Archive {
    /// Opens the archive for this store. While it is open, no other process writes files of this store there.
    pub(crate) fn open(disk: Arc<dyn Disk>, store_id: u128) -> Result<Self, OpenError> {
        let holder = format!(
            "process {} (wald {})",
            std::process::id(),
            env!("CARGO_PKG_VERSION")
        );
        let lock = disk
            .lock(&lock_path(store_id), &holder)
            .map_err(OpenError::io(format!(
                "locking the archive {}",
                disk.location()
            )))?
            .map_err(|holder| OpenError::Locked {
                directory: disk.location().into(),
                holder,
            })?;
        Ok(Self {
            disk,
            store_id,
            settled: AtomicBool::new(false),
            writing: AtomicU64::new(0),
            written: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            failing: Mutex::new(None),
            _lock: lock,
        })
    }

    /// Why nothing can be archived, and therefore nothing is dropped. `None` if the archive works.
    pub(crate) fn failing(&self) -> Option<String> {
        self.failing.lock().clone()
    }

    /// Counts a failure, and adds the archive to its text. [`Self::went_well`] reports its end.
    fn told<T>(&self, result: io::Result<T>) -> io::Result<T> {
        result.map_err(|error| {
            let text = format!("archive {}: {error}", self.disk.location());
            self.failures.fetch_add(1, Ordering::Relaxed);
            self.settled.store(false, Ordering::Relaxed);
            *self.failing.lock() = Some(text.clone());
            io::Error::new(error.kind(), text)
        })
    }

    /// Begins a file for records that a run leaves out. The file is created with the first record.
    pub(crate) fn begin(&self, run: SegmentId, first: SegmentId) -> Archiving<'_> {
        self.writing.fetch_add(1, Ordering::Relaxed);
        Archiving {
            archive: self,
            run,
            first,
            begun: None,
            images: Vec::new(),
            log: None,
            records: 0,
            damaged: 0,
        }
    }

    /// Settles files that a crash or a failure has left in doubt. `runs` are the runs of the store.
    pub(crate) fn settle(&self, runs: &[Arc<Run>]) -> io::Result<()> {
        // While a file is written only segments are sorted. No file in doubt belongs to segments.
        let writing = self.writing.load(Ordering::Relaxed) > 0;
        if writing || self.settled.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.told(self.try_settle(runs))?;
        self.settled.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Notes that a step of the sorter succeeded.
    pub(crate) fn went_well(&self) {
        if self.settled.load(Ordering::Relaxed) {
            *self.failing.lock() = None;
        }
    }

    fn try_settle(&self, runs: &[Arc<Run>]) -> io::Result<()> {
        let mut changed = false;
        for path in self.disk.list("")? {
            let Some((name, stage)) = ArchiveName::parse(&path) else {
                continue;
            };
            if name.store != self.store_id || stage == FileStage::Kept {
                continue;
            }
            let stands = |run: &&Arc<Run>| {
                run.head.first <= name.first && name.first <= run.head.last && run.id() >= name.run
            };
            match stage == FileStage::Pending && runs.iter().any(|run| stands(&run)) {
                true => self.disk.rename(&path, &name.path(FileStage::Kept))?,
                // The store has all its records.
                false => self.disk.remove(&path)?,
            }
            changed = true;
        }
        match changed {
            true => self.disk.sync_directory(""),
            false => Ok(()),
        }
    }

    /// Keeps the file after its run was published: the store no longer has the records in it.
    pub(crate) fn keep(&self, pending: UnpublishedFile) {
        let name = pending.0;
        let kept = self
            .disk
            .rename(&name.path(FileStage::Pending), &name.path(FileStage::Kept))
            .and_then(|()| self.disk.sync_directory(""));
        if let Err(error) = self.told(kept) {
            tracing::warn!(%error, "a file of the archive is not settled; it is tried again");
        }
    }

    /// Removes the file of a run that was not published: the store has its records.
    pub(crate) fn forget(&self, pending: UnpublishedFile) {
        let gone = self
            .disk
            .remove(&pending.0.path(FileStage::Pending))
            .and_then(|()| self.disk.sync_directory(""));
        if gone.is_err() {
            self.settled.store(false, Ordering::Relaxed);
        }
    }
}

/// A complete file of a run that is not published yet.
#[must_use]
pub(crate) struct UnpublishedFile(ArchiveName);

/// A file that is being written.
pub(crate) struct Archiving<'a> {
    archive: &'a Archive,
    run: SegmentId,
    first: SegmentId,
    begun: Option<(ArchiveName, RunWriter)>,
    /// States of its logs, encoded for frames of images.
    images: Vec<u8>,
    /// The archived records of the current log.
    log: Option<Archived>,
    records: u64,
    /// Number of records that were damaged and could not be archived.
    damaged: u64,
}

impl Archiving<'_> {
    /// Takes a batch of a log with its stored bytes, which are verified.
    pub(crate) fn take(&mut self, log: LogId, piece: Piece, body: &[u8]) -> io::Result<()> {
        let taken = self.try_take(log, piece, body);
        self.archive.told(taken)
    }

    fn try_take(&mut self, log: LogId, piece: Piece, body: &[u8]) -> io::Result<()> {
        let archive = self.archive;
        let writer = match &mut self.begun {
            Some((_, writer)) => writer,
            None => {
                let name = ArchiveName {
                    store: archive.store_id,
                    first: self.first,
                    run: self.run,
                    salt: draw_salt(&*archive.disk)?,
                };
                let path = name.path(FileStage::New);
                let about = (self.run, archive.store_id, name.salt);
                let features = SORTED_RUN | ARCHIVED;
                let writer = RunWriter::create_as(&*archive.disk, &path, about, features)?;
                &mut self.begun.insert((name, writer)).1
            }
        };
        let dropped = match &mut self.log {
            Some(known) => {
                let dropped = piece.first_lsn.since(known.next);
                known.add(&piece);
                dropped
            }
            None => {
                writer.begin_log(log);
                self.log = Some(Archived::of(&piece));
                0
            }
        };
        self.records += u64::from(piece.count);
        writer.add(piece, body, dropped)
    }

    /// Notes a damaged expired batch. No copy of it is left.
    pub(crate) fn miss(&mut self, piece: u32) {
        self.damaged += u64::from(piece);
    }

    /// Ends a log with its state at the end of the run.
    pub(crate) fn end_log(&mut self, image: &Image) -> io::Result<()> {
        let (Some(archived), Some((_, writer))) = (self.log.take(), &mut self.begun) else {
            return Ok(());
        };
        self.archive.told(writer.end_log())?;
        let mut image = image.clone();
        if let Some(extras) = &mut image.extras {
            // A restored log has no producers.
            extras.producers = Producers::default();
        }
        let mut encoded = Vec::new();
        image.encode(&mut encoded);
        put_images(&mut self.images, &encoded, archived.first, Some(&archived));
        Ok(())
    }

    /// Bytes written since the last call.
    pub(crate) fn take_written(&mut self) -> u64 {
        self.begun
            .as_mut()
            .map_or(0, |(_, writer)| writer.take_written())
    }

    /// Ends the file and flushes it. `None` if nothing was taken.
    pub(crate) fn finish(mut self, head: RunHead) -> io::Result<Option<UnpublishedFile>> {
        if self.damaged > 0 {
            tracing::error!(
                records = self.damaged,
                "records that retention took are damaged; they are not in the archive"
            );
        }
        let Some((name, writer)) = self.begun.take() else {
            return Ok(None);
        };
        let archive = self.archive;
        let pending = name.path(FileStage::Pending);
        let mut rest = self.images.as_slice();
        let images = |out: &mut Vec<u8>| {
            let before = rest;
            let more = !before.is_empty() && wire::take_field(&mut rest).is_some();
            out.extend_from_slice(&before[..before.len() - rest.len()]);
            more
        };
        let finished = writer.finish(head, images).and_then(|(life, ..)| {
            archive.disk.rename(&name.path(FileStage::New), &pending)?;
            archive.disk.sync_directory("")?;
            Ok(life.size)
        });
        match finished {
            Ok(bytes) => {
                archive.written.fetch_add(bytes, Ordering::Relaxed);
                tracing::info!(
                    records = self.records,
                    bytes,
                    file = name.path(FileStage::Kept),
                    "archived what retention took"
                );
                Ok(Some(UnpublishedFile(name)))
            }
            Err(error) => {
                // Only one of them exists. A remaining file is removed before the next try.
                let _gone = archive.disk.remove(&name.path(FileStage::New));
                let _gone = archive.disk.remove(&pending);
                archive.told(Err(error))
            }
        }
    }
}

impl Drop for Archiving<'_> {
    /// Removes an unfinished file. If that fails, the file is removed before the next try.
    fn drop(&mut self) {
        self.archive.writing.fetch_sub(1, Ordering::Relaxed);
        if let Some((name, writer)) = self.begun.take() {
            drop(writer);
            if self
                .archive
                .disk
                .remove(&name.path(FileStage::New))
                .is_err()
            {
                self.archive.settled.store(false, Ordering::Relaxed);
            }
        }
    }
}
