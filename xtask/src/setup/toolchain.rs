//! The Rust toolchain for the eBPF programs. No toolchain ships a `core` for the BPF target, so one is needed that has
//! the standard library's sources: rustup's nightly with `rust-src`, or Debian's rustc with its source package. What
//! was found is written to a file that the agent's build script reads.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{self, Command},
};

use anyhow::{Context as _, Result, bail};

use super::{linker, packages};
use crate::{paths, run};

const DEBIAN_RUSTC: &str = "/usr/bin/rustc";

const ADVICE: &str = "no toolchain for eBPF programs: run either `rustup toolchain install nightly --component \
    rust-src` (with the development files of that nightly's LLVM), or as root on Debian \
    `apt-get install rustc-web rust-web-src llvm-22-dev zlib1g-dev libzstd-dev libxml2-dev`, then this again";

/// A compiler that can build `core` for the BPF target.
pub(crate) struct Compiler {
    /// The cargo to run with it.
    pub(crate) cargo: PathBuf,
    /// The compiler itself.
    pub(crate) rustc: PathBuf,
    /// Its LLVM's major version.
    pub(crate) llvm: u32,
    /// Whether it takes unstable options only when told that it bootstraps itself, as a stable one does.
    bootstrap: bool,
    /// Description for messages.
    name: String,
}

/// A way to get a compiler, in words and as the function that tries it.
type Route = (&'static str, fn() -> Result<Compiler>);

/// The ways, in order: first what is there, then what can be installed. rustup's download comes before Debian's
/// packages, since it is the ordinary way; where only package mirrors are reached it fails at once.
const ROUTES: [Route; 4] = [
    ("rustup's nightly", rustup_nightly),
    ("Debian's rustc", debian),
    ("rustup's nightly with rust-src added", rustup_install),
    ("Debian's rustc, to be installed", debian_install),
];

/// Makes sure that the toolchain is there and recorded.
pub(crate) fn ensure() -> Result<()> {
    let file = paths::toolchain_file()?;
    if let Some(name) = recorded(&file) {
        run::report(format!("eBPF toolchain: found {name} (recorded in {})", file.display()));
        return Ok(());
    }
    for (route, find) in ROUTES {
        match find().and_then(|compiler| record(&file, &compiler)) {
            Ok(()) => return Ok(()),
            Err(error) => run::report(format!("eBPF toolchain: not {route}: {error:#}")),
        }
    }
    bail!(ADVICE)
}

/// Whether an earlier setup recorded a toolchain that still works.
pub(crate) fn is_recorded() -> bool {
    paths::toolchain_file().is_ok_and(|file| recorded(&file).is_some())
}

/// Says what an earlier setup recorded, if all of it still works.
fn recorded(file: &Path) -> Option<String> {
    let text = fs::read_to_string(file).ok()?;
    let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    let bootstrap = value("bootstrap")? == "1";
    let compiler = Compiler::examine(value("cargo")?.into(), value("rustc")?.into(), bootstrap).ok()?;
    let linker = Path::new(value("linker")?);
    compiler.links_with(linker).ok()?;
    Some(format!("{} with {}", compiler.name, linker.display()))
}

fn record(file: &Path, compiler: &Compiler) -> Result<()> {
    let linker = linker::ensure(compiler)?;
    fs::create_dir_all(paths::cache()?).context("creating the cache directory")?;
    let temporary = file.with_extension(process::id().to_string());
    fs::write(&temporary, compiler.render(&linker)).with_context(|| format!("writing {}", temporary.display()))?;
    fs::rename(&temporary, file).with_context(|| format!("writing {}", file.display()))?;
    run::report(format!("eBPF toolchain: took {} (recorded in {})", compiler.name, file.display()));
    Ok(())
}

fn rustup_nightly() -> Result<Compiler> {
    let mut reason = anyhow::anyhow!("rustup has none here");
    for toolchain in nightlies()? {
        match rustup_compiler(&toolchain) {
            Ok(compiler) => return Ok(compiler),
            Err(error) => reason = error.context(toolchain),
        }
    }
    Err(reason)
}

/// The nightly toolchains of rustup; none where rustup itself is missing.
fn nightlies() -> Result<Vec<String>> {
    if paths::program("rustup").is_none() {
        bail!("no rustup here");
    }
    let list = run::capture(Command::new("rustup").args(["toolchain", "list"]))?;
    let names = list.lines().filter_map(|line| line.split_whitespace().next());
    Ok(names.filter(|name| name.starts_with("nightly")).map(str::to_owned).collect())
}

fn rustup_compiler(toolchain: &str) -> Result<Compiler> {
    let which = |program| run::capture(Command::new("rustup").args(["which", program, "--toolchain", toolchain]));
    Compiler::examine(which("cargo")?.trim().into(), which("rustc")?.trim().into(), false)
}

fn rustup_install() -> Result<Compiler> {
    let mut command = Command::new("rustup");
    if nightlies()?.iter().any(|name| name.starts_with("nightly-") && !name.contains("-20")) {
        command.args(["component", "add", "rust-src", "--toolchain", "nightly"]);
    } else {
        command.args(["toolchain", "install", "nightly", "--profile", "minimal", "--component", "rust-src"]);
    }
    run::report("eBPF toolchain: asking rustup for rust-src");
    run::capture(&mut command)?;
    rustup_nightly()
}

fn debian() -> Result<Compiler> {
    if !Path::new(DEBIAN_RUSTC).exists() {
        bail!("{DEBIAN_RUSTC} does not exist");
    }
    let cargo = paths::program(&run::cargo_program().to_string_lossy()).context("no cargo in PATH")?;
    Compiler::examine(cargo, DEBIAN_RUSTC.into(), true)
}

fn debian_install() -> Result<Compiler> {
    if !packages::is_debian() {
        bail!("this is not Debian");
    }
    packages::install(&packages::missing(&["rustc-web", "rust-web-src"]))?;
    debian()
}

impl Compiler {
    /// Looks at a compiler and says why it is of no use, if it is of none.
    fn examine(cargo: PathBuf, rustc: PathBuf, bootstrap: bool) -> Result<Self> {
        if !cargo.is_file() {
            bail!("{} does not exist", cargo.display());
        }
        let verbose = run::capture(Command::new(&rustc).arg("-vV"))?;
        let llvm = llvm_major(&verbose).with_context(|| format!("{} names no LLVM version", rustc.display()))?;
        if !linker::LLVM_MAJORS.contains(&llvm) {
            bail!("its LLVM is {llvm}, and bpf-linker takes {:?}", linker::LLVM_MAJORS);
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

    fn render(&self, linker: &Path) -> String {
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
