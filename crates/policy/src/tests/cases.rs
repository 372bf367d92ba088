//! The rules of policies as cases in `cases/*.yaml`, whose format `cases/README.md` describes.

use std::collections::BTreeSet;

use cproxy_core::ObjectName;
use cproxy_testing::encoding;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;

use super::{
    oracle::{Traffic, addresses},
    world::{Gone, Object, World},
};

/// Content of a file of cases.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    /// Objects that every case has, unless it has one of the same kind and name.
    #[serde(default)]
    with: Vec<Value>,
    cases: Vec<Case>,
}

/// Objects with the expected verdicts, and the steps that change them.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    name: String,
    /// Number of the rule.
    rule: u32,
    source: String,
    #[serde(flatten)]
    step: CaseStep,
    #[serde(default)]
    then: Vec<CaseStep>,
}

/// New objects, and the expected verdicts.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CaseStep {
    #[serde(default)]
    given: Vec<Value>,
    /// Deleted objects: kind namespace/name, or kind name for a Namespace.
    #[serde(default)]
    gone: Vec<String>,
    #[serde(default)]
    allowed: Vec<String>,
    #[serde(default)]
    denied: Vec<String>,
    /// A piece of each problem's text; there are no others.
    #[serde(default)]
    problems: Vec<String>,
}

/// Numbers of the rules that this crate resolves, as `cases/README.md` lists them. The others are about programs in
/// the kernel, or about later kinds.
const RULES: [u32; 31] =
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 39, 40];

const FILES: [(&str, &str); 4] = [
    ("isolation", include_str!("../cases/isolation.yaml")),
    ("peers", include_str!("../cases/peers.yaml")),
    ("ports", include_str!("../cases/ports.yaml")),
    ("pods", include_str!("../cases/pods.yaml")),
];

