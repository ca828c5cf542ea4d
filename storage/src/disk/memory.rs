//! Returns free memory to the system.
//!
//! The C library of most Linux systems keeps memory that was freed below memory still in use: after a
//! start, or a checkpoint of a million logs, about a tenth of the resident memory (measured: 40 to 70
//! of 500 to 580 MiB). Other C libraries return it automatically, or have no call for it. Each thread
//! also has its own arena with its own free memory: after 20 minutes of `.ci/run bench/soak` 20 of 130 MiB
//! were in use.

/// Freed bytes from which a pass over all memory is worthwhile. The pass takes a few milliseconds.
const WORTH_IT: u64 = 16 << 20;

/// Returns free memory to the system after work that used and freed about `bytes` bytes. Not for
/// threads that a caller waits for.
pub(crate) fn give_back(bytes: u64) {
    if bytes >= WORTH_IT {
        give_back_memory();
    }
}

/// Bytes of free memory that each thread's arena may keep at its end. By default, the C library of most
/// Linux systems raises this to twice the largest buffer that was ever freed.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const KEPT_BYTES: libc::c_int = 1 << 20;

/// Larger buffers, in bytes, get their own memory, which is returned when they are freed. Buffers of
/// scans are smaller: otherwise each message would map and unmap memory.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const LARGE_BYTES: libc::c_int = 4 << 20;

/// Keeps the C library of most Linux systems from holding much free memory. Call it once at the start
/// of a program: it affects the whole process.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[allow(unsafe_code, reason = "there is no safe way to call it")]
pub fn keep_little_free_memory() {
    // SAFETY: the call takes no pointers. It fails only for values out of range.
    unsafe {
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT_BYTES);
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE_BYTES);
    }
}

/// Keeps the C library from holding much free memory. This system's library needs no call.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub fn keep_little_free_memory() {}

/// Returns memory that the process has freed to the system, if its C library needs a call for that.
/// Concurrent allocations may wait for it.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[allow(unsafe_code, reason = "there is no safe way to call it")]
pub fn give_back_memory() {
    // SAFETY: the call takes no pointers, and any thread may make it at any time. It takes the locks of
    // the allocator itself.
    let _ = unsafe { libc::malloc_trim(0) };
}

/// Returns memory that the process has freed to the system. This system needs no call.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub fn give_back_memory() {}
