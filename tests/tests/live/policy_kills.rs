//! A policy that changes all the time while its agent is killed, and while others detach the programs that translate:
//! at no instant does a call pass that no state allows, nor is one denied that all allow.

#![expect(clippy::unwrap_used, reason = "a failed call is a failed test")]

use std::{
    os::fd::AsFd as _,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use cproxy_datapath::bpf::{
    Program,
    syscalls::{link_detach, obj_get},
};
use cproxy_tests::{
    Server,
    isolation::{ARGUMENTS, Isolation, State},
    manifest,
    process::{Agent, cproxy, eventually},
    random::{self, Random},
    sandbox::Sandbox,
    world::{SYNC, serve_pods, web_with},
};

/// Pods that the policy always allows.
const PODS: [u8; 2] = [1, 2];

/// Kills in an ordinary run, and in a soak.
const KILLS: usize = 12;
const KILLS_OF_SOAK: usize = 500;

/// Longest life of an agent. It takes about a third of that to get ready.
const LIFE_MAX_MS: usize = 600;

/// Pause between two changes.
const PAUSE: Duration = Duration::from_millis(4);

struct Pod {
    isolation: Isolation,
    _servers: Vec<Server>,
    sandbox: Sandbox,
}

impl Pod {
    fn new() -> Self {
        let sandbox = Sandbox::for_test();
        let servers = serve_pods(&sandbox, PODS);
        manifest::write(&sandbox.manifest_dir(), "web.json", web_with(PODS));
        Self { isolation: Isolation::new(&sandbox, PODS), _servers: servers, sandbox }
    }

    fn agent(&self) -> Agent<'_> {
        Agent::new(&self.sandbox).manifests(self.sandbox.manifest_dir()).args(ARGUMENTS)
    }

    fn wait_for_policy(&self, when: &str) {
        eventually(SYNC, when, || self.isolation.check());
    }
}

#[test]
fn an_agent_that_is_killed_at_any_time_opens_and_closes_nothing() {
    let pod = Pod::new();
    let seed = random::seed();
    eprintln!("CPROXY_SEED={seed}");
    let mut random = Random::new(seed);
    drop(pod.agent().start());
    let kills = if random::is_soak() { KILLS_OF_SOAK } else { KILLS };
    pod.isolation.while_calling("agents are killed", || {
        for _ in 0..kills {
            let life = Duration::from_millis(random.below(LIFE_MAX_MS) as u64);
            let mut agent = pod.agent().spawn();
            let started = Instant::now();
            while started.elapsed() < life {
                pod.isolation.set(random.pick(&[State::Before, State::After, State::Grown]));
                thread::sleep(PAUSE);
            }
            agent.kill();
            assert!(!agent.log().contains("panicked"), "{}", agent.log());
        }
        let _agent = pod.agent().start();
        pod.wait_for_policy("after all of them");
    });
}

/// Between the loss of a program that translates and its return, a ClusterIP is judged by itself.
#[test]
fn programs_that_others_detach_come_back_in_front_of_the_policy() {
    let pod = Pod::new();
    let directory = pod.sandbox.pin_dir().join(format!("v{}", cproxy_ebpf::LAYOUT_VERSION));
    let mut agent = pod.agent().start();
    pod.isolation.while_calling("programs are detached", || {
        for round in 0..6 {
            Program::ALL.iter().for_each(|program| detach(&directory.join(program.link)));
            if round % 2 == 0 {
                cproxy(&pod.sandbox, &["check"]);
            } else {
                agent.kill();
                agent = pod.agent().start();
            }
            pod.wait_for_policy("programs are back");
        }
    });
}

fn detach(link: &Path) {
    obj_get(link, 0).and_then(|link| link_detach(link.as_fd())).unwrap();
}
