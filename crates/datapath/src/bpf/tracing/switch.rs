//! Switch of the links between the agent's programs and the tracing set.
//!
//! The agent's program of a link is pinned before it is replaced. So it can be put back by any later process, whenever
//! the tracer is killed.

use std::{
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
};

use super::{
    directory::{is_locked, path},
    error::TraceError,
};
use crate::bpf::{
    pins::PinDir,
    program::Program,
    syscalls::{link_cgroup, link_replace, obj_get, obj_get_if_any, obj_pin, program_by_id, program_id},
};

/// Program of the tracing set.
pub(super) struct Slot {
    pub(super) program: Program,
    pub(super) id: u32,
    pub(super) tracing: OwnedFd,
}

/// Pin of the agent's program that a tracing program has replaced.
fn replaced_path(pins: &PinDir, program: Program) -> PathBuf {
    path(pins, &format!("{}_replaced", program.link))
}

/// Puts the program behind its link, unless it is there.
pub(super) fn switch_in(pins: &PinDir, slot: &Slot) -> Result<(), TraceError> {
    let pin = pins.object(slot.program.link);
    let failed = |error| TraceError::Io(pin.clone(), error);
    let link = obj_get_if_any(&pin).map_err(failed)?.ok_or_else(|| TraceError::Removed(pin.clone()))?;
    let found = link_cgroup(link.as_fd()).map_err(failed)?.program_id;
    if found == slot.id {
        return Ok(());
    }
    let agents = program_by_id(found).map_err(failed)?;
    let replaced = replaced_path(pins, slot.program);
    let failed_there = |error| TraceError::Io(replaced.clone(), error);
    match fs::remove_file(&replaced) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed_there(error)),
        _ => {}
    }
    obj_pin(agents.as_fd(), &replaced).map_err(failed_there)?;
    match link_replace(link.as_fd(), agents.as_fd(), slot.tracing.as_fd()) {
        // An agent has just put another program there; the next call replaces that one.
        Err(_) if leads_elsewhere(&link, found) => Ok(()),
        result => result.map_err(failed),
    }
}

/// Puts the agent's program back, if the tracing program is behind its link.
pub(super) fn switch_out(pins: &PinDir, slot: &Slot) -> Result<(), TraceError> {
    put_back_one(pins, slot.program, slot.tracing.as_fd(), slot.id)
        .map_err(|error| TraceError::NotPutBack(pins.object(slot.program.link), error))
}

/// Puts the agent's programs back behind the links that a killed tracer has left. The directory is locked.
pub(super) fn put_back(pins: &PinDir) -> Result<(), TraceError> {
    Program::ALL.into_iter().try_for_each(|program| {
        let put_back = || {
            let Some(tracing) = obj_get_if_any(&path(pins, program.link))? else { return Ok(()) };
            put_back_one(pins, program, tracing.as_fd(), program_id(tracing.as_fd())?)
        };
        put_back().map_err(|error| TraceError::NotPutBack(pins.object(program.link), error))
    })
}

fn put_back_one(pins: &PinDir, program: Program, tracing: std::os::fd::BorrowedFd<'_>, id: u32) -> io::Result<()> {
    let Some(link) = obj_get_if_any(&pins.object(program.link))? else { return Ok(()) };
    if leads_elsewhere(&link, id) {
        return Ok(());
    }
    let replaced = obj_get(&replaced_path(pins, program), 0)?;
    match link_replace(link.as_fd(), tracing, replaced.as_fd()) {
        // An agent that has started meanwhile has put its own program there.
        Err(_) if leads_elsewhere(&link, id) => Ok(()),
        result => result,
    }
}

/// Whether the link is known to lead to another program than this one.
fn leads_elsewhere(link: &OwnedFd, id: u32) -> bool {
    link_cgroup(link.as_fd()).is_ok_and(|link| link.program_id != id)
}

/// Whether a program is behind its link because a process traces.
pub(in crate::bpf) fn is_tracing(pins: &PinDir, program: Program, id: u32) -> bool {
    pinned_id(path(pins, program.link)) == Some(id) && is_locked(pins)
}

/// Id of the agent's program in whose place a tracer has put this one; `None` if it is no tracer's.
pub(in crate::bpf) fn replaced_program(pins: &PinDir, program: Program, id: u32) -> Option<u32> {
    if pinned_id(path(pins, program.link)) == Some(id) { pinned_id(replaced_path(pins, program)) } else { None }
}

fn pinned_id(path: PathBuf) -> Option<u32> {
    program_id(obj_get(&path, 0).ok()?.as_fd()).ok()
}
