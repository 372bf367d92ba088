//! Installation, by the short-lived child: loads the programs, attaches them and pins everything.
//!
//! All programs are loaded before the first is attached, and what an attempt has made is removed when it fails, so
//! nothing is ever half attached. Where our links are pinned already (a restart, another build of the same layout),
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
use cproxy_ebpf::TCP_PLACES;

use super::{
    map_spec::RESIZABLE,
    pins::{NEW, PinDir},
    probe::Features,
    resizable::ResizableMap,
    root_cause,
    syscalls::{link_cgroup_id, link_update, obj_get},
};

/// Of a thread that makes a map: a few system calls and a path.
const STACK_BYTES: usize = 64 << 10;

/// The programs, built by `build.rs`.
pub(super) static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/cproxy-programs"));

/// A hook of ours.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// The function's name, which `bpftool prog` shows.
    pub name: &'static str,
    /// The name under which its link is pinned.
    pub link: &'static str,
}

impl Program {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self { name: "cproxy_connect4", link: "connect4" },
        Self { name: "cproxy_connect6", link: "connect6" },
        Self { name: "cproxy_send4", link: "sendmsg4" },
        Self { name: "cproxy_send6", link: "sendmsg6" },
        Self { name: "cproxy_recv4", link: "recvmsg4" },
        Self { name: "cproxy_recv6", link: "recvmsg6" },
        Self { name: "cproxy_peer4", link: "getpeername4" },
        Self { name: "cproxy_peer6", link: "getpeername6" },
        Self { name: "cproxy_release", link: "sock_release" },
    ];

    /// The names of all links.
    #[must_use]
    pub fn links() -> [&'static str; Self::ALL.len()] {
        Self::ALL.map(|program| program.link)
    }
}

/// Whether the programs may call `bpf_set_retval`: a constant of theirs, 1 unless it is written before they are loaded.
const ERRNO_HELPER: &str = "ERRNO_HELPER";

/// Failure to install the programs.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    /// The object could not be loaded, its maps not be made.
    #[error("cannot create the BPF maps: {0}")]
    Object(String),
    /// The first maps of those that grow could not be put in place: there was no memory, descriptor or thread.
    #[error("cannot make the first maps: {0}")]
    FirstMaps(String),
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
    /// It could not be attached.
    #[error("cannot attach {0} to {cgroup}: {2}; is the kernel built with CONFIG_CGROUP_BPF?", cgroup = .1.display())]
    Attach(&'static str, PathBuf, String),
    /// A file could not be used.
    #[error("{0}: {1}")]
    Io(PathBuf, io::Error),
}

impl InstallError {
    /// Whether another attempt on this machine would end the same.
    #[must_use]
    pub fn is_lasting(&self) -> bool {
        !matches!(self, Self::FirstMaps(_) | Self::Io(..))
    }
}

/// Installs everything on `cgroup` below `pins`, as far as the kernel's `features` go. Returns each program's verified
/// instruction count, 0 where the kernel (before 5.16) does not tell.
///
/// # Errors
/// Nothing new is left behind.
pub fn install(pins: &PinDir, cgroup: &Path, features: Features) -> Result<Vec<(Program, u32)>, InstallError> {
    let mut made = Made::default();
    let result = install_all(pins, cgroup, features, &mut made);
    if result.is_err() {
        made.remove();
    }
    result
}

/// Each program's verified instruction count, or why the kernel refused it.
pub type Loaded = Vec<(Program, Result<u32, InstallError>)>;

/// Loads every program, and with them makes the maps, without pinning or attaching anything.
///
/// # Errors
/// The maps could not be made, so no program could be tried.
pub fn try_load(features: Features) -> Result<Loaded, InstallError> {
    let mut object = load_object(&mut loader(features))?;
    Ok(Program::ALL.map(|program| (program, load(&mut object, program))).into())
}

/// The id of the cgroup that each pinned link is on, 0 if that is gone; an error if there is no such link.
#[must_use]
pub fn attached(pins: &PinDir) -> Vec<(Program, io::Result<u64>)> {
    let cgroup_id = |name| obj_get(&pins.object(name), 0).and_then(|link| link_cgroup_id(link.as_fd()));
    Program::ALL.map(|program| (program, cgroup_id(program.link))).into()
}

/// Pins that this attempt has made.
#[derive(Default)]
struct Made(Vec<PathBuf>);

impl Made {
    fn remove(self) {
        for path in self.0 {
            // The reason for removing is the error that is being reported; another one would hide it.
            fs::remove_file(path).ok();
        }
    }
}

fn install_all(
    pins: &PinDir,
    cgroup: &Path,
    features: Features,
    made: &mut Made,
) -> Result<Vec<(Program, u32)>, InstallError> {
    let mut loader = loader(features);
    for name in PinDir::map_names() {
        let path = pins.object(name);
        if !path.exists() {
            made.0.push(path.clone());
        }
        loader.map_pin_path(name, path);
    }
    let mut object = load_object(&mut loader)?;
    let counts = while_maps_are_made(pins, made, || {
        Program::ALL.into_iter().map(|program| Ok((program, load(&mut object, program)?))).collect()
    })?;
    // From the last on: what a socket leaves is freed, and shown, before the first one leaves anything.
    let mut has_moved = false;
    for program in Program::ALL.into_iter().rev() {
        has_moved |= attach(find(&mut object, program)?, program, pins, cgroup, made)? == Attached::Moved;
    }
    if has_moved {
        free_tcp_places(&mut object)?;
    }
    Ok(counts)
}

