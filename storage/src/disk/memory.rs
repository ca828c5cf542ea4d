//! Memory that is free goes back to the system.
//!
//! The C library of most Linux systems keeps what was freed below what is still in use: after a
//! start, or a checkpoint of a million logs, that is a tenth of all that is resident (40 to 70
//! of 500 to 580 MiB were seen). Other C libraries give it back by themselves, or have no call
//! for it. And each thread frees into an arena of its own: what a busy hour left in them is seven
//! times what is in use afterwards (20 of 130 MiB were, after 20 minutes of `.ci/soak.py`).

/// As much as is used for something in passing is worth a look through all of memory, which
/// takes a few milliseconds.
const WORTH_IT: u64 = 16 << 20;

/// Something that took about so many bytes was done, and they are free again. Not for threads
/// that somebody waits for.
pub(crate) fn give_back(bytes: u64) {
    if bytes >= WORTH_IT {
        give_back_memory();
    }
}

/// Gives memory that the process has freed back to the system, where its C library has to be
/// told. Takes milliseconds for each 10 MiB that go; whoever allocates may wait for as long.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[allow(unsafe_code, reason = "there is no safe way to call it")]
pub fn give_back_memory() {
    // SAFETY: it takes no pointers, and may be called by any thread at any time; it takes the
    // locks of the allocator by itself.
    let _ = unsafe { libc::malloc_trim(0) };
}

/// Gives memory that the process has freed back to the system: here it goes by itself.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub fn give_back_memory() {}
