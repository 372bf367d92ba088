//! Faults made on purpose, asked about as at night: from a shell outside the served cgroup, as another user, and after
//! the agent's death. The first line has the Service's own cause.

use std::{
    fs,
    net::{SocketAddr, TcpStream},
    path::PathBuf,
    process::Command,
};

use cproxy_tests::{
    manifest::{self, Endpoint, Service, Slice, node},
    process::{Daemon, cproxy_with_privileges, eventually},
    sandbox::{Placement, Sandbox},
    world::{SYNC, World, pod, slices_of, web_with},
};
use serde_json::{Value, json};

use super::Answer;

const NOT_ONE: &str = "this shell is not one: its cgroup";

/// A fault in a Service, and what `explain` says about it first.
struct Fault {
    question: &'static [&'static str],
    code: i32,
    words: &'static [&'static str],
    /// Without an agent, for the same address.
    without_agent: (i32, &'static str),
}

/// Faults of Services that one agent serves. The first address of each is the one to ask for without an agent.
const FAULTS: [Fault; 10] = [
    Fault {
        question: &["empty.default.svc.cluster.local"],
        code: 1,
        words: &["10.96.0.20:80/TCP: refused with ECONNREFUSED", "no EndpointSlice in namespace default", ": empty"],
        without_agent: (1, "refused"),
    },
    Fault {
        question: &["default/unready"],
        code: 1,
        words: &["refused with ECONNREFUSED", "no endpoint can be used: not ready (2 endpoints)"],
        without_agent: (1, "refused"),
    },
    Fault {
        question: &["port.default", "80"],
        code: 1,
        words: &["refused with ECONNREFUSED", "the slice has no port \"http\" TCP (it has: \"web\" TCP)"],
        without_agent: (1, "refused"),
    },
    Fault {
        question: &["default/local:80"],
        code: 1,
        words: &["dropped with EHOSTUNREACH", "internalTrafficPolicy Local", "not on this node, here"],
        without_agent: (1, "dropped"),
    },
    Fault {
        question: &["203.0.113.5", "80"],
        code: 0,
        words: &["forwarded to one of 2 backends (not called; --probe calls them) of Service default/ext-a"],
        without_agent: (0, "forwarded"),
    },
    Fault {
        question: &["default/sticky"],
        code: 0,
        words: &[
            "forwarded to backend 10.244.0.",
            "by session affinity of this network namespace for ",
            " more (last new connection ",
        ],
        without_agent: (0, "by session affinity of this network namespace for "),
    },
    Fault {
        question: &["10.96.0.10:81"],
        code: 1,
        words: &["refused with ECONNREFUSED", "Service default/web has no port 81/TCP; it has 80/TCP (http)"],
        without_agent: (1, "its Service has no port 81/TCP; it has 80/TCP"),
    },
    Fault {
        question: &["10.244.0.9", "30080"],
        code: 1,
        words: &[
            "direct without translation",
            "Service default/node-port",
            "is not served there: its nodePort 30080 needs",
            "--node-ip",
        ],
        without_agent: (4, "no agent runs that knows more"),
    },
    Fault {
        question: &["10.96.0.28", "80"],
        code: 4,
        words: &[
            "direct to the address itself: no Service has it; a file that cannot be read may have it",
            "bad.yaml: ",
            "line 3",
        ],
        without_agent: (4, "no agent runs that knows more"),
    },
    Fault {
        question: &["gone.default", "53/udp", "--probe"],
        code: 1,
        words: &[
            "forwarded to one of 2 backends",
            "which all fail, such as 10.244.0.",
            "it refuses datagrams: nothing listens",
        ],
        without_agent: (1, "which all fail"),
    },
];

fn objects() -> Vec<Value> {
    let service = |name: &str, number: u8| Service::new(name).cluster_ips([format!("10.96.0.{number}")]);
    let http = |name: &str, number: u8| service(name, number).tcp("http", 80, 8080);
    let ready = |name: &str| Slice::v4(name).tcp("http", 8080).ready([pod(1).v4, pod(2).v4]);
    let unready = [1, 2].map(|number| Endpoint::not_ready(pod(number).v4));
    let external = |name: &str, number: u8| http(name, number).spec("externalIPs", json!(["203.0.113.5"]));
    let mut all = web_with([1, 2]);
    all.extend([
        node("here", "z1"),
        http("empty", 20).into(),
        http("unready", 21).into(),
        unready.into_iter().fold(Slice::v4("unready").tcp("http", 8080), Slice::endpoint).into(),
        http("port", 22).into(),
        Slice::v4("port").tcp("web", 8080).ready([pod(1).v4]).into(),
        http("local", 23).spec("internalTrafficPolicy", json!("Local")).into(),
        Slice::v4("local").tcp("http", 8080).endpoint(Endpoint::ready(pod(1).v4).node("there")).into(),
        external("ext-a", 24).into(),
        ready("ext-a").into(),
        external("ext-b", 25).into(),
        ready("ext-b").into(),
        http("sticky", 26).client_ip_affinity(10_800).into(),
        ready("sticky").into(),
        http("node-port", 27).node_port(30_080).into(),
        service("gone", 29).udp("dns", 53, 9).into(),
        Slice::v4("gone").udp("dns", 9).ready([pod(1).v4, pod(2).v4]).into(),
    ]);
    all.extend(slices_of("node-port", [1], |_, address| Endpoint::ready(address)));
    all
}

