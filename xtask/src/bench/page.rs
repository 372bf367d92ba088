//! The text of `docs/benchmarks.md`, and that of the site's page with all tables, made from the results of the
//! benchmarks. Pure.

use serde_json::Value;

use super::{
    Selection,
    chart::Chart,
    results::{self, TARGETS, list, text},
    views::{ChartView, Grid, TableView},
};

/// The directory of the results and charts, beside the page.
pub(super) const CHARTS: &str = "benchmarks";

/// The part that is written by hand: budgets, and runs with other arguments than those of `bench all`.
const BUDGETS: &str = include_str!("budgets.md");

/// The page's first paragraphs.
const INTRODUCTION: &str = "\
What a Kubernetes Service costs with cproxy, beside kube-proxy in its modes and beside `direct`, a connection to the \
pod's own address. In each round every participant has its turn. A ratio is the median of the ratios within the \
rounds; lines and bars have the 95 % interval of the median where it is wide enough to see. \
[Decision 018](decisions/018-benchmarks.md) explains the method, [profile](profile.md) the remaining difference to a \
direct connection.

Each benchmark has a question, a chart, the figures that matter most, and the command that measures it again. Its \
results have all tables, intervals, notes and versions; `cargo xtask docs` makes a page of them. The build is the one \
that was measured. `cargo xtask bench docs` writes this page and its charts from the results: do not edit it.";

/// Beginning of a note about a direct connection whose rounds differ, after what was measured.
const NOISY: &str = ": a noisy run. ";

/// How to read the tables of all benchmarks; notes that belong to one benchmark are in its results.
const LEGEND: &str = "\
`direct` connects to the pod's own address. `cproxy`, `iptables`, `nftables` and `ipvs` connect to a ClusterIP that \
cproxy, or kube-proxy in that mode, serves. IPVS is in `guest` and `small-guest` alone, because the machine's own \
kernel lacks it. `direct, again` is a second direct connection in each round: its distance from 1 is chance. \
`cproxy, to the pod` and the like connect to the pod's own address while that proxy's rules or programs are in force: \
they show what the proxy costs the pod's other traffic.

Brackets hold the 95 % interval of the median; with fewer than six rounds, the smallest and the largest value.

While cproxy's programs are attached to any cgroup, the kernel uses the slower path through its hooks for every \
socket, so the direct connection pays for that as well. Only `datapath` compares with a machine where nothing is \
attached.";

/// The page about these benchmarks, with the results of those that have any.
pub(super) fn of(all: &[(Selection, Option<Value>)]) -> String {
    let mut page = format!("# Benchmarks\n\n{}\n", paragraphs(INTRODUCTION));
    for (benchmark, _) in all.iter().filter(|(_, report)| report.is_some()) {
        let name = benchmark.name();
        page.push_str(&wrapped_after("- ", &format!("[{name}](#{name}): {}", benchmark.view().question)));
    }
    page.push_str("- [Budgets and aims](#budgets-and-aims)\n");
    for (benchmark, report) in all {
        if let Some(report) = report {
            page.push_str(&section(*benchmark, report));
        }
    }
    page.push_str(&format!("\n{BUDGETS}"));
    let missing: Vec<_> = all.iter().filter(|(_, report)| report.is_none()).map(|(benchmark, _)| *benchmark).collect();
    if !missing.is_empty() {
        page.push_str("\n## Without results\n\n");
    }
    for benchmark in missing {
        let text = format!("{} `cargo xtask bench {}`", benchmark.view().question, benchmark.name());
        page.push_str(&wrapped_after("- ", &text));
    }
    page
}

/// The site's page with all tables, notes and versions.
pub(super) fn details(reports: &[Value]) -> String {
    let mut page = format!("# All tables of the benchmarks\n\n{}", paragraphs(LEGEND));
    page.push_str(&missed(reports));
    for report in reports {
        let versions =
            list(report, "versions").iter().map(|of| format!("{} `{}`", text(of, "name"), text(of, "version")));
        let versions = versions.collect::<Vec<_>>().join(", ");
        page.push_str(&format!(
            "\n## {}\n\n`{}`\n\n{}, {}: {}.\n",
            text(report, "benchmark"),
            command(report),
            machine(report),
            day(report),
            inline(&versions)
        ));
        for note in list(report, "notes").iter().filter_map(Value::as_str) {
            page.push_str(&format!("\n{}", wrapped(&inline(note))));
        }
        for table in list(report, "tables") {
            page.push_str(&self::table(table));
        }
    }
    page
}

