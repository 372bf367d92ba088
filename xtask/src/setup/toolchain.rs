//! The Rust toolchain for the eBPF programs. No toolchain ships a `core` for the BPF target, so one is needed that has
//! the standard library's sources: rustup's nightly with `rust-src`, or Debian's rustc with its source package. What
//! was found is written to a file that the agent's build script reads.

use std::{
    fs, io,
    path::Path,
    process::{self, Command},
};

use anyhow::{Context as _, Result, bail};

use super::{compiler::Compiler, linker, packages};
use crate::{paths, run};

const DEBIAN_RUSTC: &str = "/usr/bin/rustc";

/// The nightly that is installed. Debian has the development files of its LLVM, 22, and not of what later ones have.
const NIGHTLY: &str = "nightly-2026-05-20";

/// A way to get a compiler, in words and as the function that tries it.
type Route = (&'static str, fn() -> Result<Compiler>);

/// The ways, in order: first what is there, then what can be installed. rustup's download comes before Debian's
/// packages, since it is the ordinary way; where only package mirrors are reached it fails at once.
const ROUTES: [Route; 5] = [
    ("rustup's nightly", rustup_nightly),
    ("Debian's rustc", debian),
    ("rustup's nightly with rust-src added", rustup_complete),
    ("rustup's nightly of a fixed day, to be installed", rustup_install),
    ("Debian's rustc, to be installed", debian_install),
];

/// Makes sure that the toolchain is there and recorded, and that what was built without it is built again.
pub(crate) fn ensure() -> Result<()> {
    find_or_install()?;
    match fs::remove_file(paths::missing_toolchain_file()) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", paths::missing_toolchain_file().display()))
        }
        _ => Ok(()),
    }
}

fn find_or_install() -> Result<()> {
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
    bail!(
        "no toolchain for eBPF programs: run either `rustup toolchain install {NIGHTLY} --component rust-src` (with \
         the development files of LLVM 22), or as root on Debian, with its security updates, `apt-get install \
         rustc-web rust-web-src llvm-22-dev zlib1g-dev libzstd-dev libxml2-dev`, then this again"
    )
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

/// Adds the standard library's sources to a nightly without a day.
fn rustup_complete() -> Result<Compiler> {
    if !nightlies()?.iter().any(|name| name.starts_with("nightly-") && !name.contains("-20")) {
        bail!("rustup has none here");
    }
    run::report("eBPF toolchain: asking rustup for rust-src");
    run::capture(Command::new("rustup").args(["component", "add", "rust-src", "--toolchain", "nightly"]))?;
    rustup_compiler("nightly")
}

fn rustup_install() -> Result<Compiler> {
    run::report(format!("eBPF toolchain: asking rustup for {NIGHTLY}, about a minute"));
    let mut command = Command::new("rustup");
    run::capture(command.args(["toolchain", "install", NIGHTLY, "--profile", "minimal", "--component", "rust-src"]))?;
    rustup_compiler(NIGHTLY)
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
