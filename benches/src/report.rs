//! Results of a benchmark: tables and notes on the terminal, and all samples in files.

mod figure;
mod verdict;

use std::{
    env,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};
use jiff::Timestamp;
use serde_json::{Value, json};

pub use self::{
    figure::Figure,
    verdict::{Target, Verdict},
};
use crate::{machine::Machine, paired::Estimate};

/// Note in every report of a run with `--quick`.
const QUICK: &str = "Run with --quick, which only shows that everything works: the figures mean little.";

/// Result of a benchmark.
#[derive(Clone, Debug)]
pub struct Report {
    /// Name that `cargo xtask bench` uses.
    pub benchmark: &'static str,
    /// Names and versions of the programs that took part.
    pub versions: Vec<(String, String)>,
    /// Short tables for a quick overview.
    pub summary: Vec<Table>,
    /// Tables in the order in which they are shown.
    pub tables: Vec<Table>,
    /// Notes on the method and on limits of comparison, each a paragraph.
    pub notes: Vec<String>,
    /// Failed measurements, with their reasons.
    pub failures: Vec<String>,
    /// All samples.
    pub samples: Value,
}

/// Rows and columns of text.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// Heading above the table.
    pub title: String,
    /// Headings of the columns after the first, which holds the names of the rows.
    pub columns: Vec<String>,
    /// Row names with a cell for each column.
    pub rows: Vec<(String, Vec<String>)>,
}

impl Report {
    /// An empty report.
    #[must_use]
    pub fn new(benchmark: &'static str) -> Self {
        Self {
            benchmark,
            versions: Vec::new(),
            summary: Vec::new(),
            tables: Vec::new(),
            notes: Vec::new(),
            failures: Vec::new(),
            samples: Value::Null,
        }
    }

    /// Adds the first line of a program's version output, from stdout or stderr, if there is one.
    pub fn add_version(&mut self, name: &str, program: impl AsRef<OsStr>, args: &[&str]) {
        self.versions.extend(version_of(program, args).map(|version| (name.to_owned(), version)));
    }

    /// Adds samples under a name, if all samples have one.
    pub fn add_samples(&mut self, name: &str, samples: Value) {
        if let Value::Object(all) = &mut self.samples {
            all.insert(name.to_owned(), samples);
        }
    }

    /// Prints and writes the report.
    ///
    /// # Errors
    /// A file cannot be written, or something could not be measured.
    pub fn finish(mut self, is_quick: bool, output: Option<&Path>) -> Result<()> {
        self.notes.extend(is_quick.then(|| QUICK.to_owned()));
        self.print();
        println!("every sample: {}", self.write(output)?.display());
        ensure!(self.failures.is_empty(), "could not be measured: {}", self.failures.join("; "));
        Ok(())
    }

    fn print(&self) {
        for table in self.tables.iter().chain(&self.summary) {
            println!("{}", table.text());
        }
        println!("{}", self.foot(&Machine::this(), &command()));
    }

    /// Writes to `output`, by default `<benchmark>.json` in the directory `bench` of cargo's output. Returns its path.
    fn write(&self, output: Option<&Path>) -> Result<PathBuf> {
        let output = output.map_or_else(|| default_output(self.benchmark), Path::to_owned);
        let result = self.json(&Machine::this(), &format!("{:.0}", Timestamp::now()), &command());
        write_file(&output, &format!("{result:#}\n"))?;
        Ok(output)
    }

    fn foot(&self, machine: &Machine, command: &str) -> String {
        let versions = self.versions.iter().map(|(name, version)| format!("{name}: {version}\n           "));
        let versions = versions.collect::<String>();
        let mut foot = format!("machine:   {machine}\nversions:  {}\ncommand:   {command}\n", versions.trim_end());
        for note in &self.notes {
            foot.push('\n');
            foot.push_str(&wrapped(note));
        }
        for failure in &self.failures {
            foot.push_str("\nFailed: ");
            foot.push_str(&wrapped(failure));
        }
        foot
    }

    fn json(&self, machine: &Machine, date: &str, command: &str) -> Value {
        let version = |(name, version): &(String, String)| json!({"name": name, "version": version});
        json!({
            "benchmark": self.benchmark, "date": date, "machine": machine.json(), "kernel": machine.kernel,
            "versions": self.versions.iter().map(version).collect::<Vec<_>>(), "command": command,
            "summary": self.summary.iter().map(Table::json).collect::<Vec<_>>(),
            "tables": self.tables.iter().map(Table::json).collect::<Vec<_>>(),
            "notes": self.notes, "failures": self.failures, "samples": self.samples,
        })
    }
}

