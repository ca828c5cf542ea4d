//! Backups in a directory.
//!
//! A file gets its name only when it is whole and flushed, so a killed backup leaves no file
//! that looks whole. A later backup need not receive whole files again.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use wald_proto::backup::{
    DIGEST_BYTES, FILES, LARGEST_MANIFEST, MANIFESTS, OF_A_STORE, OLD_DIGEST_BYTES,
};

use super::place::{BackupPlace, Doing, NO_MATCH};
use super::private;
use super::shelf::{digest_of, hex};
use crate::output::say;

/// Ending of a file's name until the file is whole.
const NEW: &str = ".new";

/// The directory.
pub(crate) struct BackupDirectory {
    dir: PathBuf,
    /// Held while something is written or removed.
    _lock: Option<File>,
    receiving: Option<Receiving>,
}

/// A file that is being received.
struct Receiving {
    place: PathBuf,
    path: PathBuf,
    file: File,
    digest: Bytes,
    bytes: u64,
    received: u64,
    running: Box<blake3::Hasher>,
}

impl BackupDirectory {
    /// Opens it to look at it.
    pub(crate) fn look(dir: &Path) -> Result<Self> {
        let manifests = dir.join(MANIFESTS);
        match fs::metadata(&manifests) {
            Ok(found) if found.is_dir() => {}
            Err(error)
                if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) =>
            {
                return Err(error).with_context(|| format!("cannot read {}", manifests.display()));
            }
            _ => bail!("{} is no directory of backups", dir.display()),
        }
        for part in [FILES, MANIFESTS] {
            private::check_part(&dir.join(part))?;
        }
        Ok(Self {
            dir: dir.to_owned(),
            _lock: None,
            receiving: None,
        })
    }

    /// Opens it for changes, and creates it if it does not exist. Removes files that a killed
    /// backup left half written.
    pub(crate) fn open(dir: &Path) -> Result<Self> {
        if let Some(name) = OF_A_STORE.iter().find(|name| dir.join(name).exists()) {
            bail!(
                "{} is a store's data directory, it has {name}; name a directory for backups only",
                dir.display()
            );
        }
        let fail = || match dir.try_exists() {
            Ok(false) => format!("cannot make {}", dir.display()),
            _ => format!("cannot write to {}", dir.display()),
        };
        for part in [FILES, MANIFESTS] {
            private::make_part(&dir.join(part)).with_context(fail)?;
        }
        let lock = private::open_lock(&dir.join("LOCK")).with_context(fail)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                bail!(
                    "another walctl writes to {}; wait for its end",
                    dir.display()
                )
            }
            Err(TryLockError::Error(error)) => return Err(error).with_context(fail),
        }
        // Also if it was there: the run that made it may have been killed before this.
        flush_directory(dir)?;
        flush_above(&dir.canonicalize().with_context(fail)?, File::sync_all)?;
        let directory = Self {
            dir: dir.to_owned(),
            _lock: Some(lock),
            receiving: None,
        };
        for part in [FILES, MANIFESTS] {
            let names = directory.names(part)?;
            for name in names.iter().filter(|name| name.ends_with(NEW)) {
                directory.remove(part, name)?;
            }
        }
        directory.name_old_content()?;
        Ok(directory)
    }

    /// Gives content of older versions a second name, by its new digest, so that the next backup neither receives nor
    /// stores it again. This happens once, in a directory that has no new content yet. Without links in the file system
    /// the next backup receives everything.
    fn name_old_content(&self) -> Result<()> {
        let names = self.names(FILES)?;
        let of_length = |bytes: usize| {
            let names = names.iter().filter_map(|name| digest_of(name));
            names.filter(move |digest| digest.len() == bytes)
        };
        if of_length(DIGEST_BYTES).next().is_some() || of_length(OLD_DIGEST_BYTES).next().is_none()
        {
            return Ok(());
        }
        say("reading the content of older backups once, to name it by its new digest");
        for old in of_length(OLD_DIGEST_BYTES) {
            let path = self.path(FILES, &hex(&old));
            let mut file = private::open_to_read(&path)
                .with_context(|| format!("cannot read {}", path.display()))?;
            let mut hasher = blake3::Hasher::new();
            // `wald verify` reports content that cannot be read. The next backup receives it again.
            if std::io::copy(&mut file, &mut hasher).is_err() {
                continue;
            }
            let named = self.path(FILES, &hex(hasher.finalize().as_bytes()));
            match fs::hard_link(&path, &named) {
                // Two contents that an older version confused, or a link of a run that was killed.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(_) => return Ok(()),
                Ok(()) => {}
            }
        }
        self.flush(FILES)
    }

    fn path(&self, part: &str, name: &str) -> PathBuf {
        self.dir.join(part).join(name)
    }

    fn names(&self, part: &str) -> Result<Vec<String>> {
        let dir = self.dir.join(part);
        let fail = || format!("cannot list {}", dir.display());
        let mut names = Vec::new();
        for entry in fs::read_dir(&dir).with_context(fail)? {
            // A file with another name is none of ours.
            if let Ok(name) = entry.with_context(fail)?.file_name().into_string() {
                names.push(name);
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    fn remove(&self, part: &str, name: &str) -> Result<()> {
        let path = self.path(part, name);
        fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))
    }

    fn flush(&self, part: &str) -> Result<()> {
        flush_directory(&self.dir.join(part))
    }

    fn read_content(&self) -> Result<BTreeMap<Bytes, u64>> {
        let mut content = BTreeMap::new();
        for name in self.names(FILES)? {
            let Some(digest) = digest_of(&name) else {
                continue;
            };
            let path = self.path(FILES, &name);
            let bytes = private::size(&path);
            if let Some(bytes) = bytes.with_context(|| format!("cannot read {}", path.display()))? {
                content.insert(digest, bytes);
            }
        }
        Ok(content)
    }

    fn receive(&self, digest: Bytes, bytes: u64) -> Result<Receiving> {
        let path = self.path(FILES, &format!("{}{NEW}", hex(&digest)));
        let file =
            private::create(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Receiving {
            place: self.path(FILES, &hex(&digest)),
            path,
            file,
            digest,
            bytes,
            received: 0,
            running: Box::default(),
        })
    }

    fn write_manifest(&self, name: &str, manifest: &[u8]) -> Result<()> {
        let path = self.path(MANIFESTS, name);
        let new = self.path(MANIFESTS, &format!("{name}{NEW}"));
        let write = || {
            let mut file = private::create(&new)?;
            file.write_all(manifest)?;
            file.sync_all()?;
            fs::rename(&new, &path)
        };
        write().with_context(|| format!("cannot write {}", path.display()))?;
        self.flush(MANIFESTS)
    }
}

