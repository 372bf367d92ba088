//! Loading of the programs into the kernel, without attaching or pinning them.

use std::os::fd::{AsFd, BorrowedFd};

use aya::{
    Ebpf, EbpfError, EbpfLoader, VerifierLogLevel,
    maps::Map,
    programs::{CgroupSock, CgroupSockAddr, Program as Loadable, ProgramError},
};

use super::{
    error::root_cause,
    kernel_btf::loader_without_it,
    object::{HAS_PROGRAMS, ProgramSet},
    probe::Features,
    program::Program,
    signals::SignalsBlocked,
    syscalls::program_info,
};

/// Constant in the programs: 1, the default, if they may call `bpf_set_retval`; else 0.
const ERRNO_HELPER: &str = "ERRNO_HELPER";

/// Failure to load the programs.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The object could not be loaded, or its maps could not be created.
    #[error("cannot create the BPF maps: {}", root_cause(.0))]
    Object(EbpfError),
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
    Refused {
        /// The program.
        program: &'static str,
        /// Error of `bpf(2)`.
        reason: String,
        /// The verifier's log: many lines, for a bug report. Empty where the kernel knows no such programs at all.
        verifier_log: String,
    },
}

impl LoadError {
    pub(super) fn refused(program: &'static str, error: &ProgramError) -> Self {
        let (reason, verifier_log) = match error {
            ProgramError::LoadError { io_error, verifier_log } => (io_error.to_string(), verifier_log.to_string()),
            other => (root_cause(other), String::new()),
        };
        Self::Refused { program, reason, verifier_log }
    }
}

/// Each program's verified instruction count, or why the kernel refused it.
pub type Loaded = Vec<(Program, Result<u32, LoadError>)>;

/// Loads every program of a set, and with them makes the maps, without pinning or attaching anything.
///
/// # Errors
/// The maps could not be made, so no program could be tried.
pub fn try_load(features: Features, set: ProgramSet) -> Result<Loaded, LoadError> {
    let _blocked = SignalsBlocked::new();
    let mut object = load_object(&mut loader(features), set)?;
    Ok(Program::ALL.map(|program| (program, load_program(&mut object, program))).into())
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

/// Makes the maps of a set's object, and prepares its programs.
pub(super) fn load_object(loader: &mut EbpfLoader<'_>, set: ProgramSet) -> Result<Ebpf, LoadError> {
    if !HAS_PROGRAMS {
        return Err(LoadError::NoPrograms);
    }
    let object = set.object().ok_or(LoadError::Missing("readable programs"))?;
    loader.load(&object).map_err(LoadError::Object)
}

/// Has the kernel verify a program. Returns its verified instruction count, 0 where the kernel does not tell.
pub(super) fn load_program(object: &mut Ebpf, program: Program) -> Result<u32, LoadError> {
    load_named(object, program.name)
}

/// The same for the program of this name.
pub(super) fn load_named(object: &mut Ebpf, name: &'static str) -> Result<u32, LoadError> {
    let found = object.program_mut(name).ok_or(LoadError::Missing(name))?;
    let loaded = match found {
        Loadable::CgroupSockAddr(found) => found.load(),
        Loadable::CgroupSock(found) => found.load(),
        Loadable::SkLookup(found) => found.load(),
        Loadable::SockOps(found) => found.load(),
        Loadable::CgroupSockopt(found) => found.load(),
        _ => return Err(LoadError::Missing(name)),
    };
    loaded.map_err(|error| LoadError::refused(name, &error))?;
    let fd = found.fd().map_err(|error| LoadError::refused(name, &error))?;
    let info = program_info(fd.as_fd()).map_err(|error| LoadError::Refused {
        program: name,
        reason: error.to_string(),
        verifier_log: String::new(),
    });
    info.map(|info| info.verified_insns)
}

/// A program of the object.
pub(super) fn find_program(object: &mut Ebpf, program: Program) -> Result<LoadedProgram<'_>, LoadError> {
    match object.program_mut(program.name) {
        Some(Loadable::CgroupSockAddr(found)) => Ok(LoadedProgram::Address(found)),
        Some(Loadable::CgroupSock(found)) => Ok(LoadedProgram::Socket(found)),
        _ => Err(LoadError::Missing(program.name)),
    }
}

/// Takes a map out of the object.
pub(super) fn take_map(object: &mut Ebpf, name: &'static str) -> Result<Map, LoadError> {
    object.take_map(name).ok_or(LoadError::Missing(name))
}

/// A program in the object, of one of two types.
pub(super) enum LoadedProgram<'o> {
    /// A program that may change an address.
    Address(&'o mut CgroupSockAddr),
    /// A program that runs when a socket is closed.
    Socket(&'o mut CgroupSock),
}

impl LoadedProgram<'_> {
    pub(super) fn fd(&self) -> Result<BorrowedFd<'_>, ProgramError> {
        let fd = match self {
            Self::Address(program) => program.fd(),
            Self::Socket(program) => program.fd(),
        };
        fd.map(AsFd::as_fd)
    }
}
