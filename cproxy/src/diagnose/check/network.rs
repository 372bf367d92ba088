//! The machine's network: routes to backends, MTU, nameservers.

use std::{collections::BTreeSet, fs, io, net::IpAddr, path::Path, time::Duration};

use cproxy_core::KernelTable;
use cproxy_network::{NetworkPath, SocketSetup};

use super::requirement::{CheckResult, Requirement, degraded, ok, optional};
use crate::report::FrontendRow;

/// Most backends of a family whose routes are looked up.
const BACKENDS_MAX: usize = 256;

/// Smallest MTU with which a device has IPv6 (RFC 8200, 5).
const IPV6_MTU_MIN: u32 = 1_280;
/// Largest MTU that every network has.
const MTU_USUAL: u32 = 1_500;

/// Limit on the answers of all nameservers.
pub(super) const DNS_TIME_MAX: Duration = Duration::from_secs(2);

const NO_NAMES: &str = "Services can be used by address, not by name";

/// State of one family in the kernel.
struct FamilyState {
    default_route: io::Result<NetworkPath>,
    /// Number of distinct backends, of those without a route, and the first of these.
    backends: usize,
    unreachable: usize,
    example: Option<(IpAddr, io::Error)>,
}

impl FamilyState {
    fn look(is_ipv4: bool, table: Option<&KernelTable>, setup: &SocketSetup) -> Self {
        let backends = table.map(|table| backends(table, is_ipv4)).unwrap_or_default();
        let failures = backends.iter().filter_map(|to| Some((*to, NetworkPath::to(*to, setup).err()?)));
        let mut failures = failures.collect::<Vec<_>>();
        Self {
            default_route: NetworkPath::default_route(is_ipv4, setup),
            backends: backends.len(),
            unreachable: failures.len(),
            example: (!failures.is_empty()).then(|| failures.swap_remove(0)),
        }
    }
}

fn backends(table: &KernelTable, is_ipv4: bool) -> BTreeSet<IpAddr> {
    let members = table.frontends.values().filter_map(|set| table.sets.get(set)).map(|set| set.members.eligible());
    let addresses = members.flatten().map(|backend| IpAddr::from(backend.address));
    let mut found = BTreeSet::new();
    for address in addresses.filter(|address| address.is_ipv4() == is_ipv4) {
        found.insert(address);
        if found.len() == BACKENDS_MAX {
            break;
        }
    }
    found
}

/// Lines about both families.
pub(super) fn families(table: Option<&KernelTable>, setup: &SocketSetup) -> [Requirement; 2] {
    let [v4, v6] = [true, false].map(|is_ipv4| FamilyState::look(is_ipv4, table, setup));
    let mtu = v4.default_route.as_ref().ok().map(|path| path.mtu_bytes);
    let without_ipv6 = reason_without_ipv6(sysctl("ipv6/conf/all/disable_ipv6").as_deref(), mtu);
    let is_off = |name| sysctl(name).as_deref() == Some("0");
    let no_probing = is_off("ipv4/tcp_mtu_probing");
    let v4 = match (family(&v4, None, no_probing), is_off("ipv4/ip_no_pmtu_disc")) {
        (result, true) => result,
        ((_, detail), false) => degraded(format!(
            "{detail}; net.ipv4.ip_no_pmtu_disc is set, so that large packets are fragmented on narrow paths: set it \
             to 0"
        )),
    };
    [optional("ipv4", v4), optional("ipv6", family(&v6, without_ipv6, no_probing))]
}

fn family(state: &FamilyState, cause: Option<&str>, no_probing: bool) -> CheckResult {
    let cause = cause.map(|cause| format!(" ({cause})")).unwrap_or_default();
    if let Some((address, error)) = &state.example {
        let FamilyState { unreachable, backends, .. } = state;
        return degraded(format!(
            "no route to {unreachable} of {backends} backends, such as {address}{cause}: {error}; add a route, or \
             calls that get them fail"
        ));
    }
    match &state.default_route {
        Err(_) if state.backends == 0 => ok(format!("no default route{cause}; no Service needs it")),
        Err(_) => ok(format!("no default route{cause}; each backend has a route")),
        Ok(NetworkPath { source, mtu_bytes }) => {
            let large = *mtu_bytes > MTU_USUAL && !source.is_loopback() && no_probing;
            let hint = if large {
                ": if connections stall although they were made, a part of the way has a smaller one and does not say \
                 so; net.ipv4.tcp_mtu_probing=1 helps"
            } else {
                ""
            };
            ok(format!("packets leave from {source}, MTU {mtu_bytes}{hint}"))
        }
    }
}

/// Reason why the machine has no IPv6; `None` if it may have it.
fn reason_without_ipv6(disabled: Option<&str>, mtu_bytes: Option<u32>) -> Option<&'static str> {
    match (disabled, mtu_bytes) {
        (None, _) => Some("the kernel has no IPv6"),
        (Some("1"), _) => Some("net.ipv6.conf.all.disable_ipv6 is set"),
        (_, Some(0..IPV6_MTU_MIN)) => Some("the device's MTU is below 1280, with which there is no IPv6"),
        _ => None,
    }
}

