//! A directory of backups: content by its digest, one manifest for each backup.
//!
//! A file gets its name only when it is whole and flushed, so a killed backup leaves no file
//! that looks whole. A later backup need not receive whole files again.

use std::collections::HashSet;
use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use wald_client::proto::BackupManifest;
use wald_proto::backup::{
    self, DIGEST_BYTES, FILES, LARGEST_MANIFEST, MANIFEST_SUFFIX, MANIFESTS, OF_A_STORE,
};
use xxhash_rust::xxh3::Xxh3;

use super::private;
use crate::output::say;

/// Ending of a file's name until the file is whole.
const NEW: &str = ".new";

/// A backup that is there.
pub(crate) struct KeptBackup {
    pub(crate) id: String,
    pub(crate) manifest: BackupManifest,
}

impl KeptBackup {
    /// Microseconds since the Unix epoch.
    pub(crate) fn create_time(&self) -> i64 {
        let time = self.manifest.create_time.as_ref();
        time.map_or(0, |time| {
            time.seconds
                .saturating_mul(1_000_000)
                .saturating_add(i64::from(time.nanos / 1000))
        })
    }

    pub(crate) fn bytes(&self) -> u64 {
        let files = self.manifest.files.iter();
        files.fold(0, |sum, file| sum.saturating_add(file.file_bytes))
    }

    /// The key that sorts the backups of a directory, as in `wald`: positions that the store
    /// reports come first, since its clock may have gone back.
    fn order(&self) -> (u64, u64, i64, &str) {
        let manifest = &self.manifest;
        let position = manifest.position.unwrap_or(0);
        let time = self.create_time();
        (manifest.recovery_epoch, position, time, &self.id)
    }
}

/// The backups that are there.
pub(crate) struct FoundBackups {
    /// The oldest first.
    pub(crate) kept: Vec<KeptBackup>,
    /// Manifests that cannot be read, each as a sentence that names the remedy.
    pub(crate) bad: Vec<String>,
}

impl FoundBackups {
    /// Reports on stderr the manifests that cannot be read.
    pub(crate) fn warn(self) -> Self {
        for bad in &self.bad {
            say(&format!("warning: {bad}"));
        }
        self
    }
}

/// The directory.
pub(crate) struct Shelf {
    dir: PathBuf,
    /// Held while something is written or removed.
    _lock: Option<File>,
}

impl Shelf {
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
        let is_new = !dir.join(MANIFESTS).is_dir();
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
        if is_new {
            flush_directory(dir)?;
            if let Some(parent) = dir.canonicalize().with_context(fail)?.parent() {
                flush_directory(parent)?;
            }
        }
        let shelf = Self {
            dir: dir.to_owned(),
            _lock: Some(lock),
        };
        for part in [FILES, MANIFESTS] {
            for name in shelf.names(part)?.iter().filter(|name| name.ends_with(NEW)) {
                shelf.remove(part, name)?;
            }
        }
        Ok(shelf)
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

    /// Digests of the content that is there.
    pub(crate) fn known(&self) -> Result<Vec<Bytes>> {
        let names = self.names(FILES)?;
        Ok(names.iter().filter_map(|name| digest_of(name)).collect())
    }

    /// Bytes of the content with a digest, if it is there.
    pub(crate) fn content_bytes(&self, digest: &[u8]) -> Result<Option<u64>> {
        let path = self.path(FILES, &hex(digest));
        private::size(&path).with_context(|| format!("cannot read {}", path.display()))
    }

    /// Content that is known to be bad is not counted on again.
    pub(crate) fn forget(&self, digest: &[u8]) -> Result<()> {
        self.remove(FILES, &hex(digest))
    }

    /// Begins a file.
    pub(crate) fn receive(&self, digest: &[u8], bytes: u64) -> Result<Receiving> {
        let path = self.path(FILES, &format!("{}{NEW}", hex(digest)));
        let file =
            private::create(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Receiving {
            place: self.path(FILES, &hex(digest)),
            path,
            file,
            digest: digest.to_vec(),
            bytes,
            received: 0,
            running: Xxh3::new(),
        })
    }

    /// All content of the manifest is there: from now on it is a backup.
    pub(crate) fn keep(&self, manifest: BackupManifest) -> Result<KeptBackup> {
        flush_directory(&self.dir.join(FILES))?;
        let kept = KeptBackup {
            id: String::new(),
            manifest,
        };
        let position = kept.manifest.position.unwrap_or(0);
        let id = format!("{}-{position}", compact_time(kept.create_time()));
        let path = self.path(MANIFESTS, &format!("{id}{MANIFEST_SUFFIX}"));
        let new = self.path(MANIFESTS, &format!("{id}{NEW}"));
        let write = || {
            let mut file = private::create(&new)?;
            file.write_all(&backup::encode(&kept.manifest))?;
            file.sync_all()?;
            fs::rename(&new, &path)
        };
        write().with_context(|| format!("cannot write {}", path.display()))?;
        flush_directory(&self.dir.join(MANIFESTS))?;
        Ok(KeptBackup { id, ..kept })
    }

