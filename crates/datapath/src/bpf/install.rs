//! Installation: loads the programs, attaches them and pins everything. The agent runs it in a child process, whose
//! memory is gone afterwards.
//!
//! All programs are loaded before the first is attached, and what an attempt has made is removed when it fails, so
//! nothing is ever half attached. If our links are pinned already (a restart, another build of the same layout),
//! the new programs take the place of the old ones atomically and the maps stay.

use std::{
    fs, io,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
    thread,
};

use aya::{
    Ebpf, EbpfLoader, VerifierLogLevel,
    maps::{Array, MapError},
    programs::{
        CgroupAttachMode, CgroupSock, CgroupSockAddr, Program as Loadable, ProgramError, ProgramInfo, links::FdLink,
    },
};
use cproxy_ebpf::{TCP_PLACE_FREE, TCP_PLACES};

use super::{
    error::root_cause,
    handover,
    kernel_btf::loader_without_it,
    map_spec::{RESIZABLE, SERVICE_COUNTS},
    object::{HAS_PROGRAMS, ProgramSet},
    pins::{NEW, PinDir},
    probe::Features,
    program::Program,
    resizable::ResizableMap,
    service_counters,
    signals::SignalsBlocked,
    syscalls::{link_cgroup, link_update, obj_get, obj_pin},
    tracing,
};

/// Stack of a thread that makes a map: it makes a few system calls and holds a path.
const STACK_BYTES: usize = 64 << 10;

/// Constant in the programs: 1, the default, if they may call `bpf_set_retval`; else 0.
const ERRNO_HELPER: &str = "ERRNO_HELPER";

/// Failure to install the programs.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    /// The object could not be loaded, or its maps could not be created or written.
    #[error("cannot create the BPF maps: {0}")]
    Object(String),
    /// The resizable maps could not be created: there was no memory, descriptor or thread.
    #[error("cannot make the first maps: {0}")]
    FirstMaps(String),
    /// The build has no programs.
    #[error("this build has no eBPF programs: run `cargo xtask setup` once, then build again")]
    NoPrograms,
    /// The object lacks a program or map: a broken build.
    #[error("the embedded object has no {0}: this build is broken")]
    Missing(&'static str),
    /// The kernel refused a program.
    #[error(
        "the kernel refused program {program}: {reason}{}",
        if verifier_log.is_empty() { "; is the kernel built with CONFIG_CGROUP_BPF?" } else { "" }
    )]
    Load {
        /// The program.
        program: &'static str,
        /// Error of `bpf(2)`.
        reason: String,
        /// The verifier's log: many lines, for a bug report. Empty where the kernel knows no such programs at all.
        verifier_log: String,
    },
    /// A program could not be attached.
    #[error("cannot attach {0} to {cgroup}: {2}; is the kernel built with CONFIG_CGROUP_BPF?", cgroup = .1.display())]
    Attach(&'static str, PathBuf, String),
    /// The rest of an older layout's table could not be removed.
    #[error("the table of an older layout was taken over, but not all of it removed: {0}")]
    Handover(String),
    /// A file could not be used.
    #[error("{0}: {1}")]
    Io(PathBuf, io::Error),
}

impl InstallError {
    /// Whether another attempt on this machine would fail in the same way.
    #[must_use]
    pub fn is_lasting(&self) -> bool {
        !matches!(self, Self::FirstMaps(_) | Self::Handover(_) | Self::Io(..))
    }
}

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
        handover::give_back(pins, &Program::links());
    }
    result
}

/// Each program's verified instruction count, or why the kernel refused it.
pub type Loaded = Vec<(Program, Result<u32, InstallError>)>;

/// Loads every program of a set, and with them makes the maps, without pinning or attaching anything.
///
/// # Errors
/// The maps could not be made, so no program could be tried.
pub fn try_load(features: Features, set: ProgramSet) -> Result<Loaded, InstallError> {
    let _blocked = SignalsBlocked::new();
    let mut object = load_object(&mut loader(features), set)?;
    Ok(Program::ALL.map(|program| (program, load(&mut object, program))).into())
}

/// The id of the cgroup that each pinned link is on, 0 if the cgroup is gone; an error if there is no such link.
#[must_use]
pub fn attached(pins: &PinDir) -> Vec<(Program, io::Result<u64>)> {
    let cgroup_id = |name| Ok(link_cgroup(obj_get(&pins.object(name), 0)?.as_fd())?.cgroup_id);
    Program::ALL.map(|program| (program, cgroup_id(program.link))).into()
}

/// Pins that were not there before this attempt. It removes them if it fails.
#[derive(Default)]
struct NewPins {
    paths: Vec<PathBuf>,
    /// They stay: programs that use them have taken the place of an older layout's. The next attempt goes on.
    stay: bool,
}

