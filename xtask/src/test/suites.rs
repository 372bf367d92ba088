//! The suites: what each needs, and how it may run beside others.

use clap::builder::PossibleValuesParser;

/// Tests that belong together.
pub(crate) struct Suite {
    /// Its name on the command line; that of the test binary, if it is one.
    pub(crate) name: &'static str,
    pub(super) kind: SuiteKind,
    /// Needs of all its tests besides a compiler.
    needs: &'static [Need],
    /// Tests that differ from the others; the first rule that fits counts.
    rules: &'static [Rule],
    /// Time of a test that has never been measured on this machine, by which the longest start first.
    pub(super) seconds: u32,
    /// Budget of the whole suite's CPU time on a machine as in README.md, printed beside what it took.
    pub(super) budget_cpu_seconds: u32,
}

/// Where a suite's tests are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SuiteKind {
    /// In the crates: unit tests, and integration tests that need no kernel. Each binary is one process.
    Unit,
    /// In a test binary below `tests/tests`. Each test is a process, and needs root and cgroup2.
    Live,
    /// Fuzz targets, each for a few seconds.
    Fuzz,
    /// The sizes of the shipped programs.
    Size,
}

/// A product of `cargo xtask`, or programs from packages.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Need {
    /// An agent: the shipped one if all tests run, otherwise one that is built faster.
    Agent,
    /// An agent whose size, speed and system calls are those of a release.
    ShippedAgent,
    /// A relay: as for the agent.
    Relay,
    ShippedRelay,
    /// Agents and a relay of older versions.
    OlderAgents,
    /// etcd, kube-apiserver, kube-proxy and kubectl.
    ControlPlane,
    Helm,
    /// A release, and a system to install its packages in.
    Packages,
    Guests,
    Fuzzer,
    /// kube-apiserver of the oldest supported release.
    OldestControlPlane,
    /// The files of a fleet.
    Fleet,
    /// The latest promtool; other tests take Debian's.
    LatestPromtool,
    /// Other engines of network policies.
    PolicyEngines,
    /// Kubernetes's specs of network policies, its controllers, and a provider of pods.
    Netpol,
    /// Programs that check images.
    Images,
    /// Programs in Go, Java, JavaScript and C, redis and Prometheus.
    Programs,
}

impl Need {
    /// Whether Go alone builds it.
    pub(super) fn is_of_go(self) -> bool {
        matches!(
            self,
            Self::ControlPlane
                | Self::Helm
                | Self::OldestControlPlane
                | Self::LatestPromtool
                | Self::PolicyEngines
                | Self::Netpol
        )
    }

    /// Its name for readers.
    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::ShippedAgent => "shipped agent",
            Self::Relay => "relay",
            Self::ShippedRelay => "shipped relay",
            Self::OlderAgents => "older agents",
            Self::ControlPlane => "control plane",
            Self::Helm => "Helm",
            Self::Packages => "release and packages",
            Self::Guests => "images and kernels of guests",
            Self::Fuzzer => "fuzz targets",
            Self::OldestControlPlane => "oldest control plane",
            Self::Fleet => "files of a fleet",
            Self::LatestPromtool => "latest promtool",
            Self::PolicyEngines => "engines of policies",
            Self::Netpol => "specs of policies",
            Self::Images => "programs for images",
            Self::Programs => "programs",
        }
    }
}

/// How a test may run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Class {
    /// Beside others. The number is how many places it takes: one for each processor that it keeps busy, at least one.
    Free(u32),
    /// Alone, once nothing is built any more: it measures time or memory, or changes the machine.
    Exclusive,
}

/// Tests of a suite that need more, or that run in another way.
struct Rule {
    /// Beginning of the tests' paths.
    tests: &'static str,
    needs: &'static [Need],
    class: Class,
}

const ONE: Class = Class::Free(1);
const TWO: Class = Class::Free(2);

const fn rule(tests: &'static str, needs: &'static [Need], class: Class) -> Rule {
    Rule { tests, needs, class }
}

