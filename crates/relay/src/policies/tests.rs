//! Histories of replicas and clients, and a relay that follows another.

use std::{
    collections::{BTreeMap, BTreeSet},
    pin::Pin,
    task::{Context, Poll, Waker},
};

use cproxy_policy::{Namespace, api};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::{Filter, List, Watch, WatchOptions, WatchStart};

const INPUTS: [PolicyInput; 3] = [PolicyInput::Pods, PolicyInput::Namespaces, PolicyInput::NetworkPolicies];
const NAMESPACES: [&str; 2] = ["a", "b"];
const NODES: [&str; 2] = ["n0", "n1"];

/// Step of a random history.
#[derive(Clone, Debug)]
enum Step {
    /// A pod is there or has changed: namespace, name, UID, app, node.
    Pod(usize, u8, u8, u8, usize),
    PodGone(usize, u8),
    /// A policy of a namespace selects an app, and allows some peers.
    Policy(usize, u8, Option<u8>, u8),
    PolicyGone(usize, u8),
    /// A namespace has another label.
    Namespace(usize, u8),
    /// A replica gets the next changes of a kind.
    Deliver(usize, usize, usize),
    /// A replica lists a kind anew.
    List(usize, usize),
    Publish(usize),
    /// A client reads what there is.
    Read(usize),
    /// A client loses its connection, and comes to a replica.
    Connect(usize, usize),
}

fn step() -> impl Strategy<Value = Step> {
    let (namespace, name) = (|| 0..NAMESPACES.len(), || 0..2_u8);
    let uid = prop_oneof![5 => Just(0_u8), 1 => Just(1)];
    prop_oneof![
        5 => (namespace(), name(), uid, 0..2_u8, 0..2_usize).prop_map(|(a, b, c, d, e)| Step::Pod(a, b, c, d, e)),
        1 => (namespace(), name()).prop_map(|(a, b)| Step::PodGone(a, b)),
        3 => (namespace(), name(), prop::option::of(0..2_u8), 0..5_u8)
            .prop_map(|(a, b, c, d)| Step::Policy(a, b, c, d)),
        1 => (namespace(), name()).prop_map(|(a, b)| Step::PolicyGone(a, b)),
        1 => (namespace(), 0..2_u8).prop_map(|(a, b)| Step::Namespace(a, b)),
        6 => (0..2_usize, 0..3_usize, 1..6_usize).prop_map(|(a, b, c)| Step::Deliver(a, b, c)),
        1 => (0..2_usize, 0..3_usize).prop_map(|(a, b)| Step::List(a, b)),
        5 => (0..2_usize).prop_map(Step::Publish),
        6 => (0..3_usize).prop_map(Step::Read),
        5 => (0..3_usize, 0..2_usize).prop_map(|(a, b)| Step::Connect(a, b)),
    ]
}

fn read<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

/// The API server: all changes of each kind with their revisions.
#[derive(Default)]
struct Server {
    revision: u64,
    changes: [Vec<(u64, PolicyChange)>; 3],
}

impl Server {
    fn push(&mut self, kind: usize, change: PolicyChange) {
        self.changes[kind].push((self.revision, change));
    }