impl Receiving {
    fn write(&mut self, data: &[u8]) -> Result<()> {
        self.running.update(data);
        self.received += data.len() as u64;
        self.file
            .write_all(data)
            .with_context(|| format!("cannot write {}", self.path.display()))
    }

    /// All of it is there: it gets its name.
    fn end(self) -> Result<()> {
        let same = self.running.finalize().as_bytes()[..] == *self.digest;
        if self.received != self.bytes || !same {
            bail!(NO_MATCH);
        }
        self.file
            .sync_all()
            .and_then(|()| fs::rename(&self.path, &self.place))
            .with_context(|| format!("cannot write {}", self.place.display()))
    }
}

impl BackupPlace for BackupDirectory {
    fn name(&self) -> String {
        self.dir.display().to_string()
    }

    fn manifest_name(&self, file: &str) -> String {
        self.path(MANIFESTS, file).display().to_string()
    }

    fn content(&self) -> Doing<'_, BTreeMap<Bytes, u64>> {
        Box::pin(async { self.read_content() })
    }

    fn manifests(&self) -> Doing<'_, Vec<String>> {
        Box::pin(async { self.names(MANIFESTS) })
    }

    fn read_manifest<'a>(&'a self, file: &'a str) -> Doing<'a, Result<Vec<u8>, String>> {
        let read = read(&self.path(MANIFESTS, file)).map_err(|error| error.to_string());
        Box::pin(async { Ok(read) })
    }

    fn begin(&mut self, digest: Bytes, bytes: u64) -> Doing<'_, ()> {
        Box::pin(async move {
            self.receiving = Some(self.receive(digest, bytes)?);
            Ok(())
        })
    }

    fn write<'a>(&'a mut self, data: &'a [u8]) -> Doing<'a, ()> {
        let receiving = self.receiving.as_mut();
        Box::pin(async { receiving.map_or(Ok(()), |file| file.write(data)) })
    }

    fn end(&mut self) -> Doing<'_, ()> {
        let receiving = self.receiving.take();
        Box::pin(async { receiving.map_or(Ok(()), Receiving::end) })
    }

    fn settle(&mut self) -> Doing<'_, ()> {
        Box::pin(async { self.flush(FILES) })
    }

    fn create_manifest<'a>(&'a mut self, file: &'a str, manifest: Vec<u8>) -> Doing<'a, ()> {
        Box::pin(async move { self.write_manifest(file, &manifest) })
    }

    fn remove_manifests<'a>(&'a self, files: &'a [String]) -> Doing<'a, ()> {
        Box::pin(async {
            files
                .iter()
                .try_for_each(|file| self.remove(MANIFESTS, file))?;
            self.flush(MANIFESTS)
        })
    }

    fn remove_content<'a>(&'a self, digests: &'a [Bytes]) -> Doing<'a, ()> {
        Box::pin(async {
            digests
                .iter()
                .try_for_each(|digest| self.remove(FILES, &hex(digest)))?;
            self.flush(FILES)
        })
    }

    fn close(self: Box<Self>) -> Doing<'static, ()> {
        Box::pin(async { Ok(()) })
    }
}

