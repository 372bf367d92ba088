//! The manifest files as they are now, each with its last good content.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs, io,
    path::{Path, PathBuf},
};

use super::parse::{Manifest, lists, parse};
use crate::{
    k8s::objects::{EndpointSlice, Service},
    model::{Event, Kind, ObjectName, Problem, object_name},
};

/// Why a path cannot be a source.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// It does not exist or may not be read.
    #[error("--manifests {0}: {1}")]
    Io(PathBuf, io::Error),
}

/// Which files may have other content than before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Any.
    Everything,
    /// These: the others are not read, since somebody may be in the middle of writing them.
    Paths(BTreeSet<PathBuf>),
}

impl Change {
    fn includes(&self, file: &Path) -> bool {
        match self {
            Self::Everything => true,
            Self::Paths(paths) => paths.contains(file),
        }
    }
}

/// All files of all paths.
#[derive(Debug)]
pub struct Files {
    paths: Vec<PathBuf>,
    files: BTreeMap<PathBuf, Option<Manifest>>,
    problems: BTreeMap<PathBuf, Problem>,
}

impl Files {
    /// Reads `paths`: files, or directories whose `.yaml`, `.yml` and `.json` files count (not those of directories
    /// below, as with kubectl).
    ///
    /// # Errors
    /// A path cannot be read at all. A file that is read but cannot be parsed is a problem, not an error.
    pub fn read(paths: &[PathBuf]) -> Result<Self, ManifestError> {
        for path in paths {
            let readable = if path.is_dir() { fs::read_dir(path).map(drop) } else { fs::File::open(path).map(drop) };
            readable.map_err(|error| ManifestError::Io(path.clone(), error))?;
        }
        let mut files = Self { paths: paths.to_vec(), files: BTreeMap::new(), problems: BTreeMap::new() };
        files.refresh(&Change::Everything);
        Ok(files)
    }

    /// Reads what has changed. What cannot be read or parsed keeps its last good content.
    pub fn refresh(&mut self, change: &Change) {
        let mut found = BTreeSet::new();
        for path in self.paths.clone() {
            self.problems.remove(&path);
            match self.expand(&path) {
                Ok(files) => found.extend(files),
                Err(error) => {
                    self.problem(&path, &format!("{error}; its last content stays"));
                    found.extend(self.files.keys().filter(|file| file.starts_with(&path)).cloned().collect::<Vec<_>>());
                }
            }
        }
        self.files.retain(|file, _| found.contains(file));
        self.problems.retain(|file, _| found.contains(file) || self.paths.contains(file));
        found.into_iter().filter(|file| change.includes(file)).for_each(|file| self.read_file(file));
    }

    /// The files as complete lists of all kinds.
    #[must_use]
    pub fn events(&self) -> Vec<Event> {
        lists(self.files.values().flatten())
    }

    /// The Services with their names; of several definitions the last counts.
    #[must_use]
    pub fn services(&self) -> BTreeMap<ObjectName, &Service> {
        let services = self.files.values().flatten().flat_map(|manifest| &manifest.services);
        services.filter_map(|service| Some((object_name(&service.metadata)?, service))).collect()
    }

    /// The EndpointSlices with their names; of several definitions the last counts.
    #[must_use]
    pub fn slices(&self) -> BTreeMap<ObjectName, &EndpointSlice> {
        let slices = self.files.values().flatten().flat_map(|manifest| &manifest.slices);
        slices.filter_map(|slice| Some((object_name(&slice.metadata)?, slice))).collect()
    }

    /// That the own Node, if it has a name, is not among the objects.
    #[must_use]
    pub fn missing_node(&self, own: Option<&str>) -> Option<Problem> {
        let mut nodes = self.files.values().flatten().flat_map(|manifest| &manifest.nodes);
        let own = own.filter(|own| !nodes.any(|node| node.metadata.name.as_deref() == Some(own)))?;
        let message = "the manifests have no such Node: hints for zones are not followed and, without --node-ip, node ports \
                       are not served";
        Some(Problem::new(format_args!("Node {own}"), "", message))
    }

    /// Whether a Service of this name is there and cannot be read.
    #[must_use]
    pub fn has_unreadable_service(&self, name: &ObjectName) -> bool {
        let mut unreadable = self.files.values().flatten().flat_map(|manifest| &manifest.unreadable);
        unreadable.any(|(kind, other, _)| *kind == Kind::Services && other == name)
    }