/// The answer to somebody in a shell outside the served cgroup, whom `before` may make another user.
fn asked(sandbox: &Sandbox, before: &[&str], arguments: &[&str]) -> Answer {
    Answer(cproxy_with_privileges(sandbox, before, &[&["explain"], arguments].concat()))
}

pub(super) fn from_outside(sandbox: &Sandbox, arguments: &[&str]) -> Answer {
    asked(sandbox, &["--clear-groups"], arguments)
}

#[test]
fn each_fault_is_named_first_from_outside_as_another_user_and_without_an_agent() {
    let mut world = World::builder().pods([1, 2]).objects(objects()).args(["--node-name", "here"]).start();
    let sandbox = &world.sandbox;
    manifest::write_text(&sandbox.manifest_dir(), "bad.yaml", "kind: Service\nmetadata: {name: x}\n  spec: nonsense\n");
    eventually(SYNC, "the mistake is found", || {
        let answer = from_outside(sandbox, &["10.96.0.28"]);
        if answer.verdict().contains("bad.yaml") { Ok(()) } else { Err(answer.verdict().to_owned()) }
    });
    drop(from_outside(sandbox, &["x.default"]).says(4, &["not found: ", "no Service default/x; ", "bad.yaml: "]));
    TcpStream::connect(SocketAddr::from(([10, 96, 0, 26], 80))).unwrap();

    let mut addresses = Vec::new();
    for Fault { question, code, words, .. } in FAULTS {
        let answer = from_outside(sandbox, question).says(code, words);
        let call = answer.verdict().split_once(": ").unwrap().0.to_owned();
        if !answer.verdict().contains(": direct ") {
            let second = answer.0.stdout.lines().nth(1).unwrap();
            assert!(second.contains(NOT_ONE) && second.contains("--pid PID"), "{}", answer.0.stdout);
        }
        addresses.push(call);
        let other = asked(sandbox, &["--reuid=65534", "--regid=65534", "--clear-groups"], question);
        let says = other.0.stderr.contains("run this as root");
        assert!(other.0.code == 4 && other.0.stdout.is_empty() && says, "{question:?}: {:?}", other.0);
    }
    assert!(!from_outside(sandbox, &["default/ext-b"]).lines("problem").is_empty(), "it has lost its address");

    world.agent.kill();
    for (Fault { question, without_agent: (code, words), .. }, address) in FAULTS.iter().zip(&addresses) {
        let arguments: Vec<_> =
            std::iter::once(&**address).chain(question.iter().copied().filter(|of| *of == "--probe")).collect();
        let killed = ["the agent was killed", "start cproxy run"];
        drop(from_outside(&world.sandbox, &arguments).says(*code, &[*words]).has("degraded", "agent", &killed));
        let by_name = from_outside(&world.sandbox, &["default/empty"]);
        drop(by_name.says(
            4,
            &[
                "default/empty: unknown: only a running agent knows Service default/empty by name; ask by its address",
                killed[0],
                killed[1],
            ],
        ));
    }
}

#[test]
fn a_process_outside_and_an_excluded_user_are_named_from_outside() {
    let world = World::builder().pods([1]).objects(web_with([1])).args(["--exclude-uid", "1234"]).start();
    let sandbox = &world.sandbox;
    let waiting = |user: &str, placement: Placement| {
        let mut command = Command::new("setpriv");
        command.args([user, "--clear-groups", "sleep", "1000"]);
        Daemon::spawn(sandbox, "sleep", placement, command)
    };
    let is_asleep = |process: &Daemon| {
        let name = fs::read_to_string(format!("/proc/{}/comm", process.pid())).map_err(|error| error.to_string())?;
        if name == "sleep\n" { Ok(()) } else { Err(name) }
    };
    // Backends are called from where the process is.
    let mut apart = Command::new("unshare");
    apart.args(["-n", "sleep", "1000"]);
    let mut apart = Daemon::spawn(sandbox, "unshare", Placement::Hooked, apart);
    apart.wait_until(SYNC, "it sleeps", is_asleep);
    let pid = apart.pid().to_string();
    drop(from_outside(sandbox, &["default/web:80/tcp", "--probe"]).says(0, &["forwarded to backend"]));
    drop(from_outside(sandbox, &["default/web:80/tcp", "--pid", &pid, "--probe"]).says(1, &["cannot be reached"]));
    drop(from_outside(sandbox, &["default/web:80/tcp", "--pid", &pid]).says(1, &["cannot be reached"]));
    for (user, placement, code, words) in [
        ("--reuid=0", Placement::Hooked, 0, "forwarded to backend"),
        ("--reuid=0", Placement::Beside, 1, "its cgroup"),
        ("--reuid=1234", Placement::Hooked, 1, "its user 1234 is excluded (--exclude-uid: see cproxy get config)"),
    ] {
        let mut process = waiting(user, placement);
        process.wait_until(SYNC, "it sleeps", is_asleep);
        let pid = process.pid().to_string();
        let answer = from_outside(sandbox, &["default/web:80/tcp", "--pid", &pid]).says(code, &[words]);
        assert!(!answer.0.stdout.contains(NOT_ONE), "{}", answer.0.stdout);
    }
}

#[test]
fn a_pin_directory_that_is_none() {
    let world = World::start([1]);
    let dir: PathBuf = world.sandbox.dir().join("nothing");
    fs::create_dir(&dir).unwrap();
    let answer = from_outside(&world.sandbox, &["default/web", "--pin-dir", dir.to_str().unwrap()]);
    drop(answer.says(4, &["unknown: ", "nothing"]));
}
