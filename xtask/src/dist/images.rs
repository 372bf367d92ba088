//! Images of a release: for container runtimes, for guests, and for systems that are themselves an image.

use std::{
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};

use super::{Build, Release, documents, version};
use crate::{
    architecture::Architecture,
    image::{self, Tree, gzip, oci, read, tar},
    paths,
    publisher::Publisher,
    run, setup,
};

/// Directory of the overlay that a system extension has, too.
const UNITS: &str = "usr/lib/systemd/system";

/// Documents at the top of the repository.
const DOCUMENTS: [&str; 4] = ["README.md", "SECURITY.md", "CHANGELOG.md", "LICENSE"];
/// Documents, and what they name below `images`: the first process, hooks, options of kernels, manifests, a provider.
const DEPLOYED: [&str; 10] = [
    "docs",
    "images/init",
    "images/kata",
    "images/kernel",
    "images/kubernetes",
    "images/monitoring",
    "images/peer-pods",
    "images/relay",
    "images/rootfs/etc/cproxy/cproxy.conf",
    "images/virtual-kubelet",
];

/// Adds the images of the agent for one architecture.
pub(super) fn add(release: &Release, build: &Build) -> Result<()> {
    setup::for_dist()?;
    let (version, target) = (version(), build.target);
    let agent = || read(&build.agent.file);
    let overlay = tar::archive(&image::rootfs(agent()?)?, release.stamp)?;
    release.add(&rootfs_name(version, target), &gzip(&overlay)?)?;
    let initramfs = image::initramfs_bytes(target, agent()?)?;
    release.add(&initramfs_name(version, target), &initramfs)?;
    let extension = tar::archive(&extension(agent()?, target)?, release.stamp)?;
    let name = format!("cproxy_{version}_{}.raw", systemd_name(target));
    write_squashfs(release, &extension, &release.unfinished.join(name))
}

/// Adds an OCI image of each program, for all architectures, as an archive of its layout.
pub(super) fn add_common(release: &Release, builds: &[Build]) -> Result<()> {
    let images = [("cproxy", &oci::AGENT_IMAGE), ("cproxy-relay", &oci::RELAY_IMAGE)];
    for (number, (name, image)) in images.into_iter().enumerate() {
        let mut programs = Vec::new();
        for build in builds {
            let [agent, relay] = build.programs();
            let released = if number == 0 { agent } else { relay };
            programs.push((build.target, read(&released.file)?));
        }
        let layout =
            oci::write_for_all(release.scratch.join(name), image, programs, release.stamp, &release.publisher)?;
        let archive = tar::archive(&Tree::read(&layout.path)?, release.stamp)?;
        release.add(&oci_name(name, version()), &archive)?;
    }
    add_deployed(release)
}

/// Adds an archive of all documents, and of the files below `images` that they name, at the same paths.
fn add_deployed(release: &Release) -> Result<()> {
    let tree = deployed(&release.publisher)?;
    release.add(&deploy_name(version()), &gzip(&tar::archive(&tree, release.stamp)?)?)
}

fn deployed(publisher: &Publisher) -> Result<Tree> {
    let workspace = paths::workspace();
    let mut tree = Tree::default();
    for path in DEPLOYED {
        tree.add_copy(path, &workspace.join(path))?;
    }
    let pages: Vec<_> = tree.entries().map(|(path, _)| path.to_owned()).filter(|path| is_page(path)).collect();
    for name in DOCUMENTS.into_iter().map(str::to_owned).chain(pages) {
        tree.add_file(&name, documents::text(&name, publisher)?);
    }
    Ok(tree)
}

fn is_page(path: &str) -> bool {
    path.ends_with(".md")
}

fn rootfs_name(version: &str, target: Architecture) -> String {
    format!("cproxy-rootfs-{version}-{}.tar.gz", target.name())
}

fn initramfs_name(version: &str, target: Architecture) -> String {
    format!("cproxy-initramfs-{version}-{}.cpio.gz", target.name())
}

fn oci_name(program: &str, version: &str) -> String {
    format!("{program}-{version}-oci.tar")
}

fn deploy_name(version: &str) -> String {
    format!("cproxy-deploy-{version}.tar.gz")
}

/// Names of all images and archives, for a version.
#[cfg(test)]
pub(super) fn names(version: &str) -> Vec<String> {
    let of = |target| [rootfs_name(version, target), initramfs_name(version, target)];
    let common = [oci_name("cproxy", version), oci_name("cproxy-relay", version), deploy_name(version)];
    [Architecture::X86_64, Architecture::Aarch64].into_iter().flat_map(of).chain(common).collect()
}

