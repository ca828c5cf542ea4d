//! Content of a replica that a stand-by has before it takes the store over, named by digest.
//!
//! ```text
//! stand-by     bucket ─▶ standby/<digest>             content that the newest manifest names
//! take-over    standby/<digest> ─▶ sorted/, journal/   a move, without a copy
//! old owner    sorted/, journal/ ─▶ standby/<digest>   content that the manifest names
//!              everything else ─▶ diverged/<term>/     for `wald dump`
//! ```

use std::collections::{HashMap, HashSet};
use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::STEP;
use super::copy::{CopyTail, TAIL};
use super::restore::flush_names;
use super::view::{BackupView, ViewFile};
use crate::api::content::ContentDigest;
use crate::api::engine::{BackupFile, BackupManifest};
use crate::api::error::RestoreError;
use crate::disk::directory::{
    self, DIRECTORIES, DIVERGED, KEPT, KEYS, LOCK, RESTORING, TERM, is_own_name,
};
use crate::disk::{Disk, DiskFile};

/// The directory of segments that are empty, and need not be kept.
const POOL: &str = "pool";

/// End of the name of content that is on its way.
const UNFINISHED: &str = ".new";

/// Path of kept content.
pub(super) fn kept_path(digest: ContentDigest) -> String {
    format!("{KEPT}/{digest}")
}

/// Opens the content with this digest and of this size in bytes, if a stand-by keeps it. It was compared with the
/// digest when it was kept.
///
/// # Errors
/// If the file cannot be opened or read. A file that cannot be read is removed, so that its content is fetched again.
pub fn open_kept(
    target: &dyn Disk,
    digest: ContentDigest,
    bytes: u64,
) -> io::Result<Option<Arc<dyn DiskFile>>> {
    let path = kept_path(digest);
    let file = match target.open(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        // Perhaps this process has too many files open: the content may be whole.
        file => file?,
    };
    if file.size()? != bytes {
        return Ok(None);
    }
    // A damaged sector shows now, while the bucket can still help.
    if let Err(error) = file.read_at(&mut [0; 1], 0) {
        // If it cannot be removed, the next look fails in the same way.
        let _ = target.remove(&path);
        return Err(error);
    }
    Ok(Some(file))
}

/// Content that a stand-by keeps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KeptContent {
    /// Number of files that were fetched now.
    pub fetched: u64,
    /// Bytes of all kept files.
    pub bytes: u64,
}

/// Files of a directory that is no longer the newest one of its store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SetAside {
    /// Number of files that the replica has, too, and that are kept for the next take-over.
    pub kept: u64,
    /// Number of files that were moved to `diverged/`.
    pub moved: u64,
}

impl BackupView {
    /// Fetches the content of the view that the stand-by does not keep yet. Each file is compared with its digest. `goes_on`
    /// is asked before each piece, and receives the number of bytes that have come since its last call.
    ///
    /// # Errors
    /// If content does not match its digest, or if the file system fails. Files that were fetched before stay.
    pub fn keep(
        &self,
        copy: &CopyTail,
        goes_on: &mut dyn FnMut(u64) -> bool,
    ) -> Result<KeptContent, RestoreError> {
        let target = copy.disk();
        let io = || RestoreError::io(format!("keeping content in {}", target.location()));
        let mut kept = KeptContent::default();
        for name in directory::list(target, KEPT).map_err(io())? {
            if name.ends_with(UNFINISHED) {
                target.remove(&format!("{KEPT}/{name}")).map_err(io())?;
            }
        }
        for file in self.files.values().filter_map(|shown| shown.file.as_ref()) {
            if !goes_on(0) {
                return Ok(kept);
            }
            let path = kept_path(file.digest);
            if has(target, &path, file.bytes).map_err(io())? {
                kept.bytes += file.bytes;
                continue;
            }
            let new = format!("{path}{UNFINISHED}");
            let copy = target.create(&new).map_err(io())?;
            let mut is_stopped = false;
            let read = self.read_content(file, &mut |bytes, offset| {
                is_stopped |= !goes_on(bytes.len() as u64);
                match is_stopped {
                    true => Err(RestoreError::Io {
                        action: "keeping content".to_owned(),
                        source: io::ErrorKind::Interrupted.into(),
                    }),
                    false => copy.write_all_at(bytes, offset).map_err(io()),
                }
            });
            if is_stopped {
                return Ok(kept);
            }
            read?;
            copy.sync().map_err(io())?;
            target.rename(&new, &path).map_err(io())?;
            kept.fetched += 1;
            kept.bytes += file.bytes;
        }
        flush_names(target, &[KEPT])?;
        Ok(kept)
    }

