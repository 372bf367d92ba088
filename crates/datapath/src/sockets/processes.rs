//! Walks through `/proc` that keep nothing.

use std::{
    ffi::CStr,
    io::{self, ErrorKind},
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
};

use rustix::{
    fs::{CWD, Mode, OFlags, RawDir, openat, readlinkat_raw},
    io::Errno,
};

/// Room for the entries that the kernel gives at a time, and for any link that is of interest.
const DIRECTORY_BYTES: usize = 4 * 1024;
const LINK_BYTES: usize = 64;

/// Opens `/proc`.
pub(super) fn open_proc() -> io::Result<OwnedFd> {
    open_directory(CWD, "/proc")
}

pub(super) fn open_directory(at: impl AsFd, path: &str) -> io::Result<OwnedFd> {
    Ok(openat(at, path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

/// Room for some entries of a directory.
pub(super) type Buffer = [MaybeUninit<u8>; DIRECTORY_BYTES];

pub(super) const fn buffer() -> Buffer {
    [const { MaybeUninit::uninit() }; DIRECTORY_BYTES]
}

/// The entries of a directory that are numbers: processes in `/proc`, and what they have in it.
pub(super) struct Numbers<'d>(RawDir<'d, &'d OwnedFd>);

impl<'d> Numbers<'d> {
    pub(super) fn of(directory: &'d OwnedFd, buffer: &'d mut Buffer) -> Self {
        Self(RawDir::new(directory, buffer))
    }
}

impl Iterator for Numbers<'_> {
    type Item = io::Result<i32>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.0.next()?.map(|entry| number_of(entry.file_name())) {
                Ok(None) => {}
                Ok(Some(number)) => return Some(Ok(number)),
                Err(error) => return Some(Err(error.into())),
            }
        }
    }
}

fn number_of(name: &CStr) -> Option<i32> {
    let name = name.to_str().ok()?;
    name.bytes().all(|byte| byte.is_ascii_digit()).then(|| name.parse().ok()).flatten()
}

/// The inode number in a link of a kind that reads such as `socket:[12345]`; `None` if it is of another kind.
pub(super) fn inode_at(directory: &OwnedFd, path: &str, kind: &str) -> Result<Option<u64>, Errno> {
    let mut buffer = [MaybeUninit::uninit(); LINK_BYTES];
    let (target, _) = readlinkat_raw(directory, path, &mut buffer)?;
    Ok(std::str::from_utf8(target).ok().and_then(|target| inode_of(target, kind)))
}

/// As [`inode_at`], from what the link reads.
pub(super) fn inode_of(target: &str, kind: &str) -> Option<u64> {
    target.strip_prefix(kind)?.strip_prefix(":[")?.strip_suffix(']')?.parse().ok()
}

/// Whether another attempt may succeed: there was no memory or descriptor, or a signal came.
pub(super) fn is_passing(error: &io::Error) -> bool {
    const PASSING: [Errno; 6] = [Errno::NOMEM, Errno::NOBUFS, Errno::MFILE, Errno::NFILE, Errno::INTR, Errno::AGAIN];
    Errno::from_io_error(error).is_some_and(|error| PASSING.contains(&error))
}

/// Whether the cause of the error is that a process has ended, or has closed the descriptor.
pub(super) fn is_gone(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(Errno::SRCH.raw_os_error())
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, os::fd::AsRawFd};

    use super::*;

    #[test]
    fn links_have_inode_numbers() {
        for (target, expected) in
            [("socket:[12345]", Some(12_345)), ("pipe:[1]", None), ("socket:[x]", None), ("", None)]
        {
            assert_eq!(inode_of(target, "socket"), expected, "{target}");
        }
        assert_eq!(inode_of("net:[4026531840]", "net"), Some(4_026_531_840));
    }

    #[test]
    fn a_directory_of_any_size_is_read_to_its_end() {
        const MANY: usize = 900;
        let open = || open_directory(open_proc().unwrap(), &format!("{}/fd", std::process::id())).unwrap();
        let descriptors: Vec<_> = (0..MANY).map(|_| open()).collect();
        let (directory, mut buffer) = (open(), buffer());
        let seen: BTreeSet<_> = Numbers::of(&directory, &mut buffer).map(Result::unwrap).collect();
        assert!(descriptors.iter().all(|descriptor| seen.contains(&descriptor.as_raw_fd())), "{}", seen.len());
    }
}
