//! Sockets by way of the processes that own them: the one way to read what programs have stored with a socket.
//!
//! A dump of TCP sockets can carry it (`INET_DIAG_REQ_SK_BPF_STORAGES`), but one of UDP sockets does not: the kernel
//! fills in the attribute for connection sockets only (net/ipv4/inet_diag.c, `inet_sk_diag_fill`). A duplicate of the
//! owner's descriptor serves all of them.

use std::{
    collections::HashMap,
    fs, io,
    os::fd::{AsRawFd, OwnedFd},
    path::Path,
};

use rustix::{
    fs::fstat,
    io::Errno,
    process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open},
    thread::{CapabilitySet, capabilities},
};

use super::namespaces::{inode_of, is_gone, numbered};

/// Looks for the sockets with these inodes and shows each to `is_settled`, by a duplicate of a process's descriptor, until it
/// says so; it is then no longer wanted. Returns how many processes could not be looked into, although they are there.
///
/// Sockets that no process has among its descriptors are not found: those on their way through a Unix socket, those
/// registered with io_uring alone, those of a thread with descriptors of its own.
pub(super) fn find<T>(
    wanted: &mut HashMap<u64, T>,
    mut is_settled: impl FnMut(&T, &OwnedFd, Pid) -> bool,
) -> io::Result<u32> {
    let mut refused = 0;
    if wanted.is_empty() {
        return Ok(refused);
    }
    for process in numbered(Path::new("/proc"))? {
        match find_in(&process, wanted, &mut is_settled) {
            Ok(()) if wanted.is_empty() => break,
            Ok(()) => {}
            Err(error) if is_gone(&error) => {}
            Err(_) => refused += 1,
        }
    }
    Ok(refused)
}

fn find_in<T>(
    process: &Path,
    wanted: &mut HashMap<u64, T>,
    is_settled: &mut impl FnMut(&T, &OwnedFd, Pid) -> bool,
) -> io::Result<()> {
    let Some(pid) = last_number(process).and_then(Pid::from_raw) else { return Ok(()) };
    let mut pidfd = None;
    for descriptor in numbered(&process.join("fd"))? {
        let target = match fs::read_link(&descriptor) {
            Err(error) if is_gone(&error) => continue,
            target => target?,
        };
        let (Some(inode), Some(number)) = (inode_of(&target, "socket"), last_number(&descriptor)) else { continue };
        let Some(sought) = wanted.get(&inode) else { continue };
        let pidfd = match &pidfd {
            Some(pidfd) => pidfd,
            None => pidfd.insert(pidfd_open(pid, PidfdFlags::empty())?),
        };
        match pidfd_getfd(pidfd, number, PidfdGetfdFlags::empty()) {
            // It may be another one by now, or closed (BADF).
            Ok(socket) if fstat(&socket)?.st_ino != inode => {}
            Ok(socket) if is_settled(sought, &socket, pid) => drop(wanted.remove(&inode)),
            Ok(_) | Err(Errno::BADF) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Fails where other users' processes may not be looked into, or no process at all.
pub(super) fn probe() -> Result<(), String> {
    let own = pidfd_open(rustix::process::getpid(), PidfdFlags::empty())
        .and_then(|pidfd| pidfd_getfd(&pidfd, pidfd.as_raw_fd(), PidfdGetfdFlags::empty()));
    own.map_err(|error| format!("pidfd_getfd failed: {error}"))?;
    let effective = capabilities(None).map(|sets| sets.effective).unwrap_or(CapabilitySet::empty());
    // The second is for other network namespaces (setns(2)).
    for (capability, name) in
        [(CapabilitySet::SYS_PTRACE, "CAP_SYS_PTRACE"), (CapabilitySet::SYS_ADMIN, "CAP_SYS_ADMIN")]
    {
        if !effective.contains(capability) {
            return Err(format!("missing {name}: run cproxy as root"));
        }
    }
    Ok(())
}

fn last_number(path: &Path) -> Option<i32> {
    path.file_name()?.to_str()?.parse().ok()
}