/// Names and texts of a benchmark's charts.
pub(super) fn charts(benchmark: Selection, report: &Value) -> Vec<(String, String)> {
    benchmark.view().charts.iter().map(|view| (chart_file(benchmark, view), chart(view, report).svg())).collect()
}

fn chart_file(benchmark: Selection, view: &ChartView) -> String {
    format!("{}-{}.svg", benchmark.name(), view.name)
}

fn chart(view: &ChartView, report: &Value) -> Chart {
    let Grid { rows, columns, at } = view.grid;
    let cells = |column: &str| rows.iter().map(|row| results::estimate(report, &at(row, column))).collect();
    Chart {
        title: view.title.to_owned(),
        quantity: view.quantity.to_owned(),
        kind: view.kind,
        rows: rows.iter().map(|row| (*row).to_owned()).collect(),
        series: columns.iter().map(|column| ((*column).to_owned(), cells(column))).collect(),
    }
}

/// Whether the run was only to show that everything works.
pub(super) fn is_quick(report: &Value) -> bool {
    text(report, "command").split(' ').any(|word| word == super::QUICK)
}

fn section(benchmark: Selection, report: &Value) -> String {
    let (name, view) = (benchmark.name(), benchmark.view());
    let mut section = format!("\n## {name}\n\n{}", wrapped(view.question));
    for chart in view.charts {
        let (title, file) = (format!("{}: {}", chart.title, chart.quantity), chart_file(benchmark, chart));
        section.push_str(&format!("\n![{title}]({CHARTS}/{file})\n"));
    }
    if let Some(TableView { corner, grid: Grid { rows, columns, at } }) = view.table {
        let columns: Vec<_> = columns.iter().map(|&column| column.to_owned()).collect();
        section.push_str(&format!("\n{}|---|{}\n", line(corner, &columns), "---:|".repeat(columns.len())));
        for row in rows {
            let cells = columns.iter().map(|column| results::short(report, &at(row, column)));
            section.push_str(&line(row, &cells.map(|cell| cell.unwrap_or_else(|| "-".to_owned())).collect::<Vec<_>>()));
        }
    }
    let noise = list(report, "notes").iter().filter_map(|note| noise(note.as_str()?));
    for note in noise.chain((!view.note.is_empty()).then(|| view.note.to_owned())) {
        section.push_str(&format!("\n{}", wrapped(&note)));
    }
    let mut facts = vec![text(report, "build").to_owned(), day(report).to_owned()];
    let verdicts: Vec<_> = targets(report).filter_map(|row| list(row, "cells").last()?.as_str()).collect();
    if !verdicts.is_empty() {
        let met = verdicts.iter().filter(|verdict| verdict.starts_with("met")).count();
        facts.push(format!("{met} of {} aims met", verdicts.len()));
    }
    facts.push(format!("[results]({CHARTS}/{name}.json)"));
    facts.retain(|fact| !fact.is_empty());
    section.push_str(&format!("\n{}", wrapped(&format!("`{}`: {}.", command(report), facts.join(", ")))));
    section
}

/// The part of a note about a noisy run that is not the same for all.
fn noise(note: &str) -> Option<String> {
    let (what, rest) = note.split_once(NOISY)?;
    let (spread, _) = rest.split_once(". ")?;
    Some(format!("{what}{NOISY}{spread}."))
}

/// Rows of the tables of aims.
fn targets(report: &Value) -> impl Iterator<Item = &Value> {
    let tables = list(report, "tables").iter().filter(|table| text(table, "title") == TARGETS);
    tables.flat_map(|table| list(table, "rows"))
}

/// The aims of all benchmarks that were not met.
fn missed(reports: &[Value]) -> String {
    let rows = reports.iter().flat_map(|report| {
        targets(report).filter_map(|row| {
            let cells = cells(row, "cells");
            let is_missed = cells.last().is_some_and(|verdict| verdict.starts_with("missed"));
            let benchmark = text(report, "benchmark");
            is_missed.then(|| line(&format!("[{benchmark}](#{benchmark}): {}", inline(text(row, "name"))), &cells))
        })
    });
    let rows = rows.collect::<String>();
    if rows.is_empty() {
        return String::new();
    }
    format!("\n## Missed aims\n\n| aim | ratio | target | |\n|---|---:|---:|---|\n{rows}")
}

