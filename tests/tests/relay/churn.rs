//! A thousand changes of labels a second, through a relay into a guest that enforces its policy, while agent and relay
//! are killed: no call fails that all states allow, and none passes that no state allows. An API server cannot make so
//! many changes here, so the relay follows a server of the test.

use std::{
    collections::VecDeque,
    iter,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use cproxy_testing::responses::{event, list};
use cproxy_tests::{
    Done,
    api::{Api, Reply, is_watch},
    isolation::{Isolation, State},
    manifest,
    process::{Agent, eventually},
    random,
    relay_server::{RelayServer, RunningRelay},
    sandbox::Sandbox,
    world::serve_pods,
};
use serde_json::{Value, json};

use crate::fixture::{PATIENCE, RELAY};

/// Pods whose labels change.
const CROWD: usize = 100;
/// Changes in a tick.
const TICK: Duration = Duration::from_millis(10);
const CHANGES_IN_TICK: usize = 10;
/// Pods that the policy always allows.
const ALWAYS: [u8; 2] = [1, 2];
/// Versions of changes that a watch can go on from.
const HISTORY: usize = 20_000;
/// Time between two kills.
const LIFE: Duration = Duration::from_secs(1);

/// Pods as the server has them, and the last changes.
struct Pods {
    objects: Vec<Value>,
    version: u64,
    changes: VecDeque<(u64, Vec<u8>)>,
}

/// The server's state, and its ends.
struct Upstream {
    pods: Mutex<Pods>,
    changed: Condvar,
    ends: AtomicBool,
    others: Vec<Value>,
}

fn crowd_address(number: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 244, 9, number as u8 + 1)
}

/// A pod of the crowd, which the policy allows with the label `always`.
fn of_crowd(number: usize, label: &str, version: u64) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "namespace": "shop", "name": format!("crowd-{number}"), "uid": format!("uid-{number}"),
            "resourceVersion": version.to_string(), "labels": {"app": label},
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"nodeName": "node-1"},
        "status": {"phase": "Running", "podIPs": [{"ip": crowd_address(number)}]},
    })
}

impl Upstream {
    fn new(objects: Vec<Value>) -> Arc<Self> {
        let (pods, others): (Vec<_>, Vec<_>) = objects.into_iter().partition(|object| object["kind"] == "Pod");
        let stored = |mut object: Value| {
            object["metadata"]["resourceVersion"] = json!("5");
            object["metadata"]["uid"] = json!(format!("uid-{}", object["metadata"]["name"]));
            object
        };
        let namespace = json!({
            "apiVersion": "v1", "kind": "Namespace",
            "metadata": {"name": "shop", "labels": {"kubernetes.io/metadata.name": "shop"}},
        });
        let crowd = (0..CROWD).map(|number| of_crowd(number, "other", 5));
        Arc::new(Self {
            pods: Mutex::new(Pods {
                objects: crowd.chain(pods.into_iter().map(stored)).collect(),
                version: 10,
                changes: VecDeque::new(),
            }),
            changed: Condvar::new(),
            ends: AtomicBool::new(false),
            others: others.into_iter().chain([namespace]).map(stored).collect(),
        })
    }

    fn answer(self: &Arc<Self>, target: &str) -> Reply {
        let path = target.split('?').next().unwrap_or_default();
        let kind = match path.rsplit('/').next().unwrap_or_default() {
            "pods" => return self.pods(target),
            "services" => "Service",
            "endpointslices" => "EndpointSlice",
            "networkpolicies" => "NetworkPolicy",
            "namespaces" => "Namespace",
            "nodes" => "Node",
            _ => return Reply::error(404),
        };
        if is_watch(target) {
            return Reply::chunks([]).open();
        }
        let items: Vec<_> = self.others.iter().filter(|object| object["kind"] == kind).cloned().collect();
        Reply::text(list("7", &items))
    }

    fn pods(self: &Arc<Self>, target: &str) -> Reply {
        let pods = self.pods.lock().unwrap();
        if !is_watch(target) {
            return Reply::text(list(&pods.version.to_string(), &pods.objects));
        }
        let from = target.split(['?', '&']).find_map(|part| part.strip_prefix("resourceVersion="));
        let mut from = from.and_then(|version| version.parse().ok()).unwrap_or_default();
        if pods.changes.front().is_some_and(|(first, _)| *first > from + 1) {
            return Reply::error(410);
        }
        let this = self.clone();
        Reply::chunks(iter::from_fn(move || this.next_changes(&mut from)))
    }

