//! Small files of the run directory. Other users know its path too, and may have put links or endless files there if
//! they can write to it: the agent works in the opened directory, and readers check what they open.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::MetadataExt as _,
    },
    path::Path,
};

use cproxy_core::printable;
use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, fstat, openat, renameat, statat, unlinkat},
    io::Errno,
};

use super::protocol::{ALIVE, CLOSED, FAILED, LIMITED, READY, SOCKET, UNUSABLE};

/// Name of a file until it is complete.
const TEMPORARY: &str = ".new";

/// Bound on the size of a file that is read; the agent writes less.
const BYTES_MAX: u64 = 16 << 10;

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Id of this boot; empty if the kernel does not provide it.
pub(super) fn boot_id() -> String {
    fs::read_to_string(BOOT_ID).unwrap_or_default()
}

/// Writes a file atomically and replaces an earlier one.
pub(super) fn write(dir: &OwnedFd, name: &str, text: &str) -> io::Result<()> {
    remove(dir, TEMPORARY)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = openat(dir, TEMPORARY, flags, Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::ROTH)?;
    File::from(file).write_all(text.as_bytes())?;
    Ok(renameat(dir, TEMPORARY, dir, name)?)
}

/// Removes the files of an agent that has ended.
pub(super) fn clear(dir: &OwnedFd) -> io::Result<()> {
    [READY, LIMITED, CLOSED, FAILED, UNUSABLE, SOCKET, ALIVE, TEMPORARY]
        .into_iter()
        .try_for_each(|name| remove(dir, name))
}

/// Whether a file is there, and not something else in its place.
pub(super) fn exists(dir: &OwnedFd, name: &str) -> bool {
    let found = statat(dir, name, AtFlags::SYMLINK_NOFOLLOW);
    found.is_ok_and(|found| {
        FileType::from_raw_mode(found.st_mode).is_file() && found.st_uid == rustix::process::geteuid().as_raw()
    })
}

/// Removes a file, if it exists.
pub(super) fn remove(dir: &OwnedFd, name: &str) -> io::Result<()> {
    match unlinkat(dir, name, AtFlags::empty()) {
        Err(error) if error != Errno::NOENT => {
            let error = io::Error::from(error);
            Err(io::Error::new(error.kind(), format!("{name} cannot be removed: {error}")))
        }
        _ => Ok(()),
    }
}

/// Whether the directory has a `ready` of this boot.
pub(super) fn is_ready(run_dir: &Path) -> bool {
    read_small(run_dir, READY).is_ok_and(|boot| boot.is_empty() || boot == boot_id())
}

/// Seconds since the directory has a `ready` of this boot; `None` without it.
pub fn ready_seconds(run_dir: &Path) -> Option<u64> {
    let since = fs::metadata(run_dir.join(READY)).and_then(|file| file.modified()).ok()?;
    is_ready(run_dir).then(|| since.elapsed().unwrap_or_default().as_secs())
}

/// First line of a file, as it can be printed; `None` without the file.
pub(super) fn read_line(run_dir: &Path, name: &str) -> Option<String> {
    let text = read_small(run_dir, name).ok()?;
    Some(printable(text.lines().next().unwrap_or_default()))
}

/// Names and first lines of the files that tell the agent's state.
pub fn read_states(run_dir: &Path) -> impl Iterator<Item = (&'static str, String)> {
    let line = |name| Some((name, read_line(run_dir, name)?));
    [READY, LIMITED, CLOSED, FAILED, UNUSABLE].into_iter().filter_map(line)
}

/// Checks that root or the owner of the directory has made an opened file of it: others may write to the directory.
pub(super) fn check_owner(file: impl AsFd, run_dir: &Path, name: &str) -> io::Result<()> {
    let (of_dir, of_file) = (fs::metadata(run_dir)?.uid(), fstat(file)?.st_uid);
    if is_trusted(of_file, of_dir) {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "its file `{name}` was made by another user (uid {of_file}), neither root nor the directory's owner: remove it"
    )))
}

/// Whether the owner of a file is root or the owner of its directory.
pub(super) const fn is_trusted(of_file: u32, of_dir: u32) -> bool {
    of_file == 0 || of_file == of_dir
}

fn read_small(run_dir: &Path, name: &str) -> io::Result<String> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(run_dir.join(name), flags, Mode::empty())?);
    check_owner(&file, run_dir, name)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("not a file"));
    }
    let mut text = String::new();
    file.take(BYTES_MAX).read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_left_of_a_file_that_could_not_be_written() {
        let path = std::env::temp_dir().join(format!("cproxy-run-dir-{}-new", std::process::id()));
        fs::create_dir(&path).unwrap();
        fs::write(path.join(TEMPORARY), "").unwrap();
        clear(&cproxy_datapath::owned_dir::open(&path).unwrap()).unwrap();
        fs::remove_dir(&path).unwrap();
    }

    #[test]
    fn only_small_files_are_read() {
        let dir = std::env::temp_dir().join(format!("cproxy-run-dir-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let path = |name: &str| dir.join(name);
        fs::write(path("file"), "word\n").unwrap();
        fs::write(path("large"), vec![b'x'; 1 << 20]).unwrap();
        std::os::unix::fs::symlink("file", path("link")).unwrap();
        std::os::unix::fs::symlink("/dev/zero", path("endless")).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, path("fifo"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        let read = |name: &str| read_small(&dir, name).ok();
        assert_eq!(read("file").as_deref(), Some("word\n"));
        assert_eq!(read("large").map(|text| text.len() as u64), Some(BYTES_MAX));
        assert_eq!(["link", "endless", "fifo", "missing", "."].map(read), [const { None::<String> }; 5]);
        fs::remove_dir_all(&dir).unwrap();
    }
}
