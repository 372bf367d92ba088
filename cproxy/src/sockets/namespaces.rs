//! Every network namespace of the machine that a thread is in or that is mounted somewhere.

use std::{
    collections::HashSet,
    fs, io,
    os::fd::{AsFd, OwnedFd},
};

use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, openat, statat},
    thread::{LinkNameSpaceType, move_into_link_name_space},
};

use super::processes::{Numbers, buffer, inode_at, inode_of, is_gone, open_directory, open_proc};

/// Calls `visit` once in each network namespace, with its inode number, on the calling thread, which stays in the last of
/// them. Returns how many namespaces could not be entered, although they are there.
///
/// One that lives only by an open descriptor or by the sockets in it is not found.
pub(super) fn visit_all(visit: impl FnMut(u64)) -> io::Result<u32> {
    let proc = open_proc()?;
    let mut tour = Tour { visit, met: HashSet::new(), refused: 0 };
    // Where the thread is already takes no privilege.
    let here = inode_at(&proc, "thread-self/ns/net", "net")?.unwrap_or_default();
    (tour.visit)(here);
    tour.met.insert(here);
    for process in Numbers::of(&proc, &mut buffer()) {
        let process = process?;
        tour.stop_by_link(&proc, &format!("{process}/ns/net"));
        let threads = format!("{process}/task");
        // It may be gone at any moment, and so may its threads.
        if has_one_thread(&proc, &threads) {
            continue;
        }
        let Ok(threads) = open_directory(&proc, &threads) else { continue };
        for thread in Numbers::of(&threads, &mut buffer()).map_while(Result::ok) {
            tour.stop_by_link(&threads, &format!("{thread}/ns/net"));
        }
    }
    for (netns, path) in mounts(&fs::read_to_string("/proc/thread-self/mountinfo")?) {
        tour.stop(netns, CWD, &path);
    }
    Ok(tour.refused)
}

/// Most processes have: the links of such a directory are two and one for each thread (fs/proc/base.c, `proc_task_getattr`).
fn has_one_thread(proc: &OwnedFd, threads: &str) -> bool {
    statat(proc, threads, AtFlags::empty()).is_ok_and(|directory| directory.st_nlink == 3)
}

struct Tour<V> {
    visit: V,
    met: HashSet<u64>,
    refused: u32,
}

impl<V: FnMut(u64)> Tour<V> {
    fn stop_by_link(&mut self, directory: &OwnedFd, link: &str) {
        if let Ok(Some(netns)) = inode_at(directory, link, "net") {
            self.stop(netns, directory, link);
        }
    }

    fn stop(&mut self, netns: u64, directory: impl AsFd, path: &str) {
        if self.met.contains(&netns) {
            return;
        }
        match enter(directory, path) {
            Ok(()) => (self.visit)(netns),
            // Whoever was in it is gone; somebody else may still be.
            Err(error) if is_gone(&error) => return,
            Err(_) => self.refused += 1,
        }
        self.met.insert(netns);
    }
}

fn enter(directory: impl AsFd, path: &str) -> io::Result<()> {
    let netns = openat(directory, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    Ok(move_into_link_name_space(netns.as_fd(), Some(LinkNameSpaceType::Network))?)
}

/// Network namespaces in the text of `mountinfo` (proc_pid_mountinfo(5)): fields 4 and 5 are root and mount point, the
/// type follows the separator.
fn mounts(mountinfo: &str) -> impl Iterator<Item = (u64, String)> {
    mountinfo.lines().filter_map(|line| {
        let (mount, filesystem) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let (root, point) = (fields.next()?, fields.next()?);
        filesystem.starts_with("nsfs ").then(|| Some((inode_of(root, "net")?, unescape(point))))?
    })
}

/// Blanks and backslashes are written as three octal digits.
fn unescape(point: &str) -> String {
    let escapes = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
    escapes.iter().fold(point.to_owned(), |text, (escape, character)| text.replace(escape, character))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounted_network_namespaces_are_found_by_root_and_type() {
        let text = "61 59 0:4 net:[4026532345] /run/netns/a\\040b rw shared:3 - nsfs nsfs rw\n\
                    62 59 0:4 mnt:[4026532346] /run/mnt rw - nsfs nsfs rw\n\
                    63 59 0:24 / /run rw - tmpfs tmpfs rw\n\
                    garbage - nsfs nsfs\n\n - nsfs \n";
        let found: Vec<_> = mounts(text).collect();
        assert_eq!(found, [(4_026_532_345, "/run/netns/a b".to_owned())]);
    }
}