/// A setting of the network namespace; `None` if the kernel does not have it.
fn sysctl(name: &str) -> Option<String> {
    let value = fs::read_to_string(Path::new("/proc/sys/net").join(name)).ok()?;
    Some(value.trim().to_owned())
}

/// A nameserver, and the time until its answer.
pub(super) type DnsAnswer = (IpAddr, io::Result<Duration>);

/// Line about the nameservers. `services`: rows of a running agent. `is_served`: this process is in the cgroup of the
/// programs, or there are none.
pub(super) fn dns(
    answers: &[DnsAnswer],
    table: Option<&KernelTable>,
    services: &[FrontendRow],
    is_served: bool,
) -> CheckResult {
    let is_cluster_ip = |server: IpAddr| {
        table.is_some_and(|table| table.frontends.keys().any(|frontend| IpAddr::from(frontend.address) == server))
    };
    let service = |server: IpAddr| {
        let row = services.iter().find(|row| row.address == server);
        row.and_then(|row| row.service.as_deref()).map(|name| format!(" ({name})"))
    };
    let mut failures = Vec::new();
    for (server, answer) in answers {
        let name = service(*server).unwrap_or_default();
        if is_cluster_ip(*server) && !is_served {
            return ok(format!("{server}{name} is a ClusterIP, and this process is not in the cgroup that is served"));
        }
        match answer {
            Ok(time) if failures.is_empty() => {
                return ok(format!("{server}{name} answered after {} ms", time.as_millis()));
            }
            Ok(time) => {
                let failures = failures.join("; ");
                return degraded(format!(
                    "{server}{name} answered after {} ms, but not those before it, for which each lookup waits: \
                     {failures}",
                    time.as_millis()
                ));
            }
            Err(error) => failures.push(format!("{server}{name}: {error}")),
        }
    }
    degraded(format!("no nameserver of /etc/resolv.conf answered, {NO_NAMES}: {}", failures.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnose::check::requirement::RequirementState;

    fn state(path: Option<(&str, u32)>, backends: usize, unreachable: Option<&str>) -> FamilyState {
        let error = || io::Error::from_raw_os_error(libc::ENETUNREACH);
        FamilyState {
            default_route: path
                .map(|(source, mtu_bytes)| NetworkPath { source: source.parse().unwrap(), mtu_bytes })
                .ok_or_else(error),
            backends,
            unreachable: unreachable.iter().len(),
            example: unreachable.map(|address| (address.parse().unwrap(), error())),
        }
    }

    #[test]
    fn a_family_is_degraded_if_backends_have_no_route() {
        for (state, cause, expected, text) in [
            (state(Some(("10.0.0.2", 1_500)), 3, None), None, RequirementState::Ok, "packets leave from 10.0.0.2"),
            (state(Some(("10.0.0.2", 9_001)), 3, None), None, RequirementState::Ok, "tcp_mtu_probing=1 helps"),
            (state(Some(("127.0.0.1", 65_536)), 0, None), None, RequirementState::Ok, "MTU 65536"),
            (state(None, 0, None), None, RequirementState::Ok, "no default route; no Service needs it"),
            (state(None, 2, None), None, RequirementState::Ok, "each backend has a route"),
            (
                state(None, 2, Some("fd00::1")),
                Some("disabled"),
                RequirementState::Degraded,
                "no route to 1 of 2 backends, such as fd00::1 (disabled): Network is unreachable",
            ),
        ] {
            let (state, detail) = family(&state, cause, true);
            assert!(state == expected && detail.contains(text), "{state:?} {detail}");
        }
        assert!(!family(&state(Some(("127.0.0.1", 65_536)), 0, None), None, true).1.contains("probing"));
    }

    #[test]
    fn the_reason_why_there_is_no_ipv6_is_named() {
        assert_eq!(reason_without_ipv6(Some("0"), Some(1_500)), None);
        assert!(reason_without_ipv6(None, None).unwrap().contains("kernel"));
        assert!(reason_without_ipv6(Some("1"), None).unwrap().contains("disable_ipv6"));
        assert!(reason_without_ipv6(Some("0"), Some(1_279)).unwrap().contains("1280"));
    }

    #[test]
    fn a_nameserver_that_does_not_answer_is_named_with_its_service() {
        let server = |text: &str| text.parse::<IpAddr>().unwrap();
        let good = |address| (server(address), Ok(Duration::from_millis(3)));
        let bad = |address| (server(address), Err(io::Error::other("no answer within 2s")));
        let line = |answers: &[DnsAnswer]| dns(answers, None, &[], true);
        assert_eq!(line(&[good("10.0.0.1")]), ok("10.0.0.1 answered after 3 ms"));
        let (state, detail) = line(&[bad("10.0.0.1"), good("10.0.0.2")]);
        assert!(state == RequirementState::Degraded && detail.contains("10.0.0.1: no answer"), "{detail}");
        let (state, detail) = line(&[bad("10.0.0.1")]);
        assert!(state == RequirementState::Degraded && detail.contains("not by name"), "{detail}");
    }
}
