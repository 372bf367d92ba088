//! Current manifest files, each with its last good content.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use cproxy_core::{Event, ObjectName, Problem, ResourceKind};

use super::{
    contents::{Contents, FileObject, ParseOptions, WholeObject, list_events, whole_objects},
    parse::parse,
    policy_objects::PolicyObjects,
};

/// Reason why a path cannot be a source.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// The path does not exist or cannot be read.
    #[error("--manifests {0}: {1}")]
    Io(PathBuf, io::Error),
}

/// Files that may have changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Any file.
    Everything,
    /// These files. Others are not read, since a writer may be in the middle of them.
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
    options: ParseOptions,
    files: BTreeMap<PathBuf, Option<Contents>>,
    problems: BTreeMap<PathBuf, Problem>,
}

impl Files {
    /// Reads `paths`: files, or directories whose `.yaml`, `.yml` and `.json` files count (not those of directories
    /// below, as with kubectl).
    ///
    /// # Errors
    /// A path cannot be read at all. A file that is read but cannot be parsed is a problem, not an error.
    pub fn read(paths: &[PathBuf], options: ParseOptions) -> Result<Self, ManifestError> {
        for path in paths {
            let readable = match path.is_dir() {
                true => fs::read_dir(path).map(drop),
                false => check_kind(path, options.has_pipes).and_then(|()| fs::File::open(path).map(drop)),
            };
            readable.map_err(|error| ManifestError::Io(path.clone(), error))?;
        }
        let mut files = Self { paths: paths.to_vec(), options, files: BTreeMap::new(), problems: BTreeMap::new() };
        files.refresh(&Change::Everything);
        Ok(files)
    }

    /// Reads the changed files. One that cannot be read or parsed keeps its last good content.
    pub fn refresh(&mut self, change: &Change) {
        let mut found = BTreeSet::new();
        for path in self.paths.clone() {
            self.problems.remove(&path);
            match manifests_at(&path) {
                Ok(files) => found.extend(files),
                Err(error) => {
                    self.record_problem(&path, &format!("{error}; its last content stays"));
                    found.extend(self.files.keys().filter(|file| file.starts_with(&path)).cloned().collect::<Vec<_>>());
                }
            }
        }
        self.files.retain(|file, _| found.contains(file));
        self.problems.retain(|file, _| found.contains(file) || self.paths.contains(file));
        found.into_iter().filter(|file| change.includes(file)).for_each(|file| self.read_file(file));
    }

    /// The files as complete lists of all kinds.
    pub fn events(&self) -> impl Iterator<Item = Event> {
        list_events(self.objects())
    }

    /// Requested whole objects.
    #[must_use]
    pub fn whole_objects(&self) -> BTreeMap<(ResourceKind, &ObjectName), &WholeObject> {
        whole_objects(self.objects())
    }

