//! Output of `cproxy explain`.

use std::fmt::Write as _;

use serde::Serialize;

use super::{
    facts::{Facts, ProcessFacts},
    findings::{Finding, findings, process_obstacle},
    verdict::{Outcome, Verdict, verdicts},
};
use crate::report::{
    Colour, EndpointRow, Layout, Screen, ServiceReport, endpoints_text, one_line, pretty_json, printable_lines,
};

/// Columns of a state, and of a fact's name.
const STATE_COLUMNS: usize = 10;
const NAME_COLUMNS: usize = 10;

/// Indentation of the further lines of a verdict.
const VERDICT_INDENT: usize = 2;

/// Least room for the column WHY beside the others, and its indentation below them.
const WHY_COLUMNS_MIN: usize = 24;
const WHY_INDENT: usize = 4;

/// Maximum number of verdicts that a text shows.
const VERDICTS_MAX: usize = 20;

/// Answer in JSON.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct Answer<'a> {
    /// The destination, as it was given.
    target: String,
    /// Whether all calls get where they should. `None` if that cannot be said of one.
    ok: Option<bool>,
    /// Calls that the destination stands for, at least one.
    calls: Vec<Verdict>,
    /// Facts that decide, each with its state.
    findings: Vec<Finding>,
    /// Use of each endpoint of the Services.
    endpoints: Vec<&'a EndpointRow>,
}

fn answer(facts: &Facts) -> Answer<'_> {
    let calls = verdicts(facts);
    let services = facts.agent.iter().flat_map(|agent| &agent.report.services);
    Answer {
        target: facts.target.to_string(),
        ok: calls.iter().try_fold(true, |all, verdict| Some(all && verdict.ok?)),
        findings: findings(facts),
        endpoints: services.flat_map(|service| &service.endpoints).collect(),
        calls,
    }
}

/// The answer as a JSON object, and whether all calls get where they should.
///
/// # Errors
/// Never for these types.
pub fn json(facts: &Facts) -> serde_json::Result<(String, Option<bool>)> {
    let answer = answer(facts);
    Ok((pretty_json(&answer)?, answer.ok))
}

/// The answer as text, and whether all calls get where they should.
#[must_use]
pub fn text(facts: &Facts, screen: &Screen) -> (String, Option<bool>) {
    let Answer { ok, calls, findings, .. } = answer(facts);
    let mut text = String::new();
    for verdict in calls.iter().take(VERDICTS_MAX) {
        text.push_str(&line_of(verdict, screen));
    }
    if calls.len() > VERDICTS_MAX {
        // Writing to a String does not fail.
        writeln!(text, "and {} more", calls.len() - VERDICTS_MAX).ok();
    }
    if let Some(obstacle) = asker_obstacle(facts, &calls) {
        let line = format!(
            "This is so for processes that cproxy serves, and this shell is not one: {obstacle}; --pid PID asks for \
             another process"
        );
        writeln!(text, "{}", screen.hanging(VERDICT_INDENT, &one_line(&line))).ok();
    }
    text.push('\n');
    for Finding { state, name, detail } in &findings {
        let gap = " ".repeat(STATE_COLUMNS.saturating_sub(state.as_str().len()));
        let state = screen.painted(state.as_str(), state.colour());
        let detail = screen.hanging(STATE_COLUMNS + NAME_COLUMNS, &one_line(detail));
        writeln!(text, "{state}{gap}{name:NAME_COLUMNS$}{detail}").ok();
    }
    let services = facts.agent.iter().flat_map(|agent| &agent.report.services);
    for ServiceReport { service, endpoints, .. } in services.filter(|service| !service.endpoints.is_empty()) {
        let table = fitted(&printable_lines(&endpoints_text(endpoints)), screen);
        write!(text, "\nService {}:\n{table}", one_line(service)).ok();
    }
    (text, ok)
}

/// A table whose last column, WHY, hangs within the screen: behind the others, or below them if there is no room.
fn fitted(table: &str, screen: &Screen) -> String {
    let indent = table.lines().next().and_then(|header| header.rfind("WHY")).unwrap_or_default();
    let line = |line: &str| {
        let at = line.char_indices().nth(indent).map_or(line.len(), |(at, _)| at);
        let (others, why) = line.split_at(at);
        match screen.layout {
            Layout::Columns(columns) if line.chars().count() > columns && indent + WHY_COLUMNS_MIN > columns => {
                let why = screen.hanging(WHY_INDENT, why);
                format!("{}\n{:WHY_INDENT$}{why}\n", others.trim_end(), "")
            }
            _ => format!("{others}{}\n", screen.hanging(indent, why)),
        }
    };
    table.lines().map(line).collect()
}

fn line_of(verdict: &Verdict, screen: &Screen) -> String {
    let Verdict { call, outcome, ok, reason, .. } = verdict;
    let (word, colour) = match (outcome.as_str(), ok) {
        (word, Some(true)) => (word, Colour::Green),
        (word, Some(false)) => (word, Colour::Red),
        (word, None) => (word, Colour::Yellow),
    };
    let mark = if matches!(outcome, Outcome::NotFound | Outcome::Unknown) { ":" } else { "" };
    let line = screen.hanging(VERDICT_INDENT, &one_line(&format_args!("{call}: {word}{mark} {reason}")));
    line.replacen(word, &screen.painted(word, colour), 1) + "\n"
}

/// Why this process is not served, if the verdicts are those of one that is.
fn asker_obstacle(facts: &Facts, calls: &[Verdict]) -> Option<String> {
    let is_served =
        |verdict: &Verdict| matches!(verdict.outcome, Outcome::Forwarded | Outcome::Refused | Outcome::Dropped);
    let asker: Option<&ProcessFacts> = facts.process.as_ref().ok().filter(|process| process.is_self);
    asker.filter(|_| calls.iter().any(is_served)).and_then(process_obstacle).map(|(_, obstacle)| obstacle)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_column_fits_the_screen() {
        let table = "ENDPOINT   USED   WHY\n10.0.0.1   no     one two three four five six seven\n";
        let on = |columns| fitted(table, &Screen { layout: Layout::Columns(columns), has_colours: false });
        assert_eq!(on(80), table);
        assert_eq!(
            on(44),
            "ENDPOINT   USED   WHY\n10.0.0.1   no     one two three four five\n                  six seven\n"
        );
        assert_eq!(on(36), "ENDPOINT   USED   WHY\n10.0.0.1   no\n    one two three four five six\n    seven\n");
        assert_eq!(fitted(table, &Screen::PLAIN), table);
    }
}
