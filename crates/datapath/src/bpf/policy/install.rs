//! Loading of the policy's programs. They are pinned, and attached when a policy isolates the pod.

use std::thread;

use aya::{EbpfLoader, util::online_cpus};
use cproxy_ebpf::policy::{LRU_ELEMENTS_PER_CPU, POLICY_DENIALS_MIN, POLICY_REPLIES_MIN};

use super::{
    directory::PolicyPins,
    error::PolicyError,
    names::{DENIALS, MAPS, REPLIES},
    program::{LOOKUP, policy_programs},
};
use crate::bpf::{
    linked::{LinkedError, LinkedProgram},
    load::{LoadError, load_object, loader},
    object::ProgramSet,
    pins::PinDir,
    probe::Features,
    signals::SignalsBlocked,
};

/// Maps of the table that the programs use.
const OF_TABLE: [&str; 2] = ["OWN_ADDRESSES", "SOCKETS"];

/// CPUs for which the maps have room, at most.
const CPUS_MAX: u32 = 1_024;

/// Loads the policy's programs and pins them in the place of those that are there, also behind attached links. The
/// table's programs are installed. Returns each program's verified instruction count, 0 where the kernel does not tell.
///
/// The program that looks sockets up is left out where [`super::super::install_receive`] follows, which has one for
/// both.
///
/// # Errors
/// The kernel refuses. Programs that are attached stay.
pub fn install_policy(
    pins: &PinDir,
    features: Features,
    has_lookup: bool,
) -> Result<Vec<(LinkedProgram, u32)>, PolicyError> {
    let _blocked = SignalsBlocked::new();
    let own = PolicyPins::new(pins);
    own.0.create()?;
    let mut object =
        load_object(&mut loader_of_policy(pins, features), ProgramSet::Policy).map_err(LinkedError::Load)?;
    let programs = || policy_programs().filter(|program| has_lookup || *program != LOOKUP);
    let counts = programs().map(|program| Ok((program, program.load(&mut object)?)));
    let counts = counts.collect::<Result<Vec<_>, LoadError>>().map_err(LinkedError::Load)?;
    for program in programs() {
        own.0.replace(program, program.fd(&mut object).map_err(LinkedError::Load)?)?;
    }
    Ok(counts)
}

/// Loader of an object that uses the policy's maps, and those of the table.
pub(in crate::bpf) fn loader_of_policy(pins: &PinDir, features: Features) -> EbpfLoader<'static> {
    let own = PolicyPins::new(pins);
    let mut loader = loader(features);
    for (name, path) in OF_TABLE.map(|name| (name, pins.object(name))) {
        loader.map_pin_path(name, path);
    }
    for (name, path) in MAPS.map(|name| (name, own.object(name))) {
        loader.map_pin_path(name, path);
    }
    for (name, entries) in [(REPLIES, POLICY_REPLIES_MIN), (DENIALS, POLICY_DENIALS_MIN)] {
        loader.map_max_entries(name, lru_entries(entries));
    }
    loader
}

/// Entries of an LRU map that remembers at least so many, on as many CPUs as the programs run on.
pub(in crate::bpf) fn lru_entries(min: u32) -> u32 {
    min + cpus() * LRU_ELEMENTS_PER_CPU
}

/// Number of CPUs on which the programs run, whatever part of them the agent may use.
fn cpus() -> u32 {
    let online = online_cpus().map(|cpus| cpus.len()).ok();
    let count = online.or_else(|| thread::available_parallelism().map(usize::from).ok());
    count.map_or(1, |count| u32::try_from(count).unwrap_or(u32::MAX).min(CPUS_MAX))
}
