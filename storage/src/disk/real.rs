//! The real file system, through positional reads and writes and `fdatasync`.
//!
//! Other users of the machine cannot read its files: everything it creates belongs to the owner alone.
//! It never follows or waits for a symbolic link, pipe or device below the data directory. The operator
//! chooses the path of the data directory itself, which may lead through links.

#![allow(
    clippy::disallowed_methods,
    reason = "this is the one place that touches files"
)]

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use rustix::fs::{
    AtFlags, FileType, FlockOperation, IFlags, OFlags, RawDir, flock, fstatvfs, mkdirat, openat,
    renameat, statat, statfs, unlinkat,
};
#[cfg(target_os = "linux")]
use rustix::io::ReadWriteFlags;
use rustix::io::{Errno, retry_on_intr};

use super::private::{DIRECTORY, FILE, WrongKind, close_directory, close_file, make_directories};
use super::{Disk, DiskFile, DiskLock, DiskMap, FileIdentity, FileSystem, Unreadable};
use crate::api::error::OpenError;

/// Bytes of directory entries that are read at a time: some thousand names.
const NAMES_BYTES: usize = 64 << 10;

/// Alignment of direct reads in bytes, enough for every block device in use.
const DIRECT_ALIGN: usize = 4096;

/// Flags for opening every file of a store: a link in its place is refused, and a pipe is not waited
/// for.
const NO_SURPRISE: OFlags = OFlags::NOFOLLOW
    .union(OFlags::NONBLOCK)
    .union(OFlags::CLOEXEC);

/// A data directory on a mounted file system.
#[derive(Debug)]
pub struct RealDisk {
    root: PathBuf,
    /// The data directory and the directories in it that were used so far. Each is opened once, so that
    /// a link that replaces one later is not followed.
    directories: Mutex<HashMap<String, Arc<OwnedFd>>>,
    /// Nothing is ever written: files are opened for reading only, whatever their rights.
    read_only: bool,
    unreadable: Arc<Unreadable>,
}

impl RealDisk {
    /// Opens a data directory. Creates it, with a durable name, if it does not exist.
    ///
    /// # Errors
    /// If it cannot be created or is not a directory.
    pub fn open(root: &Path) -> Result<Arc<Self>, OpenError> {
        let fail = |source| OpenError::Io {
            action: format!("opening the data directory {}", root.display()),
            source,
        };
        if !root.is_dir() {
            make_directories(root).map_err(fail)?;
            let absolute = root.canonicalize().map_err(fail)?;
            for ancestor in absolute.ancestors().skip(1) {
                // Above the directories that this call may have created, missing rights are no error.
                if File::open(ancestor).and_then(|d| d.sync_all()).is_err() {
                    break;
                }
            }
        }
        let root = root.canonicalize().map_err(fail)?;
        Ok(Arc::new(Self {
            root,
            directories: Mutex::default(),
            read_only: false,
            unreadable: Arc::default(),
        }))
    }

    /// Opens a data directory for reading: nothing in it is created, written, moved or removed. It may
    /// therefore belong to another user, or be on a read-only mount.
    ///
    /// # Errors
    /// If it does not exist, or is not a directory.
    pub fn open_read_only(root: &Path) -> Result<Arc<Self>, OpenError> {
        let fail = |source| OpenError::Io {
            action: format!("opening the data directory {}", root.display()),
            source,
        };
        let root = root.canonicalize().map_err(fail)?;
        if !root.is_dir() {
            return Err(fail(io::ErrorKind::NotADirectory.into()));
        }
        Ok(Arc::new(Self {
            root,
            directories: Mutex::default(),
            read_only: true,
            unreadable: Arc::default(),
        }))
    }

    /// Refuses changes if the directory was opened for reading.
    fn writable(&self) -> io::Result<()> {
        match self.read_only {
            true => Err(io::ErrorKind::ReadOnlyFilesystem.into()),
            false => Ok(()),
        }
    }

