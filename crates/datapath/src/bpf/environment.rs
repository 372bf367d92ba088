//! Requirements on the machine, checked and made before anything is loaded, so that an error names the one thing that
//! is missing and nothing is left half attached.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use cproxy_mountinfo as mountinfo;
use rustix::{
    fs::Access,
    mount::{MountFlags, mount},
};

use super::cgroups::{self, CGROUP2_SUPER_MAGIC, is_on};
use crate::owned_dir;

/// Magic number of `statfs(2)` (include/uapi/linux/magic.h).
const BPF_FS_MAGIC: u64 = 0xcafe_4a11;

/// Conventional mount point of bpffs; used if it is not mounted.
pub(super) const BPFFS_DEFAULT: &str = "/sys/fs/bpf";

/// Mount point of cgroup2 below the run directory, for machines that have no other.
const CGROUP2_DIR: &str = "cgroup2";

/// The newest kernel feature that the programs cannot do without: functions of theirs that get pointers to memory, in
/// 5.13. Before it: the atomic compare-and-exchange (5.12), getpeername hooks and CAP_BPF (5.8), links on cgroups,
/// network namespace cookies and ancestors of the current cgroup in these hooks (5.7), arrays that can be mapped (5.5),
/// socket storage in them (5.3). Tested on 6.18 and on a 6.1 without JIT and BTF; where an architecture's JIT compiler
/// lacks the exchange (arm64 before 5.18), loading fails.
const KERNEL_MIN: (u32, u32) = (5, 13);

/// The first kernel in which a socket stays in its process's cgroup2 cgroup whatever hierarchies of version 1 do.
/// Before, one of a process in a cgroup of net_cls or net_prio counts as the root's (include/linux/cgroup.h,
/// `sock_cgroup_ptr`).
const SOCKETS_STAY: (u32, u32) = (5, 15);

/// Capabilities of this process, among other things.
const STATUS: &str = "/proc/self/status";

/// Bits of `CapEff` (include/uapi/linux/capability.h).
const CAP_NET_ADMIN: u64 = 1 << 12;
const CAP_SYS_ADMIN: u64 = 1 << 21;
const CAP_PERFMON: u64 = 1 << 38;
const CAP_BPF: u64 = 1 << 39;

/// Reason why cproxy cannot work here, with advice.
#[derive(Debug, thiserror::Error)]
pub enum EnvironmentError {
    /// The kernel lacks helpers.
    #[error(
        "kernel {0} is too old: cproxy needs {min_major}.{min_minor} or newer",
        min_major = KERNEL_MIN.0,
        min_minor = KERNEL_MIN.1
    )]
    KernelTooOld(String),
    /// The process may not load programs.
    #[error("missing {0}: run cproxy as root or grant CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON")]
    Capability(&'static str),
    /// The kernel does not know the file system.
    #[error("no {0} file system: the kernel does not list it in /proc/filesystems; build it with {1}")]
    NoFilesystem(&'static str, &'static str),
    /// cgroup2 exists but cannot be mounted.
    #[error("no cgroup2 is mounted and it cannot be mounted at {0}: {1}; mount it and pass --cgroup")]
    MountCgroup2(PathBuf, io::Error),
    /// `--cgroup` is no cgroup.
    #[error("--cgroup {0}: not a cgroup2 directory; pass a directory of a cgroup2 mount (mount -t cgroup2 none DIR)")]
    NotCgroup2(PathBuf),
    /// The pin directory is not on a bpffs.
    #[error(
        "--pin-dir {0}: not on a bpf filesystem (bpffs); mount one (mount -t bpf bpf DIR) and pass a directory on it"
    )]
    NotBpffs(PathBuf),
    /// bpffs cannot be mounted.
    #[error(
        "no bpf filesystem (bpffs) is at {BPFFS_DEFAULT} and it cannot be mounted: {0}; mount one (mount -t bpf bpf \
         DIR) and pass --pin-dir"
    )]
    MountBpffs(io::Error),
    /// A file or directory could not be used.
    #[error("{0}: {1}")]
    Io(PathBuf, io::Error),
}

/// A machine on which programs can be attached: the proof that the checks have passed.
#[derive(Debug)]
pub struct Environment {
    /// The cgroup to attach to.
    pub cgroup: PathBuf,
    /// The processes that are served there.
    pub scope: Scope,
    /// The pin directory's parent is on a bpffs; the directory itself exists.
    pub pin_dir: PathBuf,
}

