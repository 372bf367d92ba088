//! bpf-linker, which turns rustc's LLVM bitcode into an eBPF object. It must be built against an LLVM that reads that
//! bitcode, so there is one installation for each major version of LLVM.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Result, bail};

use super::{compiler::Compiler, packages};
use crate::{paths, run};

const VERSION: &str = "0.13.0";

/// bpf-linker runs for seconds, and the work is LLVM's: it is compiled fast and not to be fast.
const PROFILE: [(&str, &str); 2] = [("CARGO_PROFILE_RELEASE_OPT_LEVEL", "0"), ("CARGO_PROFILE_RELEASE_DEBUG", "false")];

/// Finds a bpf-linker that works with `compiler`, or builds one.
pub(crate) fn ensure(compiler: &Compiler) -> Result<PathBuf> {
    let root = paths::cache()?.join(format!("bpf-linker-llvm{}", compiler.llvm));
    let ours = root.join("bin/bpf-linker");
    let candidates = [Some(ours.clone()), paths::program("bpf-linker")];
    if let Some(found) = candidates.into_iter().flatten().find(|linker| is_good(compiler, linker)) {
        run::report(format!("bpf-linker: found {}", found.display()));
        return Ok(found);
    }
    install(compiler.llvm, &root)?;
    if !is_good(compiler, &ours) {
        bail!("{} was built but cannot link what {} compiles", ours.display(), compiler.rustc.display());
    }
    Ok(ours)
}

fn is_good(compiler: &Compiler, linker: &Path) -> bool {
    let version = run::capture(Command::new(linker).arg("--version"));
    version.is_ok_and(|text| text.trim().ends_with(VERSION)) && compiler.links_with(linker).is_ok()
}

fn install(llvm: u32, root: &Path) -> Result<()> {
    let prefix = llvm_files(llvm)?;
    run::report(format!("bpf-linker: building {VERSION} against LLVM {llvm}, about half a minute (done once)"));
    let mut command = run::cargo();
    command
        .args(["install", "bpf-linker", "--version", VERSION, "--locked", "--force", "--no-default-features"])
        .args(["--features", &format!("llvm-{llvm}"), "--root"])
        .arg(root)
        .env_remove("CARGO_TARGET_DIR")
        .envs(PROFILE)
        .env("LLVM_PREFIX", &prefix)
        .env(format!("LLVM_SYS_{llvm}1_PREFIX"), &prefix);
    run::run_logged(&mut command, "building bpf-linker")?;
    run::report(format!("bpf-linker: built {}", root.join("bin/bpf-linker").display()));
    Ok(())
}

/// Where LLVM's headers and libraries are; installs them on Debian.
fn llvm_files(llvm: u32) -> Result<String> {
    if packages::is_debian() {
        let llvm_dev = format!("llvm-{llvm}-dev");
        packages::install(&packages::missing(&[&llvm_dev, "zlib1g-dev", "libzstd-dev", "libxml2-dev"]))?;
    }
    match llvm_prefix(llvm) {
        Some(prefix) => Ok(prefix),
        None => bail!("no `llvm-config` of LLVM {llvm} found: install that LLVM's development files"),
    }
}

fn llvm_prefix(llvm: u32) -> Option<String> {
    let places = [
        format!("llvm-config-{llvm}"),
        format!("/usr/lib/llvm-{llvm}/bin/llvm-config"),
        format!("/usr/lib64/llvm{llvm}/bin/llvm-config"),
        "llvm-config".to_owned(),
    ];
    places.iter().find_map(|config| prefix_of(config, llvm))
}

fn prefix_of(config: &str, llvm: u32) -> Option<String> {
    let version = run::capture(Command::new(config).arg("--version")).ok()?;
    if version.split('.').next()? != llvm.to_string() {
        return None;
    }
    let prefix = run::capture(Command::new(config).arg("--prefix")).ok()?;
    Some(prefix.trim().to_owned())
}