    /// The backups there are.
    pub(crate) fn kept(&self) -> Result<FoundBackups> {
        let (mut kept, mut bad) = (Vec::new(), Vec::new());
        for name in self.names(MANIFESTS)? {
            let Some(id) = name.strip_suffix(MANIFEST_SUFFIX) else {
                continue;
            };
            let path = self.path(MANIFESTS, &name);
            let read = read(&path).map_err(|error| error.to_string());
            let manifest =
                read.and_then(|bytes| backup::decode(&bytes).map_err(|bad| bad.to_string()));
            match manifest {
                Ok(manifest) => kept.push(KeptBackup {
                    id: id.to_owned(),
                    manifest,
                }),
                Err(what) => bad.push(format!(
                    "{}: {what}; it is passed over, and no content is removed as long as it is \
                     there: remove it if that backup is not needed",
                    path.display()
                )),
            }
        }
        kept.sort_by(|a, b| a.order().cmp(&b.order()));
        Ok(FoundBackups { kept, bad })
    }

    /// Removes all but the newest backups, but never the one that was just taken. Then removes
    /// the content that no remaining backup has, unless a manifest cannot be read, which may
    /// name it. Returns the removed backups, and the number of removed bytes.
    pub(crate) fn prune(&self, keep: u64, taken: Option<&str>) -> Result<(Vec<String>, u64)> {
        let FoundBackups { kept, bad } = self.kept()?;
        let keep = usize::try_from(keep).unwrap_or(usize::MAX);
        let mut excess = kept.len().saturating_sub(keep);
        let (removed, kept): (Vec<_>, Vec<_>) = kept.into_iter().partition(|kept| {
            let goes = excess > 0 && taken != Some(kept.id.as_str());
            excess -= usize::from(goes);
            goes
        });
        for kept in &removed {
            self.remove(MANIFESTS, &format!("{}{MANIFEST_SUFFIX}", kept.id))?;
        }
        // No manifest may come back that names the files that are removed next.
        flush_directory(&self.dir.join(MANIFESTS))?;
        let used: HashSet<String> = kept
            .iter()
            .flat_map(|kept| kept.manifest.files.iter().map(|file| hex(&file.digest)))
            .collect();
        let mut freed = 0;
        let names = match bad.is_empty() {
            true => self.names(FILES)?,
            false => Vec::new(),
        };
        for name in names {
            if let Some(digest) = digest_of(&name).filter(|_| !used.contains(&name)) {
                freed += self.content_bytes(&digest)?.unwrap_or(0);
                self.remove(FILES, &name)?;
            }
        }
        flush_directory(&self.dir.join(FILES))?;
        Ok((removed.into_iter().map(|kept| kept.id).collect(), freed))
    }
}

/// A file that is being received.
pub(crate) struct Receiving {
    place: PathBuf,
    path: PathBuf,
    file: File,
    digest: Vec<u8>,
    bytes: u64,
    received: u64,
    running: Xxh3,
}

impl Receiving {
    /// Takes the next piece.
    pub(crate) fn take(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        if offset != self.received || data.len() as u64 > self.bytes - self.received {
            bail!("the server sends content that its manifest does not have");
        }
        self.running.update(data);
        self.received += data.len() as u64;
        self.file
            .write_all(data)
            .with_context(|| format!("cannot write {}", self.path.display()))
    }

    /// All of it is there: it gets its name.
    pub(crate) fn end(self) -> Result<()> {
        let same = self.running.digest128().to_be_bytes() == self.digest.as_slice();
        if self.received != self.bytes || !same {
            bail!("the received bytes do not match the manifest; try again");
        }
        self.file
            .sync_all()
            .and_then(|()| fs::rename(&self.path, &self.place))
            .with_context(|| format!("cannot write {}", self.place.display()))
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

/// The name of content with a digest.
pub(crate) fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn digest_of(name: &str) -> Option<Bytes> {
    let lower = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
    if name.len() != 2 * DIGEST_BYTES || !name.chars().all(lower) {
        return None;
    }
    let digest = u128::from_str_radix(name, 16).ok()?;
    Some(Bytes::copy_from_slice(&digest.to_be_bytes()))
}

/// A time that sorts as a name: 20261122T003012.000000Z.
fn compact_time(micros: i64) -> String {
    crate::output::rfc3339(micros).replace(['-', ':'], "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_of_digests_or_of_nothing() {
        let digest = 0x00ff_u128.to_be_bytes();
        let name = hex(&digest);
        assert_eq!(digest_of(&name).unwrap(), digest.as_slice());
        assert!(digest_of(&name.to_uppercase()).is_none());
        assert!(digest_of(&name[1..]).is_none());
        assert!(digest_of(&format!("+{}", &name[1..])).is_none());
    }

    #[test]
    fn ids_sort_by_time() {
        assert_eq!(compact_time(1_500_000), "19700101T000001.500000Z");
    }
}
