//! Lookups in pinned maps.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::Path,
};

use cproxy_datapath::bpf::syscalls::{bpf, bpf_cmd, no_arguments, obj_get};

use super::{fd_by_id, fdinfo, field};

/// A map whose values are not per CPU.
#[derive(Debug)]
pub struct Map {
    fd: OwnedFd,
    key_bytes: usize,
    value_bytes: usize,
    memory_bytes: u64,
}

impl Map {
    /// Opens a pinned map.
    ///
    /// # Errors
    /// There is no such map.
    pub fn open(pin: &Path) -> io::Result<Self> {
        Self::of(obj_get(pin, 0)?)
    }

    /// The inner map at the only index of a map of maps.
    ///
    /// # Errors
    /// There is none, or this is no map of maps.
    pub fn inner(&self) -> io::Result<Self> {
        self.inner_at(0)
    }

    /// The inner map at an index of an array of maps.
    ///
    /// # Errors
    /// There is none, or this is no array of maps.
    pub fn inner_at(&self, index: u32) -> io::Result<Self> {
        let id = u32::from_ne_bytes(self.get(&index.to_ne_bytes())?);
        Self::of(fd_by_id(bpf_cmd::BPF_MAP_GET_FD_BY_ID, id)?)
    }

    /// Memory as the kernel counts it, without that of inner maps.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// The value of a key.
    ///
    /// # Errors
    /// There is no such key, or the size of keys or values differs.
    pub fn get<const N: usize>(&self, key: &[u8]) -> io::Result<[u8; N]> {
        if (key.len(), N) != (self.key_bytes, self.value_bytes) {
            return Err(io::Error::other("the map has keys or values of another size"));
        }
        // The kernel writes `value_bytes` bytes, which is the same number.
        let mut value = [0; N];
        let mut attr = no_arguments();
        attr.__bindgen_anon_2.map_fd = self.fd.as_raw_fd() as u32;
        attr.__bindgen_anon_2.key = key.as_ptr() as u64;
        attr.__bindgen_anon_2.__bindgen_anon_1.value = value.as_mut_ptr() as u64;
        bpf(bpf_cmd::BPF_MAP_LOOKUP_ELEM, &mut attr)?;
        Ok(value)
    }

    fn of(fd: OwnedFd) -> io::Result<Self> {
        let text = fdinfo(fd.as_fd())?;
        let (key_bytes, value_bytes) = (field(&text, "key_size")? as usize, field(&text, "value_size")? as usize);
        let memory_bytes = field(&text, "memlock")?;
        Ok(Self { fd, key_bytes, value_bytes, memory_bytes })
    }
}
