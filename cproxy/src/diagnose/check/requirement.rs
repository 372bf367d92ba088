//! Requirements, as `cproxy check` prints them.

use std::fmt::Display;

use cproxy_wire::{Finding, Grade};
use serde::Serialize;

use crate::report::one_line;

/// One requirement. Names and fields are a contract, like those of the table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct Requirement {
    /// Its name.
    pub(super) name: String,
    /// Whether it is met.
    pub(super) state: RequirementState,
    /// Whether cproxy fails without it.
    pub(super) required: bool,
    /// How it is met, or the cause of the failure and its remedy.
    pub(super) detail: String,
}

/// The state of a requirement, and its detail.
pub(super) type CheckResult = (RequirementState, String);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub(crate) enum RequirementState {
    /// It is met.
    Ok,
    /// cproxy works without it, with less function.
    Degraded,
    /// It is absent.
    Missing,
    /// It cannot be checked by this user.
    Unknown,
}

impl RequirementState {
    fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Degraded => "degraded",
            Self::Missing => "missing",
            Self::Unknown => "unknown",
        }
    }
}

impl From<Finding> for Requirement {
    fn from(finding: Finding) -> Self {
        let state = match finding.grade {
            Grade::Ok => RequirementState::Ok,
            Grade::Degraded => RequirementState::Degraded,
            Grade::Missing => RequirementState::Missing,
        };
        Self { name: finding.name, state, required: finding.is_required, detail: one_line(&finding.detail) }
    }
}

pub(super) fn ok(detail: impl Display) -> CheckResult {
    (RequirementState::Ok, one_line(&detail))
}

pub(super) fn degraded(detail: impl Display) -> CheckResult {
    (RequirementState::Degraded, one_line(&detail))
}

pub(super) fn missing(detail: impl Display) -> CheckResult {
    (RequirementState::Missing, one_line(&detail))
}

pub(super) fn unknown(detail: impl Display) -> CheckResult {
    (RequirementState::Unknown, one_line(&detail))
}

pub(super) fn from_result(result: Result<impl Display, impl Display>) -> CheckResult {
    result.map_or_else(missing, ok)
}

pub(super) fn required(name: impl Into<String>, (state, detail): CheckResult) -> Requirement {
    Requirement { name: name.into(), state, required: true, detail }
}

pub(super) fn optional(name: impl Into<String>, result: CheckResult) -> Requirement {
    Requirement { required: false, ..required(name, result) }
}

/// Names of the required things that are missing.
pub(crate) fn lacking(requirements: &[Requirement]) -> Vec<&str> {
    let lacks = |requirement: &&Requirement| requirement.required && requirement.state == RequirementState::Missing;
    requirements.iter().filter(lacks).map(|requirement| requirement.name.as_str()).collect()
}

/// The requirements as aligned columns.
pub(crate) fn text(requirements: &[Requirement]) -> String {
    let width = requirements.iter().map(|requirement| requirement.name.len()).max().unwrap_or(0);
    let line = |Requirement { name, state, detail, .. }: &Requirement| {
        format!("{:<10}{name:<width$}  {detail}\n", state.as_str())
    };
    requirements.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn examples() -> [Requirement; 4] {
        [
            required("kernel", ok("6.18.0")),
            required("map_sk_storage", missing("two\n lines")),
            optional("errno_helper", degraded("EPERM")),
            optional("socket_dump", missing("no INET_DIAG")),
        ]
    }

    #[test]
    fn text_has_one_aligned_line_for_each_requirement() {
        let expected = "\
ok        kernel          6.18.0
missing   map_sk_storage  two lines
degraded  errno_helper    EPERM
missing   socket_dump     no INET_DIAG
";
        assert_eq!(text(&examples()), expected);
        assert_eq!(text(&[]), "");
    }

    #[test]
    fn json_is_the_contract() {
        let json = serde_json::to_value(&examples()[1..3]).unwrap();
        let expected = serde_json::json!([
            {"name": "map_sk_storage", "state": "missing", "required": true, "detail": "two lines"},
            {"name": "errno_helper", "state": "degraded", "required": false, "detail": "EPERM"},
        ]);
        assert_eq!(json, expected);
    }

    #[test]
    fn only_what_is_required_is_lacking() {
        assert_eq!(lacking(&examples()), ["map_sk_storage"]);
    }
}
