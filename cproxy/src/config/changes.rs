//! Comparison of the configuration in force with one that was read again.

use std::fmt;

use super::{Applies, Config, SourceSettings};

/// Longest value that a change shows.
const SHOWN_CHARS_MAX: usize = 200;

/// Setting with another value than before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    name: String,
    before: String,
    now: String,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |value: &str| match value {
            "" => "none".to_owned(),
            value => value.chars().take(SHOWN_CHARS_MAX).collect(),
        };
        write!(f, "{} changed from {} to {}", self.name, shown(&self.before), shown(&self.now))
    }
}

/// Settings with other values than before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Settings that a running agent can change.
    pub applied: Vec<Change>,
    /// Settings that count when the agent starts again.
    pub deferred: Vec<Change>,
}

impl Config {
    /// The configuration to go on with, and its changes: as `new`, but settings that count at the next start stay.
    #[must_use]
    pub fn replaced_by(&self, mut new: Self) -> (Self, Changes) {
        let mut changes = Changes::default();
        if self.source.is_api_server() != new.source.is_api_server() {
            let [before, now] = [self, &new].map(|config| config.source.source().to_string());
            let setting = match &new.source {
                source if !source.apiserver.is_empty() => "apiserver",
                source if source.kubeconfig.is_some() => "kubeconfig",
                _ => "manifests",
            };
            changes.deferred.push(Change { name: format!("the source (--{setting})"), before, now });
            // Each kind of source has its own settings, which cannot be compared with those of the other one.
            new.source = self.source.clone();
            let of_source = SourceSettings::SETTINGS.iter();
            of_source.for_each(|setting| new.switch.origins.keep(setting.name, &self.switch.origins));
        }
        let mut kept = Vec::new();
        for ((setting, before), (_, now)) in self.values().zip(new.values()).filter(|(old, new)| old.1 != new.1) {
            let (before, now) = (setting.shown(before), setting.shown(now));
            let change = Change { name: format!("--{}", setting.name), before, now };
            match setting.applies {
                Applies::OnReload => changes.applied.push(change),
                Applies::OnRestart => {
                    changes.deferred.push(change);
                    kept.push(setting.name);
                }
            }
        }
        kept.iter().for_each(|name| new.switch.origins.keep(name, &self.switch.origins));
        new.keep(self);
        (new, changes)
    }
}

impl SourceSettings {
    /// Names of the settings of the other kind of source.
    pub(super) fn settings_of_other_kind(&self) -> &'static [&'static str] {
        if self.is_api_server() { &["manifests"] } else { &["kubeconfig", "apiserver", "tls-server-name"] }
    }
}

#[cfg(test)]
mod tests {
    use clap::{Args, Command, FromArgMatches};

    use super::*;
    use crate::config::{Origins, SETTINGS, WaitSettings};

    /// Values of which each setting takes one.
    const VALUES: [&str; 10] =
        ["false", "7", "1.2.3.4", "1.2.3.4/8", "/x", "127.0.0.1:1", "https://a/", "n", "on", "a/b"];

    fn command() -> Command {
        Config::augment_args(Command::new("run").no_binary_name(true))
    }

    fn try_config(flags: &[&str]) -> Result<Config, clap::Error> {
        Config::from_arg_matches(&command().try_get_matches_from(flags)?)
    }

    fn config(flags: &[&str]) -> Config {
        try_config(flags).unwrap()
    }

    fn texts(changes: &[Change]) -> Vec<String> {
        changes.iter().map(ToString::to_string).collect()
    }

    fn value(config: &Config, name: &str) -> Option<String> {
        config.values().find(|(setting, _)| setting.name == name).map(|(_, value)| value)
    }

    /// Another value than the default of a setting.
    fn another(name: &str) -> Config {
        let command = command();
        let flag = command.get_arguments().find(|flag| flag.get_long() == Some(name)).unwrap();
        let possible = flag.get_possible_values().into_iter().map(|value| value.get_name().to_owned());
        let values: Vec<_> = possible.chain(VALUES.map(str::to_owned)).collect();
        let configs = values.iter().filter_map(|value| try_config(&[&format!("--{name}={value}")]).ok());
        let default = value(&config(&[]), name);
        configs
            .into_iter()
            .find(|config| value(config, name) != default)
            .unwrap_or_else(|| panic!("--{name} takes none of VALUES: add one"))
    }

    #[test]
    fn each_setting_changes_when_its_line_of_the_table_says() {
        let of_run =
            SETTINGS.iter().map(|group| group.settings).filter(|group| *group != WaitSettings::SETTINGS).flatten();
        for setting in of_run.filter(|setting| setting.name != "manifests") {
            let new = another(setting.name);
            let (config, changes) = config(&[]).replaced_by(new.clone());
            let (list, other) = match setting.applies {
                Applies::OnReload => (&changes.applied, &changes.deferred),
                Applies::OnRestart => (&changes.deferred, &changes.applied),
            };
            assert_eq!((list.len(), other.len()), (1, 0), "{}", setting.name);
            assert!(texts(list)[0].starts_with(&format!("--{} changed from ", setting.name)), "{list:?}");
            let expected = if setting.applies == Applies::OnReload { new } else { self::config(&[]) };
            assert_eq!(config, expected, "{}", setting.name);
        }
    }

