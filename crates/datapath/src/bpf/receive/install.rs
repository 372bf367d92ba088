//! Loading and attaching of the programs for received addresses.

use std::{fs::File, os::fd::AsFd as _, path::Path};

use cproxy_ebpf::receive::RECEIVED_DATAGRAMS_MIN;
use cproxy_policy::Directions;

use super::{DATAGRAMS, MAPS, PROGRAMS, ReceivePins};
use crate::bpf::{
    error::TableError,
    linked::{LinkedError, LinkedProgram},
    load::{LoadError, load_object},
    object::ProgramSet,
    pins::PinDir,
    policy::{
        LOOKUP, PolicyError, PolicyHooks, PolicyPins, PolicyReader, install_policy, loader_of_policy, lru_entries,
    },
    probe::Features,
    signals::SignalsBlocked,
};

/// Constant in the programs.
const NETNS_COOKIE: &str = "NETNS_COOKIE";

/// Program that looks sockets up, in the place of that of policy.
const RECEIVING_LOOKUP: LinkedProgram = LinkedProgram { name: "cproxy_receive_in", ..LOOKUP };

/// Loads and attaches the programs for received addresses, in the place of those that are there, and the programs of
/// policy. The table's programs are installed. `netns_cookie` is that of the pod's network namespace, which is at the
/// path `netns`.
///
/// # Errors
/// The kernel refuses. What is attached stays.
pub fn install_receive(
    pins: &PinDir,
    features: Features,
    cgroup: &Path,
    netns: &Path,
    netns_cookie: u64,
) -> Result<(), PolicyError> {
    let _blocked = SignalsBlocked::new();
    install_policy(pins, features, false)?;
    let own = ReceivePins::new(pins);
    own.0.create()?;
    let mut loader = loader_of_policy(pins, features);
    for (name, path) in MAPS.map(|name| (name, own.object(name))) {
        loader.map_pin_path(name, path);
    }
    loader.map_max_entries(DATAGRAMS, lru_entries(RECEIVED_DATAGRAMS_MIN));
    loader.override_global(NETNS_COOKIE, &netns_cookie, true);
    let mut object = load_object(&mut loader, ProgramSet::Receive).map_err(LinkedError::Load)?;
    let programs = || PROGRAMS.into_iter().chain([RECEIVING_LOOKUP]);
    let loaded = programs().try_for_each(|program| program.load(&mut object).map(drop));
    loaded.map_err(LinkedError::Load)?;
    let policy = PolicyPins::new(pins);
    let open = |path: &Path| File::open(path).map_err(|error| LinkedError::Io(path.to_owned(), error));
    let (cgroup, netns) = (open(cgroup)?, open(netns)?);
    for program in programs() {
        let (pins, target) = if program == RECEIVING_LOOKUP { (&policy.0, &netns) } else { (&own.0, &cgroup) };
        let fd = program.fd(&mut object).map_err(|error: LoadError| LinkedError::Load(error))?;
        pins.replace(program, fd)?;
        if !pins.has_link(program)? {
            pins.link(program, target.as_fd())?;
        }
    }
    Ok(())
}

/// Whether all programs for received addresses are attached.
///
/// # Errors
/// A link cannot be opened.
pub fn is_receiving(pins: &PinDir) -> Result<bool, PolicyError> {
    let (own, policy) = (ReceivePins::new(pins), PolicyPins::new(pins));
    if !own.0.have(&MAPS, PROGRAMS.into_iter()) {
        return Ok(false);
    }
    for program in PROGRAMS {
        if !own.0.has_link(program)? {
            return Ok(false);
        }
    }
    Ok(policy.0.has_link(RECEIVING_LOOKUP)?)
}

/// Removes the programs for received addresses. A policy stays in force, with its own program; without one, its pins
/// go, too. `has_policy`: the programs of policy were loaded anew.
///
/// # Errors
/// A pin or link cannot be used.
pub fn forget_receive(pins: &PinDir, cgroup: &Path, netns: &Path, has_policy: bool) -> Result<(), PolicyError> {
    let own = ReceivePins::new(pins);
    own.remove().map_err(|error| LinkedError::Io(own.directory().to_owned(), error))?;
    let policy = PolicyPins::new(pins);
    let state = PolicyReader::new(policy.clone()).map(|reader| reader.state()).transpose()?;
    let directions = state.map(|state| state.directions).unwrap_or_default();
    if has_policy || directions != Directions::default() {
        return PolicyHooks::open(pins, cgroup, netns)?.detach_others(directions);
    }
    policy.remove().map_err(|error| TableError::Pin(policy.directory().to_owned(), error).into())
}
