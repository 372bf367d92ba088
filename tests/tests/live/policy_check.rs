//! `cproxy check` where a network policy is in force.

#![expect(clippy::unwrap_used, reason = "a failed call is a failed test")]

use std::{fs, os::fd::AsFd as _, process::Command};

use cproxy_datapath::bpf::syscalls::{
    bpf_attach_type, bpf_prog_type, exit, link_create, link_update, load_program, move_to, obj_get,
};
use cproxy_tests::{
    process::{Daemon, cproxy, eventually},
    sandbox::Placement,
    world::SYNC,
};
use serde_json::{Value, json};

use crate::policy::{Pods, both};

/// Lines about the policy: state and detail by name.
fn lines(pods: &Pods) -> Vec<(String, String, String)> {
    let found: Vec<Value> = serde_json::from_str(&cproxy(&pods.sandbox, &["check", "-o", "json"]).stdout).unwrap();
    let text = |line: &Value, field: &str| line[field].as_str().unwrap().to_owned();
    let lines = found.iter().map(|line| (text(line, "name"), text(line, "state"), text(line, "detail")));
    lines.filter(|(name, ..)| name.starts_with("policy")).collect()
}

fn line(pods: &Pods, name: &str) -> (String, String) {
    let found = lines(pods).into_iter().find(|(found, ..)| found == name);
    let (_, state, detail) = found.unwrap_or_else(|| (String::new(), "no line".to_owned(), String::new()));
    (state, detail)
}

#[test]
fn check_names_what_policy_does_not_see() {
    let pods = Pods::new();
    pods.write(&[], "other");
    let mut agent = pods.enforce();
    assert_eq!(lines(&pods), [("policy".to_owned(), "ok".to_owned(), "the pod is not isolated".to_owned())]);
    pods.write(&[both()], "other");
    eventually(SYNC, "the pod is isolated", || match line(&pods, "policy") {
        (state, detail) if state == "ok" && detail == "the pod is isolated for ingress and egress" => Ok(()),
        other => Err(format!("{other:?}")),
    });
    for name in ["policy_programs", "policy_other_programs", "policy_raw_sockets", "policy_forwarding"] {
        assert_eq!(line(&pods, name).0, "ok", "{name}: {:?}", line(&pods, name));
    }

    // A process that may make raw sockets, and is not root of the VM.
    let mut raw = Command::new("setpriv");
    raw.args(["--bounding-set=-all,+net_raw", "--inh-caps=-all,+net_raw", "sleep", "1000"]);
    let mut raw = Daemon::spawn(&pods.sandbox, "raw", Placement::Hooked, raw);
    eventually(SYNC, "the process is named", || match line(&pods, "policy_raw_sockets") {
        (state, detail) if state == "degraded" && detail.contains("1 process with CAP_NET_RAW can") => {
            assert!(detail.contains(&format!("sleep[{}]", raw.pid())), "{detail}");
            Ok(())
        }
        other => Err(format!("{other:?}")),
    });
    raw.kill();
    fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
    assert!(line(&pods, "policy_forwarding").1.starts_with("IPv4 packets are forwarded"));

    // A program that lets everything in.
    let hook = bpf_attach_type::BPF_SK_LOOKUP;
    let program_type = bpf_prog_type::BPF_PROG_TYPE_SK_LOOKUP;
    let program = load_program(program_type, hook as u32, &[move_to(0, 1), exit()], "somebody_elses").unwrap();
    let netns = fs::File::open("/proc/thread-self/ns/net").unwrap();
    let other = link_create(program.as_fd(), netns.as_fd(), hook as u32).unwrap();
    let (state, detail) = line(&pods, "policy_other_programs");
    assert_eq!(state, "degraded");
    assert!(detail.contains("each can let in what policy denies: somebody_elses ("), "{detail}");
    drop(other);

    agent.kill();
    let (state, detail) = line(&pods, "policy");
    let expected = "the pod is isolated for ingress and egress, as the last agent has left it";
    assert_eq!((&*state, &*detail), ("ok", expected));
    assert_eq!(json!(line(&pods, "policy_programs").0), "ok");
}

/// A program of somebody else in the place of the policy's, which no look at links shows.
#[test]
fn the_canary_finds_that_a_denied_call_passes() {
    let pods = Pods::new();
    pods.write(&[both()], "other");
    let _agent = pods.enforce();
    let hooks = || {
        let found = cproxy(&pods.sandbox, &["check", "-o", "json"]).stdout;
        let found: Vec<Value> = serde_json::from_str(&found).unwrap();
        let line = found.into_iter().find(|line| line["name"] == "hooks").unwrap();
        (line["state"].as_str().unwrap().to_owned(), line["detail"].as_str().unwrap().to_owned())
    };
    assert_eq!(hooks().0, "ok", "{:?}", hooks());
    let denials = cproxy(&pods.sandbox, &["get", "denials", "-o", "json"]).success().json();
    // The nameserver, which `check` asks as an application would, is a denial; the canary is none, nor is the question
    // whether sockets can be closed.
    let peers: Vec<_> = denials.as_array().unwrap().iter().map(|row| (&row["direction"], &row["port"])).collect();
    assert!(peers.iter().all(|peer| *peer == (&json!("Egress"), &json!(53))), "{denials}");

    let hook = bpf_attach_type::BPF_CGROUP_INET4_CONNECT;
    let program_type = bpf_prog_type::BPF_PROG_TYPE_CGROUP_SOCK_ADDR;
    let program = load_program(program_type, hook as u32, &[move_to(0, 1), exit()], "somebody_elses").unwrap();
    let link = obj_get(&pods.sandbox.pin_dir().join("policy-v1/connect4"), 0).unwrap();
    link_update(link.as_fd(), program.as_fd()).unwrap();
    let (state, detail) = hooks();
    assert_eq!(state, "missing");
    assert!(detail.contains("connect4: connect to 198.19.255.253:7, which network policy denies: "), "{detail}");
}