impl Table {
    /// The table as text: names to the left, cells to the right.
    fn text(&self) -> String {
        let width_of =
            |cells: &mut dyn Iterator<Item = &String>| cells.map(|cell| cell.chars().count()).max().unwrap_or(0);
        let first = width_of(&mut self.rows.iter().map(|(name, _)| name));
        let widths = self.columns.iter().enumerate().map(|(number, heading)| {
            let cells = self.rows.iter().filter_map(|(_, cells)| cells.get(number));
            width_of(&mut cells.chain([heading]))
        });
        let widths = widths.collect::<Vec<_>>();
        let line = |name: &str, cells: &[String]| {
            let cells = widths.iter().zip(cells).map(|(&width, cell)| format!("  {cell:>width$}")).collect::<String>();
            format!("  {name:<first$}{cells}").trim_end().to_owned() + "\n"
        };
        let rows = self.rows.iter().map(|(name, cells)| line(name, cells)).collect::<String>();
        format!("{}\n{}{rows}", self.title, line("", &self.columns))
    }

    fn json(&self) -> Value {
        let row = |(name, cells): &(String, Vec<String>)| json!({"name": name, "cells": cells});
        json!({
            "title": self.title, "columns": self.columns, "rows": self.rows.iter().map(row).collect::<Vec<_>>(),
        })
    }
}

/// A table's cell with the estimate, the only sample, or `-`, in significant digits.
#[must_use]
pub fn cell(samples: Vec<f64>) -> String {
    let count = samples.len();
    let Some(estimate) = Estimate::of(samples) else { return "-".to_owned() };
    let digits = match estimate.median.abs() {
        0.0..10.0 => 2,
        10.0..1_000.0 => 1,
        _ => 0,
    };
    if count == 1 { format!("{:.digits$}", estimate.median) } else { format!("{estimate:.digits$}") }
}

/// First line of a program's version output, from stdout or stderr.
fn version_of(program: impl AsRef<OsStr>, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output();
    let lines = output.map(|output| [output.stdout, output.stderr].map(|bytes| first_line(&bytes))).unwrap_or_default();
    lines.into_iter().flatten().next()
}

/// Checks that the file of results can be written, before any work is done for it.
///
/// # Errors
/// It cannot.
pub fn check_output(output: Option<&Path>) -> Result<()> {
    let Some(output) = output else { return Ok(()) };
    let existed = output.exists();
    fs::create_dir_all(output.parent().unwrap_or(Path::new(".")))
        .and_then(|()| fs::OpenOptions::new().create(true).append(true).open(output))
        .and_then(|_| if existed { Ok(()) } else { fs::remove_file(output) })
        .with_context(|| format!("--output: writing {}", output.display()))
}

fn first_line(bytes: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(bytes);
    text.lines().map(str::trim).find(|line| !line.is_empty()).map(str::to_owned)
}

/// Command line of this process, without the directory of the program, quoted for a shell.
fn command() -> String {
    let mut words = env::args_os().map(|word| word.to_string_lossy().into_owned());
    let program = words.next().unwrap_or_default();
    let name = Path::new(&program).file_name().map_or(program.clone(), |name| name.to_string_lossy().into_owned());
    [name].into_iter().chain(words.map(|word| quoted(&word))).collect::<Vec<_>>().join(" ")
}

