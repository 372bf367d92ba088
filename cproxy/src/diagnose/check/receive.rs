//! Traffic from outside: programs, routes, sockets that listen, and settings of the kernel.

use std::{fs, path::Path};

use cproxy_core::{Address, counted};
use cproxy_datapath::bpf::{self, PinDir, ReceiveMaps, ReceivePins};
use cproxy_network::LocalRoutes;

use super::requirement::{CheckResult, Requirement, degraded, missing, ok, optional, required, unknown};
use crate::{
    report::{ReceivedRow, some_of},
    run_dir::fetch_received,
};

/// Settings of each interface.
const INTERFACES: &str = "/proc/sys/net/ipv4/conf";

/// Lines about traffic from outside; none where it is not received.
pub(super) fn receive(pins: &PinDir, run_dir: &Path) -> Vec<Requirement> {
    let own = ReceivePins::new(pins);
    if !own.exist() {
        return Vec::new();
    }
    vec![
        required("receive_programs", programs(pins)),
        required("receive_routes", routes(&own)),
        optional("receive_listeners", listeners(run_dir)),
        optional("receive_rp_filter", rp_filter()),
        optional("receive_arp", arp()),
    ]
}

/// Where the balancer is on the same network segment, it must be alone in answering questions about its address.
fn arp() -> CheckResult {
    match interfaces_with("arp_ignore", "0").as_slice() {
        [] => ok("no interface answers ARP requests about addresses of load balancers"),
        answering => degraded(format!(
            "{} answers ARP requests about addresses of load balancers: set net.ipv4.conf.all.arp_ignore=1 if a \
             balancer is on the same segment",
            some_of(answering)
        )),
    }
}

/// Interfaces whose setting has a value. The larger one counts of theirs and that for all
/// (Documentation/networking/ip-sysctl.rst).
fn interfaces_with(setting: &str, value: &str) -> Vec<String> {
    let read = |name: &str| fs::read_to_string(format!("{INTERFACES}/{name}/{setting}")).unwrap_or_default();
    let of_all = read("all");
    let entries = fs::read_dir(INTERFACES).into_iter().flatten().filter_map(Result::ok);
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let names = names.filter(|name| !["all", "default", "lo"].contains(&name.as_str()));
    names.filter(|name| of_all.trim().max(read(name).trim()) == value).collect()
}

fn programs(pins: &PinDir) -> CheckResult {
    match bpf::is_receiving(pins) {
        Ok(true) => ok("attached"),
        Ok(false) => missing("one is not attached; a running agent attaches it within a minute"),
        Err(error) => missing(error),
    }
}

fn routes(pins: &ReceivePins) -> CheckResult {
    let addresses = match ReceiveMaps::open(pins, false).and_then(|maps| maps.read()) {
        Ok(table) => table.addresses,
        Err(error) => return missing(error),
    };
    let listed = LocalRoutes::open().and_then(|mut routes| routes.list());
    let listed: Vec<Address> = match listed {
        Ok(listed) => listed.ours.into_iter().map(Address::from).collect(),
        Err(error) => return unknown(error),
    };
    let without: Vec<_> = addresses.iter().filter(|one| !listed.contains(one)).map(ToString::to_string).collect();
    match without.as_slice() {
        [] => ok(format!("{} received", counted(addresses.len() as u64, "address", "addresses"))),
        without => degraded(format!(
            "no local route of cproxy for {}: the machine has the address in another way, or takes no packets to it",
            some_of(without)
        )),
    }
}

fn listeners(run_dir: &Path) -> CheckResult {
    let rows = match fetch_received(run_dir) {
        Ok(Some(rows)) => rows,
        Ok(None) => return unknown("the running agent receives nothing"),
        Err(_) => return unknown("only a running agent knows"),
    };
    let lacks = |row: &&ReceivedRow| row.listener.as_deref().is_some_and(|listener| listener != "yes");
    let lacking: Vec<_> = rows.iter().filter(lacks).map(|row| format!("{}:{}", row.address, row.port)).collect();
    match lacking.as_slice() {
        [] => ok("a socket listens for each port"),
        lacking => degraded(format!("no socket is found for {}: `cproxy explain --to` says why", some_of(lacking))),
    }
}

/// With a strict filter, packets of clients whose route leads through another interface are dropped. 1 is strict, and 2
/// is loose.
fn rp_filter() -> CheckResult {
    match interfaces_with("rp_filter", "1").as_slice() {
        [] => ok("no interface filters strictly by source"),
        strict => degraded(format!(
            "{} filters strictly by source (rp_filter 1): a client whose route leads elsewhere is dropped",
            some_of(strict)
        )),
    }
}
