//! Sockets by way of the processes that own them: the one way to read what programs have stored with a UDP socket.
//!
//! A dump of TCP sockets can carry it (`INET_DIAG_REQ_SK_BPF_STORAGES`), but one of UDP sockets does not: the kernel
//! fills in the attribute for connection sockets only (net/ipv4/inet_diag.c, `inet_sk_diag_fill`). A duplicate of the
//! owner's descriptor serves all of them.

use std::{
    cell::OnceCell,
    collections::HashSet,
    fs, io,
    ops::ControlFlow,
    os::fd::{AsRawFd, OwnedFd},
};

use rustix::{
    fs::fstat,
    io::Errno,
    net::{AddressFamily, SocketType, socket},
    process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open},
    thread::{CapabilitySet, capabilities},
};

use super::{
    error::OwnersError,
    processes::{Numbers, buffer, inode_at, is_gone, is_passing, open_directory, open_proc},
};

/// Name of an agent's broker, a process.
pub const BROKER_NAME: &str = "cproxy-broker";

/// Names of processes with short-lived duplicates of others' sockets: agents, commands and brokers. No socket of their
/// own is translated.
const BORROWERS: [&str; 2] = ["cproxy", BROKER_NAME];

/// A descriptor of a process, for a socket.
pub(super) struct Descriptor<'p> {
    /// The socket's inode.
    pub(super) inode: u64,
    process: &'p Process,
    number: i32,
}

struct Process {
    pid: Pid,
    pidfd: OnceCell<OwnedFd>,
}

/// As [`each_socket_or`]. Returns how many processes could not be looked into.
pub(super) fn each_socket(show: impl FnMut(&Descriptor<'_>) -> io::Result<ControlFlow<()>>) -> io::Result<u32> {
    let mut refused = 0;
    each_socket_or(show, |_| refused += 1)?;
    Ok(refused)
}

/// Shows each descriptor for a socket of each process, until `show` has seen enough, and to `refuse` the processes that
/// could not be looked into, although they are there. If that may succeed another time, it fails at the end.
///
/// Sockets that no process has among its descriptors are not found: those on their way through a Unix socket, those
/// registered with io_uring alone, those of a thread with descriptors of its own.
pub(super) fn each_socket_or(
    mut show: impl FnMut(&Descriptor<'_>) -> io::Result<ControlFlow<()>>,
    mut refuse: impl FnMut(Pid),
) -> io::Result<()> {
    let (proc, mut failure) = (open_proc()?, None);
    for number in Numbers::of(&proc, &mut buffer()) {
        let Some(pid) = Pid::from_raw(number?) else { continue };
        match each_socket_of(&proc, pid, &mut show) {
            Ok(ControlFlow::Break(())) => break,
            Ok(ControlFlow::Continue(())) => {}
            Err(error) if is_gone(&error) => {}
            Err(error) if is_passing(&error) => failure = Some(error),
            Err(_) => refuse(pid),
        }
    }
    failure.map_or(Ok(()), Err)
}

/// Inodes of the sockets of this process.
pub(super) fn own_inodes() -> io::Result<HashSet<u64>> {
    let mut inodes = HashSet::new();
    let mut show = |descriptor: &Descriptor<'_>| {
        inodes.insert(descriptor.inode);
        Ok(ControlFlow::Continue(()))
    };
    each_socket_of(&open_proc()?, rustix::process::getpid(), &mut show).map(|_| inodes)
}

fn each_socket_of(
    proc: &OwnedFd,
    pid: Pid,
    show: &mut impl FnMut(&Descriptor<'_>) -> io::Result<ControlFlow<()>>,
) -> io::Result<ControlFlow<()>> {
    let directory = open_directory(proc, &format!("{pid}/fd"))?;
    let process = Process { pid, pidfd: OnceCell::new() };
    for number in Numbers::of(&directory, &mut buffer()) {
        let number = number?;
        let inode = match inode_at(&directory, &number.to_string(), "socket") {
            Err(Errno::NOENT) => continue,
            inode => inode?,
        };
        let Some(inode) = inode else { continue };
        if show(&Descriptor { inode, process: &process, number })?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
    }
    Ok(ControlFlow::Continue(()))
}

impl Descriptor<'_> {
    /// A process that has it.
    pub(super) fn owner(&self) -> Pid {
        self.process.pid
    }

    /// Name of the process that has it; `None` if it has ended meanwhile.
    pub(super) fn owner_name(&self) -> Option<String> {
        // proc_pid_comm(5); whatever bytes the process likes.
        let bytes = fs::read(format!("/proc/{}/comm", self.owner())).ok()?;
        Some(String::from_utf8_lossy(&bytes).trim_end_matches('\n').to_owned())
    }

    /// The socket; `None` if the descriptor is of another one by now, or closed.
    pub(super) fn duplicate(&self) -> io::Result<Option<OwnedFd>> {
        match pidfd_getfd(self.process.pidfd()?, self.number, PidfdGetfdFlags::empty()) {
            Ok(socket) if fstat(&socket)?.st_ino == self.inode => Ok(Some(socket)),
            Ok(_) | Err(Errno::BADF) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

impl Process {
    fn pidfd(&self) -> io::Result<&OwnedFd> {
        if let Some(pidfd) = self.pidfd.get() {
            return Ok(pidfd);
        }
        let pidfd = pidfd_open(self.pid, PidfdFlags::empty())?;
        Ok(self.pidfd.get_or_init(|| pidfd))
    }
}

/// Whether this is the name of a process with duplicates of others' sockets.
pub(super) fn is_borrower(name: Option<&str>) -> bool {
    name.is_some_and(|name| BORROWERS.contains(&name))
}

/// Fails without permission to search other users' processes, or any process.
pub(super) fn check_access() -> Result<(), OwnersError> {
    // Nothing but internet sockets can be duplicated where calls are filtered.
    let own = [AddressFamily::INET, AddressFamily::INET6].map(|family| socket(family, SocketType::DGRAM, None));
    for own in own.into_iter().flatten() {
        let duplicate = pidfd_open(rustix::process::getpid(), PidfdFlags::empty())
            .and_then(|pidfd| pidfd_getfd(&pidfd, own.as_raw_fd(), PidfdGetfdFlags::empty()));
        duplicate.map_err(OwnersError::PidfdGetfd)?;
    }
    let effective = capabilities(None).map(|sets| sets.effective).unwrap_or(CapabilitySet::empty());
    // The second is for other network namespaces (setns(2)).
    for (capability, name) in
        [(CapabilitySet::SYS_PTRACE, "CAP_SYS_PTRACE"), (CapabilitySet::SYS_ADMIN, "CAP_SYS_ADMIN")]
    {
        if !effective.contains(capability) {
            return Err(OwnersError::MissingCapability(name));
        }
    }
    Ok(())
}
