//! Programs that others detach, replace or overrule while the agent runs, by real system calls.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a failed call is a failed test")]

use std::{
    fs,
    net::TcpStream,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::PathBuf,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use cproxy_datapath::bpf::{
    PinDir, Program, attached,
    syscalls::{
        bpf_attach_type, bpf_prog_type, exit, link_create, link_detach, link_update, load_program, move_to, obj_get,
    },
};
use cproxy_tests::{
    echo,
    manifest::Service,
    process::{Agent, Output, cproxy, cproxy_with_variable, eventually},
    sandbox::{Placement, Sandbox},
    world::{Form, TCP, UDP, World, counter, pod, rows, serve_pods, start_agent_with, web_with},
};
use serde_json::Value;

const NODES: u8 = 3;
/// The agent looks at most two seconds after a change.
const LOOK: Duration = Duration::from_secs(10);
/// Restarts of the agent, each a chance to be faster than its first look.
const RESTARTS: usize = 10;

fn pin(world: &World, name: &str) -> PathBuf {
    PinDir::new(&world.sandbox.pin_dir()).object(name)
}

/// A program of another user of the hooks, which returns a constant.
fn foreign(attach_type: bpf_attach_type, verdict: i32) -> OwnedFd {
    let program_type = match attach_type {
        bpf_attach_type::BPF_CGROUP_INET_SOCK_RELEASE => bpf_prog_type::BPF_PROG_TYPE_CGROUP_SOCK,
        _ => bpf_prog_type::BPF_PROG_TYPE_CGROUP_SOCK_ADDR,
    };
    load_program(program_type, attach_type as u32, &[move_to(0, verdict), exit()], "somebody_elses").unwrap()
}

/// The state and the detail of the line `hooks` of `cproxy check`, which has the agent look.
fn hooks(sandbox: &Sandbox) -> (String, String) {
    let check = check(sandbox);
    let lines: Value = serde_json::from_str(&check.stdout).unwrap();
    let line = lines.as_array().and_then(|lines| lines.iter().find(|line| line["name"] == "hooks"));
    let line = line.unwrap_or_else(|| panic!("{lines}"));
    let text = |field: &str| line.get(field).and_then(Value::as_str).unwrap().to_owned();
    (text("state"), text("detail"))
}

fn check(sandbox: &Sandbox) -> Output {
    let (cgroup, pin_dir, run_dir) = (sandbox.cgroup(), sandbox.pin_dir(), sandbox.run_dir());
    let [cgroup, pin_dir, run_dir] = [cgroup, &pin_dir, &run_dir].map(|path| path.to_str().unwrap());
    cproxy(sandbox, &["check", "-o", "json", "--cgroup", cgroup, "--pin-dir", pin_dir, "--run-dir", run_dir])
}

fn connects() {
    for form in Form::ALL {
        echo::ask_name(form.web()).unwrap();
        echo::ask_connected_udp(form.web()).unwrap();
        assert_eq!(echo::ask_udp(form.web()).unwrap().1, form.web());
    }
}

#[test]
fn calls_through_each_hook_reach_the_listener_of_the_agent() {
    let world = World::start(1..=NODES);
    let (state, detail) = hooks(&world.sandbox);
    assert_eq!((&*state, &*detail), ("ok", "calls through each hook reach their target"));
    assert_eq!(counter(&world.sandbox, "hook_repairs") + counter(&world.sandbox, "canary_failures"), 0);
    assert!(counter(&world.sandbox, "hook_checks") > 0);
    let is_hidden = |row: &Value| !row.to_string().contains("198.19.255.254") && !row.to_string().contains("2001:2::");
    for what in ["services", "backends"] {
        assert!(rows(&world.sandbox, what).iter().all(is_hidden), "{what}");
    }
}

/// Restarts move the listener, and `check` calls it.
#[test]
fn calls_of_the_agent_itself_are_not_counted() {
    let mut world = World::start(1..=NODES);
    let forwarded = |world: &World| {
        assert_eq!(hooks(&world.sandbox).0, "ok");
        world.counter("forwarded")
    };
    assert_eq!(forwarded(&world), 0);
    connects();
    let calls = 3 * Form::ALL.len() as u64;
    assert_eq!(forwarded(&world), calls);
    world.agent.kill();
    world.agent = start_agent_with(&world.sandbox, [""; 0]);
    assert_eq!(forwarded(&world), calls);
    connects();
    assert_eq!(forwarded(&world), 2 * calls);
    world.agent.kill();
    assert_eq!((world.counter("forwarded"), world.counter("refused")), (2 * calls, 0));
}

#[test]
fn each_program_that_is_detached_is_attached_again() {
    let world = World::start(1..=NODES);
    for (count, program) in (1..).zip(Program::ALL) {
        let link = obj_get(&pin(&world, program.link), 0).unwrap();
        link_detach(link.as_fd()).unwrap();
        let (state, detail) = hooks(&world.sandbox);
        assert!(state == "ok" && detail.contains("attached again"), "{}: {state} {detail}", program.link);
        assert_eq!(counter(&world.sandbox, "hook_repairs"), count, "{}", program.link);
        connects();
    }
    assert!(world.agent.log().contains("connect4: it was detached"), "{}", world.agent.tail());
}

#[test]
fn a_program_that_is_replaced_is_put_back() {
    let world = World::start(1..=NODES);
    let program = foreign(bpf_attach_type::BPF_CGROUP_INET4_CONNECT, 1);
    let link = obj_get(&pin(&world, "connect4"), 0).unwrap();
    link_update(link.as_fd(), program.as_fd()).unwrap();
    let (state, detail) = hooks(&world.sandbox);
    assert_eq!(state, "ok", "{detail}");
    connects();
    assert!(world.agent.log().contains("connect4: program"), "{}", world.agent.tail());
}

/// The programs of the start are the agent's, not those that it finds when it looks for the first time.
#[test]
fn a_program_that_is_replaced_as_soon_as_the_agent_is_ready_is_put_back() {
    let mut world = World::start(1..=NODES);
    let program = foreign(bpf_attach_type::BPF_CGROUP_INET4_CONNECT, 1);
    for _ in 0..RESTARTS {
        world.agent.kill();
        let ready = world.sandbox.run_dir().join("ready");
        drop(fs::remove_file(&ready));
        let (pin, started) = (pin(&world, "connect4"), Instant::now());
        thread::scope(|scope| {
            scope.spawn(|| {
                while !ready.exists() && started.elapsed() < LOOK {}
                let link = obj_get(&pin, 0).unwrap();
                link_update(link.as_fd(), program.as_fd()).unwrap();
            });
            world.agent = start_agent_with(&world.sandbox, [""; 0]);
        });
        let (state, detail) = hooks(&world.sandbox);
        assert_eq!(state, "ok", "{detail}; {}", world.agent.tail());
    }
}

#[test]
fn a_changed_network_or_cgroup_has_the_agent_look() {
    let mut world = World::start(1..=NODES);
    let detach = |world: &World| {
        let link = obj_get(&pin(world, "connect4"), 0).unwrap();
        link_detach(link.as_fd()).unwrap();
    };
    let is_attached = || match echo::ask_name(Form::V4.web()) {
        Ok(_) => Ok(()),
        Err(error) => Err(error.to_string()),
    };
    detach(&world);
    world.sandbox.add_address("10.9.9.9");
    eventually(LOOK, "the program is attached again", is_attached);
    detach(&world);
    let container = world.sandbox.cgroup().join("container");
    fs::create_dir(&container).unwrap();
    eventually(LOOK, "the program is attached again", is_attached);
    fs::remove_dir(container).unwrap();
    world.agent.stop();
}

#[test]
fn removed_pins_are_made_again_and_sockets_keep_their_names() {
    let world = World::start(1..=NODES);
    let before = Form::ALL.map(|form| TcpStream::connect(form.web()).unwrap());
    fs::remove_dir_all(world.sandbox.pin_dir()).unwrap();
    let (state, detail) = hooks(&world.sandbox);
    assert_eq!(state, "ok", "{detail}; {}", world.agent.tail());
    connects();
    for (form, stream) in Form::ALL.into_iter().zip(&before) {
        assert_eq!(stream.peer_addr().unwrap(), form.web());
    }
    assert!(rows(&world.sandbox, "services").len() >= 4);
    // The table is followed as before.
    world.set(web_with([1]), |rows| rows.iter().all(|row| cproxy_tests::world::has_pods(row, &[1])));
    // No other agent may start there.
    let other = cproxy(&world.sandbox, &["cleanup", "--pin-dir", world.sandbox.pin_dir().to_str().unwrap()]);
    assert!(other.code == 1 && other.stderr.contains("in use"), "{}", other.stderr);
}

#[test]
fn a_bpffs_that_is_mounted_again_gets_the_pins_again() {
    let world = World::start(1..=NODES);
    let pins = world.sandbox.pin_dir();
    let mount = |program: &str, arguments: &[&str]| {
        assert!(Command::new(program).args(arguments).arg(pins.parent().unwrap()).status().unwrap().success());
    };
    mount("umount", &["--lazy"]);
    mount("mount", &["--types", "bpf", "--options", "mode=700", "bpf"]);
    let (state, detail) = hooks(&world.sandbox);
    assert_eq!(state, "ok", "{detail}; {}", world.agent.tail());
    connects();
    world.set(web_with([1]), |rows| rows.iter().all(|row| cproxy_tests::world::has_pods(row, &[1])));
}

#[test]
fn a_verdict_of_others_is_named_and_their_program_stays() {
    let world = World::start(1..=NODES);
    let cgroup = fs::File::open(world.sandbox.cgroup()).unwrap();
    for (attach_type, hook) in [
        (bpf_attach_type::BPF_CGROUP_INET4_CONNECT, "connect4"),
        (bpf_attach_type::BPF_CGROUP_UDP6_SENDMSG, "sendmsg6"),
    ] {
        let program = foreign(attach_type, 0);
        let link = link_create(program.as_fd(), cgroup.as_fd(), attach_type as u32).unwrap();
        let (state, detail) = hooks(&world.sandbox);
        assert_eq!(state, "missing", "{hook}: {detail}");
        assert!(detail.contains(hook) && detail.contains("somebody_elses"), "{hook}: {detail}");
        let check = check(&world.sandbox);
        assert!(check.code == 1 && check.stderr.contains("hooks"), "{}", check.stderr);
        link_detach(link.as_fd()).unwrap();
        assert_eq!(hooks(&world.sandbox).0, "ok", "{hook}");
    }
    assert!(counter(&world.sandbox, "canary_failures") >= 2);
}

#[test]
fn a_canary_that_cannot_walk_says_why() {
    for (arguments, reason) in [
        (["--canary-address", "none"], "--canary-address"),
        (["--exclude-port", "7"], "--exclude-port"),
        (["--exclude-uid", "0"], "--exclude-uid"),
    ] {
        let sandbox = Sandbox::for_test();
        let agent = start_agent_with(&sandbox, arguments);
        let (state, detail) = hooks(&sandbox);
        assert!(state == "degraded" && detail.contains(reason), "{arguments:?}: {state} {detail}");
        drop(agent);
    }
}

#[test]
fn a_canary_at_an_address_of_the_machine_is_refused_and_one_of_a_dead_agent_is_no_service() {
    let mut world = World::builder().pods([1]).objects(web_with([1])).args(["--canary-address", "198.19.7.7"]).start();
    let pod = pod(1).v4.to_string();
    let refused = cproxy(&world.sandbox, &["run", "--manifests", "/dev", "--canary-address", &pod]).failure(1);
    assert!(refused.stderr.contains(&format!("--canary-address {pod}: this machine has the address")), "{refused:?}");
    let variable = ("CPROXY_CANARY_ADDRESS", pod.as_str());
    let check = cproxy_with_variable(&world.sandbox, &["check"], variable).failure(1);
    assert!(check.stdout.contains("this machine has the address"), "{check:?}");
    world.agent.kill();
    let rows = rows(&world.sandbox, "services");
    assert!(!rows.is_empty() && rows.iter().all(|row| row["address"] != "198.19.7.7"), "{rows:?}");
}

#[test]
fn a_service_with_the_address_of_the_canary_comes_first() {
    let sandbox = Sandbox::for_test();
    let _servers = serve_pods(&sandbox, [1]);
    cproxy_tests::manifest::write(&sandbox.manifest_dir(), "web.json", web_with([1]));
    let vip = cproxy_tests::world::WEB.v4.to_string();
    let _agent = start_agent_with(&sandbox, ["--canary-address", &vip]);
    assert_eq!(hooks(&sandbox).0, "ok", "port 7 is free");
    echo::ask_name(Form::V4.web()).unwrap();
}

/// The canary's addresses as external addresses, and one of them as a ClusterIP, as only a manifest can have it.
#[test]
fn no_external_address_blinds_the_canary_and_a_family_that_is_not_tried_is_said() {
    let world = World::start([1]);
    let claim = |service: Service| -> Vec<Value> {
        let claimed = ["198.19.255.254", "2001:2::fffe"];
        let service = service.dual_stack().spec("externalIPs", claimed.to_vec().into());
        let echo = service.tcp("echo", 7, TCP).udp("echo", 7, UDP);
        web_with([1]).into_iter().chain([echo.into()]).collect()
    };
    let service = || Service::new("blind").namespace("evil").cluster_ips(["10.96.0.66", "fd00:96::66"]);
    let is_there = |rows: &[Value]| rows.iter().any(|row| row["service"] == "evil/blind");
    world.set(claim(service()), is_there);
    assert_eq!(hooks(&world.sandbox), ("ok".to_owned(), "calls through each hook reach their target".to_owned()));

    let taken = Service::new("blind").namespace("evil").cluster_ips(["198.19.255.254", "fd00:96::66"]);
    world.set(claim(taken), |rows| rows.iter().any(|row| row["address"] == "198.19.255.254"));
    let (state, detail) = hooks(&world.sandbox);
    assert_eq!(state, "degraded", "{detail}");
    for words in ["other hooks reach their target", "IPv4: 198.19.255.254:7/", "evil/blind", "--canary-address"] {
        assert!(detail.contains(words), "{words}: {detail}");
    }
}

#[test]
fn an_agent_outside_its_cgroup_walks_the_canary_there() {
    let sandbox = Sandbox::for_test();
    let mut agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir()).placement(Placement::Unhooked).start();
    assert_eq!(hooks(&sandbox).0, "ok");
    agent.stop();
}

#[test]
fn a_cgroup_that_is_made_again_is_attached_again() {
    let sandbox = Sandbox::for_test();
    let inner = sandbox.cgroup().join("inner");
    fs::create_dir(&inner).unwrap();
    let mut agent =
        Agent::new(&sandbox).manifests(sandbox.manifest_dir()).placement(Placement::Hooked).cgroup(&inner).start();
    // A canary may be there.
    eventually(LOOK, "the cgroup is removed", || fs::remove_dir(&inner));
    fs::create_dir(&inner).unwrap();
    let made = fs::metadata(&inner).unwrap().ino();
    eventually(LOOK, "the programs follow the cgroup", || {
        let links = attached(&PinDir::new(&sandbox.pin_dir()));
        let is_there = links.iter().all(|(_, id)| id.as_ref().is_ok_and(|&id| id == made));
        if is_there { Ok(()) } else { Err(agent.tail()) }
    });
    let (state, detail) = hooks(&sandbox);
    assert_eq!(state, "ok", "a call is tried in the new one: {detail}");
    agent.stop();
    eventually(LOOK, "the cgroup is removed", || fs::remove_dir(&inner));
}