    fn act(&mut self, step: &Step) {
        self.revision += 1;
        let revision = self.revision;
        let name = |namespace: usize, name: u8| ObjectName::new(NAMESPACES[namespace], name.to_string());
        match *step {
            Step::Pod(namespace, pod, uid, app, node) => {
                // The address tells the revision.
                let address = format!("10.{}.{}.{}", revision >> 8, revision & 0xff, namespace * 8 + usize::from(pod));
                let object: api::Pod = read(json!({
                    "metadata": {
                        "namespace": NAMESPACES[namespace], "name": pod.to_string(), "uid": format!("u{uid}"),
                        "labels": {"app": app.to_string()},
                    },
                    "spec": {"nodeName": NODES[node]},
                    "status": {"phase": "Running", "podIPs": [{"ip": address}]},
                }));
                self.push(0, object.change().unwrap().0);
            }
            Step::PodGone(namespace, pod) => self.push(0, PolicyChange::gone(INPUTS[0], name(namespace, pod))),
            Step::Policy(namespace, policy, app, peers) => {
                let selector =
                    |app: Option<u8>| app.map_or(json!({}), |app| json!({"matchLabels": {"app": app.to_string()}}));
                let peers = match peers {
                    0 => json!([]),
                    1 | 2 => json!([{"podSelector": selector(Some(peers - 1))}]),
                    3 => json!([{"namespaceSelector": {"matchLabels": {"team": "1"}}}]),
                    _ => json!([{"namespaceSelector": {}, "podSelector": selector(Some(0))}, {"podSelector": {}}]),
                };
                let object: api::NetworkPolicy = read(json!({
                    "metadata": {"namespace": NAMESPACES[namespace], "name": policy.to_string()},
                    "spec": {"podSelector": selector(app), "ingress": [{"from": peers}]},
                }));
                self.push(2, object.change().unwrap().0);
            }
            Step::PolicyGone(namespace, policy) => self.push(2, PolicyChange::gone(INPUTS[2], name(namespace, policy))),
            Step::Namespace(namespace, team) => {
                let labels = json!({"team": team.to_string()});
                let object = json!({"metadata": {"name": NAMESPACES[namespace], "labels": labels}});
                let namespace = Namespace::read(&read::<api::Namespace>(object)).unwrap();
                self.push(1, PolicyChange::Resolved(cproxy_policy::Event::Namespace(namespace)));
            }
            _ => self.revision -= 1,
        }
    }

    /// The objects of a kind that are there.
    fn objects(&self, kind: usize) -> Vec<PolicyChange> {
        use cproxy_policy::Event::{NamespaceDeleted, PodDeleted, PolicyDeleted};
        let mut last = BTreeMap::new();
        for (_, change) in &self.changes[kind] {
            last.insert(change.name(), change.clone());
        }
        let is_there = |change: &PolicyChange| {
            !matches!(change, PolicyChange::Resolved(PodDeleted(_) | NamespaceDeleted(_) | PolicyDeleted(_)))
        };
        last.into_values().filter(is_there).collect()
    }
}

struct Replica {
    policies: Arc<Policies>,
    slices: Arc<Collection>,
    /// Number of changes of each kind that it has.
    has: [usize; 3],
}

impl Replica {
    fn new(epoch: u64) -> Self {
        let slices = Arc::new(Collection::new(Kind::AddressSlices));
        Self { policies: Arc::new(Policies::resolved(slices.clone(), epoch)), slices, has: [0; 3] }
    }

    fn list(&mut self, server: &Server, kind: usize) {
        let apply = |update| self.policies.add(INPUTS[kind], update);
        apply(PolicyUpdate::ListStarted);
        server.objects(kind).into_iter().for_each(|change| apply(PolicyUpdate::Listed(change)));
        apply(PolicyUpdate::ListDone(server.revision));
        self.has[kind] = server.changes[kind].len();
    }

    fn deliver(&mut self, server: &Server, kind: usize, count: usize) {
        let new: Vec<_> = server.changes[kind].iter().skip(self.has[kind]).take(count).cloned().collect();
        for (revision, change) in new {
            self.policies.add(INPUTS[kind], PolicyUpdate::Applied(change, revision));
            self.has[kind] += 1;
        }
        if self.has[kind] == server.changes[kind].len() {
            self.policies.add(INPUTS[kind], PolicyUpdate::Known(server.revision));
        }
    }

    fn publish(&self) {
        self.policies.publish(Instant::now());
    }
}

struct Client {
    scope: PolicyScope,
    /// Policies by pod, and slices by name.
    policies: BTreeMap<String, Value>,
    slices: BTreeMap<String, Value>,
    versions: [u64; 2],
    /// Replica, tokens, and watches.
    connection: Option<Connection>,
    /// Latest revision that the pod's address has shown.
    seen: u64,
}