    fn real_file(&self, file: File, path: &str) -> Arc<dyn DiskFile> {
        Arc::new(RealFile {
            file,
            root: self.root.clone(),
            path: path.to_owned(),
            unreadable: Arc::clone(&self.unreadable),
        })
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// Opens the directory of a path. Returns it with the name in it.
    fn split<'a>(&self, path: &'a str) -> io::Result<(Arc<OwnedFd>, &'a str)> {
        let (directory, name) = path.rsplit_once('/').unwrap_or(("", path));
        Ok((self.directory(directory)?, name))
    }

    /// Returns a directory, opened once: for finding files in it, not for listing them.
    fn directory(&self, path: &str) -> io::Result<Arc<OwnedFd>> {
        if let Some(open) = self.directories.lock().get(path) {
            return Ok(Arc::clone(open));
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = match path {
            "" => retry_on_intr(|| rustix::fs::open(&self.root, flags, DIRECTORY.into()))?,
            _ => self.open_directory(path, flags)?,
        };
        let open = Arc::new(open);
        let mut directories = self.directories.lock();
        let open = directories.entry(path.to_owned()).or_insert(open);
        Ok(Arc::clone(open))
    }

    /// Opens a directory in the data directory. Anything else in its place is an error.
    fn open_directory(&self, path: &str, flags: OFlags) -> io::Result<OwnedFd> {
        let (parent, name) = self.split(path)?;
        let flags = flags | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match retry_on_intr(|| openat(&*parent, name, flags, DIRECTORY.into())) {
            Err(Errno::NOTDIR | Errno::LOOP) => Err(self.odd(path, WrongKind::NotADirectory)),
            opened => Ok(opened?),
        }
    }

    /// Opens a directory to list or flush it.
    fn open_to_list(&self, path: &str) -> io::Result<OwnedFd> {
        match path {
            "" => Ok(File::open(&self.root)?.into()),
            _ => self.open_directory(path, OFlags::RDONLY),
        }
    }

    /// Opens a regular file. Anything else in its place is an error.
    fn open_file(&self, path: &str, flags: OFlags) -> io::Result<File> {
        let (directory, name) = self.split(path)?;
        let open = || openat(&*directory, name, flags | NO_SURPRISE, FILE.into());
        let opened = retry_on_intr(open);
        let file: File = match opened {
            Ok(opened) => opened.into(),
            // A link, a directory or a socket.
            Err(Errno::LOOP | Errno::ISDIR | Errno::NXIO) => {
                return Err(self.odd(path, WrongKind::NotAFile));
            }
            Err(Errno::EXIST) => {
                return Err(match self.file_type(path)? {
                    Some(FileType::RegularFile) | None => Errno::EXIST.into(),
                    Some(_) => self.odd(path, WrongKind::NotAFile),
                });
            }
            Err(error) => return Err(error.into()),
        };
        let found = file.metadata()?;
        if !found.is_file() {
            return Err(self.odd(path, WrongKind::NotAFile));
        }
        if flags.contains(OFlags::CREATE) {
            close_file(&file, &found)?;
        }
        Ok(file)
    }

    /// Returns the type of the file at a path; `None` if there is none.
    fn file_type(&self, path: &str) -> io::Result<Option<FileType>> {
        let (directory, name) = self.split(path)?;
        match statat(&*directory, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(found) => Ok(Some(FileType::from_raw_mode(found.st_mode))),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The error for something else in the place of a file or directory of the store.
    fn odd(&self, path: &str, odd: WrongKind) -> io::Error {
        let found = self.file_type(path).ok().flatten();
        odd.error(&self.path(path), found)
    }
}

/// Returns the holder that a lock file names.
fn holder_in(file: &File) -> String {
    let mut text = [0; 256];
    let length = file.read_at(&mut text, 0).unwrap_or(0);
    String::from_utf8_lossy(&text[..length]).trim().to_owned()
}

struct HeldLock {
    file: File,
}

impl DiskLock for HeldLock {
    fn identity(&self) -> io::Result<FileIdentity> {
        Ok(identity_of(&self.file.metadata()?))
    }
}

fn identity_of(file: &fs::Metadata) -> FileIdentity {
    FileIdentity {
        device: file.dev(),
        inode: file.ino(),
    }
}

impl Disk for RealDisk {
    fn location(&self) -> String {
        self.root.display().to_string()
    }

    fn lock(&self, path: &str, holder: &str) -> io::Result<Result<Box<dyn DiskLock>, String>> {
        self.writable()?;
        let make = OFlags::CREATE | OFlags::EXCL;
        // An existing lock file keeps its mode.
        let file = match self.open_file(path, OFlags::RDWR) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                match self.open_file(path, OFlags::RDWR | make) {
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                        self.open_file(path, OFlags::RDWR)?
                    }
                    made => made?,
                }
            }
            opened => opened?,
        };
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(Err(holder_in(&file))),
            Err(error) => return Err(error.into()),
        }
        // Overwritten in place: a full disk has no other block for it. A full copy-on-write disk has no
        // block at all, and then the lock holds without its text.
        let written = file.write_all_at(holder.as_bytes(), 0);
        if let Err(error) = written.and_then(|()| file.set_len(holder.len() as u64)) {
            tracing::warn!(
                file = path,
                %error,
                "cannot write the holder of the lock; the lock holds, and names an earlier holder"
            );
        }
        Ok(Ok(Box::new(HeldLock { file })))
    }

    fn lock_shared(&self, path: &str) -> io::Result<Result<Option<Box<dyn DiskLock>>, String>> {
        let file = match self.open_file(path, OFlags::RDONLY) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Ok(None)),
            Err(error) => return Err(error),
        };
        match flock(&file, FlockOperation::NonBlockingLockShared) {
            Ok(()) => Ok(Ok(Some(Box::new(HeldLock { file })))),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(Err(holder_in(&file))),
            Err(error) => Err(error.into()),
        }
    }

    fn create_directory(&self, path: &str) -> io::Result<()> {
        self.writable()?;
        let (parent, name) = self.split(path)?;
        match mkdirat(&*parent, name, DIRECTORY.into()) {
            Ok(()) => close_directory(&*parent, name),
            Err(Errno::EXIST) => self.open_directory(path, OFlags::PATH).map(drop),
            Err(error) => Err(error.into()),
        }
    }

    fn visit(&self, directory: &str, each: &mut dyn FnMut(&str)) -> io::Result<()> {
        // No memory is allocated for a name: there may be very many.
        let opened = self.open_to_list(directory)?;
        let within = |name: &str| match directory {
            "" => name.to_owned(),
            _ => format!("{directory}/{name}"),
        };
        let mut buffer = Vec::with_capacity(NAMES_BYTES);
        let mut entries = RawDir::new(opened, buffer.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            let entry = entry?;
            let Ok(name) = entry.file_name().to_str() else {
                continue;
            };
            let found = match entry.file_type() {
                // Some file systems do not report the type here.
                FileType::Unknown => self.file_type(&within(name))?,
                told => Some(told),
            };
            match found {
                Some(FileType::RegularFile) => each(name),
                Some(found) => {
                    if let Some(odd) = WrongKind::of(directory, name, found) {
                        return Err(odd.error(&self.path(&within(name)), Some(found)));
                    }
                }
                // The file is gone.
                None => {}
            }
        }
        Ok(())
    }

    fn create(&self, path: &str) -> io::Result<Arc<dyn DiskFile>> {
        self.writable()?;
        let file = self.open_file(path, OFlags::RDWR | OFlags::CREATE | OFlags::EXCL)?;
        Ok(self.real_file(file, path))
    }

    fn open(&self, path: &str) -> io::Result<Arc<dyn DiskFile>> {
        let flags = match self.read_only {
            true => OFlags::RDONLY,
            false => OFlags::RDWR,
        };
        Ok(self.real_file(self.open_file(path, flags)?, path))
    }

    fn unreadable(&self) -> &Unreadable {
        &self.unreadable
    }

    fn read_direct(&self, path: &str, from: u64, bytes: u64) -> io::Result<Option<Bytes>> {
        let file = match self.open_file(path, OFlags::RDONLY | OFlags::DIRECT) {
            Ok(file) => file,
            // The error of file systems without direct reads.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Ok(None),
            Err(error) => return Err(error),
        };
        // Address, offset and length must be multiples of the device's block.
        let skip = usize::try_from(from % DIRECT_ALIGN as u64).map_err(io::Error::other)?;
        let from = from - skip as u64;
        let rest = file.metadata()?.len().saturating_sub(from);
        let length = usize::try_from(rest.min(bytes.saturating_add(skip as u64)))
            .map_err(io::Error::other)?;
        let room = length.next_multiple_of(DIRECT_ALIGN);
        let mut buffer = vec![0; room + DIRECT_ALIGN];
        let start = buffer.as_ptr().align_offset(DIRECT_ALIGN);
        let mut filled = 0;
        while filled < length {
            let rest = &mut buffer[start + filled..start + room];
            match file.read_at(rest, from + filled as u64) {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Ok(None),
                Err(error) => return Err(error),
            }
            if !filled.is_multiple_of(DIRECT_ALIGN) {
                // The end of the file: no aligned bytes are left.
                break;
            }
        }
        let found = start + skip.min(filled)..start + filled.min(length);
        Ok(Some(Bytes::from(buffer).slice(found)))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.writable()?;
        self.unreadable.forget(from);
        self.unreadable.forget(to);
        let ((from, old), (to, new)) = (self.split(from)?, self.split(to)?);
        Ok(renameat(&*from, old, &*to, new)?)
    }

    fn remove(&self, path: &str) -> io::Result<()> {
        self.writable()?;
        self.unreadable.forget(path);
        let (directory, name) = self.split(path)?;
        Ok(unlinkat(&*directory, name, AtFlags::empty())?)
    }

    fn sync_directory(&self, directory: &str) -> io::Result<()> {
        File::from(self.open_to_list(directory)?).sync_all()
    }

    fn free_bytes(&self) -> io::Result<Option<u64>> {
        let stat = fstatvfs(File::open(&self.root)?)?;
        Ok(Some(stat.f_bavail.saturating_mul(stat.f_frsize)))
    }

    fn identity(&self, path: &str) -> io::Result<FileIdentity> {
        fs::symlink_metadata(self.path(path)).map(|found| identity_of(&found))
    }

    fn file_system(&self) -> FileSystem {
        let magic = statfs(&self.root).map_or(0, |s| s.f_type as u64);
        let (name, volatile, caveat) = known_file_system(magic);
        let caveat = caveat.filter(|_| magic != BTRFS || !self.overwrites_in_place());
        FileSystem {
            name: name.to_owned(),
            volatile,
            caveats: caveat
                .map(|caveat| format!("the data directory is on {name}: {caveat}"))
                .into_iter()
                .collect(),
        }
    }
}

