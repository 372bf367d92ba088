//! Older programs for tests of upgrades and of version skew, built from their commits: the last agent of the table
//! layout before the present one, and agent and relay of the last release.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{self, Command},
};

use anyhow::{Context as _, Result};

use crate::{
    paths,
    releases::{BUILDING, remove_others},
    run, setup,
};

/// Variable with the directory of the programs: `layout-6/cproxy`, `0.2.0/cproxy` and `0.2.0/cproxy-relay`.
pub(crate) const VARIABLE: &str = "CPROXY_OLDER_PROGRAMS";

/// Programs of one commit.
struct Older {
    /// Name of their directory.
    name: &'static str,
    commit: &'static str,
    programs: &'static [&'static str],
}

/// Oldest first.
const OLDER: [Older; 2] = [
    // The last commit of the layout that this one can take over (crates/datapath/src/bpf/predecessors.rs).
    Older { name: "layout-6", commit: "a541b848da17430772f68832429f62c4048363ea", programs: &["cproxy"] },
    Older { name: "0.2.0", commit: "45b905810f50a505a8994aff259690528dfee1e6", programs: &["cproxy", "cproxy-relay"] },
];

/// Whether the cache has the programs.
pub(crate) fn is_built() -> bool {
    parent().is_ok_and(|parent| place(&parent).is_dir())
}

fn parent() -> Result<PathBuf> {
    Ok(paths::cache()?.join("older-programs"))
}

/// The directory of these commits' programs.
fn place(parent: &Path) -> PathBuf {
    parent.join(OLDER.map(|older| older.commit.get(..12).unwrap_or(older.commit)).join("-"))
}

/// Builds the programs if the cache has not all of them. Returns the value of [`VARIABLE`].
pub(crate) fn ensure() -> Result<String> {
    let parent = parent()?;
    let directory = place(&parent);
    if !directory.is_dir() {
        setup::for_building()?;
        run::report("older programs: building those of layout 6 and of 0.2.0, 4 minutes on two cores (once)");
        build(&directory)?;
        remove_others(&parent, &directory)?;
    }
    Ok(directory.display().to_string())
}

/// Builds all programs beside their place and moves them there at once, so that an interrupted build never looks like a
/// finished one.
fn build(directory: &Path) -> Result<()> {
    let temporary = directory.with_file_name(format!("{BUILDING}{}", process::id()));
    let programs = temporary.join("programs");
    let built = OLDER.iter().try_for_each(|older| older.build(&temporary, &programs.join(older.name))).and_then(|()| {
        match fs::rename(&programs, directory) {
            Err(_) if directory.is_dir() => Ok(()), // another process was faster
            renamed => renamed.with_context(|| format!("writing {}", directory.display())),
        }
    });
    fs::remove_dir_all(&temporary).ok();
    built
}

impl Older {
    /// Builds in a directory that all commits share, so that their dependencies are compiled once.
    fn build(&self, temporary: &Path, programs: &Path) -> Result<()> {
        let (source, target) = (temporary.join(self.commit), temporary.join("target"));
        let make = |dir: &Path| fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()));
        [&source, &target, programs].into_iter().try_for_each(make)?;
        self.extract(&source)?;
        // The build of the BPF programs has its own output there, whatever cargo's directory is.
        let link = source.join("target");
        symlink(&target, &link).with_context(|| format!("creating {}", link.display()))?;
        let mut cargo = run::cargo();
        cargo.current_dir(&source).env("CARGO_TARGET_DIR", &target);
        // Their size and speed do not matter.
        cargo.args(["build", "--locked", "--config", "profile.dev.debug=0"]);
        for program in self.programs {
            cargo.args(["--package", program, "--bin", program]);
        }
        for variable in ["RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS"] {
            cargo.env_remove(variable);
        }
        run::run_logged(&mut cargo, &format!("building the programs of {}", self.name))?;
        for program in self.programs {
            let built: PathBuf = target.join("debug").join(program);
            fs::copy(&built, programs.join(program)).with_context(|| format!("copying {}", built.display()))?;
        }
        Ok(())
    }

    fn extract(&self, source: &Path) -> Result<()> {
        let (commit, archive) = (self.commit, source.join("source.tar"));
        let mut git = Command::new("git");
        git.arg("-C").arg(paths::workspace()).args(["archive", "--output"]).arg(&archive).arg(commit);
        run::run(&mut git)
            .with_context(|| format!("reading commit {commit}: the repository needs its whole history"))?;
        run::run(Command::new("tar").arg("--extract").arg("--file").arg(&archive).arg("--directory").arg(source))
    }
}
