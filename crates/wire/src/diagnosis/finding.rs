//! Outcomes of the steps.

use std::fmt::Display;

use cproxy_core::printable;

/// State of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grade {
    /// It works.
    Ok,
    /// It works in part, or not for long; the text says what follows.
    Degraded,
    /// It does not work; the text says what to do.
    Missing,
}

/// Outcome of one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Name of the line.
    pub name: String,
    /// The state.
    pub grade: Grade,
    /// Whether the agent gets no Services without it.
    pub is_required: bool,
    /// Details, without secrets and control characters.
    pub detail: String,
}

impl Finding {
    /// Outcome of a step without which the agent gets no Services.
    pub(super) fn required(name: &str, grade: Grade, detail: impl Display) -> Self {
        Self { name: name.to_owned(), grade, is_required: true, detail: printable(&detail.to_string()) }
    }

    /// Outcome of another step.
    pub(super) fn optional(name: &str, grade: Grade, detail: impl Display) -> Self {
        Self { is_required: false, ..Self::required(name, grade, detail) }
    }
}
