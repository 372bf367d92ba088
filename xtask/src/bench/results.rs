//! Results of a benchmark, as docs/benchmarks keeps them: JSON with a line for each table and each note, so that a
//! new measurement changes few lines. Pure.

use serde_json::{Map, Value, json};

/// The program whose version names the build.
const SUBJECT: &str = "cproxy";
/// Divides the steps to a row or column: `p50, us > to direct` is the first `to direct` after `p50, us`.
const STEP: &str = " > ";
/// The title of a report's table of aims (`Verdict::table` of the benchmarks); its last column is the verdict.
pub(super) const TARGETS: &str = "Targets";

/// A median with its interval and its text.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Estimate {
    pub(super) median: f64,
    pub(super) low: f64,
    pub(super) high: f64,
    /// The median as text, with its digits.
    pub(super) text: String,
}

impl Estimate {
    /// That of a cell such as `1.32 (1.30 .. 1.34)`; `None` if the cell does not begin with a number.
    fn of(cell: &str) -> Option<Self> {
        let text = cell.split(' ').next()?;
        let number = |text: &str| text.trim_end_matches('%').parse::<f64>().ok();
        let median = number(text)?;
        let interval = cell.split_once('(').and_then(|(_, rest)| rest.split_once(')')?.0.split_once(" .. "));
        let (low, high) =
            interval.and_then(|(low, high)| Some((number(low)?, number(high)?))).unwrap_or((median, median));
        let decimals = text.split_once('.').map_or("", |(_, decimals)| decimals);
        let text = match decimals.len() {
            0 if !text.ends_with('%') => grouped(median),
            // The third is less than the noise.
            3.. => format!("{median:.2}"),
            _ => text.to_owned(),
        };
        Some(Self { median, low, high, text })
    }
}

/// The parts of a report that are kept: no single samples, and nothing that its tables say already.
pub(super) fn kept(report: &Value) -> Value {
    let mut kept = Map::new();
    for field in ["benchmark", "command", "date", "machine", "versions", "notes", "tables"] {
        if let Some(value) = report.get(field) {
            kept.insert(field.to_owned(), value.clone());
        }
    }
    let build = list(report, "versions").iter().find(|version| text(version, "name") == SUBJECT);
    if let Some(build) = build {
        kept.insert("build".to_owned(), text(build, "version").into());
    }
    Value::Object(kept)
}

/// The results as text.
pub(super) fn compact(kept: &Value) -> String {
    let mut lines = Vec::new();
    for (name, value) in kept.as_object().into_iter().flatten() {
        let name = json!(name);
        match value.as_array().filter(|items| !items.is_empty()) {
            Some(items) => {
                let items: Vec<_> = items.iter().map(Value::to_string).collect();
                lines.push(format!("{name}: [\n{}\n]", items.join(",\n")));
            }
            None => lines.push(format!("{name}: {value}")),
        }
    }
    format!("{{\n{}\n}}\n", lines.join(",\n"))
}

/// The cell of a table with that title, or with the first title that begins so. `None` if there is none, or nothing in
/// it.
pub(super) fn cell<'r>(report: &'r Value, [table, row, column]: &[String; 3]) -> Option<&'r str> {
    let tables = list(report, "tables");
    let begins = || tables.iter().find(|of| text(of, "title").starts_with(table));
    let table = tables.iter().find(|of| text(of, "title") == table).or_else(begins)?;
    let rows = list(table, "rows");
    let row = place(rows.iter().map(|row| text(row, "name")), row)?;
    let column = place(list(table, "columns").iter().filter_map(Value::as_str), column)?;
    let cell = list(rows.get(row)?, "cells").get(column)?.as_str()?;
    Some(cell).filter(|cell| !cell.is_empty() && *cell != "-")
}

/// The median and its interval in a cell.
pub(super) fn estimate(report: &Value, at: &[String; 3]) -> Option<Estimate> {
    Estimate::of(cell(report, at)?)
}

/// A cell in short: its median, or its first words.
pub(super) fn short(report: &Value, at: &[String; 3]) -> Option<String> {
    let cell = cell(report, at)?;
    let words = cell.split_once(": ").map_or(cell, |(first, _)| first);
    Some(match Estimate::of(cell) {
        Some(estimate) if !cell.contains(" of ") => estimate.text,
        _ => words.to_owned(),
    })
}

