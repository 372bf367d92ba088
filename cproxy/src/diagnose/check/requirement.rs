//! Requirements, as `cproxy check` prints them.

use std::fmt::Display;

use cproxy_wire::{Finding, Grade};
use serde::Serialize;

use crate::report::{Colour, Layout, Screen, one_line};

/// Columns of a state.
const STATE_COLUMNS: usize = 10;

/// Name of the line of all kernel features.
const KERNEL_FEATURES: &str = "kernel_features";

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

impl RequirementState {
    fn colour(self) -> Colour {
        match self {
            Self::Ok => Colour::Green,
            Self::Degraded | Self::Unknown => Colour::Yellow,
            Self::Missing => Colour::Red,
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

/// The requirements as aligned columns, and a line that sums them up. Features of the kernel with the same state that
/// need no remedy are one line.
pub(crate) fn text(requirements: &[Requirement], screen: &Screen) -> String {
    let is_wide = matches!(screen.layout, Layout::Wide);
    let folded = if is_wide { requirements.to_vec() } else { folded(requirements) };
    let width = folded.iter().map(|requirement| requirement.name.len()).max().unwrap_or(0);
    let line = |Requirement { name, state, detail, .. }: &Requirement| {
        let gap = " ".repeat(STATE_COLUMNS - state.as_str().len());
        let state = screen.painted(state.as_str(), state.colour());
        format!("{state}{gap}{name:<width$}  {}\n", screen.hanging(STATE_COLUMNS + width + 2, detail))
    };
    folded.iter().map(line).collect()
}

/// Words that sum up requirements which are all met, if cproxy needs them.
pub(crate) fn summary(requirements: &[Requirement]) -> String {
    let not_ok = requirements.iter().filter(|requirement| requirement.state != RequirementState::Ok);
    let names: Vec<_> = folded(&not_ok.cloned().collect::<Vec<_>>()).into_iter().map(|of| of.name).collect();
    match names.as_slice() {
        [] => "cproxy can run here".to_owned(),
        names => format!("cproxy can run here, with less than all: {}", names.join(", ")),
    }
}

/// Whether a requirement is a feature of the kernel, of which there are many.
fn is_kernel_feature(name: &str) -> bool {
    ["map_", "program_"].iter().any(|start| name.starts_with(start)) || matches!(name, "cgroup_bpf" | "errno_helper")
}

/// The requirements with one line in place of kernel features that are there, and one of those that are not known.
fn folded(requirements: &[Requirement]) -> Vec<Requirement> {
    let is_folded = |requirement: &&Requirement| {
        is_kernel_feature(&requirement.name)
            && matches!(requirement.state, RequirementState::Ok | RequirementState::Unknown)
    };
    let all = requirements.iter().filter(|requirement| is_kernel_feature(&requirement.name)).count();
    let mut lines = Vec::<Requirement>::new();
    for requirement in requirements {
        if !is_folded(&requirement) {
            lines.push(requirement.clone());
            continue;
        }
        let same = requirements.iter().filter(is_folded).filter(|other| other.state == requirement.state);
        let count = same.count();
        let detail = match requirement.state {
            RequirementState::Unknown => requirement.detail.clone(),
            _ => format!("{count} of {all} are there; -o wide lists them"),
        };
        let name = KERNEL_FEATURES.to_owned();
        if !lines.iter().any(|line| line.name == name && line.state == requirement.state) {
            lines.push(Requirement { name, detail, ..requirement.clone() });
        }
    }
    lines
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
        let wide = Screen { layout: Layout::Wide, has_colours: false };
        assert_eq!(text(&examples(), &wide), expected);
        assert_eq!(text(&[], &wide), "");
    }

    #[test]
    fn features_of_the_kernel_that_need_no_remedy_are_one_line() {
        let features = [
            required("kernel", ok("6.18.0")),
            required("map_hash", ok("can be made")),
            required("map_array", missing("build it")),
            required("program_connect4", ok("loads")),
            optional("errno_helper", unknown("run this as root")),
        ];
        let expected = "\
ok        kernel           6.18.0
ok        kernel_features  2 of 4 are there; -o wide lists them
missing   map_array        build it
unknown   kernel_features  run this as root
";
        assert_eq!(text(&features, &Screen::PLAIN), expected);
        assert_eq!(summary(&features[..2]), "cproxy can run here");
        assert_eq!(summary(&features), "cproxy can run here, with less than all: map_array, kernel_features");
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
