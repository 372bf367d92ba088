//! The text of `docs/benchmarks.md`, made from the reports of the benchmarks. Pure.

use serde_json::Value;

/// The directory of the charts, beside the page.
pub(super) const CHARTS: &str = "benchmarks";

/// The part that is written by hand: budgets, and runs with other arguments than those of `bench all`.
const BUDGETS: &str = include_str!("budgets.md");

/// The title of a report's table of aims (`Verdict::table` of the benchmarks); its last column is the verdict.
const TARGETS: &str = "Targets";

/// The page about these reports. `missing` are benchmarks without one.
pub(super) fn of(reports: &[Value], missing: &[&str]) -> String {
    let machines = distinct(reports.iter().map(|report| format!("{}, {}", machine(report), day(report))));
    let mut page = format!("# Benchmarks\n\n{}\n", wrapped(INTRODUCTION));
    page.push_str(&wrapped(&format!("Measured on {}.", machines.join("; "))));
    if !missing.is_empty() {
        page.push_str(&wrapped(&format!("Not measured: {}.", missing.join(", "))));
    }
    page.push_str(&versions(reports));
    page.push_str(&contents(reports));
    page.push_str(&in_short(reports));
    page.push_str(&format!("\n{BUDGETS}"));
    page.push_str(&missed(reports));
    for report in reports {
        page.push_str(&section(report));
    }
    page
}

/// Whether the run was only to show that everything works.
pub(super) fn is_quick(report: &Value) -> bool {
    text(report, "command").split(' ').any(|word| word == super::QUICK)
}

/// The names of a report's charts' files; nothing that leads elsewhere.
pub(super) fn chart_files(report: &Value) -> impl Iterator<Item = &str> {
    list(report, "charts")
        .iter()
        .map(|chart| text(chart, "file"))
        .filter(|file| !file.is_empty() && !file.contains('/'))
}

/// The page's first paragraph.
const INTRODUCTION: &str = "\
`cargo xtask bench all` measures everything and writes this page; `cargo xtask bench docs` writes it again from the \
same results. Do not edit it. [Profile](profile.md) explains the remaining difference to a direct connection; \
[decision 018](decisions/018-benchmarks.md) explains the method.";

/// How to read the tables of all benchmarks; notes that belong to one benchmark are in its report.
const LEGEND: &str = "\
`direct` connects to the pod's own address. `cproxy`, `iptables`, `nftables` and `ipvs` connect to a ClusterIP that \
cproxy, or kube-proxy in that mode, serves. IPVS is in `guest` and `small-guest` alone, because the machine's own \
kernel lacks it. `direct, again` is a second direct connection in each round: its distance from 1 is chance. \
`cproxy, to the pod` and the like connect to the pod's own address while that proxy's rules or programs are in force: \
they show what the proxy costs the pod's other traffic.

In each round every participant has its turn. A ratio is the median of the ratios within the rounds, not the ratio of \
the two medians. Brackets hold the 95 % interval of the median; with fewer than six rounds, the smallest and the \
largest value.

While cproxy's programs are attached to any cgroup, the kernel uses the slower path through its hooks for every \
socket, so the direct connection pays for that as well. Only `datapath` compares with a machine where nothing is \
attached.

In `policy`, the baseline is `no policy`: a pod with cproxy's programs for Services and nothing that enforces a \
policy. The others differ from it by their policy alone.";

/// One line of links to the benchmarks.
fn contents(reports: &[Value]) -> String {
    let links = reports.iter().map(|report| text(report, "benchmark")).map(|name| format!("[{name}](#{name})"));
    let links = links.collect::<Vec<_>>().join(", ");
    format!("\n{}", wrapped(&format!("[In short](#in-short), [budgets and aims](#budgets-and-aims), {links}.")))
}

/// The tables that answer most questions.
fn in_short(reports: &[Value]) -> String {
    let tables = reports.iter().flat_map(|report| {
        let benchmark = text(report, "benchmark");
        list(report, "summary")
            .iter()
            .map(move |table| format!("{}\nMore: [{benchmark}](#{benchmark})\n", self::table(table)))
    });
    let legend = LEGEND.split("\n\n").map(wrapped).collect::<Vec<_>>().join("\n");
    format!("\n## In short\n\n{legend}{}", tables.collect::<String>())
}

