//! Definition of a setting, and the macro by which each stands once.

use std::path::PathBuf;

use cproxy_core::{Address, AddressRange, ServiceName};
use cproxy_daemon::{ListenAddress, LogFormat};
use cproxy_wire::ServerAddress;

use super::{CanaryAddresses, choice::Choice};

/// Time at which a change of a setting takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applies {
    /// When the agent reads its settings again (SIGHUP).
    OnReload,
    /// When the agent starts again.
    OnRestart,
}

/// Whether the value of a setting may be shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Secrecy {
    /// It may.
    Shown,
    /// Logs and `cproxy get config` say only that there is one.
    Secret,
}

/// Setting: a flag `--NAME`, a variable `CPROXY_NAME`, a kernel parameter `cproxy.NAME` and a line of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Its name, without dashes in front.
    pub name: &'static str,
    /// Time at which a change takes effect.
    pub applies: Applies,
    /// Whether its value may be shown.
    pub secrecy: Secrecy,
    /// Text for people who read the manual, which the agent does not have.
    #[cfg(feature = "schema")]
    pub manual: Manual,
}

/// Part of a setting that only the manual has.
#[cfg(feature = "schema")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Manual {
    /// Text in place of a default value where there is none, in Markdown.
    pub without: &'static str,
    /// Value in the example file; empty: the default.
    pub example: &'static str,
    /// Effect, in Markdown: the row of docs/reference.md.
    pub effect: &'static str,
}

/// Settings that belong together.
#[derive(Clone, Copy, Debug)]
pub struct Group {
    /// Its name, as the manual has it.
    #[cfg(feature = "schema")]
    pub name: &'static str,
    /// Their subject, in a sentence.
    #[cfg(feature = "schema")]
    pub title: &'static str,
    /// The settings.
    pub settings: &'static [Setting],
}

/// Settings that belong together, and their values.
pub trait Settings {
    /// The settings, in the order of their values.
    fn settings(&self) -> &'static [Setting];

    /// The values as text, as the places of settings have them; empty if there is none.
    fn values(&self) -> Vec<String>;

    /// Takes the values of `old` for settings that count at the next start.
    fn keep(&mut self, old: &Self)
    where
        Self: Sized;
}

/// Value of a setting as text.
pub(super) trait Value {
    fn text(&self) -> String;
}

macro_rules! displayed {
    ($($kind:ty),*) => { $(impl Value for $kind {
        fn text(&self) -> String {
            self.to_string()
        }
    })* };
}

displayed!(u16, u32, String, Address, AddressRange, CanaryAddresses, ListenAddress, ServerAddress, ServiceName);

impl Value for PathBuf {
    fn text(&self) -> String {
        self.display().to_string()
    }
}

impl Value for LogFormat {
    fn text(&self) -> String {
        clap::ValueEnum::to_possible_value(self).map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

impl<T: Choice> Value for T {
    fn text(&self) -> String {
        self.name().to_owned()
    }
}

impl<T: Value> Value for Option<T> {
    fn text(&self) -> String {
        self.as_ref().map(Value::text).unwrap_or_default()
    }
}

impl<T: Value> Value for Vec<T> {
    fn text(&self) -> String {
        self.iter().map(Value::text).collect::<Vec<_>>().join(",")
    }
}

/// Settings that belong together: a structure of flags, and their list. A line of it:
///
/// ```text
/// /// Help of the flag, a line
/// #[arg(value_name = "NAME", further attributes of clap)]
/// "node-name" node_name: Option<String>, OnRestart, Shown,
///     { without: "none", example: "node-1", effect: "What the reference says of it, in Markdown." };
/// ```
macro_rules! settings {
    (
        #[doc = $title:literal]
        $group:ident { $(
            $(#[$of_field:meta])*
            $name:literal $field:ident: $kind:ty, $applies:ident, $secrecy:ident,
                { without: $without:literal, example: $example:literal, effect: $effect:literal };
        )* }
    ) => {
        #[doc = $title]
        #[derive(clap::Args, Clone, Debug, PartialEq, Eq)]
        pub struct $group { $(
            $(#[$of_field])*
            #[arg(long = $name)]
            pub $field: $kind,
        )* }

        impl $group {
            /// The group.
            pub const GROUP: $crate::config::Group = $crate::config::Group {
                #[cfg(feature = "schema")]
                name: stringify!($group),
                #[cfg(feature = "schema")]
                title: $title,
                settings: Self::SETTINGS,
            };

            /// The settings, in the order of their values.
            pub const SETTINGS: &'static [$crate::config::Setting] = &[$($crate::config::Setting {
                name: $name,
                applies: $crate::config::Applies::$applies,
                secrecy: $crate::config::Secrecy::$secrecy,
                #[cfg(feature = "schema")]
                manual: $crate::config::Manual { without: $without, example: $example, effect: $effect },
            }),*];
        }

        impl $crate::config::Settings for $group {
            fn settings(&self) -> &'static [$crate::config::Setting] {
                Self::SETTINGS
            }

            fn values(&self) -> Vec<String> {
                vec![$($crate::config::setting::Value::text(&self.$field)),*]
            }

            fn keep(&mut self, old: &Self) {
                $(if matches!($crate::config::Applies::$applies, $crate::config::Applies::OnRestart) {
                    self.$field.clone_from(&old.$field);
                })*
            }
        }
    };
}

pub(super) use settings;