/// Mount point of a file system that cproxy needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mount {
    /// This directory is on it.
    Present(PathBuf),
    /// It is not mounted, and can be mounted here.
    Possible(PathBuf),
}

/// Processes served by programs that are attached to a cgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// All: it is the hierarchy's root.
    Machine,
    /// Those in and below the cgroup that `--cgroup` names.
    Requested,
    /// Those in and below a cgroup, because the root is out of sight: as in a container.
    Confined,
}

impl Scope {
    /// Warning about a cgroup in which not all processes are served.
    #[must_use]
    pub fn caveat(self) -> Option<&'static str> {
        match self {
            Self::Machine => None,
            Self::Requested => Some("serving only processes in and below it (--cgroup)"),
            Self::Confined => Some(
                "NOT the cgroup root, which cannot be seen from here: only processes in and below this cgroup are \
                 served; mount the machine's /sys/fs/cgroup, at another path than this, or pass --cgroup if it is \
                 meant",
            ),
        }
    }
}

impl Environment {
    /// Checks kernel, capabilities, cgroup2 and bpffs; mounts the last two where they are missing by convention.
    ///
    /// # Errors
    /// The first thing that is missing.
    pub fn prepare(cgroup: Option<&Path>, pin_dir: &Path, run_dir: &Path) -> Result<Self, EnvironmentError> {
        Self::kernel()?;
        Self::capabilities()?;
        let ((cgroup, scope), bpffs) = (Self::cgroup2(cgroup, run_dir)?, Self::bpffs(pin_dir)?);
        let cgroup = match cgroup {
            Mount::Present(dir) => dir,
            Mount::Possible(dir) => mount_cgroup2(run_dir, dir)?,
        };
        if let Mount::Possible(dir) = bpffs {
            // As systemd does. By default all users could make directories there, ours among them.
            mount("bpf", dir, "bpf", MountFlags::empty(), Some(c"mode=700"))
                .map_err(|error| EnvironmentError::MountBpffs(error.into()))?;
        }
        fs::create_dir_all(pin_dir).map_err(|error| EnvironmentError::Io(pin_dir.to_owned(), error))?;
        Ok(Self { cgroup, scope, pin_dir: pin_dir.to_owned() })
    }

    /// The kernel's release.
    ///
    /// # Errors
    /// It is too old.
    pub fn kernel() -> Result<String, EnvironmentError> {
        let name = rustix::system::uname();
        let release = name.release().to_string_lossy().into_owned();
        match parse_release(&release) {
            Some(version) if version < KERNEL_MIN => Err(EnvironmentError::KernelTooOld(release)),
            // A release that cannot be read is no reason to refuse: loading will tell.
            _ => Ok(release),
        }
    }

