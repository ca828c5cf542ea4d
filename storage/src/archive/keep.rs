//! The archive as the sorter writes it.

use std::io;
use std::sync::Arc;

use super::{Name, Stage, lock_path};
use crate::disk::{Disk, DiskLock};
use crate::error::OpenError;
use crate::ids::{LogId, SegmentId};
use crate::index::Image;
use crate::journal::segment::{ARCHIVED, SORTED_RUN};
use crate::local::Producers;
use crate::sorted::{Archived, Head, Piece, Run, Writer, draw_salt, put_images};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::wire;

/// Where one store keeps what retention took.
pub(crate) struct Archive {
    disk: Arc<dyn Disk>,
    store_id: u128,
    /// Whether nothing is there of which it is not certain whether the store has it too.
    settled: AtomicBool,
    /// Files being written: the sorter may begin another one meanwhile.
    writing: AtomicU64,
    /// Bytes written, and how often something failed, since the start.
    pub(crate) written: AtomicU64,
    pub(crate) failures: AtomicU64,
    /// Why the newest try failed.
    failing: Mutex<Option<String>>,
    _lock: Box<dyn DiskLock>,
}

impl Archive {
    /// Takes the archive for this store: as long as it is open nobody else writes there in
    /// its name.
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

    /// Why nothing can be archived, and so nothing is dropped, if that is so.
    pub(crate) fn failing(&self) -> Option<String> {
        self.failing.lock().clone()
    }

    /// Counts a failure, and says which archive it is about. [`Self::went_well`] tells of its end.
    fn told<T>(&self, result: io::Result<T>) -> io::Result<T> {
        result.map_err(|error| {
            let text = format!("archive {}: {error}", self.disk.location());
            self.failures.fetch_add(1, Ordering::Relaxed);
            self.settled.store(false, Ordering::Relaxed);
            *self.failing.lock() = Some(text.clone());
            io::Error::new(error.kind(), text)
        })
    }

    /// Begins a file for what a run leaves out. Until there is something, there is none.
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

    /// Makes certain of files that a crash, or a failure, has left in doubt. `runs` are those
    /// of the store.
    pub(crate) fn settle(&self, runs: &[Arc<Run>]) -> io::Result<()> {
        // While a file is written nothing is sorted but segments, which is nothing that a file
        // in doubt can be of.
        let writing = self.writing.load(Ordering::Relaxed) > 0;
        if writing || self.settled.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.told(self.try_settle(runs))?;
        self.settled.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// The sorter has come through a step.
    pub(crate) fn went_well(&self) {
        if self.settled.load(Ordering::Relaxed) {
            *self.failing.lock() = None;
        }
    }

    fn try_settle(&self, runs: &[Arc<Run>]) -> io::Result<()> {
        let mut changed = false;
        for path in self.disk.list("")? {
            let Some((name, stage)) = Name::parse(&path) else {
                continue;
            };
            if name.store != self.store_id || stage == Stage::Kept {
                continue;
            }
            let stands = |run: &&Arc<Run>| {
                run.head.first <= name.first && name.first <= run.head.last && run.id() >= name.run
            };
            match stage == Stage::Pending && runs.iter().any(|run| stands(&run)) {
                true => self.disk.rename(&path, &name.path(Stage::Kept))?,
                // The store has all of it.
                false => self.disk.remove(&path)?,
            }
            changed = true;
        }
        match changed {
            true => self.disk.sync_directory(""),
            false => Ok(()),
        }
    }

    /// The run was published: the store has not got any more what is in the file.
    pub(crate) fn keep(&self, pending: Pending) {
        let name = pending.0;
        let kept = self
            .disk
            .rename(&name.path(Stage::Pending), &name.path(Stage::Kept))
            .and_then(|()| self.disk.sync_directory(""));
        if let Err(error) = self.told(kept) {
            tracing::warn!(%error, "a file of the archive is not settled; it is tried again");
        }
    }

    /// The run was not published: what is in the file is in the store.
    pub(crate) fn forget(&self, pending: Pending) {
        let gone = self
            .disk
            .remove(&pending.0.path(Stage::Pending))
            .and_then(|()| self.disk.sync_directory(""));
        if gone.is_err() {
            self.settled.store(false, Ordering::Relaxed);
        }
    }
}

/// A file that is whole, of a run that is not published yet.
#[must_use]
pub(crate) struct Pending(Name);

/// A file that is being written.
pub(crate) struct Archiving<'a> {
    archive: &'a Archive,
    run: SegmentId,
    first: SegmentId,
    begun: Option<(Name, Writer)>,
    /// How its logs stood, as frames of images hold it.
    images: Vec<u8>,
    /// What is there of the log at hand.
    log: Option<Archived>,
    records: u64,
    /// Records that could not be archived, since they are damaged.
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
                let name = Name {
                    store: archive.store_id,
                    first: self.first,
                    run: self.run,
                    salt: draw_salt(&*archive.disk)?,
                };
                let path = name.path(Stage::New);
                let about = (self.run, archive.store_id, name.salt);
                let features = SORTED_RUN | ARCHIVED;
                let writer = Writer::create_as(&*archive.disk, &path, about, features)?;
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

    /// A batch that retention took does not verify. It cannot be had any more.
    pub(crate) fn miss(&mut self, piece: u32) {
        self.damaged += u64::from(piece);
    }

    /// All of a log is there, which stood so at the end of the run.
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

    /// Bytes written since this was asked last.
    pub(crate) fn take_written(&mut self) -> u64 {
        self.begun
            .as_mut()
            .map_or(0, |(_, writer)| writer.take_written())
    }

    /// Ends the file; it is on the device then. `None` if nothing was taken.
    pub(crate) fn finish(mut self, head: Head) -> io::Result<Option<Pending>> {
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
        let pending = name.path(Stage::Pending);
        let mut rest = self.images.as_slice();
        let images = |out: &mut Vec<u8>| {
            let before = rest;
            let more = !before.is_empty() && wire::take_field(&mut rest).is_some();
            out.extend_from_slice(&before[..before.len() - rest.len()]);
            more
        };
        let finished = writer.finish(head, images).and_then(|(life, ..)| {
            archive.disk.rename(&name.path(Stage::New), &pending)?;
            archive.disk.sync_directory("")?;
            Ok(life.size)
        });
        match finished {
            Ok(bytes) => {
                archive.written.fetch_add(bytes, Ordering::Relaxed);
                tracing::info!(
                    records = self.records,
                    bytes,
                    file = name.path(Stage::Kept),
                    "archived what retention took"
                );
                Ok(Some(Pending(name)))
            }
            Err(error) => {
                // One of them. What stays is removed before the next try.
                let _gone = archive.disk.remove(&name.path(Stage::New));
                let _gone = archive.disk.remove(&pending);
                archive.told(Err(error))
            }
        }
    }
}

impl Drop for Archiving<'_> {
    /// What was begun is of no use. If it stays, it is removed before the next try.
    fn drop(&mut self) {
        self.archive.writing.fetch_sub(1, Ordering::Relaxed);
        if let Some((name, writer)) = self.begun.take() {
            drop(writer);
            if self.archive.disk.remove(&name.path(Stage::New)).is_err() {
                self.archive.settled.store(false, Ordering::Relaxed);
            }
        }
    }
}
