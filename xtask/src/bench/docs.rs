//! `docs/benchmarks.md` from the results in `docs/benchmarks`: a file for each benchmark and those of its charts. New
//! results of this machine replace them there, without the single samples.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::page;
use crate::{paths, run};

/// Field of a report with all samples, which the page does not show.
const SAMPLES: &str = "samples";

/// Takes over new results, except those of runs with `--quick`, and writes the page about all.
pub(super) fn write(benchmarks: &[&str]) -> Result<()> {
    for &benchmark in benchmarks {
        match read(&file_of(benchmark))? {
            Some(report) if page::is_quick(&report) => run::report(format!(
                "bench: the results of {benchmark} are from a run with {}, so they are left out",
                super::QUICK
            )),
            Some(report) => take_over(benchmark, report)?,
            None => {}
        }
    }
    let (reports, missing) = kept(benchmarks)?;
    ensure!(!reports.is_empty(), "no results in {}: run `cargo xtask bench all`", results().display());
    remove_others(benchmarks, &reports)?;
    let file = page_file();
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

/// Directory of this machine's results.
fn results() -> PathBuf {
    paths::target().join("bench")
}

fn file_of(benchmark: &str) -> PathBuf {
    results().join(benchmark).with_extension("json")
}

fn page_file() -> PathBuf {
    paths::workspace().join("docs/benchmarks.md")
}

/// Directory of the results that the page shows.
fn kept_results() -> PathBuf {
    page_file().with_file_name(page::CHARTS)
}

fn kept_file_of(benchmark: &str) -> PathBuf {
    kept_results().join(benchmark).with_extension("json")
}

/// The results that the page shows, and the benchmarks without any.
fn kept<'b>(benchmarks: &[&'b str]) -> Result<(Vec<Value>, Vec<&'b str>)> {
    let mut reports = Vec::new();
    let mut missing = Vec::new();
    for &benchmark in benchmarks {
        match read(&kept_file_of(benchmark))? {
            Some(report) => reports.push(report),
            None => missing.push(benchmark),
        }
    }
    Ok((reports, missing))
}

fn read(file: &Path) -> Result<Option<Value>> {
    let text = match fs::read_to_string(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        text => text.with_context(|| format!("reading {}", file.display()))?,
    };
    serde_json::from_str(&text).map(Some).with_context(|| format!("{} is no JSON", file.display()))
}

/// Writes a report and its charts where the page finds them.
fn take_over(benchmark: &str, mut report: Value) -> Result<()> {
    if let Some(fields) = report.as_object_mut() {
        fields.remove(SAMPLES);
    }
    let directory = kept_results();
    fs::create_dir_all(&directory).with_context(|| format!("creating {}", directory.display()))?;
    for file in page::chart_files(&report) {
        let from = results().join(file);
        fs::copy(&from, directory.join(file)).with_context(|| format!("copying {}", from.display()))?;
    }
    let (file, text) = (kept_file_of(benchmark), format!("{report:#}\n"));
    fs::write(&file, text).with_context(|| format!("writing {}", file.display()))
}