    /// Warning about sockets that programs at a cgroup below the root miss on this kernel.
    #[must_use]
    pub fn lost_sockets(scope: Scope) -> Option<&'static str> {
        let version = parse_release(&rustix::system::uname().release().to_string_lossy());
        let is_lost = scope != Scope::Machine
            && version.is_some_and(|version| version < SOCKETS_STAY)
            // Without the file there are no hierarchies of version 1.
            && fs::read_to_string("/proc/cgroups").is_ok_and(|text| has_network_hierarchy(&text));
        is_lost.then_some(
            "kernels before 5.15 count sockets of processes in cgroups of net_cls and net_prio (version 1) to the \
             cgroup root: they are not served",
        )
    }

    /// Whether this process may load and attach programs.
    ///
    /// # Errors
    /// It may not.
    pub fn capabilities() -> Result<(), EnvironmentError> {
        let effective = effective_capabilities().map_err(|error| EnvironmentError::Io(STATUS.into(), error))?;
        missing_capability(effective).map_or(Ok(()), |name| Err(EnvironmentError::Capability(name)))
    }

    /// The cgroup to attach to: `cgroup`, or the hierarchy's root, wherever it is mounted or could be mounted below the
    /// run directory. Where neither can be, another cgroup2 mount. Changes nothing.
    ///
    /// # Errors
    /// There is none and none can be made.
    pub fn cgroup2(cgroup: Option<&Path>, run_dir: &Path) -> Result<(Mount, Scope), EnvironmentError> {
        match cgroup {
            Some(dir) if !is_on(dir, CGROUP2_SUPER_MAGIC) => return Err(EnvironmentError::NotCgroup2(dir.to_owned())),
            Some(dir) => {
                let scope = if cgroups::is_root(dir) { Scope::Machine } else { Scope::Requested };
                return Ok((Mount::Present(dir.to_owned()), scope));
            }
            None => {}
        }
        let mounts = mountinfo::list().map_err(|error| EnvironmentError::Io(mountinfo::PATH.into(), error))?;
        let mut mounted = cgroups::mounted(mounts);
        if let Some(root) = mounted.iter().position(|dir| cgroups::is_root(dir)) {
            return Ok((Mount::Present(mounted.swap_remove(root)), Scope::Machine));
        }
        let possible = may_mount_cgroup2(run_dir).map(Mount::Possible);
        match (possible, mounted.into_iter().next()) {
            (Ok(mount), _) if cgroups::in_initial_namespace().unwrap_or(true) => Ok((mount, Scope::Machine)),
            (_, Some(dir)) => Ok((Mount::Present(dir), Scope::Confined)),
            (possible, None) => Ok((possible?, Scope::Confined)),
        }
    }

    /// Whether a directory is on a bpffs, or would be if it were made.
    #[must_use]
    pub fn is_on_bpffs(directory: &Path) -> bool {
        nearest_existing(directory).is_some_and(is_bpffs)
    }

    /// Whether the pin directory is on a bpffs, or would be once one is mounted by convention. Changes nothing.
    ///
    /// # Errors
    /// It is not, and may be mounted nowhere.
    pub fn bpffs(pin_dir: &Path) -> Result<Mount, EnvironmentError> {
        if Self::is_on_bpffs(pin_dir) {
            return Ok(Mount::Present(pin_dir.to_owned()));
        }
        if !pin_dir.starts_with(BPFFS_DEFAULT) || !Path::new(BPFFS_DEFAULT).is_dir() {
            return Err(EnvironmentError::NotBpffs(pin_dir.to_owned()));
        }
        check_filesystem("bpf", "CONFIG_BPF_SYSCALL")?;
        check_may_mount().map_err(EnvironmentError::MountBpffs)?;
        Ok(Mount::Possible(BPFFS_DEFAULT.into()))
    }

    /// Whether this process may use the run directory, or make it. Changes nothing.
    ///
    /// # Errors
    /// It may not.
    pub fn run_dir(run_dir: &Path) -> Result<(), EnvironmentError> {
        let Some(dir) = nearest_existing(run_dir) else { return Ok(()) };
        let writable = match dir.is_dir() {
            true => rustix::fs::access(dir, Access::WRITE_OK).map_err(io::Error::from),
            false => Err(io::ErrorKind::NotADirectory.into()),
        };
        let is_there = || if dir == run_dir { owned_dir::open(dir).map(drop) } else { Ok(()) };
        writable.and_then(|()| is_there()).map_err(|error| EnvironmentError::Io(dir.to_owned(), error))
    }
}

fn read(path: &str) -> Result<String, EnvironmentError> {
    fs::read_to_string(path).map_err(|error| EnvironmentError::Io(path.into(), error))
}

fn parse_release(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Whether net_cls or net_prio is a controller of a hierarchy of version 1. Those of none, and of cgroup2, are in the
/// one with number 0.
fn has_network_hierarchy(cgroups: &str) -> bool {
    let mut fields = cgroups.lines().map(|line| line.split_ascii_whitespace());
    fields.any(|mut line| matches!(line.next(), Some("net_cls" | "net_prio")) && line.next() != Some("0"))
}

fn effective_capabilities() -> io::Result<u64> {
    fs::read_to_string(STATUS).map(|status| parse_capabilities(&status))
}

fn parse_capabilities(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0)
}

