//! The real file system, through positional reads and writes and `fdatasync`.

#![allow(
    clippy::disallowed_methods,
    reason = "this is the one place that touches files"
)]

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use rustix::fs::{FileType, FlockOperation, OFlags, RawDir, flock, fstatvfs, statfs};
#[cfg(target_os = "linux")]
use rustix::io::ReadWriteFlags;

use super::{Disk, DiskFile, DiskLock, FileSystem};
use crate::error::OpenError;

/// Names of a directory are read so many bytes at a time: some thousand.
const NAMES_BYTES: usize = 64 << 10;

/// Enough for every block device in use.
const DIRECT_ALIGN: usize = 4096;

/// A data directory on a mounted file system.
#[derive(Debug)]
pub struct RealDisk {
    root: PathBuf,
    /// Nothing is ever written: files are opened for reading, whatever their rights.
    read_only: bool,
}

impl RealDisk {
    /// Opens a data directory; creates it, and makes its name durable, if it is not
    /// there.
    ///
    /// # Errors
    /// If it cannot be created or is not a directory.
    pub fn open(root: &Path) -> Result<Arc<Self>, OpenError> {
        let fail = |source| OpenError::Io {
            action: format!("opening the data directory {}", root.display()),
            source,
        };
        if !root.is_dir() {
            fs::create_dir_all(root).map_err(fail)?;
            let absolute = root.canonicalize().map_err(fail)?;
            for ancestor in absolute.ancestors().skip(1) {
                // Beyond the directories we may have made, lack of rights is no fault.
                if File::open(ancestor).and_then(|d| d.sync_all()).is_err() {
                    break;
                }
            }
        }
        let root = root.canonicalize().map_err(fail)?;
        Ok(Arc::new(Self {
            root,
            read_only: false,
        }))
    }

    /// Opens a data directory to look at it: nothing in it is made, written, moved or
    /// removed, so that it may be another user's, or on a read-only mount.
    ///
    /// # Errors
    /// If it is not there, or is not a directory.
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
            read_only: true,
        }))
    }

    /// Refuses what would change something, where nothing is to be changed.
    fn writable(&self) -> io::Result<()> {
        match self.read_only {
            true => Err(io::ErrorKind::ReadOnlyFilesystem.into()),
            false => Ok(()),
        }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }
}

struct HeldLock {
    _file: File,
}

impl DiskLock for HeldLock {}

impl Disk for RealDisk {
    fn location(&self) -> String {
        self.root.display().to_string()
    }

