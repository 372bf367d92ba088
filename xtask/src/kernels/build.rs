//! A guest's kernel, built from Debian's sources: the kernel's smallest configuration with the options that a microVM
//! and cproxy need.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
};

use anyhow::{Context as _, Result, bail};

use super::{CONFIG, ELF, KERNEL, build_cached, cached, existing, hash, packages};
use crate::{paths, run, setup};

/// Sources of the long-term kernel that is the oldest one with everything in it that cproxy uses.
const SOURCE: &str = "linux-source-6.1";
/// Options, as files to merge, in this order.
const FRAGMENTS: [&str; 2] = ["images/kernel/guest.config", "images/kernel/cproxy.config"];

/// Builds the kernel, without some of the options that the fragments ask for.
pub(crate) fn built(without: &[String]) -> Result<PathBuf> {
    let fragments = FRAGMENTS.map(|path| paths::workspace().join(path));
    let texts = fragments.iter().map(|path| fs::read_to_string(path).with_context(|| path.display().to_string()));
    let wanted = texts.collect::<Result<Vec<_>>>()?.concat();
    if let Some(unknown) = without.iter().find(|option| !is_asked_for(&wanted, option)) {
        bail!("--without {unknown}: images/kernel asks for no CONFIG_{unknown}");
    }
    setup::for_kernels()?;
    let version = packages::version(SOURCE)?;
    cached(&format!("{SOURCE}_{version}-{}", key(&wanted, without)), |directory| {
        let unpacked = unpacked(&version)?;
        let source = unpacked.join(SOURCE);
        // Kept: the next one, of nearly the same options, compiles only what they change.
        let out = unpacked.join("build");
        configure(&source, &out, &fragments, without)?;
        check(&out, &wanted, without)?;
        run::report(format!("kernels: building Linux {version}, 10 minutes on two cores (once)"));
        let jobs = thread::available_parallelism().map_or(1, usize::from);
        run::run_logged(make(&source, &out).arg(format!("-j{jobs}")).arg("bzImage"), "building a guest kernel")?;
        for (from, to) in [("arch/x86/boot/bzImage", KERNEL), (".config", CONFIG)] {
            fs::copy(out.join(from), directory.join(to)).with_context(|| format!("copying {from}"))?;
        }
        // Without symbols. The note that names the entry point for machines without firmware is loaded, and stays.
        run::run(Command::new("objcopy").arg("--strip-all").args([out.join("vmlinux"), directory.join(ELF)]))
    })
}

/// A directory with the sources in it; under the lock of the kernel that is built of them.
fn unpacked(version: &str) -> Result<PathBuf> {
    let name = format!("{SOURCE}_{version}");
    if let Some(directory) = existing(&name)? {
        return Ok(directory);
    }
    build_cached(&name, |directory| {
        run::report(format!("kernels: downloading {SOURCE} {version} from Debian"));
        let root = directory.join("root");
        packages::unpack(SOURCE, &root)?;
        let archive = packages::find(&root.join("usr/src"), SOURCE)?;
        run::run_logged(Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(directory), "unpacking sources")?;
        fs::remove_dir_all(&root).with_context(|| format!("removing {}", root.display()))
    })
}

/// Builds the same bytes from the same sources: without user, host and time of the build.
fn make(source: &Path, out: &Path) -> Command {
    let mut command = Command::new("make");
    command.arg("-C").arg(source).arg(format!("O={}", out.display()));
    command.env("KBUILD_BUILD_USER", "cproxy").env("KBUILD_BUILD_HOST", "cproxy").env("KBUILD_BUILD_TIMESTAMP", "@0");
    command
}

fn configure(source: &Path, out: &Path, fragments: &[PathBuf], without: &[String]) -> Result<()> {
    fs::create_dir_all(out).with_context(|| format!("creating {}", out.display()))?;
    run::run_logged(make(source, out).arg("tinyconfig"), "configuring a guest kernel")?;
    let config = out.join(".config");
    let mut merge = Command::new(source.join("scripts/kconfig/merge_config.sh"));
    merge.current_dir(source).args(["-m", "-O"]).arg(out).arg(&config).args(fragments);
    run::run_logged(&mut merge, "merging the options of a guest kernel")?;
    for option in without {
        run::run(Command::new(source.join("scripts/config")).arg("--file").arg(&config).args(["--disable", option]))?;
    }
    run::run_logged(make(source, out).arg("olddefconfig"), "completing the options of a guest kernel")
}

/// Fails if an option is missing: one whose dependency is not set vanishes silently.
fn check(out: &Path, wanted: &str, without: &[String]) -> Result<()> {
    let config = fs::read_to_string(out.join(".config")).context("reading the new kernel's options")?;
    let is_set = |line: &str| config.lines().any(|set| set == line);
    let missing = wanted.lines().find(|line| line.starts_with("CONFIG_") && !is_set(line));
    // What depends on one that is left out goes with it.
    if let (Some(line), []) = (missing, without) {
        bail!("the kernel ignores {line}");
    }
    if let Some(option) = without.iter().find(|option| is_set(&format!("CONFIG_{option}=y"))) {
        bail!("--without {option}: another option selects it");
    }
    Ok(())
}

fn is_asked_for(fragments: &str, option: &str) -> bool {
    fragments.lines().any(|line| line == format!("CONFIG_{option}=y"))
}

/// Hash of the options, which distinguishes kernels; comments do not count.
fn key(wanted: &str, without: &[String]) -> String {
    let options: Vec<_> = wanted.lines().filter(|line| line.starts_with("CONFIG_")).collect();
    hash(&format!("{}\n{}", options.join("\n"), without.join(" ")))
}
