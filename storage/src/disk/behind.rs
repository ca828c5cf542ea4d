//! What is written goes to the device while more is written.

use std::fs::File;
use std::io;

/// Has this stretch of a file written by the device now, and waits for what was asked before
/// about the `bytes` ahead of it: so no more than two stretches are under way at a time, and a
/// flush of another file waits for no more.
///
/// # Errors
/// Of the device. A flush later may not tell of them again: Linux tells each once.
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
        // SAFETY: it takes a descriptor that is open as long as the file is borrowed, and
        // numbers.
        let done = unsafe { libc::sync_file_range(file.as_raw_fd(), offset, bytes, flags) };
        if done == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            // Not every system has it; nothing was done then.
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