/// Reads a manifest.
fn read(path: &Path) -> std::io::Result<Vec<u8>> {
    let file = private::open_to_read(path)?;
    let bytes = file.metadata()?.len();
    if bytes > LARGEST_MANIFEST {
        return Err(std::io::Error::other(format!(
            "{bytes} bytes are no manifest"
        )));
    }
    let mut manifest = Vec::new();
    file.take(LARGEST_MANIFEST).read_to_end(&mut manifest)?;
    Ok(manifest)
}

fn flush_directory(dir: &Path) -> Result<()> {
    File::open(dir)
        .and_then(|dir| dir.sync_all())
        .with_context(|| format!("cannot flush {}", dir.display()))
}

/// Flushes the directories above this one: they may have been made for it. Missing rights end this, and so does a file system
/// that cannot flush directories: the directories above them are older.
fn flush_above(dir: &Path, flush: impl Fn(&File) -> io::Result<()>) -> Result<()> {
    for ancestor in dir.ancestors().skip(1) {
        let failed = || format!("cannot flush {}", ancestor.display());
        let opened = match File::open(ancestor) {
            Err(error) if error.kind() == ErrorKind::PermissionDenied => break,
            opened => opened.with_context(failed)?,
        };
        match flush(&opened) {
            Err(error)
                if [ErrorKind::InvalidInput, ErrorKind::Unsupported].contains(&error.kind()) =>
            {
                break;
            }
            flushed => flushed.with_context(failed)?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_above_a_backup_are_flushed_or_the_run_fails() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = scratch.path().join("a/b");
        fs::create_dir_all(&dir).unwrap();
        let flushed = std::cell::RefCell::new(0);
        let above = dir.ancestors().count() - 1;
        let run = |fails_at: usize, kind: ErrorKind| {
            flushed.replace(0);
            flush_above(&dir, |_| {
                let number = flushed.replace_with(|number: &mut usize| *number + 1);
                match number == fails_at {
                    true => Err(kind.into()),
                    false => Ok(()),
                }
            })
        };
        run(usize::MAX, ErrorKind::Other).unwrap();
        assert_eq!(*flushed.borrow(), above);
        for number in 0..2 {
            assert!(run(number, ErrorKind::StorageFull).is_err(), "{number}");
        }
        // This file system cannot flush directories.
        run(1, ErrorKind::InvalidInput).unwrap();
        assert_eq!(*flushed.borrow(), 2);
    }
}
