//! Backups: finished files at one position, with their digests; and stores made of them.
//!
//! ```text
//!  leave the segment ─▶ index it, checkpoint ─▶ digest each file ─▶ manifest ─▶ content
//!  (a roll: commits     (if that is due)        (frames verified    (known files are
//!   go on in the next)                           on the way)         only named)
//! ```
//!
//! Finished segments never change, so a backup needs no copy and stops nobody: it reads
//! the files in place. While it lists files, no file is removed. From then on it holds the
//! files it listed, and every other file is removed as usual. A backup stores the frames of a
//! segment; the zeros behind them are no content.
//!
//! Once the manifest is made, a backup holds the files whose content it still has to send: each
//! is let go when its content was sent. A backup that nobody reads for [`UNREAD`] ends, and holds
//! nothing from then on.
//!
//! A [`BackupView`] shows a manifest and its content as the directory that it was, cut at
//! a position if that is wanted. A store is opened, verified and restored through it.

mod frames;
mod restore;
mod take;
mod view;

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

pub use self::restore::Restored;
pub(crate) use self::restore::refuse_if_used;
pub(crate) use self::take::begin;
pub use self::view::{BackupCheck, BackupView, content_path};
use crate::disk::Disk;
use crate::error::BackupError;

/// Read in one step.
const STEP: usize = 512 << 10;

/// What is known of a file that does not change.
#[derive(Debug, Clone, Copy)]
struct Known {
    bytes: u64,
    digest: u128,
}

/// Maximum number of backups that run at a time. Each reads the disk and holds files.
pub(crate) const AT_A_TIME: usize = 4;

/// Time after which a backup ends if its caller takes no part of it.
pub(crate) const UNREAD: Duration = Duration::from_secs(300);

/// The backups that run, and digests taken by earlier ones.
pub(crate) struct Backups {
    disk: Arc<dyn Disk>,
    state: Mutex<State>,
    digests: Mutex<HashMap<String, Known>>,
}

#[derive(Default)]
struct State {
    /// The backups that run, by number.
    running: HashMap<u64, Running>,
    /// Number of the last backup that began.
    last: u64,
    /// Files to remove, in this order, once no backup holds them.
    doomed: Vec<String>,
}

/// One running backup.
struct Running {
    held: Held,
    /// When the last part of it was taken.
    taken: Instant,
}

/// The files that a backup holds.
enum Held {
    /// Every file, while the backup lists them.
    All,
    /// The files that it listed.
    Listed(HashSet<String>),
}

impl Held {
    fn holds(&self, path: &str) -> bool {
        match self {
            Self::All => true,
            Self::Listed(paths) => paths.contains(path),
        }
    }
}

impl State {
    fn holds(&self, path: &str) -> bool {
        self.running.values().any(|backup| backup.held.holds(path))
    }

    /// Removes the doomed files that no backup holds any more.
    fn let_go(&mut self, disk: &dyn Disk) {
        for path in std::mem::take(&mut self.doomed) {
            if self.holds(&path) {
                self.doomed.push(path);
                continue;
            }
            // The names of what is removed here are not worth a flush: a crash brings back
            // files that were there a moment ago.
            match disk.remove(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(path, %error, "a file kept for a backup could not be removed");
                }
                _ => {}
            }
        }
    }
}

impl Backups {
    pub(crate) fn new(disk: Arc<dyn Disk>) -> Arc<Self> {
        Arc::new(Self {
            disk,
            state: Mutex::default(),
            digests: Mutex::default(),
        })
    }

    /// From now on no file is removed. `None` if [`AT_A_TIME`] backups run.
    fn pin(self: &Arc<Self>, now: Instant) -> Option<Pin> {
        self.end_unread(now);
        let mut state = self.state.lock();
        if state.running.len() >= AT_A_TIME {
            return None;
        }
        state.last += 1;
        let number = state.last;
        let held = Held::All;
        state.running.insert(number, Running { held, taken: now });
        Some(Pin {
            backups: Arc::clone(self),
            number,
        })
    }

    /// Ends the backups whose callers took no part for [`UNREAD`], and removes the files that only
    /// those backups held.
    pub(crate) fn end_unread(&self, now: Instant) {
        let mut state = self.state.lock();
        let before = state.running.len();
        let is_read = |backup: &Running| now.saturating_duration_since(backup.taken) < UNREAD;
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
    pub(crate) fn remove(&self, path: &str) -> io::Result<bool> {
        let mut state = self.state.lock();
        if !state.holds(path) {
            return self.disk.remove(path).map(|()| false);
        }
        if !state.doomed.iter().any(|doomed| doomed == path) {
            state.doomed.push(path.to_owned());
        }
        Ok(true)
    }

    /// Removes several files. Returns whether a backup holds one of them.
    pub(crate) fn remove_all(&self, paths: &[String]) -> io::Result<bool> {
        let mut is_held = false;
        for path in paths {
            match self.remove(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                removed => is_held |= removed?,
            }
        }
        Ok(is_held)
    }

    /// Does something with these files, unless a backup holds one of them. No backup begins
    /// meanwhile. Returns whether it was done.
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

    fn digest(&self, path: &str, bytes: u64) -> Option<u128> {
        let digests = self.digests.lock();
        let known = digests.get(path).filter(|known| known.bytes == bytes)?;
        Some(known.digest)
    }

    fn remember(&self, path: &str, known: Known) {
        self.digests.lock().insert(path.to_owned(), known);
    }

    /// Forgets the digests of all other files: most of them are gone since earlier backups.
    fn forget_others(&self, paths: &HashSet<String>) {
        let mut digests = self.digests.lock();
        digests.retain(|path, _| paths.contains(path));
        digests.shrink_to_fit();
    }

    /// Number of files whose digest is known.
    #[cfg(test)]
    pub(crate) fn known_digests(&self) -> usize {
        self.digests.lock().len()
    }

    fn forget(&self, path: &str) {
        self.digests.lock().remove(path);
    }
}

/// Keeps files from removal until it is dropped.
struct Pin {
    backups: Arc<Backups>,
    number: u64,
}

impl Pin {
    /// Notes that a part of the backup is taken now.
    ///
    /// # Errors
    /// If the backup has ended because nobody read it.
    fn take(&self, now: Instant) -> Result<(), BackupError> {
        self.backups.end_unread(now);
        let mut state = self.backups.state.lock();
        let unread = BackupError::Unread { limit: UNREAD };
        state.running.get_mut(&self.number).ok_or(unread)?.taken = now;
        Ok(())
    }

    /// From now on only these files are kept.
    fn hold(&self, paths: HashSet<String>) {
        let mut state = self.backups.state.lock();
        if let Some(backup) = state.running.get_mut(&self.number) {
            backup.held = Held::Listed(paths);
            state.let_go(&*self.backups.disk);
        }
    }

    /// From now on this file is not kept: its content was sent.
    fn let_go(&self, path: &str) {
        let mut state = self.backups.state.lock();
        if let Some(Running {
            held: Held::Listed(paths),
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
