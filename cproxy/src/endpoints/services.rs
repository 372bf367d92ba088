//! Metrics of single Services, if the programs count calls by Service. Their number is bounded: monitoring pays for
//! each of them in each VM.

use std::collections::BTreeMap;

use cproxy_core::{FrontendName, ServiceName};
use cproxy_daemon::{Exposition, MetricKind};
use cproxy_datapath::bpf::{ServiceCounters, ServiceCounts};

use crate::canary::service_name;

/// Services with lines of their own. Calls of the others are summed.
const SERVICES_MAX: usize = 1000;

/// Namespace and name for the sum of the others. No object has such a name.
const OTHERS: (&str, &str) = ("", "(others)");

/// Calls to a Service since the programs were installed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceCalls {
    /// The Service.
    pub service: ServiceName,
    /// Their numbers.
    pub counts: ServiceCounts,
}

impl ServiceCalls {
    /// Sums of counters by Service. Calls to frontends that have gone since have no Service, and those of the canary
    /// are no calls of applications. A Service has the calls to other ports of its addresses, too.
    pub fn of<'a>(mut counters: ServiceCounters, names: impl Iterator<Item = FrontendName<'a>>) -> Vec<Self> {
        let mut sums = BTreeMap::<&ServiceName, ServiceCounts>::new();
        let canary = service_name();
        for FrontendName { frontend, service, .. } in names.filter(|name| *name.service != canary) {
            // Each number counts once: several frontends share an address.
            let of_frontend = counters.frontends.remove(&frontend);
            let of_address = counters.addresses.remove(&frontend.address);
            for counts in of_frontend.into_iter().chain(of_address) {
                *sums.entry(service).or_default() += counts;
            }
        }
        sums.into_iter().map(|(service, counts)| Self { service: service.clone(), counts }).collect()
    }
}

/// Number of one kind of calls.
type Number = fn(&ServiceCounts) -> u64;

/// Writes the calls by Service; nothing if there are none. They are in the order of names: by traffic, Services would
/// come and go, and the sum of the others would shrink.
pub(super) fn write(metrics: &mut Exposition, calls: &[ServiceCalls]) {
    if calls.is_empty() {
        return;
    }
    let (shown, others) = calls.split_at(calls.len().min(SERVICES_MAX));
    let families: [(&str, &str, Number); 3] = [
        ("cproxy_service_connections_total", "Calls to a Service that got a backend.", |counts| counts.connections),
        ("cproxy_service_refusals_total", "Calls to a Service that were refused.", |counts| counts.refusals),
        ("cproxy_service_drops_total", "Calls to a Service that were dropped.", |counts| counts.drops),
    ];
    for (name, help, number) in families {
        metrics.start(name, MetricKind::Counter, help);
        for calls in shown {
            let labels = [("namespace", &*calls.service.namespace), ("service", &*calls.service.name)];
            metrics.line(name, &labels, number(&calls.counts));
        }
        if !others.is_empty() {
            let sum: u64 = others.iter().map(|calls| number(&calls.counts)).sum();
            metrics.line(name, &[("namespace", OTHERS.0), ("service", OTHERS.1)], sum);
        }
    }
}

#[cfg(test)]
mod tests {
    use cproxy_core::{Action, Frontend, FrontendSource, Protocol};
    use cproxy_daemon::MetricsFormat;

    use super::*;

    #[test]
    fn calls_to_all_frontends_of_a_service_and_to_other_ports_of_its_addresses_are_summed() {
        let at = |address: &str, port| Frontend {
            address: cproxy_core::parse_address(address).unwrap(),
            port,
            protocol: Protocol::Tcp,
        };
        let counts = |connections, refusals| ServiceCounts { connections, refusals, drops: 0 };
        let (web, canary) = (ServiceName { namespace: "a".into(), name: "web".into() }, service_name());
        let (http, https, own) = (at("10.0.0.1", 80), at("10.0.0.1", 443), at("198.18.0.1", 80));
        let counters = ServiceCounters {
            frontends: [
                (http, counts(2, 0)),
                (https, counts(1, 1)),
                (own, counts(9, 0)),
                (at("10.0.0.9", 1), counts(5, 5)),
            ]
            .into(),
            addresses: [(http.address, counts(0, 4))].into(),
        };
        let names = [(http, &web), (https, &web), (own, &canary)].map(|(frontend, service)| FrontendName {
            frontend,
            service,
            port_name: "",
            source: FrontendSource::ClusterIp,
            action: Action::Forward,
        });
        let calls = ServiceCalls::of(counters, names.into_iter());
        assert_eq!(calls, [ServiceCalls { service: web.clone(), counts: counts(3, 5) }]);
    }

    fn written(count: u64) -> String {
        let calls = |number: u64| ServiceCalls {
            service: ServiceName { namespace: "default".into(), name: format!("s{number:04}").into() },
            counts: ServiceCounts { connections: number, refusals: 1, drops: 0 },
        };
        let mut metrics = Exposition::new(MetricsFormat::Text);
        write(&mut metrics, &(0..count).map(calls).collect::<Vec<_>>());
        metrics.finish()
    }

    #[test]
    fn the_first_services_have_lines_and_the_others_a_sum() {
        assert_eq!(written(0), "");
        let few = written(2);
        assert!(few.contains("cproxy_service_connections_total{namespace=\"default\",service=\"s0001\"} 1\n"), "{few}");
        assert!(!few.contains("others"));
        let many = written(1003);
        let sum = 1000 + 1001 + 1002;
        let line = format!("cproxy_service_connections_total{{namespace=\"\",service=\"(others)\"}} {sum}\n");
        assert!(many.contains(&line));
        assert!(many.contains("cproxy_service_refusals_total{namespace=\"\",service=\"(others)\"} 3\n"));
        assert_eq!(many.lines().filter(|line| line.contains("connections_total{")).count(), SERVICES_MAX + 1);
    }
}
