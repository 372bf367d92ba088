//! `cargo xtask image`: the agent with its files in the forms that platforms put into their guests. The same commit
//! gives the same bytes.

pub(crate) mod cpio;
mod fleet;
pub(crate) mod oci;
pub(crate) mod stamp;
pub(crate) mod tar;
pub(crate) mod tree;

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, ValueEnum};
use flate2::{Compression, GzBuilder};
use sha2::{Digest as _, Sha256};

pub(crate) use self::{fleet::fleet_images, stamp::Stamp, tree::Tree};
use crate::{architecture::Architecture, binary, kernels, paths, publisher::Publisher, run, setup};

/// Path of the agent in a guest.
const AGENT: &str = "usr/bin/cproxy";
/// Path of the relay in its image.
const RELAY: &str = "usr/bin/cproxy-relay";
/// Path of busybox in the initramfs.
const BUSYBOX: &str = "bin/busybox";
/// Empty directories on which the initramfs's `init` mounts file systems.
const MOUNT_POINTS: [&str; 5] = ["dev", "etc/cproxy", "proc", "run", "sys"];

/// Form and source of an image.
#[derive(Args)]
pub(crate) struct ImageArguments {
    /// Form of the image
    form: Form,
    /// Uses this agent instead of building one
    #[arg(long, value_name = "FILE")]
    agent: Option<PathBuf>,
    /// Builds the kernel without this option of images/kernel, given without CONFIG_
    #[arg(long, value_name = "OPTION")]
    without: Vec<String>,
    /// Architecture of the guests; default: this machine's
    #[arg(long, value_name = "ARCHITECTURE")]
    target: Option<Architecture>,
    /// Output directory; default: image in cargo's output directory, and in that the architecture, if it is another one
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Form {
    /// rootfs.tar: the agent, its units and settings, to be unpacked over a guest's root file system
    Rootfs,
    /// initramfs.cpio.gz: a guest that runs the agent and one workload
    Initramfs,
    /// oci: an image layout with the agent alone, for registries and `COPY --from`
    Oci,
    /// relay: an image layout with the relay alone
    Relay,
    /// kernel and vmlinux: a guest's kernel as bzImage and as ELF file (for aarch64 only kernel, an Image), built from
    /// Debian's sources with the options of images/kernel
    Kernel,
}

/// Builds an image and prints size, digest and path.
pub(crate) fn run(arguments: &ImageArguments) -> Result<()> {
    let target = arguments.target.map_or_else(Architecture::of_host, Ok)?;
    let out = arguments.out.clone().unwrap_or_else(|| out_for(target));
    fs::create_dir_all(&out).with_context(|| format!("creating {}", out.display()))?;
    let agent = || match &arguments.agent {
        Some(file) => {
            let program = read(file)?;
            ensure!(target.runs(&program), "--agent {}: no program for {}", file.display(), target.name());
            Ok(program)
        }
        None => build(&binary::AGENT, target),
    };
    let stamp = Stamp::find()?;
    let publisher = Publisher::of_repository;
    let written = match arguments.form {
        Form::Rootfs => vec![write(out.join("rootfs.tar"), &tar::archive(&rootfs(agent()?)?, stamp)?)?],
        Form::Initramfs => vec![write_initramfs(&out, target, agent()?)?],
        Form::Oci => vec![oci::write(out.join("oci"), &oci::AGENT_IMAGE, target, agent()?, stamp, &publisher()?)?],
        Form::Relay => {
            let relay = build(&binary::RELAY, target)?;
            vec![oci::write(out.join("relay"), &oci::RELAY_IMAGE, target, relay, stamp, &publisher()?)?]
        }
        Form::Kernel => {
            let built = kernels::built(target, &arguments.without)?;
            let files = [kernels::ELF, kernels::KERNEL].into_iter().filter(|name| built.join(name).exists());
            files.map(|name| write(out.join(name), &read(&built.join(name))?)).collect::<Result<_>>()?
        }
    };
    for Written { path, bytes, digest } in written {
        println!("size: {} ({bytes} bytes)", binary::mebibytes(bytes));
        println!("digest: {digest}");
        println!("{}", path.display());
    }
    Ok(())
}

/// The initramfs with this agent, for tests.
pub(crate) fn initramfs_of(target: Architecture, agent: &Path) -> Result<PathBuf> {
    let out = out_for(target);
    fs::create_dir_all(&out).with_context(|| format!("creating {}", out.display()))?;
    Ok(write_initramfs(&out, target, read(agent)?)?.path)
}

/// An initramfs with this agent, for an architecture.
pub(crate) fn initramfs_bytes(target: Architecture, agent: Vec<u8>) -> Result<Vec<u8>> {
    setup::for_images()?;
    let applets = busybox()?.1;
    gzip(&cpio::archive(&initramfs(agent, busybox_for(target)?, &applets)?, Stamp::find()?)?)
}

/// A static busybox for an architecture.
pub(crate) fn busybox_for(target: Architecture) -> Result<Vec<u8>> {
    if target.is_of_host() { Ok(busybox()?.0) } else { read(&kernels::busybox(target)?) }
}

/// The files over a guest's root file system with this agent, for tests.
pub(crate) fn rootfs_of(agent: &Path) -> Result<PathBuf> {
    let out = default_out();
    fs::create_dir_all(&out).with_context(|| format!("creating {}", out.display()))?;
    Ok(write(out.join("rootfs.tar"), &tar::archive(&rootfs(read(agent)?)?, Stamp::find()?)?)?.path)
}

/// The OCI image with this agent, for tests.
pub(crate) fn oci_of(agent: &Path) -> Result<PathBuf> {
    let out = default_out();
    fs::create_dir_all(&out).with_context(|| format!("creating {}", out.display()))?;
    let (target, publisher) = (Architecture::of_host()?, Publisher::of_repository()?);
    Ok(oci::write(out.join("oci"), &oci::AGENT_IMAGE, target, read(agent)?, Stamp::find()?, &publisher)?.path)
}

/// A program, built for an architecture.
fn build(program: &binary::Program, target: Architecture) -> Result<Vec<u8>> {
    if !target.is_of_host() {
        setup::for_cross(target)?;
    }
    read(&program.build_for(target)?.shipped)
}

fn default_out() -> PathBuf {
    paths::target().join("image")
}

fn out_for(target: Architecture) -> PathBuf {
    if target.is_of_host() { default_out() } else { default_out().join(target.name()) }
}

/// Content of a file.
pub(crate) fn read(file: &Path) -> Result<Vec<u8>> {
    fs::read(file).with_context(|| format!("reading {}", file.display()))
}

fn write_initramfs(out: &Path, target: Architecture, agent: Vec<u8>) -> Result<Written> {
    write(out.join("initramfs.cpio.gz"), &initramfs_bytes(target, agent)?)
}

/// A file or directory that has been written.
pub(crate) struct Written {
    pub(crate) path: PathBuf,
    bytes: u64,
    digest: String,
}

fn write(path: PathBuf, content: &[u8]) -> Result<Written> {
    fs::write(&path, content).with_context(|| format!("writing {}", path.display()))?;
    Ok(Written { path, bytes: content.len() as u64, digest: digest(content) })
}

/// Files over a guest's root file system.
pub(crate) fn rootfs(agent: Vec<u8>) -> Result<Tree> {
    let mut tree = Tree::read(&paths::workspace().join("images/rootfs"))?;
    tree.add_program(AGENT, agent);
    Ok(tree)
}

fn initramfs(agent: Vec<u8>, busybox: Vec<u8>, applets: &str) -> Result<Tree> {
    let init = paths::workspace().join("images/init");
    let mut tree = Tree::default();
    for applet in applets.lines() {
        tree.add_link(applet, format!("/{BUSYBOX}"));
    }
    tree.add_program("init", read(&init)?);
    tree.add_program(AGENT, agent);
    tree.add_program(BUSYBOX, busybox);
    MOUNT_POINTS.iter().for_each(|dir| tree.add_directory(dir));
    Ok(tree)
}

/// This machine's busybox, and a line for the path of each of its applets.
fn busybox() -> Result<(Vec<u8>, String)> {
    let path = paths::program("busybox").context("no busybox in PATH")?;
    let program = read(&path)?;
    if binary::has_interpreter(&program).with_context(|| path.display().to_string())? {
        bail!("{} is not static, and the initramfs has no libraries: install busybox-static", path.display());
    }
    let applets = run::capture(Command::new(&path).arg("--list-full"))?;
    Ok((program, applets))
}

/// Without a name and a time.
pub(crate) fn gzip(content: &[u8]) -> Result<Vec<u8>> {
    let mut encoder = GzBuilder::new().write(Vec::new(), Compression::best());
    encoder.write_all(content).and_then(|()| encoder.finish()).context("compressing")
}

/// As OCI writes it: `sha256:` and hexadecimal digits.
pub(crate) fn digest(content: &[u8]) -> String {
    let hex: String = Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_overlay_and_the_agent_are_in_the_rootfs() {
        let tree = rootfs(b"agent".to_vec()).unwrap();
        let modes: Vec<_> = tree.entries().map(|(path, entry)| (path, entry.mode())).collect();
        assert!(modes.contains(&("usr/share/cproxy/init.d", 0o100_755)), "{modes:?}");
        assert!(modes.contains(&("usr/lib/systemd/system/cproxy.service", 0o100_644)), "{modes:?}");
        assert!(modes.contains(&(AGENT, 0o100_755)) && modes.contains(&("usr", 0o040_755)), "{modes:?}");
    }

    #[test]
    fn digests_are_written_as_oci_does() {
        let expected = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(digest(b"abc"), expected);
    }
}
