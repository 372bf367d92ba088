//! Places that settings come from, and the switch of the machine, whose place is named where it is off.

use std::collections::BTreeMap;

use clap::Args;

use super::{Group, Setting, Settings, SwitchSettings};

/// Place of a setting that no place has.
const DEFAULT: &str = "default";

/// End of a place that has another value by now.
const AT_START: &str = " at the start";

/// Where flags got their values, by the name of the flag; defaults are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origins(BTreeMap<String, String>);

impl Origins {
    /// Whether some place has the setting.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// Place of a setting.
    #[must_use]
    pub fn of(&self, name: &str) -> &str {
        self.0.get(name).map_or(DEFAULT, String::as_str)
    }

    /// Takes the place that a setting has in `old`. The line of a file may be another one's by now.
    pub(super) fn keep(&mut self, name: &str, old: &Self) {
        match old.0.get(name) {
            Some(origin) => {
                let is_line = origin.contains(", line ") && !origin.ends_with(AT_START);
                drop(self.0.insert(name.to_owned(), format!("{origin}{}", if is_line { AT_START } else { "" })));
            }
            None => drop(self.0.remove(name)),
        }
    }
}

impl FromIterator<(String, String)> for Origins {
    fn from_iter<I: IntoIterator<Item = (String, String)>>(origins: I) -> Self {
        Self(origins.into_iter().collect())
    }
}

/// Switch of a machine that has cproxy in its image.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct Switch {
    /// Whether it is on.
    #[command(flatten)]
    pub settings: SwitchSettings,
    /// Places of all settings of the command.
    #[arg(skip)]
    pub origins: Origins,
}

impl Settings for Switch {
    fn settings(&self) -> &'static [Setting] {
        self.settings.settings()
    }

    fn values(&self) -> Vec<String> {
        self.settings.values()
    }

    fn keep(&mut self, old: &Self) {
        self.settings.keep(&old.settings);
    }
}

impl Switch {
    /// The group of its settings.
    pub const GROUP: Group = SwitchSettings::GROUP;

    /// Reason why cproxy does nothing here, if it does not.
    #[must_use]
    pub fn disabled(&self) -> Option<String> {
        let place =
            if self.origins.has("enabled") { format!(", {}", self.origins.of("enabled")) } else { String::new() };
        (!self.settings.enabled).then(|| format!("cproxy is disabled on this machine (enabled = false{place})"))
    }
}
