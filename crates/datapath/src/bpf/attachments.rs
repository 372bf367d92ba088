//! Comparison of the attached programs with those that the agent has attached.
//!
//! A link says which program it runs and on which cgroup it is. Others with the same rights can detach a link, put
//! another program behind it or remove its pin, and a cgroup that is removed takes its links with it.

use std::{fmt, io, os::fd::AsFd, path::Path};

use super::{
    cgroups::cgroup_id,
    pins::PinDir,
    program::Program,
    syscalls::{link_cgroup, obj_get, obj_get_if_any},
    tracing::{self, is_tracing, replaced_program},
};

/// Programs as they were attached.
#[derive(Clone, Debug)]
pub struct Attachments {
    pins: PinDir,
    cgroup_id: u64,
    program_ids: [u32; Program::ALL.len()],
}

/// Difference between a program and its record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The program.
    pub program: Program,
    /// The state of its link.
    pub state: LinkState,
}

/// State of a link that is not as it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkState {
    /// It has no pin, so the kernel detaches it as soon as nobody has it open.
    Unpinned,
    /// It was detached, or its cgroup is gone.
    Detached,
    /// It is on the cgroup with this id.
    Elsewhere(u64),
    /// It runs the program with this id.
    Replaced(u32),
    /// It could not be read.
    Unreadable(String),
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let link = self.program.link;
        match &self.state {
            LinkState::Unpinned => write!(f, "{link}: its pin was removed"),
            LinkState::Detached => write!(f, "{link}: it was detached, or its cgroup is gone"),
            LinkState::Elsewhere(id) => write!(f, "{link}: it is on another cgroup, with id {id}"),
            LinkState::Replaced(id) => write!(f, "{link}: program {id} was put in its place"),
            LinkState::Unreadable(error) => write!(f, "{link}: {error}"),
        }
    }
}

impl Attachments {
    /// Records the programs that are attached to `cgroup` now.
    ///
    /// # Errors
    /// A link cannot be read, or the cgroup is gone.
    pub fn record(pins: &PinDir, cgroup: &Path) -> io::Result<Self> {
        let cgroup_id = cgroup_id(cgroup)?;
        let mut program_ids = [0; Program::ALL.len()];
        for (id, program) in program_ids.iter_mut().zip(Program::ALL) {
            *id = own_program(pins, program)?;
        }
        Ok(Self { pins: pins.clone(), cgroup_id, program_ids })
    }

    /// Inode number of the cgroup's directory.
    #[must_use]
    pub fn cgroup_id(&self) -> u64 {
        self.cgroup_id
    }

    /// Programs that are not attached as they were.
    #[must_use]
    pub fn differences(&self) -> Vec<Difference> {
        let programs = Program::ALL.into_iter().zip(self.program_ids);
        let difference = |(program, id)| self.state(program, id).map(|state| Difference { program, state });
        programs.filter_map(difference).collect()
    }

    /// Removes the pins of a tracer that was killed, if there are any. Call it when there is no difference.
    pub fn remove_trace_leftover(&self) {
        // It costs memory alone; the next look tries again.
        tracing::remove_leftover(&self.pins).ok();
    }

    fn state(&self, program: Program, program_id: u32) -> Option<LinkState> {
        let link = match obj_get_if_any(&self.pins.object(program.link)) {
            Ok(Some(link)) => link,
            Ok(None) => return Some(LinkState::Unpinned),
            Err(error) => return Some(LinkState::Unreadable(error.to_string())),
        };
        match link_cgroup(link.as_fd()) {
            Ok(link) if link.cgroup_id == 0 => Some(LinkState::Detached),
            Ok(link) if link.cgroup_id != self.cgroup_id => Some(LinkState::Elsewhere(link.cgroup_id)),
            Ok(link) if link.program_id == program_id => None,
            // The tracer puts the program back.
            Ok(link) if is_tracing(&self.pins, program, link.program_id) => None,
            Ok(link) => Some(LinkState::Replaced(link.program_id)),
            Err(error) => Some(LinkState::Unreadable(error.to_string())),
        }
    }
}

/// Id of the program that the agent has attached: that behind the link, or the one that a tracer has replaced.
fn own_program(pins: &PinDir, program: Program) -> io::Result<u32> {
    let link = obj_get(&pins.object(program.link), 0)?;
    loop {
        let id = link_cgroup(link.as_fd())?.program_id;
        if let Some(replaced) = replaced_program(pins, program, id) {
            return Ok(replaced);
        }
        // A tracer that ends puts the agent's program back before it removes the pin of its own.
        if link_cgroup(link.as_fd())?.program_id == id {
            return Ok(id);
        }
    }
}