    /// Bytes of content that the stand-by does not keep in this directory yet.
    ///
    /// # Errors
    /// If the file system fails.
    pub fn missing_bytes(&self, target: &dyn Disk) -> Result<u64, RestoreError> {
        let io = || RestoreError::io(format!("looking for kept content in {}", target.location()));
        let mut missing: u64 = 0;
        for file in self.files.values().filter_map(|shown| shown.file.as_ref()) {
            if !has(target, &kept_path(file.digest), file.bytes).map_err(io())? {
                missing = missing.saturating_add(file.bytes);
            }
        }
        Ok(missing)
    }

    /// Removes kept content that the view does not name. Other views of the copy must be outdated.
    ///
    /// # Errors
    /// If the file system fails.
    pub fn forget_others(&self, target: &dyn Disk) -> Result<(), RestoreError> {
        let io = || RestoreError::io(format!("removing kept content in {}", target.location()));
        let named = self.files.values().filter_map(|shown| shown.file.as_ref());
        let named: HashSet<String> = named.map(|file| file.digest.to_string()).collect();
        for name in directory::list(target, KEPT).map_err(io())? {
            if !named.contains(&name) && !name.starts_with(TAIL) {
                target.remove(&format!("{KEPT}/{name}")).map_err(io())?;
            }
        }
        Ok(())
    }

    /// Moves the content of a file to its place, if the directory keeps it. Returns whether it did.
    pub(super) fn take_kept(
        path: &str,
        shown: &ViewFile,
        target: &dyn Disk,
    ) -> Result<bool, RestoreError> {
        let io = || {
            RestoreError::io(format!(
                "moving {path} to its place in {}",
                target.location()
            ))
        };
        let Some(file) = &shown.file else {
            return Ok(false);
        };
        let kept = kept_path(file.digest);
        if shown.bytes != file.bytes || !has(target, &kept, file.bytes).map_err(io())? {
            return Ok(false);
        }
        target.rename(&kept, path).map_err(io())?;
        if shown.size > shown.bytes {
            let moved = target.open(path).map_err(io())?;
            moved.set_size(shown.size).map_err(io())?;
            moved.sync().map_err(io())?;
        }
        Ok(true)
    }