/// The first that is missing. CAP_SYS_ADMIN stands for all, as it does in the kernel (`bpf_capable`, `bpf_net_capable`,
/// `perfmon_capable`). CAP_PERFMON, because functions of the programs take an element of an array that they are given a
/// pointer to (kernel/bpf/verifier.c, `retrieve_ptr_limit`).
fn missing_capability(effective: u64) -> Option<&'static str> {
    let needed = [(CAP_BPF, "CAP_BPF"), (CAP_NET_ADMIN, "CAP_NET_ADMIN"), (CAP_PERFMON, "CAP_PERFMON")];
    let mut missing = needed.into_iter().filter(|(bit, _)| effective & (bit | CAP_SYS_ADMIN) == 0);
    missing.next().map(|(_, name)| name)
}

fn check_filesystem(name: &'static str, options: &'static str) -> Result<(), EnvironmentError> {
    let is_known = read("/proc/filesystems")?.lines().any(|line| line.split('\t').nth(1) == Some(name));
    if is_known { Ok(()) } else { Err(EnvironmentError::NoFilesystem(name, options)) }
}

/// Mounting takes more than all the rest.
fn check_may_mount() -> io::Result<()> {
    let may = effective_capabilities()? & CAP_SYS_ADMIN != 0;
    if may { Ok(()) } else { Err(io::Error::other("it takes CAP_SYS_ADMIN")) }
}

fn may_mount_cgroup2(run_dir: &Path) -> Result<PathBuf, EnvironmentError> {
    check_filesystem("cgroup2", "CONFIG_CGROUPS and CONFIG_CGROUP_BPF")?;
    let dir = run_dir.join(CGROUP2_DIR);
    check_may_mount().map_err(|error| EnvironmentError::MountCgroup2(dir.clone(), error))?;
    Ok(dir)
}

/// Mounts cgroup2 through the opened run directory: no link can lead the mount elsewhere.
fn mount_cgroup2(run_dir: &Path, dir: PathBuf) -> Result<PathBuf, EnvironmentError> {
    let mounted = owned_dir::create(run_dir).and_then(|run_dir| {
        let place = owned_dir::create(&owned_dir::path_in(&run_dir, CGROUP2_DIR))?;
        Ok(mount("none", owned_dir::path_in(&place, "."), "cgroup2", MountFlags::empty(), None)?)
    });
    mounted.map_err(|error| EnvironmentError::MountCgroup2(dir.clone(), error))?;
    Ok(dir)
}

fn nearest_existing(path: &Path) -> Option<&Path> {
    path.ancestors().find(|dir| dir.exists())
}

/// Whether a directory is on a bpffs.
pub(super) fn is_bpffs(directory: &Path) -> bool {
    is_on(directory, BPF_FS_MAGIC)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_read_up_to_the_minor_number() {
        for (release, expected) in [
            ("6.18.44-fc-v669", Some((6, 18))),
            ("5.10.0+", Some((5, 10))),
            ("6.1-rc3", Some((6, 1))),
            ("7", None),
            ("linux", None),
            ("", None),
        ] {
            assert_eq!(parse_release(release), expected, "{release}");
        }
    }

    #[test]
    fn network_controllers_of_version_1_are_recognised() {
        let text = |net_cls, net_prio| {
            format!(
                "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t1\t1\t1\n\
                 net_cls\t{net_cls}\t8\t1\nnet_prio\t{net_prio}\t8\t1\n"
            )
        };
        for (net_cls, net_prio, expected) in [(0, 0, false), (4, 0, true), (0, 4, true), (4, 4, true)] {
            assert_eq!(has_network_hierarchy(&text(net_cls, net_prio)), expected, "{net_cls} {net_prio}");
        }
        assert!(!has_network_hierarchy(""));
        assert_eq!(Environment::lost_sockets(Scope::Machine), None);
    }

    #[test]
    fn missing_capabilities_are_named() {
        for (effective, missing) in [
            (0, Some("CAP_BPF")),
            (CAP_BPF, Some("CAP_NET_ADMIN")),
            (CAP_NET_ADMIN | CAP_PERFMON, Some("CAP_BPF")),
            (CAP_BPF | CAP_NET_ADMIN, Some("CAP_PERFMON")),
            (CAP_BPF | CAP_NET_ADMIN | CAP_PERFMON, None),
            (CAP_SYS_ADMIN, None),
        ] {
            assert_eq!(missing_capability(effective), missing);
        }
        assert_eq!(parse_capabilities("Name:\tx\nCapEff:\t000001ffffffffff\n"), 0x1ff_ffff_ffff);
        assert_eq!(parse_capabilities("nothing of use"), 0);
    }
}
