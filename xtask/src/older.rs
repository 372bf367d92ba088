//! Agents of older table layouts, built from the commits that had them, for tests of upgrades.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{self, Command},
};

use anyhow::{Context as _, Result};

use crate::{paths, run, setup};

/// Variable with the agents: `LAYOUT=PATH`, separated by commas.
pub(crate) const VARIABLE: &str = "CPROXY_OLDER_AGENTS";

/// Last commit of each layout that this one can take over (crates/datapath/src/bpf/handover.rs).
const COMMITS: [(u32, &str); 2] =
    [(5, "f6577314287a4e9a8af2b4920a93b87222b9edd0"), (6, "a541b848da17430772f68832429f62c4048363ea")];

/// Builds what is missing in the cache. Returns the value of [`VARIABLE`].
pub(crate) fn ensure() -> Result<String> {
    let cache = paths::cache()?.join("older-agents");
    let mut agents = Vec::new();
    for (layout, commit) in COMMITS {
        let agent = cache.join(commit).join("cproxy");
        if !agent.exists() {
            run::report(format!("older agents: building that of layout {layout}, 2 minutes on two cores (once)"));
            build(commit, &agent)?;
        }
        agents.push(format!("{layout}={}", agent.display()));
    }
    Ok(agents.join(","))
}

/// Builds an agent beside its place and moves it there, so that an interrupted build never looks like a finished one.
fn build(commit: &str, agent: &Path) -> Result<()> {
    setup::for_building()?;
    let place = agent.parent().context("an agent without a directory")?;
    let temporary = place.with_file_name(format!("building-{}", process::id()));
    let built = build_in(commit, &temporary).and_then(|built| {
        fs::create_dir_all(place).with_context(|| format!("creating {}", place.display()))?;
        fs::rename(&built, agent).with_context(|| format!("writing {}", agent.display()))
    });
    fs::remove_dir_all(&temporary).ok();
    built
}

fn build_in(commit: &str, directory: &Path) -> Result<PathBuf> {
    fs::create_dir_all(directory).with_context(|| format!("creating {}", directory.display()))?;
    let archive = directory.join("source.tar");
    let mut git = Command::new("git");
    git.arg("-C").arg(paths::workspace()).args(["archive", "--output"]).arg(&archive).arg(commit);
    run::run(&mut git).with_context(|| format!("reading commit {commit}: the repository needs its whole history"))?;
    run::run(Command::new("tar").arg("--extract").arg("--file").arg(&archive).arg("--directory").arg(directory))?;
    let target = directory.join("target");
    let mut cargo = run::cargo();
    // It makes a table, whatever its size and speed.
    cargo.args(["build", "--locked", "--package", "cproxy", "--bin", "cproxy", "--config", "profile.dev.debug=0"]);
    cargo.current_dir(directory).env("CARGO_TARGET_DIR", &target);
    for variable in ["CARGO_MANIFEST_DIR", "RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS"] {
        cargo.env_remove(variable);
    }
    run::run_logged(&mut cargo, "building an older agent")?;
    Ok(target.join("debug/cproxy"))
}
