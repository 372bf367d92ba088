//! `docs/benchmarks.md` and its charts from the results in `docs/benchmarks`, which has a file for each benchmark. New
//! results of this machine replace them there, without what the page and the site do not show.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::{BENCHMARKS, Selection, page, results};
use crate::{paths, run};

/// Takes over new results, except those of runs with `--quick`, and writes the page about all and its charts.
pub(super) fn write() -> Result<()> {
    for benchmark in BENCHMARKS.map(Selection::name) {
        match read(&file_of(benchmark))? {
            Some(report) if page::is_quick(&report) => run::report(format!(
                "bench: the results of {benchmark} are from a run with {}, so they are left out",
                super::QUICK
            )),
            Some(report) => write_file(&kept_file_of(benchmark), &results::compact(&results::kept(&report)))?,
            None => {}
        }
    }
    let all = kept()?;
    ensure!(all.iter().any(|(_, report)| report.is_some()), "no results: run `cargo xtask bench all`");
    let charts = charts(&all);
    remove_others(&charts)?;
    for (file, chart) in &charts {
        write_file(&kept_results().join(file), chart)?;
    }
    write_file(&page_file(), &page::of(&all))?;
    run::report(format!("bench: wrote {} and {} charts", page_file().display(), charts.len()));
    Ok(())
}

/// The text of the site's page with all tables.
pub(crate) fn details() -> Result<String> {
    Ok(page::details(&kept()?.into_iter().filter_map(|(_, report)| report).collect::<Vec<_>>()))
}

