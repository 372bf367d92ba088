//! Cgroups as the programs know them: by id and level.

use std::{
    fs, io,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags, fstatfs, statx};

use super::environment::CGROUP2_SUPER_MAGIC;
use crate::model::ExcludedCgroup;

/// The inode number of the hierarchy's root (fs/kernfs/mount.c, `kernfs_get_inode`: ids start at 1).
const ROOT_INODE: u64 = 1;

/// The inode number of the first cgroup namespace, in which paths start at the hierarchy's root
/// (include/linux/proc_ns.h, `PROC_CGROUP_INIT_INO`).
const INITIAL_CGROUP_NAMESPACE: u64 = 0xefff_fffb;

/// Why a directory is no cgroup that can be left alone.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// It cannot be read.
    #[error("--exclude-cgroup {0}: {1}")]
    Io(PathBuf, io::Error),
    /// It is somewhere else.
    #[error("--exclude-cgroup {0}: not a cgroup2 directory; pass a directory of a cgroup2 mount")]
    NotCgroup2(PathBuf),
    /// The path does not say how deep it lies.
    #[error(
        "--exclude-cgroup {0}: the hierarchy's root cannot be seen from this cgroup namespace; pass a path below a mount of the whole hierarchy"
    )]
    RootOutOfSight(PathBuf),
}

/// The cgroup of a directory on a cgroup2 mount. Its level is what `bpf_get_current_ancestor_cgroup_id` is asked for: the
/// hierarchy's root has level 0.
///
/// # Errors
/// It is no such directory.
pub fn excluded_cgroup(dir: &Path) -> Result<ExcludedCgroup, CgroupError> {
    let failed = |error| CgroupError::Io(dir.to_owned(), error);
    let path = fs::canonicalize(dir).map_err(failed)?;
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::RDONLY;
    let opened = rustix::fs::open(&path, flags, Mode::empty()).map_err(|error| failed(error.into()))?;
    if fstatfs(&opened).map_err(|error| failed(error.into()))?.f_type as u64 != CGROUP2_SUPER_MAGIC {
        return Err(CgroupError::NotCgroup2(dir.to_owned()));
    }
    let mount_id = statx(CWD, &path, AtFlags::empty(), StatxFlags::MNT_ID).map_err(|error| failed(error.into()))?;
    let mountinfo = fs::read_to_string("/proc/self/mountinfo").map_err(failed)?;
    let (root, point) =
        find_mount(&mountinfo, mount_id.stx_mnt_id).ok_or_else(|| CgroupError::NotCgroup2(dir.to_owned()))?;
    let below = path.strip_prefix(&point).map_err(|_| CgroupError::NotCgroup2(dir.to_owned()))?;
    let above = match inode(&point).map_err(failed)? {
        ROOT_INODE => 0,
        _ if inode(Path::new("/proc/self/ns/cgroup")).map_err(failed)? == INITIAL_CGROUP_NAMESPACE => depth(&root),
        _ => return Err(CgroupError::RootOutOfSight(dir.to_owned())),
    };
    Ok(ExcludedCgroup { id: inode(&path).map_err(failed)?, level: above + depth(below) })
}

fn inode(path: &Path) -> io::Result<u64> {
    Ok(fs::metadata(path)?.ino())
}

fn depth(path: &Path) -> u32 {
    path.components().filter(|component| matches!(component, std::path::Component::Normal(_))).count() as u32
}

/// Root and mount point of a mount in the text of `mountinfo` (proc_pid_mountinfo(5): fields 1, 4 and 5).
fn find_mount(mountinfo: &str, id: u64) -> Option<(PathBuf, PathBuf)> {
    mountinfo.lines().find_map(|line| {
        let mut fields = line.split(' ');
        let is_it = fields.next()?.parse::<u64>().ok()? == id;
        let mut fields = fields.skip(2);
        let (root, point) = (fields.next()?, fields.next()?);
        is_it.then(|| (unescaped(root), unescaped(point)))
    })
}

/// Spaces and the like are three octal digits after a backslash.
fn unescaped(field: &str) -> PathBuf {
    let mut parts = field.split('\\');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let (digits, rest) = part.split_at_checked(3).unwrap_or((part, ""));
        bytes.extend(u8::from_str_radix(digits, 8).ok());
        bytes.extend(rest.as_bytes());
    }
    PathBuf::from(std::ffi::OsStr::from_bytes(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_found_by_its_id() {
        let text = "41 31 0:38 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n\
                    42 31 0:38 /a\\040b/c /mnt/x\\134y rw shared:9 - cgroup2 cgroup2 rw\ngarbage\n";
        assert_eq!(find_mount(text, 41), Some(("/".into(), "/sys/fs/cgroup".into())));
        assert_eq!(find_mount(text, 42), Some(("/a b/c".into(), "/mnt/x\\y".into())));
        assert_eq!(find_mount(text, 4), None);
        assert_eq!((depth(Path::new("/")), depth(Path::new("/a b/c"))), (0, 2));
    }

    #[test]
    fn what_is_no_cgroup_is_named_with_its_flag() {
        for dir in ["/proc", "/nowhere/at/all"] {
            let error = excluded_cgroup(Path::new(dir)).unwrap_err().to_string();
            assert!(error.starts_with(&format!("--exclude-cgroup {dir}: ")), "{error}");
        }
    }
}
