//! The allocator: what is free goes back to the kernel (docs/decisions/014).

/// From this size on an allocation has pages of its own; a text of some megabytes then leaves nothing behind.
#[cfg(target_env = "gnu")]
const MMAP_THRESHOLD_BYTES: libc::c_int = 64 << 10;
/// So much may be free at the heap's end.
#[cfg(target_env = "gnu")]
const TRIM_THRESHOLD_BYTES: libc::c_int = 64 << 10;
/// By so much more than it needs the heap grows.
#[cfg(target_env = "gnu")]
const TOP_PAD_BYTES: libc::c_int = 16 << 10;

/// Makes the allocator keep little for later. To be called while there is one thread.
pub fn keep_little() {
    #[cfg(target_env = "gnu")]
    for (parameter, value) in [
        (libc::M_ARENA_MAX, 1),
        (libc::M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES),
        (libc::M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES),
        (libc::M_TOP_PAD, TOP_PAD_BYTES),
    ] {
        // SAFETY: integers in, an integer out; a parameter that is not taken leaves everything as it is.
        unsafe { libc::mallopt(parameter, value) };
    }
}

/// Gives back the pages that have become free within the heap: after something large.
pub fn give_back() {
    // SAFETY: only pages without any allocation go.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0)
    };
}
