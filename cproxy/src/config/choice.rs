//! Values of settings that are one of a few: their names and what each does, for help, reports and changes.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use cproxy_core::{Balance, ExternalIps};
use cproxy_datapath::sockets::TerminateSockets;
use tracing::Level;

/// Value that is one of a few.
pub trait Choice: Copy + PartialEq + Send + Sync + 'static {
    /// The values, each with its name and its help, which may be empty.
    const CHOICES: &'static [(Self, &'static str, &'static str)];

    /// Its name.
    fn name(self) -> &'static str {
        Self::CHOICES.iter().find(|(value, ..)| *value == self).map_or("", |(_, name, _)| name)
    }

    /// The value of this name.
    fn of_name(name: &str) -> Option<Self> {
        let is_named = |other: &str| other == name || synonyms(other).contains(&name);
        Self::CHOICES.iter().find(|(_, other, _)| is_named(other)).map(|(value, ..)| *value)
    }
}

/// Other words for a name that says yes or no.
fn synonyms(name: &str) -> &'static [&'static str] {
    match name {
        "true" | "on" => &["true", "on", "yes", "1"],
        "false" | "off" => &["false", "off", "no", "0"],
        _ => &[],
    }
}

/// Parser of a flag whose value is one of a few.
pub(crate) fn choice<T: Choice>() -> impl TypedValueParser<Value = T> {
    let possible = T::CHOICES.iter().map(|(_, name, help)| {
        let value = PossibleValue::new(*name).aliases(synonyms(name));
        if help.is_empty() { value } else { value.help(*help) }
    });
    PossibleValuesParser::new(possible).try_map(|name| T::of_name(&name).ok_or("no such value"))
}

/// Counters of calls by Service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ServiceCounting {
    /// The programs do not count.
    #[default]
    Off,
    /// The programs count.
    On,
}

/// Enforcement of network policies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PolicyMode {
    /// No policy is asked for.
    #[default]
    Off,
    /// Denials are recorded, and nothing is denied.
    Audit,
    /// Denials are denied.
    Enforce,
}

/// Connections of the pod that a new policy no longer allows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExistingConnections {
    /// They stay.
    #[default]
    Keep,
    /// They are closed.
    Close,
}

/// Network namespaces in which calls are not translated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExcludeNetns {
    /// None.
    #[default]
    None,
    /// All but the agent's.
    Others,
}

/// Result of `cproxy wait` on failure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnTimeout {
    /// The exit code says so.
    #[default]
    Fail,
    /// The caller starts all the same.
    Start,
}

impl Choice for bool {
    const CHOICES: &'static [(Self, &'static str, &'static str)] = &[(true, "true", ""), (false, "false", "")];
}

impl Choice for ServiceCounting {
    const CHOICES: &'static [(Self, &'static str, &'static str)] = &[(Self::Off, "off", ""), (Self::On, "on", "")];
}

impl Choice for PolicyMode {
    const CHOICES: &'static [(Self, &'static str, &'static str)] = &[
        (Self::Off, "off", "No policy"),
        (Self::Audit, "audit", "Record what would be denied, and deny nothing"),
        (Self::Enforce, "enforce", "Deny what no policy allows"),
    ];
}

impl Choice for ExistingConnections {
    const CHOICES: &'static [(Self, &'static str, &'static str)] = &[
        (Self::Keep, "keep", "They stay, as connections that stood before the policy"),
        (Self::Close, "close", "They are closed under their application"),
    ];
}

impl Choice for ExcludeNetns {
    const CHOICES: &'static [(Self, &'static str, &'static str)] = &[
        (Self::None, "none", "None"),
        (Self::Others, "others", "All but the agent's: containers, and the pods of a cluster in this machine"),
    ];
}

impl Choice for OnTimeout {
    const CHOICES: &'static [(Self, &'static str, &'static str)] = &[
        (Self::Fail, "fail", "Print the reason and exit with 1, or with 2 if a value is invalid"),
        (Self::Start, "start", "Print the reason and exit with 0, so that the caller starts without Services"),
    ];
}

impl Choice for Balance {
    const CHOICES: &'static [(Self, &'static str, &'static str)] = &[
        (Self::Random, "random", "Any backend, all with the same chance"),
        (Self::RoundRobin, "round-robin", "One backend after another, which spreads few connections more evenly"),
    ];
}

impl Choice for TerminateSockets {
    const CHOICES: &'static [(Self, &'static str, &'static str)] = &[
        (Self::Udp, "udp", "Connected UDP sockets, which would not notice otherwise"),
        (Self::All, "all", "UDP and TCP sockets"),
        (Self::None, "none", "No sockets"),
    ];
}

impl Choice for ExternalIps {
    const CHOICES: &'static [(Self, &'static str, &'static str)] = &[
        (Self::Serve, "serve", "Serve them, except on ClusterIPs and on addresses of this VM"),
        (Self::Ignore, "ignore", "Do not serve them"),
    ];
}

impl Choice for Level {
    const CHOICES: &'static [(Self, &'static str, &'static str)] =
        &[(Self::ERROR, "error", ""), (Self::WARN, "warn", ""), (Self::INFO, "info", ""), (Self::DEBUG, "debug", "")];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn on_and_off_have_other_words() {
        for words in [["true", "false"], ["on", "off"], ["yes", "no"], ["1", "0"]] {
            assert_eq!(words.map(bool::of_name), [Some(true), Some(false)]);
            let counting = [Some(ServiceCounting::On), Some(ServiceCounting::Off)];
            assert_eq!(words.map(ServiceCounting::of_name), counting);
        }
        assert_eq!((bool::of_name("maybe"), ExcludeNetns::of_name("off")), (None, None));
    }
}
