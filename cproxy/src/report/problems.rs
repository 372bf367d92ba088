//! Problems of objects and files.

use cproxy_core::{Problem, printable};
use serde::Serialize;
use serde_json::Value;

use super::{
    fields::{number_of, text_of},
    table::{Cell, Column, TableRow},
    time::time,
};

/// Present problem in the output of `cproxy get problems`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ProblemRow {
    /// The object, as kind and namespace/name, or the file.
    pub object: String,
    /// Path of the field from the object's root; empty for the object as a whole.
    pub field: String,
    /// Error and its consequence.
    pub problem: String,
    /// Seconds since the agent has it.
    pub since_seconds: u64,
}

impl ProblemRow {
    /// Row as an agent has sent it, which may be of another version.
    #[must_use]
    pub fn read(row: &Value) -> Self {
        Self {
            object: text_of(row, "object").unwrap_or_default(),
            field: text_of(row, "field").unwrap_or_default(),
            problem: text_of(row, "problem").unwrap_or_default(),
            since_seconds: number_of(row, "since_seconds").unwrap_or_default(),
        }
    }

    /// Row of a problem that the agent has had for some time.
    #[must_use]
    pub fn new(problem: &Problem, since_seconds: u64) -> Self {
        let Problem { object, field, message } = problem.clone();
        Self { object, field, problem: message, since_seconds }
    }

    /// Name for `-o name`.
    #[must_use]
    pub fn name(&self) -> String {
        printable(&self.object)
    }
}

impl TableRow for ProblemRow {
    const COLUMNS: &'static [Column] = &[Column::name("OBJECT"), Column::fixed("SINCE"), Column::fixed("PROBLEM")];

    type Key = (String, String, String);

    fn key(&self) -> Self::Key {
        (self.object.clone(), self.field.clone(), self.problem.clone())
    }

    fn cells(&self) -> Vec<Cell> {
        let separator = if self.field.is_empty() { "" } else { ": " };
        let problem = format!("{}{separator}{}", self.field, self.problem);
        let [object, since] = [self.object.clone(), time(self.since_seconds)].map(|cell| Cell::or_dash(Some(&cell)));
        vec![object, since, Cell::Prose(printable(&problem))]
    }
}
