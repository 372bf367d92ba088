//! Outcomes of the cases that cyclonus generates.

use serde::Deserialize;

/// A case, as the program in `tests/policies/cases` tells of it.
#[derive(Deserialize)]
pub(crate) struct Case {
    #[serde(rename = "case")]
    pub(crate) name: String,
    /// Changes, each with the calls after it.
    pub(crate) steps: usize,
    pub(crate) calls: usize,
    /// Calls whose outcome was not that of cyclonus' matcher.
    #[serde(default)]
    pub(crate) differences: Vec<String>,
    /// Reason that kept it from its end.
    pub(crate) error: Option<String>,
}

impl Case {
    /// Why the case has failed, if it has.
    pub(crate) fn failure(&self) -> Option<String> {
        let found = self.error.iter().chain(&self.differences).map(String::as_str).collect::<Vec<_>>();
        (!found.is_empty()).then(|| format!("{}: {}", self.name, found.join("\n  ")))
    }
}
