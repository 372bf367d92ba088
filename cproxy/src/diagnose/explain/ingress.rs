//! Verdict of the pod's network policy on calls to it.

use std::{net::IpAddr, path::Path};

use cproxy_core::Frontend;
use cproxy_datapath::bpf::{PinDir, PolicyError, PolicyPins, PolicyReader};
use cproxy_policy::Direction;

use crate::{
    report::{PodPolicyReport, PolicyAnswer, PolicyPair, PolicyVerdict},
    run_dir,
};

/// The verdict on a call of a peer to one of the pod's own addresses; `None` if no policy was ever enforced here.
///
/// # Errors
/// The policy in the kernel cannot be read.
pub fn ingress(from: IpAddr, to: Frontend, pins: &PinDir, run_dir: &Path) -> Option<Result<PolicyAnswer, PolicyError>> {
    let reader = PolicyReader::new(PolicyPins::new(pins))?;
    Some(judge(&reader, from, to, run_dir))
}

fn judge(reader: &PolicyReader, from: IpAddr, to: Frontend, run_dir: &Path) -> Result<PolicyAnswer, PolicyError> {
    let Frontend { address, port, protocol } = to;
    let state = reader.state()?;
    let decision = reader.decide(&state, Direction::Ingress, from.into(), protocol.into(), port)?;
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
