//! Files as they will be in an image: all of root's, with two modes, in the order of their names.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::Path,
};

use anyhow::{Context as _, Result, bail};

const DIRECTORY: u32 = 0o040_755;
const PLAIN: u32 = 0o100_644;
const PROGRAM: u32 = 0o100_755;
const LINK: u32 = 0o120_777;

/// One thing in an image.
pub(crate) enum Entry {
    Directory,
    File { mode: u32, content: Vec<u8> },
    Link(String),
}

impl Entry {
    /// Type and permissions, as `stat(2)` has them.
    pub(crate) fn mode(&self) -> u32 {
        match self {
            Self::Directory => DIRECTORY,
            Self::File { mode, .. } => *mode,
            Self::Link(_) => LINK,
        }
    }

    fn write(&self, path: &Path) -> io::Result<()> {
        match self {
            Self::Directory => fs::create_dir_all(path),
            Self::File { content, .. } => fs::write(path, content),
            Self::Link(target) => return symlink(target, path),
        }?;
        // The caller's umask does not count.
        fs::set_permissions(path, fs::Permissions::from_mode(self.mode() & 0o7777))
    }

    /// A file's content, or what a link leads to.
    pub(crate) fn content(&self) -> &[u8] {
        match self {
            Self::Directory => &[],
            Self::File { content, .. } => content,
            Self::Link(target) => target.as_bytes(),
        }
    }
}

/// Paths without a leading slash; the directories on the way to each are there, too.
#[derive(Default)]
pub(crate) struct Tree(BTreeMap<String, Entry>);

impl Tree {
    /// Takes what is below a directory. Of its modes, only whether a file is a program counts: the rest is its
    /// owner's umask.
    pub(crate) fn read(root: &Path) -> Result<Self> {
        let mut tree = Self::default();
        tree.read_below(root, "")?;
        Ok(tree)
    }

    fn read_below(&mut self, directory: &Path, prefix: &str) -> Result<()> {
        let failed = || format!("reading {}", directory.display());
        for entry in fs::read_dir(directory).with_context(failed)? {
            let path = entry.with_context(failed)?.path();
            let name = path.file_name().and_then(|name| name.to_str());
            let inside = format!("{prefix}{}", name.with_context(|| format!("{}: not UTF-8", path.display()))?);
            self.add_copy(&inside, &path)?;
        }
        Ok(())
    }

    /// Adds a file or link, or a directory with what is below it.
    pub(crate) fn add_copy(&mut self, inside: &str, path: &Path) -> Result<()> {
        self.read_one(path, inside.to_owned()).with_context(|| format!("reading {}", path.display()))
    }

    fn read_one(&mut self, path: &Path, inside: String) -> Result<()> {
        let metadata = fs::symlink_metadata(path)?;
        if metadata.is_dir() {
            self.add_directory(&inside);
            return self.read_below(path, &format!("{inside}/"));
        }
        if metadata.is_symlink() {
            let target = fs::read_link(path)?;
            self.add_link(&inside, target.to_str().context("a link to what is not UTF-8")?.to_owned());
        } else if metadata.is_file() {
            let mode = if metadata.permissions().mode() & 0o100 == 0 { PLAIN } else { PROGRAM };
            self.add(&inside, Entry::File { mode, content: fs::read(path)? });
        } else {
            bail!("neither a file nor a directory nor a link");
        }
        Ok(())
    }

    pub(crate) fn add_directory(&mut self, path: &str) {
        self.add(path, Entry::Directory);
    }

    pub(crate) fn add_program(&mut self, path: &str, content: Vec<u8>) {
        self.add(path, Entry::File { mode: PROGRAM, content });
    }

    pub(crate) fn add_file(&mut self, path: &str, content: Vec<u8>) {
        self.add(path, Entry::File { mode: PLAIN, content });
    }

    pub(crate) fn add_link(&mut self, path: &str, target: String) {
        self.add(path, Entry::Link(target));
    }

    fn add(&mut self, path: &str, entry: Entry) {
        for (end, _) in path.match_indices('/') {
            self.0.entry(path.split_at(end).0.to_owned()).or_insert(Entry::Directory);
        }
        self.0.insert(path.to_owned(), entry);
    }

    /// Adds another tree below a directory.
    pub(crate) fn add_tree(&mut self, directory: &str, other: Self) {
        for (path, entry) in other.0 {
            self.add(&format!("{directory}/{path}"), entry);
        }
    }

    /// Removes a directory and what is below it.
    pub(crate) fn remove(&mut self, directory: &str) {
        let below = format!("{directory}/");
        self.0.retain(|path, _| path != directory && !path.starts_with(&below));
    }

    /// Writes it to a directory that has nothing of it yet.
    pub(crate) fn write(&self, directory: &Path) -> Result<()> {
        self.entries().try_for_each(|(path, entry)| {
            let path = directory.join(path);
            entry.write(&path).with_context(|| format!("writing {}", path.display()))
        })
    }

    /// A directory comes before what is in it.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.0.iter().map(|(path, entry)| (path.as_str(), entry))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_come_before_what_is_in_them() {
        let mut tree = Tree::default();
        tree.add_program("usr/bin/a", Vec::new());
        tree.add_link("usr-local", "usr".to_owned());
        tree.add_directory("usr/bin");
        let paths: Vec<_> = tree.entries().map(|(path, _)| path).collect();
        assert_eq!(paths, ["usr", "usr-local", "usr/bin", "usr/bin/a"]);
    }
}
