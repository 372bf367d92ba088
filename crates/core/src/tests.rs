//! Objects in, table out: the rules of kube-proxy 1.36 as cases in `cases/*.yaml`. `cases/README.md` describes their
//! format. Each case is played with its objects in JSON and in protobuf.

mod encodings;

use std::collections::BTreeSet;

use cproxy_testing::encoding;
use serde::Deserialize;
use serde_json::Value;

use super::{
    Backend, Capacity, Event, ExternalIps, KernelTable, Limits, NodeContext, ObjectName, Reserve, ResourceKind, Row,
    Store, TablePlanner, parse_address, resolve,
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

/// Objects with the expected table, and the steps that change them.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    name: String,
    source: String,
    node: Option<String>,
    #[serde(default)]
    node_ips: Vec<String>,
    #[serde(default)]
    pod_ips: Vec<String>,
    /// External addresses of Services are not served.
    #[serde(default)]
    ignores_external_ips: bool,
    #[serde(flatten)]
    step: CaseStep,
    #[serde(default)]
    then: Vec<CaseStep>,
}

/// New objects, and the expected result.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct CaseStep {
    #[serde(default)]
    given: Vec<Value>,
    /// Deleted objects: kind namespace/name, or kind name for a Node.
    #[serde(default)]
    gone: Vec<String>,
    /// Addresses of the VM from here on.
    pod_ips_now: Option<Vec<String>>,
    /// The whole table, a line for each frontend.
    expect: Vec<String>,
    /// A piece of each problem's text; there are no others.
    #[serde(default)]
    problems: Vec<String>,
}

const LIMITS: Limits = Limits {
    frontends: 10_000,
    sets: 10_000,
    slots: 100_000,
    external_frontends: 10_000,
    service_slots: 100_000,
    may_replace: true,
    reserved: Reserve { sets: 0, slots: 0 },
    least: Capacity { frontends: 16, sets: 16, slots: 16 },
    run_backends: 10_000,
    filter_bit: |_| 1,
};

/// One test for each file, with its minimum number of cases.
macro_rules! files {
    ($($name:ident: $count:literal)*) => {
        $(
            #[test]
            fn $name() {
                check(include_str!(concat!("cases/", stringify!($name), ".yaml")), $count);
            }
        )*
    };
}

files! {
    actions_and_ranges: 34
    agreement: 4
    eligible_endpoints: 62
    session_affinity: 10
    slices_and_ports: 50
    services_and_frontends: 50
    addresses: 22
}

fn check(text: &str, count: usize) {
    // The files are the project's own: what many cases share is written once, however many they are.
    let budget = serde_saphyr::budget! { enforce_alias_anchor_ratio: false };
    let options = serde_saphyr::options! { strict_booleans: true, budget: budget };
    let file: File = serde_saphyr::from_str_with_options(text, options).unwrap_or_else(|error| panic!("{error}"));
    assert!(file.cases.len() >= count, "{} cases are fewer than {count}", file.cases.len());
    let names: BTreeSet<_> = file.cases.iter().map(|case| &case.name).collect();
    assert_eq!(names.len(), file.cases.len(), "a name is there twice");
    let failures: Vec<_> = file.cases.iter().filter_map(|case| case.play(&file.with).err()).collect();
    assert!(failures.is_empty(), "{} of {} cases:\n{}", failures.len(), file.cases.len(), failures.join("\n"));
}

impl Case {
    /// Plays the case with its objects in order and reversed, in JSON and in protobuf: neither must matter.
    fn play(&self, with: &[Value]) -> Result<(), String> {
        if self.source.is_empty() {
            return Err(format!("{}: no source", self.name));
        }
        let id =
            |object: &Value| ["/kind", "/metadata/namespace", "/metadata/name"].map(|at| object.pointer(at).cloned());
        let own: BTreeSet<_> = self.step.given.iter().map(|object| format!("{:?}", id(object))).collect();
        let common = with.iter().filter(|object| !own.contains(&format!("{:?}", id(object))));
        let mut objects: Vec<_> = common.chain(&self.step.given).collect();
        self.play_in_order("in order, in JSON", json, &objects)?;
        self.play_in_order("in order, in protobuf", protobuf, &objects)?;
        objects.reverse();
        self.play_in_order("in reverse, in JSON", json, &objects)?;
        self.play_in_order("in reverse, in protobuf", protobuf, &objects)
    }