struct Connection {
    tokens: [String; 2],
    policies: PolicyWatch,
    slices: Watch,
    others: InterestWatch,
}

fn objects(list: &[u8]) -> (Vec<Value>, u64) {
    let list: Value = serde_json::from_slice(list).unwrap();
    let version = list["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap();
    (list["items"].as_array().unwrap().clone(), version)
}

fn key(object: &Value) -> String {
    format!(
        "{}/{}",
        object["metadata"]["namespace"].as_str().unwrap_or_default(),
        object["metadata"]["name"].as_str().unwrap()
    )
}

impl Client {
    fn new(scope: PolicyScope) -> Self {
        Self { scope, policies: BTreeMap::new(), slices: BTreeMap::new(), versions: [0; 2], connection: None, seen: 0 }
    }

    /// Comes to a replica: resumes where nothing else has begun, and lists otherwise. Where what it has seen is
    /// missing, it goes.
    fn connect(&mut self, replica: &Replica) -> Result<(), TestCaseError> {
        let before = self.connection.take().map(|connection| connection.tokens);
        let policies = &replica.policies;
        let is_not_older = self.versions.iter().all(|&version| {
            policies.has_published(version)
                || policies.known_revision().is_some_and(|known| known >= Policies::revision(version))
        });
        if policies.summary().is_none() || !is_not_older {
            return Ok(());
        }
        let interest = policies.interest(&self.scope);
        let tokens = [Kind::PodPolicies, Kind::AddressSlices].map(|kind| policies.token(kind, &self.scope, &interest));
        let visibility = || Filter { visibility: Some(Arc::new(interest.clone())), ..Filter::default() };
        let is_same = |index: usize| before.as_ref().is_some_and(|before| before[index] == tokens[index]);
        if !is_same(0) {
            let list = policies.list(&self.scope, |_| true, Format::Json);
            let (items, version) = objects(&list);
            self.policies = items.into_iter().map(|item| (key(&item), item)).collect();
            self.versions[0] = version;
        }
        if !is_same(1) {
            let list: Vec<u8> =
                List::new(replica.slices.snapshot().unwrap(), visibility(), Format::Json).flatten().collect();
            let (items, version) = objects(&list);
            self.slices = items.into_iter().map(|item| (key(&item), item)).collect();
            self.versions[1] = version;
        }
        let options = WatchOptions { filter: visibility(), wants_bookmarks: true };
        self.connection = Some(Connection {
            tokens,
            policies: PolicyWatch::new(
                policies.clone(),
                self.scope.clone(),
                Filter::default(),
                true,
                Format::Json,
                PolicyStart::After(self.versions[0]),
            ),
            slices: Watch::new(replica.slices.clone(), options, Format::Json, WatchStart::After(self.versions[1])),
            others: InterestWatch::new(policies.clone(), self.scope.clone(), interest.clone()),
        });
        self.check(&interest)
    }

    fn read(&mut self) -> Result<(), TestCaseError> {
        let Some(mut connection) = self.connection.take() else { return Ok(()) };
        if Pin::new(&mut connection.others).poll(&mut Context::from_waker(Waker::noop())).is_ready() {
            // It lists anew.
            connection.tokens[1].clear();
            drop(connection);
            return Ok(());
        }
        let interest = connection.others.interest().clone();
        for index in 0..2 {
            loop {
                let chunk = match index {
                    0 => connection.policies.poll_next(Waker::noop()),
                    _ => connection.slices.poll_next(Waker::noop()),
                };
                let Poll::Ready(Some(chunk)) = chunk else { break };
                for line in String::from_utf8(chunk.to_vec()).unwrap().lines() {
                    let event: Value = serde_json::from_str(line).unwrap();
                    prop_assert_ne!(&event["type"], "ERROR", "{}", event);
                    self.apply(index, &event);
                }
            }
        }
        self.connection = Some(connection);
        self.check(&interest)
    }

    fn apply(&mut self, index: usize, event: &Value) {
        let object = &event["object"];
        self.versions[index] = object["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap();
        let known = if index == 0 { &mut self.policies } else { &mut self.slices };
        match event["type"].as_str().unwrap() {
            "BOOKMARK" => {}
            "DELETED" => drop(known.remove(&key(object))),
            _ => drop(known.insert(key(object), object.clone())),
        }
    }

    /// Whatever happens, the client sees its own pods only, the sets that they name, and nothing older than before.
    fn check(&mut self, interest: &Interest) -> Result<(), TestCaseError> {
        for policy in self.policies.values() {
            match &self.scope {
                PolicyScope::Pod { name, uid } => {
                    prop_assert_eq!(key(policy), name.to_string());
                    prop_assert_eq!(policy["spec"]["podUID"].as_str(), uid.as_deref());
                    let address = policy["spec"]["podAddresses"][0].as_str().unwrap();
                    let parts: Vec<u64> = address.split('.').map(|part| part.parse().unwrap()).collect();
                    let revision = parts[1] << 8 | parts[2];
                    prop_assert!(revision >= self.seen, "{} after {}", revision, self.seen);
                    self.seen = revision;
                }
                PolicyScope::Node(node) => prop_assert_eq!(policy["spec"]["nodeName"].as_str(), Some(&**node)),
            }
        }
        for slice in self.slices.keys() {
            let meta = Meta { name: slice.trim_start_matches('/').into(), ..Meta::default() };
            prop_assert!(crate::Visibility::allows(interest, Kind::AddressSlices, &meta), "{}", slice);
        }
        Ok(())
    }

    /// In the end the client has what a replica would resolve, and all slices of all sets.
    fn check_complete(&self, replica: &Replica) -> Result<(), TestCaseError> {
        let without_version = |mut object: Value| {
            object["metadata"]["resourceVersion"] = Value::Null;
            object.as_object_mut().unwrap().remove("kind");
            object.as_object_mut().unwrap().remove("apiVersion");
            object
        };
        let (items, _) = objects(&replica.policies.list(&self.scope, |_| true, Format::Json));
        let expected: Vec<_> = items.into_iter().map(without_version).collect();
        let own: Vec<_> = self.policies.values().cloned().map(without_version).collect();
        prop_assert_eq!(own, expected);
        let mut names = BTreeSet::new();
        for set in self.policies.values().flat_map(|policy| policy["spec"]["sets"].as_array().unwrap()) {
            let (name, slices) = (set["name"].as_str().unwrap(), set["slices"].as_u64().unwrap());
            names.extend((0..slices).map(|index| format!("/{name}-{slices}-{index}")));
        }
        prop_assert_eq!(self.slices.keys().cloned().collect::<BTreeSet<_>>(), names);
        for (name, slice) in &self.slices {
            let known = replica.slices.get("", name.trim_start_matches('/')).unwrap();
            let known: Value = serde_json::from_slice(&object_json(&known, false).unwrap()).unwrap();
            prop_assert_eq!(&slice["addresses"], &known["addresses"]);
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, max_shrink_iters: 4_000, ..ProptestConfig::default() })]

    /// Two replicas that get the changes of each kind at their own pace, and clients that move between them.
    #[test]
    fn clients_see_their_pods_policies_and_never_an_older_state(
        late in 0..3_usize, steps in prop::collection::vec(step(), 1..120),
    ) {
        let mut server = Server::default();
        (0..2).for_each(|namespace| server.act(&Step::Namespace(namespace, 0)));
        let mut replicas = [Replica::new(0x1107), Replica::new(0x2208)];
        for (_, replica) in replicas.iter_mut().enumerate().filter(|(index, _)| *index != late) {
            (0..3).for_each(|kind| replica.list(&server, kind));
            replica.publish();
        }
        let own = |name, uid: &str| PolicyScope::Pod { name: ObjectName::new("a", name), uid: Some(uid.into()) };
        let mut clients = [own("0", "u0"), own("0", "u1"), PolicyScope::Node("n0".into())].map(Client::new);
        for step in &steps {
            server.act(step);
            match *step {
                Step::Deliver(replica, kind, count) if replicas[replica].policies.summary().is_some() => {
                    replicas[replica].deliver(&server, kind, count);
                }
                Step::Deliver(replica, kind, _) | Step::List(replica, kind) => replicas[replica].list(&server, kind),
                Step::Publish(replica) => replicas[replica].publish(),
                Step::Read(client) => clients[client].read()?,
                Step::Connect(client, replica) => clients[client].connect(&replicas[replica])?,
                _ => {}
            }
        }
        for replica in &mut replicas {
            for kind in 0..3 {
                match replica.policies.summary() {
                    Some(_) => replica.deliver(&server, kind, usize::MAX),
                    None => replica.list(&server, kind),
                }
            }
            replica.publish();
        }
        for client in &mut clients {
            // A watch that has ended is begun again; the other replica may be the one that it was at.
            client.read()?;
            if client.connection.is_none() {
                client.connect(&replicas[0])?;
                client.read()?;
            }
            client.check_complete(&replicas[0])?;
        }
    }
}

#[test]
fn a_followed_relay_serves_what_the_other_has() {
    let mut server = Server::default();
    server.act(&Step::Namespace(0, 1));
    for name in 0..3 {
        server.act(&Step::Pod(0, name, 0, 0, 0));
    }
    server.act(&Step::Policy(0, 0, Some(0), 4));
    let mut root = Replica::new(0x1107);
    (0..3).for_each(|kind| root.list(&server, kind));
    root.publish();
    let slices = Arc::new(Collection::new(Kind::AddressSlices));
    let host = Replica { policies: Arc::new(Policies::followed(slices.clone(), 0x3309)), slices, has: [0; 3] };
    let scope = PolicyScope::Node("n0".into());
    let follow = |root: &Replica| {
        let (policies, version) = objects(&root.policies.list(&scope, |_| true, Format::Json));
        let update = |input, update| host.policies.add(input, update);
        let revision = Policies::revision(version);
        update(PolicyInput::PodPolicies, PolicyUpdate::ListStarted);
        for policy in policies {
            let change = read::<served::PodPolicy>(policy).change().unwrap().0;
            update(PolicyInput::PodPolicies, PolicyUpdate::Listed(change));
        }
        update(PolicyInput::PodPolicies, PolicyUpdate::ListDone(revision));
        update(PolicyInput::AddressSlices, PolicyUpdate::ListStarted);
        let filter = Filter { visibility: Some(Arc::new(root.policies.interest(&scope))), ..Filter::default() };
        let list: Vec<u8> = List::new(root.slices.snapshot().unwrap(), filter, Format::Json).flatten().collect();
        for slice in objects(&list).0 {
            let change = read::<served::AddressSlice>(slice).change().unwrap().0;
            update(PolicyInput::AddressSlices, PolicyUpdate::Listed(change));
        }
        update(PolicyInput::AddressSlices, PolicyUpdate::ListDone(revision));
        host.publish();
    };
    follow(&root);
    let own = PolicyScope::Pod { name: ObjectName::new("a", "1"), uid: Some("u0".into()) };
    let mut client = Client::new(own);
    client.connect(&host).unwrap();
    assert_eq!(client.policies.len(), 1);
    client.check_complete(&host).unwrap();
    // A pod goes, and one comes.
    server.act(&Step::PodGone(0, 2));
    server.act(&Step::Pod(1, 1, 0, 0, 0));
    root.deliver(&server, 0, usize::MAX);
    root.publish();
    follow(&root);
    client.read().unwrap();
    client.check_complete(&host).unwrap();
    assert_eq!(host.policies.find_pod("u0"), Some(ObjectName::new("a", "0")));
    assert_eq!(host.policies.summary().map(|summary| summary.pods), Some(3));
}