    #[test]
    fn changes_name_both_values() {
        for (flags, text) in [
            (&["--kubeconfig=/k"][..], "--kubeconfig changed from none to /k"),
            (&["--apiserver=https://a,unix:///b"], "--apiserver changed from none to https://a/,unix:///b"),
            (&["--node-ip=1.2.3.4"], "--node-ip changed from none to 1.2.3.4"),
            (&["--external-ips=ignore"], "--external-ips changed from serve to ignore"),
            (&["--exclude-uid=0,7"], "--exclude-uid changed from none to 0,7"),
            (&["--exclude-netns=others"], "--exclude-netns changed from none to others"),
            (&["--balance=round-robin"], "--balance changed from random to round-robin"),
            (&["--terminate-sockets=none"], "--terminate-sockets changed from udp to none"),
            (&["--log-level=debug"], "--log-level changed from info to debug"),
            (&["--service-counters"], "--service-counters changed from off to on"),
            (&["--log-format=json"], "--log-format changed from text to json"),
            (
                &["--manifests=a,b"],
                "the source (--manifests) changed from API server of the pod's ServiceAccount to manifests a, b",
            ),
        ] {
            let Changes { applied, deferred } = config(&[]).replaced_by(config(flags)).1;
            assert_eq!(texts(&[applied, deferred].concat()), [text]);
        }
        let (before, long) = (config(&["--manifests=a,b"]), format!("--manifests={}", "x".repeat(1 << 20)));
        let (config, changes) = before.replaced_by(config(&[&long]));
        let text = texts(&changes.deferred).concat();
        assert!(text.starts_with("--manifests changed from a,b to xx") && text.len() < 300, "{text:.400}");
        assert_eq!(config, before);
    }

    #[test]
    fn the_other_kind_of_source_waits_for_the_next_start() {
        let (api_server, manifests) = (config(&["--apiserver=https://a"]), config(&["--manifests=a,b"]));
        for (before, now) in [(&api_server, &manifests), (&manifests, &api_server)] {
            let (config, changes) = before.replaced_by(now.clone());
            assert_eq!((&config, changes.applied.len(), changes.deferred.len()), (before, 0, 1));
        }
        let texts = texts(&manifests.replaced_by(api_server).1.deferred);
        assert!(texts[0].starts_with("the source (--apiserver) changed from manifests a, b to "), "{texts:?}");
    }

    #[test]
    fn settings_of_both_kinds_are_told_apart_and_no_change_is_none() {
        let new = config(&["--pin-dir=/other", "--balance=round-robin"]);
        let (config, changes) = config(&[]).replaced_by(new.clone());
        assert_eq!((changes.applied.len(), changes.deferred.len()), (1, 1));
        assert_eq!(config, self::config(&["--balance=round-robin"]));
        // A deferred change is named again the next time.
        let (config, changes) = config.replaced_by(new);
        assert_eq!((changes.applied.len(), changes.deferred.len()), (0, 1));
        assert_eq!(config.clone().replaced_by(config.clone()), (config, Changes::default()));
    }

    #[test]
    fn each_setting_has_the_place_of_its_value() {
        let origins = |places: &[(&str, &str)]| -> Origins {
            places.iter().map(|(name, place)| ((*name).to_owned(), (*place).to_owned())).collect()
        };
        let (mut before, mut new) = (config(&[]), config(&["--pin-dir=/other", "--balance=round-robin"]));
        before.switch.origins = origins(&[("pin-dir", "flag")]);
        new.switch.origins = origins(&[("pin-dir", "environment"), ("balance", "/etc/f, line 3")]);
        let config = before.replaced_by(new.clone()).0;
        let rows = config.rows();
        let row = |name: &str| {
            let row = rows.iter().find(|row| row.name == name).unwrap();
            (row.value.clone(), row.origin.clone())
        };
        let kept = (Some("/sys/fs/bpf/cproxy".to_owned()), "flag".to_owned());
        assert_eq!(row("pin-dir"), kept, "it counts at the next start");
        assert_eq!(row("balance"), (Some("round-robin".to_owned()), "/etc/f, line 3".to_owned()));
        before.switch.origins = origins(&[("pin-dir", "/etc/f, line 3")]);
        let again = before.replaced_by(new.clone()).0.replaced_by(new).0;
        assert_eq!(again.switch.origins.of("pin-dir"), "/etc/f, line 3 at the start");
        assert_eq!(row("run-dir"), (Some("/run/cproxy".to_owned()), "default".to_owned()));
        let of_run = SETTINGS.iter().map(|group| group.settings.len()).sum::<usize>() - WaitSettings::SETTINGS.len();
        assert_eq!(rows.len(), of_run - 1, "all but that of the other kind of source");
        assert_eq!(
            config.to_string(),
            "API server of the pod's ServiceAccount; balance round-robin; pin-dir /sys/fs/bpf/cproxy"
        );
    }
}