    fn lock(&self, path: &str, holder: &str) -> io::Result<Result<Box<dyn DiskLock>, String>> {
        self.writable()?;
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(self.path(path))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let mut text = String::new();
                file.read_to_string(&mut text)?;
                return Ok(Err(text.trim().to_owned()));
            }
            Err(error) => return Err(error.into()),
        }
        // In place: a full disk has no other block for it.
        file.write_all_at(holder.as_bytes(), 0)?;
        file.set_len(holder.len() as u64)?;
        Ok(Ok(Box::new(HeldLock { _file: file })))
    }

    fn lock_shared(&self, path: &str) -> io::Result<Result<Option<Box<dyn DiskLock>>, String>> {
        let mut file = match File::open(self.path(path)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Ok(None)),
            Err(error) => return Err(error),
        };
        match flock(&file, FlockOperation::NonBlockingLockShared) {
            Ok(()) => Ok(Ok(Some(Box::new(HeldLock { _file: file })))),
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let mut text = String::new();
                file.read_to_string(&mut text)?;
                Ok(Err(text.trim().to_owned()))
            }
            Err(error) => Err(error.into()),
        }
    }

    fn create_directory(&self, path: &str) -> io::Result<()> {
        self.writable()?;
        let path = self.path(path);
        match fs::create_dir(&path) {
            // What cannot be looked at is not said to be a file.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                if fs::metadata(&path)?.is_dir() {
                    return Ok(());
                }
                Err(error)
            }
            result => result,
        }
    }

    fn visit(&self, directory: &str, each: &mut dyn FnMut(&str)) -> io::Result<()> {
        // Nothing is allocated for a name: there may be very many.
        let path = self.path(directory);
        let opened = File::open(&path)?;
        let mut buffer = Vec::with_capacity(NAMES_BYTES);
        let mut entries = RawDir::new(opened, buffer.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            let entry = entry?;
            let Ok(name) = entry.file_name().to_str() else {
                continue;
            };
            let is_file = match entry.file_type() {
                FileType::RegularFile => true,
                // Some file systems do not say it here.
                FileType::Unknown => fs::symlink_metadata(path.join(name))?.is_file(),
                _ => false,
            };
            if is_file {
                each(name);
            }
        }
        Ok(())
    }

    fn create(&self, path: &str) -> io::Result<Arc<dyn DiskFile>> {
        self.writable()?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(self.path(path))?;
        Ok(Arc::new(RealFile(file)))
    }

    fn open(&self, path: &str) -> io::Result<Arc<dyn DiskFile>> {
        let file = OpenOptions::new()
            .read(true)
            .write(!self.read_only)
            .open(self.path(path))?;
        Ok(Arc::new(RealFile(file)))
    }

    fn read_from_device(&self, path: &str, bytes: u64) -> io::Result<Option<Bytes>> {
        self.read_range_from_device(path, 0, bytes)
    }

    fn read_range_from_device(
        &self,
        path: &str,
        from: u64,
        bytes: u64,
    ) -> io::Result<Option<Bytes>> {
        let direct = i32::try_from(OFlags::DIRECT.bits()).map_err(io::Error::other)?;
        let opened = OpenOptions::new()
            .read(true)
            .custom_flags(direct)
            .open(self.path(path));
        let file = match opened {
            Ok(file) => file,
            // What file systems say that do not have it.
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
                // The end of the file: nothing aligned is left.
                break;
            }
        }
        let found = start + skip.min(filled)..start + filled.min(length);
        Ok(Some(Bytes::from(buffer).slice(found)))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.writable()?;
        fs::rename(self.path(from), self.path(to))
    }

    fn remove(&self, path: &str) -> io::Result<()> {
        self.writable()?;
        fs::remove_file(self.path(path))
    }

    fn sync_directory(&self, directory: &str) -> io::Result<()> {
        File::open(self.path(directory))?.sync_all()
    }

    fn free_bytes(&self) -> io::Result<Option<u64>> {
        let stat = fstatvfs(File::open(&self.root)?)?;
        Ok(Some(stat.f_bavail.saturating_mul(stat.f_frsize)))
    }

    fn file_system(&self) -> FileSystem {
        let magic = statfs(&self.root).map_or(0, |s| s.f_type as u64);
        let (name, volatile, warning) = match magic {
            0xEF53 => ("ext4", false, None),
            0x5846_5342 => ("xfs", false, None),
            0x9123_683E => ("btrfs", false, None),
            0x2FC1_2FC1 => ("zfs", false, None),
            0xF2F5_2010 => ("f2fs", false, None),
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
                Some("what a flush means there, and whether locks hold, is up to the server"),
            ),
            0x6573_5546 => (
                "fuse",
                false,
                Some("what a flush means there is up to the driver"),
            ),
            _ => ("unknown", false, None),
        };
        FileSystem {
            name: name.to_owned(),
            volatile,
            warning: warning.map(|w| format!("the data directory is on {name}: {w}")),
        }
    }
}

struct RealFile(File);

impl DiskFile for RealFile {
    fn size(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.0.read_at(buffer, offset)
    }

    #[cfg(target_os = "linux")]
    fn read_cached_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let into = &mut [io::IoSliceMut::new(buffer)];
        let read = rustix::io::preadv2(&self.0, into, offset, ReadWriteFlags::NOWAIT);
        // Some file systems do not have it (`EOPNOTSUPP`).
        read.map_err(|_| io::ErrorKind::WouldBlock.into())
    }

    fn will_read(&self, offset: u64, bytes: u64) {
        let _ = rustix::fs::fadvise(
            &self.0,
            offset,
            NonZeroU64::new(bytes),
            rustix::fs::Advice::WillNeed,
        );
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        self.0.write_at(bytes, offset)
    }

    fn write_behind(&self, offset: u64, bytes: u64) -> io::Result<()> {
        super::behind::write_behind(&self.0, offset, bytes)
    }

    fn set_size(&self, bytes: u64) -> io::Result<()> {
        self.0.set_len(bytes)
    }

    fn map(&self) -> io::Result<Option<Bytes>> {
        super::map::map(&self.0).map(Some)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync_data()
    }
}
