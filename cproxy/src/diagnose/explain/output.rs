//! Output of `cproxy explain`.

use std::fmt::Write as _;

use serde::Serialize;

use super::{
    facts::Facts,
    findings::{Finding, findings},
    verdict::{Outcome, Verdict, verdicts},
};
use crate::report::{Colour, EndpointRow, Screen, endpoints_text, one_line, printable_lines};

/// Columns of a state, and of a fact's name.
const STATE_COLUMNS: usize = 10;
const NAME_COLUMNS: usize = 10;
/// Indentation of the further lines of a verdict.
const VERDICT_INDENT: usize = 2;

/// Maximum number of verdicts that a text shows.
const VERDICTS_MAX: usize = 20;

/// Answer in JSON.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct Answer<'a> {
    /// The destination, as it was given.
    target: String,
    /// Whether all calls are answered.
    answered: bool,
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
        answered: calls.iter().all(|verdict| verdict.answered),
        findings: findings(facts),
        endpoints: services.flat_map(|service| &service.endpoints).collect(),
        calls,
    }
}

/// The answer as a JSON object, and whether all calls are answered.
///
/// # Errors
/// Never for these types.
pub fn json(facts: &Facts) -> serde_json::Result<(String, bool)> {
    let answer = answer(facts);
    Ok((serde_json::to_string_pretty(&answer)?, answer.answered))
}

/// The answer as text, and whether all calls are answered.
#[must_use]
pub fn text(facts: &Facts, screen: &Screen) -> (String, bool) {
    let Answer { answered, calls, findings, endpoints, .. } = answer(facts);
    let mut text = String::new();
    for verdict in calls.iter().take(VERDICTS_MAX) {
        let word = match verdict.outcome {
            Outcome::Unknown => "unknown",
            _ if verdict.answered => "answered",
            _ => "NOT answered",
        };
        // Writing to a String does not fail.
        let colour = if verdict.answered { Colour::Green } else { Colour::Red };
        let reason =
            screen.hanging(VERDICT_INDENT, &one_line(&format_args!("{}: {word}; {}", verdict.call, verdict.reason)));
        text.push_str(&reason.replacen(word, &screen.painted(word, colour), 1));
        text.push('\n');
    }
    if calls.len() > VERDICTS_MAX {
        writeln!(text, "and {} more", calls.len() - VERDICTS_MAX).ok();
    }
    text.push('\n');
    for Finding { state, name, detail } in &findings {
        let gap = " ".repeat(STATE_COLUMNS.saturating_sub(state.as_str().len()));
        let state = screen.painted(state.as_str(), state.colour());
        let detail = screen.hanging(STATE_COLUMNS + NAME_COLUMNS, &one_line(detail));
        writeln!(text, "{state}{gap}{name:NAME_COLUMNS$}{detail}").ok();
    }
    if !endpoints.is_empty() {
        let endpoints: Vec<_> = endpoints.into_iter().cloned().collect();
        write!(text, "\n{}", printable_lines(&endpoints_text(&endpoints))).ok();
    }
    (text, answered)
}
