//! The few `bpf(2)` calls that a measurement of socket programs needs: an empty program to compare with, attaching and
//! detaching, the kernel's statistics of a program's runs, and the contents of maps.

mod map;

use std::{
    fs, io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::Path,
};

use cproxy_datapath::bpf::syscalls::{
    bpf, bpf_attach_type, bpf_cmd, bpf_fd, bpf_prog_type, bpf_stats_type, exit, link_create, link_detach, load_program,
    move_to, no_arguments, obj_get,
};
pub use map::Map;

/// A hook for socket programs: a value of the kernel's `enum bpf_attach_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttachType(pub u32);

impl AttachType {
    /// `BPF_CGROUP_INET_SOCK_RELEASE`.
    pub const SOCK_RELEASE: Self = Self(bpf_attach_type::BPF_CGROUP_INET_SOCK_RELEASE as u32);

    /// Program type of the hook.
    fn program_type(self) -> bpf_prog_type {
        match self {
            Self::SOCK_RELEASE => bpf_prog_type::BPF_PROG_TYPE_CGROUP_SOCK,
            _ => bpf_prog_type::BPF_PROG_TYPE_CGROUP_SOCK_ADDR,
        }
    }
}

/// The links of a directory of pins, by name; none without the directory.
///
/// # Errors
/// It cannot be read.
pub fn links(directory: &Path) -> io::Result<Vec<(String, Link)>> {
    let Ok(entries) = fs::read_dir(directory) else { return Ok(Vec::new()) };
    let mut links = Vec::new();
    for entry in entries {
        let entry = entry?;
        // Maps and programs are pinned there, too.
        if let Ok(link) = Link::open(&entry.path()) {
            links.push((entry.file_name().to_string_lossy().into_owned(), link));
        }
    }
    links.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
    Ok(links)
}

/// A loaded program.
#[derive(Debug)]
pub struct Program(OwnedFd);

/// The kernel's information about a program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProgramInfo {
    /// Number of instructions that the verifier processed.
    pub verified_instructions: u64,
    /// Number of runs while statistics were on.
    pub runs: u64,
    /// Total time of these runs.
    pub run_time_ns: u64,
}

impl Program {
    /// Loads a program that allows every call: `r0 = 1; exit`.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn empty(hook: AttachType) -> io::Result<Self> {
        load_program(hook.program_type(), hook.0, &[move_to(0, 1), exit()], "empty").map(Self)
    }

    /// Takes the program from the pinned link `pin`: when this returns, the link's hook runs without it.
    ///
    /// # Errors
    /// There is no such link, or it is detached already.
    pub fn detach_from(pin: &Path) -> io::Result<Self> {
        let link = Link::open(pin)?;
        let program = link.program()?;
        link.detach()?;
        Ok(program)
    }

    /// The kernel's current information about the program.
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

    /// Attaches the program to a cgroup.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn attach(&self, hook: AttachType, cgroup: BorrowedFd<'_>) -> io::Result<Link> {
        link_create(self.0.as_fd(), cgroup, hook.0).map(Link)
    }
}

/// An attached program. Dropping it also detaches the program, but at some later time.
#[derive(Debug)]
pub struct Link(OwnedFd);

impl Link {
    /// Detaches the program; when this returns, the hook runs without it.
    ///
    /// # Errors
    /// The link is detached already.
    pub fn detach(self) -> io::Result<()> {
        link_detach(self.0.as_fd())
    }

    /// Opens a pinned link.
    ///
    /// # Errors
    /// The kernel refuses, or something else is pinned there.
    pub fn open(pin: &Path) -> io::Result<Self> {
        let link = Self(obj_get(pin, 0)?);
        field(&fdinfo(link.0.as_fd())?, "link_id")?;
        Ok(link)
    }

    /// Tag of the program behind the link: a hash of its instructions.
    ///
    /// # Errors
    /// `/proc` is not mounted.
    pub fn program_tag(&self) -> io::Result<String> {
        text_field(&fdinfo(self.0.as_fd())?, "prog_tag").map(str::to_owned)
    }

    /// The program behind the link.
    ///
    /// # Errors
    /// `/proc` is not mounted, or the program is gone.
    pub fn program(&self) -> io::Result<Program> {
        fd_by_id(bpf_cmd::BPF_PROG_GET_FD_BY_ID, self.program_id()?).map(Program)
    }

    /// Id of the program behind the link.
    ///
    /// # Errors
    /// `/proc` is not mounted.
    pub fn program_id(&self) -> io::Result<u32> {
        Ok(field(&fdinfo(self.0.as_fd())?, "prog_id")? as u32)
    }
}

/// Makes the kernel time every program's runs until the descriptor is closed, at the latest when this process ends. The
/// sysctl `kernel.bpf_stats_enabled` does the same, but would have to be restored.
///
/// # Errors
/// The kernel is older than 5.8.
pub fn enable_statistics() -> io::Result<OwnedFd> {
    let mut attr = no_arguments();
    attr.enable_stats.type_ = bpf_stats_type::BPF_STATS_RUN_TIME as u32;
    bpf_fd(bpf_cmd::BPF_ENABLE_STATS, &mut attr)
}

/// The number of programs that links have attached to these hooks, on any cgroup.
///
/// # Errors
/// Links cannot be listed.
pub fn count_links(hooks: &[AttachType]) -> io::Result<usize> {
    let (mut attr, mut count) = (no_arguments(), 0);
    while bpf(bpf_cmd::BPF_LINK_GET_NEXT_ID, &mut attr).is_ok() {
        // SAFETY: the kernel has written it.
        let id = unsafe { attr.__bindgen_anon_6.next_id };
        attr.__bindgen_anon_6.__bindgen_anon_1.start_id = id;
        // A link may end between the two calls.
        let Ok(link) = fd_by_id(bpf_cmd::BPF_LINK_GET_FD_BY_ID, id) else { continue };
        let text = fdinfo(link.as_fd())?;
        // Links of other kinds have no such fields; one that is detached has no cgroup.
        let (Ok(attach_type), Ok(cgroup)) = (field(&text, "attach_type"), field(&text, "cgroup_id")) else { continue };
        let is_wanted = hooks.iter().any(|hook| u64::from(hook.0) == attach_type);
        count += usize::from(cgroup != 0 && is_wanted);
    }
    Ok(count)
}

fn fd_by_id(command: bpf_cmd, id: u32) -> io::Result<OwnedFd> {
    let mut attr = no_arguments();
    attr.__bindgen_anon_6.__bindgen_anon_1.start_id = id;
    bpf_fd(command, &mut attr)
}

fn fdinfo(fd: BorrowedFd<'_>) -> io::Result<String> {
    fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))
}

fn field(fdinfo: &str, name: &str) -> io::Result<u64> {
    let value = text_field(fdinfo, name)?;
    value.parse().map_err(|_| io::Error::other(format!("the kernel's {name} is no number: {value}")))
}

fn text_field<'t>(fdinfo: &'t str, name: &str) -> io::Result<&'t str> {
    let line = fdinfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.map(str::trim).ok_or_else(|| io::Error::other(format!("the kernel does not tell {name} in /proc/self/fdinfo")))
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
