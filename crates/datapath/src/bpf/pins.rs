//! The pin directory: `<pin-dir>/v<layout>/` holds our maps and links by name, and nothing else is ever touched.

use std::{
    fs, io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{DirBuilderExt, MetadataExt},
    },
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use aya::maps::MapInfo;
use cproxy_ebpf::LAYOUT_VERSION;
use rustix::fs::FlockOperation;

use super::{
    environment::{BPFFS_DEFAULT, Environment, is_bpffs},
    error::root_cause,
    handover::{self, Predecessor},
    map_spec::{MapShape, NAMED, RESIZABLE, SERVICE_COUNTS},
    syscalls::{link_detach, obj_get},
    tracing,
};
use crate::owned_dir;

impl PinError {
    /// Whether nothing of cproxy is there.
    #[must_use]
    pub fn is_absence(&self) -> bool {
        matches!(self, Self::NotInstalled(_) | Self::NoBpffs(_))
    }
}

/// Failure to use the pins.
#[derive(Debug, thiserror::Error)]
pub enum PinError {
    /// Another layout's programs are attached.
    #[error(
        "{0} holds table layout {1}, this cproxy uses {LAYOUT_VERSION}: {hint}`cproxy cleanup --pin-dir {dir}` to \
         remove it first", dir = .0.display(), hint = other_layout_remedy(*.1)
    )]
    OtherLayout(PathBuf, u32),
    /// A pinned map has not the layout that its directory promises.
    #[error(
        "{path} is not the map that layout {LAYOUT_VERSION} has there ({difference}): \
         run `cproxy cleanup --pin-dir {dir}`",
        path = .path.display(), dir = .dir.display()
    )]
    OtherMap {
        /// The pinned map.
        path: PathBuf,
        /// The pin directory.
        dir: PathBuf,
        /// The difference.
        difference: String,
    },
    /// Nothing is installed.
    #[error("{0}: no cproxy table is installed there: start `cproxy run` or pass its --pin-dir")]
    NotInstalled(PathBuf),
    /// Nothing can be pinned there, so nothing there is ours.
    #[error(
        "{0} is not on a bpf filesystem (bpffs): nothing of cproxy can be there; pass the --pin-dir of `cproxy run`"
    )]
    NoBpffs(PathBuf),
    /// Another agent is at work.
    #[error("{0} is in use by a running cproxy: stop it first or pass another --pin-dir")]
    Locked(PathBuf),
    /// A file could not be used.
    #[error("{0}: {1}{hint}", hint = remedy(.1))]
    Io(PathBuf, io::Error),
    /// A map cannot be opened.
    #[error("cannot open {0}: {cause}; run this as root or with CAP_BPF", cause = root_cause(.1))]
    Map(PathBuf, aya::maps::MapError),
}

fn other_layout_remedy(layout: u32) -> &'static str {
    match layout > LAYOUT_VERSION {
        true => "use a cproxy of that layout, or run ",
        false if Predecessor::of(layout).is_some() => "`cproxy run` takes it over; or run ",
        false => "run ",
    }
}

fn remedy(error: &io::Error) -> &'static str {
    if error.kind() == io::ErrorKind::PermissionDenied { "; run this as root" } else { "" }
}

/// The child of an agent that has ended while it was installing ends with it, a moment later.
const DYING: Duration = Duration::from_millis(500);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(5);

/// Behind a link's name while it is not yet in its place.
pub(super) const NEW: &str = "_new";

/// A pin directory.
#[derive(Clone, Debug)]
pub struct PinDir {
    dir: PathBuf,
}

/// The lock of the one agent on a pin directory; the kernel releases it with the process.
#[derive(Debug)]
pub struct PinLock {
    pins: PinDir,
    dir: OwnedFd,
    is_empty: bool,
    /// Locks of older layouts, whose agents must not start meanwhile.
    _older: Vec<OwnedFd>,
}

impl PinLock {
    /// The pin directory.
    #[must_use]
    pub fn pins(&self) -> &PinDir {
        &self.pins
    }

    /// Whether nothing was pinned there: no program uses any map of ours.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.is_empty
    }

    /// Makes the directory again and locks it, if it was removed. Returns whether it was.
    ///
    /// # Errors
    /// As [`PinDir::lock`].
    pub fn restore(&mut self) -> Result<bool, PinError> {
        let stat = |error: rustix::io::Errno| PinError::Io(self.pins.versioned(), error.into());
        let own = rustix::fs::fstat(&self.dir).map_err(stat)?;
        let is_own = |other: fs::Metadata| (other.dev(), other.ino()) == (own.st_dev, own.st_ino);
        if fs::metadata(self.pins.versioned()).is_ok_and(is_own) {
            return Ok(false);
        }
        *self = self.pins.lock()?;
        Ok(true)
    }

    /// The same lock for a child that works on the pins: it is held until both have ended.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn share(&self) -> io::Result<OwnedFd> {
        self.dir.try_clone()
    }
}

