//! Allow-list of system calls: those of the agent after its start, and of the child that attaches the programs again.
//!
//! Any other call fails with ENOSYS, as on a kernel that does not have it, and the agent goes on with less, as it does
//! there. It is not killed. Arguments that are numbers are checked where the call would be of use to an attacker. Paths
//! are pointers, which a filter cannot follow.

use std::env::consts::ARCH;

use cproxy_core::sorted_map;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen as Length, SeccompCmpOp as Op, SeccompCondition,
    SeccompFilter, SeccompRule, apply_filter_all_threads,
};

/// Calls with any arguments.
const ANY: &[libc::c_long] = &[
    // Files. Those that change something only add, rename or remove names, by way of the broker.
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_pread64,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_lseek,
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_pipe2,
    libc::SYS_flock,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_getdents64,
    libc::SYS_readlinkat,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_getcwd,
    libc::SYS_mkdirat,
    libc::SYS_unlinkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_inotify_init1,
    libc::SYS_inotify_add_watch,
    libc::SYS_inotify_rm_watch,
    // Sockets.
    libc::SYS_socketpair,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_listen,
    libc::SYS_accept4,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_shutdown,
    libc::SYS_setsockopt,
    libc::SYS_getsockopt,
    // Waiting and time.
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_ppoll,
    libc::SYS_eventfd2,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    libc::SYS_restart_syscall,
    // Memory.
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_getrandom,
    // Threads and signals.
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_rseq,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_gettid,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // Processes: children, and the owners of sockets.
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_capget,
    libc::SYS_getrusage,
    libc::SYS_uname,
    libc::SYS_sysinfo,
];

/// Older forms of calls that aarch64 does not have.
#[cfg(target_arch = "x86_64")]
const ANY_OF_ARCHITECTURE: &[libc::c_long] = &[
    libc::SYS_access,
    libc::SYS_arch_prctl,
    libc::SYS_dup2,
    libc::SYS_epoll_wait,
    libc::SYS_getdents,
    libc::SYS_getrlimit,
    libc::SYS_lstat,
    libc::SYS_mkdir,
    libc::SYS_pipe,
    libc::SYS_poll,
    libc::SYS_readlink,
    libc::SYS_rename,
    libc::SYS_rmdir,
    libc::SYS_stat,
    libc::SYS_unlink,
];
#[cfg(not(target_arch = "x86_64"))]
const ANY_OF_ARCHITECTURE: &[libc::c_long] = &[];

/// Calls that are allowed because a broker makes them.
const WITH_BROKER: &[libc::c_long] = &[libc::SYS_fchmod];

/// Calls of an agent that starts its children itself.
#[cfg(target_arch = "x86_64")]
const WITHOUT_BROKER: &[libc::c_long] = &[libc::SYS_execve, libc::SYS_vfork];
#[cfg(not(target_arch = "x86_64"))]
const WITHOUT_BROKER: &[libc::c_long] = &[libc::SYS_execve];

/// Commands of bpf(2) for the table, as first and last number: maps; pins; descriptors by id and their properties, and
/// queries; freezing and batches; a link by its id; detaching one.
const BPF_COMMANDS: [(u64, u64); 7] = [(0, 4), (6, 7), (13, 16), (22, 22), (24, 27), (30, 30), (34, 34)];

/// Commands of bpf(2) of the child that loads and attaches programs: programs; BTF; links, and maps of programs.
const LOADING_COMMANDS: [(u64, u64); 4] = [(5, 5), (18, 19), (28, 29), (35, 35)];

/// Options of prctl(2): names of threads and memory, the signal at the end of the parent, the bounding set, no new
/// privileges.
const PRCTL_OPTIONS: [libc::c_int; 6] = [
    libc::PR_SET_NAME,
    libc::PR_SET_PDEATHSIG,
    libc::PR_CAPBSET_READ,
    libc::PR_SET_NO_NEW_PRIVS,
    libc::PR_GET_NO_NEW_PRIVS,
    libc::PR_SET_VMA,
];

/// `SIOCGSKNS` and `RNDRESEEDCRNG` (include/uapi/linux/sockios.h, include/uapi/linux/random.h).
const SIOCGSKNS: u64 = 0x894C;
const RNDRESEEDCRNG: u64 = 0x5207;

/// Requests of ioctl(2): the network namespace of a socket, a new seed of the kernel's random numbers, modes of
/// descriptors, and whether one is a terminal.
const IOCTLS: [u64; 5] = [SIOCGSKNS, RNDRESEEDCRNG, libc::FIONBIO, libc::FIOCLEX, libc::TCGETS];

/// Commands of fcntl(2): duplicates and flags. Others have the kernel send signals to any process.
const FCNTLS: [libc::c_int; 5] = [libc::F_DUPFD, libc::F_GETFD, libc::F_SETFD, libc::F_GETFL, libc::F_DUPFD_CLOEXEC];

/// Families of sockets with any protocol.
const FAMILIES: [libc::c_int; 4] = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_VSOCK];

