//! Installation: loads the programs, attaches them and pins everything. The agent runs it in a child process, whose
//! memory is gone afterwards.
//!
//! All programs are loaded before the first is attached, and what an attempt has made is removed when it fails, so
//! nothing is ever half attached. If our links are pinned already (a restart, another build of the same layout),
//! the new programs take the place of the old ones atomically and the maps stay.

mod attach;
mod error;
mod new_pins;

use std::{fs, io, os::fd::AsFd, path::Path, thread};

use aya::{Ebpf, EbpfLoader, maps::Array};
use cproxy_ebpf::{TCP_PLACE_FREE, TCP_PLACES};

pub use self::error::{AttachError, FirstMapsError, InstallError};
use self::{
    attach::{Attached, attach},
    new_pins::NewPins,
};
use super::{
    load::{LoadError, find_program, load_object, load_program, loader},
    map_spec::{RESIZABLE, SERVICE_COUNTS},
    object::ProgramSet,
    pins::PinDir,
    probe::Features,
    program::Program,
    resizable::ResizableMap,
    service_counters,
    signals::SignalsBlocked,
    syscalls::{link_cgroup, obj_get},
    takeover::{give_maps_back, retire},
    tcp_places::TcpPlaces,
    tracing,
};

/// Stack of a thread that makes a map: it makes a few system calls and holds a path.
const STACK_BYTES: usize = 64 << 10;

/// Size of the ring buffer where no process reads events: the kernel rounds it up to a page.
const NO_EVENTS_BYTES: u32 = 4 << 10;

/// Installs a set of programs on `cgroup` below `pins`, as far as the kernel's `features` go. The tracing set only
/// counts. Returns each program's verified instruction count, 0 where the kernel (before 5.16) does not tell.
///
/// # Errors
/// On any failure. Everything that the call has made is removed.
pub fn install(
    pins: &PinDir,
    cgroup: &Path,
    features: Features,
    set: ProgramSet,
) -> Result<Vec<(Program, u32)>, InstallError> {
    let _blocked = SignalsBlocked::new();
    let mut new_pins = NewPins::default();
    let result = install_all(pins, cgroup, features, set, &mut new_pins);
    if result.is_err() {
        new_pins.remove();
        give_maps_back(pins);
    }
    result
}

/// The id of the cgroup that each pinned link is on, 0 if the cgroup is gone; an error if there is no such link.
#[must_use]
pub fn attached(pins: &PinDir) -> Vec<(Program, io::Result<u64>)> {
    let cgroup_id = |name| Ok(link_cgroup(obj_get(&pins.object(name), 0)?.as_fd())?.cgroup_id);
    Program::ALL.map(|program| (program, cgroup_id(program.link))).into()
}

fn install_all(
    pins: &PinDir,
    cgroup: &Path,
    features: Features,
    set: ProgramSet,
    new_pins: &mut NewPins,
) -> Result<Vec<(Program, u32)>, InstallError> {
    let mut loader = loader(features);
    for name in PinDir::map_names() {
        let path = pins.object(name);
        new_pins.add_if_missing(&path);
        loader.map_pin_path(name, path);
    }
    if set == ProgramSet::Tracing {
        pin_counts(pins, &mut loader, new_pins)?;
    }
    let mut object = load_object(&mut loader, set)?;
    let counts = while_maps_are_made(pins, new_pins, || {
        Program::ALL.into_iter().map(|program| Ok((program, load_program(&mut object, program)?))).collect()
    })?;
    // In reverse order: the programs that free and show a socket's translation (sock_release, getpeername) are attached
    // before connect() stores the first one.
    let mut has_moved = false;
    for program in Program::ALL.into_iter().rev() {
        has_moved |= attach(find_program(&mut object, program)?, program, pins, cgroup, new_pins)? == Attached::Moved;
    }
    if has_moved {
        free_tcp_places(&mut object, pins)?;
    }
    retire(pins).map_err(InstallError::Takeover)?;
    if set == ProgramSet::Plain {
        remove_counts(pins)?;
    }
    // A leftover costs memory alone; the next start tries again.
    tracing::remove_leftover(pins).ok();
    Ok(counts)
}

/// Has the loader use the pinned counters, or pin new ones.
fn pin_counts(pins: &PinDir, loader: &mut EbpfLoader<'_>, new_pins: &mut NewPins) -> Result<(), InstallError> {
    let path = service_counters::path(pins);
    if !service_counters::is_pinned(pins).map_err(|error| InstallError::Io(path.clone(), error))? {
        remove_counts(pins)?;
        new_pins.add(&path);
    }
    loader.map_pin_path(SERVICE_COUNTS, path).map_max_entries(SERVICE_COUNTS, service_counters::entries());
    loader.map_max_entries("TRACE_EVENTS", NO_EVENTS_BYTES);
    Ok(())
}

/// Removes the pin of counters that are off, or of another build's.
fn remove_counts(pins: &PinDir) -> Result<(), InstallError> {
    let path = service_counters::path(pins);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(InstallError::Io(path, error)),
        _ => Ok(()),
    }
}

/// Frees all places, after a move to another cgroup. No program runs any more when sockets of the former cgroup are
/// closed, so their places would stay taken for ever. If programs run again for one of those sockets later, its place
/// could show a peer that the socket no longer has.
fn free_tcp_places(object: &mut Ebpf, pins: &PinDir) -> Result<(), InstallError> {
    let map = object.map_mut("TCP_OWNERS").ok_or(LoadError::Missing("TCP_OWNERS"))?;
    let mut owners = Array::<_, u64>::try_from(map).map_err(InstallError::TcpPlaces)?;
    (0..TCP_PLACES).try_for_each(|place| owners.set(place, TCP_PLACE_FREE, 0)).map_err(InstallError::TcpPlaces)?;
    TcpPlaces::free_further(pins).map_err(InstallError::FurtherTcpPlaces)
}

/// Creates the resizable maps while `work` runs. Putting a map into a map of maps waits for a grace period, which takes
/// longer than loading a program, but no CPU time.
fn while_maps_are_made<R>(
    pins: &PinDir,
    new_pins: &mut NewPins,
    work: impl FnOnce() -> Result<R, InstallError>,
) -> Result<R, InstallError> {
    for name in RESIZABLE.iter().flat_map(|spec| spec.pins) {
        new_pins.add_if_missing(&pins.object(name));
    }
    thread::scope(|scope| {
        let spawn = |spec| {
            let thread = thread::Builder::new().stack_size(STACK_BYTES);
            let spawned = thread.spawn_scoped(scope, move || ResizableMap::prepare(pins, spec));
            spawned.map_err(FirstMapsError::NoThread)
        };
        let threads =
            RESIZABLE.into_iter().map(spawn).collect::<Result<Vec<_>, _>>().map_err(InstallError::FirstMaps)?;
        let done = work();
        for thread in threads {
            let prepared = thread.join().map_err(|_| FirstMapsError::Panicked);
            prepared.and_then(|result| result.map_err(FirstMapsError::Map)).map_err(InstallError::FirstMaps)?;
        }
        done
    })
}
