//! Links of the policy's programs. They exist only while a policy isolates the pod in their direction.

use std::{
    fs::{self, File},
    io,
    os::fd::{AsFd as _, BorrowedFd},
    path::Path,
};

use cproxy_policy::Directions;

use super::{directory::PolicyPins, error::PolicyError, program::PolicyProgram};
use crate::bpf::syscalls::{
    link_create, link_detach, link_info, lookup_programs, obj_get, obj_get_if_any, obj_pin, program_id, program_name,
};

/// Hooks of a cgroup and of a network namespace.
#[derive(Debug)]
pub struct PolicyHooks {
    pins: PolicyPins,
    cgroup: File,
    netns: File,
}

impl PolicyHooks {
    /// Opens the cgroup, and the network namespace at a path.
    ///
    /// # Errors
    /// One of them cannot be opened.
    pub fn open(pins: &PolicyPins, cgroup: &Path, netns: &Path) -> Result<Self, PolicyError> {
        let open = |path: &Path| File::open(path).map_err(|error| PolicyError::Io(path.to_owned(), error));
        Ok(Self { pins: pins.clone(), cgroup: open(cgroup)?, netns: open(netns)? })
    }

    /// Attaches the programs of these directions that are not attached.
    ///
    /// # Errors
    /// The kernel refuses one.
    pub fn attach(&self, directions: Directions) -> Result<(), PolicyError> {
        programs(directions).try_for_each(|program| self.attach_one(program))
    }

    /// Whether all programs of these directions are attached.
    ///
    /// # Errors
    /// A link cannot be opened.
    pub fn are_attached(&self, directions: Directions) -> Result<bool, PolicyError> {
        for program in programs(directions) {
            if !self.has_link(program)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Detaches the programs of all other directions.
    ///
    /// # Errors
    /// A link cannot be used.
    pub fn detach_others(&self, directions: Directions) -> Result<(), PolicyError> {
        let others = PolicyProgram::all().filter(|program| programs(directions).all(|wanted| wanted != *program));
        others.into_iter().try_for_each(|program| {
            let path = self.pins.object(program.link);
            let detached = obj_get_if_any(&path).and_then(|link| match link {
                Some(link) => link_detach(link.as_fd()).and_then(|()| fs::remove_file(&path)),
                None => Ok(()),
            });
            detached.map_err(|error| PolicyError::Io(path, error))
        })
    }

    /// Attaches the programs of the socket address hooks anew, behind all that are attached. Call it when those that
    /// translate were attached again: they have to run first.
    ///
    /// # Errors
    /// The kernel refuses. The programs are then attached as before.
    pub fn attach_behind(&self) -> Result<(), PolicyError> {
        for program in PolicyProgram::EGRESS {
            if self.has_link(program)? {
                self.link(program)?;
            }
        }
        Ok(())
    }

    fn attach_one(&self, program: PolicyProgram) -> Result<(), PolicyError> {
        if self.has_link(program)? { Ok(()) } else { self.link(program) }
    }

    /// Whether a link of the program is pinned and attached.
    fn has_link(&self, program: PolicyProgram) -> Result<bool, PolicyError> {
        let path = self.pins.object(program.link);
        let link = obj_get_if_any(&path).map_err(|error| PolicyError::Io(path, error))?;
        Ok(link.is_some_and(|link| is_attached(program, link.as_fd())))
    }

    /// Attaches a program and pins the link in the place of another, which goes.
    fn link(&self, program: PolicyProgram) -> Result<(), PolicyError> {
        let failed = |error| PolicyError::Attach(program.name, error);
        let target = if program == PolicyProgram::INGRESS { &self.netns } else { &self.cgroup };
        let loaded = self.pins.object(&program.pin());
        let loaded = obj_get(&loaded, 0).map_err(|error| PolicyError::Io(loaded, error))?;
        let link = link_create(loaded.as_fd(), target.as_fd(), program.hook as u32).map_err(failed)?;
        let (path, temporary) = (self.pins.object(program.link), self.pins.object(&format!("{}_new", program.link)));
        fs::remove_file(&temporary).ok();
        let pinned = obj_pin(link.as_fd(), &temporary).and_then(|()| fs::rename(&temporary, &path));
        pinned.map_err(|error| PolicyError::Io(path, error))
    }
}

/// Programs of others that look sockets up in the network namespace at a path, by name or id.
///
/// # Errors
/// The kernel does not say, or our own program cannot be opened.
pub fn other_lookup_programs(pins: &PolicyPins, netns: &Path) -> Result<Vec<String>, PolicyError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |error| PolicyError::Io(path, error)
    };
    let target = File::open(netns).map_err(failed(netns))?;
    let ids = lookup_programs(target.as_fd()).map_err(failed(netns))?;
    let own = pins.object(&PolicyProgram::INGRESS.pin());
    let own = obj_get(&own, 0).and_then(|program| program_id(program.as_fd())).map_err(failed(&own))?;
    let name = |id: u32| program_name(id).map_or_else(|| format!("program {id}"), |name| format!("{name} ({id})"));
    Ok(ids.into_iter().filter(|id| *id != own).map(name).collect())
}

/// Programs that are needed to enforce directions.
fn programs(directions: Directions) -> impl Iterator<Item = PolicyProgram> {
    let any = directions.ingress || directions.egress;
    // Datagrams that the pod sends are noted for their replies where ingress is isolated.
    let senders = PolicyProgram::EGRESS
        .into_iter()
        .filter(move |program| directions.egress || directions.ingress && program.link.starts_with("sendmsg"));
    // Where egress alone is isolated, datagrams that come in are noted for their replies.
    senders.chain(any.then_some([PolicyProgram::SOCK_CREATE, PolicyProgram::INGRESS]).into_iter().flatten())
}

/// Whether a link has a target: one whose cgroup or namespace has gone, or that was detached, has none.
fn is_attached(program: PolicyProgram, link: BorrowedFd<'_>) -> bool {
    let target = |link| -> io::Result<u64> {
        let target = link_info(link)?.__bindgen_anon_1;
        if program == PolicyProgram::INGRESS {
            // SAFETY: integers, which the kernel has written for a link on a network namespace.
            return Ok(unsafe { target.netns }.netns_ino.into());
        }
        // SAFETY: integers, which the kernel has written for a link on a cgroup.
        Ok(unsafe { target.cgroup }.cgroup_id)
    };
    target(link).is_ok_and(|target| target != 0)
}
