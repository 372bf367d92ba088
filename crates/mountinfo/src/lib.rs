//! Mounts as the kernel lists them (proc_pid_mountinfo(5)).

use std::{
    ffi::OsStr,
    fs, io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

/// The kernel's list.
pub const PATH: &str = "/proc/thread-self/mountinfo";

/// One line of the list. Covered mounts are listed, too: at `point` there may be another one by now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountEntry {
    /// As statx(2) has it (`stx_mnt_id`).
    pub id: u64,
    /// The directory of the file system that is mounted; one of cgroups as the reader's cgroup namespace shows it.
    pub root: PathBuf,
    /// The place where it is mounted.
    pub point: PathBuf,
    /// The type of the file system.
    pub kind: Vec<u8>,
    /// The options of the file system, with commas between them.
    pub options: Vec<u8>,
}

/// All mounts that this thread sees, the oldest first.
///
/// # Errors
/// The list cannot be read: there is no proc file system.
pub fn list() -> io::Result<Vec<MountEntry>> {
    // Bytes, since paths are: a single one that is not UTF-8 must not hide all mounts.
    fs::read(PATH).map(|text| parse(&text))
}

/// Mounts of the kernel's list; lines of another form are left out.
#[must_use]
pub fn parse(text: &[u8]) -> Vec<MountEntry> {
    text.split(|&byte| byte == b'\n').filter_map(entry).collect()
}

/// `36 35 98:0 ROOT POINT rw,noatime OPTIONAL... - TYPE SOURCE OPTIONS`
fn entry(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|&byte| byte == b' ');
    let id = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    let (root, point) = (unescaped(fields.nth(2)?), unescaped(fields.next()?));
    let mut behind = fields.skip_while(|&field| field != b"-").skip(1);
    let (kind, options) = (behind.next()?.to_owned(), behind.nth(1).unwrap_or_default().to_owned());
    Some(MountEntry { id, root, point, kind, options })
}

/// Blanks, line feeds and backslashes are written as a backslash and three octal digits.
fn unescaped(field: &[u8]) -> PathBuf {
    let mut parts = field.split(|&byte| byte == b'\\');
    let mut bytes = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.split_at_checked(3).and_then(|(digits, rest)| Some((octal(digits)?, rest))) {
            Some((byte, rest)) => {
                bytes.push(byte);
                bytes.extend(rest);
            }
            None => {
                bytes.push(b'\\');
                bytes.extend(part);
            }
        }
    }
    Path::new(OsStr::from_bytes(&bytes)).to_owned()
}

fn octal(digits: &[u8]) -> Option<u8> {
    u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(id: u64, root: &str, point: &str, kind: &str, options: &str) -> MountEntry {
        let (kind, options) = (kind.as_bytes().to_owned(), options.as_bytes().to_owned());
        MountEntry { id, root: root.into(), point: point.into(), kind, options }
    }

    #[test]
    fn optional_fields_are_skipped_and_paths_are_unescaped() {
        let text = b"41 31 0:38 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n\
                     42 31 0:38 /a\\040b/c /mnt/x\\134y rw shared:9 master:1 - cgroup cgroup rw,cpu\n\
                     61 59 0:4 net:[4026532345] /run/netns/a\\011b rw shared:3 - nsfs nsfs rw\n\
                     62 59 0:4 /../.. /mnt/\xff\\07 rw - cgroup2 cgroup\n\
                     garbage - nsfs nsfs\n\n - nsfs \n63 59 0:4 / /cut rw shared:1\n";
        let mut expected = [
            mount(41, "/", "/sys/fs/cgroup", "cgroup2", "rw,nsdelegate"),
            mount(42, "/a b/c", "/mnt/x\\y", "cgroup", "rw,cpu"),
            mount(61, "net:[4026532345]", "/run/netns/a\tb", "nsfs", "rw"),
            mount(62, "/../..", "", "cgroup2", ""),
        ];
        expected[3].point = OsStr::from_bytes(b"/mnt/\xff\\07").into();
        assert_eq!(parse(text), expected);
    }

    #[test]
    fn the_kernels_own_list_can_be_read() {
        let mounts = list().unwrap();
        assert!(mounts.iter().any(|mount| mount.kind == b"proc"), "{mounts:?}");
    }
}
