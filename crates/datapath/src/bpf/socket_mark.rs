//! The mark on the agent's own sockets.

use std::{
    io,
    os::fd::AsFd,
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

use aya::maps::{Map, MapData, SkStorage};
use cproxy_ebpf::{SOCKET_UNTRANSLATED, SocketState};

use super::{
    error::TableError,
    open::{Access, open_map},
    pins::PinDir,
};

/// Marks sockets that are never translated: the agent's own, before they connect.
#[derive(Debug)]
pub struct SocketMark {
    pin: PathBuf,
    map: Mutex<Option<SkStorage<MapData, SocketState>>>,
}

impl SocketMark {
    /// By the pinned map; nothing is opened yet.
    #[must_use]
    pub fn new(pins: &PinDir) -> Self {
        Self { pin: pins.object("SOCKETS"), map: Mutex::default() }
    }

    /// Marks a socket. As long as there is no map, there are no programs that would translate what the socket does
    /// next, and it stays as it is: the agent may ask its API server while the programs are being installed.
    ///
    /// # Errors
    /// The map may not be used, or the kernel refused.
    pub fn mark(&self, socket: impl AsFd) -> io::Result<()> {
        let mut map = self.map.lock().unwrap_or_else(PoisonError::into_inner);
        if map.is_none() {
            *map = self.open().map_err(io::Error::other)?;
        }
        let Some(map) = &mut *map else { return Ok(()) };
        let state = SocketState { flags: SOCKET_UNTRANSLATED, ..SocketState::default() };
        map.insert(&socket.as_fd(), state, 0).map_err(io::Error::other)
    }

    fn open(&self) -> Result<Option<SkStorage<MapData, SocketState>>, TableError> {
        let error = |error| TableError::Open(self.pin.clone(), error);
        if !self.pin.exists() {
            return Ok(None);
        }
        let map = open_map(&self.pin, Access::ReadWrite).map_err(error)?;
        Ok(Some(SkStorage::try_from(Map::SkStorage(map)).map_err(error)?))
    }
}
