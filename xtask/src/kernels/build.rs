//! A guest's kernel, built from Debian's sources: the kernel's smallest configuration with the options that a microVM
//! and cproxy need.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
};

use anyhow::{Context as _, Result, bail};

use super::{ARCHITECTURE, CONFIG, ELF, KERNEL, build_cached, cached, existing, hash, packages};
use crate::{architecture::Architecture, paths, run, setup};

/// Sources of the long-term kernel that is the oldest one with everything in it that cproxy uses.
const SOURCE: &str = "linux-source-6.1";
/// Builds the kernel for an architecture, without some of the options that the fragments ask for.
pub(crate) fn built(target: Architecture, without: &[String]) -> Result<PathBuf> {
    let fragments = ["guest", &format!("guest-{}", target.name()), "cproxy"]
        .map(|name| paths::workspace().join("images/kernel").join(name).with_extension("config"));
    let texts = fragments.iter().map(|path| fs::read_to_string(path).with_context(|| path.display().to_string()));
    let wanted = texts.collect::<Result<Vec<_>>>()?.concat();
    if let Some(unknown) = without.iter().find(|option| !is_asked_for(&wanted, option)) {
        bail!("--without {unknown}: images/kernel asks for no CONFIG_{unknown}");
    }
    setup::for_kernels(target)?;
    let version = packages::version(SOURCE)?;
    cached(&format!("{SOURCE}_{version}-{}-{}", target.name(), key(&wanted, without)), |directory| {
        let unpacked = unpacked(&version)?;
        // Kept: the next one, of nearly the same options, compiles only what they change.
        let tree =
            Tree { target, source: unpacked.join(SOURCE), out: unpacked.join(format!("build-{}", target.name())) };
        tree.configure(&fragments, without)?;
        let out = &tree.out;
        check(out, &wanted, without)?;
        let name = target.name();
        run::report(format!("kernels: building Linux {version} for {name}, 10 minutes on two cores (once)"));
        let jobs = thread::available_parallelism().map_or(1, usize::from);
        let image = target.kernel_image();
        run::run_logged(tree.make().arg(format!("-j{jobs}")).arg(image), "building a guest kernel")?;
        for (from, to) in [(format!("arch/{}/boot/{image}", tree.arch()), KERNEL), (".config".to_owned(), CONFIG)] {
            fs::copy(out.join(&from), directory.join(to)).with_context(|| format!("copying {from}"))?;
        }
        if !target.is_of_host() {
            let file = directory.join(ARCHITECTURE);
            fs::write(&file, name).with_context(|| format!("writing {}", file.display()))?;
        }
        if target != Architecture::X86_64 {
            // Hypervisors start the image itself.
            return Ok(());
        }
        // Without symbols. The note that names the entry point for machines without firmware is loaded, and stays.
        let mut strip = Command::new(target.tool("objcopy"));
        run::run(strip.arg("--strip-all").args([out.join("vmlinux"), directory.join(ELF)]))
    })
}

/// Sources, and the directory of an architecture's object files.
struct Tree {
    target: Architecture,
    source: PathBuf,
    out: PathBuf,
}

impl Tree {
    /// Name of the architecture's directory in the sources.
    fn arch(&self) -> &'static str {
        match self.target {
            Architecture::X86_64 => "x86",
            Architecture::Aarch64 => "arm64",
        }
    }

    /// Builds the same bytes from the same sources: without user, host and time of the build.
    fn make(&self) -> Command {
        let mut command = Command::new("make");
        command.arg("-C").arg(&self.source).arg(format!("O={}", self.out.display()));
        command.arg(format!("ARCH={}", self.arch())).arg(format!("CROSS_COMPILE={}", self.target.tool("")));
        command.env("KBUILD_BUILD_USER", "cproxy").env("KBUILD_BUILD_HOST", "cproxy");
        command.env("KBUILD_BUILD_TIMESTAMP", "@0");
        command
    }

    fn configure(&self, fragments: &[PathBuf], without: &[String]) -> Result<()> {
        let Self { source, out, .. } = self;
        fs::create_dir_all(out).with_context(|| format!("creating {}", out.display()))?;
        run::run_logged(self.make().arg("tinyconfig"), "configuring a guest kernel")?;
        let config = out.join(".config");
        let mut merge = Command::new(source.join("scripts/kconfig/merge_config.sh"));
        merge.current_dir(source).args(["-m", "-O"]).arg(out).arg(&config).args(fragments);
        run::run_logged(&mut merge, "merging the options of a guest kernel")?;
        for option in without {
            let mut disable = Command::new(source.join("scripts/config"));
            run::run(disable.arg("--file").arg(&config).args(["--disable", option]))?;
        }
        run::run_logged(self.make().arg("olddefconfig"), "completing the options of a guest kernel")
    }
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