/// A rule for all tests of a suite.
const fn all(class: Class) -> Rule {
    rule("", &[], class)
}

const AGENT: &[Need] = &[Need::Agent];
const CLUSTER: &[Need] = &[Need::Agent, Need::ControlPlane];
const RELAYED: &[Need] = &[Need::Agent, Need::Relay, Need::ControlPlane, Need::Programs];
const OLDER: &[Need] = &[Need::Agent, Need::OlderAgents];
const CONTROL_PLANE: &[Need] = &[Need::ControlPlane];

#[rustfmt::skip]
pub(super) const SUITES: &[Suite] = &[
    suite(UNIT, SuiteKind::Unit, &[], &[all(TWO)], 10, 200),
    suite("live", SuiteKind::Live, AGENT, &[
        // Mounts of other tests wake every agent.
        rule("manifests::at_rest", &[], Class::Exclusive),
        // The searches of every agent look at its thousands of sockets.
        rule("places::places_follow", &[], Class::Exclusive),
        // System calls depend on the allocator and the optimiser.
        rule("privileges::", &[Need::ShippedAgent], ONE),
        // nginx, dnsmasq, python3 and others as the pod's servers.
        rule("receive::servers::", &[Need::Programs], ONE),
    ], 2, 120),
    suite("matrix", SuiteKind::Live, AGENT, &[], 5, 30),
    suite("upgrade", SuiteKind::Live, OLDER, &[], 30, 30),
    suite("faults", SuiteKind::Live, OLDER, &[], 30, 130),
    suite("programs", SuiteKind::Live, &[Need::Agent, Need::Programs], &[], 20, 50),
    suite("metrics", SuiteKind::Live, &[Need::Agent, Need::Programs, Need::LatestPromtool], &[
        // The kernel's statistics of programs are switched on and off.
        rule("scrape::the_time_of_the_programs", &[], Class::Exclusive),
        rule("monitoring::each_panel", CONTROL_PLANE, Class::Exclusive),
        rule("health::", CONTROL_PLANE, ONE),
    ], 10, 50),
    suite("images", SuiteKind::Live, &[Need::ShippedAgent, Need::ShippedRelay, Need::Images], &[], 20, 50),
    suite("harness", SuiteKind::Live, AGENT, &[rule("the_control_plane_is_real", CONTROL_PLANE, ONE)], 2, 20),
    suite("diagnosis", SuiteKind::Live, AGENT, &[rule("source::", CONTROL_PLANE, ONE)], 5, 30),
    suite("guests", SuiteKind::Live, &[Need::ShippedAgent, Need::ShippedRelay, Need::Guests], &[], 30, 420),
    suite("packages", SuiteKind::Live, &[Need::ShippedAgent, Need::ShippedRelay, Need::OlderAgents, Need::Packages],
        &[], 20, 120),
    suite("fleet", SuiteKind::Live, &[Need::ShippedAgent, Need::ShippedRelay, Need::ControlPlane, Need::Guests,
        Need::Fleet], &[all(TWO)], 300, 600),
    suite("cluster", SuiteKind::Live, CLUSTER, &[
        rule("helm::", &[Need::Helm], ONE),
        rule("long::", &[Need::OldestControlPlane], ONE),
    ], 15, 480),
    suite("chaos", SuiteKind::Live, OLDER, &[rule("nothing_fails_but", CONTROL_PLANE, TWO), all(TWO)], 120, 320),
    suite("policies", SuiteKind::Live, &[Need::PolicyEngines], &[], 75, 110),
    suite("netpol", SuiteKind::Live, &[Need::Agent, Need::Relay, Need::ControlPlane, Need::Netpol],
        &[rule("long::the_cases", &[Need::PolicyEngines], TWO), all(TWO)], 620, 500),
    suite("transcode", SuiteKind::Live, CLUSTER, &[], 15, 20),
    suite("kube_proxy", SuiteKind::Live, RELAYED, &[], 60, 100),
    suite("relay", SuiteKind::Live, RELAYED, &[rule("skew::", &[Need::OlderAgents], ONE)], 15, 260),
    suite("scale", SuiteKind::Live, &[Need::ShippedAgent], &[all(Class::Exclusive)], 10, 220),
    suite("budgets", SuiteKind::Live, &[Need::ShippedAgent, Need::ControlPlane], &[all(Class::Exclusive)], 10, 170),
    suite("fuzz", SuiteKind::Fuzz, &[Need::Fuzzer], &[], 5, 90),
    suite("size", SuiteKind::Size, &[Need::ShippedAgent, Need::ShippedRelay], &[], 0, 5),
];