    fn play_in_order(&self, order: &str, decode: fn(&Value) -> Event, objects: &[&Value]) -> Result<(), String> {
        let mut world = World::new(self, decode);
        world.list(objects);
        world.see(&self.step, &format!("{}, {order}", self.name))?;
        for (index, step) in self.then.iter().enumerate() {
            world.apply(step);
            world.see(step, &format!("{}, {order}, then[{index}]", self.name))?;
        }
        Ok(())
    }
}

/// The store, a table that follows it step by step, and the problems that were reported and not yet taken back.
struct World {
    /// Event of an object as it is sent.
    decode: fn(&Value) -> Event,
    store: Store,
    table: TablePlanner,
    is_followed: bool,
}

impl World {
    fn new(case: &Case, decode: fn(&Value) -> Event) -> Self {
        let own = NodeContext {
            node_name: case.node.clone(),
            node_ips: read_addresses(&case.node_ips),
            pod_ips: read_addresses(&case.pod_ips),
            external_ips: if case.ignores_external_ips { ExternalIps::Ignore } else { ExternalIps::Serve },
        };
        let table = TablePlanner::new(LIMITS, KernelTable::default());
        Self { decode, store: Store::new(own), table, is_followed: false }
    }

    fn list(&mut self, objects: &[&Value]) {
        let kinds = [ResourceKind::Nodes, ResourceKind::Services, ResourceKind::EndpointSlices];
        let started = kinds.into_iter().map(Event::ListStarted);
        let done = kinds.into_iter().map(Event::ListDone);
        let events: Vec<_> = started.chain(objects.iter().map(|object| (self.decode)(object))).chain(done).collect();
        events.into_iter().for_each(|event| drop(self.store.apply(event)));
    }

    fn apply(&mut self, step: &CaseStep) {
        let gone = step.gone.iter().map(|name| deleted(name));
        let pod_ips = step.pod_ips_now.iter().map(|ips| Event::PodIps(read_addresses(ips)));
        for event in gone.chain(step.given.iter().map(self.decode)).chain(pod_ips) {
            drop(self.store.apply(event));
        }
    }

    /// Checks that the recomputed table is what the step expects, and that the incremental one equals it.
    fn see(&mut self, step: &CaseStep, place: &str) -> Result<(), String> {
        let dirty = self.store.take_dirty();
        let is_followed = std::mem::replace(&mut self.is_followed, true);
        drop(if is_followed { self.table.update(&self.store, dirty) } else { self.table.sync(&self.store) });
        let rows = resolve(&self.store);
        let lines: Vec<_> = rows.iter().map(line).collect();
        let expected: Vec<_> =
            step.expect.iter().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        if lines != expected {
            return Err(format!("{place}:\n  expected {expected:#?}\n  found {lines:#?}"));
        }
        if self.table.rows() != rows {
            return Err(format!("{place}: the table that followed has {:#?}", self.table.rows()));
        }
        let all: Vec<_> =
            self.store.problems().cloned().chain(self.table.problems()).map(|problem| problem.to_string()).collect();
        let problems: BTreeSet<_> = all.iter().cloned().collect();
        if problems.len() != all.len() {
            return Err(format!("{place}: a problem is there twice: {all:#?}"));
        }
        let unexpected = |problem: &&String| !step.problems.iter().any(|piece| problem.contains(piece.as_str()));
        let missing = |piece: &&String| !problems.iter().any(|problem| problem.contains(piece.as_str()));
        let unexpected: Vec<_> = problems.iter().filter(unexpected).collect();
        let missing: Vec<_> = step.problems.iter().filter(missing).collect();
        if !unexpected.is_empty() || !missing.is_empty() {
            return Err(format!("{place}: unexpected problems {unexpected:#?}, missing problems {missing:#?}"));
        }
        Ok(())
    }
}