impl PinDir {
    /// The pin directory `dir`; nothing is touched yet.
    #[must_use]
    pub fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
    }

    /// The directory with those of all layouts.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.dir
    }

    /// Directory of this layout's objects.
    #[must_use]
    pub fn versioned(&self) -> PathBuf {
        self.of_layout(LAYOUT_VERSION)
    }

    /// Directory of a layout's objects.
    pub(super) fn of_layout(&self, layout: u32) -> PathBuf {
        self.dir.join(format!("v{layout}"))
    }

    /// Path of a pinned map or link.
    #[must_use]
    pub fn object(&self, name: &str) -> PathBuf {
        self.versioned().join(name)
    }

    /// The names of the maps that the programs name.
    pub(super) fn map_names() -> impl Iterator<Item = &'static str> {
        NAMED.iter().map(|(name, _)| *name)
    }

    /// Whether a link of ours has this name, or had it when its installation was broken off.
    fn is_link(name: &str, links: &[&str]) -> bool {
        links.contains(&name.strip_suffix(NEW).unwrap_or(name))
    }

    /// Whether we pin something under this name.
    fn is_ours(name: &str, links: &[&str]) -> bool {
        let mut inner = RESIZABLE.iter().flat_map(|map| map.pins);
        let mut maps = Self::map_names().chain([SERVICE_COUNTS]);
        Self::is_link(name, links) || maps.any(|map| map == name) || inner.any(|pin| pin == name)
    }

    /// Makes the versioned directory and becomes the only agent on it. Maps of an older layout that stay in force are
    /// then in it.
    ///
    /// # Errors
    /// Another agent holds it, it holds a layout that cannot be taken over, or a map in it is not ours.
    pub fn lock(&self) -> Result<PinLock, PinError> {
        let others = self.other_layouts()?;
        if let Some(layout) = others.iter().find(|layout| Predecessor::of(**layout).is_none()) {
            return Err(PinError::OtherLayout(self.dir.clone(), *layout));
        }
        // Before anything is made here: it would keep a running older agent from starting again.
        let older = others.into_iter().map(|layout| self.lock_older(layout)).collect::<Result<Vec<_>, _>>()?;
        let versioned = self.versioned();
        // No other user may hold its lock, nor remove pins: on many machines all users can write to a bpffs.
        let make = |dir: &Path| {
            let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
            made.map_err(|error| PinError::Io(dir.to_owned(), error))
        };
        make(&self.dir)?;
        owned_dir::open(&self.dir).map_err(|error| PinError::Io(self.dir.clone(), error))?;
        make(&versioned)?;
        let dir = self.flock(&versioned)?;
        owned_dir::check_owner(&dir).map_err(|error| PinError::Io(versioned.clone(), error))?;
        handover::carry_maps(self)?;
        self.check_maps()?;
        Ok(PinLock { pins: self.clone(), dir, is_empty: list(&versioned)?.is_empty(), _older: older })
    }

    fn lock_older(&self, layout: u32) -> Result<OwnedFd, PinError> {
        let dir = self.of_layout(layout);
        owned_dir::open(&self.dir).map_err(|error| PinError::Io(self.dir.clone(), error))?;
        let lock = self.flock(&dir)?;
        owned_dir::check_owner(&lock).map_err(|error| PinError::Io(dir, error))?;
        Ok(lock)
    }

    /// Fails unless a complete table of this layout is pinned.
    ///
    /// # Errors
    /// There is none, or it has another layout.
    pub fn check_installed(&self) -> Result<(), PinError> {
        let pinned = list(&self.versioned())?;
        if Self::map_names().any(|name| !pinned.iter().any(|pin| pin == name)) {
            return Err(match self.other_layouts()?.first() {
                Some(layout) => PinError::OtherLayout(self.dir.clone(), *layout),
                // The conventional place gets one when the agent starts.
                None if !self.dir.starts_with(BPFFS_DEFAULT) && !Environment::is_on_bpffs(&self.dir) => {
                    PinError::NoBpffs(self.dir.clone())
                }
                None => PinError::NotInstalled(self.dir.clone()),
            });
        }
        self.check_maps()
    }

    /// Removes every object of ours, of any layout: the hooks are detached with their links. Returns what it removed
    /// and what it found there that is not ours.
    ///
    /// # Errors
    /// An agent is running, or a file could not be removed.
    pub fn remove(&self, links: &[&str]) -> Result<(Vec<PathBuf>, Vec<PathBuf>), PinError> {
        if self.dir.exists() && !is_bpffs(&self.dir) {
            return Err(PinError::NoBpffs(self.dir.clone()));
        }
        let (mut removed, mut foreign) = (Vec::new(), Vec::new());
        for version in self.layouts()? {
            let dir = self.dir.join(&version);
            let lock = self.flock(&dir)?;
            // Its user may have led it elsewhere by now.
            let opened = |name: &str| owned_dir::path_in(&lock, name);
            if !is_bpffs(&opened(".")) {
                return Err(PinError::NoBpffs(dir));
            }
            let own_layout = dir == self.versioned();
            // Links first: no program may look into maps that are going.
            let mut objects = list(&opened("."))?;
            objects.sort_unstable_by_key(|name| !Self::is_link(name, links));
            for name in objects {
                let is_ours = !own_layout || Self::is_ours(&name, links);
                let path = dir.join(&name);
                if name == tracing::DIRECTORY {
                    tracing::remove_pins_in(&opened(&name)).map_err(|error| PinError::Io(path.clone(), error))?;
                    continue;
                }
                if is_ours {
                    // Of a map this is an error, and of a link on a cgroup that is gone.
                    obj_get(&opened(&name), 0).and_then(|object| link_detach(object.as_fd())).ok();
                    fs::remove_file(opened(&name)).map_err(|error| PinError::Io(path.clone(), error))?;
                    removed.push(path);
                } else {
                    foreign.push(path);
                }
            }
            drop(lock);
            remove_if_empty(&dir)?;
        }
        remove_if_empty(&self.dir)?;
        Ok((removed, foreign))
    }

    fn flock(&self, versioned: &Path) -> Result<OwnedFd, PinError> {
        let io = |error: io::Error| PinError::Io(versioned.to_owned(), error);
        let dir = owned_dir::open_any(versioned).map_err(io)?;
        let deadline = Instant::now() + DYING;
        let try_lock = || rustix::fs::flock(&dir, FlockOperation::NonBlockingLockExclusive);
        let mut locked = try_lock();
        while locked == Err(rustix::io::Errno::WOULDBLOCK) && Instant::now() < deadline {
            thread::sleep(PAUSE);
            locked = try_lock();
        }
        match locked {
            // A kernel without file locks (CONFIG_FILE_LOCKING) cannot tell two agents apart; one is no worse for that.
            Ok(()) | Err(rustix::io::Errno::NOSYS) => Ok(dir),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(PinError::Locked(self.dir.clone())),
            Err(error) => Err(io(error.into())),
        }
    }

    /// A map that is pinned where ours should be is used only if it is like ours: aya itself would take any.
    fn check_maps(&self) -> Result<(), PinError> {
        for (name, shape) in NAMED {
            let path = self.object(name);
            if !path.exists() {
                continue;
            }
            let info = MapInfo::from_pin(&path).map_err(|error| PinError::Map(path.clone(), error))?;
            if let Some(difference) = difference(shape, &info) {
                return Err(PinError::OtherMap { path, dir: self.dir.clone(), difference });
            }
        }
        Ok(())
    }

    fn other_layouts(&self) -> Result<Vec<u32>, PinError> {
        let layouts = self.layouts()?;
        let layouts = layouts.iter().filter_map(|name| name.strip_prefix('v')?.parse().ok());
        Ok(layouts.filter(|layout| *layout != LAYOUT_VERSION).collect())
    }

    fn layouts(&self) -> Result<Vec<String>, PinError> {
        let mut names = list(&self.dir)?;
        names.retain(|name| name.strip_prefix('v').is_some_and(|version| version.parse::<u32>().is_ok()));
        Ok(names)
    }
}

pub(super) fn difference(expected: MapShape, info: &MapInfo) -> Option<String> {
    let found = MapShape::of(info);
    let text = |shape: MapShape| {
        let MapShape { map_type, key_bytes, value_bytes, entries, flags } = shape;
        format!("{map_type:?}, {key_bytes} byte keys, {value_bytes} byte values, {entries} entries, flags {flags:#x}")
    };
    let found_text = || found.map_or_else(|| "another type".to_owned(), text);
    (found != Some(expected)).then(|| format!("it is {}; expected {}", found_text(), text(expected)))
}

/// The names in a directory, sorted; none if it does not exist.
pub(super) fn list(dir: &Path) -> Result<Vec<String>, PinError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(PinError::Io(dir.to_owned(), error)),
    };
    let mut names: Vec<_> =
        entries.filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned())).collect();
    names.sort_unstable();
    Ok(names)
}

fn remove_if_empty(dir: &Path) -> Result<(), PinError> {
    match fs::remove_dir(dir) {
        Err(error) if !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::DirectoryNotEmpty) => {
            Err(PinError::Io(dir.to_owned(), error))
        }
        _ => Ok(()),
    }
}