fn read(text: &str) -> File {
    // The files are the project's own: what many cases share is written once, however many they are.
    let budget = serde_saphyr::budget! { enforce_alias_anchor_ratio: false };
    let options = serde_saphyr::options! { strict_booleans: true, budget: budget };
    serde_saphyr::from_str_with_options(text, options).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn each_case_has_its_verdicts() {
    let mut failures = Vec::new();
    let mut names = BTreeSet::new();
    for (file, text) in FILES {
        let File { with, cases } = read(text);
        for case in cases {
            let place = format!("{file}: {}", case.name);
            failures.extend(case.play(&with).err().map(|error| format!("{place}: {error}")));
            assert!(names.insert(case.name.clone()), "{place}: the name is there twice");
        }
    }
    assert!(failures.is_empty(), "{} cases:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn each_rule_has_a_case() {
    let rules: BTreeSet<u32> = FILES.iter().flat_map(|(_, text)| read(text).cases).map(|case| case.rule).collect();
    assert_eq!(rules, RULES.into_iter().chain([43]).collect());
}

#[test]
fn a_case_that_is_wrong_fails() {
    let (_, text) = FILES[0];
    let play = |fields: &str| {
        let text = format!("cases: [{{name: a, rule: 1, source: b, {fields}}}]");
        std::panic::catch_unwind(|| read(&text).cases.remove(0).play(&read(FILES[0].1).with))
            .is_ok_and(|played| played.is_ok())
    };
    assert!(!read(text).with.is_empty());
    assert!(play("allowed: [shop/web from shop/api TCP 80]"));
    assert!(!play("denied: [shop/web from shop/api TCP 80]"), "a wrong verdict");
    assert!(!play("allowed: [shop/web from shop/api TCP 80], problems: [x]"), "a problem that is not there");
    assert!(!play("allowed: [shop/none from shop/api TCP 80]"), "a pod that is not there");
    assert!(!play("mistyped: 1"), "an unknown field");
}

impl Case {
    /// Plays the case with its objects in order and reversed, in JSON and in protobuf: neither must matter.
    fn play(&self, with: &[Value]) -> Result<(), String> {
        if self.source.is_empty() {
            return Err("no source".to_owned());
        }
        let id = |object: &Value| {
            format!("{:?}", ["/kind", "/metadata/namespace", "/metadata/name"].map(|at| object.pointer(at)))
        };
        let own: BTreeSet<_> = self.step.given.iter().map(id).collect();
        let common = with.iter().filter(|object| !own.contains(&id(object)));
        let objects: Vec<_> = common.chain(&self.step.given).collect();
        for is_reversed in [false, true] {
            for decode in [json, protobuf] {
                self.play_in_order(&objects, is_reversed, decode)?;
            }
        }
        Ok(())
    }

    fn play_in_order(&self, objects: &[&Value], is_reversed: bool, decode: fn(&Value) -> Object) -> Result<(), String> {
        let mut world = World::default();
        let mut objects = objects.to_vec();
        if is_reversed {
            objects.reverse();
        }
        for object in objects {
            drop(world.put(&decode(object)));
        }
        self.step.check(&world)?;
        for (index, step) in self.then.iter().enumerate() {
            step.gone.iter().for_each(|text| drop(world.remove(&gone(text))));
            step.given.iter().for_each(|object| drop(world.put(&decode(object))));
            step.check(&world).map_err(|error| format!("then[{index}]: {error}"))?;
        }
        Ok(())
    }
}

impl CaseStep {
    fn check(&self, world: &World) -> Result<(), String> {
        world.check()?;
        for (texts, expected) in [(&self.allowed, true), (&self.denied, false)] {
            for text in texts {
                check_verdict(world, text, expected).map_err(|error| format!("{text}: {error}"))?;
            }
        }
        let problems = world.problems();
        let is_expected = |problem: &&String| self.problems.iter().any(|piece| problem.contains(piece.as_str()));
        let is_there = |piece: &&String| problems.iter().any(|problem| problem.contains(piece.as_str()));
        if problems.len() != self.problems.len() || !problems.iter().all(|problem| is_expected(&problem)) {
            return Err(format!("problems: {problems:#?}"));
        }
        self.problems.iter().find(|piece| !is_there(piece)).map_or(Ok(()), |piece| Err(format!("no problem {piece:?}")))
    }
}

/// Checks a line like `shop/web from shop/api TCP 80,81`, or `to`, with a pod or an address.
fn check_verdict(world: &World, text: &str, expected: bool) -> Result<(), String> {
    let words: Vec<_> = text.split_whitespace().collect();
    let &[name, direction, peer, protocol, ports] = &*words else {
        return Err("is not: pod from peer TCP port".into());
    };
    let find = |name: &str| {
        let (namespace, name) = name.split_once('/')?;
        world.cluster.pods.get(&(namespace.to_owned(), name.to_owned()))
    };
    let pod = find(name).ok_or("there is no such pod")?;
    let peers = match find(peer) {
        Some(pod) => addresses(pod).collect(),
        None => vec![peer.parse().map_err(|_| "the peer is no pod and no address")?],
    };
    let protocol = ["TCP", "UDP", "SCTP"].into_iter().find(|known| *known == protocol).ok_or("no protocol")?;
    let is_ingress = direction == "from";
    let compiled = world.compiled(&ObjectName::new(&pod.metadata.namespace, &*pod.metadata.name));
    for peer in peers {
        for port in ports.split(',') {
            let port = port.parse().map_err(|_| "no port")?;
            let allowed = world.allows(pod, &compiled, Traffic { is_ingress, peer, protocol, port })?;
            if allowed != expected {
                return Err(format!("{peer} {port} is {}", if allowed { "allowed" } else { "denied" }));
            }
        }
    }
    Ok(())
}

fn gone(text: &str) -> Gone {
    let (kind, name) = text.split_once(' ').unwrap();
    let (namespace, own) = name.split_once('/').unwrap_or(("", name));
    match kind {
        "Namespace" => Gone::Namespace(own.to_owned()),
        "Pod" => Gone::Pod(namespace.to_owned(), own.to_owned()),
        "NetworkPolicy" => Gone::Policy(namespace.to_owned(), own.to_owned()),
        _ => panic!("{text}: unknown kind"),
    }
}

/// Object as an API server sends it in JSON.
fn json(object: &Value) -> Object {
    fn read<T: DeserializeOwned>(object: &Value) -> T {
        serde_json::from_value(object.clone()).unwrap_or_else(|error| panic!("{error}: {object}"))
    }
    match object["kind"].as_str() {
        Some("Namespace") => Object::Namespace(read(object)),
        Some("Pod") => Object::Pod(read(object)),
        Some("NetworkPolicy") => Object::Policy(read(object)),
        _ => panic!("{object}: unknown kind"),
    }
}

/// Object as an API server sends it in protobuf.
fn protobuf(object: &Value) -> Object {
    fn read<T: prost::Message + Default>(object: &Value) -> T {
        T::decode(&*encoding::object(object)).unwrap_or_else(|error| panic!("{error}: {object}"))
    }
    match object["kind"].as_str() {
        Some("Namespace") => Object::Namespace(read(object)),
        Some("Pod") => Object::Pod(read(object)),
        Some("NetworkPolicy") => Object::Policy(read(object)),
        _ => panic!("{object}: unknown kind"),
    }
}
