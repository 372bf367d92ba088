//! Links of the policy's programs. They exist only while a policy isolates the pod, those of `connect()` for egress
//! alone. The one that looks sockets up also exists where addresses are received.

use std::{fs::File, os::fd::AsFd as _, path::Path};

use cproxy_policy::Directions;

use super::{
    directory::PolicyPins,
    error::PolicyError,
    program::{EGRESS, LOOKUP, SOCK_CREATE, policy_programs},
};
use crate::bpf::{
    linked::{LinkedError, LinkedProgram},
    pins::PinDir,
    receive::ReceivePins,
    syscalls::{lookup_programs, obj_get, program_id, program_name},
};

/// Hooks of a cgroup and of a network namespace.
#[derive(Debug)]
pub struct PolicyHooks {
    pins: PolicyPins,
    receive_pins: ReceivePins,
    cgroup: File,
    netns: File,
}

impl PolicyHooks {
    /// Opens the cgroup, and the network namespace at a path.
    ///
    /// # Errors
    /// One of them cannot be opened.
    pub fn open(pins: &PinDir, cgroup: &Path, netns: &Path) -> Result<Self, PolicyError> {
        let open = |path: &Path| File::open(path).map_err(|error| LinkedError::Io(path.to_owned(), error));
        let (cgroup, netns) = (open(cgroup)?, open(netns)?);
        Ok(Self { pins: PolicyPins::new(pins), receive_pins: ReceivePins::new(pins), cgroup, netns })
    }

    /// Attaches the programs of these directions that are not attached.
    ///
    /// # Errors
    /// The kernel refuses one.
    pub fn attach(&self, directions: Directions) -> Result<(), PolicyError> {
        programs(directions).try_for_each(|program| match self.pins.0.has_link(program)? {
            true => Ok(()),
            false => self.link(program),
        })
    }

    /// Whether all programs of these directions are attached.
    ///
    /// # Errors
    /// A link cannot be opened.
    pub fn are_attached(&self, directions: Directions) -> Result<bool, PolicyError> {
        for program in programs(directions) {
            if !self.pins.0.has_link(program)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Detaches the programs of all other directions. That which looks sockets up stays where addresses are received.
    ///
    /// # Errors
    /// A link cannot be used.
    pub fn detach_others(&self, directions: Directions) -> Result<(), PolicyError> {
        let receives = self.receive_pins.exist();
        let is_needed = |program: LinkedProgram| {
            receives && program == LOOKUP || programs(directions).any(|wanted| wanted == program)
        };
        let others = policy_programs().filter(|program| !is_needed(*program));
        Ok(others.into_iter().try_for_each(|program| self.pins.0.detach(program))?)
    }

    /// Attaches the programs of the socket address hooks anew, behind all that are attached. Call it when those that
    /// translate were attached again: they have to run first.
    ///
    /// # Errors
    /// The kernel refuses. The programs are then attached as before.
    pub fn attach_behind(&self) -> Result<(), PolicyError> {
        for program in EGRESS {
            if self.pins.0.has_link(program)? {
                self.link(program)?;
            }
        }
        Ok(())
    }

    fn link(&self, program: LinkedProgram) -> Result<(), PolicyError> {
        let target = if program == LOOKUP { &self.netns } else { &self.cgroup };
        Ok(self.pins.0.link(program, target.as_fd())?)
    }
}

/// Programs of others that look sockets up in the network namespace at a path, by name or id.
///
/// # Errors
/// The kernel does not say, or our own program cannot be opened.
pub fn other_lookup_programs(pins: &PolicyPins, netns: &Path) -> Result<Vec<String>, LinkedError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |error| LinkedError::Io(path, error)
    };
    let target = File::open(netns).map_err(failed(netns))?;
    let ids = lookup_programs(target.as_fd()).map_err(failed(netns))?;
    let own = pins.object(&LOOKUP.pin());
    let own = obj_get(&own, 0).and_then(|program| program_id(program.as_fd())).map_err(failed(&own))?;
    let name = |id: u32| program_name(id).map_or_else(|| format!("program {id}"), |name| format!("{name} ({id})"));
    Ok(ids.into_iter().filter(|id| *id != own).map(name).collect())
}

/// Programs that are needed to enforce directions.
fn programs(directions: Directions) -> impl Iterator<Item = LinkedProgram> {
    let any = directions.ingress || directions.egress;
    // Datagrams that the pod sends are noted for their replies where ingress is isolated.
    let senders = EGRESS
        .into_iter()
        .filter(move |program| directions.egress || directions.ingress && program.link.starts_with("sendmsg"));
    // Where egress alone is isolated, datagrams that come in are noted for their replies.
    senders.chain(any.then_some([SOCK_CREATE, LOOKUP]).into_iter().flatten())
}