/// The aims of all benchmarks that were not met.
fn missed(reports: &[Value]) -> String {
    let rows = reports.iter().flat_map(|report| {
        let targets = list(report, "tables").iter().filter(|table| text(table, "title") == TARGETS);
        let rows = targets.flat_map(|table| list(table, "rows"));
        rows.filter_map(|row| {
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
    format!(
        "\nAims of the benchmarks below that were missed:\n\n| aim | ratio | target | |\n|---|---:|---:|---|\n{rows}"
    )
}

fn section(report: &Value) -> String {
    let mut section = format!("\n## {}\n\n`{}`\n", text(report, "benchmark"), command(report));
    for table in list(report, "tables") {
        section.push_str(&self::table(table));
    }
    for chart in list(report, "charts") {
        let (title, file) = (inline(text(chart, "title")), text(chart, "file"));
        section.push_str(&format!("\n![{}]({CHARTS}/{file})\n", title.replace(['[', ']'], "")));
    }
    for note in list(report, "notes").iter().filter_map(Value::as_str) {
        section.push_str(&format!("\n{}", wrapped(&inline(note))));
    }
    section
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

/// Each program with each version that was seen; where there are several, with the benchmarks that each was in.
fn versions(reports: &[Value]) -> String {
    let cells = |version: &Value| (inline(text(version, "name")), inline(text(version, "version")));
    let all = distinct(reports.iter().flat_map(|report| list(report, "versions")).map(cells));
    let row = |(name, version): &(String, String)| {
        let is_only = all.iter().filter(|(other, _)| other == name).count() == 1;
        let is_this = |other: &Value| cells(other) == (name.clone(), version.clone());
        let used = reports.iter().filter(|report| list(report, "versions").iter().any(is_this));
        let used = used.map(|report| inline(text(report, "benchmark"))).collect::<Vec<_>>().join(", ");
        line(name, &[if is_only { version.clone() } else { format!("{version}: {used}") }])
    };
    let rows = all.iter().map(row).collect::<String>();
    if rows.is_empty() { rows } else { format!("\n| program | version |\n|---|---|\n{rows}") }
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

/// In the order in which they first came.
fn distinct<T: PartialEq>(all: impl Iterator<Item = T>) -> Vec<T> {
    all.fold(Vec::new(), |mut seen, one| {
        if !seen.contains(&one) {
            seen.push(one);
        }
        seen
    })
}

fn text<'v>(value: &'v Value, name: &str) -> &'v str {
    value.get(name).and_then(Value::as_str).unwrap_or_default()
}

fn list<'v>(value: &'v Value, name: &str) -> &'v [Value] {
    value.get(name).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

fn cells(value: &Value, name: &str) -> Vec<String> {
    list(value, name).iter().map(|cell| inline(cell.as_str().unwrap_or_default())).collect()
}

/// A paragraph in lines of at most 120 characters, where words allow.
fn wrapped(text: &str) -> String {
    const WIDTH: usize = 120;
    let mut lines = Vec::<String>::new();
    for word in text.split_whitespace() {
        match lines.last_mut().filter(|line| line.chars().count() + 1 + word.chars().count() <= WIDTH) {
            Some(line) => line.extend([" ", word]),
            None => lines.push(word.to_owned()),
        }
    }
    lines.join("\n") + "\n"
}

/// As text within a line or a cell.
fn inline(text: &str) -> String {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    text.replace('&', "&amp;").replace('<', "&lt;").replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn report(benchmark: &str, command: &str) -> Value {
        json!({
            "benchmark": benchmark, "command": command, "date": "2026-01-02T03:04:05Z",
            "machine": {"processor": "P", "cpus": 2, "kernel": "6.1"},
            "versions": [{"name": "cproxy", "version": "cproxy 1"}],
            "tables": [{
                "title": "Cost", "columns": ["a|b", "c"],
                "rows": [{"name": "x < y", "cells": ["1", "2"]}, {"name": "  of it", "cells": []}],
            }],
            "charts": [{"title": "A [chart]", "file": format!("{benchmark}-cost.svg")}],
            "summary": [{"title": format!("{benchmark}, ratio"), "columns": ["it"], "rows": []}],
            "notes": ["Compare\nwith care."],
        })
    }

    #[test]
    fn a_page_has_everything_in_its_order() {
        let page = of(&[report("agent", "agent --starts 1"), report("wrk", "traffic wrk --seconds 5")], &["udp"]);
        let parts = [
            "# Benchmarks\n\n`cargo xtask bench all` measures",
            "\n\nMeasured on P, 2 CPUs, Linux 6.1, 2026-01-02.\nNot measured: udp.\n\n| program | version \
             |\n|---|---|\n\
             | cproxy | cproxy 1 |\n\n[In short](#in-short), [budgets and aims](#budgets-and-aims), [agent](#agent), \
             [wrk](#wrk).\n\
             \n## In short\n\n`direct` connects",
            "\n\n**agent, ratio**\n\n|  | it |\n|---|---:|\n\nMore: [agent](#agent)\n\n**wrk, ratio**\n\n|  | it \
             |\n|---|---:|\n\nMore: [wrk](#wrk)\n\n## Budgets and aims\n",
            "\n\n## agent\n\n\
             `cargo xtask bench agent --starts 1`\n\n**Cost**\n\n|  | a\\|b | c |\n|---|---:|---:|\n\
             | x &lt; y | 1 | 2 |\n| &emsp;of it |  |  |\n\n![A chart](benchmarks/agent-cost.svg)\n\nCompare with \
             care.\n\n\
             ## wrk\n\n`cargo xtask bench wrk --seconds 5`\n",
        ];
        let mut rest = page.as_str();
        for part in parts {
            rest = rest.split_once(part).unwrap_or_else(|| panic!("no {part:?} in its place:\n{page}")).1;
        }
        assert!(!page.contains("were missed"), "{page}");
    }

    #[test]
    fn missed_aims_are_listed_before_the_benchmarks() {
        let mut report = report("wrk", "traffic wrk");
        report["tables"][0] = json!({"title": TARGETS, "columns": ["ratio", "target", ""], "rows": [
            {"name": "p50", "cells": ["1.0", "at most 1.02", "met"]},
            {"name": "p99", "cells": ["1.1", "at most 1.00", "missed, by less than the noise"]},
        ]});
        let page = of(&[report], &[]);
        let missed = "\n\n| aim | ratio | target | |\n|---|---:|---:|---|\n\
                      | [wrk](#wrk): p99 | 1.1 | at most 1.00 | missed, by less than the noise |\n\n## wrk\n";
        assert!(page.contains(missed), "{page}");
    }

    #[test]
    fn paragraphs_are_wrapped() {
        let text = "word ".repeat(60);
        let lines = wrapped(&text);
        assert!(lines.lines().all(|line| line.len() <= 120) && lines.lines().count() == 3, "{lines}");
        assert_eq!(lines.split_whitespace().count(), 60);
        assert!(BUDGETS.lines().all(|line| line.len() <= 120 || line.starts_with('|')), "{BUDGETS}");
    }

    #[test]
    fn other_machines_and_versions_are_named_too() {
        let mut other = report("wrk", "traffic wrk");
        other["machine"]["cpus"] = json!(4);
        other["versions"] = json!([{"name": "wrk", "version": "4"}, {"name": "cproxy", "version": "cproxy 1"}]);
        let page = of(&[report("agent", "agent"), other], &[]);
        assert!(page.contains("P, 2 CPUs, Linux 6.1, 2026-01-02; P, 4 CPUs, Linux 6.1, 2026-01-02.\n\n"), "{page}");
        assert!(page.contains("| cproxy | cproxy 1 |\n| wrk | 4 |\n\n"), "{page}");
        assert!(page.contains("`cargo xtask bench wrk`\n") && !page.contains("Not measured"), "{page}");
    }

    #[test]
    fn a_benchmark_of_another_build_is_told_apart() {
        let mut other = report("wrk", "traffic wrk");
        other["versions"] = json!([{"name": "cproxy", "version": "cproxy 2"}]);
        let page = of(&[report("agent", "agent"), other], &[]);
        assert!(page.contains("| cproxy | cproxy 1: agent |\n| cproxy | cproxy 2: wrk |\n\n"), "{page}");
    }

    #[test]
    fn a_report_that_lacks_everything_is_a_heading() {
        assert!(of(&[json!({"benchmark": "x"})], &[]).ends_with("\n## x\n\n`cargo xtask bench x`\n"));
        assert!(of(&[Value::Null], &[]).starts_with("# Benchmarks"));
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

    #[test]
    fn charts_are_files_of_the_results() {
        let report = json!({"charts": [{"file": "a.svg"}, {"file": "../b.svg"}, {}]});
        assert_eq!(chart_files(&report).collect::<Vec<_>>(), ["a.svg"]);
    }
}
