//! Maps of files.

#![allow(
    unsafe_code,
    reason = "mapping a file is unsafe, and is done here only"
)]

use std::fs::File;
use std::io;

use bytes::Bytes;
use memmap2::{Advice, Mmap};

use super::DiskMap;

/// A file that is mapped for reading.
pub(super) struct FileMap(Mmap);

/// Maps a whole file for reading, and reads its pages now, so that later accesses do not wait for the
/// disk.
///
/// # Errors
/// `EFAULT` if the device cannot read one of its pages.
pub(super) fn map(file: &File) -> io::Result<FileMap> {
    // SAFETY: the map is read only. Its file must not be changed while it is mapped, nor be cut where it
    // is read: the engine does not write to finished segments, cuts them only behind their frames
    // (`Sorter::give_ends_back`), and reads no further. The directory is locked against another engine,
    // and the bytes are copied and verified before use. `FileMap::read` reads the pages before it touches
    // them. Only a file that another program cuts, or a device that fails, between these two steps
    // raises SIGBUS; that is the documented price of this strategy.
    let map = FileMap(unsafe { Mmap::map(file)? });
    map.populate(0, map.0.len())?;
    Ok(map)
}

impl FileMap {
    /// Reads pages of the map into memory now.
    fn populate(&self, from: usize, length: usize) -> io::Result<()> {
        match self.0.advise_range(Advice::PopulateRead, from, length) {
            // Older kernels do not support it and read each page on first access.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
            advised => advised,
        }
    }
}

impl DiskMap for FileMap {
    fn read(&self, offset: u64, length: usize) -> io::Result<Bytes> {
        let from = usize::try_from(offset)
            .unwrap_or(usize::MAX)
            .min(self.0.len());
        let length = length.min(self.0.len() - from);
        if length > 0 {
            self.populate(from, length)?;
        }
        Ok(Bytes::copy_from_slice(&self.0[from..from + length]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::disallowed_methods, reason = "a file of a test")]
    fn a_lost_page_of_a_map_is_an_error_and_not_a_signal() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x");
        std::fs::write(&path, vec![7; 64 << 10]).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let map = map(&file).unwrap();
        assert_eq!(map.read(5000, 10_000).unwrap(), vec![7; 10_000]);
        assert_eq!(map.read(65_530, 100).unwrap(), [7; 6][..]);
        assert_eq!(map.read(1 << 40, 100).unwrap(), [][..]);
        file.set_len(8192).unwrap();
        assert_eq!(map.read(0, 8192).unwrap(), vec![7; 8192]);
        assert!(map.read(8000, 1000).is_err());
    }
}
