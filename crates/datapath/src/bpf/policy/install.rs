//! Loading of the policy's programs. They are pinned, and attached when a policy isolates the pod.

use std::{
    fs, io,
    os::fd::{AsFd, BorrowedFd},
    path::Path,
    thread,
};

use aya::{
    Ebpf,
    programs::{Program as Loadable, ProgramError},
    util::online_cpus,
};
use cproxy_ebpf::policy::{LRU_ELEMENTS_PER_CPU, POLICY_DENIALS_MIN, POLICY_REPLIES_MIN};

use super::{
    directory::PolicyPins,
    error::PolicyError,
    names::{DENIALS, MAPS, REPLIES},
    program::PolicyProgram,
};
use crate::bpf::{
    error::root_cause,
    load::{LoadError, load_object, loader},
    object::ProgramSet,
    pins::PinDir,
    probe::Features,
    signals::SignalsBlocked,
    syscalls::{link_update, obj_get_if_any, obj_pin, program_info},
};

/// Maps of the table that the programs use.
const OF_TABLE: [&str; 2] = ["OWN_ADDRESSES", "SOCKETS"];

/// CPUs for which the maps have room, at most.
const CPUS_MAX: u32 = 1_024;

/// Loads the policy's programs and pins them in the place of those that are there, also behind attached links. The
/// table's programs are installed. Returns each program's verified instruction count, 0 where the kernel does not tell.
///
/// # Errors
/// The kernel refuses. Programs that are attached stay.
pub fn install_policy(pins: &PinDir, features: Features) -> Result<Vec<(PolicyProgram, u32)>, PolicyError> {
    let _blocked = SignalsBlocked::new();
    let own = PolicyPins::new(pins);
    own.create()?;
    let mut loader = loader(features);
    for (name, path) in OF_TABLE.map(|name| (name, pins.object(name))) {
        loader.map_pin_path(name, path);
    }
    for (name, path) in MAPS.map(|name| (name, own.object(name))) {
        loader.map_pin_path(name, path);
    }
    for (name, entries) in [(REPLIES, POLICY_REPLIES_MIN), (DENIALS, POLICY_DENIALS_MIN)] {
        loader.map_max_entries(name, entries + cpus() * LRU_ELEMENTS_PER_CPU);
    }
    let mut object = load_object(&mut loader, ProgramSet::Policy)?;
    let counts = PolicyProgram::all().map(|program| Ok((program, load(&mut object, program)?)));
    let counts = counts.collect::<Result<Vec<_>, LoadError>>()?;
    for program in PolicyProgram::all() {
        replace(&own, program, fd(&mut object, program)?)?;
    }
    Ok(counts)
}

/// Number of CPUs on which the programs run, whatever part of them the agent may use.
fn cpus() -> u32 {
    let online = online_cpus().map(|cpus| cpus.len()).ok();
    let count = online.or_else(|| thread::available_parallelism().map(usize::from).ok());
    count.map_or(1, |count| u32::try_from(count).unwrap_or(u32::MAX).min(CPUS_MAX))
}

fn load(object: &mut Ebpf, program: PolicyProgram) -> Result<u32, LoadError> {
    let found = object.program_mut(program.name).ok_or(LoadError::Missing(program.name))?;
    let loaded = match found {
        Loadable::CgroupSockAddr(found) => found.load(),
        Loadable::CgroupSock(found) => found.load(),
        Loadable::SkLookup(found) => found.load(),
        _ => return Err(LoadError::Missing(program.name)),
    };
    loaded.map_err(|error| refused(program, &error))?;
    let info = fd(object, program).and_then(|fd| program_info(fd).map_err(|error| refused_io(program, &error)));
    info.map(|info| info.verified_insns)
}

fn fd(object: &mut Ebpf, program: PolicyProgram) -> Result<BorrowedFd<'_>, LoadError> {
    let found = object.program_mut(program.name).ok_or(LoadError::Missing(program.name))?;
    found.fd().map(AsFd::as_fd).map_err(|error| refused(program, &error))
}

fn refused(program: PolicyProgram, error: &ProgramError) -> LoadError {
    let (reason, verifier_log) = match error {
        ProgramError::LoadError { io_error, verifier_log } => (io_error.to_string(), verifier_log.to_string()),
        other => (root_cause(other), String::new()),
    };
    LoadError::Refused { program: program.name, reason, verifier_log }
}

fn refused_io(program: PolicyProgram, error: &io::Error) -> LoadError {
    LoadError::Refused { program: program.name, reason: error.to_string(), verifier_log: String::new() }
}

/// Pins a program in the place of another, and puts it behind its link, if there is one.
fn replace(pins: &PolicyPins, program: PolicyProgram, fd: BorrowedFd<'_>) -> Result<(), PolicyError> {
    let pin = pins.object(&program.pin());
    let temporary = pins.object(&format!("{}_new", program.pin()));
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |error| PolicyError::Io(path, error)
    };
    // A leftover of an attempt that was killed; mostly there is none.
    fs::remove_file(&temporary).ok();
    obj_pin(fd, &temporary).map_err(failed(&temporary))?;
    fs::rename(&temporary, &pin).map_err(failed(&pin))?;
    let path = pins.object(program.link);
    let Some(link) = obj_get_if_any(&path).map_err(failed(&path))? else { return Ok(()) };
    match link_update(link.as_fd(), fd) {
        // It was detached by others, or by an agent that was killed then. The agent attaches what its policy needs.
        Err(error) if error.raw_os_error() == Some(libc::ENOLINK) => fs::remove_file(&path).map_err(failed(&path)),
        updated => updated.map_err(|error| PolicyError::Attach(program.name, error)),
    }
}
