//! System calls of the agent that fail, and agents that are killed before one: lookups are right all along, the next
//! start repairs what is broken, and nothing is left behind.
//!
//! The calls are found by running the agent once. An ordinary run takes a sample of them, `CPROXY_SOAK=1` all.

#![expect(clippy::panic, reason = "a failed call is a failed test")]

use std::{collections::BTreeSet, time::Duration};

use aya::{maps::loaded_maps, programs::loaded_programs};
use cproxy_datapath::bpf::Program;
use cproxy_tests::{
    Server, echo,
    faults::{Fault, Injection, TracedAgent},
    manifest,
    population::Shape,
    process::{cproxy, eventually},
    random::{self, Random},
    sandbox::Sandbox,
    world::{Form, SYNC, has_pods, rows, serve_pods, start_agent, web_with, while_connecting},
};

/// Pods of the Service that answers.
const PODS: [u8; 2] = [1, 2];

/// Faults in an ordinary run of a test.
const SAMPLE: usize = 8;

/// System calls that change something in the kernel or in a file system, each with the errors that they can give.
const CALLS: [(&str, &[&str]); 4] = [
    ("bpf", &["EPERM", "ENOMEM", "EINVAL", "EBUSY", "EAGAIN", "E2BIG", "ENOSPC", "ENOENT"]),
    ("mount,umount2,rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat", &["EPERM", "EROFS", "ENOSPC", "EBUSY"]),
    ("flock,fcntl", &["ENOLCK", "EINTR", "EAGAIN", "EBADF"]),
    ("socket,bind,sendto,recvfrom,recvmsg,sendmsg", &["EPERM", "ENOBUFS", "EAFNOSUPPORT", "EINTR"]),
];

/// Services that are added while an agent runs: the maps have to grow for them.
const GROWTH: Shape = Shape::new(400, 5);

/// Time for what nobody refers to any more to be gone from the kernel.
const FREED: Duration = Duration::from_secs(10);

struct World {
    sandbox: Sandbox,
    _servers: Vec<Server>,
    /// Maps and programs that were in the kernel before.
    before: BTreeSet<String>,
}

impl World {
    fn new() -> Self {
        let sandbox = Sandbox::for_test();
        let servers = serve_pods(&sandbox, PODS);
        manifest::write(&sandbox.manifest_dir(), "web.json", web_with(PODS));
        Self { before: objects(), sandbox, _servers: servers }
    }

    /// An agent starts without faults, and has the right table. Then all is removed, and nothing is left.
    fn repair(&self, what: &str) {
        let mut agent = start_agent(&self.sandbox);
        let rows: Vec<_> = rows(&self.sandbox, "services").into_iter().filter(is_web).collect();
        assert!(rows.len() == 4 && rows.iter().all(|row| has_pods(row, &PODS)), "{what}: {rows:#?}");
        for form in Form::ALL {
            echo::ask_name(form.web()).unwrap_or_else(|error| panic!("{what}, repaired: {form:?}: {error}"));
        }
        agent.stop();
        cproxy(&self.sandbox, &["cleanup"]).success();
        assert!(!self.sandbox.pin_dir().exists(), "{what}: pins are left");
        eventually(FREED, format_args!("{what}: nothing is left in the kernel"), || {
            let left: Vec<_> = objects().difference(&self.before).cloned().collect();
            if left.is_empty() { Ok(()) } else { Err(left.join(", ")) }
        });
    }
}

fn is_web(row: &serde_json::Value) -> bool {
    row.get("service").and_then(serde_json::Value::as_str) == Some("default/web")
}

/// Our maps and programs in the kernel, whoever holds them.
fn objects() -> BTreeSet<String> {
    let ours = |name: &str| {
        let of_program = Program::ALL.iter().any(|program| program.name.starts_with(name));
        of_program || ["FRONTENDS", "SETS", "BACKENDS", "SETTINGS", "TCP_OWNERS", "UDP_FLOWS"].contains(&name)
    };
    let maps = loaded_maps().flatten().map(|map| (map.name_as_str().unwrap_or_default().to_owned(), map.id()));
    let programs = loaded_programs().flatten();
    let programs = programs.map(|program| (program.name_as_str().unwrap_or_default().to_owned(), program.id()));
    maps.chain(programs).filter(|(name, _)| ours(name)).map(|(name, id)| format!("{name} {id}")).collect()
}

