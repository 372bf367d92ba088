//! Images of a release: for container runtimes, for guests, and for systems that are themselves an image.

use std::{
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};

use super::{Build, Release, version};
use crate::{
    architecture::Architecture,
    image::{self, Tree, gzip, oci, read, tar},
    paths, run, setup,
};

/// Directory of the overlay that a system extension has, too.
const UNITS: &str = "usr/lib/systemd/system";

/// Files and directories of `images` that guides name: the first process, hooks, options of kernels, manifests.
const DEPLOYED: [&str; 7] = ["init", "kata", "kernel", "kubernetes", "monitoring", "peer-pods", "relay"];

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

/// Adds an archive of the files below `images` that guides name, at the same paths.
fn add_deployed(release: &Release) -> Result<()> {
    let images = paths::workspace().join("images");
    let mut tree = Tree::default();
    for name in DEPLOYED {
        let (from, to) = (images.join(name), format!("images/{name}"));
        if from.is_dir() {
            tree.add_tree(&to, Tree::read(&from)?);
        } else {
            tree.add_program(&to, read(&from)?);
        }
    }
    release.add(&deploy_name(version()), &gzip(&tar::archive(&tree, release.stamp)?)?)
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
    use super::*;

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
