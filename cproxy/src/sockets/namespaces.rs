//! Every network namespace of the machine that a thread is in or that is mounted somewhere.

use std::{
    collections::HashSet,
    fs::{self, File},
    io::{self, ErrorKind},
    path::{Path, PathBuf},
};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::mountinfo::{self, MountEntry};

/// Calls `visit` once in each network namespace, with its inode number, on the calling thread, which stays in the last of
/// them. Returns how many namespaces could not be entered, although they are there.
///
/// One that lives only by an open descriptor or by the sockets in it is not found.
pub(super) fn visit_all(visit: impl FnMut(u64)) -> io::Result<u32> {
    let mut tour = Tour { visit, met: HashSet::new(), refused: 0 };
    // Where the thread is already takes no privilege.
    let here = fs::read_link("/proc/thread-self/ns/net")?;
    (tour.visit)(inode_of(&here, "net").unwrap_or_default());
    tour.met.insert(here);
    for process in numbered(Path::new("/proc"))? {
        // A process may be gone at any moment.
        for thread in numbered(&process.join("task")).unwrap_or_default() {
            tour.stop_by_link(&thread.join("ns/net"));
        }
    }
    for mount in mountinfo::list()?.into_iter().filter(is_network_namespace) {
        tour.stop(mount.root, &mount.point);
    }
    Ok(tour.refused)
}

struct Tour<V> {
    visit: V,
    /// By what the kernel calls them, such as `net:[4026531840]`.
    met: HashSet<PathBuf>,
    refused: u32,
}

impl<V: FnMut(u64)> Tour<V> {
    fn stop_by_link(&mut self, link: &Path) {
        if let Ok(name) = fs::read_link(link) {
            self.stop(name, link);
        }
    }

    fn stop(&mut self, name: PathBuf, path: &Path) {
        if self.met.contains(&name) {
            return;
        }
        match enter(path) {
            Ok(()) => (self.visit)(inode_of(&name, "net").unwrap_or_default()),
            // Whoever was in it is gone; somebody else may still be.
            Err(error) if is_gone(&error) => return,
            Err(_) => self.refused += 1,
        }
        self.met.insert(name);
    }
}

fn enter(path: &Path) -> io::Result<()> {
    Ok(move_into_link_name_space(std::os::fd::AsFd::as_fd(&File::open(path)?), Some(LinkNameSpaceType::Network))?)
}

/// Whether the error says that a process has ended.
pub(super) fn is_gone(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
}

/// The directories whose names are numbers: processes in `/proc`, threads in a process's `task`.
pub(super) fn numbered(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let is_number = |name: &std::ffi::OsStr| name.as_encoded_bytes().iter().all(u8::is_ascii_digit);
    let entries = fs::read_dir(directory)?.flatten();
    Ok(entries.filter(|entry| is_number(&entry.file_name())).map(|entry| entry.path()).collect())
}

/// The inode number in what links of a kind read, such as `socket:[12345]`.
pub(super) fn inode_of(target: &Path, kind: &str) -> Option<u64> {
    target.to_str()?.strip_prefix(kind)?.strip_prefix(":[")?.strip_suffix(']')?.parse().ok()
}

/// Whether a network namespace is mounted; its name, such as `net:[4026531840]`, is the mount's root then.
fn is_network_namespace(mount: &MountEntry) -> bool {
    mount.kind == b"nsfs" && mount.root.as_os_str().as_encoded_bytes().starts_with(b"net:[")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_have_inode_numbers() {
        for (target, expected) in
            [("socket:[12345]", Some(12_345)), ("pipe:[1]", None), ("socket:[x]", None), ("", None)]
        {
            assert_eq!(inode_of(Path::new(target), "socket"), expected, "{target}");
        }
        assert_eq!(inode_of(Path::new("net:[4026531840]"), "net"), Some(4_026_531_840));
    }

    #[test]
    fn mounted_network_namespaces_are_known_by_root_and_type() {
        let mount = |root: &str, kind: &[u8]| {
            let (root, point, kind) = (root.into(), "/run/netns/a b".into(), kind.to_owned());
            is_network_namespace(&MountEntry { id: 1, root, point, kind, options: Vec::new() })
        };
        assert!(mount("net:[4026532345]", b"nsfs"));
        assert!(!mount("mnt:[4026532346]", b"nsfs") && !mount("/", b"tmpfs") && !mount("net:[1]", b"tmpfs"));
    }
}