impl RealDisk {
    /// Whether copy-on-write is switched off for new files in the data directory (`chattr +C`).
    fn overwrites_in_place(&self) -> bool {
        let flags = File::open(&self.root).map(rustix::fs::ioctl_getflags);
        matches!(flags, Ok(Ok(flags)) if flags.contains(IFlags::NOCOW))
    }
}

/// Magic number of btrfs in Linux.
const BTRFS: u64 = 0x9123_683E;

/// Returns the name of a file system, whether a reboot empties it, and its caveat, by the number that
/// `statfs` reports.
fn known_file_system(magic: u64) -> (&'static str, bool, Option<&'static str>) {
    match magic {
        0xEF53 => ("ext4", false, None),
        0x5846_5342 => ("xfs", false, None),
        0xF2F5_2010 => ("f2fs", false, None),
        BTRFS => (
            "btrfs",
            false,
            Some(
                "it copies on write, so each overwrite needs new space. On a full volume appends are refused although segments are allocated, trims and deletions may be refused too, and the journal may fail until there is space; keep some free, or turn copies off while the data directory is empty (chattr +C)",
            ),
        ),
        0x2FC1_2FC1 | 0xCA45_1A4E => (
            if magic == 0x2FC1_2FC1 {
                "zfs"
            } else {
                "bcachefs"
            },
            false,
            Some(
                "it copies on write, so each overwrite needs new space. On a full volume appends are refused although segments are allocated, trims and deletions may be refused too, and the journal may fail until there is space; keep some free",
            ),
        ),
        0x0102_1994 => (
            "tmpfs",
            true,
            Some("it lives in memory: a reboot or power cut takes everything, flushed or not"),
        ),
        0x8584_58F6 => (
            "ramfs",
            true,
            Some("it lives in memory: nothing survives a reboot"),
        ),
        0x794C_7630 => (
            "overlay",
            false,
            Some("a container's own layer goes away with the container; mount a volume"),
        ),
        0x6969 | 0xFF53_4D42 | 0xFE53_4D42 | 0x517B | 0x0102_1997 | 0x00C3_6400 => (
            "network",
            false,
            Some(
                "what a flush means there, and whether locks hold, is up to the server; an error of the server may look like a bad sector",
            ),
        ),
        0x6573_5546 => (
            "fuse",
            false,
            Some("what a flush means there is up to the driver"),
        ),
        0x4D44 | 0x2011_BAB0 => (
            "fat",
            false,
            Some(
                "it has no journal: a power cut may lose files and names that were flushed; use ext4 or xfs",
            ),
        ),
        _ => ("unknown", false, None),
    }
}