/// The name's place, with the steps to it. Blanks before a name mark a part of what is above.
fn place<'n>(names: impl Iterator<Item = &'n str>, path: &str) -> Option<usize> {
    let mut names = names.map(str::trim).enumerate();
    path.split(STEP).try_fold(0, |_, step| names.find(|(_, name)| *name == step).map(|(place, _)| place))
}

pub(super) fn text<'v>(value: &'v Value, name: &str) -> &'v str {
    value.get(name).and_then(Value::as_str).unwrap_or_default()
}

pub(super) fn list<'v>(value: &'v Value, name: &str) -> &'v [Value] {
    value.get(name).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// A number with at most four digits after the point and commas between thousands.
pub(super) fn grouped(value: f64) -> String {
    let text = format!("{:.4}", value + 0.0);
    let text = text.trim_end_matches('0').trim_end_matches('.');
    let (whole, rest) = text.split_at(text.find('.').unwrap_or(text.len()));
    let mut grouped = String::new();
    for (position, char) in whole.chars().enumerate() {
        if (whole.len() - position).is_multiple_of(3) && grouped.ends_with(|before: char| before.is_ascii_digit()) {
            grouped.push(',');
        }
        grouped.push(char);
    }
    grouped + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Value {
        json!({
            "benchmark": "wrk", "samples": [1], "summary": [], "notes": ["One.", "Two."],
            "versions": [{"name": "nginx", "version": "1"}, {"name": "cproxy", "version": "cproxy 1 (table layout 2)"}],
            "tables": [{"title": "T", "columns": ["us", "ratio", "ms", "ratio"], "rows": [
                {"name": "p50", "cells": ["1", "2", "3", "4"]}, {"name": "  to direct", "cells": ["5", "-", "", "8"]},
                {"name": "p99", "cells": []}, {"name": "  to direct", "cells": ["not reached: x", "12", "3 of 9"]},
            ]}],
        })
    }

    fn at(row: &str, column: &str) -> [String; 3] {
        ["T", row, column].map(str::to_owned)
    }

    #[test]
    fn results_name_their_build_and_have_a_line_for_each_table_and_note() {
        let kept = kept(&report());
        assert_eq!(kept["build"], "cproxy 1 (table layout 2)");
        let text = compact(&kept);
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), kept);
        assert!(text.contains("\n\"One.\",\n\"Two.\"\n]") && !text.contains("samples"), "{text}");
        assert_eq!(text.lines().filter(|line| line.starts_with("{\"columns\"")).count(), 1);
    }

    #[test]
    fn cells_are_found_by_the_steps_to_them() {
        let report = report();
        assert_eq!(cell(&report, &at("p50", "ratio")), Some("2"));
        assert_eq!(cell(&report, &at("p50", "ms > ratio")), Some("4"));
        assert_eq!(cell(&report, &at("p99 > to direct", "ratio")), Some("12"));
        assert_eq!(short(&report, &at("p99 > to direct", "us")).as_deref(), Some("not reached"));
        assert_eq!(short(&report, &at("p99 > to direct", "ms")).as_deref(), Some("3 of 9"));
        for (row, column) in [("to direct", "ratio"), ("to direct", "ms"), ("p99", "us"), ("p1", "us"), ("p50", "x")] {
            assert_eq!(cell(&report, &at(row, column)), None, "{row}, {column}");
        }
    }

    #[test]
    fn a_cell_is_a_median_with_its_interval() {
        let text = |text: &str| text.to_owned();
        let estimate = Estimate { median: 1.32, low: 1.3, high: 1.34, text: text("1.32") };
        assert_eq!(Estimate::of("1.32 (1.30 .. 1.34)"), Some(estimate));
        let whole = Estimate { median: 12345.0, low: 12345.0, high: 12345.0, text: text("12,345") };
        assert_eq!(Estimate::of("12345"), Some(whole));
        assert_eq!(Estimate::of("1.316 (1.305 .. 1.336)").map(|estimate| estimate.text).as_deref(), Some("1.32"));
        assert_eq!(Estimate::of("71.7%").map(|estimate| estimate.median), Some(71.7));
        assert_eq!(Estimate::of("silence for 3 s"), None);
    }

    #[test]
    fn numbers_have_the_digits_that_matter() {
        let values = [0.0, -0.0, 1.0, 0.1 + 0.2, 1234.5, 1_500_000.0, -500.0, -1000.0];
        assert_eq!(values.map(grouped), ["0", "0", "1", "0.3", "1,234.5", "1,500,000", "-500", "-1,000"]);
    }
}
