//! The few `bpf(2)` calls that measuring socket programs takes: an empty program to compare with, attaching and
//! detaching, and what the kernel counts of a program's runs; and what is in maps.

mod map;

use std::{
    ffi::CString,
    fs, io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

pub use map::Map;

/// Commands of `bpf(2)` (include/uapi/linux/bpf.h, `enum bpf_cmd`).
const BPF_MAP_LOOKUP_ELEM: libc::c_long = 1;
const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_OBJ_GET: libc::c_long = 7;
const BPF_PROG_GET_FD_BY_ID: libc::c_long = 13;
const BPF_MAP_GET_FD_BY_ID: libc::c_long = 14;
const BPF_LINK_CREATE: libc::c_long = 28;
const BPF_LINK_GET_FD_BY_ID: libc::c_long = 30;
const BPF_LINK_GET_NEXT_ID: libc::c_long = 31;
const BPF_ENABLE_STATS: libc::c_long = 32;
const BPF_LINK_DETACH: libc::c_long = 34;

/// `BPF_PROG_TYPE_CGROUP_SOCK`.
const CGROUP_SOCK: u32 = 9;
/// `BPF_PROG_TYPE_CGROUP_SOCK_ADDR`.
const CGROUP_SOCK_ADDR: u32 = 18;

/// `BPF_STATS_RUN_TIME`.
const RUN_TIME: u32 = 0;

/// A hook that socket programs are attached to: a value of the kernel's `enum bpf_attach_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttachType(pub u32);

impl AttachType {
    /// `BPF_CGROUP_INET_SOCK_RELEASE`.
    pub const SOCK_RELEASE: Self = Self(34);

    /// Program type of the hook (include/uapi/linux/bpf.h, `enum bpf_prog_type`).
    fn program_type(self) -> u32 {
        if self == Self::SOCK_RELEASE { CGROUP_SOCK } else { CGROUP_SOCK_ADDR }
    }
}

/// A loaded program.
#[derive(Debug)]
pub struct Program(OwnedFd);

/// The kernel's information about a program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProgramInfo {
    /// How many instructions the verifier went through.
    pub verified_instructions: u64,
    /// How often it has run, while statistics were on.
    pub runs: u64,
    /// How long these runs took together.
    pub run_time_ns: u64,
}

impl Program {
    /// Loads a program that allows everything: `r0 = 1; exit`.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn empty(hook: AttachType) -> io::Result<Self> {
        /// `union bpf_attr` for the command, up to the last field that is needed.
        #[repr(C)]
        #[derive(Default)]
        struct Attr {
            prog_type: u32,
            insn_cnt: u32,
            insns: u64,
            license: u64,
            log_level: u32,
            log_size: u32,
            log_buf: u64,
            kern_version: u32,
            prog_flags: u32,
            prog_name: [u8; 16],
            prog_ifindex: u32,
            expected_attach_type: u32,
        }
        // Opcode, registers, offset, immediate of `struct bpf_insn`: BPF_ALU64 | BPF_MOV | BPF_K; BPF_JMP | BPF_EXIT.
        let instructions: [[u8; 8]; 2] = [[0xb7, 0, 0, 0, 1, 0, 0, 0], [0x95, 0, 0, 0, 0, 0, 0, 0]];
        let mut attr = Attr {
            prog_type: hook.program_type(),
            insn_cnt: instructions.len() as u32,
            insns: instructions.as_ptr() as u64,
            license: c"GPL".as_ptr() as u64,
            prog_name: *b"empty\0\0\0\0\0\0\0\0\0\0\0",
            expected_attach_type: hook.0,
            ..Attr::default()
        };
        bpf_fd(BPF_PROG_LOAD, &mut attr).map(Self)
    }

    /// Takes the program out of the pinned link `pin`: when this returns, the link's hook runs without it.
    ///
    /// # Errors
    /// There is no such link, or it is detached already.
    pub fn detach_from(pin: &Path) -> io::Result<Self> {
        #[repr(C)]
        struct Attr {
            prog_id: u32,
        }
        let link = Link(obj_get(pin)?);
        let prog_id = field(&fdinfo(link.0.as_fd())?, "prog_id")? as u32;
        let program = bpf_fd(BPF_PROG_GET_FD_BY_ID, &mut Attr { prog_id })?;
        link.detach()?;
        Ok(Self(program))
    }

    /// The kernel's information about it now.
    ///
    /// # Errors
    /// `/proc` is not mounted, or the kernel is older than 5.16.
    pub fn info(&self) -> io::Result<ProgramInfo> {
        let text = fdinfo(self.0.as_fd())?;
        Ok(ProgramInfo {
            verified_instructions: field(&text, "verified_insns")?,
            runs: field(&text, "run_cnt")?,
            run_time_ns: field(&text, "run_time_ns")?,
        })
    }

    /// Attaches it to a cgroup.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn attach(&self, hook: AttachType, cgroup: BorrowedFd<'_>) -> io::Result<Link> {
        #[repr(C)]
        struct Attr {
            prog_fd: u32,
            target_fd: u32,
            attach_type: u32,
            flags: u32,
        }
        let mut attr = Attr {
            prog_fd: self.0.as_raw_fd() as u32,
            target_fd: cgroup.as_raw_fd() as u32,
            attach_type: hook.0,
            flags: 0,
        };
        bpf_fd(BPF_LINK_CREATE, &mut attr).map(Link)
    }
}