impl NewPins {
    fn remove(self) {
        for path in self.paths.into_iter().filter(|_| !self.stay) {
            // The reason for removing is the error that is being reported; another one would hide it.
            fs::remove_file(path).ok();
        }
    }
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
        if !path.exists() {
            new_pins.paths.push(path.clone());
        }
        loader.map_pin_path(name, path);
    }
    if set == ProgramSet::Tracing {
        pin_counts(pins, &mut loader, new_pins)?;
    }
    let mut object = load_object(&mut loader, set)?;
    let counts = while_maps_are_made(pins, new_pins, || {
        Program::ALL.into_iter().map(|program| Ok((program, load(&mut object, program)?))).collect()
    })?;
    // In reverse order: the programs that free and show a socket's translation (sock_release, getpeername) are attached
    // before connect() stores the first one.
    let mut has_moved = false;
    for program in Program::ALL.into_iter().rev() {
        has_moved |= attach(find(&mut object, program)?, program, pins, cgroup, new_pins)? == Attached::Moved;
    }
    if has_moved {
        free_tcp_places(&mut object)?;
    }
    handover::retire(pins).map_err(|error| InstallError::Handover(error.to_string()))?;
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
        new_pins.paths.push(path.clone());
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
fn free_tcp_places(object: &mut Ebpf) -> Result<(), InstallError> {
    let failed = |error: MapError| InstallError::Object(root_cause(&error));
    let Some(map) = object.map_mut("TCP_OWNERS") else { return Err(InstallError::Missing("TCP_OWNERS")) };
    let mut owners = Array::<_, u64>::try_from(map).map_err(failed)?;
    (0..TCP_PLACES).try_for_each(|place| owners.set(place, TCP_PLACE_FREE, 0)).map_err(failed)
}

/// Creates the resizable maps while `work` runs. Putting a map into a map of maps waits for a grace period, which takes
/// longer than loading a program, but no CPU time.
fn while_maps_are_made<R>(
    pins: &PinDir,
    new_pins: &mut NewPins,
    work: impl FnOnce() -> Result<R, InstallError>,
) -> Result<R, InstallError> {
    let failed = |error: &dyn std::fmt::Display| InstallError::FirstMaps(error.to_string());
    for spec in RESIZABLE {
        new_pins.paths.extend(spec.pins.map(|name| pins.object(name)).into_iter().filter(|path| !path.exists()));
    }
    thread::scope(|scope| {
        let spawn = |spec| {
            let thread = thread::Builder::new().stack_size(STACK_BYTES);
            let spawned = thread.spawn_scoped(scope, move || ResizableMap::prepare(pins, spec));
            spawned.map_err(|error| failed(&format_args!("no thread: {error}")))
        };
        let threads = RESIZABLE.into_iter().map(spawn).collect::<Result<Vec<_>, _>>()?;
        let done = work();
        for thread in threads {
            let prepared = thread.join().map_err(|_| failed(&"a thread has panicked"))?;
            prepared.map_err(|error| failed(&error))?;
        }
        done
    })
}

/// Loader of the object. It pins no `.rodata`, the map of constants, which belongs to the programs and ends with them.
pub(super) fn loader(features: Features) -> EbpfLoader<'static> {
    let mut loader = loader_without_it();
    loader.btf(None).verifier_log_level(VerifierLogLevel::DEBUG);
    if !features.errno_helper {
        loader.override_global(ERRNO_HELPER, &0u8, true);
    }
    loader
}

pub(super) fn load_object(loader: &mut EbpfLoader<'_>, set: ProgramSet) -> Result<Ebpf, InstallError> {
    if !HAS_PROGRAMS {
        return Err(InstallError::NoPrograms);
    }
    let object = set.object().ok_or(InstallError::Missing("readable programs"))?;
    loader.load(&object).map_err(|error| InstallError::Object(root_cause(&error)))
}

pub(super) fn load(object: &mut Ebpf, program: Program) -> Result<u32, InstallError> {
    let mut loaded = find(object, program)?;
    loaded.load().map_err(|error| refused(program, &error))?;
    let info = loaded.info().map_err(|error| refused(program, &error))?;
    Ok(info.verified_instruction_count().unwrap_or(0))
}

/// A program in the object, of one of two types.
pub(super) enum LoadedProgram<'o> {
    /// A program that may change an address.
    Address(&'o mut CgroupSockAddr),
    /// A program that runs when a socket is closed.
    Socket(&'o mut CgroupSock),
}

impl LoadedProgram<'_> {
    fn load(&mut self) -> Result<(), ProgramError> {
        match self {
            Self::Address(program) => program.load(),
            Self::Socket(program) => program.load(),
        }
    }

    fn info(&self) -> Result<ProgramInfo, ProgramError> {
        match self {
            Self::Address(program) => program.info(),
            Self::Socket(program) => program.info(),
        }
    }

    pub(super) fn fd(&self) -> Result<BorrowedFd<'_>, ProgramError> {
        let fd = match self {
            Self::Address(program) => program.fd(),
            Self::Socket(program) => program.fd(),
        };
        fd.map(AsFd::as_fd)
    }

    fn attach(&mut self, cgroup: &fs::File) -> Result<FdLink, String> {
        let mode = CgroupAttachMode::Single;
        let failed = |error: &ProgramError| root_cause(error);
        let link = match self {
            Self::Address(program) => {
                let id = program.attach(cgroup, mode).map_err(|error| failed(&error))?;
                program.take_link(id).map_err(|error| failed(&error))?.try_into()
            }
            Self::Socket(program) => {
                let id = program.attach(cgroup, mode).map_err(|error| failed(&error))?;
                program.take_link(id).map_err(|error| failed(&error))?.try_into()
            }
        };
        link.map_err(|error| root_cause(&error))
    }
}