    /// The changes after a version, in one chunk; `None` at the end.
    fn next_changes(&self, from: &mut u64) -> Option<Vec<u8>> {
        let pods = self.pods.lock().unwrap();
        let is_over = || self.ends.load(Ordering::Relaxed);
        let waits = |pods: &mut Pods| pods.version <= *from && !is_over();
        let (pods, _) = self.changed.wait_timeout_while(pods, Duration::from_secs(1), waits).unwrap();
        if is_over() {
            return None;
        }
        let skipped = pods.changes.partition_point(|(version, _)| *version <= *from);
        let chunk = pods.changes.range(skipped..).flat_map(|(_, change)| change.iter().copied()).collect();
        *from = pods.version;
        Some(chunk)
    }

    /// Changes the labels of some pods of the crowd.
    fn change(&self, count: usize) {
        let mut pods = self.pods.lock().unwrap();
        for _ in 0..count {
            pods.version += 1;
            let version = pods.version;
            let number = version as usize * 7 % CROWD;
            let label = if pods.objects[number]["metadata"]["labels"]["app"] == "always" { "other" } else { "always" };
            let object = of_crowd(number, label, version);
            pods.changes.push_back((version, event("MODIFIED", &object)));
            pods.objects[number] = object;
        }
        while pods.changes.len() > HISTORY {
            pods.changes.pop_front();
        }
        drop(pods);
        self.changed.notify_all();
    }

    /// Pods of the crowd that the policy allows now.
    fn allowed(&self) -> Vec<bool> {
        let pods = self.pods.lock().unwrap();
        pods.objects[..CROWD].iter().map(|pod| pod["metadata"]["labels"]["app"] == "always").collect()
    }
}

/// Whether a call to an address that nobody has is one that the policy allows.
fn is_allowed(address: Ipv4Addr) -> bool {
    let to = SocketAddr::new(IpAddr::V4(address), 80);
    let result = std::net::TcpStream::connect_timeout(&to, Duration::from_millis(1));
    result.is_err_and(|error| error.kind() != std::io::ErrorKind::PermissionDenied)
}

fn relay(sandbox: &Sandbox, api: &Api) -> RunningRelay {
    let views = "default: everything\nviews:\n- name: web\n  match: {usernames: [\"*\"]}\n  namespaces: all\n  \
                 policy: {pod: shop/web}\n";
    let views = manifest::write_text(sandbox.dir(), "views.yaml", views);
    let relay = RelayServer::new(sandbox).kubeconfig(api.kubeconfig(sandbox)).listen(RELAY).without_authentication();
    relay.arg("--policies").arg("--views").arg(views).start()
}

#[test]
fn a_thousand_changes_a_second_open_and_close_nothing_else() {
    let length = if random::is_soak() { Duration::from_secs(600) } else { Duration::from_secs(8) };
    let sandbox = Sandbox::for_test();
    let _servers = serve_pods(&sandbox, ALWAYS);
    let isolation = Isolation::new(&sandbox, ALWAYS);
    let upstream = Upstream::new(isolation.objects(State::Before));
    let of_api = upstream.clone();
    let api = Api::serve(&sandbox, move |target| of_api.answer(target));
    let kubeconfig = manifest::write_kubeconfig(sandbox.dir(), &format!("http://{RELAY}"));
    let agent = || {
        let agent = Agent::new(&sandbox).kubeconfig(&kubeconfig);
        agent.args(["--policy", "enforce", "--pod-ip", "10.244.0.9,fd00:10:244::9"])
    };
    let mut running_relay = relay(&sandbox, &api);
    let mut running_agent = agent().start();
    let ends = AtomicBool::new(false);
    let changes = thread::scope(|scope| {
        let changes = scope.spawn(|| {
            let (start, mut count) = (Instant::now(), 0);
            while !ends.load(Ordering::Relaxed) {
                let due = (start.elapsed().as_millis() / TICK.as_millis()) as usize * CHANGES_IN_TICK;
                upstream.change(due - count);
                count = due;
                thread::sleep(TICK);
            }
            count
        });
        isolation.while_calling("labels change", || {
            let _done = Done(&ends);
            let end = Instant::now() + length;
            for round in 0.. {
                thread::sleep(LIFE);
                if Instant::now() >= end {
                    return;
                }
                if round % 2 == 0 {
                    running_agent.kill();
                    running_agent = agent().spawn();
                } else {
                    running_relay.kill();
                    running_relay = relay(&sandbox, &api);
                }
            }
        });
        changes.join().unwrap()
    });
    assert!(changes >= length.as_secs() as usize * 900, "{changes} changes in {length:?}");
    running_agent.wait_ready(PATIENCE);
    let expected = upstream.allowed();
    eventually(PATIENCE, "the last labels are in force", || {
        let found: Vec<_> = (0..CROWD).map(|number| is_allowed(crowd_address(number))).collect();
        let wrong = found.iter().zip(&expected).filter(|(found, expected)| found != expected).count();
        if wrong == 0 { isolation.check() } else { Err(format!("{wrong} of {CROWD}")) }
    });
    running_agent.kill();
    drop(running_relay);
    upstream.ends.store(true, Ordering::Relaxed);
    upstream.changed.notify_all();
}
