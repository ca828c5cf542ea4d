//! The seam below: the only calls by which the engine uses a file system.
//!
//! Two implementations have stood behind it from the first day: [`RealDisk`], and [`SimDisk`], whose
//! [`SimDisk::crash`] loses unflushed data. No other module touches a file. Paths are relative to the
//! data directory, written with `/`, and made of names that the engine chose: a path never contains a
//! log's name.

mod behind;
#[cfg(test)]
pub(crate) mod counted;
pub(crate) mod directory;
pub(crate) mod held_files;
pub(crate) mod known_bad;
mod map;
pub(crate) mod memory;
mod private;
mod real;
mod sim;
mod unreadable;

use std::io;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::api::error::HostShortage;
pub use memory::{give_back_memory, keep_little_free_memory};
pub use private::{Owner, Strangers, make_directories, owner, strangers};
pub use real::RealDisk;
pub use sim::{CallKind, CutPoint, DiskCall, Filter, Lie, SimDisk};
pub use unreadable::Unreadable;
pub(crate) use unreadable::{PIECE_BYTES, are_unreadable};

/// The file system under the data directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileSystem {
    /// Its name, for example `ext4`.
    pub name: String,
    /// Whether a reboot empties the file system (tmpfs and the like).
    pub volatile: bool,
    /// Caveats in sentences: promises that the file system does not keep, the effect of a full volume.
    pub caveats: Vec<String>,
}

/// Distinguishes a file from a later file of the same name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileIdentity {
    /// Number of the device.
    pub device: u64,
    /// Number of the file on the device.
    pub inode: u64,
}

/// An exclusive hold on a data directory. It is released when dropped, or when the process ends,
/// however it ends.
pub trait DiskLock: Send + Sync {
    /// Identity of the locked file. Stable until the lock is dropped.
    ///
    /// # Errors
    /// `Unsupported` on disks whose files have no identity.
    fn identity(&self) -> io::Result<FileIdentity> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// A directory tree on some device.
pub trait Disk: Send + Sync + 'static {
    /// Location of the directory tree, for messages.
    fn location(&self) -> String;

    /// Takes the exclusive lock at `path`, and writes `holder` into the file for others to read.
    /// `Ok(Err(text))`: another process holds the lock and wrote `text`.
    ///
    /// # Errors
    /// Errors of the system about the file, but not that another process holds the lock.
    fn lock(&self, path: &str, holder: &str) -> io::Result<Result<Box<dyn DiskLock>, String>>;

    /// Takes the lock at `path` together with other readers of the directory, without writing. No
    /// process can take it exclusively meanwhile. `Ok(Ok(None))`: the file does not exist, so no
    /// process holds it. `Ok(Err(text))`: a process holds it exclusively and wrote `text`.
    ///
    /// # Errors
    /// Errors of the system about the file, but not that another process holds the lock.
    fn lock_shared(&self, path: &str) -> io::Result<Result<Option<Box<dyn DiskLock>>, String>>;

    /// Creates a directory. An existing directory is no error.
    ///
    /// # Errors
    /// `NotFound` if its parent does not exist; `AlreadyExists` if a file has the name; other errors of the system.
    fn create_directory(&self, path: &str) -> io::Result<()>;

    /// Calls `each` with the names of the files directly in a directory, in no particular
    /// order.
    ///
    /// # Errors
    /// `NotFound` if the directory does not exist. After an error `each` may have got some names.
    fn visit(&self, directory: &str, each: &mut dyn FnMut(&str)) -> io::Result<()>;

