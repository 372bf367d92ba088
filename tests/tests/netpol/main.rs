//! The specs of NetworkPolicies that Kubernetes tests its own network plugins with (`e2e.test`), unmodified, and the
//! cases that cyclonus generates, against pods that are network namespaces with an agent each. A Go program in
//! `tests/netpol` makes the pods.

#![expect(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that finds something else than it expects has failed"
)]

mod cases;
mod cluster;
mod report;

mod long {
    use cproxy_tests::sandbox::Sandbox;

    use crate::{
        cases::Case,
        cluster::{Cluster, Family},
        report::Report,
    };

    /// The specs, by the name of their group.
    const FOCUS: &str = r"\[sig-network\].*Netpol";

    /// Specs that probe a ClusterIP with SCTP, which cproxy does not translate.
    const SKIPPED: &str = r"\[Feature:SCTPConnectivity\]";
    const SKIPPED_SPECS: [&str; 3] = [
        "should support a 'default-deny-ingress' policy",
        "should enforce policy based on Ports",
        "should enforce policy to allow traffic only from a pod in a different namespace based on PodSelector and \
         NamespaceSelector",
    ];

    /// Specs of this version of Kubernetes that run: 45 of traffic, and two of the objects in the API.
    const PASSED: usize = 47;

    /// Cases of cyclonus 0.5.6.
    const CASES: usize = 230;

    /// Variable with another expression for the specs that run: then their number does not matter.
    const FOCUS_VARIABLE: &str = "CPROXY_NETPOL_FOCUS";

    #[test]
    fn the_specs_of_kubernetes_pass() {
        run_specs(Family::V4);
    }

    #[test]
    fn the_specs_of_kubernetes_pass_with_ipv6() {
        run_specs(Family::V6);
    }

    /// Calls of a pod to itself, and SCTP, are not compared: `tests/policies/cases` declares these differences.
    #[test]
    fn the_cases_of_cyclonus_pass() {
        let sandbox = Sandbox::for_test();
        let cluster = Cluster::start(&sandbox, Family::V4);
        let cases = cluster.run_cases();
        let (steps, calls) = cases.iter().fold((0, 0), |sum, case| (sum.0 + case.steps, sum.1 + case.calls));
        println!("{} cases, {steps} steps, {calls} calls", cases.len());
        let failures: Vec<_> = cases.iter().filter_map(Case::failure).collect();
        assert!(failures.is_empty(), "{} of {} cases failed: {}", failures.len(), cases.len(), failures.join("\n"));
        assert_eq!(cases.len(), CASES);
    }

    fn run_specs(family: Family) {
        let sandbox = Sandbox::for_test();
        let cluster = Cluster::start(&sandbox, family);
        let chosen = std::env::var(FOCUS_VARIABLE).ok();
        let report = cluster.run_specs(chosen.as_deref().unwrap_or(FOCUS), SKIPPED);
        println!("{}", report.table());
        assert!(report.failed().is_empty(), "failed: {:#?}", report.failed());
        assert!(!report.passed().is_empty(), "no spec was chosen");
        if chosen.is_none() {
            assert_eq!(report.passed().len(), PASSED);
            check_skipped(&report);
        }
    }

    /// Checks that nothing was left out but the specs with SCTP.
    fn check_skipped(report: &Report) {
        let skipped = report.skipped_of("Netpol");
        assert_eq!(skipped.len(), SKIPPED_SPECS.len(), "{skipped:#?}");
        for spec in SKIPPED_SPECS {
            assert!(skipped.iter().any(|name| name.contains("using SCTP") && name.contains(spec)), "{skipped:#?}");
        }
    }
}
