//! `cargo xtask build`: the agent as it is shipped, one static, stripped file that runs on any distribution.
//!
//! Cargo's own output keeps its symbol table, because `size` reads from it what each dependency costs; the stripped
//! copy is what tests, demo and benchmarks run.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{self, Command},
};

use anyhow::{Context as _, Result, ensure};
use object::{
    LittleEndian,
    elf::{FileHeader64, PT_INTERP},
    read::elf::{FileHeader as _, ProgramHeader as _},
};

use crate::{paths, run, setup};

/// Variable with the agent's path, for tests, demo and benchmarks.
pub(crate) const VARIABLE: &str = "CPROXY_BIN";

/// The agent's files.
pub(crate) struct Agent {
    /// The stripped binary that is shipped.
    pub(crate) shipped: PathBuf,
    /// The same with its symbol table.
    pub(crate) with_symbols: PathBuf,
}

/// Builds the agent and prints its size and its path.
pub(crate) fn run() -> Result<()> {
    let agent = build()?;
    let bytes = fs::metadata(&agent.shipped).with_context(|| format!("reading {}", agent.shipped.display()))?.len();
    println!("size: {} ({bytes} bytes), static", mebibytes(bytes));
    println!("{}", agent.shipped.display());
    Ok(())
}

/// Sets up the machine, then builds the agent; fast when nothing has changed.
pub(crate) fn build() -> Result<Agent> {
    let triple = host_triple()?;
    setup::beside(compile(&triple).arg("--keep-going"), || ())?;
    run::run(run::to_stderr(&mut link(&triple))?)?;
    finish(&triple)
}

/// Builds the agent on a machine that is set up, with cargo's output in a log file.
pub(crate) fn build_logged() -> Result<Agent> {
    let triple = host_triple()?;
    run::run_logged(&mut link(&triple), "building the agent")?;
    finish(&triple)
}

/// Strips what cargo has built, and checks it.
fn finish(triple: &str) -> Result<Agent> {
    let with_symbols = paths::target().join(triple).join("release/cproxy");
    let shipped = shipped();
    if !is_newer(&shipped, &with_symbols) {
        strip(&with_symbols, &shipped)?;
    }
    check(&shipped)?;
    Ok(Agent { shipped, with_symbols })
}

/// Path of the shipped binary.
fn shipped() -> PathBuf {
    paths::target().join("dist/cproxy")
}

/// The platform on which and for which everything is built.
pub(crate) fn host_triple() -> Result<String> {
    let verbose = run::capture(run::cargo().arg("-vV"))?;
    let host = verbose.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("`cargo -vV` names no host")?.to_owned())
}

/// Naming the target, although it is the host, keeps the flags from build scripts and procedural macros, which cannot
/// be linked statically.
fn compile(triple: &str) -> Command {
    let mut command = run::cargo();
    command
        .args(["rustc", "--release", "--package", "cproxy", "--bin", "cproxy", "--target", triple])
        .args(["--config", "profile.release.strip='none'"])
        .env("CARGO_ENCODED_RUSTFLAGS", flags().join("\u{1f}"));
    command
}

fn link(triple: &str) -> Command {
    let mut command = compile(triple);
    command.arg("--").args(link_arguments());
    command
}

/// For all crates: a static file, without this machine's paths in its messages.
fn flags() -> Vec<String> {
    let mut flags = vec!["-Ctarget-feature=+crt-static".to_owned()];
    let sources = paths::cargo_home().and_then(|home| fs::read_dir(home.join("registry/src")).ok());
    let mut sources: Vec<_> = sources.into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    sources.sort();
    flags.extend(sources.iter().map(|path| format!("--remap-path-prefix={}=", path.display())));
    flags
}

/// For the one file that is shipped (docs/decisions/016). The linker that Rust brings along cannot leave out what the
/// script names.
fn link_arguments() -> [String; 3] {
    let script = paths::workspace().join("cproxy/without-unwinding.ld");
    let arguments = ["-fuse-ld=bfd", "-Wl,-z,pack-relative-relocs", &format!("-Wl,-T,{}", script.display())];
    arguments.map(|argument| format!("-Clink-arg={argument}"))
}

fn is_newer(file: &Path, than: &Path) -> bool {
    let modified = |path: &Path| path.metadata().and_then(|metadata| metadata.modified()).ok();
    modified(file) > modified(than)
}

fn strip(from: &Path, to: &Path) -> Result<()> {
    let directory = to.parent().context("the shipped binary has no directory")?;
    fs::create_dir_all(directory).with_context(|| format!("creating {}", directory.display()))?;
    let temporary = to.with_extension(process::id().to_string());
    run::run(Command::new("strip").arg("--strip-all").arg("-o").arg(&temporary).arg(from))?;
    fs::rename(&temporary, to).with_context(|| format!("writing {}", to.display()))
}

fn check(binary: &Path) -> Result<()> {
    let image = fs::read(binary).with_context(|| format!("reading {}", binary.display()))?;
    let interpreter = has_interpreter(&image).with_context(|| format!("{} is no 64-bit ELF file", binary.display()))?;
    ensure!(!interpreter, "{} is not static: it asks for a dynamic loader", binary.display());
    // An older C library links packed relocations and then does not apply them.
    let version = run::capture(Command::new(binary).arg("version"));
    version.map(drop).context("the agent does not start; does it have glibc 2.36 or newer in it?")
}

/// A size in MiB.
pub(crate) fn mebibytes(bytes: u64) -> String {
    let hundredths = (bytes * 100) >> 20;
    format!("{}.{:02} MiB", hundredths / 100, hundredths % 100)
}

/// Whether a little-endian 64-bit ELF file has a program header that names a dynamic loader.
pub(crate) fn has_interpreter(image: &[u8]) -> object::Result<bool> {
    let headers = FileHeader64::<LittleEndian>::parse(image)?.program_headers(LittleEndian, image)?;
    Ok(headers.iter().any(|header| header.p_type(LittleEndian) == PT_INTERP))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An ELF file of nothing but program headers of these types.
    fn elf(types: &[u32]) -> Vec<u8> {
        let mut image = vec![0; 64];
        image[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        image[32] = 64;
        image[54] = 56;
        image[56] = types.len() as u8;
        for kind in types {
            image.extend(kind.to_le_bytes());
            image.extend([0; 52]);
        }
        image
    }

    #[test]
    fn a_loader_is_found_wherever_it_is_named() {
        assert!(has_interpreter(&elf(&[6, 3, 1])).unwrap());
        assert!(has_interpreter(&elf(&[1, 3])).unwrap());
    }

    #[test]
    fn a_file_without_a_loader_is_static() {
        assert!(!has_interpreter(&elf(&[1, 2, 6])).unwrap());
        assert!(!has_interpreter(&elf(&[])).unwrap());
    }

    #[test]
    fn other_files_and_truncated_ones_are_errors() {
        assert!(has_interpreter(b"#!/bin/sh").is_err());
        assert!(has_interpreter(&elf(&[1, 1])[..80]).is_err());
        let mut far = elf(&[1]);
        far[32..40].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(has_interpreter(&far).is_err());
    }

    #[test]
    fn sizes_are_rounded_down() {
        assert_eq!(mebibytes(10 << 20), "10.00 MiB");
        assert_eq!(mebibytes((10 << 20) - 1), "9.99 MiB");
    }
}
