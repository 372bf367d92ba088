//! `cproxy get --watch`: the rows, and then each that changes; of counters with their rates.
//!
//! For rows, once a second the raw maps are read, one call for each. Only if their digest is another one, the rows are
//! made, and the agent, which has just written the table, is asked for names. A change and its reversal within a second
//! are not seen.

use std::{
    collections::BTreeMap,
    thread,
    time::{Duration, Instant},
};

use cproxy_core::{printable, sorted_map};
use cproxy_datapath::bpf::{KernelReader, PinDir};
use serde::Serialize;

use super::{GetFormat, GetOptions};
use crate::{
    cli::output::{has_reader, layout, print_or_end},
    report::{Cell, Column, Fitted, Layout, TableRow},
};

/// Time between two looks at the table.
const INTERVAL: Duration = Duration::from_secs(1);

/// Change of a row, in the words of the Kubernetes API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
enum Change {
    Added,
    Modified,
    Deleted,
}

/// Line of JSON, as a watch of the Kubernetes API has it.
#[derive(Serialize)]
struct Event<'r, R> {
    r#type: Change,
    object: &'r R,
}

/// As wide as the longest change, since the first rows settle the columns.
const CHANGE: Column = Column::fixed("CHANGE  ");

/// Prints the rows that `read` returns, and then changed ones, until stdout is closed or the table is gone.
pub(super) fn watch<R, Rows>(
    options: &GetOptions,
    pins: &PinDir,
    read: impl Fn() -> anyhow::Result<Rows>,
) -> anyhow::Result<()>
where
    R: TableRow + Serialize + PartialEq,
    Rows: Iterator<Item = R>,
{
    let mut known = BTreeMap::new();
    let mut last = None;
    let mut printer = Printer { format: options.output, fitted: None };
    while has_reader() {
        pins.check_installed()?;
        // A change after the digest gives another digest in the next round.
        let digest = KernelReader::digest(pins)?;
        if last.replace(digest) != Some(digest) {
            let rows = sorted_map(read()?.map(|row| (row.key(), row)));
            if !print_or_end(&printer.text(&changes(&known, &rows))?)? {
                return Ok(());
            }
            known = rows;
        }
        thread::sleep(INTERVAL);
    }
    Ok(())
}

/// Counter or gauge that has changed, with its rate since the look before.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Rate<'c> {
    name: &'c str,
    value: u64,
    per_second: i64,
}

/// Prints all counters and gauges that `read` returns, and then changed ones with their rates, until stdout is closed
/// or the table is gone.
pub(super) fn watch_counters(
    options: &GetOptions,
    pins: &PinDir,
    read: impl Fn() -> anyhow::Result<Vec<(String, u64)>>,
) -> anyhow::Result<()> {
    let (mut at, mut known) = (Instant::now(), read()?);
    let all: Vec<_> = known.iter().map(|(name, value)| Rate { name, value: *value, per_second: 0 }).collect();
    let width = known.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
    let header = format!("{:width$} {:>15} {:>12}\n", "COUNTER", "VALUE", "PER SECOND");
    let mut text = if options.output == GetFormat::Json { String::new() } else { header };
    text.push_str(&rate_lines(options.output, width, &all)?);
    while has_reader() && print_or_end(&text)? {
        thread::sleep(INTERVAL);
        pins.check_installed()?;
        let (now, counters) = (Instant::now(), read()?);
        text = rate_lines(options.output, width, &rates(&known, &counters, now - at))?;
        (at, known) = (now, counters);
    }
    Ok(())
}

/// Counters that have another value than before. One that was not there before has no rate yet.
fn rates<'c>(before: &[(String, u64)], now: &'c [(String, u64)], elapsed: Duration) -> Vec<Rate<'c>> {
    let elapsed_ms = elapsed.as_millis().max(1) as i128;
    let changed = now.iter().filter(|counter| !before.contains(counter));
    let rate = |(name, value): &'c (String, u64)| {
        let old = before.iter().find(|(of, _)| of == name).map_or(*value, |(_, value)| *value);
        let change = (i128::from(*value) - i128::from(old)) * 1_000;
        // To the nearest number: a look comes slightly later than a second after the last.
        let per_second = (change + elapsed_ms / 2 * change.signum()) / elapsed_ms;
        Rate { name, value: *value, per_second: i64::try_from(per_second).unwrap_or(i64::MAX) }
    };
    changed.map(rate).collect()
}

