//! Opening of pinned maps.

use std::path::Path;

use aya::{
    maps::{MapData, MapError, MapInfo},
    sys::SyscallError,
};
use aya_obj::generated::BPF_F_RDONLY;

use super::{error::TableError, syscalls::obj_get};

/// The use of a map that the kernel allows through its descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    ReadOnly,
    ReadWrite,
}

/// Opens a pinned map.
pub(super) fn open_map(path: &Path, access: Access) -> Result<MapData, MapError> {
    let flags = match access {
        Access::ReadOnly => BPF_F_RDONLY,
        Access::ReadWrite => 0,
    };
    let fd = obj_get(path, flags).map_err(|io_error| SyscallError { call: "BPF_OBJ_GET", io_error })?;
    MapData::from_fd(fd)
}

/// The map under a pin; `None` without a pin.
pub(super) fn pinned_map(path: &Path) -> Result<Option<MapInfo>, TableError> {
    match MapInfo::from_pin(path) {
        Ok(info) => Ok(Some(info)),
        Err(error) if path.exists() => Err(TableError::Open(path.to_owned(), error)),
        Err(_) => Ok(None),
    }
}
