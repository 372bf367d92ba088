//! Memory of array maps, shared with the kernel.

use std::{io, os::fd::AsFd, ptr::NonNull, sync::atomic::AtomicU64};

use aya::maps::MapData;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::error::TableError;

/// An array map's memory.
#[derive(Debug)]
pub(super) struct Mapping {
    address: NonNull<u8>,
    size_bytes: usize,
}

impl Mapping {
    /// Maps a map that is open for writing: the kernel maps none by a read-only descriptor, whose mappings are not
    /// shared (kernel/bpf/syscall.c, `bpf_map_mmap`).
    pub(super) fn new(map: &MapData, name: &'static str, size_bytes: usize) -> Result<Self, TableError> {
        let flags = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let address = unsafe { mmap(std::ptr::null_mut(), size_bytes, flags, MapFlags::SHARED, map.fd().as_fd(), 0) };
        let address = address.map_err(|error| TableError::Mmap(name, error.into()))?;
        let null = || TableError::Mmap(name, io::Error::other("mapped at address 0"));
        Ok(Self { address: NonNull::new(address.cast()).ok_or_else(null)?, size_bytes })
    }

    /// Copies what fits from the start of another mapping, into a map that is not in force yet.
    pub(super) fn copy_from(&self, other: &Self) {
        let size_bytes = self.size_bytes.min(other.size_bytes);
        // SAFETY: two mappings of at least this size; only the agent writes the other one, and no program sees this
        // one.
        unsafe { self.address.as_ptr().copy_from_nonoverlapping(other.address.as_ptr(), size_bytes) };
    }

    /// A pointer to an element, if it lies in the map.
    pub(super) fn element<T>(&self, index: usize, stride_bytes: usize) -> Option<*mut T> {
        let offset_bytes = index.checked_mul(stride_bytes)?;
        let end_bytes = offset_bytes.checked_add(size_of::<T>())?;
        // SAFETY: within the mapping, as checked.
        (end_bytes <= self.size_bytes).then(|| unsafe { self.address.as_ptr().add(offset_bytes).cast() })
    }

    /// All words.
    pub(super) fn words(&self) -> &[AtomicU64] {
        // SAFETY: the whole mapping, aligned to a page, alive as long as `self`; shared memory that both sides access
        // as 64-bit words.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr().cast(), self.size_bytes / size_of::<u64>()) }
    }

    /// The word at an offset that is a multiple of 8, if it lies in the map.
    pub(super) fn word(&self, offset_bytes: usize) -> Option<&AtomicU64> {
        let word = self.element::<u64>(offset_bytes / size_of::<u64>(), size_of::<u64>())?;
        // SAFETY: in range, aligned, alive as long as `self`; shared memory that both sides access as 64-bit words.
        Some(unsafe { AtomicU64::from_ptr(word) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping; every reference to it borrows `self`. A failure leaves it mapped, which is harmless.
        unsafe { munmap(self.address.as_ptr().cast(), self.size_bytes) }.ok();
    }
}

// SAFETY: the mapping is owned, and every access goes through atomics or volatile accesses under the owner's borrow.
unsafe impl Send for Mapping {}