pub(super) fn find(object: &mut Ebpf, program: Program) -> Result<LoadedProgram<'_>, InstallError> {
    match object.program_mut(program.name) {
        Some(Loadable::CgroupSockAddr(found)) => Ok(LoadedProgram::Address(found)),
        Some(Loadable::CgroupSock(found)) => Ok(LoadedProgram::Socket(found)),
        _ => Err(InstallError::Missing(program.name)),
    }
}

/// Outcome for a program's link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attached {
    /// Attached for the first time or again, or updated in place.
    Here,
    /// Attached in the place of a link that is on another cgroup.
    Moved,
}

/// Updates the program's pinned link if it is on this cgroup. Otherwise attaches the program, and pins the new link in
/// the place of any other.
fn attach(
    mut loaded: LoadedProgram<'_>,
    program: Program,
    pins: &PinDir,
    cgroup: &Path,
    new_pins: &mut NewPins,
) -> Result<Attached, InstallError> {
    let failed =
        |error: &dyn std::fmt::Display| InstallError::Attach(program.name, cgroup.to_owned(), error.to_string());
    let dir = fs::File::open(cgroup).map_err(|error| InstallError::Io(cgroup.to_owned(), error))?;
    let pin = pins.object(program.link);
    // A link that cannot be read is not replaced: programs of both would run, and sockets would lose their names.
    let pinned = handover::pinned_link(&pin).map_err(|error| InstallError::Io(pin.clone(), error))?;
    if let Some((id, link)) = &pinned
        && is_of(*id, &dir)
    {
        let fd = loaded.fd().map_err(|error| failed(&error))?;
        link_update(link.as_fd(), fd).map_err(|error| failed(&error))?;
        return Ok(Attached::Here);
    }
    if pinned.is_none() {
        let older = handover::link_to_update(pins, program.link);
        let older = older.map_err(|(path, error)| InstallError::Io(path, error))?;
        if let Some((_, link)) = older.filter(|(id, _)| is_of(*id, &dir)) {
            let fd = loaded.fd().map_err(|error| failed(&error))?;
            new_pins.stay = true;
            link_update(link.as_fd(), fd).map_err(|error| failed(&error))?;
            obj_pin(link.as_fd(), &pin).map_err(|error| InstallError::Io(pin.clone(), error))?;
            return Ok(Attached::Here);
        }
    }
    // Sockets of a detached link keep their places, and the hooks run for them again. The agent frees the places of
    // those that were closed meanwhile, as it does for MPTCP.
    let before = if pinned.is_none_or(|(id, _)| id == 0) { Attached::Here } else { Attached::Moved };
    let link = loaded.attach(&dir).map_err(|error| failed(&error))?;
    pin_over(link, program, pins, new_pins)?;
    Ok(before)
}

/// Whether the id is that of the cgroup.
fn is_of(id: u64, cgroup: &fs::File) -> bool {
    cgroup.metadata().is_ok_and(|cgroup| cgroup.ino() == id)
}

/// Pins a link by a rename, which replaces a link on another cgroup, even one that is gone. bpffs takes no names
/// with dots (kernel/bpf/inode.c, `bpf_lookup`).
fn pin_over(link: FdLink, program: Program, pins: &PinDir, new_pins: &mut NewPins) -> Result<(), InstallError> {
    let (pin, temporary) = (pins.object(program.link), pins.object(&format!("{}{NEW}", program.link)));
    let failed = |path: &Path, error: &dyn std::error::Error| {
        InstallError::Io(path.to_owned(), io::Error::other(root_cause(error)))
    };
    // A leftover of an attempt that was killed; mostly there is none.
    fs::remove_file(&temporary).ok();
    if !pin.exists() {
        new_pins.paths.push(pin.clone());
    }
    new_pins.paths.push(temporary.clone());
    let pinned = link.pin(&temporary).map_err(|error| failed(&temporary, &error))?;
    fs::rename(&temporary, &pin).map_err(|error| failed(&pin, &error))?;
    drop(pinned);
    Ok(())
}

fn refused(program: Program, error: &ProgramError) -> InstallError {
    let (reason, verifier_log) = match error {
        ProgramError::LoadError { io_error, verifier_log } => (io_error.to_string(), verifier_log.to_string()),
        other => (root_cause(other), String::new()),
    };
    InstallError::Load { program: program.name, reason, verifier_log }
}