    /// What is wrong with files, and with objects that could not be read.
    pub fn problems(&self) -> impl Iterator<Item = &Problem> {
        self.problems.values().chain(self.files.values().flatten().flat_map(|manifest| &manifest.problems))
    }

    /// Whether a file could not be read or parsed.
    #[must_use]
    pub fn has_unread(&self) -> bool {
        !self.problems.is_empty()
    }

    fn expand(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        if !path.is_dir() {
            return fs::metadata(path).map(|_| vec![path.to_owned()]);
        }
        let entries = fs::read_dir(path)?.collect::<io::Result<Vec<_>>>()?;
        Ok(entries.into_iter().map(|entry| entry.path()).filter(|path| is_manifest(path)).collect())
    }

    fn read_file(&mut self, file: PathBuf) {
        self.problems.remove(&file);
        let is_known = matches!(self.files.get(&file), Some(Some(_)));
        let stays = if is_known { "; its last content stays" } else { "; ignored" };
        let text = match self.read_text(&file) {
            Ok(text) if text.is_empty() && is_known => Err("it is empty (delete it to remove its objects)".to_owned()),
            Ok(text) => Ok(text),
            Err(error) => Err(error.to_string()),
        };
        match text.and_then(|text| parse(&file.display().to_string(), &text)) {
            Ok(manifest) => drop(self.files.insert(file, Some(manifest))),
            Err(message) => {
                self.problem(&file, &format!("{message}{stays}"));
                self.files.entry(file).or_default();
            }
        }
    }

    /// Reading a FIFO or a device may never end: such a file counts only if it was asked for by name, and once.
    fn read_text(&self, file: &Path) -> io::Result<String> {
        let is_asked_for = self.paths.iter().any(|path| path == file) && !self.files.contains_key(file);
        if !is_asked_for && !fs::metadata(file)?.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        fs::read_to_string(file)
    }

    fn problem(&mut self, path: &Path, message: &str) {
        self.problems.insert(path.to_owned(), Problem::new(path.display(), "", message));
    }

    /// Objects that several files define, as kind, name and the number of definitions: only the last counts.
    #[must_use]
    pub fn duplicates(&self) -> Vec<Problem> {
        let mut places = HashMap::<String, Vec<&Path>>::new();
        for (file, manifest) in &self.files {
            for name in manifest.iter().flat_map(names) {
                places.entry(name).or_default().push(file);
            }
        }
        let several = places.into_iter().filter(|(_, files)| files.len() > 1);
        let mut problems: Vec<_> = several.map(|(name, files)| duplicate(&name, &files)).collect();
        problems.sort_unstable();
        problems
    }
}

fn duplicate(name: &str, files: &[&Path]) -> Problem {
    let list: Vec<_> = files.iter().map(|file| file.display().to_string()).collect();
    let last = list.last().cloned().unwrap_or_default();
    Problem::new(name, "", format!("defined several times ({}); the one in {last} counts", list.join(", ")))
}

fn names(manifest: &Manifest) -> Vec<String> {
    let name = |kind: &str, metadata: &kube::core::ObjectMeta| {
        let namespace = metadata.namespace.as_deref().filter(|namespace| !namespace.is_empty()).unwrap_or("default");
        format!("{kind} {namespace}/{}", metadata.name.as_deref().unwrap_or_default())
    };
    let services = manifest.services.iter().map(|service| name("Service", &service.metadata));
    let slices = manifest.slices.iter().map(|slice| name("EndpointSlice", &slice.metadata));
    let nodes = manifest.nodes.iter().filter_map(|node| Some(format!("Node {}", node.metadata.name.as_deref()?)));
    let unreadable = manifest.unreadable.iter().map(|(kind, name, _)| match kind {
        Kind::Nodes => format!("Node {}", name.name),
        _ => format!("{} {name}", kind.singular()),
    });
    services.chain(slices).chain(nodes).chain(unreadable).collect()
}

fn is_manifest(path: &Path) -> bool {
    let is_hidden = path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
    let extension = path.extension().and_then(|extension| extension.to_str());
    !is_hidden && matches!(extension, Some("yaml" | "yml" | "json"))
}
