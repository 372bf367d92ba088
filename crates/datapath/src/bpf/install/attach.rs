//! Attaching of a program in the place of the one that is attached, or beside those of others.

use std::{
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::Path,
};

use aya::programs::{CgroupAttachMode, links::FdLink};

use super::{
    error::{AttachError, InstallError},
    new_pins::NewPins,
};
use crate::bpf::{
    error::root_cause,
    load::LoadedProgram,
    pins::PinDir,
    program::Program,
    syscalls::{CgroupLink, link_update, obj_pin, pinned_link},
    takeover::links_to_update,
};

/// Outcome for a program's link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attached {
    /// Attached for the first time or again, or updated in place.
    Here,
    /// Attached in the place of a link that is on another cgroup.
    Moved,
}

/// Updates the program's pinned link if it is on this cgroup. Otherwise attaches the program, and pins the new link in
/// the place of any other.
pub(super) fn attach(
    mut loaded: LoadedProgram<'_>,
    program: Program,
    pins: &PinDir,
    cgroup: &Path,
    new_pins: &mut NewPins,
) -> Result<Attached, InstallError> {
    let failed = |error| InstallError::Attach(program.name, cgroup.to_owned(), error);
    let update = |link: &OwnedFd, loaded: &LoadedProgram<'_>| {
        link_update(link.as_fd(), loaded.fd()?).map_err(AttachError::Update)
    };
    let dir = File::open(cgroup).map_err(|error| InstallError::Io(cgroup.to_owned(), error))?;
    let pin = pins.object(program.link);
    // A link that cannot be read is not replaced: programs of both would run, and sockets would lose their names.
    let pinned = pinned_link(&pin).map_err(|error| InstallError::Io(pin.clone(), error))?;
    if let Some((on, link)) = &pinned
        && is_of(*on, &dir)
    {
        update(link, &loaded).map_err(failed)?;
        return Ok(Attached::Here);
    }
    if pinned.is_none()
        && let Some((_, link)) = older_link(pins, program)?.filter(|(on, _)| is_of(*on, &dir))
    {
        new_pins.stay = true;
        update(&link, &loaded).map_err(failed)?;
        obj_pin(link.as_fd(), &pin).map_err(|error| InstallError::Io(pin.clone(), error))?;
        return Ok(Attached::Here);
    }
    // Sockets of a detached link keep their places, and the hooks run for them again. The agent frees the places of
    // those that were closed meanwhile, as it does for MPTCP.
    let before = if pinned.is_none_or(|(on, _)| on.cgroup_id == 0) { Attached::Here } else { Attached::Moved };
    let link = attach_anew(&mut loaded, &dir).map_err(failed)?;
    pin_over(link, program, pins, new_pins)?;
    Ok(before)
}

/// The link of an older layout that is to be updated.
fn older_link(pins: &PinDir, program: Program) -> Result<Option<(CgroupLink, OwnedFd)>, InstallError> {
    for path in links_to_update(pins, program.link) {
        if let Some(link) = pinned_link(&path).map_err(|error| InstallError::Io(path, error))? {
            return Ok(Some(link));
        }
    }
    Ok(None)
}

/// Attaches the program beside those of others.
fn attach_anew(loaded: &mut LoadedProgram<'_>, cgroup: &File) -> Result<FdLink, AttachError> {
    let mode = CgroupAttachMode::Single;
    Ok(match loaded {
        LoadedProgram::Address(program) => {
            let id = program.attach(cgroup, mode)?;
            program.take_link(id)?.try_into()?
        }
        LoadedProgram::Socket(program) => {
            let id = program.attach(cgroup, mode)?;
            program.take_link(id)?.try_into()?
        }
    })
}

/// Whether the link is on this cgroup.
fn is_of(link: CgroupLink, cgroup: &File) -> bool {
    cgroup.metadata().is_ok_and(|cgroup| cgroup.ino() == link.cgroup_id)
}

/// Pins a link by a rename, which replaces a link on another cgroup, even one that is gone. bpffs takes no names
/// with dots (kernel/bpf/inode.c, `bpf_lookup`).
fn pin_over(link: FdLink, program: Program, pins: &PinDir, new_pins: &mut NewPins) -> Result<(), InstallError> {
    let (pin, temporary) = (pins.object(program.link), pins.object(&program.new_link()));
    let failed = |path: &Path, error: &dyn std::error::Error| {
        InstallError::Io(path.to_owned(), io::Error::other(root_cause(error)))
    };
    // A leftover of an attempt that was killed; mostly there is none.
    fs::remove_file(&temporary).ok();
    new_pins.add_if_missing(&pin);
    new_pins.add(&temporary);
    let pinned = link.pin(&temporary).map_err(|error| failed(&temporary, &error))?;
    fs::rename(&temporary, &pin).map_err(|error| failed(&pin, &error))?;
    drop(pinned);
    Ok(())
}