const fn suite(
    name: &'static str,
    kind: SuiteKind,
    needs: &'static [Need],
    rules: &'static [Rule],
    seconds: u32,
    budget_cpu_seconds: u32,
) -> Suite {
    Suite { name, kind, needs, rules, seconds, budget_cpu_seconds }
}

/// Suites whose figures are shown, also if they are within their budgets.
const SHOWN: [&str; 2] = ["scale", "budgets"];

/// Name of the suite of all that needs no kernel.
pub(super) const UNIT: &str = "unit";

/// Integration tests of the crates, which are part of the suite `unit`.
pub(super) const UNIT_BINARIES: &[&str] = &["allocations", "collection", "manual", "many_pods", "servers"];

impl Suite {
    /// The needs of a test.
    pub(super) fn needs_of(&self, test: &str) -> Vec<Need> {
        let more = self.rule_of(test).map_or(&[][..], |rule| rule.needs);
        self.needs.iter().chain(more).copied().collect()
    }

    /// How a test may run.
    pub(super) fn class_of(&self, test: &str) -> Class {
        self.rule_of(test).map_or(ONE, |rule| rule.class)
    }

    pub(super) fn shows_output(&self) -> bool {
        SHOWN.contains(&self.name)
    }

    fn rule_of(&self, test: &str) -> Option<&Rule> {
        self.rules.iter().find(|rule| test.starts_with(rule.tests))
    }
}

/// The suite of this name.
pub(super) fn find(name: &str) -> Option<&'static Suite> {
    SUITES.iter().find(|suite| suite.name == name)
}

/// The names of all suites.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    SUITES.iter().map(|suite| suite.name)
}

/// A parser of suites' names, for the command line.
pub(super) fn parser() -> PossibleValuesParser {
    PossibleValuesParser::new(names())
}

#[cfg(test)]
mod tests {
    use std::{ffi::OsStr, fs};

    use super::*;
    use crate::paths;

    fn binaries_in(directory: &str) -> Vec<String> {
        let entries = fs::read_dir(paths::workspace().join(directory)).unwrap();
        let names = entries.map(|entry| entry.unwrap().path());
        names.map(|path| path.file_stem().and_then(OsStr::to_str).unwrap().to_owned()).collect()
    }

    #[test]
    fn every_test_binary_is_in_a_suite() {
        for name in binaries_in("tests/tests") {
            assert_eq!(find(&name).map(|suite| suite.kind), Some(SuiteKind::Live), "{name}");
        }
        let crates =
            ["cproxy/tests", "crates/wire/tests", "crates/policy/tests", "crates/relay/tests", "crates/manual/tests"];
        for name in crates.into_iter().flat_map(binaries_in) {
            assert!(UNIT_BINARIES.contains(&name.as_str()), "{name}");
        }
    }

    #[test]
    fn a_test_needs_what_its_suite_and_its_rule_need() {
        let suite = find("diagnosis").unwrap();
        assert_eq!(suite.needs_of("services::a"), [Need::Agent]);
        assert_eq!(suite.needs_of("source::a"), [Need::Agent, Need::ControlPlane]);
        assert_eq!(find("budgets").unwrap().class_of("any"), Class::Exclusive);
        assert_eq!(suite.class_of("services::a"), ONE);
    }
}