/// Removes everything that belongs to none of the reports.
fn remove_others(benchmarks: &[&str], reports: &[Value]) -> Result<()> {
    let charts = reports.iter().flat_map(page::chart_files).map(str::to_owned);
    let known: BTreeSet<_> = charts.chain(benchmarks.iter().map(|benchmark| format!("{benchmark}.json"))).collect();
    let directory = kept_results();
    for entry in fs::read_dir(&directory).with_context(|| format!("reading {}", directory.display()))? {
        let path = entry.context("reading a directory entry")?.path();
        if path.file_name().and_then(|name| name.to_str()).is_none_or(|name| !known.contains(name)) {
            fs::remove_file(&path).with_context(|| format!("removing {}", path.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_what_the_committed_results_give() {
        let (reports, missing) = kept(&super::super::BENCHMARKS.map(super::super::Selection::name)).unwrap();
        let page = fs::read_to_string(page_file()).unwrap();
        assert!(page == page::of(&reports, &missing), "run `cargo xtask bench docs`, and edit the page nowhere else");
    }

    /// Starts of rows of the README's tables with their places in the results: benchmark, table, row and columns.
    const README_ROWS: [(&str, &str, &str, &str, &[&str]); 10] = [
        ("memory that it takes, 10", "small-guest", GUEST_10, MEMORY_LEFT, &GUESTS),
        ("memory that it takes, 5,000", "small-guest", GUEST_5000, MEMORY_LEFT, &GUESTS),
        ("median connect(), 5,000", "small-guest", GUEST_5000, "connect(2), p50, us", &GUESTS),
        ("requests/s, each", "small-guest", GUEST_5000, "wrk, 2,000 connections, requests/s", &GUESTS),
        ("resident memory at rest", "agent", AGENT_TABLE, "resident memory at rest, MiB", &PROXIES),
        ("time from start to ready", "agent", AGENT_TABLE, "start to ready, s", &PROXIES),
        ("time until new", "agent", AGENT_TABLE, "one change, until connections follow, ms", &PROXIES),
        (
            "requests refused in",
            "rolling",
            "requests during rolling updates, 5000 Services, pods end at once",
            "refused",
            &["cproxy", "nftables", "iptables"],
        ),
        ("CPU time of the API server", "fanout", FANOUT_TABLE, "  API server's CPU for each, ms", &CLIENTS),
        ("sent by the API server", "fanout", FANOUT_TABLE, "  sent to each, KiB", &CLIENTS),
    ];
    const GUEST_10: &str = "a guest with half a core and 500 MiB, 10 Services";
    const GUEST_5000: &str = "a guest with half a core and 500 MiB, 5000 Services";
    /// The README has the difference to a guest without a proxy.
    const MEMORY_LEFT: &str = "memory still available, MiB";
    const GUESTS: [&str; 5] = [DIRECT, "cproxy", "nftables", "iptables", "ipvs"];
    const DIRECT: &str = "direct";
    const AGENT_TABLE: &str = "5000 Services with 10 endpoints each, in 5000 slices";
    const PROXIES: [&str; 3] = ["cproxy", "kube-proxy, nftables", "kube-proxy, iptables"];
    const FANOUT_TABLE: &str = "Clients of one API server with 1000 Services of 10 endpoints each";
    const CLIENTS: [&str; 3] = ["1 cproxy", "1 kube-proxy, nftables", "1 kube-proxy, iptables"];

    #[test]
    fn figures_of_the_readme_are_those_of_the_committed_results() {
        let readme = fs::read_to_string(paths::workspace().join("README.md")).unwrap();
        for (start, benchmark, table, row, columns) in README_ROWS {
            let line = readme.lines().find(|line| line.starts_with(&format!("| {start}"))).unwrap();
            let shown: Vec<_> = line.trim_matches('|').split('|').skip(1).map(str::trim).collect();
            let report = read(&kept_file_of(benchmark)).unwrap().unwrap();
            let mut measured: Vec<_> = columns.iter().map(|column| figure(&report, table, row, column)).collect();
            if row == MEMORY_LEFT {
                let direct = figure(&report, table, row, DIRECT).unwrap();
                measured.iter_mut().flatten().for_each(|left| *left = direct - *left);
            }
            assert_eq!(shown.len(), measured.len(), "{line}");
            for (shown, measured) in shown.into_iter().zip(measured) {
                let Some(measured) = measured else {
                    assert_eq!(shown, "not measured", "{line}");
                    continue;
                };
                let number = shown.split(' ').next().unwrap().replace(',', "");
                let decimals = number.split_once('.').map_or(0, |(_, decimals)| decimals.len());
                assert_eq!(number, format!("{measured:.decimals$}"), "{line}");
            }
        }
    }

    /// The median in a cell of a table; `None` if the table has no such column.
    fn figure(report: &Value, table: &str, row: &str, column: &str) -> Option<f64> {
        let tables = ["tables", "summary"].into_iter().flat_map(|key| report[key].as_array().unwrap());
        let table = tables.into_iter().find(|of| of["title"] == table).unwrap();
        let place = table["columns"].as_array().unwrap().iter().position(|name| name == column)?;
        let row = table["rows"].as_array().unwrap().iter().find(|of| of["name"] == row).unwrap();
        Some(row["cells"][place].as_str().unwrap().split(' ').next().unwrap().parse().unwrap())
    }
}