    /// Returns the names of the files directly in a directory that holds few.
    ///
    /// # Errors
    /// `NotFound` if the directory does not exist.
    fn list(&self, directory: &str) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        self.visit(directory, &mut |name| names.push(name.to_owned()))?;
        Ok(names)
    }

    /// Creates a file for reading and writing.
    ///
    /// # Errors
    /// `AlreadyExists` if the file exists.
    fn create(&self, path: &str) -> io::Result<Arc<dyn DiskFile>>;

    /// Opens a file for reading and writing.
    ///
    /// # Errors
    /// `NotFound` if the file does not exist.
    fn open(&self, path: &str) -> io::Result<Arc<dyn DiskFile>>;

    /// Reads up to `bytes` of a file from `from` on, from the device and not from the page cache.
    /// Returns fewer only at the end of the file, and `None` if the cache cannot be bypassed.
    ///
    /// # Errors
    /// If any of the bytes are unreadable. Callers use [`Disk::read_range_from_device`].
    fn read_direct(&self, path: &str, from: u64, bytes: u64) -> io::Result<Option<Bytes>>;

    /// Reads up to `bytes` of a file from `from` on, from the device and not from the page cache.
    /// Returns fewer only at the end of the file. An unreadable stretch counts as bad bytes, and is
    /// recorded in [`Disk::unreadable`].
    ///
    /// # Errors
    /// Errors of the system, such as `NotFound`, but not that bytes are unreadable.
    fn read_range_from_device(
        &self,
        path: &str,
        from: u64,
        bytes: u64,
    ) -> io::Result<Option<Bytes>> {
        unreadable::read_device(self, path, from, bytes)
    }

    /// The stretches of files that the device could not read.
    fn unreadable(&self) -> &Unreadable;

    /// Moves a file, and replaces an existing file at `to`. Durable after [`Disk::sync_directory`] of
    /// both directories.
    ///
    /// # Errors
    /// `NotFound` if the file does not exist. Nothing was moved then.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file. Durable after [`Disk::sync_directory`].
    ///
    /// # Errors
    /// `NotFound` if the file does not exist.
    fn remove(&self, path: &str) -> io::Result<()>;

    /// Returns once every earlier creation, move and removal of a name in `directory` is durable. `""`
    /// is the data directory itself.
    ///
    /// # Errors
    /// Never retry, as for [`DiskFile::sync`].
    fn sync_directory(&self, directory: &str) -> io::Result<()>;

    /// Free bytes for this process; `None` if unknown.
    ///
    /// # Errors
    /// Errors of the system about the file system.
    fn free_bytes(&self) -> io::Result<Option<u64>>;

    /// Identity of the file that has this name now.
    ///
    /// # Errors
    /// `NotFound` if the file does not exist, `Unsupported` on disks whose files have no identity.
    fn identity(&self, _path: &str) -> io::Result<FileIdentity> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Describes the file system under the data directory.
    fn file_system(&self) -> FileSystem;

    /// Fills `bytes` with random bytes, for the salts and the id of a store. It is the engine's only
    /// source of randomness. A simulated disk replaces it, so that runs with the same seed are equal to
    /// the byte.
    ///
    /// # Errors
    /// If the system has no random bytes.
    fn draw(&self, bytes: &mut [u8]) -> io::Result<()> {
        getrandom::fill(bytes).map_err(io::Error::other)
    }
}

/// One open file.
pub trait DiskFile: Send + Sync {
    /// Size of the file in bytes.
    ///
    /// # Errors
    /// Errors of the system about the open file.
    fn size(&self) -> io::Result<u64>;

    /// Identity of the open file, even if it was renamed or deleted.
    ///
    /// # Errors
    /// `Unsupported` on disks whose files have no identity.
    fn identity(&self) -> io::Result<FileIdentity> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Reads some bytes at `offset` and returns their number: 0 at or beyond the end.
    ///
    /// # Errors
    /// If the first of the bytes are unreadable. Callers use [`DiskFile::read_full_at`].
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Records bytes that the device cannot read.
    fn note_unreadable(&self, _bytes: Range<u64>) {}

    /// Reads some bytes that are already in memory. Never waits for the device.
    ///
    /// # Errors
    /// `WouldBlock` if the first byte is not in memory, or if the disk cannot know.
    fn read_cached_at(&self, _buffer: &mut [u8], _offset: u64) -> io::Result<usize> {
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// Announces a read of these bytes. A hint that may have no effect.
    fn will_read(&self, _offset: u64, _bytes: u64) {}

    /// Writes some bytes at `offset` and returns their number, which may be lower than given.
    ///
    /// # Errors
    /// If the error reports a lack of space, no byte was written.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize>;

    /// Lets these written bytes go to the device now, so that a later flush blocks other callers for
    /// less time. The file still needs that flush.
    ///
    /// # Errors
    /// Errors of a flush: written bytes may be lost, and a later flush may not report that again.
    fn write_behind(&self, _offset: u64, _bytes: u64) -> io::Result<()> {
        Ok(())
    }

    /// Cuts or extends the file; an extension reads as zeros.
    ///
    /// # Errors
    /// `StorageFull` or `QuotaExceeded` if an extension has no space.
    fn set_size(&self, bytes: u64) -> io::Result<()>;

    /// Maps the file for reading. `None` if this disk has no maps, or cannot read all of it.
    ///
    /// # Errors
    /// Errors of the system about the mapping.
    fn map(&self) -> io::Result<Option<Box<dyn DiskMap>>> {
        Ok(None)
    }

    /// Returns once every earlier write to this file is durable, with the size needed to read the bytes
    /// back.
    ///
    /// # Errors
    /// Never retry. Linux marks failed pages clean. A second call can succeed although the data is
    /// lost (Rebello et al., "Can Applications Recover from fsync Failures?", USENIX ATC 2020). The
    /// caller must fail the journal.
    fn sync(&self) -> io::Result<()>;

    /// Writes all bytes, and continues after short writes.
    ///
    /// # Errors
    /// Errors of [`DiskFile::write_at`]. Some of the bytes may be written.
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.write_most_at(bytes, offset)
            .map_err(|(_, error)| error)
    }

    /// Writes all bytes, and continues after short writes.
    ///
    /// # Errors
    /// Errors of [`DiskFile::write_at`], with the number of bytes written before.
    fn write_most_at(&self, bytes: &[u8], offset: u64) -> Result<(), (usize, io::Error)> {
        let mut written = 0;
        while written < bytes.len() {
            match self.write_at(&bytes[written..], offset + written as u64) {
                Ok(0) => return Err((written, io::ErrorKind::WriteZero.into())),
                Ok(more) => written += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err((written, error)),
            }
        }
        Ok(())
    }

