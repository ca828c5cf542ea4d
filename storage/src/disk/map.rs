//! Maps of files.

#![allow(
    unsafe_code,
    reason = "mapping a file is unsafe, and is done here only"
)]

use std::fs::File;
use std::io;

use bytes::Bytes;
use memmap2::{Advice, Mmap};

/// Maps a whole file for reading, and has its pages read now, so that a later look at
/// them does not wait for the disk.
pub(super) fn map(file: &File) -> io::Result<Bytes> {
    // SAFETY: the map is read only. What it needs is that the file is not cut or
    // changed while it is mapped: finished segments are neither written nor cut by us,
    // the directory is locked against another engine, and the bytes are copied and
    // verified before use. Someone else who cuts the file all the same, or a device that
    // fails, raises SIGBUS; that is the documented price of this strategy.
    let map = unsafe { Mmap::map(file)? };
    match map.advise(Advice::PopulateRead) {
        Ok(()) => {}
        // Older kernels do not know it; pages come when they are looked at.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {}
        Err(error) => return Err(error),
    }
    Ok(Bytes::from_owner(map))
}
