//! Makes a store of a backup. While files are missing or not flushed, the directory is no store: it holds
//! `RESTORING`, which a start refuses.

use std::sync::Arc;

use super::view::{BackupView, ViewFile};
use crate::api::config::StorageConfig;
use crate::api::error::{OpenError, RestoreError};
use crate::base::ids::Position;
use crate::disk::directory;
use crate::disk::directory::{DIRECTORIES, FORMAT, LOCK, RESTORING};
use crate::disk::{Disk, DiskLock};
use crate::recovery::{self, RecoveryReport};

/// Result of a restore.
#[derive(Debug, Clone)]
pub struct Restored {
    /// End of the journal.
    pub position: Position,
    /// Files that were written.
    pub files: u64,
    /// Bytes that were written.
    pub bytes: u64,
    /// Findings of the first start.
    pub report: RecoveryReport,
}

impl BackupView {
    /// Makes a store of the view, in an empty directory. Every file is compared with its digest while it is
    /// copied. `progress` receives the number of bytes read since its last call.
    ///
    /// # Errors
    /// If the directory is not empty or in use, if a file does not match the manifest, or if the file system
    /// fails. In these cases no start accepts the directory as a store.
    pub fn restore(
        &self,
        target: &Arc<dyn Disk>,
        config: &StorageConfig,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Restored, RestoreError> {
        let lock = begin(&**target)?;
        let (mut files, mut bytes) = (0, 0);
        let all_but_format = self.files.iter().filter(|(path, _)| *path != FORMAT);
        let format = self.files.get_key_value(FORMAT);
        for (path, shown) in all_but_format {
            bytes += self.copy(path, shown, &**target, progress)?;
            files += 1;
        }
        flush_names(&**target, &DIRECTORIES)?;
        // A directory without FORMAT is no store: this file comes last.
        if let Some((path, shown)) = format {
            bytes += self.copy(path, shown, &**target, progress)?;
            files += 1;
        }
        flush_names(&**target, &[""])?;
        let report = finish(target, config)?;
        drop(lock);
        Ok(Restored {
            position: self.position,
            files,
            bytes,
            report,
        })
    }

    /// Takes one file from the content that a stand-by keeps, which was compared with its digest when it was kept, or copies it.
    pub(super) fn take_or_copy(
        &self,
        path: &str,
        shown: &ViewFile,
        target: &dyn Disk,
        progress: &mut dyn FnMut(u64),
    ) -> Result<u64, RestoreError> {
        match Self::take_kept(path, shown, target)? {
            true => Ok(shown.bytes),
            false => self.copy(path, shown, target, progress),
        }
    }

    /// Copies one file and flushes it. Returns the number of bytes written.
    pub(super) fn copy(
        &self,
        path: &str,
        shown: &ViewFile,
        target: &dyn Disk,
        progress: &mut dyn FnMut(u64),
    ) -> Result<u64, RestoreError> {
        let io = || RestoreError::io(format!("writing {path} in {}", target.location()));
        let Some(file) = &shown.file else {
            write(target, path, &shown.made).map_err(io())?;
            return Ok(shown.bytes);
        };
        let copy = target.create(path).map_err(io())?;
        self.read_content(file, &mut |bytes, offset| {
            progress(bytes.len() as u64);
            let wanted = shown.bytes.saturating_sub(offset);
            let wanted = usize::try_from(wanted).unwrap_or(usize::MAX);
            let bytes = &bytes[..bytes.len().min(wanted)];
            copy.write_all_at(bytes, offset).map_err(io())
        })?;
        if shown.size > shown.bytes {
            copy.set_size(shown.size).map_err(io())?;
        }
        copy.sync().map_err(io())?;
        Ok(shown.bytes)
    }
}

pub(crate) fn write(target: &dyn Disk, path: &str, bytes: &[u8]) -> std::io::Result<()> {
    let file = target.create(path)?;
    file.write_all_at(bytes, 0)?;
    file.sync()
}

fn failed(action: &str, target: &dyn Disk) -> impl FnOnce(std::io::Error) -> RestoreError {
    RestoreError::io(format!("{action} in {}", target.location()))
}

/// The content of `RESTORING` during a restore.
pub(super) const UNFINISHED: &[u8] = b"a restore is not finished\n";

/// Refuses the target of a restore, if it is in use. Changes nothing.
///
/// # Errors
/// `Open` if a process has locked it; others as [`refuse_if_used`].
pub(crate) fn refuse_target(target: &dyn Disk) -> Result<(), RestoreError> {
    let used = refuse_if_used(target);
    if let Err(RestoreError::NotEmpty { .. }) = used {
        // A store that is served may be free later; its files stay.
        directory::lock_shared(target)?;
    }
    used
}

/// Locks the new directory, which must be empty, marks it as unfinished, and makes the directories of a store.
pub(crate) fn begin(target: &dyn Disk) -> Result<Box<dyn DiskLock>, RestoreError> {
    begin_marked(target, UNFINISHED)
}

/// As [`begin`], with this content of `RESTORING`.
pub(super) fn begin_marked(
    target: &dyn Disk,
    mark: &[u8],
) -> Result<Box<dyn DiskLock>, RestoreError> {
    // Before the lock, which makes a file.
    refuse_target(target)?;
    let lock = directory::lock(target)?;
    // Again: another process may have made a store meanwhile.
    refuse_if_used(target)?;
    write(target, RESTORING, mark).map_err(failed("writing", target))?;
    for directory in DIRECTORIES {
        let made = target.create_directory(directory);
        made.map_err(failed("making a directory", target))?;
    }
    flush_names(target, &[""])?;
    Ok(lock)
}

/// Flushes the names of the files in these directories.
pub(crate) fn flush_names(target: &dyn Disk, directories: &[&str]) -> Result<(), RestoreError> {
    for directory in directories {
        let flushed = target.sync_directory(directory);
        flushed.map_err(failed("flushing names", target))?;
    }
    Ok(())
}

/// Reads the whole new store, and removes the mark of an unfinished restore.
pub(crate) fn finish(
    target: &Arc<dyn Disk>,
    config: &StorageConfig,
) -> Result<RecoveryReport, RestoreError> {
    let report = recovery::inspect(target, config)?;
    let removed = target.remove(RESTORING);
    removed.map_err(failed("removing RESTORING", &**target))?;
    flush_names(&**target, &[""])?;
    Ok(report)
}

/// Refuses a directory that another process has locked.
///
/// # Errors
/// `Locked` if one has; others if the file system fails.
pub fn refuse_if_locked(target: &dyn Disk) -> Result<(), OpenError> {
    directory::lock(target).map(drop)
}

/// Refuses a directory in use, as each restore does: existing files are never overwritten. Files in other directories, such
/// as a file system's own, do not count, and neither does LOCK alone, which a process that was killed leaves. Changes
/// nothing.
///
/// # Errors
/// `NotEmpty` with the name of a file; `Io` if the file system fails.
pub fn refuse_if_used(target: &dyn Disk) -> Result<(), RestoreError> {
    for directory in std::iter::once("").chain(DIRECTORIES) {
        let names = match target.list(directory) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            names => names.map_err(RestoreError::io(format!("listing {}", target.location())))?,
        };
        let mut names = names.iter().filter(|name| *name != LOCK);
        if let Some(name) = names.next() {
            let slash = if directory.is_empty() { "" } else { "/" };
            return Err(RestoreError::NotEmpty {
                directory: target.location(),
                name: format!("{directory}{slash}{name}"),
            });
        }
    }
    Ok(())
}
