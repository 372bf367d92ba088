//! Events of denials, which go to the ring buffer of a tracer.

use std::os::fd::{AsFd as _, BorrowedFd};

use super::{directory::PolicyPins, error::PolicyError, names::EVENTS};
use crate::bpf::{
    error::{TableError, root_cause},
    linked::LinkedError,
    open::{Access, open_map},
    pins::PinDir,
    syscalls::{remove_inner_map, set_inner_map},
};

/// Has the policy's programs write events to a ring buffer, or to none. Without a policy there is nothing to do.
pub(in crate::bpf) fn send_events(pins: &PinDir, ring: Option<BorrowedFd<'_>>) -> Result<(), PolicyError> {
    let own = PolicyPins::new(pins);
    let path = own.object(EVENTS);
    if !path.exists() {
        return Ok(());
    }
    let map = open_map(&path, Access::ReadWrite)
        .map_err(|error| TableError::Pin(path.clone(), std::io::Error::other(root_cause(&error))))?;
    let written = match ring {
        Some(ring) => set_inner_map(map.fd().as_fd(), 0, ring),
        None => remove_inner_map(map.fd().as_fd(), 0),
    };
    Ok(written.map_err(|error| LinkedError::Io(path, error))?)
}
