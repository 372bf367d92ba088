//! Health of the programs, as the agent reports it to `cproxy check`.

use std::fmt;

use serde::Serialize;
use serde_json::Value;

use super::fields::{bool_of, number_of, text_of, texts_of};

/// Outcome of a look at the programs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HealthReport {
    /// Differences between the programs and those that the agent has attached, which it could not repair.
    pub differences: Vec<String>,
    /// Outcome of the canary.
    pub canary: CanaryReport,
    /// Number of repairs since the agent's start.
    pub repairs: u64,
    /// Background tasks of the agent that have ended, and should not. An earlier agent does not say.
    pub ended_tasks: Vec<String>,
}

/// Outcome of the canary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CanaryReport {
    /// Calls through all hooks have had their effect.
    Reached,
    /// Calls through the hooks of one family have had their effect, and those of the other were not tried.
    Partly {
        /// The family that was not tried, and why.
        reason: String,
        /// Whether the machine does not have that family.
        is_absent: bool,
    },
    /// It says nothing about the hooks, for this reason.
    NotWalked(String),
    /// A hook has not had its effect.
    Failed(String),
}

impl CanaryReport {
    /// Report as an agent or its child has sent it; `None` if it has another form.
    #[must_use]
    pub fn read(report: &Value) -> Option<Self> {
        if report == "reached" {
            return Some(Self::Reached);
        }
        if let Some(partly) = report.get("partly") {
            return Some(Self::Partly { reason: text_of(partly, "reason")?, is_absent: bool_of(partly, "is_absent")? });
        }
        let not_walked = text_of(report, "not_walked").map(Self::NotWalked);
        not_walked.or_else(|| text_of(report, "failed").map(Self::Failed))
    }
}

impl HealthReport {
    /// Report as an agent has sent it; `None` if it has another form.
    #[must_use]
    pub fn read(report: &Value) -> Option<Self> {
        Some(Self {
            differences: texts_of(report, "differences")?,
            canary: CanaryReport::read(report.get("canary")?)?,
            repairs: number_of(report, "repairs")?,
            ended_tasks: texts_of(report, "ended_tasks").unwrap_or_default(),
        })
    }

    /// Obstacles to the programs' effect.
    pub fn problems(&self) -> impl Iterator<Item = String> {
        let symptom = match &self.canary {
            CanaryReport::Failed(symptom) => Some(symptom),
            CanaryReport::Reached | CanaryReport::Partly { .. } | CanaryReport::NotWalked(_) => None,
        };
        self.differences.iter().chain(symptom).cloned()
    }

    /// Whether the programs have their effect, as far as is known.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.differences.is_empty() && !matches!(self.canary, CanaryReport::Failed(_))
    }

    /// Whether all hooks were tried that the machine can have.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        matches!(self.canary, CanaryReport::Reached | CanaryReport::Partly { is_absent: true, .. })
    }
}

impl fmt::Display for HealthReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for difference in &self.differences {
            write!(f, "{difference}; ")?;
        }
        match &self.canary {
            CanaryReport::Reached => f.write_str("calls through each hook reach their target")?,
            CanaryReport::Partly { reason, .. } => {
                write!(f, "calls through the other hooks reach their target; not tried: {reason}")?;
            }
            CanaryReport::NotWalked(reason) => write!(f, "no call was tried: {reason}")?,
            CanaryReport::Failed(symptom) => f.write_str(symptom)?,
        }
        match self.repairs {
            0 => Ok(()),
            1 => f.write_str("; the programs were attached again once"),
            count => write!(f, "; the programs were attached again {count} times"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_names_what_is_wrong() {
        let report = |differences: &[&str], canary, repairs| HealthReport {
            differences: differences.iter().map(|&text| text.to_owned()).collect(),
            canary,
            repairs,
            ended_tasks: Vec::new(),
        };
        for (report, is_good, text) in [
            (report(&[], CanaryReport::Reached, 0), true, "calls through each hook reach their target"),
            (
                report(&[], CanaryReport::Partly { reason: "IPv6: why".to_owned(), is_absent: true }, 0),
                true,
                "calls through the other hooks reach their target; not tried: IPv6: why",
            ),
            (
                report(&[], CanaryReport::NotWalked("off".to_owned()), 2),
                true,
                "no call was tried: off; the programs were attached again 2 times",
            ),
            (
                report(&["connect4: gone"], CanaryReport::Failed("lost".to_owned()), 1),
                false,
                "connect4: gone; lost; the programs were attached again once",
            ),
        ] {
            assert_eq!((report.is_good(), &*report.to_string()), (is_good, text));
            assert_eq!(HealthReport::read(&serde_json::to_value(&report).unwrap()), Some(report));
        }
    }
}
