//! Settings in force, each with the place that it comes from.

use serde::{Deserialize, Serialize};

use super::Config;

/// Setting in the output of `cproxy get config`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SettingRow {
    /// Name of the flag, without its dashes.
    pub name: String,
    /// Value; empty if there is none.
    pub value: String,
    /// Place that it comes from: `flag`, `environment`, a kernel parameter, a line of a file, or `default`.
    pub origin: String,
}

impl Config {
    /// All settings, those of the source first.
    #[must_use]
    pub fn rows(&self) -> Vec<SettingRow> {
        let row = |(flag, value): (&str, String)| {
            let name = flag.trim_start_matches('-').to_owned();
            let origin = self.origins.get(&name).map_or("default", String::as_str).to_owned();
            SettingRow { name, value, origin }
        };
        self.values().map(row).collect()
    }
}
