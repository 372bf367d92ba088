//! Allocator that counts what each thread allocates.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

thread_local! {
    /// Number of allocations of this thread.
    pub(crate) static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
    /// Bytes that this thread has allocated and not freed.
    pub(crate) static BYTES: Cell<usize> = const { Cell::new(0) };
    /// Highest value of `BYTES`.
    pub(crate) static PEAK_BYTES: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator with counters.
struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

// SAFETY: the system's allocator does everything.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        let bytes = BYTES.get().wrapping_add(layout.size());
        BYTES.set(bytes);
        // Freeing memory of another thread makes the count negative.
        PEAK_BYTES.set(PEAK_BYTES.get().cast_signed().max(bytes.cast_signed()).cast_unsigned());
        // SAFETY: as the caller says.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        BYTES.set(BYTES.get().wrapping_sub(layout.size()));
        // SAFETY: as the caller says.
        unsafe { System.dealloc(pointer, layout) }
    }
}
