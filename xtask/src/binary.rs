//! `cargo xtask build`: the agent and the relay as they are shipped, each one static, stripped file that runs on any
//! distribution.
//!
//! Cargo's own output keeps its symbol table, because `size` reads from it what each dependency costs; the stripped
//! copy is what tests, demo and benchmarks run. It names the file with its symbols, which lies beside it. The
//! same commit and toolchain give the same bytes, in whatever directory they are built.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{self, Command},
};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use object::{
    LittleEndian,
    elf::{FileHeader64, PT_INTERP},
    read::elf::{FileHeader as _, ProgramHeader as _},
};

use crate::{architecture::Architecture, paths, run, setup};

/// Name of the workspace in programs, in place of its directory.
const SOURCES: &str = "/usr/src/cproxy";
/// The same of cargo's output.
const OUTPUT: &str = "/usr/src/cproxy/target";

/// Program that is shipped.
pub(crate) struct Program {
    /// Name of its package and of its file.
    pub(crate) name: &'static str,
    /// Its name in messages.
    title: &'static str,
    /// Cargo's profile.
    profile: &'static str,
    /// Variable with its path, for tests, demo and benchmarks.
    pub(crate) variable: &'static str,
    /// Limit of the shipped file.
    pub(crate) limit_bytes: u64,
    /// Arguments of the compiler for the whole program (docs/decisions/016).
    whole_program: &'static [&'static str],
}

/// The agent.
pub(crate) const AGENT: Program = Program {
    name: "cproxy",
    title: "the agent",
    profile: "release",
    variable: "CPROXY_BIN",
    limit_bytes: 13 << 19,
    // aarch64 has it without being asked.
    whole_program: &["-Cllvm-args=-enable-machine-outliner"],
};

/// The relay. It runs on servers, so that its limit is generous.
pub(crate) const RELAY: Program = Program {
    name: "cproxy-relay",
    title: "the relay",
    profile: "relay",
    variable: "CPROXY_RELAY_BIN",
    limit_bytes: 12 << 20,
    whole_program: &[],
};

/// Files of a program.
#[derive(Clone)]
pub(crate) struct Binary {
    /// The stripped file that is shipped.
    pub(crate) shipped: PathBuf,
    /// The same with its symbol table.
    pub(crate) with_symbols: PathBuf,
    /// Its symbols, for debuggers and profilers.
    pub(crate) debug: PathBuf,
}

/// Options of `build`.
#[derive(Args)]
pub(crate) struct BuildArguments {
    /// Architecture to build for; default: this machine's
    #[arg(long, value_name = "ARCHITECTURE")]
    target: Option<Architecture>,
}

/// Builds both programs and prints their sizes and paths, the agent's path last.
pub(crate) fn run(arguments: &BuildArguments) -> Result<()> {
    let host = Architecture::of_host()?;
    let target = arguments.target.unwrap_or(host);
    if target != host {
        setup::for_cross(target)?;
    }
    let (agent, relay) = (AGENT.build_for(target)?, RELAY.build_for(target)?);
    for (program, binary) in [(AGENT, &agent), (RELAY, &relay)] {
        let bytes = binary.bytes()?;
        println!("size of {}: {} ({bytes} bytes), static", program.title, mebibytes(bytes));
    }
    println!("{}", relay.shipped.display());
    println!("{}", agent.shipped.display());
    Ok(())
}

impl Program {
    /// Sets up the machine, then builds the program for it; fast when nothing has changed.
    pub(crate) fn build(&self) -> Result<Binary> {
        self.build_for(Architecture::of_host()?)
    }

    /// The same for an architecture whose cross compiler is there.
    pub(crate) fn build_for(&self, target: Architecture) -> Result<Binary> {
        setup::beside(self.compile(target).arg("--keep-going"), || ())?;
        run::run(run::to_stderr(&mut self.link(target))?)?;
        self.finish(target)
    }

    /// Builds the program on a machine that is set up, with cargo's output in a log file.
    pub(crate) fn build_logged(&self) -> Result<Binary> {
        let target = Architecture::of_host()?;
        run::run_logged(&mut self.link(target), &format!("building {}", self.title))?;
        self.finish(target)
    }

    /// The files of the program, whether they are built or not.
    pub(crate) fn binary(&self, target: Architecture) -> Binary {
        let with_symbols = paths::target().join(target.triple()).join(self.profile).join(self.name);
        let dist = paths::target().join("dist");
        let shipped = if target.is_of_host() { dist } else { dist.join(target.name()) }.join(self.name);
        let debug = shipped.with_extension("debug");
        Binary { shipped, with_symbols, debug }
    }

    /// Strips what cargo has built, and checks it.
    fn finish(&self, target: Architecture) -> Result<Binary> {
        let binary = self.binary(target);
        let Binary { shipped, with_symbols, debug } = &binary;
        if !is_newer(shipped, with_symbols) || !debug.exists() {
            split(target, with_symbols, shipped, debug)?;
        }
        self.check(shipped, target)?;
        Ok(binary)
    }

