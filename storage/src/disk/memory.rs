//! Memory that is free goes back to the system.
//!
//! The C library of most Linux systems keeps what was freed below what is still in use: after a
//! start, or a checkpoint of a million logs, that is a tenth of all that is resident (40 to 70
//! of 500 to 580 MiB were seen). Other C libraries give it back by themselves, or have no call
//! for it.

/// As much as is used for something in passing is worth a look through all of memory, which
/// takes a few milliseconds.
const WORTH_IT: u64 = 16 << 20;

/// Something that took about so many bytes was done, and they are free again. Not for threads
/// that somebody waits for.
pub(crate) fn give_back(bytes: u64) {
    if bytes >= WORTH_IT {
        trim();
    }
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[allow(unsafe_code, reason = "there is no safe way to call it")]
fn trim() {
    // SAFETY: it takes no pointers, and may be called by any thread at any time; it takes the
    // locks of the allocator by itself.
    let _ = unsafe { libc::malloc_trim(0) };
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn trim() {}