/// Faults of these calls: a sample, or all.
fn injections(calls: &'static str, errors: &'static [&'static str], numbers: std::ops::Range<usize>) -> Vec<Injection> {
    let faults = || std::iter::once(Fault::Kill).chain(errors.iter().copied().map(Fault::Error));
    let all = numbers.flat_map(|number| faults().map(move |fault| Injection { calls, fault, number }));
    let all: Vec<_> = all.collect();
    let seed = random::seed();
    eprintln!("CPROXY_SEED={seed}: {} faults of {calls}", all.len());
    if random::is_soak() { all } else { Random::new(seed).some(&all, SAMPLE / 2) }
}

#[test]
fn a_first_start_with_a_fault_can_be_repeated() {
    for (calls, errors) in CALLS {
        let world = World::new();
        let mut dry = TracedAgent::start(&world.sandbox, calls, None);
        assert!(dry.settle(), "{}", dry.log());
        let last = dry.calls();
        dry.kill();
        world.repair("without a fault");
        for injection in injections(calls, errors, 1..last + 1) {
            let what = format!("{injection:?}");
            let mut agent = TracedAgent::start(&world.sandbox, calls, Some(injection));
            let is_ready = agent.settle();
            assert!(!agent.log().contains("panicked"), "{what}: {}", agent.log());
            if is_ready {
                echo::ask_name(Form::V4.web()).unwrap_or_else(|error| panic!("{what}: {error}: {}", agent.log()));
            }
            agent.kill();
            world.repair(&what);
        }
    }
}

#[test]
fn a_restart_with_a_fault_is_not_felt() {
    for (calls, errors) in CALLS {
        let world = World::new();
        start_agent(&world.sandbox).stop();
        let mut dry = TracedAgent::start(&world.sandbox, calls, None);
        assert!(dry.settle(), "{}", dry.log());
        let last = dry.calls();
        dry.kill();
        for injection in injections(calls, errors, 1..last + 1) {
            let what = format!("restart, {injection:?}");
            while_connecting(&what, || {
                let mut agent = TracedAgent::start(&world.sandbox, calls, Some(injection));
                agent.settle();
                assert!(!agent.log().contains("panicked"), "{what}: {}", agent.log());
                agent.kill();
                start_agent(&world.sandbox).stop();
            });
        }
        world.repair("after restarts with faults");
    }
}

#[test]
fn a_growth_with_a_fault_is_not_felt_and_made_good() {
    let (calls, errors) = CALLS[0];
    let world = World::new();
    let grow = || manifest::write(&world.sandbox.manifest_dir(), "more.json", GROWTH.objects(0..GROWTH.services));
    let shrink = || manifest::write(&world.sandbox.manifest_dir(), "more.json", []);
    let has_grown = || {
        let count = rows(&world.sandbox, "services").len();
        if count == GROWTH.services as usize + 4 { Ok(()) } else { Err(format!("{count} rows")) }
    };
    let mut dry = TracedAgent::start(&world.sandbox, calls, None);
    assert!(dry.settle(), "{}", dry.log());
    let first = dry.calls();
    grow();
    eventually(SYNC, "the maps grow", has_grown);
    let last = dry.calls();
    dry.kill();
    shrink();
    for injection in injections(calls, errors, first + 1..last + 1) {
        cproxy(&world.sandbox, &["cleanup"]).success();
        let what = format!("growth, {injection:?}");
        let mut agent = TracedAgent::start(&world.sandbox, calls, Some(injection));
        assert!(agent.settle(), "{what}: {}", agent.log());
        while_connecting(&what, || {
            grow();
            if injection.fault == Fault::Kill {
                eventually(SYNC, format_args!("{what}: the agent is killed, or has made fewer calls"), || {
                    if agent.has_ended() { Ok(()) } else { has_grown() }
                });
                agent.kill();
                start_agent(&world.sandbox).stop();
            }
            // Memory that has run out is asked for again after half a minute.
            eventually(Duration::from_secs(60), format_args!("{what}: made good"), has_grown);
        });
        assert!(!agent.log().contains("panicked"), "{what}: {}", agent.log());
        agent.kill();
        shrink();
    }
    world.repair("after growths with faults");
}
