//! Counts the heap memory of each thread, for tests of memory that stays in use.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
}

/// Bytes that the current thread allocated, less the bytes that it freed.
pub(crate) fn held_bytes() -> isize {
    HELD.get()
}

fn count(bytes: isize) {
    HELD.set(HELD.get().wrapping_add(bytes));
}

struct CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[allow(unsafe_code, reason = "every allocator is unsafe")]
// SAFETY: each method passes its arguments to `System` unchanged, and returns the result of `System`.
// The counter has no destructor and takes no memory, so counting calls no allocator.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: the caller promises the same to this allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: the caller promises the same to this allocator.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(-layout.size().cast_signed());
        // SAFETY: `memory` came from `System`, with this layout.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count(bytes.cast_signed() - layout.size().cast_signed());
        // SAFETY: `memory` came from `System`, with this layout.
        unsafe { System.realloc(memory, layout, bytes) }
    }
}
