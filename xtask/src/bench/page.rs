//! What `docs/benchmarks.md` says, from what the benchmarks have written. Pure.

use serde_json::Value;

/// The directory of the charts, beside the page.
pub(super) const CHARTS: &str = "benchmarks";

/// The page about these reports. `missing` are benchmarks without one.
pub(super) fn of(reports: &[Value], missing: &[&str]) -> String {
    let machines = distinct(reports.iter().map(|report| format!("{}, {}", machine(report), day(report))));
    let mut page = String::from(
        "# Benchmarks\n\nWritten by `cargo xtask bench all` from what it has measured; `cargo xtask bench docs` writes \
         it again from the same results. Do not edit it. [What the profile says](profile.md) is about where the remaining \
         difference to a direct connection goes; [why it is measured so](decisions/018-benchmarks.md) about the rules.\n\n",
    );
    page.push_str(&format!("Measured on {}.\n", machines.join("; ")));
    if !missing.is_empty() {
        page.push_str(&format!("Not measured: {}.\n", missing.join(", ")));
    }
    page.push_str(&versions(reports));
    page.push_str(&in_short(reports));
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

/// How to read a table. What only one benchmark has is told there.
const LEGEND: &str = "\
`direct` connects to the pod's own address, all others to a ClusterIP, through what their column names; IPVS is in `guest` \
alone, since the machine's own kernel has none. A ratio is the median of the ratios within the rounds, in each of which everybody \
had a turn, not the ratio of the two medians above it. In brackets is the interval that holds the true median with a probability of \
95 % (with fewer than six rounds: the smallest and the largest). `direct, again` is the direct connection once more in each \
round: what its ratio lacks to 1 is chance. \"To the pod\" connects to the pod's own address where the peer's rules are in force: \
what the rest of a pod's traffic pays. Where cproxy's programs are attached for one peer, the kernel takes the long way past their \
hooks for all others, too; what that is, `datapath` shows, which compares with nothing attached.";

/// What who has little time reads.
fn in_short(reports: &[Value]) -> String {
    let tables = reports.iter().flat_map(|report| {
        let benchmark = text(report, "benchmark");
        list(report, "summary")
            .iter()
            .map(move |table| format!("{}\nMore: [{benchmark}](#{benchmark})\n", self::table(table)))
    });
    format!("\n## In short\n\n{LEGEND}\n{}", tables.collect::<String>())
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
        section.push_str(&format!("\n{}\n", inline(note)));
    }
    section
}

/// The command that does it again: a benchmark that is one of several in its binary is named twice in what was run, and where
/// the results went changes nothing.
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
        let (head, rest) = page.split_once(LEGEND).expect("a legend");
        let wanted = "# Benchmarks\n\nWritten by `cargo xtask bench all` from what it has measured; `cargo xtask bench \
            docs` writes it again from the same results. Do not edit it. [What the profile says](profile.md) is about where the \
            remaining difference to a direct connection goes; [why it is measured so](decisions/018-benchmarks.md) about the \
            rules.\n\nMeasured on P, 2 CPUs, Linux 6.1, \
            2026-01-02.\nNot measured: udp.\n\n| program | version |\n|---|---|\n| cproxy | cproxy 1 |\n\n## In short\n\n";
        assert_eq!(head, wanted);
        let wanted = "\n\n**agent, ratio**\n\n|  | it |\n|---|---:|\n\nMore: [agent](#agent)\n\n**wrk, ratio**\n\n|  | it \
            |\n|---|---:|\n\nMore: [wrk](#wrk)\n\n## agent\n\n\
            `cargo xtask bench agent --starts 1`\n\n**Cost**\n\n|  | a\\|b | c |\n|---|---:|---:|\n\
            | x &lt; y | 1 | 2 |\n| &emsp;of it |  |  |\n\n![A chart](benchmarks/agent-cost.svg)\n\nCompare with care.\n\n\
            ## wrk\n\n`cargo xtask bench wrk --seconds 5`\n";
        assert!(rest.starts_with(wanted), "{page}");
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