fn quoted(word: &str) -> String {
    let is_plain = |char: char| char.is_alphanumeric() || "-_=./,:+@%".contains(char);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Text in lines of at most 120 characters, where words allow.
fn wrapped(text: &str) -> String {
    const WIDTH: usize = 120;
    let (mut lines, mut length) = (String::new(), 0);
    for word in text.split_whitespace() {
        let width = word.chars().count();
        if length > 0 && length + 1 + width > WIDTH {
            lines.push('\n');
            length = 0;
        } else if length > 0 {
            lines.push(' ');
            length += 1;
        }
        lines.push_str(word);
        length += width;
    }
    lines + "\n"
}

fn write_file(path: &Path, text: &str) -> Result<()> {
    let directory = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(directory)
        .and_then(|()| fs::write(path, text))
        .with_context(|| format!("writing {}", path.display()))
}

/// Default path of the results. The benchmark itself runs from cargo's output.
fn default_output(benchmark: &str) -> PathBuf {
    let own = env::current_exe().unwrap_or_default();
    own.ancestors().nth(2).unwrap_or(Path::new(".")).join("bench").join(benchmark).with_extension("json")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let row = |name: &str, cells: [&str; 2]| (name.to_owned(), cells.map(str::to_owned).into());
        Report {
            versions: vec![("cproxy".to_owned(), "cproxy 1".to_owned()), ("wrk".to_owned(), "wrk 4".to_owned())],
            tables: vec![Table {
                title: "Cost (ms)".to_owned(),
                columns: ["p50", "the longest"].map(str::to_owned).into(),
                rows: vec![row("a", ["1.0", "2.0"]), row("longer", ["10.0", "é"])],
            }],
            notes: vec!["Compare with care.".to_owned()],
            failures: vec!["ipvs: no such kernel".to_owned()],
            samples: json!([1, 2]),
            ..Report::new("agent")
        }
    }

    fn machine() -> Machine {
        Machine { processor: "P".to_owned(), cpus: 2, kernel: "6.1".to_owned() }
    }

    #[test]
    fn columns_stand_below_their_headings() {
        let text = report().tables[0].text();
        assert_eq!(
            text,
            "Cost (ms)\n           p50  the longest\n  a        1.0          2.0\n  longer  10.0            é\n"
        );
        assert_eq!(Table::default().text(), "\n\n");
    }

    #[test]
    fn a_cell_has_as_many_digits_as_say_something() {
        assert_eq!(cell(Vec::new()), "-");
        assert_eq!(cell(vec![1.234]), "1.23");
        assert_eq!(cell(vec![-12.34]), "-12.3");
        assert_eq!(cell(vec![1_000.0, 1_234.5, 2_000.0]), "1234 (1000 .. 2000)");
    }

    #[test]
    fn the_foot_says_on_what_and_how() {
        let foot = report().foot(&machine(), "agent --quick");
        assert_eq!(
            foot,
            "machine:   P, 2 CPUs, Linux 6.1\nversions:  cproxy: cproxy 1\n           wrk: wrk 4\ncommand:   agent \
             --quick\n\nCompare with care.\n\nFailed: ipvs: no such kernel\n"
        );
    }

    #[test]
    fn everything_is_in_the_result() {
        let json = report().json(&machine(), "2026-01-02T03:04:05Z", "agent");
        let text = |pointer| json.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        assert_eq!(text("/tables/0/rows/1/cells/0"), "10.0");
        assert_eq!((text("/kernel"), text("/machine/kernel")), ("6.1", "6.1"));
        assert_eq!((text("/versions/1/name"), text("/notes/0")), ("wrk", "Compare with care."));
        assert_eq!(json.pointer("/samples/1"), Some(&Value::from(2)));
    }

    #[test]
    fn results_are_written_even_if_something_failed() {
        let dir = env::temp_dir().join(format!("cproxy-benches-report-{}", std::process::id()));
        let output = dir.join("below/result.json");
        let error = report().finish(false, Some(&output)).unwrap_err();
        assert!(error.to_string().contains("no such kernel"), "{error}");
        let json: Value = serde_json::from_str(&fs::read_to_string(&output).unwrap()).unwrap();
        assert_eq!((&json["benchmark"], &json["failures"][0]), (&"agent".into(), &"ipvs: no such kernel".into()));
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn output_is_tried_beforehand_and_left_as_it_was() {
        let dir = env::temp_dir().join(format!("cproxy-benches-output-{}", std::process::id()));
        let output = dir.join("result.json");
        check_output(Some(&output)).unwrap();
        assert!(!output.exists());
        fs::write(&output, "before").unwrap();
        check_output(Some(&output)).unwrap();
        assert_eq!(fs::read_to_string(&output).unwrap(), "before");
        assert!(check_output(Some(&output.join("below"))).is_err());
        assert!(check_output(None).is_ok());
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn versions_come_from_either_output() {
        assert_eq!(version_of("sh", &["-c", "echo; echo ' one '; echo two"]).as_deref(), Some("one"));
        assert_eq!(version_of("sh", &["-c", "echo one >&2; exit 1"]).as_deref(), Some("one"));
        assert_eq!(version_of("true", &[]), None);
        assert_eq!(version_of("/does/not/exist", &[]), None);
    }

    #[test]
    fn arguments_are_quoted_where_a_shell_needs_it() {
        assert_eq!(["--shape=1x2", "a b", "it's", ""].map(quoted), ["--shape=1x2", "'a b'", r"'it'\''s'", "''"]);
    }

    #[test]
    fn long_notes_are_wrapped_between_words() {
        let text = wrapped(&"word ".repeat(60));
        assert!(text.lines().all(|line| line.len() <= 120) && text.lines().count() == 3, "{text}");
        assert_eq!(text.split_whitespace().count(), 60);
        assert_eq!(wrapped(""), "\n");
    }
}
