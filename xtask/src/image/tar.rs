//! Archives as POSIX has them ("ustar").

use std::io;

use ::tar::{Builder, EntryType, Header};
use anyhow::{Context as _, Result};

use super::{
    stamp::Stamp,
    tree::{Entry, Tree},
};

const OWNER: &str = "root";

/// All of the tree, owned by root.
pub(crate) fn archive(tree: &Tree, stamp: Stamp) -> Result<Vec<u8>> {
    let mut archive = Builder::new(Vec::new());
    for (path, entry) in tree.entries() {
        append(&mut archive, path, entry, stamp).with_context(|| format!("{path}: writing a tar archive"))?;
    }
    archive.into_inner().context("writing a tar archive")
}

fn append(archive: &mut Builder<Vec<u8>>, path: &str, entry: &Entry, stamp: Stamp) -> io::Result<()> {
    let mut header = Header::new_ustar();
    header.set_mode(entry.mode() & 0o7777);
    header.set_mtime(stamp.seconds().into());
    header.set_uid(0);
    header.set_gid(0);
    header.set_username(OWNER)?;
    header.set_groupname(OWNER)?;
    header.set_size(0);
    match entry {
        Entry::Directory => {
            header.set_entry_type(EntryType::Directory);
            archive.append_data(&mut header, format!("{path}/"), io::empty())
        }
        Entry::File { content, .. } => {
            header.set_size(content.len() as u64);
            archive.append_data(&mut header, path, &**content)
        }
        Entry::Link(target) => {
            header.set_entry_type(EntryType::Symlink);
            archive.append_link(&mut header, path, target)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use ::tar::Archive;

    use super::*;

    #[test]
    fn entries_are_roots_and_have_their_modes_contents_and_time() {
        let mut tree = Tree::default();
        let long = format!("usr/{}/agent", "a".repeat(99));
        tree.add_program(&long, b"agent".to_vec());
        tree.add_link("usr/link", "/bin/sh".to_owned());
        let archive = archive(&tree, Stamp::new(8)).unwrap();
        let mut found = Vec::new();
        for entry in Archive::new(&*archive).entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut content = String::new();
            entry.read_to_string(&mut content).unwrap();
            let (path, target) = (entry.path().unwrap(), entry.link_name().unwrap().unwrap_or_default());
            let (path, target) = (path.display().to_string(), target.display().to_string());
            let header = entry.header();
            assert_eq!((header.uid().unwrap(), header.gid().unwrap(), header.mtime().unwrap()), (0, 0, 8));
            assert_eq!((header.username().unwrap(), header.as_ustar().is_some()), (Some("root"), true));
            found.push((path, header.mode().unwrap(), target + &content));
        }
        let expected = [
            ("usr/", 0o755, ""),
            (&*format!("usr/{}/", "a".repeat(99)), 0o755, ""),
            (&long, 0o755, "agent"),
            ("usr/link", 0o777, "/bin/sh"),
        ];
        let expected = expected.map(|(path, mode, content)| (path.to_owned(), mode, content.to_owned()));
        assert_eq!(found, expected);
    }
}
