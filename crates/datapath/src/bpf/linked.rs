//! Programs beside those that translate, each pinned as `prog_<link>` in a directory, with its link as `<link>` there
//! while it is attached.

use std::{
    fs, io,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::DirBuilderExt as _,
    },
    path::{Path, PathBuf},
};

use aya::Ebpf;
use aya_obj::generated::bpf_attach_type;

use super::{
    load::{LoadError, load_named},
    pins::remove_with_pins,
    syscalls::{link_create, link_detach, link_info, link_update, obj_get, obj_get_if_any, obj_pin},
};

/// Failure to install or attach a program.
#[derive(Debug, thiserror::Error)]
pub enum LinkedError {
    /// A pin or a directory could not be used.
    #[error("{}: {}", .0.display(), .1)]
    Io(PathBuf, io::Error),
    /// The programs could not be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A program could not be attached.
    #[error("cannot attach program {0}: {1}")]
    Attach(&'static str, io::Error),
}

/// Program with a link of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkedProgram {
    /// The function's name, which `bpftool prog` shows.
    pub name: &'static str,
    /// The name under which its link is pinned.
    pub link: &'static str,
    pub(super) hook: bpf_attach_type,
}

impl LinkedProgram {
    /// The name under which it is pinned itself.
    pub(super) fn pin(self) -> String {
        format!("prog_{}", self.link)
    }

    /// Has the kernel verify the program. Returns its verified instruction count, 0 where the kernel does not tell.
    pub(super) fn load(self, object: &mut Ebpf) -> Result<u32, LoadError> {
        load_named(object, self.name)
    }

    /// The loaded program.
    pub(super) fn fd(self, object: &mut Ebpf) -> Result<BorrowedFd<'_>, LoadError> {
        let found = object.program_mut(self.name).ok_or(LoadError::Missing(self.name))?;
        found.fd().map(AsFd::as_fd).map_err(|error| LoadError::refused(self.name, &error))
    }

    fn is_of_netns(self) -> bool {
        self.hook == bpf_attach_type::BPF_SK_LOOKUP
    }
}

/// Directory of pins of programs, their links and their maps.
#[derive(Clone, Debug)]
pub(super) struct LinkedPins {
    dir: PathBuf,
}

impl LinkedPins {
    pub(super) fn new(dir: PathBuf) -> Self {
        Self { dir }
    }

    pub(super) fn directory(&self) -> &Path {
        &self.dir
    }

    pub(super) fn object(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    pub(super) fn create(&self) -> Result<(), LinkedError> {
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir);
        made.map_err(|error| LinkedError::Io(self.dir.clone(), error))
    }

    /// Whether all of these maps and programs are pinned.
    pub(super) fn have(&self, maps: &[&str], programs: impl Iterator<Item = LinkedProgram>) -> bool {
        let programs = programs.map(LinkedProgram::pin);
        maps.iter().map(|name| (*name).to_owned()).chain(programs).all(|name| self.object(&name).exists())
    }

    /// Detaches these programs and removes all pins.
    pub(super) fn remove(&self, programs: impl Iterator<Item = LinkedProgram>) -> io::Result<()> {
        for program in programs {
            if let Some(link) = obj_get_if_any(&self.object(program.link))? {
                // It may be detached already. Without its pin, the kernel detaches it a moment later.
                link_detach(link.as_fd()).ok();
            }
        }
        remove_with_pins(&self.dir)
    }

    /// Pins a program in the place of another, and puts it behind its link, if there is one.
    pub(super) fn replace(&self, program: LinkedProgram, fd: BorrowedFd<'_>) -> Result<(), LinkedError> {
        let pin = self.object(&program.pin());
        self.pin(&pin, fd)?;
        let path = self.object(program.link);
        let failed = |error| LinkedError::Io(path.clone(), error);
        let Some(link) = obj_get_if_any(&path).map_err(failed)? else { return Ok(()) };
        match link_update(link.as_fd(), fd) {
            // It was detached by others, or by an agent that was killed then. It is attached again where it is needed.
            Err(error) if error.raw_os_error() == Some(libc::ENOLINK) => fs::remove_file(&path).map_err(failed),
            updated => updated.map_err(|error| LinkedError::Attach(program.name, error)),
        }
    }

    /// Pins an object in the place of another.
    fn pin(&self, path: &Path, fd: BorrowedFd<'_>) -> Result<(), LinkedError> {
        let mut temporary = path.as_os_str().to_owned();
        temporary.push("_new");
        let temporary = PathBuf::from(temporary);
        // A leftover of an attempt that was killed; mostly there is none.
        fs::remove_file(&temporary).ok();
        let pinned = obj_pin(fd, &temporary).and_then(|()| fs::rename(&temporary, path));
        pinned.map_err(|error| LinkedError::Io(path.to_owned(), error))
    }

    /// Whether a link of the program is pinned and attached: one whose cgroup or namespace has gone, or that was
    /// detached, has no target.
    pub(super) fn has_link(&self, program: LinkedProgram) -> Result<bool, LinkedError> {
        let path = self.object(program.link);
        let link = obj_get_if_any(&path).map_err(|error| LinkedError::Io(path, error))?;
        let Some(link) = link else { return Ok(false) };
        let target = link_info(link.as_fd()).map(|info| {
            let target = info.__bindgen_anon_1;
            if program.is_of_netns() {
                // SAFETY: integers, which the kernel has written for a link on a network namespace.
                return unsafe { target.netns }.netns_ino.into();
            }
            // SAFETY: integers, which the kernel has written for a link on a cgroup.
            unsafe { target.cgroup }.cgroup_id
        });
        Ok(target.is_ok_and(|target: u64| target != 0))
    }

    /// Attaches a program and pins the link in the place of another, which goes.
    pub(super) fn link(&self, program: LinkedProgram, target: BorrowedFd<'_>) -> Result<(), LinkedError> {
        let loaded = self.object(&program.pin());
        let loaded = obj_get(&loaded, 0).map_err(|error| LinkedError::Io(loaded, error))?;
        let link = link_create(loaded.as_fd(), target, program.hook as u32);
        let link = link.map_err(|error| LinkedError::Attach(program.name, error))?;
        self.pin(&self.object(program.link), link.as_fd())
    }

    /// Detaches a program, if it is attached.
    pub(super) fn detach(&self, program: LinkedProgram) -> Result<(), LinkedError> {
        let path = self.object(program.link);
        let detached = obj_get_if_any(&path).and_then(|link| match link {
            Some(link) => link_detach(link.as_fd()).and_then(|()| fs::remove_file(&path)),
            None => Ok(()),
        });
        detached.map_err(|error| LinkedError::Io(path, error))
    }
}
