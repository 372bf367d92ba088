//! Lines about network policy, where one is in force.

use std::{fs, io, os::unix::fs::MetadataExt as _, path::Path};

use cproxy_core::counted;
use cproxy_datapath::bpf::{self, PinDir, PolicyHooks, PolicyInForce, PolicyPins, PolicyReader};
use cproxy_policy::Directions;

use super::requirement::{CheckResult, Requirement, degraded, missing, ok, optional, required, unknown};
use crate::run_dir::fetch_policy;

/// Network namespace of this process, which has to be the pod's.
const OWN_NETNS: &str = "/proc/self/ns/net";
/// Bits in sets of capabilities (include/uapi/linux/capability.h).
const CAP_NET_RAW: u64 = 1 << 13;
const CAP_SYS_ADMIN: u64 = 1 << 21;
/// Processes that a line names, at most.
const NAMED_MAX: usize = 3;
/// Settings of the kernel, each with what it forwards.
const FORWARDING: [(&str, &str); 2] =
    [("/proc/sys/net/ipv4/ip_forward", "IPv4"), ("/proc/sys/net/ipv6/conf/all/forwarding", "IPv6")];

/// Lines about the policy beside the table; none where none is enforced.
pub(super) fn policy(pins: &PinDir, cgroup: Option<&Path>, run_dir: &Path) -> Vec<Requirement> {
    let own = PolicyPins::new(pins);
    let Some(reader) = PolicyReader::new(own.clone()) else { return Vec::new() };
    let state = match reader.state() {
        Ok(state) => state,
        Err(error) => return vec![required("policy", missing(error))],
    };
    let Directions { ingress, egress } = state.directions;
    if !ingress && !egress {
        // The maps are there without a policy where addresses are received.
        let enforces = !matches!(fetch_policy(run_dir), Ok(None));
        return enforces.then(|| required("policy", in_force(&state, run_dir))).into_iter().collect();
    }
    let mut all = vec![required("policy", in_force(&state, run_dir))];
    if bpf::netns_cookie().ok() != Some(state.netns_cookie) {
        all.push(optional("policy_netns", unknown("run it in the pod's network namespace to see more")));
        return all;
    }
    all.push(required("policy_programs", attached(pins, cgroup, state.directions)));
    if ingress {
        all.push(optional("policy_other_programs", others(&own)));
    }
    all.push(optional("policy_raw_sockets", raw_sockets()));
    all.push(optional("policy_forwarding", forwarding()));
    all
}

fn in_force(state: &PolicyInForce, run_dir: &Path) -> CheckResult {
    let Directions { ingress, egress } = state.directions;
    let isolated = match (ingress, egress) {
        (true, true) => "isolated for ingress and egress",
        (true, false) => "isolated for ingress",
        (false, true) => "isolated for egress",
        (false, false) => "not isolated",
    };
    let mode = if state.is_audited { ", only audited" } else { "" };
    match fetch_policy(run_dir) {
        Ok(Some(report)) => match report.missing {
            Some(reason) => degraded(format!("the present policy of the pod is not in force: {reason}")),
            None => ok(format!("the pod is {isolated}{mode}")),
        },
        Ok(None) => degraded(format!("the agent enforces none, and an earlier one has left the pod {isolated}{mode}")),
        Err(_) => ok(format!("the pod is {isolated}{mode}, as the last agent has left it")),
    }
}

fn attached(pins: &PinDir, cgroup: Option<&Path>, directions: Directions) -> CheckResult {
    let Some(cgroup) = cgroup else { return unknown("cgroup2 is not mounted") };
    match PolicyHooks::open(pins, cgroup, Path::new(OWN_NETNS)).and_then(|hooks| hooks.are_attached(directions)) {
        Ok(true) => ok("attached"),
        Ok(false) => missing("one is not attached, and denies nothing; a running agent attaches it within a minute"),
        Err(error) => missing(error),
    }
}

/// Programs of others that look sockets up: one that assigns a socket overrides a denial.
fn others(pins: &PolicyPins) -> CheckResult {
    match bpf::other_lookup_programs(pins, Path::new(OWN_NETNS)) {
        Ok(names) if names.is_empty() => ok("no other program looks sockets up"),
        Ok(names) => degraded(format!(
            "programs of others look sockets up, and each can let in what policy denies: {}",
            names.join(", ")
        )),
        Err(error) => unknown(error),
    }
}

/// Processes that can send and receive packets past all sockets' hooks. Those that could detach the programs as well
/// are no more dangerous for it.
fn raw_sockets() -> CheckResult {
    let own = fs::metadata(OWN_NETNS).map(|own| own.ino());
    let processes = own.and_then(|own| Ok((own, fs::read_dir("/proc")?)));
    let (own, processes) = match processes {
        Ok(found) => found,
        Err(error) => return unknown(format!("/proc: {error}")),
    };
    let dirs = processes.filter_map(Result::ok).map(|entry| entry.path());
    let found: Vec<_> = dirs.filter_map(|dir| with_raw_sockets(&dir, own).ok().flatten()).collect();
    if found.is_empty() {
        return ok("no process but root of this VM can make raw or packet sockets");
    }
    let more = found.len().saturating_sub(NAMED_MAX);
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    degraded(format!(
        "{} with CAP_NET_RAW can send and receive packets that no policy sees: {}{more}; drop the capability",
        counted(found.len() as u64, "process", "processes"),
        found.iter().take(NAMED_MAX).map(String::as_str).collect::<Vec<_>>().join(", ")
    ))
}

/// Name of a process with raw sockets in the network namespace with this inode number.
fn with_raw_sockets(dir: &Path, netns: u64) -> io::Result<Option<String>> {
    let Some(pid) = dir.file_name().and_then(|name| name.to_str()?.parse::<u32>().ok()) else { return Ok(None) };
    let status = fs::read_to_string(dir.join("status"))?;
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let effective = field("CapEff:").and_then(|hex| u64::from_str_radix(hex, 16).ok()).unwrap_or_default();
    if effective & CAP_NET_RAW == 0
        || effective & CAP_SYS_ADMIN != 0
        || fs::metadata(dir.join("ns/net"))?.ino() != netns
    {
        return Ok(None);
    }
    Ok(Some(format!("{}[{pid}]", field("Name:").unwrap_or_default())))
}

fn forwarding() -> CheckResult {
    let is_on = |(path, _): &(&str, &str)| fs::read_to_string(path).is_ok_and(|text| text.trim() == "1");
    let families: Vec<_> = FORWARDING.iter().filter(|setting| is_on(setting)).map(|(_, family)| *family).collect();
    if families.is_empty() {
        return ok("packets of others are not forwarded");
    }
    degraded(format!(
        "{} packets are forwarded, such as those of nested containers: no policy sees them",
        families.join(" and ")
    ))
}