    /// Naming the target, although it may be the host, keeps the flags from build scripts and procedural macros, which
    /// cannot be linked statically.
    fn compile(&self, target: Architecture) -> Command {
        let triple = target.triple();
        let mut command = run::cargo();
        if !target.is_of_host() {
            command.env(target.linker_variable(), target.tool("gcc"));
        }
        command
            .args(["rustc", "--profile", self.profile, "--package", self.name, "--bin", self.name, "--target", &triple])
            .args(["--config", &format!("profile.{}.strip='none'", self.profile)])
            .env("CARGO_ENCODED_RUSTFLAGS", flags().join("\u{1f}"))
            .env(format!("CFLAGS_{}", triple.replace('-', "_")), c_flags().join(" "));
        command
    }

    fn link(&self, target: Architecture) -> Command {
        let mut command = self.compile(target);
        command.arg("--").args(link_arguments(target)).args(self.whole_program);
        command
    }

    fn check(&self, binary: &Path, target: Architecture) -> Result<()> {
        let image = fs::read(binary).with_context(|| format!("reading {}", binary.display()))?;
        let interpreter =
            has_interpreter(&image).with_context(|| format!("{} is no 64-bit ELF file", binary.display()))?;
        ensure!(!interpreter, "{} is not static: it asks for a dynamic loader", binary.display());
        if !target.is_of_host() {
            return Ok(());
        }
        // An older C library links packed relocations and then does not apply them.
        let version = run::capture(Command::new(binary).arg("version"));
        version
            .map(drop)
            .with_context(|| format!("{} does not start; does it have glibc 2.36 or newer in it?", self.title))
    }
}

impl Binary {
    /// Size of the shipped file.
    pub(crate) fn bytes(&self) -> Result<u64> {
        Ok(fs::metadata(&self.shipped).with_context(|| format!("reading {}", self.shipped.display()))?.len())
    }
}

/// For all crates: a static file, without this machine's paths in its messages and symbols.
fn flags() -> Vec<String> {
    let remapped = remapped().into_iter().map(|(from, to)| format!("--remap-path-prefix={from}={to}"));
    ["-Ctarget-feature=+crt-static".to_owned()].into_iter().chain(remapped).collect()
}

/// The same for the C and the assembly in dependencies.
fn c_flags() -> Vec<String> {
    remapped().into_iter().map(|(from, to)| format!("-ffile-prefix-map={from}={to}")).collect()
}

/// Directories of this machine and their names in programs; of several that fit, the last one counts.
fn remapped() -> Vec<(String, &'static str)> {
    let sources = paths::cargo_home().and_then(|home| fs::read_dir(home.join("registry/src")).ok());
    let mut sources: Vec<_> = sources.into_iter().flatten().flatten().map(|entry| (entry.path(), "")).collect();
    sources.sort();
    let own = [(paths::workspace(), SOURCES), (paths::target(), OUTPUT)];
    own.into_iter().chain(sources).map(|(from, to)| (from.display().to_string(), to)).collect()
}

/// For the file that is shipped (docs/decisions/016). The linker that Rust brings along cannot leave out what the
/// script names.
fn link_arguments(target: Architecture) -> Vec<String> {
    // Cargo starts the linker in the workspace. An absolute path would be part of the names of all symbols.
    let script = "-Wl,-T,cproxy/without-unwinding.ld";
    let packed = target.packs_relocations().then_some("-Wl,-z,pack-relative-relocs");
    let arguments = ["-fuse-ld=bfd", script].into_iter().chain(packed);
    arguments.map(|argument| format!("-Clink-arg={argument}")).collect()
}

fn is_newer(file: &Path, than: &Path) -> bool {
    let modified = |path: &Path| path.metadata().and_then(|metadata| metadata.modified()).ok();
    modified(file) > modified(than)
}

/// Splits a program into the file that is shipped and its symbols, whose file that names. With line numbers, too, the
/// compiler makes another program, which is 20 KiB longer.
fn split(target: Architecture, from: &Path, shipped: &Path, debug: &Path) -> Result<()> {
    let directory = shipped.parent().context("the shipped binary has no directory")?;
    fs::create_dir_all(directory).with_context(|| format!("creating {}", directory.display()))?;
    let objcopy = || Command::new(target.tool("objcopy"));
    run::run(objcopy().args(["--only-keep-debug", "--compress-debug-sections=zlib"]).arg(from).arg(debug))?;
    let temporary = shipped.with_extension(process::id().to_string());
    run::run(Command::new(target.tool("strip")).arg("--strip-all").arg("-o").arg(&temporary).arg(from))?;
    let mut link = std::ffi::OsString::from("--add-gnu-debuglink=");
    link.push(debug);
    run::run(objcopy().arg(link).arg(&temporary))?;
    fs::rename(&temporary, shipped).with_context(|| format!("writing {}", shipped.display()))
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