fn read_addresses(texts: &[String]) -> Vec<super::Address> {
    texts.iter().map(|text| parse_address(text).unwrap()).collect()
}

/// Object as an API server sends it in JSON; panics with the object's text if it cannot be decoded.
fn json(object: &Value) -> Event {
    fn read<T: serde::de::DeserializeOwned>(object: &Value) -> Box<T> {
        serde_json::from_value(object.clone()).unwrap_or_else(|error| panic!("{error}: {object}"))
    }
    match object["kind"].as_str() {
        Some("Service") => Event::Service(read(object)),
        Some("EndpointSlice") => Event::EndpointSlice(read(object)),
        Some("Node") => Event::Node(read(object)),
        _ => panic!("the kind of {object} is none of cproxy's"),
    }
}

/// Object as an API server sends it in protobuf.
fn protobuf(object: &Value) -> Event {
    fn read<T: prost::Message + Default>(object: &Value) -> Box<T> {
        let bytes = encoding::object(object);
        Box::new(T::decode(&*bytes).unwrap_or_else(|error| panic!("{error}: {object}")))
    }
    match object["kind"].as_str() {
        Some("Service") => Event::Service(read(object)),
        Some("EndpointSlice") => Event::EndpointSlice(read(object)),
        Some("Node") => Event::Node(read(object)),
        _ => panic!("the kind of {object} is none of cproxy's"),
    }
}

fn deleted(text: &str) -> Event {
    let (kind, name) = text.split_once(' ').unwrap_or_else(|| panic!("{text:?} is not: kind name"));
    let object = || {
        let (namespace, name) = name.split_once('/').unwrap_or_else(|| panic!("{text:?} has no namespace"));
        ObjectName::new(namespace, name)
    };
    match kind {
        "Service" => Event::Deleted(ResourceKind::Services, object()),
        "EndpointSlice" => Event::Deleted(ResourceKind::EndpointSlices, object()),
        "Node" => Event::Deleted(ResourceKind::Nodes, ObjectName::new("", name)),
        _ => panic!("{text:?}: the kind is none of cproxy's"),
    }
}

/// Frontend, Service and port, source, action, affinity, backends, and with a plus those that only keep their
/// connections.
fn line(row: &Row) -> String {
    let port = if row.port_name.is_empty() { "-" } else { &row.port_name };
    let mut words = vec![
        row.frontend.to_string(),
        format!("{}:{port}", row.service),
        row.source.as_str().to_owned(),
        row.action.as_str().to_owned(),
    ];
    words.extend(row.session_affinity_seconds.map(|seconds| format!("{seconds}s")));
    words.extend(row.backends().iter().map(Backend::to_string));
    words.extend(row.kept().iter().map(|backend| format!("+{backend}")));
    words.join(" ")
}

/// Guard of the cases: each kind of mistake in one must fail.
#[test]
fn a_case_that_is_wrong_fails() {
    let case = |fields: &str| {
        let text = format!(
            "cases: [{{name: a, source: b, given: [{{kind: Service, metadata: {{name: web}}, \
             spec: {{clusterIP: 10.0.0.1, ports: [{{port: 80}}]}}}}], {fields}}}]"
        );
        std::panic::catch_unwind(move || check(&text, 1)).is_ok()
    };
    let line = "'10.0.0.1:80/TCP default/web:- ClusterIP refuse'";
    assert!(case(&format!("expect: [{line}]")));
    assert!(!case("expect: []"), "a line too many");
    assert!(!case(&format!("expect: [{line}], problems: [x]")), "a problem that is not there");
    assert!(!case(&format!("expect: [{line}], then: [{{gone: [Service default/web], expect: [{line}]}}]")));
    assert!(!case(&format!("expect: [{line}], mistyped: 1")), "an unknown field");
}
