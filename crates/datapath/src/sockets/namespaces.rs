//! Every network namespace of the machine that a thread is in, that is mounted somewhere, or that a process has a
//! socket in.

use std::{
    collections::HashSet,
    io,
    ops::ControlFlow,
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
};

use cproxy_mountinfo::{self as mountinfo, MountEntry};
use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, fstat, openat, statat},
    io::Errno,
    path::Arg,
    process::Pid,
    thread::{LinkNameSpaceType, move_into_link_name_space},
};

use super::{
    owners,
    processes::{Numbers, buffer, inode_at, inode_of, is_gone, is_passing, open_directory, open_proc},
};

/// Calls `visit` once in each network namespace, with its inode number, on the calling thread, which stays in the last
/// of them. Returns how many namespaces could not be entered, although they are there. If that may succeed another
/// time, it fails at the end.
///
/// One that lives only by an open descriptor or by the sockets in it is not found.
pub(super) fn visit_all(visit: impl FnMut(u64)) -> io::Result<u32> {
    let mut visitor = Visitor::new(visit);
    visitor.visit_known()?;
    Ok(visitor.refused())
}

/// Most processes have: the links of such a directory are two and one for each thread (fs/proc/base.c,
/// `proc_task_getattr`).
fn has_one_thread(proc: &OwnedFd, threads: &str) -> bool {
    statat(proc, threads, AtFlags::empty()).is_ok_and(|directory| directory.st_nlink == 3)
}

/// A walk through network namespaces that visits each of them once, with its inode number, on the calling thread, which
/// stays in the last one.
pub(super) struct Visitor<V> {
    visit: V,
    met: HashSet<u64>,
    /// The inode number of a file in `/proc` that each namespace has, of all that were visited.
    met_files: HashSet<u64>,
    refused: u32,
    /// An error that may not come another time.
    failure: Option<io::Error>,
}

impl<V: FnMut(u64)> Visitor<V> {
    pub(super) fn new(visit: V) -> Self {
        Self { visit, met: HashSet::new(), met_files: HashSet::new(), refused: 0, failure: None }
    }

    /// Namespaces and processes so far that could not be searched, although they are there.
    pub(super) fn refused(&self) -> u32 {
        self.refused
    }

    /// Visits the namespaces that a thread is in or that are mounted, the present one first.
    pub(super) fn visit_known(&mut self) -> io::Result<()> {
        let proc = open_proc()?;
        // Where the thread is already takes no privilege.
        let here = inode_at(&proc, "thread-self/ns/net", "net")?.unwrap_or_default();
        self.visit_here(here);
        self.met.insert(here);
        for process in Numbers::of(&proc, &mut buffer()) {
            let process = process?;
            self.visit_by_link(&proc, &format!("{process}/ns/net"));
            let threads = format!("{process}/task");
            // It may be gone at any moment, and so may its threads.
            if has_one_thread(&proc, &threads) {
                continue;
            }
            let Ok(threads) = open_directory(&proc, &threads) else { continue };
            for thread in Numbers::of(&threads, &mut buffer()).map_while(Result::ok) {
                self.visit_by_link(&threads, &format!("{thread}/ns/net"));
            }
        }
        for (netns, mount) in mountinfo::list()?.iter().filter_map(|mount| Some((network_namespace(mount)?, mount))) {
            self.visit_once(netns, CWD, &mount.point);
        }
        self.failure.take().map_or(Ok(()), Err)
    }

    /// Visits the namespaces of all processes' sockets: any that the application of a socket may be connected in. Takes
    /// time for each socket. A process whose descriptors may not be looked into counts as refused if its own namespace
    /// was not visited.
    pub(super) fn visit_hidden(&mut self) -> io::Result<()> {
        let mut refused = Vec::new();
        let show = |descriptor: &owners::Descriptor<'_>| {
            if let Some(socket) = descriptor.duplicate()? {
                let netns = network_namespace_of(&socket)?;
                let inode = fstat(&netns)?.st_ino;
                if self.met.insert(inode) {
                    move_into_link_name_space(netns.as_fd(), Some(LinkNameSpaceType::Network))?;
                    self.visit_here(inode);
                }
            }
            Ok(ControlFlow::Continue(()))
        };
        owners::each_socket_or(show, |process| refused.push(process))?;
        let is_unmet = |process: &&Pid| match namespace_file(&process.to_string()) {
            Ok(file) => !self.met_files.contains(&file),
            Err(error) => !is_gone(&error.into()),
        };
        self.refused += refused.iter().filter(is_unmet).count() as u32;
        Ok(())
    }

    /// Visits the namespace that the thread is in.
    fn visit_here(&mut self, netns: u64) {
        (self.visit)(netns);
        self.met_files.extend(namespace_file("thread-self"));
    }

    fn visit_by_link(&mut self, directory: &OwnedFd, link: &str) {
        if let Ok(Some(netns)) = inode_at(directory, link, "net") {
            self.visit_once(netns, directory, link);
        }
    }

    fn visit_once(&mut self, netns: u64, directory: impl AsFd, path: impl Arg) {
        if self.met.contains(&netns) {
            return;
        }
        match enter(directory, path) {
            Ok(()) => self.visit_here(netns),
            // That process is gone; another one may still be in the namespace.
            Err(error) if is_gone(&error) => return,
            Err(error) if is_passing(&error) => self.failure = Some(error),
            Err(_) => self.refused += 1,
        }
        self.met.insert(netns);
    }
}

fn enter(directory: impl AsFd, path: impl Arg) -> io::Result<()> {
    let netns = openat(directory, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    Ok(move_into_link_name_space(netns.as_fd(), Some(LinkNameSpaceType::Network))?)
}

/// The inode number of a file that each network namespace has its own of. To see it takes no permission to inspect the
/// process, unlike the namespace itself.
fn namespace_file(process: &str) -> Result<u64, Errno> {
    statat(CWD, format!("/proc/{process}/net/dev"), AtFlags::empty()).map(|file| file.st_ino)
}

/// `SIOCGSKNS` (include/uapi/linux/sockios.h).
const SIOCGSKNS: libc::Ioctl = 0x894C;

/// The network namespace of a socket.
fn network_namespace_of(socket: &OwnedFd) -> io::Result<OwnedFd> {
    // SAFETY: the request takes no argument.
    match unsafe { libc::ioctl(socket.as_raw_fd(), SIOCGSKNS) } {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: the kernel has just returned this descriptor, and nothing else uses it.
        netns => Ok(unsafe { OwnedFd::from_raw_fd(netns) }),
    }
}

/// The network namespace that is mounted; its name, such as `net:[4026531840]`, is the mount's root then.
fn network_namespace(mount: &MountEntry) -> Option<u64> {
    if mount.kind == b"nsfs" { inode_of(mount.root.to_str()?, "net") } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounted_network_namespaces_are_known_by_root_and_type() {
        let netns = |root: &str, kind: &[u8]| {
            let (root, point, kind) = (root.into(), "/run/netns/a b".into(), kind.to_owned());
            network_namespace(&MountEntry { id: 1, root, point, kind, options: Vec::new() })
        };
        assert_eq!(netns("net:[4026532345]", b"nsfs"), Some(4_026_532_345));
        assert_eq!([netns("mnt:[4026532346]", b"nsfs"), netns("/", b"tmpfs"), netns("net:[1]", b"tmpfs")], [None; 3]);
    }
}
