//! Verdict of the pod's network policy on calls to it.

use std::{
    io,
    net::{IpAddr, UdpSocket},
    path::Path,
};

use cproxy_core::{Address, Frontend};
use cproxy_datapath::bpf::{PinDir, PolicyError, PolicyInForce, PolicyPins, PolicyReader, netns_cookie};
use cproxy_policy::Direction;

use crate::{
    report::{PodPolicyReport, PolicyAnswer, PolicyPair, PolicyVerdict},
    run_dir,
};

/// The verdict on a call of a peer to one of the pod's own addresses; `None` if no policy was ever enforced here.
///
/// # Errors
/// The policy in the kernel cannot be read, or the address is not the pod's.
pub fn ingress(from: IpAddr, to: Frontend, pins: &PinDir, run_dir: &Path) -> Option<Result<PolicyAnswer, String>> {
    let reader = PolicyReader::new(PolicyPins::new(pins))?;
    if let Some(breach) = breach(from, to.address.into()) {
        return Some(Err(breach));
    }
    let state = match reader.state() {
        Ok(state) => state,
        Err(error) => return Some(Err(error.to_string())),
    };
    // The addresses of another network namespace than the pod's are not known here.
    let is_in_pod = netns_cookie().is_ok_and(|cookie| cookie == state.netns_cookie);
    if is_in_pod && is_foreign(to.address) {
        let address = to.address;
        return Some(Err(format!(
            "{address} is no address of this pod: --from is about calls to the pod itself. Of a Service, ask for the \
             pod's own address and port behind it; `cproxy explain {to}` has its backends"
        )));
    }
    Some(judge(&reader, &state, from, to, run_dir).map_err(|error| error.to_string()))
}

/// Reason why no peer can make such a call.
fn breach(from: IpAddr, to: IpAddr) -> Option<String> {
    let reason = match to {
        _ if to.is_unspecified() || to.is_loopback() => "no address that a peer can call",
        _ if from.to_canonical().is_ipv4() != to.to_canonical().is_ipv4() => "of another family than the peer's",
        _ => return None,
    };
    Some(format!("{to} is {reason}: --from is about a peer's calls to an address of the pod"))
}

/// Whether no interface of this network namespace has the address.
fn is_foreign(address: Address) -> bool {
    let bound = UdpSocket::bind((IpAddr::from(address), 0));
    bound.is_err_and(|error| error.kind() == io::ErrorKind::AddrNotAvailable)
}

fn judge(
    reader: &PolicyReader,
    state: &PolicyInForce,
    from: IpAddr,
    to: Frontend,
    run_dir: &Path,
) -> Result<PolicyAnswer, PolicyError> {
    let Frontend { address, port, protocol } = to;
    let decision = reader.decide(state, Direction::Ingress, from.into(), protocol.into(), port)?;
    let report = run_dir::fetch_policy(run_dir).ok().flatten();
    let verdict = PodPolicyReport::verdict(report.as_ref(), Direction::Ingress, from.into(), decision);
    let is_denied = !decision.is_allowed && state.is_audited;
    let audited = is_denied.then(|| "it is only recorded: the policy is audited, not enforced".to_owned());
    let pod = report.map(|report| report.pod).filter(|pod| !pod.is_empty());
    let PolicyVerdict { verdict: word, .. } = &verdict;
    Ok(PolicyAnswer {
        verdict: word.clone(),
        from: from.to_string(),
        to: pod.unwrap_or_else(|| address.to_string()),
        protocol: protocol.to_string(),
        port,
        pairs: vec![PolicyPair::new(from.to_string(), address.to_string(), None, Some(verdict))],
        notes: audited.into_iter().collect(),
    })
}
