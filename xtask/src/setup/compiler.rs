//! Compiler of the eBPF programs, and what it must have.

use std::{
    fs,
    ops::RangeInclusive,
    path::{Path, PathBuf},
    process::{self, Command},
};

use anyhow::{Context as _, Result, bail};

use crate::{paths, run};

/// Major versions of LLVM that bpf-linker can be built against.
const LLVM_MAJORS: RangeInclusive<u32> = 21..=23;

/// A compiler that can build `core` for the BPF target.
pub(crate) struct Compiler {
    /// The cargo to run with it.
    pub(crate) cargo: PathBuf,
    /// The compiler itself.
    pub(crate) rustc: PathBuf,
    /// Major version of its LLVM.
    pub(crate) llvm: u32,
    /// Whether it takes unstable options only when told that it bootstraps itself, as a stable one does.
    pub(crate) bootstrap: bool,
    /// Description for messages.
    pub(crate) name: String,
}

impl Compiler {
    /// A compiler that was examined; the error says what it lacks.
    pub(crate) fn examine(cargo: PathBuf, rustc: PathBuf, bootstrap: bool) -> Result<Self> {
        if !cargo.is_file() {
            bail!("{} does not exist", cargo.display());
        }
        let verbose = run::capture(Command::new(&rustc).arg("-vV"))?;
        let llvm = llvm_major(&verbose).with_context(|| format!("{} names no LLVM version", rustc.display()))?;
        if !LLVM_MAJORS.contains(&llvm) {
            bail!("its LLVM is {llvm}, and bpf-linker takes {:?}", LLVM_MAJORS);
        }
        let sysroot = run::capture(Command::new(&rustc).args(["--print", "sysroot"]))?;
        if !Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library/core").is_dir() {
            bail!("it lacks rust-src, the standard library's sources");
        }
        let name = format!("{} with rust-src, {}", verbose.lines().next().unwrap_or("rustc"), rustc.display());
        Ok(Self { cargo, rustc, llvm, bootstrap, name })
    }

    /// Checks that `linker` reads this compiler's bitcode, by linking a program with nothing in it, not even `core`.
    pub(crate) fn links_with(&self, linker: &Path) -> Result<()> {
        let directory = paths::cache()?.join(format!("check-{}", process::id()));
        fs::create_dir_all(&directory).with_context(|| format!("creating {}", directory.display()))?;
        let linked = self.link_nothing(linker, &directory);
        fs::remove_dir_all(&directory).with_context(|| format!("removing {}", directory.display()))?;
        linked
    }

    fn link_nothing(&self, linker: &Path, directory: &Path) -> Result<()> {
        let source = directory.join("nothing.rs");
        fs::write(&source, "#![feature(no_core)]\n#![no_core]\n").context("writing the check's source")?;
        let mut command = Command::new(&self.rustc);
        command.args(["--target", "bpfel-unknown-none", "--crate-type", "cdylib", "-Cpanic=abort", "-o"]);
        command.arg(directory.join("nothing.o")).arg(source);
        command.arg(format!("-Clinker={}", linker.display()));
        if self.bootstrap {
            command.env("RUSTC_BOOTSTRAP", "1");
        }
        run::capture(&mut command).map(drop)
    }

    pub(crate) fn render(&self, linker: &Path) -> String {
        format!(
            "cargo={}\nrustc={}\nlinker={}\nbootstrap={}\n",
            self.cargo.display(),
            self.rustc.display(),
            linker.display(),
            u8::from(self.bootstrap),
        )
    }
}

fn llvm_major(verbose_version: &str) -> Option<u32> {
    let version = verbose_version.lines().find_map(|line| line.strip_prefix("LLVM version: "))?;
    version.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_llvm_version_comes_from_rustc() {
        assert_eq!(llvm_major("rustc 1.97.0\nhost: x\nLLVM version: 22.1.4\n"), Some(22));
        assert_eq!(llvm_major("rustc 1.97.0\n"), None);
    }
}
