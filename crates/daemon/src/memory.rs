//! Settings of the allocator: free memory goes back to the kernel (docs/decisions/014).

/// Size from which an allocation has pages of its own, so that a text of some megabytes leaves nothing behind.
#[cfg(target_env = "gnu")]
const MMAP_THRESHOLD_BYTES: libc::c_int = 64 << 10;
/// Free memory that may stay at the heap's end.
#[cfg(target_env = "gnu")]
const TRIM_THRESHOLD_BYTES: libc::c_int = 64 << 10;
/// Spare memory that each growth of the heap adds.
#[cfg(target_env = "gnu")]
const TOP_PAD_BYTES: libc::c_int = 16 << 10;

/// Makes the allocator keep little spare memory. To be called while there is one thread.
pub fn limit_spare_memory() {
    #[cfg(target_env = "gnu")]
    for (parameter, value) in [
        (libc::M_ARENA_MAX, 1),
        (libc::M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES),
        (libc::M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES),
        (libc::M_TOP_PAD, TOP_PAD_BYTES),
    ] {
        // SAFETY: integers in, an integer out; a rejected parameter changes nothing.
        unsafe { libc::mallopt(parameter, value) };
    }
}

/// Returns the free pages within the heap to the kernel, after a large allocation was freed.
pub fn release_free_pages() {
    // SAFETY: only pages without any allocation go.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0)
    };
}
