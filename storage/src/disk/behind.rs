//! Writes bytes to the device while later bytes are still being written.

use std::fs::File;
use std::io;

/// Starts writing this stretch of a file to the device, and waits for the `bytes` before it. At most
/// two stretches are therefore under way, and a flush of another file waits for no more than these.
///
/// # Errors
/// Errors of the device. A later flush may not report them again: Linux reports each error once.
#[cfg(target_os = "linux")]
#[allow(
    unsafe_code,
    reason = "there is no safe way to call it; rustix has none"
)]
pub(super) fn write_behind(file: &File, offset: u64, bytes: u64) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let ask = |offset: u64, flags| {
        let offset = offset.try_into().map_err(io::Error::other)?;
        let bytes = bytes.try_into().map_err(io::Error::other)?;
        // SAFETY: the call takes only numbers and a descriptor, which stays open while the file is
        // borrowed.
        let done = unsafe { libc::sync_file_range(file.as_raw_fd(), offset, bytes, flags) };
        if done == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            // Not every system supports the call. An unsupported call does nothing.
            Some(libc::ENOSYS | libc::EINVAL | libc::EPERM) => Ok(()),
            _ => Err(error),
        }
    };
    ask(offset, libc::SYNC_FILE_RANGE_WRITE)?;
    match offset.checked_sub(bytes) {
        Some(before) => ask(before, libc::SYNC_FILE_RANGE_WAIT_BEFORE),
        None => Ok(()),
    }
}

#[cfg(not(target_os = "linux"))]
pub(super) fn write_behind(_file: &File, _offset: u64, _bytes: u64) -> io::Result<()> {
    Ok(())
}
