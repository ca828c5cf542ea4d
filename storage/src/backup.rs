//! Backups: finished files at one position, with their digests; and stores made of them.
//!
//! ```text
//!  leave the segment ─▶ index it, checkpoint ─▶ digest each file ─▶ manifest ─▶ content
//!  (a roll: commits     (if that is due)        (frames verified    (known files are
//!   go on in the next)                           on the way)         only named)
//! ```
//!
//! Finished segments never change, so a backup needs no copy and stops nobody: it reads
//! what is there. As long as it runs, nothing it may have named is removed. What a backup
//! holds of a segment is its frames; the zeros behind them are no content.
//!
//! A [`BackupView`] shows a manifest and its content as the directory that it was, cut at
//! a position if that is wanted. A store is opened, verified and restored through it.

mod frames;
mod restore;
mod take;
mod view;

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;

pub use self::restore::Restored;
pub(crate) use self::restore::refuse_if_used;
pub(crate) use self::take::begin;
pub use self::view::{BackupCheck, BackupView, content_path};
use crate::disk::Disk;

/// Read in one step.
const STEP: usize = 512 << 10;

/// What is known of a file that does not change.
#[derive(Debug, Clone, Copy)]
struct Known {
    bytes: u64,
    digest: u128,
}

/// The backup that runs, if one does, and digests taken by earlier ones.
pub(crate) struct Backups {
    disk: Arc<dyn Disk>,
    state: Mutex<State>,
    digests: Mutex<HashMap<String, Known>>,
}

#[derive(Default)]
struct State {
    running: bool,
    /// To be removed when it ends.
    doomed: Vec<String>,
}

impl Backups {
    pub(crate) fn new(disk: Arc<dyn Disk>) -> Arc<Self> {
        Arc::new(Self {
            disk,
            state: Mutex::default(),
            digests: Mutex::default(),
        })
    }

    /// From now on nothing is removed; `None` if a backup runs already.
    fn pin(self: &Arc<Self>) -> Option<Pin> {
        let mut state = self.state.lock();
        (!std::mem::replace(&mut state.running, true)).then(|| Pin(Arc::clone(self)))
    }

    /// Removes a file of the store that a backup may hold: at once, or when the one that
    /// runs has ended.
    pub(crate) fn remove(&self, path: &str) -> io::Result<()> {
        let mut state = self.state.lock();
        if !state.running {
            return self.disk.remove(path);
        }
        if !state.doomed.iter().any(|doomed| doomed == path) {
            state.doomed.push(path.to_owned());
        }
        Ok(())
    }

    /// The same of several. Tells whether a backup holds them.
    pub(crate) fn remove_all(&self, paths: &[String]) -> io::Result<bool> {
        for path in paths {
            match self.remove(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                removed => removed?,
            }
        }
        Ok(self.state.lock().running)
    }

    /// Does something with files of the store that a backup may hold, unless one runs. Tells
    /// whether it was done.
    pub(crate) fn unless_running(&self, work: impl FnOnce() -> io::Result<()>) -> io::Result<bool> {
        let state = self.state.lock();
        if state.running {
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

    fn forget(&self, path: &str) {
        self.digests.lock().remove(path);
    }
}

/// Keeps every file there is, until it is dropped.
struct Pin(Arc<Backups>);

impl Drop for Pin {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.running = false;
        for path in std::mem::take(&mut state.doomed) {
            // The names of what is removed here are not worth a flush: a crash brings back
            // files that were there a moment ago.
            match self.0.disk.remove(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(path, %error, "a file kept for a backup could not be removed");
                }
                _ => {}
            }
        }
    }
}
