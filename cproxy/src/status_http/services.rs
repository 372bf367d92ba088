//! Metrics of single Services, if the programs count calls by Service. Their number is bounded: monitoring pays for
//! each of them in each VM.

use cproxy_daemon::{Exposition, MetricKind};
use cproxy_datapath::bpf::ServiceCounts;

use crate::state::ServiceCalls;

/// Services with lines of their own. Calls of the others are summed.
const SERVICES_MAX: usize = 1000;

/// Namespace and name for the sum of the others. No object has such a name.
const OTHERS: (&str, &str) = ("", "(others)");

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
    use cproxy_core::ServiceName;
    use cproxy_daemon::MetricsFormat;

    use super::*;

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
