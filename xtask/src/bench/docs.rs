//! `docs/benchmarks.md` and its charts: from the files that the benchmarks have left to the files that are committed.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::page;
use crate::{paths, run};

/// Writes the page about all results, except those of runs with `--quick`.
pub(super) fn write(benchmarks: &[&str]) -> Result<()> {
    let mut reports = Vec::new();
    let mut missing = Vec::new();
    for &benchmark in benchmarks {
        match read(benchmark)? {
            Some(report) if page::is_quick(&report) => {
                run::report(format!(
                    "bench: the results of {benchmark} are from a run with {}, so they are left out",
                    super::QUICK
                ));
                missing.push(benchmark);
            }
            Some(report) => reports.push(report),
            None => missing.push(benchmark),
        }
    }
    ensure!(!reports.is_empty(), "no results in {}: run `cargo xtask bench all`", results().display());
    let docs = paths::workspace().join("docs");
    copy_charts(&reports, &docs.join(page::CHARTS))?;
    let file = docs.join("benchmarks.md");
    fs::write(&file, page::of(&reports, &missing)).with_context(|| format!("writing {}", file.display()))?;
    run::report(format!("bench: wrote {}", file.display()));
    Ok(())
}

/// Removes the results of an earlier run.
pub(super) fn remove(benchmark: &str) -> Result<()> {
    let file = file_of(benchmark);
    match fs::remove_file(&file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
    .with_context(|| format!("removing {}", file.display()))
}

/// Directory of the results.
fn results() -> PathBuf {
    paths::target().join("bench")
}

fn file_of(benchmark: &str) -> PathBuf {
    results().join(benchmark).with_extension("json")
}

fn read(benchmark: &str) -> Result<Option<Value>> {
    let file = file_of(benchmark);
    let text = match fs::read_to_string(&file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        text => text.with_context(|| format!("reading {}", file.display()))?,
    };
    serde_json::from_str(&text).map(Some).with_context(|| format!("{} is no JSON", file.display()))
}

/// Fills the directory with the charts of these reports, and nothing else.
fn copy_charts(reports: &[Value], directory: &Path) -> Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => fs::create_dir_all(directory),
    }
    .with_context(|| format!("emptying {}", directory.display()))?;
    for file in reports.iter().flat_map(page::chart_files) {
        let from = results().join(file);
        fs::copy(&from, directory.join(file)).with_context(|| format!("copying {}", from.display()))?;
    }
    Ok(())
}