    /// Moves content of a take-over that failed back to the kept content, so that the next one need not fetch it. Each file is
    /// compared with its digest. Other files stay where they are.
    ///
    /// # Errors
    /// If the file system fails.
    pub(super) fn give_back(&self, target: &dyn Disk) -> io::Result<()> {
        target.create_directory(KEPT)?;
        for (path, shown) in &self.files {
            let Some(file) = shown.file.as_ref().filter(|file| file.bytes == shown.bytes) else {
                continue;
            };
            match matches(target, path, file) {
                Ok(true) => target.rename(path, &kept_path(file.digest))?,
                Ok(false) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        target.sync_directory(KEPT)
    }
}

/// Removes kept content, after a take-over or without a use for it.
///
/// # Errors
/// If the file system fails.
pub fn remove_kept_content(target: &dyn Disk) -> Result<(), RestoreError> {
    let io = || RestoreError::io(format!("removing kept content in {}", target.location()));
    let names = directory::list(target, KEPT).map_err(io())?;
    for name in &names {
        target.remove(&format!("{KEPT}/{name}")).map_err(io())?;
    }
    match names.is_empty() {
        true => Ok(()),
        false => flush_names(target, &[KEPT]),
    }
}

/// Sets a store aside whose directory is no longer the newest one: content that the manifest names is kept, and everything
/// else moves to `diverged/<term>`. `term`: number of the term that the directory has kept. TERM moves last, so that a set-aside
/// that was cut off goes on with the same number.
///
/// # Errors
/// `Open` if another process uses the directory; others if the file system fails.
pub fn set_aside(
    target: &dyn Disk,
    manifest: Option<&BackupManifest>,
    term: u64,
) -> Result<SetAside, RestoreError> {
    let io = || RestoreError::io(format!("setting {} aside", target.location()));
    let lock = directory::lock(target)?;
    let aside = format!("{DIVERGED}/{term}");
    for directory in [KEPT, DIVERGED, &aside] {
        target.create_directory(directory).map_err(io())?;
    }
    let named = manifest.iter().flat_map(|manifest| &manifest.files);
    let named: HashMap<&str, &BackupFile> = named.map(|file| (file.path.as_str(), file)).collect();
    let mut done = SetAside::default();
    for name in DIRECTORIES {
        let to = format!("{aside}/{name}");
        target.create_directory(&to).map_err(io())?;
        for file in directory::list(target, name).map_err(io())? {
            let path = format!("{name}/{file}");
            if name == POOL {
                target.remove(&path).map_err(io())?;
                continue;
            }
            let content = named.get(path.as_str());
            match content {
                Some(content) if matches(target, &path, content).map_err(io())? => {
                    target
                        .rename(&path, &kept_path(content.digest))
                        .map_err(io())?;
                    done.kept += 1;
                }
                _ => {
                    target
                        .rename(&path, &format!("{to}/{file}"))
                        .map_err(io())?;
                    done.moved += 1;
                }
            }
        }
        flush_names(target, &[&to])?;
        match target.sync_directory(name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            flushed => flushed.map_err(io())?,
        }
    }
    // The frames that are set aside may have keys that the bucket never got.
    let keys = directory::list(target, KEYS).map_err(io())?;
    if !keys.is_empty() {
        let to = format!("{aside}/{KEYS}");
        target.create_directory(&to).map_err(io())?;
        for file in keys {
            target
                .rename(&format!("{KEYS}/{file}"), &format!("{to}/{file}"))
                .map_err(io())?;
            done.moved += 1;
        }
        flush_names(target, &[&to, KEYS])?;
    }
    let others = directory::list(target, "").map_err(io())?;
    let others = others.iter().map(String::as_str);
    let others = others.filter(|name| is_own_name(name) && ![LOCK, RESTORING, TERM].contains(name));
    for name in others {
        target
            .rename(name, &format!("{aside}/{name}"))
            .map_err(io())?;
        done.moved += 1;
    }
    flush_names(target, &[KEPT, &aside, ""])?;
    match target.rename(TERM, &format!("{aside}/{TERM}")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        moved => moved.map_err(io())?,
    }
    flush_names(target, &[&aside, ""])?;
    drop(lock);
    Ok(done)
}

/// Whether a file exists with this size.
fn has(target: &dyn Disk, path: &str, bytes: u64) -> io::Result<bool> {
    match target.open(path) {
        Ok(file) => Ok(file.size()? == bytes),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether a file has this content, and only zeros behind it, which are cut off then. A segment of the old owner may have
/// records behind the content that no other node has. The content is on the device then: the old owner may have left it in memory.
fn matches(target: &dyn Disk, path: &str, content: &BackupFile) -> io::Result<bool> {
    let file = target.open(path)?;
    let size = file.size()?;
    let mut digest = content.digest.hasher();
    let mut update = |piece: &[u8]| {
        digest.update(piece);
        true
    };
    let mut is_zero = |piece: &[u8]| piece.iter().all(|byte| *byte == 0);
    let is_content =
        read_pieces(&*file, 0..content.bytes, &mut update)? && digest.digest() == content.digest;
    if !is_content || !read_pieces(&*file, content.bytes..size, &mut is_zero)? {
        return Ok(false);
    }
    if size > content.bytes {
        file.set_size(content.bytes)?;
    }
    file.sync()?;
    Ok(true)
}

/// Passes a range of a file to `each`, a piece at a time. False if the file ends before, or if `each` returns false.
fn read_pieces(
    file: &dyn DiskFile,
    range: Range<u64>,
    each: &mut dyn FnMut(&[u8]) -> bool,
) -> io::Result<bool> {
    let mut buffer = vec![0; STEP];
    let mut offset = range.start;
    while offset < range.end {
        let rest = usize::try_from(range.end - offset).unwrap_or(STEP);
        let piece = &mut buffer[..rest.min(STEP)];
        if file.read_full_at(piece, offset)? < piece.len() || !each(piece) {
            return Ok(false);
        }
        offset += piece.len() as u64;
    }
    Ok(true)
}
