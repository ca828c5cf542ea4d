//! Memory that is free goes back to the system.
//!
//! The C library of most Linux systems keeps what was freed below what is still in use: after a
//! start, or a checkpoint of a million logs, that is a tenth of all that is resident (40 to 70
//! of 500 to 580 MiB were seen). Other C libraries give it back by themselves, or have no call
//! for it. And each thread has an arena of its own, with free memory of its own: after 20 minutes
//! of `.ci/soak.py` 20 of 130 MiB were in use.

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

/// Bytes of free memory that each thread's arena may keep at its end. Left alone, the C library
/// of most Linux systems raises that to twice the largest buffer that was ever freed.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const KEPT_BYTES: libc::c_int = 1 << 20;

/// Larger buffers are memory of their own, which goes when they are freed. Buffers of scans are
/// smaller: they would be mapped and unmapped for each message.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const LARGE_BYTES: libc::c_int = 4 << 20;

/// Keeps the C library of most Linux systems from holding on to much free memory. For a program's
/// begin: it is about the whole process.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[allow(unsafe_code, reason = "there is no safe way to call it")]
pub fn keep_little_free_memory() {
    // SAFETY: it takes no pointers. It says whether the values are in range, which they are.
    unsafe {
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT_BYTES);
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE_BYTES);
    }
}

/// Keeps the C library from holding on to much free memory: here it does not.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub fn keep_little_free_memory() {}

/// Gives memory that the process has freed back to the system, where its C library has to be
/// told. Whoever allocates meanwhile may wait for it.
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