/// Protocols of netlink: routes and addresses, and sockets. Others reach firewalls and whoever follows devices.
const NETLINK: [libc::c_int; 2] = [libc::NETLINK_ROUTE, libc::NETLINK_SOCK_DIAG];

/// Namespaces that a new thread or process could get.
const NEW_NAMESPACES: libc::c_int = libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET;

/// Flags with which open(2) changes an existing file, or gives write access to it.
const WRITE_FLAGS: libc::c_int =
    libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC | (libc::O_TMPFILE & !libc::O_DIRECTORY);

/// Flags with which it makes a new file, and touches no existing one.
pub(super) const CREATE_FLAGS: libc::c_int = libc::O_CREAT | libc::O_EXCL;

/// Limits the system calls of all threads, and of those and processes that they start, for ever. A broker has those
/// already that change names or duplicate descriptors; without one they are allowed as they are.
///
/// # Errors
/// The reason why they are not limited.
pub fn filter_system_calls(has_broker: bool) -> Result<(), String> {
    let program = program(has_broker).map_err(|error| error.to_string())?;
    apply_filter_all_threads(&program).map_err(|error| match error {
        seccompiler::Error::Seccomp(error) => format!("the kernel refuses: {error}; it needs CONFIG_SECCOMP_FILTER"),
        error => error.to_string(),
    })
}

fn program(has_broker: bool) -> Result<BpfProgram, BackendError> {
    let others = if has_broker { WITH_BROKER } else { WITHOUT_BROKER };
    // An empty list of rules allows all arguments.
    let any = ANY.iter().chain(ANY_OF_ARCHITECTURE).chain(others).map(|&call| (call, Vec::new()));
    let rules = sorted_map(any.chain(checked(has_broker)?));
    let refused = SeccompAction::Errno(libc::ENOSYS as u32);
    SeccompFilter::new(rules, refused, SeccompAction::Allow, ARCH.try_into()?)?.try_into()
}

/// Calls with some arguments.
fn checked(has_broker: bool) -> Result<Vec<(libc::c_long, Vec<SeccompRule>)>, BackendError> {
    let word = |argument, op, value: libc::c_int| condition(argument, op, u64::from(value as u32));
    let is = |argument, value| SeccompRule::new(vec![word(argument, Op::Eq, value)?]);
    let has_none = |argument, bits: libc::c_int| word(argument, Op::MaskedEq(u64::from(bits as u32)), 0);
    let open = |flags| {
        let reads = SeccompRule::new(vec![has_none(flags, WRITE_FLAGS)?])?;
        let creates = word(flags, Op::MaskedEq(CREATE_FLAGS as u64), CREATE_FLAGS)?;
        Ok::<_, BackendError>(vec![reads, SeccompRule::new(vec![creates])?])
    };
    let loading = if has_broker { &[][..] } else { &LOADING_COMMANDS };
    let bpf = BPF_COMMANDS
        .iter()
        .chain(loading)
        .map(|&(first, last)| SeccompRule::new(vec![condition(0, Op::Ge, first)?, condition(0, Op::Le, last)?]));
    let ioctls = IOCTLS.iter().map(|&request| SeccompRule::new(vec![condition(1, Op::Eq, request)?]));
    // A debug build loads shared libraries when it starts its child.
    let writable_only = || {
        let is_static = cfg!(target_feature = "crt-static");
        if is_static { Ok(vec![SeccompRule::new(vec![has_none(2, libc::PROT_EXEC)?])?]) } else { Ok(Vec::new()) }
    };
    let own = std::process::id().cast_signed();
    // A terminal with O_ASYNC sends signals to the processes in its foreground.
    let flags = SeccompRule::new(vec![word(1, Op::Eq, libc::F_SETFL)?, has_none(2, libc::O_ASYNC)?]);
    let netlink = NETLINK
        .iter()
        .map(|&protocol| SeccompRule::new(vec![word(0, Op::Eq, libc::AF_NETLINK)?, word(2, Op::Eq, protocol)?]));
    let mut clone = vec![has_none(0, NEW_NAMESPACES)?];
    if has_broker {
        // Threads alone.
        let thread = libc::CLONE_THREAD;
        clone.push(word(0, Op::MaskedEq(thread as u64), thread)?);
    }
    Ok(vec![
        (libc::SYS_openat, open(2)?),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_open, open(1)?),
        (libc::SYS_socket, FAMILIES.iter().map(|&family| is(0, family)).chain(netlink).collect::<Result<_, _>>()?),
        (libc::SYS_bpf, bpf.collect::<Result<_, _>>()?),
        (libc::SYS_ioctl, ioctls.collect::<Result<_, _>>()?),
        (libc::SYS_prctl, PRCTL_OPTIONS.iter().map(|&option| is(0, option)).collect::<Result<_, _>>()?),
        (libc::SYS_setns, vec![is(1, libc::CLONE_NEWNET)?]),
        (libc::SYS_clone, vec![SeccompRule::new(clone)?]),
        // Its own limits.
        (libc::SYS_prlimit64, vec![is(0, 0)?]),
        // Its own end.
        (libc::SYS_tgkill, vec![SeccompRule::new(vec![word(0, Op::Eq, own)?, word(2, Op::Eq, libc::SIGABRT)?])?]),
        (libc::SYS_fcntl, FCNTLS.iter().map(|&command| is(1, command)).chain([flags]).collect::<Result<_, _>>()?),
        (libc::SYS_mmap, writable_only()?),
        (libc::SYS_mprotect, writable_only()?),
    ])
}

