//! Files that running backups need.
//!
//! A file that is removed through [`Backups`] stays until its content was sent to each backup that holds it.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::api::content::ContentDigest;
use crate::api::error::BackupError;
use crate::base::ids::Timestamp;
use crate::disk;
use crate::disk::Disk;
use crate::disk::directory;
use crate::disk::read_whole;

/// Size and digest of a file that does not change.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KnownFile {
    pub(crate) bytes: u64,
    pub(crate) digest: ContentDigest,
}

/// Maximum number of backups that run at a time, beside that of a replica. Each reads the disk and holds files.
pub(crate) const AT_A_TIME: usize = 4;

/// Time after which a backup ends if its caller takes no part of it.
pub(crate) const UNREAD: Duration = Duration::from_secs(300);

/// The running backups, and digests from earlier ones.
pub(crate) struct Backups {
    disk: Arc<dyn Disk>,
    state: Mutex<HeldState>,
    digests: Mutex<HashMap<String, KnownFile>>,
    /// Time at which the last complete backup was sent, also before this start. Whether anybody keeps it is not known here.
    ended: Mutex<Option<Timestamp>>,
}

#[derive(Default)]
pub(crate) struct HeldState {
    /// The backups that run, by number.
    running: HashMap<u64, RunningBackup>,
    /// Number of the last backup that began.
    last: u64,
    /// Files to remove, in this order: once no backup holds them, and again after an error.
    doomed: Vec<String>,
    /// Whether the log names an error of such a removal.
    told: bool,
}

/// One running backup.
pub(crate) struct RunningBackup {
    held: HeldSet,
    /// Time at which its last part was taken.
    taken: Instant,
    purpose: PinPurpose,
}

/// The purpose for which files are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PinPurpose {
    /// A backup that a caller has asked for.
    Backup,
    /// The files of a replica, which has one shipper. Slow backups must not keep it from its work.
    Replica,
}

/// The files that a backup holds.
pub(crate) enum HeldSet {
    /// Every file, while the backup lists them.
    All,
    /// The files that it listed.
    Listed(HashSet<String>),
}

impl HeldSet {
    pub(crate) fn holds(&self, path: &str) -> bool {
        match self {
            Self::All => true,
            Self::Listed(paths) => paths.contains(path),
        }
    }
}

impl HeldState {
    pub(crate) fn holds(&self, path: &str) -> bool {
        self.running.values().any(|backup| backup.held.holds(path))
    }

    /// Removes the doomed files that no backup holds any more.
    pub(crate) fn let_go(&mut self, disk: &dyn Disk) {
        let mut failed = false;
        for path in std::mem::take(&mut self.doomed) {
            if self.holds(&path) {
                self.doomed.push(path);
                continue;
            }
            // These removals are not worth a flush: a crash brings back files that existed a moment ago, and
            // the next start removes them.
            match disk.remove(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    if !std::mem::replace(&mut self.told, true) {
                        tracing::warn!(path, %error, "a file of the store cannot be removed; this is tried again");
                    }
                    failed = true;
                    self.doomed.push(path);
                }
                _ => {}
            }
        }
        self.told &= failed;
    }

    /// Notes a file to be removed later.
    pub(crate) fn doom(&mut self, path: &str) {
        if !self.doomed.iter().any(|doomed| doomed == path) {
            self.doomed.push(path.to_owned());
        }
    }
}

impl Backups {
    pub(crate) fn new(disk: Arc<dyn Disk>) -> Arc<Self> {
        let ended = directory::last_backup(&*disk);
        Arc::new(Self {
            disk,
            state: Mutex::default(),
            digests: Mutex::default(),
            ended: Mutex::new(ended),
        })
    }

    /// Time at which the last complete backup of the store ended; `None` if none is known.
    pub(crate) fn last_ended(&self) -> Option<Timestamp> {
        *self.ended.lock()
    }

    /// Notes the end of a complete backup. If the store cannot keep the time, the store still works: only the
    /// metric loses it with a restart.
    fn note_ended(&self, now: Timestamp) {
        let mut ended = self.ended.lock();
        *ended = Some(now);
        if let Err(error) = directory::write_last_backup(&*self.disk, now) {
            tracing::warn!(%error, "the time of this backup could not be kept; a restart forgets it");
        }
    }

    /// Stops the removal of files. `None` for a backup if [`AT_A_TIME`] others run.
    pub(crate) fn pin(self: &Arc<Self>, now: Instant, purpose: PinPurpose) -> Option<Pin> {
        self.end_unread(now);
        let mut state = self.state.lock();
        let running = state.running.values();
        let backups = running.filter(|running| running.purpose == PinPurpose::Backup);
        if purpose == PinPurpose::Backup && backups.count() >= AT_A_TIME {
            return None;
        }
        state.last += 1;
        let number = state.last;
        let held = HeldSet::All;
        let running = RunningBackup {
            held,
            taken: now,
            purpose,
        };
        state.running.insert(number, running);
        Some(Pin {
            backups: Arc::clone(self),
            number,
            purpose,
        })
    }

    /// Ends the backups whose callers took no part for [`UNREAD`], and removes the files that only
    /// those backups held.
    pub(crate) fn end_unread(&self, now: Instant) {
        let mut state = self.state.lock();
        let before = state.running.len();
        let is_read = |backup: &RunningBackup| now.saturating_duration_since(backup.taken) < UNREAD;
        state.running.retain(|_, backup| is_read(backup));
        if state.running.len() < before {
            tracing::warn!(
                backups = before - state.running.len(),
                seconds = UNREAD.as_secs(),
                "a backup ended because nobody read it; its files are not held any more"
            );
            state.let_go(&*self.disk);
        }
    }

