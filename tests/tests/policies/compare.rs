//! Comparison of the verdicts.

use std::{collections::BTreeMap, net::IpAddr};

use serde_json::Value;

use crate::{
    cluster::{Cluster, Traffic},
    declared::{Difference, OF_CYCLONUS, OF_KUBE_NETWORK_POLICIES},
    engines::Engines,
    verdicts::{Exempt, Policies, Sides},
};

/// The engines have neither pods that may always talk to themselves nor nodes that may always talk to their pods.
const EXEMPT: &str = "a pod itself and its node";
/// The engines take a loopback address for one of another host.
const LOOPBACK: &str = "loopback";

/// How often each permitted difference has changed a verdict.
#[derive(Debug, Default)]
pub(crate) struct Tally(BTreeMap<(&'static str, &'static str), usize>);

impl Tally {
    fn add(&mut self, engine: &'static str, name: &'static str) {
        *self.0.entry((engine, name)).or_default() += 1;
    }

    /// Checks that each permitted difference is one, and that both verdicts were there.
    pub(crate) fn check(&self) {
        let of = |engine, all: &[&Difference]| -> Vec<_> { all.iter().map(|one| (engine, one.name)).collect() };
        let mut wanted = of("kube-network-policies", &OF_KUBE_NETWORK_POLICIES);
        wanted.extend(of("cyclonus", &OF_CYCLONUS));
        wanted.extend([("both", EXEMPT), ("both", LOOPBACK), ("both", "allowed"), ("both", "denied")]);
        for key in wanted {
            assert!(self.0.contains_key(&key), "no {key:?}: {self:?}");
        }
    }
}

/// Policies of a cluster, and of the same one after each further change.
fn steps(cluster: &Cluster, differences: &[&'static Difference]) -> Vec<(&'static str, Policies)> {
    let mut cluster = cluster.clone();
    let step = |difference: &&'static Difference| {
        (difference.change)(&mut cluster);
        (difference.name, Policies::new(&cluster, Exempt::Nothing))
    };
    differences.iter().map(step).collect()
}

/// The verdicts after all permitted differences of an engine.
fn after(
    steps: &[(&'static str, Policies)],
    traffic: &Traffic,
    plain: Sides,
    mut changed: impl FnMut(&'static str),
) -> Sides {
    steps.iter().fold(plain, |before, (name, policies)| {
        let after = policies.sides(traffic);
        if after != before {
            changed(name);
        }
        after
    })
}

/// The first difference that is not permitted.
pub(crate) fn difference(cluster: &Cluster, engines: &mut Engines, tally: &mut Tally) -> Option<String> {
    let [real, plain] = [Exempt::OwnAndNode, Exempt::Nothing].map(|exempt| Policies::new(cluster, exempt));
    let first = steps(cluster, &OF_KUBE_NETWORK_POLICIES);
    let second = steps(cluster, &OF_CYCLONUS);
    for (traffic, found) in cluster.traffic.iter().zip(engines.verdicts(cluster)) {
        let (real, plain) = (real.sides(traffic), (plain.sides(traffic), plain.exempt(traffic)));
        if traffic.to.parse::<IpAddr>().unwrap().is_loopback() {
            if !real.both() {
                return Some(format!("{traffic:?}: loopback is denied: {real:?}"));
            }
            if !found.kube_network_policies && !found.cyclonus.both() {
                tally.add("both", LOOPBACK);
            }
            continue;
        }
        let (plain, exempt) = plain;
        tally.add("both", if plain.both() { "allowed" } else { "denied" });
        let wanted = Sides { egress: plain.egress || exempt.egress, ingress: plain.ingress || exempt.ingress };
        if real != wanted {
            return Some(format!("{traffic:?}: cproxy {real:?}, with own and node {wanted:?}"));
        }
        if real != plain {
            tally.add("both", EXEMPT);
        }
        let expected = after(&first, traffic, plain, |name| tally.add("kube-network-policies", name));
        if expected.both() != found.kube_network_policies {
            let allowed = found.kube_network_policies;
            return Some(format!("{traffic:?}: kube-network-policies {allowed}, cproxy {plain:?}, {expected:?}"));
        }
        let expected = after(&second, traffic, plain, |name| tally.add("cyclonus", name));
        if expected != found.cyclonus {
            return Some(format!("{traffic:?}: cyclonus {:?}, cproxy {plain:?}, {expected:?}", found.cyclonus));
        }
    }
    None
}

/// A part of the cluster that still has a difference, and no object and traffic that it does not need.
pub(crate) fn reduce(mut cluster: Cluster, engines: &mut Engines) -> Cluster {
    let mut differs = |cluster: &Cluster| difference(cluster, engines, &mut Tally::default()).is_some();
    let all = cluster.traffic.clone();
    for traffic in all {
        let one = Cluster { traffic: vec![traffic], ..cluster.clone() };
        if differs(&one) {
            cluster = one;
            break;
        }
    }
    let lists: [fn(&mut Cluster) -> &mut Vec<Value>; 2] = [|of| &mut of.policies, |of| &mut of.pods];
    for list in lists {
        for index in (0..list(&mut cluster).len()).rev() {
            let mut less = cluster.clone();
            list(&mut less).remove(index);
            if differs(&less) {
                cluster = less;
            }
        }
    }
    cluster
}