/// Condition on the lower half of an argument: all of these are 32 bits long.
fn condition(argument: u8, op: Op, value: u64) -> Result<SeccompCondition, BackendError> {
    SeccompCondition::new(argument, Length::Dword, op, value)
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File, OpenOptions},
        io,
        os::unix::fs::PermissionsExt,
        path::Path,
        process::Command,
    };

    use super::*;

    #[test]
    fn the_list_becomes_a_filter_and_names_no_call_twice() {
        assert!(program(true).unwrap().len() < 1000 && program(false).unwrap().len() < 1000);
        let calls = ANY.iter().chain(ANY_OF_ARCHITECTURE).chain(WITH_BROKER).chain(WITHOUT_BROKER);
        let calls: Vec<_> = calls.copied().collect();
        let checked: Vec<_> = checked(true).unwrap().into_iter().map(|(call, _)| call).collect();
        for (index, call) in calls.iter().enumerate() {
            assert!(!calls[..index].contains(call) && !checked.contains(call), "{call}");
        }
    }

    /// Name of a variable that makes a process of the tests try what a filter refuses.
    const LIMITED: &str = "CPROXY_TEST_LIMITED";

    #[test]
    fn other_system_calls_fail_and_end_nothing() {
        if let Some(dir) = std::env::var_os(LIMITED) {
            return try_all(Path::new(&dir));
        }
        // The filter is for ever.
        let dir = std::env::temp_dir().join(format!("cproxy-limited-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let mut limited = Command::new(std::env::current_exe().unwrap());
        limited.args(["--exact", "privileges::system_calls::tests::other_system_calls_fail_and_end_nothing"]);
        let output = limited.arg("--nocapture").env(LIMITED, &dir).output().unwrap();
        fs::remove_dir_all(&dir).unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("everything was tried"), "{output:?}");
    }

    fn try_all(dir: &Path) {
        let file = dir.join("file");
        fs::write(&file, "before").unwrap();
        filter_system_calls(false).unwrap();
        let is_refused = |result: io::Result<()>| {
            assert_eq!(result.map_err(|error| error.raw_os_error()), Err(Some(libc::ENOSYS)));
        };
        let errno = |result: Result<(), rustix::io::Errno>| result.map_err(io::Error::from);
        // Files that exist cannot be changed, new ones can be made.
        is_refused(fs::write(&file, "after"));
        is_refused(OpenOptions::new().append(true).open(&file).map(drop));
        is_refused(OpenOptions::new().read(true).write(true).open(&file).map(drop));
        is_refused(fs::set_permissions(&file, fs::Permissions::from_mode(0o777)));
        is_refused(std::os::unix::fs::symlink(&file, dir.join("link")));
        is_refused(fs::hard_link(&file, dir.join("link")));
        File::create_new(dir.join("new")).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "before");
        // Neither namespaces nor mounts, other processes, or families of sockets that the agent does not use.
        is_refused(errno(rustix::mount::unmount(dir, rustix::mount::UnmountFlags::empty())));
        // SAFETY: nothing is shared that another part of the process relies on.
        is_refused(errno(unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWUSER) }));
        is_refused(errno(rustix::process::test_kill_process(rustix::process::getpid())));
        is_refused(errno(rustix::process::chroot(dir)));
        let packets = rustix::net::socket(rustix::net::AddressFamily::PACKET, rustix::net::SocketType::RAW, None);
        is_refused(errno(packets.map(drop)));
        // Threads, processes and their pipes, and usual sockets.
        std::thread::spawn(|| drop(std::net::UdpSocket::bind("127.0.0.1:0").unwrap())).join().unwrap();
        let listed = Command::new("/proc/self/exe").args(["--list", "no-such-test"]).output().unwrap();
        assert!(listed.status.success(), "{listed:?}");
        println!("everything was tried");
    }

    #[test]
    fn no_call_that_changes_the_machine_is_allowed() {
        for call in [
            libc::SYS_mount,
            libc::SYS_umount2,
            libc::SYS_unshare,
            libc::SYS_ptrace,
            libc::SYS_process_vm_writev,
            libc::SYS_init_module,
            libc::SYS_finit_module,
            libc::SYS_kexec_load,
            libc::SYS_reboot,
            libc::SYS_mknodat,
            libc::SYS_linkat,
            libc::SYS_symlinkat,
            libc::SYS_fchmodat,
            libc::SYS_fchownat,
            libc::SYS_open_by_handle_at,
            libc::SYS_io_uring_setup,
            libc::SYS_userfaultfd,
            libc::SYS_perf_event_open,
            libc::SYS_kill,
            libc::SYS_setuid,
        ] {
            assert!(!ANY.contains(&call) && !ANY_OF_ARCHITECTURE.contains(&call), "{call}");
        }
    }
}
