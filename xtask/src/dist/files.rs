//! Files of the programs: as they lie in an installed system, and in archives to unpack anywhere.

use std::{fs, path::Path};

use anyhow::{Context as _, Result};

use super::{Build, Release, Released, version};
use crate::{
    binary::AGENT,
    image::{Tree, gzip, read, tar},
    paths,
};

/// Texts that come with a program.
pub(crate) struct Documents {
    pub(super) readme: Vec<u8>,
    pub(super) security: Vec<u8>,
    pub(super) changelog: Vec<u8>,
    pub(super) licence: Vec<u8>,
    /// Licences of everything in the program.
    pub(super) licences: Vec<u8>,
}

/// Completions: the generator's name, and the place where Debian's shell looks for it.
const COMPLETIONS: [(&str, &str); 3] = [
    ("cproxy.bash", "usr/share/bash-completion/completions/cproxy"),
    ("_cproxy", "usr/share/zsh/vendor-completions/_cproxy"),
    ("cproxy.fish", "usr/share/fish/vendor_completions.d/cproxy.fish"),
];

/// Links of the overlay that start its units; packages leave that to their tools and to the administrator.
const ENABLED: &str = "etc/systemd";

/// Files of a program in a system, as its package has them.
pub(super) fn installed(released: &Released, manual: &Path) -> Result<Tree> {
    let name = released.program.name;
    let images = paths::workspace().join("images");
    let mut tree = Tree::default();
    if name == AGENT.name {
        tree = Tree::read(&images.join("rootfs"))?;
        tree.remove(ENABLED);
        for page in sorted(&manual.join("man"))? {
            tree.add_file(&format!("usr/share/man/man8/{page}.gz"), gzip(&read(&manual.join("man").join(&page))?)?);
        }
        for (from, to) in COMPLETIONS {
            tree.add_file(to, read(&manual.join("completions").join(from))?);
        }
        tree.add_program("etc/init.d/cproxy", read(&images.join("rootfs/usr/share/cproxy/init.d"))?);
    } else {
        for (from, to) in [
            ("cproxy-relay.service", "usr/lib/systemd/system/cproxy-relay.service"),
            ("cproxy-relay.conf", "etc/cproxy-relay/cproxy-relay.conf"),
        ] {
            tree.add_file(to, read(&images.join("relay").join(from))?);
        }
    }
    tree.add_program(&format!("usr/bin/{name}"), read(&released.file)?);
    let documents = format!("usr/share/doc/{name}");
    tree.add_file(&format!("{documents}/README.md"), released.documents.readme.clone());
    tree.add_file(&format!("{documents}/SECURITY.md"), released.documents.security.clone());
    tree.add_file(&format!("{documents}/CHANGELOG.md.gz"), gzip(&released.documents.changelog)?);
    tree.add_file(&format!("{documents}/copyright"), released.documents.licence.clone());
    tree.add_file(&format!("{documents}/licences.txt.gz"), gzip(&released.documents.licences)?);
    Ok(tree)
}

/// Files of a program in an archive.
fn archived(released: &Released, manual: &Path) -> Result<Tree> {
    let name = released.program.name;
    let images = paths::workspace().join("images");
    let mut tree = Tree::default();
    tree.add_program(&format!("bin/{name}"), read(&released.file)?);
    let mut files = vec![];
    if name == AGENT.name {
        let overlay = images.join("rootfs");
        files.push((overlay.join("etc/cproxy/cproxy.conf"), "etc/cproxy/cproxy.conf".to_owned()));
        files.push((overlay.join("usr/lib/tmpfiles.d/cproxy.conf"), "tmpfiles.d/cproxy.conf".to_owned()));
        files.push((overlay.join("usr/share/cproxy/logrotate"), "logrotate.d/cproxy".to_owned()));
        for unit in ["cproxy.service", "cproxy-wait.service"] {
            files.push((overlay.join("usr/lib/systemd/system").join(unit), format!("systemd/{unit}")));
        }
        for system in ["openrc", "runit", "s6"] {
            tree.add_tree(system, Tree::read(&overlay.join("usr/share/cproxy").join(system))?);
        }
        tree.add_program("init.d/cproxy", read(&overlay.join("usr/share/cproxy/init.d"))?);
        for part in ["man", "completions"] {
            for file in sorted(&manual.join(part))? {
                files.push((manual.join(part).join(&file), format!("{part}/{file}")));
            }
        }
    } else {
        files.push((images.join("relay/cproxy-relay.service"), "systemd/cproxy-relay.service".to_owned()));
        files.push((images.join("relay/cproxy-relay.conf"), "etc/cproxy-relay/cproxy-relay.conf".to_owned()));
    }
    for (from, to) in files {
        tree.add_file(&to, read(&from)?);
    }
    tree.add_file("README.md", released.documents.readme.clone());
    tree.add_file("SECURITY.md", released.documents.security.clone());
    tree.add_file("CHANGELOG.md", released.documents.changelog.clone());
    tree.add_file("LICENSE", released.documents.licence.clone());
    tree.add_file("licences.txt", released.documents.licences.clone());
    Ok(tree)
}

/// Adds the programs, their debug information and their archives.
pub(super) fn add(release: &Release, build: &Build, manual: &Path) -> Result<()> {
    for released in build.programs() {
        let program = released.program.name;
        let (version, target) = (version(), build.target.name());
        let name = format!("{program}-{version}-linux-{target}");
        release.add_program(&name, &read(&released.file)?)?;
        let mut tree = Tree::default();
        tree.add_tree(&name, archived(released, manual)?);
        release.add(&format!("{name}.tar.gz"), &gzip(&tar::archive(&tree, release.stamp)?)?)?;
        // At the place where debuggers look for it.
        let mut debug = Tree::default();
        debug.add_file(&format!("usr/lib/debug/usr/bin/{program}.debug"), read(&released.debug)?);
        let archive = gzip(&tar::archive(&debug, release.stamp)?)?;
        release.add(&format!("{program}-debug-{version}-linux-{target}.tar.gz"), &archive)?;
    }
    Ok(())
}

/// Names of the files in a directory.
fn sorted(directory: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(directory).with_context(|| format!("reading {}", directory.display()))?;
    let mut names: Vec<_> = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    Ok(names)
}