    /// Objects of network policies, if they are kept.
    #[must_use]
    pub fn policy_objects(&self) -> PolicyObjects<'_> {
        self.files.values().flatten().flat_map(Contents::each_policy_object).collect()
    }

    fn objects(&self) -> impl Iterator<Item = &FileObject> {
        self.files.values().flatten().flat_map(Contents::objects)
    }

    /// Problem of a missing Node: this node has a name that no object has.
    #[must_use]
    pub fn missing_node(&self) -> Option<Problem> {
        let is_there = self.objects().any(|object| matches!(object, FileObject::Node(_)));
        let own = self.options.node_name.as_ref().filter(|_| !is_there)?;
        let message = "the manifests have no such Node: hints for zones are not followed and, without --node-ip, node \
                       ports are not served";
        Some(Problem::new(format_args!("Node {own}"), "", message))
    }

    /// Whether there is a Service of this name that can be read.
    #[must_use]
    pub fn has_service(&self, name: &ObjectName) -> bool {
        self.objects().any(|object| match object {
            FileObject::Row(_) | FileObject::Whole(_) => object.id() == (ResourceKind::Services, name),
            FileObject::Unreadable(_) | FileObject::Node(_) => false,
        })
    }

    /// Whether there is an unreadable Service of this name.
    #[must_use]
    pub fn has_unreadable_service(&self, name: &ObjectName) -> bool {
        self.objects().any(|object| match object {
            FileObject::Unreadable(object) => object.0 == ResourceKind::Services && object.1 == *name,
            FileObject::Row(_) | FileObject::Whole(_) | FileObject::Node(_) => false,
        })
    }

    /// Problems of files, and of unreadable objects.
    pub fn problems(&self) -> impl Iterator<Item = &Problem> {
        self.unread().chain(self.problems_of_objects())
    }

    /// Files and directories that could not be read or parsed.
    pub fn unread(&self) -> impl Iterator<Item = &Problem> {
        self.problems.values()
    }

    fn problems_of_objects(&self) -> impl Iterator<Item = &Problem> {
        self.files.values().flatten().flat_map(Contents::problems)
    }

    /// All problems, as the store takes them.
    #[must_use]
    pub fn problem_event(&self) -> Event {
        let others = self.problems_of_objects().cloned().chain(self.duplicates()).collect();
        Event::SourceProblems { unread: self.unread().cloned().collect(), others }
    }

    /// Whether a file could not be read or parsed.
    #[must_use]
    pub fn has_unread_file(&self) -> bool {
        !self.problems.is_empty()
    }

    fn read_file(&mut self, file: PathBuf) {
        self.problems.remove(&file);
        let is_known = matches!(self.files.get(&file), Some(Some(_)));
        let stays = if is_known { "; its last content stays" } else { ": this file is not used until it can be read" };
        let text = match self.read_text(&file) {
            Ok(text) if text.is_empty() && is_known => Err("it is empty (delete it to remove its objects)".to_owned()),
            Ok(text) => Ok(text),
            Err(error) => Err(error.to_string()),
        };
        match text.and_then(|text| parse(&file.display().to_string(), &text, &self.options)) {
            Ok(contents) => drop(self.files.insert(file, Some(contents))),
            Err(message) => {
                self.record_problem(&file, &format!("{message}{stays}"));
                self.files.entry(file).or_default();
            }
        }
    }

    /// Reads a file. A pipe counts only if its path was given, and once.
    fn read_text(&self, file: &Path) -> io::Result<String> {
        let is_given = self.paths.iter().any(|path| path == file) && !self.files.contains_key(file);
        check_kind(file, self.options.has_pipes && is_given)?;
        fs::read_to_string(file)
    }

    fn record_problem(&mut self, path: &Path, message: &str) {
        self.problems.insert(path.to_owned(), Problem::new(path.display(), "", message));
    }

    /// Problems of objects that are defined several times: only the last definition counts.
    #[must_use]
    pub fn duplicates(&self) -> Vec<Problem> {
        let mut all = Vec::new();
        for (file, contents) in self.files.iter().filter_map(|(file, contents)| contents.as_ref().map(|of| (file, of)))
        {
            let ids = contents.objects().iter().map(|object| {
                let (kind, ObjectName { namespace, name }) = object.id();
                (kind.singular(), &**namespace, &**name)
            });
            let policy_ids = contents.each_policy_object().iter().map(|object| object.id().parts());
            let policy_ids = policy_ids.filter(|(_, _, name)| !name.is_empty());
            all.extend(ids.chain(policy_ids).map(|id| (id, file.as_path())));
        }
        all.sort_unstable();
        let same = all.chunk_by(|(a, _), (b, _)| a == b).filter(|same| same.len() > 1);
        same.filter_map(duplicate_problem).collect()
    }
}

/// Refuses a FIFO or a device, which may never end, unless pipes may be read.
fn check_kind(file: &Path, has_pipes: bool) -> io::Result<()> {
    if has_pipes || fs::metadata(file)?.is_file() {
        Ok(())
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"))
    }
}

fn duplicate_problem(same: &[((&str, &str, &str), &Path)]) -> Option<Problem> {
    let mut list: Vec<_> = same.iter().map(|(_, file)| file.display().to_string()).collect();
    list.dedup();
    let ((kind, namespace, name), last) = (same.first()?.0, list.last()?);
    let object = format!("{kind} {}", ObjectName::new(namespace, name));
    Some(Problem::new(object, "", format!("defined several times ({}); the one in {last} counts", list.join(", "))))
}

/// The path, or the nearest one above it, for which `exists` holds.
pub(super) fn nearest(path: &Path, exists: impl Fn(&Path) -> bool) -> &Path {
    // The kernel takes no longer path.
    let mut possible = path.ancestors().skip_while(|above| above.as_os_str().len() >= libc::PATH_MAX as usize);
    let nearest = possible.find(|above| exists(above));
    nearest.filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Manifests of a path: the file itself, or those in the directory.
pub(super) fn manifests_at(path: &Path) -> io::Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return fs::metadata(path).map(|_| vec![path.to_owned()]);
    }
    let entries = fs::read_dir(path)?.collect::<io::Result<Vec<_>>>()?;
    Ok(entries.into_iter().map(|entry| entry.path()).filter(|path| is_manifest(path)).collect())
}

fn is_manifest(path: &Path) -> bool {
    let is_hidden = path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
    let extension = path.extension().and_then(|extension| extension.to_str());
    !is_hidden && matches!(extension, Some("yaml" | "yml" | "json"))
}
