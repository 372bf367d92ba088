//! `cproxy resolve --policy`: whether network policies allow traffic, and which rule says so.

mod end;
mod question;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use cproxy_core::{Address, Problem, sorted_set};
use cproxy_policy::{Direction, Resolver};

use self::end::End;
pub(crate) use self::question::{Destination, Side};
use crate::{
    manifests::PolicyObjects,
    report::{PolicyAnswer, PolicyPair, common_verdict},
};

/// Answer to a question, and problems of policies that were found on the way.
#[derive(Debug)]
pub(crate) struct Judgement {
    pub(crate) answer: PolicyAnswer,
    pub(crate) problems: BTreeSet<Problem>,
    /// Objects that cannot be used and might change the verdict.
    pub(crate) unread: BTreeSet<String>,
}

/// Judges traffic by the policies of both sides. A side that is no pod of the objects has none.
///
/// # Errors
/// The question cannot be answered: the side, and why.
pub(crate) fn judge(objects: &PolicyObjects<'_>, from: &Side, to: &Destination) -> Result<Judgement, String> {
    let resolver: Resolver = objects.events().collect();
    let caller = End::new(objects, &resolver, from).map_err(|error| format!("--from {from}: {error}"))?;
    let at_to = |error: String| format!("--to {to}: {error}");
    let called = End::new(objects, &resolver, &to.side).map_err(at_to)?;
    let port = called.port(&to.port, to.protocol).map_err(at_to)?;
    if !caller.is_pod() && !called.is_pod() {
        return Err(format!("--from {from} --to {to}: neither is a pod of the manifests"));
    }
    let pair = |(source, destination): (Address, Address)| {
        let egress = caller.verdict(Direction::Egress, destination, to.protocol, port);
        let ingress = called.verdict(Direction::Ingress, source, to.protocol, port);
        PolicyPair::new(source.to_string(), destination.to_string(), egress, ingress)
    };
    let pairs: Vec<_> = address_pairs(&caller, &called).into_iter().map(pair).collect();
    if pairs.is_empty() {
        return Err(format!("--from {from} --to {to}: they have no addresses of one family"));
    }
    let mut problems = resolver.problems();
    problems.extend(caller.problems().into_iter().chain(called.problems()));
    let mut notes = caller.notes();
    notes.extend(called.notes().into_iter().filter(|note| !caller.notes().contains(note)));
    let answer = PolicyAnswer {
        verdict: common_verdict(pairs.iter().map(|pair| &*pair.verdict)).to_owned(),
        from: caller.name(),
        to: called.name(),
        protocol: to.protocol.to_string(),
        port,
        pairs,
        notes,
    };
    let namespaces = [&caller, &called].into_iter().filter_map(End::namespace);
    let unread = sorted_set(namespaces.flat_map(|namespace| objects.unread_of(namespace)));
    Ok(Judgement { answer, problems, unread })
}

/// Addresses of two ends that can talk to each other.
fn address_pairs(caller: &End<'_>, called: &End<'_>) -> Vec<(Address, Address)> {
    let all = caller.addresses().iter().flat_map(|from| called.addresses().iter().map(move |to| (*from, *to)));
    all.filter(|(from, to)| from.family() == to.family()).collect()
}
