//! Comparison of the configuration in force with one that was read again.

use std::{fmt, path::Path};

use cproxy_core::{Balance, ExternalIps, NodeContext};
use cproxy_datapath::sockets::Mode;

use super::{Config, ObjectSource};
use cproxy_daemon::LogFormat;

/// Longest value that a change shows.
const SHOWN_CHARS_MAX: usize = 200;

/// Setting with another value than before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    name: &'static str,
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

/// Time at which a change of a setting counts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Counts {
    Now,
    AtStart,
}

impl Config {
    /// The configuration to go on with, and its changes: as `new`, but settings that count at the start stay.
    #[must_use]
    pub fn replaced_by(&self, new: Self) -> (Self, Changes) {
        let mut changes = Changes::default();
        let is_same_kind = self.source.name() == new.source.name();
        if !is_same_kind {
            let (before, now) = (self.source.to_string(), new.source.to_string());
            changes.deferred.push(Change { name: "the source", before, now });
        }
        // Each source has its own settings, which cannot be compared with those of the other one.
        let of_source = |config: &Self| if is_same_kind { config.source.settings() } else { Vec::new() };
        let before = of_source(self).into_iter().chain(self.settings());
        let now = of_source(&new).into_iter().chain(new.settings());
        for ((name, counts, before), (.., now)) in before.zip(now) {
            let list = match counts {
                Counts::Now => &mut changes.applied,
                Counts::AtStart => &mut changes.deferred,
            };
            if before != now {
                list.push(Change { name, before, now });
            }
        }
        let mut origins = new.origins.clone();
        for (name, ..) in self.source.settings().into_iter().chain(self.settings()) {
            let name = name.trim_start_matches('-');
            let is_kept = changes.deferred.iter().any(|change| change.name.trim_start_matches('-') == name);
            if is_kept || !is_same_kind && self.source.settings().iter().any(|(of, ..)| of.ends_with(name)) {
                match self.origins.get(name) {
                    Some(origin) => drop(origins.insert(name.to_owned(), origin.clone())),
                    None => drop(origins.remove(name)),
                }
            }
        }
        let source = match new.source {
            ObjectSource::ApiServer(server) if is_same_kind => ObjectSource::ApiServer(server),
            _ => self.source.clone(),
        };
        let config = Self {
            enabled: self.enabled,
            source,
            bootstrap: self.bootstrap.clone(),
            node: NodeContext { node_name: self.node.node_name.clone(), ..new.node },
            cgroup: self.cgroup.clone(),
            service_counters: self.service_counters,
            canary: self.canary.clone(),
            metrics_address: self.metrics_address.clone(),
            healthz_address: self.healthz_address.clone(),
            pin_dir: self.pin_dir.clone(),
            run_dir: self.run_dir.clone(),
            log_format: self.log_format,
            origins,
            ..new
        };
        (config, changes)
    }

    /// All settings as text, by flag: those of the source first.
    pub(super) fn values(&self) -> impl Iterator<Item = (&'static str, String)> {
        let of_source = self.source.settings().into_iter();
        of_source.chain(self.settings()).map(|(name, _, value)| (name, value))
    }

    /// Settings beside those of the source, as text.
    fn settings(&self) -> [(&'static str, Counts, String); 21] {
        let Self {
            enabled,
            source: _,
            bootstrap,
            node: NodeContext { node_name, node_ips, pod_ips, external_ips },
            cgroup,
            exclude,
            balance,
            terminate_sockets,
            service_counters,
            canary,
            metrics_address,
            healthz_address,
            pin_dir,
            run_dir,
            log_level,
            log_format,
            origins: _,
        } = self;
        let balance = match balance {
            Balance::Random => "random",
            Balance::RoundRobin => "round-robin",
        };
        let terminate_sockets = match terminate_sockets {
            Mode::None => "none",
            Mode::Udp => "udp",
            Mode::All => "all",
        };
        let external_ips = match external_ips {
            ExternalIps::Serve => "serve",
            ExternalIps::Ignore => "ignore",
        };
        let log_format = match log_format {
            LogFormat::Text => "text",
            LogFormat::Json => "json",
        };
        [
            ("--enabled", Counts::AtStart, enabled.to_string()),
            ("--bootstrap", Counts::AtStart, shown(bootstrap.as_deref())),
            ("--node-name", Counts::AtStart, node_name.clone().unwrap_or_default()),
            ("--node-ip", Counts::Now, join(node_ips)),
            ("--pod-ip", Counts::Now, join(pod_ips)),
            ("--external-ips", Counts::Now, external_ips.to_owned()),
            ("--cgroup", Counts::AtStart, shown(cgroup.as_deref())),
            ("--exclude-cgroup", Counts::Now, join(exclude.cgroups.iter().map(|dir| dir.display()))),
            ("--exclude-uid", Counts::Now, join(&exclude.uids)),
            ("--exclude-port", Counts::Now, join(&exclude.ports)),
            ("--exclude-netns", Counts::Now, if exclude.other_netns { "others" } else { "none" }.to_owned()),
            ("--balance", Counts::Now, balance.to_owned()),
            ("--terminate-sockets", Counts::Now, terminate_sockets.to_owned()),
            ("--service-counters", Counts::AtStart, service_counters.as_str().to_owned()),
            ("--canary-address", Counts::AtStart, canary.to_string()),
            ("--metrics-bind-address", Counts::AtStart, join(metrics_address)),
            ("--healthz-bind-address", Counts::AtStart, join(healthz_address)),
            ("--pin-dir", Counts::AtStart, shown(Some(pin_dir))),
            ("--run-dir", Counts::AtStart, shown(Some(run_dir))),
            ("--log-level", Counts::Now, log_level.as_str().to_lowercase()),
            ("--log-format", Counts::AtStart, log_format.to_owned()),
        ]
    }
}

impl ObjectSource {
    /// Name of the kind of source.
    fn name(&self) -> &'static str {
        match self {
            Self::ApiServer(_) => "API server",
            Self::Manifests(_) => "manifests",
        }
    }

