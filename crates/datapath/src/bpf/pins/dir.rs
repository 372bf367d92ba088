//! Paths, maps and layouts of a pin directory, and the failures to use it.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use aya::maps::MapInfo;
use cproxy_core::sort_few;
use cproxy_ebpf::LAYOUT_VERSION;

use crate::bpf::{
    environment::{BPFFS_DEFAULT, Environment},
    error::root_cause,
    map_spec::{MapShape, NAMED},
    predecessors::Predecessor,
};

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

impl PinError {
    /// Whether nothing of cproxy is there.
    #[must_use]
    pub fn is_absence(&self) -> bool {
        matches!(self, Self::NotInstalled(_) | Self::NoBpffs(_))
    }
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

/// Name of a tracer's directory, in that of the layout.
pub(in crate::bpf) const TRACE_DIRECTORY: &str = "trace";

/// A pin directory.
#[derive(Clone, Debug)]
pub struct PinDir {
    dir: PathBuf,
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
        self.layout_dir(LAYOUT_VERSION)
    }

    /// Directory of a layout's objects.
    pub(in crate::bpf) fn layout_dir(&self, layout: u32) -> PathBuf {
        self.dir.join(format!("v{layout}"))
    }

    /// Path of a pinned map or link.
    #[must_use]
    pub fn object(&self, name: &str) -> PathBuf {
        self.versioned().join(name)
    }

    /// The names of the maps that the programs name.
    pub(in crate::bpf) fn map_names() -> impl Iterator<Item = &'static str> {
        NAMED.iter().map(|(name, _)| *name)
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

    /// A map that is pinned where ours should be is used only if it is like ours: aya itself would take any.
    pub(in crate::bpf) fn check_maps(&self) -> Result<(), PinError> {
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

    /// The other layouts that have a directory.
    pub(in crate::bpf) fn other_layouts(&self) -> Result<Vec<u32>, PinError> {
        let layouts = self.layouts()?;
        let layouts = layouts.iter().filter_map(|name| name.strip_prefix('v')?.parse().ok());
        Ok(layouts.filter(|layout| *layout != LAYOUT_VERSION).collect())
    }

    /// The names of the directories of all layouts.
    pub(super) fn layouts(&self) -> Result<Vec<String>, PinError> {
        let mut names = list(&self.dir)?;
        names.retain(|name| name.strip_prefix('v').is_some_and(|version| version.parse::<u32>().is_ok()));
        Ok(names)
    }
}

/// How a map differs from what is expected; `None` if it does not.
pub(in crate::bpf) fn difference(expected: MapShape, info: &MapInfo) -> Option<String> {
    let found = MapShape::of(info);
    let text = |shape: MapShape| {
        let MapShape { map_type, key_bytes, value_bytes, entries, flags } = shape;
        format!("{map_type:?}, {key_bytes} byte keys, {value_bytes} byte values, {entries} entries, flags {flags:#x}")
    };
    let found_text = || found.map_or_else(|| "another type".to_owned(), text);
    (found != Some(expected)).then(|| format!("it is {}; expected {}", found_text(), text(expected)))
}

/// The names in a directory, sorted; none if it does not exist.
pub(in crate::bpf) fn list(dir: &Path) -> Result<Vec<String>, PinError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(PinError::Io(dir.to_owned(), error)),
    };
    let mut names: Vec<_> =
        entries.filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned())).collect();
    sort_few(&mut names);
    Ok(names)
}

/// Removes a directory, and all pins in it.
pub(in crate::bpf) fn remove_with_pins(dir: &Path) -> io::Result<()> {
    remove_pins_in(dir)?;
    match fs::remove_dir(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Removes all pins in a directory.
pub(in crate::bpf) fn remove_pins_in(dir: &Path) -> io::Result<()> {
    let names = list(dir).map_err(|error| io::Error::other(error.to_string()))?;
    names.iter().try_for_each(|name| fs::remove_file(dir.join(name)))
}

/// Removes a directory if nothing is in it.
pub(in crate::bpf) fn remove_if_empty(dir: &Path) -> Result<(), PinError> {
    match fs::remove_dir(dir) {
        Err(error) if !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::DirectoryNotEmpty) => {
            Err(PinError::Io(dir.to_owned(), error))
        }
        _ => Ok(()),
    }
}