/// The command that does it again: a benchmark that is one of several in its binary is named twice in what was run, and
/// where the results went changes nothing.
fn command(report: &Value) -> String {
    let benchmark = text(report, "benchmark");
    let run = text(report, "command");
    let (before, output) = run.split_once(" --output ").unwrap_or((run, ""));
    let after = output.split(' ').skip(1);
    let mut words = before.split(' ').skip(1).chain(after).peekable();
    words.next_if_eq(&benchmark);
    let words = ["cargo xtask bench", benchmark].into_iter().chain(words).filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join(" ")
}

/// Its columns hold figures, the first one apart.
fn table(table: &Value) -> String {
    let columns = cells(table, "columns");
    let rows = list(table, "rows").iter().map(|row| {
        let name = row_name(text(row, "name"));
        let mut cells = cells(row, "cells");
        cells.resize(columns.len(), String::new());
        line(&name, &cells)
    });
    let head = line("", &columns) + "|---|" + &"---:|".repeat(columns.len()) + "\n";
    format!("\n**{}**\n\n{head}{}", inline(text(table, "title")), rows.collect::<String>())
}

/// One that is set in belongs to the row above.
fn row_name(name: &str) -> String {
    let indent = if name.starts_with(' ') { "&emsp;" } else { "" };
    format!("{indent}{}", inline(name))
}

fn line(name: &str, cells: &[String]) -> String {
    let cells = cells.iter().map(|cell| format!(" {cell} |")).collect::<String>();
    format!("| {name} |{cells}\n")
}

fn machine(report: &Value) -> String {
    let machine = report.get("machine").unwrap_or(&Value::Null);
    let cpus = machine.get("cpus").and_then(Value::as_u64).unwrap_or_default();
    format!("{}, {cpus} CPUs, Linux {}", inline(text(machine, "processor")), inline(text(machine, "kernel")))
}

/// `YYYY-MM-DD`
fn day(report: &Value) -> &str {
    text(report, "date").split('T').next().unwrap_or_default()
}

/// Texts of cells. A line may break before an interval, but not in it.
fn cells(value: &Value, name: &str) -> Vec<String> {
    let cell = |cell: &Value| inline(cell.as_str().unwrap_or_default()).replace(" .. ", "\u{a0}..\u{a0}");
    list(value, name).iter().map(cell).collect()
}

fn paragraphs(text: &str) -> String {
    text.split("\n\n").map(wrapped).collect::<Vec<_>>().join("\n")
}

/// A paragraph in lines of at most 120 characters, where words allow.
fn wrapped(text: &str) -> String {
    wrapped_after("", text)
}

/// The same as an item of a list.
fn wrapped_after(bullet: &str, text: &str) -> String {
    const WIDTH: usize = 120;
    let width = WIDTH - bullet.len();
    let mut lines = Vec::<String>::new();
    for word in text.split_whitespace() {
        match lines.last_mut().filter(|line| line.chars().count() + 1 + word.chars().count() <= width) {
            Some(line) => line.extend([" ", word]),
            None => lines.push(word.to_owned()),
        }
    }
    format!("{bullet}{}\n", lines.join(&format!("\n{}", " ".repeat(bullet.len()))))
}