/// Names and texts of the charts of all benchmarks.
fn charts(all: &[(Selection, Option<Value>)]) -> Vec<(String, String)> {
    let all = all.iter().filter_map(|(benchmark, report)| Some((*benchmark, report.as_ref()?)));
    all.flat_map(|(benchmark, report)| page::charts(benchmark, report)).collect()
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

/// This machine's results.
fn file_of(benchmark: &str) -> PathBuf {
    paths::target().join("bench").join(benchmark).with_extension("json")
}

fn page_file() -> PathBuf {
    paths::workspace().join("docs/benchmarks.md")
}

/// Directory of the results and charts that the page shows.
fn kept_results() -> PathBuf {
    page_file().with_file_name(page::CHARTS)
}

fn kept_file_of(benchmark: &str) -> PathBuf {
    kept_results().join(benchmark).with_extension("json")
}

/// All benchmarks, with the results of those that have any.
fn kept() -> Result<Vec<(Selection, Option<Value>)>> {
    let kept = |benchmark: Selection| Ok((benchmark, read(&kept_file_of(benchmark.name()))?));
    BENCHMARKS.into_iter().map(kept).collect()
}

fn read(file: &Path) -> Result<Option<Value>> {
    let text = match fs::read_to_string(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        text => text.with_context(|| format!("reading {}", file.display()))?,
    };
    serde_json::from_str(&text).map(Some).with_context(|| format!("{} is no JSON", file.display()))
}

fn write_file(file: &Path, text: &str) -> Result<()> {
    let directory = file.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(directory)
        .and_then(|()| fs::write(file, text))
        .with_context(|| format!("writing {}", file.display()))
}

/// Removes everything that is neither a benchmark's results nor one of the charts.
fn remove_others(charts: &[(String, String)]) -> Result<()> {
    let charts = charts.iter().map(|(file, _)| file.clone());
    let known: BTreeSet<_> = charts.chain(BENCHMARKS.map(|benchmark| format!("{}.json", benchmark.name()))).collect();
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

    const AGAIN: &str = "run `cargo xtask bench docs`, and edit the page, its charts and results nowhere else";

    #[test]
    fn the_page_and_its_charts_are_what_the_committed_results_give() {
        let all = kept().unwrap();
        assert!(fs::read_to_string(page_file()).unwrap() == page::of(&all), "{AGAIN}");
        let charts = charts(&all);
        for (file, chart) in &charts {
            assert!(fs::read_to_string(kept_results().join(file)).unwrap() == *chart, "{file}: {AGAIN}");
        }
        for (benchmark, report) in all.iter().filter_map(|(of, report)| Some((of.name(), report.as_ref()?))) {
            let text = fs::read_to_string(kept_file_of(benchmark)).unwrap();
            assert!(text == results::compact(&results::kept(report)), "{benchmark}: {AGAIN}");
        }
        let count = fs::read_dir(kept_results()).unwrap().count();
        assert_eq!(count, charts.len() + all.iter().filter(|(_, report)| report.is_some()).count(), "{AGAIN}");
    }

    /// A name that the results do not have would leave a gap in the page or in a chart.
    #[test]
    fn every_row_and_column_of_the_page_has_a_cell_in_the_results() {
        for (benchmark, report) in kept().unwrap() {
            let (Some(report), view) = (report, benchmark.view()) else { continue };
            let grids = view.charts.iter().map(|chart| &chart.grid).chain(view.table.as_ref().map(|table| &table.grid));
            for grid in grids {
                let has = |row: &str, column: &str| results::cell(&report, &(grid.at)(row, column)).is_some();
                for row in grid.rows {
                    let is_there = grid.columns.iter().any(|column| has(row, column));
                    assert!(is_there, "{}: {row}: {:?}", benchmark.name(), (grid.at)(row, grid.columns[0]));
                }
                for column in grid.columns {
                    assert!(grid.rows.iter().any(|row| has(row, column)), "{}: {column}", benchmark.name());
                }
            }
        }
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
        ("CPU time of the API server", "fanout", FANOUT_TABLE, "API server's CPU for each, ms", &CLIENTS),
        ("sent by the API server", "fanout", FANOUT_TABLE, "sent to each, KiB", &CLIENTS),
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
            let figure = |column: &&str| {
                let at = [table, row, column].map(str::to_owned);
                results::estimate(&report, &at).map(|estimate| estimate.median)
            };
            let mut measured: Vec<_> = columns.iter().map(figure).collect();
            if row == MEMORY_LEFT {
                let direct = figure(&DIRECT).unwrap();
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

    /// Percentages that compare with a machine without cproxy, and times that a boot waits.
    #[test]
    fn figures_in_the_readmes_text_are_those_of_the_committed_results() {
        let readme = fs::read_to_string(paths::workspace().join("README.md")).unwrap();
        let readme = readme.split_whitespace().collect::<Vec<_>>().join(" ");
        let report = read(&kept_file_of("datapath")).unwrap().unwrap();
        let percent = |call: &str, family: &str| {
            let at = [format!("{call}, {family}"), "to the ClusterIP".to_owned(), "ratio".to_owned()];
            format!("{:.1}", (results::estimate(&report, &at).unwrap().median - 1.0) * 100.0)
        };
        let both = |call| (percent(call, "IPv4"), percent(call, "IPv6"));
        let (connect, again) = (both("TCP connect()"), both("UDP sendto(), again on one socket"));
        let whole = both("TCP socket(), connect(), close()");
        let of_agent = read(&kept_file_of("agent")).unwrap().unwrap();
        let [own, nftables, iptables] = PROXIES.map(|proxy| {
            let at = [AGENT_TABLE, "start to ready, s", proxy].map(str::to_owned);
            results::estimate(&of_agent, &at).unwrap().median
        });
        for text in [
            format!("waits {own:.2} s for the table of 5,000 Services"),
            format!("kube-proxy's rules {nftables:.1} s (nftables) or {iptables:.1} s (iptables)"),
            format!("takes {} % longer over IPv4 and {} % over IPv6", connect.0, connect.1),
            format!("from socket() to close() {} and {} %", whole.0, whole.1),
            format!("has sent before {} and {} %", again.0, again.1),
        ] {
            assert!(readme.contains(&text), "{text}");
        }
    }
}