/// A system extension: what the agent needs below /usr, started without a link in /etc.
fn extension(agent: Vec<u8>, target: Architecture) -> Result<Tree> {
    let images = paths::workspace().join("images");
    let mut tree = Tree::read(&images.join("sysext"))?;
    for unit in ["cproxy.service", "cproxy-wait.service"] {
        tree.add_file(&format!("{UNITS}/{unit}"), read(&images.join("rootfs").join(UNITS).join(unit))?);
    }
    for file in ["usr/lib/tmpfiles.d/cproxy.conf", "usr/share/cproxy/init.d"] {
        tree.add_file(file, read(&images.join("rootfs").join(file))?);
    }
    let example = images.join("rootfs/etc/cproxy/cproxy.conf");
    tree.add_file("usr/share/cproxy/cproxy.conf", read(&example)?);
    let about = format!("ID=_any\nARCHITECTURE={}\n", systemd_name(target));
    tree.add_file("usr/lib/extension-release.d/extension-release.cproxy", about.into_bytes());
    tree.add_program("usr/bin/cproxy", agent);
    Ok(tree)
}

/// An architecture's name to systemd.
fn systemd_name(target: Architecture) -> &'static str {
    match target {
        Architecture::X86_64 => "x86-64",
        Architecture::Aarch64 => "arm64",
    }
}

/// Writes an archive's content as a squashfs image, with gzip, which each kernel with squashfs reads.
fn write_squashfs(release: &Release, archive: &[u8], image: &Path) -> Result<()> {
    let seconds = release.stamp.seconds().to_string();
    let mut command = Command::new("sqfstar");
    command.args(["-quiet", "-no-progress", "-all-root", "-comp", "gzip", "-mkfs-time", &seconds]);
    // The archive's own root has no entry, and so neither a time nor a mode.
    command.args(["-all-time", &seconds, "-root-mode", "755", "-no-xattrs", "-processors", "1"]).arg(image);
    run::to_stderr(&mut command)?;
    // It is set by the caller's environment, and may not be when times are given.
    command.env_remove("SOURCE_DATE_EPOCH").stdin(Stdio::piped());
    let mut child = command.spawn().with_context(|| run::cannot_start(&command))?;
    let written = child.stdin.take().map_or(Ok(()), |mut input| input.write_all(archive));
    let status = child.wait().context("waiting for sqfstar")?;
    written.context("writing to sqfstar")?;
    ensure!(status.success(), "sqfstar failed ({status}) to write {}", image.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::tidy::links::{normalized, targets};

    /// Beginnings of paths that only the repository has: sources, and what is for whoever builds it.
    const SOURCES: [&str; 7] =
        ["crates/", "cproxy-ebpf/", "tests/", ".github/", "ARCHITECTURE.md", "CONTRIBUTING.md", "publisher.toml"];

    #[test]
    fn links_of_the_documents_lead_to_files_beside_them() {
        let tree = deployed(&Publisher::default()).unwrap();
        let paths: BTreeSet<_> = tree.entries().map(|(path, _)| path).collect();
        let mut pages = 0;
        for (name, page) in tree.entries().filter(|(path, _)| is_page(path)) {
            pages += 1;
            let text = str::from_utf8(page.content()).unwrap();
            assert!(!text.contains("<!-- publisher:"), "{name}");
            for target in targets(text) {
                let file = target.split('#').next().unwrap_or_default();
                let path = normalized(&Path::new(name).with_file_name(file));
                let path = path.to_str().unwrap();
                let is_there = file.is_empty() || paths.contains(path);
                assert!(is_there || SOURCES.iter().any(|sources| path.starts_with(sources)), "{name}: {target}");
            }
        }
        assert!(pages > 50, "{pages}");
    }

    #[test]
    fn an_extension_has_nothing_outside_usr_and_names_itself() {
        let tree = extension(b"agent".to_vec(), Architecture::X86_64).unwrap();
        let paths: Vec<_> = tree.entries().map(|(path, _)| path).collect();
        assert!(paths.iter().all(|path| path.starts_with("usr")), "{paths:?}");
        for path in ["usr/bin/cproxy", "usr/lib/extension-release.d/extension-release.cproxy"] {
            assert!(paths.contains(&path), "{path}: {paths:?}");
        }
    }
}
