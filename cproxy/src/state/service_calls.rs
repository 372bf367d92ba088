//! Calls by Service.

use std::collections::BTreeMap;

use cproxy_core::{FrontendName, ServiceName};
use cproxy_datapath::bpf::{ServiceCounters, ServiceCounts};

/// Calls to a Service since the programs were installed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceCalls {
    /// The Service.
    pub service: ServiceName,
    /// Their numbers.
    pub counts: ServiceCounts,
}

impl ServiceCalls {
    /// Sums of counters by Service. Calls to frontends that have gone since have no Service. A Service has the calls to
    /// other ports of its addresses, too.
    pub fn of<'a>(mut counters: ServiceCounters, names: impl Iterator<Item = FrontendName<'a>>) -> Vec<Self> {
        let mut sums = BTreeMap::<&ServiceName, ServiceCounts>::new();
        for FrontendName { frontend, service, .. } in names {
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

#[cfg(test)]
mod tests {
    use cproxy_core::{Action, Frontend, FrontendSource, Protocol};

    use super::*;

    #[test]
    fn calls_to_all_frontends_of_a_service_and_to_other_ports_of_its_addresses_are_summed() {
        let at = |address: &str, port| Frontend {
            address: cproxy_core::parse_address(address).unwrap(),
            port,
            protocol: Protocol::Tcp,
        };
        let counts = |connections, refusals| ServiceCounts { connections, refusals, drops: 0 };
        let web = ServiceName { namespace: "a".into(), name: "web".into() };
        let (http, https) = (at("10.0.0.1", 80), at("10.0.0.1", 443));
        let counters = ServiceCounters {
            frontends: [(http, counts(2, 0)), (https, counts(1, 1)), (at("10.0.0.9", 1), counts(5, 5))].into(),
            addresses: [(http.address, counts(0, 4))].into(),
        };
        let names = [(http, &web), (https, &web)].map(|(frontend, service)| FrontendName {
            frontend,
            service,
            port_name: "",
            source: FrontendSource::ClusterIp,
            action: Action::Forward,
        });
        let calls = ServiceCalls::of(counters, names.into_iter());
        assert_eq!(calls, [ServiceCalls { service: web.clone(), counts: counts(3, 5) }]);
    }
}