struct RealFile {
    file: File,
    root: PathBuf,
    /// The path by which the file was opened. It may have been renamed since.
    path: String,
    unreadable: Arc<Unreadable>,
}

impl RealFile {
    /// Current path of the file below the data directory, if the system reports one.
    fn path_now(&self) -> String {
        let descriptor = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let found = fs::read_link(descriptor).ok();
        let within = found
            .as_deref()
            .and_then(|path| path.strip_prefix(&self.root).ok());
        let path = within.and_then(Path::to_str);
        path.unwrap_or(&self.path).to_owned()
    }
}

impl DiskFile for RealFile {
    fn identity(&self) -> io::Result<FileIdentity> {
        Ok(identity_of(&self.file.metadata()?))
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(buffer, offset)
    }

    fn note_unreadable(&self, bytes: Range<u64>) {
        self.unreadable.note(&self.path_now(), bytes);
    }

    #[cfg(target_os = "linux")]
    fn read_cached_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let into = &mut [io::IoSliceMut::new(buffer)];
        let read = rustix::io::preadv2(&self.file, into, offset, ReadWriteFlags::NOWAIT);
        // Some file systems do not support it (`EOPNOTSUPP`).
        read.map_err(|_| io::ErrorKind::WouldBlock.into())
    }

    fn will_read(&self, offset: u64, bytes: u64) {
        let _ = rustix::fs::fadvise(
            &self.file,
            offset,
            NonZeroU64::new(bytes),
            rustix::fs::Advice::WillNeed,
        );
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        self.file.write_at(bytes, offset)
    }

    fn write_behind(&self, offset: u64, bytes: u64) -> io::Result<()> {
        super::behind::write_behind(&self.file, offset, bytes)
    }

    fn set_size(&self, bytes: u64) -> io::Result<()> {
        self.file.set_len(bytes)
    }

    fn map(&self) -> io::Result<Option<Box<dyn DiskMap>>> {
        match super::map::map(&self.file) {
            Ok(map) => Ok(Some(Box::new(map))),
            Err(error) if error.raw_os_error() == Some(Errno::FAULT.raw_os_error()) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}
