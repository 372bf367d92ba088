//! Health of the programs, as the agent reports it to `cproxy check`.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Outcome of a look at the programs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HealthReport {
    /// Differences between the programs and those that the agent has attached, which it could not repair.
    pub differences: Vec<String>,
    /// Outcome of the canary.
    pub canary: CanaryReport,
    /// Number of repairs since the agent's start.
    pub repairs: u64,
    /// Background tasks of the agent that have ended, and should not. An earlier agent does not say.
    #[serde(default)]
    pub ended_tasks: Vec<String>,
}

/// Outcome of the canary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

impl HealthReport {
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
            let json = serde_json::to_string(&report).unwrap();
            assert_eq!(serde_json::from_str::<HealthReport>(&json).unwrap(), report);
        }
    }
}