/// No program runs any more when sockets of the cgroup are released that the programs were on before: their places
/// would never be free again, and one that lives on would be shown what it was connected to then.
fn free_tcp_places(object: &mut Ebpf) -> Result<(), InstallError> {
    let failed = |error: MapError| InstallError::Object(root_cause(&error));
    let Some(map) = object.map_mut("TCP_OWNERS") else { return Err(InstallError::Missing("TCP_OWNERS")) };
    let mut owners = Array::<_, u64>::try_from(map).map_err(failed)?;
    (0..TCP_PLACES).try_for_each(|place| owners.set(place, 0, 0)).map_err(failed)
}

/// Makes the first maps of those that grow, and does `work` meanwhile: putting a map into a map of maps waits for a
/// grace period of RCU, which takes longer than loading a program and no CPU time.
fn while_maps_are_made<R>(
    pins: &PinDir,
    made: &mut Made,
    work: impl FnOnce() -> Result<R, InstallError>,
) -> Result<R, InstallError> {
    let failed = |error: &dyn std::fmt::Display| InstallError::FirstMaps(error.to_string());
    for spec in RESIZABLE {
        made.0.extend(spec.pins.map(|name| pins.object(name)).into_iter().filter(|path| !path.exists()));
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
            let made = thread.join().map_err(|_| failed(&"a thread has panicked"))?;
            made.map_err(|error| failed(&error))?;
        }
        done
    })
}

/// The map of constants, `.rodata`, has no pin: it belongs to the programs and goes with them.
fn loader(features: Features) -> EbpfLoader<'static> {
    let mut loader = EbpfLoader::new();
    loader.btf(None).verifier_log_level(VerifierLogLevel::DEBUG);
    if !features.errno_helper {
        loader.override_global(ERRNO_HELPER, &0u8, true);
    }
    loader
}

fn load_object(loader: &mut EbpfLoader<'_>) -> Result<Ebpf, InstallError> {
    loader.load(OBJECT).map_err(|error| InstallError::Object(root_cause(&error)))
}

fn load(object: &mut Ebpf, program: Program) -> Result<u32, InstallError> {
    let mut hook = find(object, program)?;
    hook.load().map_err(|error| refused(program, &error))?;
    let info = hook.info().map_err(|error| refused(program, &error))?;
    Ok(info.verified_instruction_count().unwrap_or(0))
}

/// A program of either of our types.
enum Hook<'o> {
    /// It may change an address.
    Address(&'o mut CgroupSockAddr),
    /// It runs for a socket.
    Socket(&'o mut CgroupSock),
}

impl Hook<'_> {
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

    fn fd(&self) -> Result<BorrowedFd<'_>, ProgramError> {
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

fn find(object: &mut Ebpf, program: Program) -> Result<Hook<'_>, InstallError> {
    match object.program_mut(program.name) {
        Some(Loadable::CgroupSockAddr(found)) => Ok(Hook::Address(found)),
        Some(Loadable::CgroupSock(found)) => Ok(Hook::Socket(found)),
        _ => Err(InstallError::Missing(program.name)),
    }
}

/// Outcome for a hook's link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attached {
    /// There was none, or one on the same cgroup.
    Here,
    /// There was one on another cgroup.
    Moved,
}

/// Updates our pinned link if it is on this cgroup; otherwise attaches, and pins over whatever was there.
fn attach(
    mut hook: Hook<'_>,
    program: Program,
    pins: &PinDir,
    cgroup: &Path,
    made: &mut Made,
) -> Result<Attached, InstallError> {
    let failed =
        |error: &dyn std::fmt::Display| InstallError::Attach(program.name, cgroup.to_owned(), error.to_string());
    let dir = fs::File::open(cgroup).map_err(|error| InstallError::Io(cgroup.to_owned(), error))?;
    let pin = pins.object(program.link);
    if let Ok(link) = obj_get(&pin, 0)
        && is_on(link.as_fd(), &dir)
    {
        let fd = hook.fd().map_err(|error| failed(&error))?;
        link_update(link.as_fd(), fd).map_err(|error| failed(&error))?;
        return Ok(Attached::Here);
    }
    let before = if pin.exists() { Attached::Moved } else { Attached::Here };
    let link = hook.attach(&dir).map_err(|error| failed(&error))?;
    pin_over(link, program, pins, made)?;
    Ok(before)
}

fn is_on(link: BorrowedFd<'_>, cgroup: &fs::File) -> bool {
    match (link_cgroup_id(link), cgroup.metadata()) {
        (Ok(id), Ok(cgroup)) => id == cgroup.ino(),
        _ => false,
    }
}

/// A rename puts the new link in the place of one that hangs on another, perhaps dead, cgroup. bpffs takes no names
/// with dots (kernel/bpf/inode.c, `bpf_lookup`).
fn pin_over(link: FdLink, program: Program, pins: &PinDir, made: &mut Made) -> Result<(), InstallError> {
    let (pin, temporary) = (pins.object(program.link), pins.object(&format!("{}{NEW}", program.link)));
    let failed = |path: &Path, error: &dyn std::error::Error| {
        InstallError::Io(path.to_owned(), io::Error::other(root_cause(error)))
    };
    // A leftover of an attempt that was killed; mostly there is none.
    fs::remove_file(&temporary).ok();
    if !pin.exists() {
        made.0.push(pin.clone());
    }
    made.0.push(temporary.clone());
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
