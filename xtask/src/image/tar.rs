//! Archives as POSIX has them ("ustar"): a header of 512 bytes for each entry, in octal numbers, then its content.

use anyhow::{Result, ensure};

use super::stamp::Stamp;
use super::tree::{Entry, Tree};

const BLOCK: usize = 512;
const NAME_MAX: usize = 100;
/// Where the checksum is in a header.
const CHECKSUM: usize = 148;

/// All of the tree, owned by root.
pub(super) fn archive(tree: &Tree, stamp: Stamp) -> Result<Vec<u8>> {
    let mut archive = Vec::new();
    for (path, entry) in tree.entries() {
        let (kind, name, target, content) = match entry {
            Entry::Directory => ('5', format!("{path}/"), "", &[][..]),
            Entry::File { content, .. } => ('0', path.to_owned(), "", &**content),
            Entry::Link(target) => ('2', path.to_owned(), &**target, &[][..]),
        };
        ensure!(name.len() <= NAME_MAX && target.len() <= NAME_MAX, "{path}: too long a name for a tar archive");
        archive.extend(header(&name, entry.mode(), content.len(), stamp, kind, target));
        archive.extend(content);
        archive.resize(archive.len().next_multiple_of(BLOCK), 0);
    }
    archive.extend([0; 2 * BLOCK]);
    Ok(archive)
}

fn header(name: &str, mode: u32, size: usize, stamp: Stamp, kind: char, target: &str) -> Vec<u8> {
    let (permissions, seconds, owner) = (mode & 0o7777, stamp.seconds(), 0);
    // The checksum counts itself as spaces. Device numbers and a prefix of the name are left out: they are zero.
    let mut header = format!(
        "{name:\0<100}{permissions:07o}\0{owner:07o}\0{owner:07o}\0{size:011o}\0{seconds:011o}\0{:8}{kind}{target:\0<100}\
         ustar\x0000{:\0<32}{:\0<32}",
        "", "root", "root"
    )
    .into_bytes();
    header.resize(BLOCK, 0);
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header.splice(CHECKSUM..CHECKSUM + 8, format!("{sum:06o}\0 ").into_bytes());
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_has_its_fields_where_posix_puts_them() {
        let header = header("usr/", 0o040_755, 0, Stamp::new(8), '5', "");
        let field = |range| String::from_utf8_lossy(header.get::<std::ops::Range<usize>>(range).unwrap()).into_owned();
        assert_eq!(header.len(), BLOCK);
        assert_eq!((&*field(0..5), &*field(100..108)), ("usr/\0", "0000755\0"));
        assert_eq!((&*field(124..136), &*field(136..148)), ("00000000000\0", "00000000010\0"));
        assert_eq!((&*field(156..157), &*field(257..265), &*field(265..270)), ("5", "ustar\x0000", "root\0"));
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        let own: u32 = field(148..156).bytes().map(u32::from).sum();
        assert_eq!(field(148..154), format!("{:06o}", sum - own + 8 * 32));
    }

    #[test]
    fn names_that_do_not_fit_are_an_error() {
        let mut tree = Tree::default();
        tree.add_program(&"a".repeat(101), Vec::new());
        assert!(archive(&tree, Stamp::new(0)).is_err());
    }
}