    /// Removes a file of the store: at once, or when the last backup that holds it has ended.
    /// Returns whether a backup holds it.
    ///
    /// # Errors
    /// The error of the file system. [`Backups::remove_left`] repeats the removal.
    pub(crate) fn remove(&self, path: &str) -> io::Result<bool> {
        let mut state = self.state.lock();
        if state.holds(path) {
            state.doom(path);
            return Ok(true);
        }
        match self.disk.remove(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                state.doom(path);
                Err(error)
            }
            removed => removed.map(|()| false),
        }
    }

    /// Tries again to remove files whose removal failed. The next start removes the remaining ones.
    pub(crate) fn remove_left(&self) {
        let mut state = self.state.lock();
        if !state.doomed.is_empty() {
            state.let_go(&*self.disk);
        }
    }

    /// Takes over files that the start could not remove, to remove them later.
    pub(crate) fn take_over(&self, left: &[String]) {
        let mut state = self.state.lock();
        left.iter().for_each(|path| state.doom(path));
    }

    /// Moves a file to another name. A backup that holds the file keeps it under its name until it ends. If an earlier file of
    /// the other name was to be removed, this one is not.
    pub(crate) fn set_aside(&self, path: &str, aside: &str) -> io::Result<()> {
        let mut state = self.state.lock();
        if state.holds(path) {
            let bytes = read_whole(&*self.disk, path)?;
            disk::replace_file(&*self.disk, &format!("{aside}.new"), aside, &[&bytes])?;
            state.doom(path);
        } else {
            self.disk.rename(path, aside)?;
        }
        state.doomed.retain(|doomed| doomed != aside);
        self.forget(aside);
        Ok(())
    }

    /// Moves a new file to its place. If an earlier file of this name was to be removed, the new one is not, and the digest
    /// of the earlier one is forgotten.
    ///
    /// # Errors
    /// The error of the file system.
    pub(crate) fn put(&self, new: &str, path: &str) -> io::Result<()> {
        // A backup that ends meanwhile would remove the new file.
        let mut state = self.state.lock();
        self.disk.rename(new, path)?;
        state.doomed.retain(|doomed| doomed != path);
        self.forget(path);
        Ok(())
    }

    /// Removes several files. Returns whether a backup holds one of them.
    ///
    /// # Errors
    /// The first error of the file system. All other files are removed.
    pub(crate) fn remove_all(&self, paths: &[String]) -> io::Result<bool> {
        let mut result = Ok(false);
        for path in paths {
            match self.remove(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => result = result.and(Err(error)),
                Ok(is_held) => result = result.map(|any| any | is_held),
            }
        }
        result
    }

    /// Runs `work` on these files, unless a backup holds one of them. No backup begins meanwhile. Returns
    /// whether it ran.
    pub(crate) fn unless_held(
        &self,
        paths: &[String],
        work: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<bool> {
        let state = self.state.lock();
        if paths.iter().any(|path| state.holds(path)) {
            return Ok(false);
        }
        work().map(|()| true)
    }

    pub(crate) fn digest(&self, path: &str, bytes: u64) -> Option<ContentDigest> {
        let digests = self.digests.lock();
        let known = digests.get(path).filter(|known| known.bytes == bytes)?;
        Some(known.digest)
    }

    pub(crate) fn remember(&self, path: &str, known: KnownFile) {
        self.digests.lock().insert(path.to_owned(), known);
    }

    /// Forgets the digests of all other files: most of them were removed since earlier backups.
    pub(crate) fn forget_others(&self, paths: &HashSet<String>) {
        let mut digests = self.digests.lock();
        digests.retain(|path, _| paths.contains(path));
        digests.shrink_to_fit();
    }

    /// Number of files whose digest is known.
    #[cfg(test)]
    pub(crate) fn known_digests(&self) -> usize {
        self.digests.lock().len()
    }

    pub(crate) fn forget(&self, path: &str) {
        self.digests.lock().remove(path);
    }
}

/// Keeps files from removal until it is dropped.
pub(crate) struct Pin {
    backups: Arc<Backups>,
    number: u64,
    purpose: PinPurpose,
}

impl Pin {
    /// Notes that everything was sent. The files of a replica are no backup: the owner removes older ones by itself.
    pub(crate) fn ended(&self, now: Timestamp) {
        if self.purpose == PinPurpose::Backup {
            self.backups.note_ended(now);
        }
    }

    /// Notes that a part of the backup is taken now.
    ///
    /// # Errors
    /// If the backup has ended because no reader took a part for [`UNREAD`].
    pub(crate) fn take(&self, now: Instant) -> Result<(), BackupError> {
        self.backups.end_unread(now);
        let mut state = self.backups.state.lock();
        let unread = BackupError::Unread { limit: UNREAD };
        state.running.get_mut(&self.number).ok_or(unread)?.taken = now;
        Ok(())
    }

    /// Limits the backup to these files.
    pub(crate) fn hold(&self, paths: HashSet<String>) {
        let mut state = self.backups.state.lock();
        if let Some(backup) = state.running.get_mut(&self.number) {
            backup.held = HeldSet::Listed(paths);
            state.let_go(&*self.backups.disk);
        }
    }

    /// Releases this file: its content was sent.
    pub(crate) fn let_go(&self, path: &str) {
        let mut state = self.backups.state.lock();
        if let Some(RunningBackup {
            held: HeldSet::Listed(paths),
            ..
        }) = state.running.get_mut(&self.number)
            && paths.remove(path)
        {
            state.let_go(&*self.backups.disk);
        }
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut state = self.backups.state.lock();
        state.running.remove(&self.number);
        state.let_go(&*self.backups.disk);
    }
}
