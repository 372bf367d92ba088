//! `TCP_FULL`: the message of the programs that a TCP socket has found no place.

use std::os::fd::{AsRawFd, RawFd};

use aya::maps::{Map, MapData, MapError, RingBuf};

use super::{
    error::TableError,
    map_spec::TCP_FULL,
    open::{Access, open_map},
    pins::PinDir,
};

/// The message. The programs send no other one until it is read, so its reader decides when the next one may come.
pub struct TcpFull(RingBuf<MapData>);

impl TcpFull {
    /// Opens the pinned map.
    ///
    /// # Errors
    /// It is missing or may not be used.
    pub fn open(pins: &PinDir) -> Result<Self, TableError> {
        let path = pins.object(TCP_FULL);
        let failed = |error: MapError| TableError::Open(path.clone(), error);
        let map = open_map(&path, Access::ReadWrite).map_err(failed)?;
        RingBuf::try_from(Map::RingBuf(map)).map(Self).map_err(failed)
    }

    /// Takes the message, if there is one.
    pub fn take(&mut self) {
        while self.0.next().is_some() {}
    }
}

impl AsRawFd for TcpFull {
    /// Descriptor that can be read when there is a message.
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
