//! Every network namespace of the machine that a thread is in or that is mounted somewhere.

use std::{
    collections::HashSet,
    io,
    os::fd::{AsFd, OwnedFd},
};

use cproxy_mountinfo::{self as mountinfo, MountEntry};
use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, openat, statat},
    path::Arg,
    thread::{LinkNameSpaceType, move_into_link_name_space},
};

use super::processes::{Numbers, buffer, inode_at, inode_of, is_gone, open_directory, open_proc};

/// Calls `visit` once in each network namespace, with its inode number, on the calling thread, which stays in the last
/// of them. Returns how many namespaces could not be entered, although they are there.
///
/// One that lives only by an open descriptor or by the sockets in it is not found.
pub(super) fn visit_all(visit: impl FnMut(u64)) -> io::Result<u32> {
    let proc = open_proc()?;
    let mut visitor = NamespaceVisitor { visit, met: HashSet::new(), refused: 0 };
    // Where the thread is already takes no privilege.
    let here = inode_at(&proc, "thread-self/ns/net", "net")?.unwrap_or_default();
    (visitor.visit)(here);
    visitor.met.insert(here);
    for process in Numbers::of(&proc, &mut buffer()) {
        let process = process?;
        visitor.visit_by_link(&proc, &format!("{process}/ns/net"));
        let threads = format!("{process}/task");
        // It may be gone at any moment, and so may its threads.
        if has_one_thread(&proc, &threads) {
            continue;
        }
        let Ok(threads) = open_directory(&proc, &threads) else { continue };
        for thread in Numbers::of(&threads, &mut buffer()).map_while(Result::ok) {
            visitor.visit_by_link(&threads, &format!("{thread}/ns/net"));
        }
    }
    for (netns, mount) in mountinfo::list()?.iter().filter_map(|mount| Some((network_namespace(mount)?, mount))) {
        visitor.visit_once(netns, CWD, &mount.point);
    }
    Ok(visitor.refused)
}

/// Most processes have: the links of such a directory are two and one for each thread (fs/proc/base.c,
/// `proc_task_getattr`).
fn has_one_thread(proc: &OwnedFd, threads: &str) -> bool {
    statat(proc, threads, AtFlags::empty()).is_ok_and(|directory| directory.st_nlink == 3)
}

struct NamespaceVisitor<V> {
    visit: V,
    met: HashSet<u64>,
    refused: u32,
}

impl<V: FnMut(u64)> NamespaceVisitor<V> {
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
            Ok(()) => (self.visit)(netns),
            // That process is gone; another one may still be in the namespace.
            Err(error) if is_gone(&error) => return,
            Err(_) => self.refused += 1,
        }
        self.met.insert(netns);
    }
}

fn enter(directory: impl AsFd, path: impl Arg) -> io::Result<()> {
    let netns = openat(directory, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    Ok(move_into_link_name_space(netns.as_fd(), Some(LinkNameSpaceType::Network))?)
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