    /// Fills `buffer` from `offset` on, as far as the file goes, and returns the number of bytes.
    /// Unreadable stretches count as bad bytes, and are recorded in [`Disk::unreadable`].
    ///
    /// # Errors
    /// Errors of the system, but not that bytes are unreadable.
    fn read_full_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        unreadable::read_file(self, buffer, offset)
    }
}

/// A file that is mapped for reading.
pub trait DiskMap: Send + Sync {
    /// Copies up to `length` bytes from `offset` on; fewer only at the end of the map.
    ///
    /// # Errors
    /// If the device cannot read one of the pages. The file itself returns the other pages.
    fn read(&self, offset: u64, length: usize) -> io::Result<Bytes>;
}

/// Reads a whole file.
pub(crate) fn read_whole(disk: &dyn Disk, path: &str) -> io::Result<Vec<u8>> {
    let file = disk.open(path)?;
    let mut bytes = vec![0; usize::try_from(file.size()?).map_err(io::Error::other)?];
    let length = file.read_full_at(&mut bytes, 0)?;
    bytes.truncate(length);
    Ok(bytes)
}

/// Larger requests are compared with the size of the file first, in bytes.
const MUCH: u64 = 1 << 20;

/// Size of a buffer: at most the rest of the file, since a length read from disk may be wrong.
pub(crate) fn no_more_than_there_is(
    file: &dyn DiskFile,
    from: u64,
    bytes: u64,
) -> io::Result<usize> {
    let bytes = match bytes > MUCH {
        true => bytes.min(file.size()?.saturating_sub(from)),
        false => bytes,
    };
    usize::try_from(bytes).map_err(io::Error::other)
}

/// Reads up to `bytes` of a file from `from` on. Returns fewer only at the end of the file.
pub(crate) fn read_some(file: &dyn DiskFile, from: u64, bytes: u64) -> io::Result<Vec<u8>> {
    let mut found = vec![0; no_more_than_there_is(file, from, bytes)?];
    let length = file.read_full_at(&mut found, from)?;
    found.truncate(length);
    Ok(found)
}

/// Reads up to `bytes` of a file again, if possible from the device: an earlier read may have been
/// corrupted in memory. No byte counts as lost before this second read. Returns fewer bytes only at the
/// end of the file.
pub(crate) fn read_again(disk: &dyn Disk, path: &str, from: u64, bytes: u64) -> io::Result<Bytes> {
    match disk.read_range_from_device(path, from, bytes)? {
        Some(found) => Ok(found),
        None => Ok(read_some(&*disk.open(path)?, from, bytes)?.into()),
    }
}

/// Whether an error reports a lack of space, and not a failure of the device.
pub(crate) fn is_out_of_space(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
    )
}

/// Whether the process or the system has no file descriptor left (EMFILE, ENFILE). Only calls that open
/// a file or a directory fail this way, and such a call has changed nothing.
pub(crate) fn is_out_of_descriptors(error: &io::Error) -> bool {
    use rustix::io::Errno;
    [Errno::MFILE, Errno::NFILE]
        .map(|errno| Some(errno.raw_os_error()))
        .contains(&error.raw_os_error())
}

/// Whether the call may succeed later without a restart, because space or file descriptors ran out. No
/// earlier write is in doubt.
pub(crate) fn is_shortage(error: &io::Error) -> bool {
    shortage(error).is_some()
}

/// The shortage that an error reports, if it reports one.
pub(crate) fn shortage(error: &io::Error) -> Option<HostShortage> {
    match error {
        error if is_out_of_space(error) => Some(HostShortage::Space),
        error if is_out_of_descriptors(error) => Some(HostShortage::Descriptors),
        _ => None,
    }
}

/// Writes a file from parts under a temporary name and moves it to its place. Flushes the file, but not
/// the directory.
pub(crate) fn replace_file(
    disk: &dyn Disk,
    new: &str,
    path: &str,
    parts: &[&[u8]],
) -> io::Result<()> {
    write_new(disk, new, parts)?;
    disk.rename(new, path)
}

/// Writes a file from parts under its temporary name, and flushes it.
pub(crate) fn write_new(disk: &dyn Disk, new: &str, parts: &[&[u8]]) -> io::Result<()> {
    let file = create_anew(disk, new)?;
    let mut at = 0;
    let written = parts.iter().try_for_each(|part| {
        file.write_all_at(part, at)?;
        at += part.len() as u64;
        Ok(())
    });
    let written = written.and_then(|()| file.sync());
    if let Err(error) = written {
        // Half a file is useless. If this removal fails too, the next attempt removes it.
        let _gone = disk.remove(new);
        return Err(error);
    }
    Ok(())
}

/// Creates an empty file, in place of one that a crash left.
pub(crate) fn create_anew(disk: &dyn Disk, path: &str) -> io::Result<Arc<dyn DiskFile>> {
    match disk.create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            disk.remove(path)?;
            disk.create(path)
        }
        other => other,
    }
}
