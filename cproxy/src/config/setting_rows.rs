//! Settings in force, each with the place that it comes from.

use serde::Serialize;
use serde_json::Value;

use super::{Config, Secrecy, Setting, SourceSettings};

/// Value of a setting that may not be shown.
const SECRET: &str = "(secret)";

/// Setting in the output of `cproxy get config`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SettingRow {
    /// Name of the flag, without its dashes.
    pub name: String,
    /// Value; `None` if there is none.
    pub value: Option<String>,
    /// Place that it comes from: `flag`, `environment`, a kernel parameter, a line of a file, or `default`.
    pub origin: String,
}

impl SettingRow {
    /// Row as an agent has sent it; `None` if it has another form.
    #[must_use]
    pub fn read(row: &Value) -> Option<Self> {
        let text = |field: &str| row.get(field).and_then(Value::as_str).map(str::to_owned);
        Some(Self { name: text("name")?, value: text("value"), origin: text("origin")? })
    }
}

impl Config {
    /// All settings, those of the source first.
    #[must_use]
    pub fn rows(&self) -> Vec<SettingRow> {
        let row = |(setting, value): (&Setting, String)| {
            let (name, origin) = (setting.name.to_owned(), self.switch.origins.of(setting.name).to_owned());
            SettingRow { name, value: Some(setting.shown(value)).filter(|value| !value.is_empty()), origin }
        };
        self.values().map(row).collect()
    }

    /// All settings with their values, those of the source first. Each kind of source has settings of its own.
    pub(super) fn values(&self) -> impl Iterator<Item = (&'static Setting, String)> {
        let of_source = SourceSettings::SETTINGS;
        let (first, others): (Vec<_>, Vec<_>) =
            self.groups().into_iter().partition(|group| group.settings() == of_source);
        let all = first.into_iter().chain(others);
        let all = all.flat_map(|group| group.settings().iter().zip(group.values()));
        let of_other_source = self.source.settings_of_other_kind();
        all.filter(move |(setting, _)| !of_other_source.contains(&setting.name))
    }
}

impl Setting {
    /// The value, or that it is secret.
    pub(super) fn shown(&self, value: String) -> String {
        match self.secrecy {
            Secrecy::Secret if !value.is_empty() => SECRET.to_owned(),
            Secrecy::Secret | Secrecy::Shown => value,
        }
    }
}