/// As text within a line or a cell.
fn inline(text: &str) -> String {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    text.replace('&', "&amp;").replace('<', "&lt;").replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{super::chart::Kind, *};

    fn report(benchmark: &str, command: &str) -> Value {
        json!({
            "benchmark": benchmark, "build": "cproxy 1", "command": command, "date": "2026-01-02T03:04:05Z",
            "machine": {"processor": "P", "cpus": 2, "kernel": "6.1"},
            "versions": [{"name": "cproxy", "version": "cproxy 1"}, {"name": "nginx", "version": "2"}],
            "tables": [
                {"title": "From an EndpointSlice's change on the API server to the first connect() that follows it, ms",
                 "columns": ["p50", "p90"],
                 "rows": [{"name": "since the change was sent", "cells": ["1.5 (1.2 .. 1.9)", "1234"]},
                          {"name": "  x < y", "cells": ["1"]}]},
                {"title": TARGETS, "columns": ["ratio", "target", ""], "rows": [
                    {"name": "p50", "cells": ["1.0", "at most 1.02", "met"]},
                    {"name": "p99", "cells": ["1.1", "at most 1.00", "missed, by less than the noise"]},
                ]},
            ],
            "notes": ["Compare\nwith care.", "c: a noisy run. Rounds span 11 % of it. Ratios count."],
        })
    }

    fn in_order(page: &str, parts: &[&str]) {
        let mut rest = page;
        for part in parts {
            rest = rest.split_once(part).unwrap_or_else(|| panic!("no {part:?} in its place:\n{page}")).1;
        }
    }

    #[test]
    fn a_page_has_a_question_charts_a_table_and_a_command_for_each_benchmark() {
        let all = [(Selection::Propagation, Some(report("propagation", "propagation"))), (Selection::Relay, None)];
        let parts = [
            "# Benchmarks\n\nWhat a Kubernetes Service costs",
            "\n\n- [propagation](#propagation): How long does a changed",
            "\n- [Budgets and aims](#budgets-and-aims)\n\n## propagation\n\nHow long does a changed",
            "\n\n![From a changed EndpointSlice to connections that follow it: time (ms, lower is better)]\
             (benchmarks/propagation-changes.svg)\n\n| ms | p50 | p90 | p99 | max |\n|---|---:|---:|---:|---:|\n\
             | since the change was sent | 1.5 | 1,234 | - | - |\n",
            "\n\nc: a noisy run. Rounds span 11 % of it.\n",
            "\n`cargo xtask bench propagation`: cproxy 1, 2026-01-02, 1 of 2 aims met,\n\
             [results](benchmarks/propagation.json).\n\n## Budgets and aims\n",
            "\n## Without results\n\n- What do thousands",
            " `cargo xtask bench relay`\n",
        ];
        in_order(&of(&all).replace("met, [", "met,\n["), &parts);
    }

    #[test]
    fn details_have_missed_aims_versions_notes_and_all_tables() {
        let parts = [
            "# All tables of the benchmarks\n\n`direct` connects",
            "\n\n## Missed aims\n\n| aim | ratio | target | |\n|---|---:|---:|---|\n\
             | [wrk](#wrk): p99 | 1.1 | at most 1.00 | missed, by less than the noise |\n\n\
             ## wrk\n\n`cargo xtask bench wrk --seconds 5`\n\n\
             P, 2 CPUs, Linux 6.1, 2026-01-02: cproxy `cproxy 1`, nginx `2`.\n\nCompare with care.\n\nc: a noisy run. \
             Rounds span 11 % of it. Ratios count.\n\n**From an",
            "\n\n|  | p50 | p90 |\n|---|---:|---:|\n\
             | since the change was sent | 1.5 (1.2\u{a0}..\u{a0}1.9) | 1234 |\n\
             | &emsp;x &lt; y | 1 |  |\n\n**Targets**\n",
        ];
        in_order(&details(&[report("wrk", "traffic wrk --seconds 5")]), &parts);
    }

    #[test]
    fn tables_have_at_most_ten_rows_and_charts_fit() {
        for benchmark in super::super::BENCHMARKS {
            let view = benchmark.view();
            assert!(view.table.is_none_or(|table| table.grid.rows.len() <= 10), "{}", benchmark.name());
            for chart in view.charts {
                assert!(chart.title.len() <= 58 && chart.quantity.len() <= 72, "{}", chart.title);
                let are_bars = matches!(chart.kind, Kind::Bars);
                let fits = |name: &&str| !are_bars || name.len() <= 20;
                assert!(chart.grid.columns.iter().all(fits), "{}: {:?}", chart.title, chart.grid.columns);
            }
        }
    }

    #[test]
    fn paragraphs_are_wrapped() {
        let text = "word ".repeat(60);
        let lines = wrapped_after("- ", &text);
        assert!(lines.lines().all(|line| line.len() <= 120) && lines.lines().count() == 3, "{lines}");
        assert!(lines.lines().skip(1).all(|line| line.starts_with("  word")), "{lines}");
        assert!(BUDGETS.lines().all(|line| line.len() <= 120 || line.starts_with('|')), "{BUDGETS}");
    }

    #[test]
    fn results_that_lack_everything_give_a_section() {
        assert!(section(Selection::Wrk, &Value::Null).starts_with("\n## wrk\n\nHow many"));
        assert!(details(&[Value::Null]).starts_with("# All tables"));
    }

    #[test]
    fn where_the_results_went_is_no_part_of_the_command() {
        let again = |run: &str| command(&report("wrk", run));
        assert_eq!(again("traffic wrk --output /a/b.json --rounds 2"), "cargo xtask bench wrk --rounds 2");
        assert_eq!(again("traffic wrk --rounds 2 --output b"), "cargo xtask bench wrk --rounds 2");
    }

    #[test]
    fn quick_runs_are_known_by_their_command() {
        assert!(is_quick(&report("agent", "agent --quick")) && !is_quick(&report("agent", "agent --quicker")));
    }
}
