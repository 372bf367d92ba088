//! Polling of manifests that other machines can change: the host of a guest (virtio-fs, 9p), other clients of a file
//! server (NFS, SMB). inotify reports only changes by this machine's kernel. Without inotify, all are polled.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use cproxy_core::sorted_set;
use tokio::time::{Instant, sleep_until};

use super::files::{manifests_at, nearest};

/// Interval of polls. A change is reported at the second poll that finds it.
pub(super) const POLL_PAUSE: Duration = Duration::from_secs(2);

/// Magic numbers (include/uapi/linux/magic.h, and the drivers' own) of file systems that other machines can change.
const SHARED: [u32; 15] = [
    0x6573_5546, // FUSE and virtio-fs
    0x0102_1997, // 9p
    0x0000_6969, // NFS
    0x0000_517b, // SMB
    0xff53_4d42, // CIFS
    0xfe53_4d42, // SMB 2 and 3
    0x00c3_6400, // Ceph
    0x5346_414f, // AFS
    0x6b41_4653, // AFS, the kernel's
    0x7375_7245, // Coda
    0x7461_636f, // OCFS2
    0x0116_1970, // GFS2
    0x0bd0_0bd0, // Lustre
    0x786f_4256, // VirtualBox
    0xbacb_acbc, // VMware
];

/// Inode number, size and times of a file, which show a change without reading it; none if they cannot be read.
type Stamp = Option<[i64; 6]>;

/// Files of some paths at the last poll.
#[derive(Debug)]
pub(super) struct Poller {
    paths: Vec<PathBuf>,
    /// State that was last reported.
    reported: BTreeMap<PathBuf, Stamp>,
    /// State at the last poll.
    polled: BTreeMap<PathBuf, Stamp>,
    next: Instant,
}

impl Poller {
    /// Records the current files of the paths that other machines can change; none if there are no such paths.
    pub(super) fn for_shared(paths: &[PathBuf]) -> Option<Self> {
        let shared: Vec<_> = paths.iter().filter(|path| is_shared(path)).cloned().collect();
        (!shared.is_empty()).then(|| Self::new(shared))
    }

    /// Records the current files of these paths.
    pub(super) fn new(paths: Vec<PathBuf>) -> Self {
        let mut new =
            Self { paths, reported: BTreeMap::new(), polled: BTreeMap::new(), next: Instant::now() + POLL_PAUSE };
        new.polled = new.stamps();
        new.reported.clone_from(&new.polled);
        new
    }

    /// Waits until the next poll.
    pub(super) async fn next_poll(&self) {
        sleep_until(self.next).await;
    }

    /// Files that were changed, created or removed and have not changed since the last poll, so that no writer is in
    /// the middle of them.
    pub(super) fn poll(&mut self) -> BTreeSet<PathBuf> {
        let now = self.stamps();
        let is_new = |path: &&PathBuf| now.get(*path) != self.reported.get(*path);
        let is_settled = |path: &&PathBuf| now.get(*path) == self.polled.get(*path);
        let all = now.keys().chain(self.reported.keys());
        let changed = sorted_set(all.filter(is_new).filter(is_settled).cloned());
        for path in &changed {
            match now.get(path) {
                Some(stamp) => drop(self.reported.insert(path.clone(), *stamp)),
                None => drop(self.reported.remove(path)),
            }
        }
        self.polled = now;
        self.next = Instant::now() + POLL_PAUSE;
        changed
    }

    fn stamps(&self) -> BTreeMap<PathBuf, Stamp> {
        let mut stamps = BTreeMap::new();
        for path in &self.paths {
            match manifests_at(path) {
                Ok(files) => stamps.extend(files.into_iter().map(|file| {
                    let stamp = stamp(&file).ok();
                    (file, stamp)
                })),
                // The unreadable path counts as changed. Its files keep their last state and content.
                Err(_) => {
                    let below = self.polled.iter().filter(|(file, _)| file.starts_with(path));
                    stamps.extend(below.map(|(file, stamp)| (file.clone(), *stamp)));
                    stamps.insert(path.clone(), None);
                }
            }
        }
        stamps
    }
}

fn stamp(file: &Path) -> io::Result<[i64; 6]> {
    let metadata = fs::metadata(file)?;
    // As bits: they are compared, nothing else.
    let [number, size] = [metadata.ino(), metadata.size()].map(u64::cast_signed);
    Ok([number, size, metadata.mtime(), metadata.mtime_nsec(), metadata.ctime(), metadata.ctime_nsec()])
}

/// Whether other machines can change the file at this path, or the directory where it will be.
fn is_shared(path: &Path) -> bool {
    // Magic numbers have 32 bits, whatever the field has.
    rustix::fs::statfs(nearest(path, Path::exists)).is_ok_and(|stat| is_shared_type(stat.f_type as u32))
}

fn is_shared_type(magic: u32) -> bool {
    SHARED.contains(&magic)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_file_systems_that_other_machines_can_change_are_polled() {
        let [tmpfs, ext4, overlay, xfs, fuse, smb2] =
            [0x0102_1994, 0xef53, 0x794c_7630, 0x5846_5342, 0x6573_5546, 0xfe53_4d42].map(is_shared_type);
        assert!(!tmpfs && !ext4 && !overlay && !xfs && fuse && smb2);
        // None of these paths is on a file system that other machines can change, on any machine that runs the tests.
        assert!(Poller::for_shared(&["/proc".into(), "/sys/nowhere/at/all".into(), "/dev/null".into()]).is_none());
        assert!(Poller::for_shared(&[]).is_none());
    }

    fn directory() -> PathBuf {
        let dir = std::env::temp_dir().join(format!("cproxy-poller-{}", std::process::id()));
        fs::remove_dir_all(&dir).ok();
        fs::create_dir_all(&dir).unwrap();
        dir
    }

    #[tokio::test]
    async fn a_change_is_reported_once_it_has_settled() {
        let dir = directory();
        let [a, b, missing] = ["a.yaml", "b.yaml", "c/d.yaml"].map(|name| dir.join(name));
        fs::write(&a, "one").unwrap();
        fs::write(dir.join("not-a-manifest"), "").unwrap();
        let mut poller = Poller::new(vec![dir.clone(), missing.clone()]);
        let mut poll = || poller.poll().into_iter().collect::<Vec<_>>();
        assert!(poll().is_empty());

        fs::write(&a, "two, half").unwrap();
        assert!(poll().is_empty(), "a writer may be in the middle of it");
        fs::write(&a, "two, and whole").unwrap();
        fs::write(&b, "new").unwrap();
        assert!(poll().is_empty(), "a writer was");
        assert_eq!(poll(), [a.clone(), b.clone()]);
        assert!(poll().is_empty(), "once");

        fs::remove_file(&b).unwrap();
        fs::create_dir(dir.join("c")).unwrap();
        fs::write(&missing, "there now").unwrap();
        poll();
        assert_eq!(poll(), [b, missing.clone()]);

        // The files of an unreachable server do not count as removed.
        fs::rename(&dir, dir.with_extension("away")).unwrap();
        poll();
        assert_eq!(poll(), [dir.clone(), missing.clone()]);
        fs::rename(dir.with_extension("away"), &dir).unwrap();
        poll();
        assert_eq!(poll(), [dir.clone(), missing]);
        fs::remove_dir_all(&dir).unwrap();
    }
}