    /// Settings of the source, as text.
    fn settings(&self) -> Vec<(&'static str, Counts, String)> {
        match self {
            Self::ApiServer(server) => vec![
                ("--kubeconfig", Counts::Now, shown(server.kubeconfig.as_deref())),
                ("--apiserver", Counts::Now, join(&server.addresses)),
                ("--tls-server-name", Counts::Now, server.tls_server_name.clone().unwrap_or_default()),
            ],
            Self::Manifests(paths) => {
                vec![("--manifests", Counts::AtStart, join(paths.iter().map(|path| path.display())))]
            }
        }
    }
}

fn shown(path: Option<&Path>) -> String {
    path.map(|path| path.display().to_string()).unwrap_or_default()
}

fn join<T: ToString>(values: impl IntoIterator<Item = T>) -> String {
    values.into_iter().map(|value| value.to_string()).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use cproxy_core::parse_address;
    use cproxy_wire::ApiServer;
    use tracing::Level;

    use super::*;
    use crate::config::{Exclude, ServiceCounting};

    fn config() -> Config {
        Config {
            enabled: true,
            source: ObjectSource::ApiServer(ApiServer::default()),
            bootstrap: None,
            node: NodeContext::default(),
            cgroup: None,
            exclude: Exclude::default(),
            balance: Balance::Random,
            terminate_sockets: Mode::Udp,
            service_counters: ServiceCounting::Off,
            canary: "10.0.0.1".parse().unwrap(),
            metrics_address: None,
            healthz_address: None,
            pin_dir: "/pins".into(),
            run_dir: "/run/a".into(),
            log_level: Level::INFO,
            log_format: LogFormat::Text,
            origins: BTreeMap::new(),
        }
    }

    fn changed(change: impl FnOnce(&mut Config)) -> Config {
        let mut new = config();
        change(&mut new);
        new
    }

    fn server(config: &mut Config) -> &mut ApiServer {
        match &mut config.source {
            ObjectSource::ApiServer(server) => server,
            ObjectSource::Manifests(_) => panic!("manifests"),
        }
    }

    fn texts(changes: &[Change]) -> Vec<String> {
        changes.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn changes_that_a_running_agent_can_make_are_applied() {
        let ip = |text| vec![parse_address(text).unwrap()];
        for (new, text) in [
            (changed(|new| server(new).kubeconfig = Some("/k".into())), "--kubeconfig changed from none to /k"),
            (
                changed(|new| server(new).addresses = vec!["https://a".parse().unwrap(), "unix:///b".parse().unwrap()]),
                "--apiserver changed from none to https://a/,unix:///b",
            ),
            (
                changed(|new| server(new).tls_server_name = Some("n".to_owned())),
                "--tls-server-name changed from none to n",
            ),
            (changed(|new| new.node.node_ips = ip("1.2.3.4")), "--node-ip changed from none to 1.2.3.4"),
            (changed(|new| new.node.pod_ips = ip("1.2.3.4")), "--pod-ip changed from none to 1.2.3.4"),
            (changed(|new| new.node.external_ips = ExternalIps::Ignore), "--external-ips changed from serve to ignore"),
            (changed(|new| new.exclude.cgroups.push("/c".into())), "--exclude-cgroup changed from none to /c"),
            (changed(|new| new.exclude.uids = vec![0, 7]), "--exclude-uid changed from none to 0,7"),
            (changed(|new| new.exclude.ports = vec![53]), "--exclude-port changed from none to 53"),
            (changed(|new| new.exclude.other_netns = true), "--exclude-netns changed from none to others"),
            (changed(|new| new.balance = Balance::RoundRobin), "--balance changed from random to round-robin"),
            (changed(|new| new.terminate_sockets = Mode::None), "--terminate-sockets changed from udp to none"),
            (changed(|new| new.log_level = Level::DEBUG), "--log-level changed from info to debug"),
        ] {
            let (config, changes) = config().replaced_by(new.clone());
            assert_eq!((texts(&changes.applied), changes.deferred), (vec![text.to_owned()], Vec::new()));
            assert_eq!(config, new, "{text}");
        }
    }

    #[test]
    fn settings_that_count_at_the_start_stay_and_are_named() {
        let manifests = ObjectSource::Manifests(vec!["a".into(), "b".into()]);
        for (new, text) in [
            (changed(|new| new.enabled = false), "--enabled changed from true to false"),
            (changed(|new| new.bootstrap = Some("/b".into())), "--bootstrap changed from none to /b"),
            (changed(|new| new.node.node_name = Some("n".to_owned())), "--node-name changed from none to n"),
            (changed(|new| new.cgroup = Some("/c".into())), "--cgroup changed from none to /c"),
            (changed(|new| new.service_counters = ServiceCounting::On), "--service-counters changed from off to on"),
            (changed(|new| new.canary = "none".parse().unwrap()), "--canary-address changed from 10.0.0.1 to none"),
            (
                changed(|new| new.metrics_address = Some("127.0.0.1:1".parse().unwrap())),
                "--metrics-bind-address changed from none to 127.0.0.1:1",
            ),
            (
                changed(|new| new.healthz_address = Some("unix:///a".parse().unwrap())),
                "--healthz-bind-address changed from none to unix:///a",
            ),
            (changed(|new| new.pin_dir = "/other".into()), "--pin-dir changed from /pins to /other"),
            (changed(|new| new.run_dir = "/run/b".into()), "--run-dir changed from /run/a to /run/b"),
            (changed(|new| new.log_format = LogFormat::Json), "--log-format changed from text to json"),
            (
                changed(|new| new.source = manifests.clone()),
                "the source changed from API server of the pod's ServiceAccount to manifests a, b",
            ),
        ] {
            let (config, changes) = config().replaced_by(new);
            assert_eq!((changes.applied, texts(&changes.deferred)), (Vec::new(), vec![text.to_owned()]));
            assert_eq!(config, self::config(), "{text}");
        }
        let before = changed(|config| config.source = manifests.clone());
        let new = changed(|config| config.source = ObjectSource::Manifests(vec!["x".repeat(1 << 20).into()]));
        let (config, changes) = before.replaced_by(new);
        let text = texts(&changes.deferred).concat();
        assert!(text.starts_with("--manifests changed from a,b to xx") && text.len() < 300, "{text:.400}");
        assert_eq!(config, before);
    }

    #[test]
    fn settings_of_both_kinds_are_told_apart_and_no_change_is_none() {
        let new = changed(|new| (new.pin_dir, new.balance) = ("/other".into(), Balance::RoundRobin));
        let (config, changes) = config().replaced_by(new.clone());
        assert_eq!((changes.applied.len(), changes.deferred.len()), (1, 1));
        assert_eq!(config, changed(|config| config.balance = Balance::RoundRobin));
        // A deferred change is named again the next time.
        let (config, changes) = config.replaced_by(new);
        assert_eq!((changes.applied.len(), changes.deferred.len()), (0, 1));
        assert_eq!(config.clone().replaced_by(config.clone()), (config, Changes::default()));
    }

    #[test]
    fn each_setting_has_the_place_of_its_value() {
        let origins = |places: &[(&str, &str)]| {
            places.iter().map(|(name, place)| ((*name).to_owned(), (*place).to_owned())).collect()
        };
        let before = changed(|config| config.origins = origins(&[("pin-dir", "flag")]));
        let new = changed(|config| {
            (config.pin_dir, config.balance) = ("/other".into(), Balance::RoundRobin);
            config.origins = origins(&[("pin-dir", "environment"), ("balance", "/etc/f, line 3")]);
        });
        let rows = before.replaced_by(new).0.rows();
        let row = |name: &str| {
            let row = rows.iter().find(|row| row.name == name).unwrap();
            (row.value.clone(), row.origin.clone())
        };
        assert_eq!(row("pin-dir"), ("/pins".to_owned(), "flag".to_owned()), "it counts at the next start");
        assert_eq!(row("balance"), ("round-robin".to_owned(), "/etc/f, line 3".to_owned()));
        assert_eq!(row("run-dir"), ("/run/a".to_owned(), "default".to_owned()));
        assert_eq!(rows.len(), 24);
    }
}