fn rate_lines(format: GetFormat, width: usize, rates: &[Rate<'_>]) -> serde_json::Result<String> {
    let line = |rate: &Rate<'_>| {
        Ok(match format {
            GetFormat::Json => serde_json::to_string(rate)? + "\n",
            _ => format!("{:width$} {:>15} {:>12}\n", printable(rate.name), rate.value, rate.per_second),
        })
    };
    rates.iter().map(line).collect()
}

/// Differences between two states, in the order of their keys.
fn changes<'r, K: Ord, R: PartialEq>(old: &'r BTreeMap<K, R>, new: &'r BTreeMap<K, R>) -> Vec<(Change, &'r R)> {
    let gone = old.iter().filter(|(key, _)| !new.contains_key(key)).map(|(key, row)| (key, (Change::Deleted, row)));
    let others = new.iter().filter_map(|(key, row)| match old.get(key) {
        None => Some((key, (Change::Added, row))),
        Some(before) if before != row => Some((key, (Change::Modified, row))),
        Some(_) => None,
    });
    let mut all: Vec<_> = gone.chain(others).collect();
    all.sort_unstable_by_key(|(key, _)| *key);
    all.into_iter().map(|(_, change)| change).collect()
}

/// Printer of changes. The first ones settle the columns of a table.
struct Printer {
    format: GetFormat,
    fitted: Option<Fitted>,
}

impl Printer {
    fn text<R: TableRow + Serialize>(&mut self, changes: &[(Change, &R)]) -> serde_json::Result<String> {
        if self.format == GetFormat::Json {
            let line = |(change, object): &(Change, &R)| {
                Ok(format!("{}\n", serde_json::to_string(&Event { r#type: *change, object })?))
            };
            return changes.iter().map(line).collect();
        }
        let rows: Vec<_> = changes.iter().map(|(change, row)| cells(*change, *row)).collect();
        let columns: Vec<_> = [&[CHANGE], R::COLUMNS].concat();
        let mut text = String::new();
        let layout = if self.format == GetFormat::Wide { Layout::Wide } else { layout() };
        let fitted = self.fitted.get_or_insert_with(|| {
            let fitted = Fitted::new(&columns, &rows, layout);
            text = fitted.header(&columns);
            fitted
        });
        rows.iter().for_each(|row| text.push_str(&fitted.line(row)));
        Ok(text)
    }
}

fn cells<R: TableRow>(change: Change, row: &R) -> Vec<Cell> {
    let change = match change {
        Change::Added => "ADDED",
        Change::Modified => "MODIFIED",
        Change::Deleted => "DELETED",
    };
    [vec![Cell::Text(change.to_owned())], row.cells()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_differences_are_changes() {
        let old = BTreeMap::from([(1, "a"), (2, "b"), (3, "c")]);
        let new = BTreeMap::from([(0, "z"), (1, "a"), (2, "x")]);
        let found: Vec<_> = changes(&old, &new).into_iter().map(|(change, row)| (change, *row)).collect();
        assert_eq!(found, [(Change::Added, "z"), (Change::Modified, "x"), (Change::Deleted, "c")]);
        assert!(changes(&old, &old).is_empty());
    }

    #[test]
    fn rates_are_of_counters_that_have_changed() {
        let counters = |all: &[(&str, u64)]| all.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        let old: Vec<_> = counters(&[("same", 7), ("up", 10), ("down", 10)]);
        let new: Vec<_> = counters(&[("same", 7), ("up", 2_010), ("down", 0), ("new", 5)]);
        let found = rates(&old, &new, Duration::from_secs(2));
        let found: Vec<_> = found.iter().map(|rate| (rate.name, rate.value, rate.per_second)).collect();
        assert_eq!(found, [("up", 2_010, 1_000), ("down", 0, -5), ("new", 5, 0)]);
        let found = rates(&old, &new, Duration::from_millis(2_002));
        let found: Vec<_> = found.iter().map(|rate| rate.per_second).collect();
        assert_eq!(found, [999, -5, 0], "to the nearest number");
    }
}
