//! The archive that a kernel unpacks as its first root file system
//! (Documentation/driver-api/early-userspace/buffer-format.rst in the kernel's sources): "newc", where each entry is a
//! header of hexadecimal numbers, a name and a content.

use anyhow::{Context as _, Result};

use super::{
    stamp::Stamp,
    tree::{Entry, Tree},
};

const MAGIC: &str = "070701";
/// The name that ends an archive.
const TRAILER: &str = "TRAILER!!!";
/// Names and contents end at a multiple of this.
const ALIGNMENT: usize = 4;

/// All of the tree, owned by root.
pub(crate) fn archive(tree: &Tree, stamp: Stamp) -> Result<Vec<u8>> {
    let mut archive = Vec::new();
    // Inode numbers tell hard links, of which there are none: each entry has one of its own.
    for (number, (path, entry)) in (1..).zip(tree.entries()) {
        append(&mut archive, number, path, entry, stamp).with_context(|| path.to_owned())?;
    }
    append_record(&mut archive, [0; 6], TRAILER, &[])?;
    Ok(archive)
}

fn append(archive: &mut Vec<u8>, number: u32, path: &str, entry: &Entry, stamp: Stamp) -> Result<()> {
    let links = if matches!(entry, Entry::Directory) { 2 } else { 1 };
    append_record(archive, [number, entry.mode(), 0, 0, links, stamp.seconds()], path, entry.content())
}

/// `fields` are inode, mode, owner, group, links and time.
fn append_record(archive: &mut Vec<u8>, fields: [u32; 6], name: &str, content: &[u8]) -> Result<()> {
    let length = |bytes: usize| u32::try_from(bytes).context("too large");
    // Of no device, and no device itself; without a checksum, which this format does not have.
    let (devices, checksum) = ([0; 4], 0);
    let lengths = [length(content.len())?, length(name.len() + 1)?];
    let [size, name_size] = lengths;
    let header = fields.into_iter().chain([size]).chain(devices).chain([name_size, checksum]);
    archive.extend(MAGIC.bytes());
    header.for_each(|field| archive.extend(format!("{field:08x}").bytes()));
    archive.extend(name.bytes().chain([0]));
    pad(archive);
    archive.extend(content);
    pad(archive);
    Ok(())
}

fn pad(archive: &mut Vec<u8>) {
    archive.resize(archive.len().next_multiple_of(ALIGNMENT), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_a_header_a_name_and_a_content() {
        let mut tree = Tree::default();
        tree.add_program("init", b"hello".to_vec());
        let archive = archive(&tree, Stamp::new(16)).unwrap();
        let header = "070701 00000001 000081ed 00000000 00000000 00000001 00000010 00000005 \
                      00000000 00000000 00000000 00000000 00000005 00000000";
        let first = [header.replace(' ', "").as_bytes(), b"init\0\0hello\0\0\0"].concat();
        assert_eq!(archive.get(..first.len()), Some(&*first));
        let trailer = format!("{MAGIC}{:088}0000000b00000000{TRAILER}\0\0\0\0", 0);
        assert_eq!(archive.get(first.len()..), Some(trailer.as_bytes()));
    }
}