/// An attached program. Dropping it detaches too, but at some later time.
#[derive(Debug)]
pub struct Link(OwnedFd);

impl Link {
    /// Detaches the program; when this returns, the hook runs without it.
    ///
    /// # Errors
    /// The link is detached already.
    pub fn detach(self) -> io::Result<()> {
        #[repr(C)]
        struct Attr {
            link_fd: u32,
        }
        bpf(BPF_LINK_DETACH, &mut Attr { link_fd: self.0.as_raw_fd() as u32 }).map(drop)
    }
}

/// Has the kernel time every program's runs until the descriptor is closed, by whatever end of this process: the same
/// as the sysctl `kernel.bpf_stats_enabled`, which would have to be restored.
///
/// # Errors
/// The kernel is older than 5.8.
pub fn enable_statistics() -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Attr {
        stats_type: u32,
    }
    bpf_fd(BPF_ENABLE_STATS, &mut Attr { stats_type: RUN_TIME })
}

/// How many programs links have attached to these hooks, on whatever cgroups.
///
/// # Errors
/// Links cannot be listed.
pub fn count_links(hooks: &[AttachType]) -> io::Result<usize> {
    #[repr(C)]
    struct Attr {
        id: u32,
        next_id: u32,
        open_flags: u32,
    }
    let mut attr = Attr { id: 0, next_id: 0, open_flags: 0 };
    let mut count = 0;
    while bpf(BPF_LINK_GET_NEXT_ID, &mut attr).is_ok() {
        attr.id = attr.next_id;
        // A link may end between the two calls.
        let Ok(link) = bpf_fd(BPF_LINK_GET_FD_BY_ID, &mut Attr { id: attr.id, next_id: 0, open_flags: 0 }) else {
            continue;
        };
        let text = fdinfo(link.as_fd())?;
        // Links of other kinds have no such fields; one that is detached has no cgroup.
        let (Ok(attach_type), Ok(cgroup)) = (field(&text, "attach_type"), field(&text, "cgroup_id")) else { continue };
        let is_wanted = hooks.iter().any(|hook| u64::from(hook.0) == attach_type);
        count += usize::from(cgroup != 0 && is_wanted);
    }
    Ok(count)
}

fn obj_get(path: &Path) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Attr {
        pathname: u64,
        bpf_fd: u32,
        file_flags: u32,
    }
    let path = CString::new(path.as_os_str().as_bytes())?;
    bpf_fd(BPF_OBJ_GET, &mut Attr { pathname: path.as_ptr() as u64, bpf_fd: 0, file_flags: 0 })
}

fn fdinfo(fd: BorrowedFd<'_>) -> io::Result<String> {
    fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))
}

fn field(fdinfo: &str, name: &str) -> io::Result<u64> {
    let line = fdinfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let value = line.and_then(|value| value.trim().parse().ok());
    value.ok_or_else(|| io::Error::other(format!("the kernel does not tell {name} in /proc/self/fdinfo")))
}

fn bpf_fd<Attr>(command: libc::c_long, attr: &mut Attr) -> io::Result<OwnedFd> {
    let fd = bpf(command, attr)?;
    // SAFETY: the kernel has just returned this descriptor, which has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn bpf<Attr>(command: libc::c_long, attr: &mut Attr) -> io::Result<i32> {
    // SAFETY: `attr` is a live, initialised prefix of `union bpf_attr` of the size given; the kernel takes the rest as
    // zero. What it points to outlives the call, since each caller holds it in a local.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<Attr>()) };
    match result {
        -1 => Err(io::Error::last_os_error()),
        value => Ok(value as i32),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "prog_type:\t18\nrun_time_ns:\t1234\nrun_cnt:\t5\nverified_insns:\t168\n";
        assert_eq!(field(text, "run_cnt").unwrap(), 5);
        assert_eq!(field(text, "run_time_ns").unwrap(), 1234);
        assert!(field(text, "run").is_err() && field(text, "prog_id").is_err());
    }
}
