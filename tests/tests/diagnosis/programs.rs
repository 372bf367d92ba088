//! Faults of the programs, of the agent and of the calling process.

use std::{fs, os::fd::AsFd, process::Command};

use cproxy_datapath::bpf::{
    PinDir,
    syscalls::{bpf_attach_type, bpf_prog_type, exit, link_create, link_detach, load_program, move_to, obj_get},
};
use cproxy_tests::{
    manifest,
    process::{Agent, Daemon, Signal, cproxy, eventually},
    sandbox::{Placement, Sandbox},
    world::{SYNC, World, start_agent, web_with},
};

use super::Answer;

const CALL: &str = "10.96.0.10:80";

fn explain(world: &World) -> Answer {
    Answer::to(&world.sandbox, &[CALL])
}

/// A process that waits in that place, and its id as an argument.
fn waiting(sandbox: &Sandbox, placement: Placement) -> (Daemon, String) {
    let mut command = Command::new("sleep");
    command.arg("1000");
    let daemon = Daemon::spawn(sandbox, "sleep", placement, command);
    let pid = daemon.pid().to_string();
    (daemon, pid)
}

#[test]
fn a_hook_that_is_detached() {
    let mut world = World::start([1]);
    let link = obj_get(&PinDir::new(&world.sandbox.pin_dir()).object("connect4"), 0).unwrap();
    link_detach(link.as_fd()).unwrap();
    // A running agent repairs it at this very question.
    explain(&world).forwarded().has("ok", "programs", &["attached again once"]);
    world.agent.kill();
    link_detach(obj_get(&PinDir::new(&world.sandbox.pin_dir()).object("connect4"), 0).unwrap().as_fd()).unwrap();
    explain(&world).fails_because(&["program connect4 does not run"]);
}

#[test]
fn a_hook_that_is_shadowed() {
    let world = World::start([1]);
    let cgroup = fs::File::open(world.sandbox.cgroup()).unwrap();
    let attach_type = bpf_attach_type::BPF_CGROUP_INET4_CONNECT;
    let deny = [move_to(0, 0), exit()];
    let program_type = bpf_prog_type::BPF_PROG_TYPE_CGROUP_SOCK_ADDR;
    let program = load_program(program_type, attach_type as u32, &deny, "somebody_elses").unwrap();
    let link = link_create(program.as_fd(), cgroup.as_fd(), attach_type as u32).unwrap();
    explain(&world).fails_because(&["the programs have no effect", "connect4", "somebody_elses"]).has(
        "broken",
        "programs",
        &["somebody_elses"],
    );
    link_detach(link.as_fd()).unwrap();
    explain(&world).forwarded();
}

/// Calls that get no answer take the agent longer than a command waits: the last check counts.
#[test]
fn hooks_that_lead_elsewhere_without_an_answer() {
    // Programs of another cproxy, whose agent is dead, come first.
    let shadow = |sandbox: &Sandbox| {
        let (pins, run) = (sandbox.pin_dir().with_file_name("other"), sandbox.dir().join("other-run"));
        let mut other = Agent::new(sandbox).pin_dir(pins).run_dir(run).manifests(sandbox.manifest_dir()).spawn();
        other.wait_log("ready after", SYNC);
        other.kill();
        Vec::new()
    };
    let world = World::builder().pods([1]).objects(web_with([1])).prepare(shadow).start();
    let silent = ["no datagram arrives", "others there: "];
    eventually(SYNC * 3, "the first check has ended", || {
        let answer = explain(&world);
        if silent.iter().all(|word| answer.verdict().contains(word)) { Ok(()) } else { Err(answer.0.stdout) }
    });
    explain(&world)
        .fails_because(&["direct without translation: the programs have no effect"])
        .has("broken", "programs", &silent);
    let check = cproxy(&world.sandbox, &["check"]).stdout;
    let hooks = check.lines().find(|line| line.split_whitespace().nth(1) == Some("hooks")).unwrap();
    assert!(silent.iter().all(|word| hooks.contains(word)), "{check}");
}

#[test]
fn an_agent_that_is_dead() {
    let mut world = World::start([1]);
    world.agent.kill();
    const WORDS: [&str; 2] = ["the agent was killed: Services work as of its last change", "start cproxy run"];
    explain(&world).forwarded().has("degraded", "agent", &WORDS);
    let sandbox = &world.sandbox;
    let has_words = |text: &str| assert!(WORDS.iter().all(|word| text.contains(word)), "{text}");
    let waited = cproxy(sandbox, &["wait", "--timeout", "50ms"]).failure(1);
    has_words(&waited.stderr);
    let check = cproxy(sandbox, &["check"]);
    has_words(check.stdout.lines().find(|line| line.starts_with("degraded") && line.contains(" agent ")).unwrap());
    assert!(!check.stdout.contains("ok        hooks"), "{}", check.stdout);
    let services = cproxy(sandbox, &["get", "services"]).success();
    has_words(&services.stderr);
    assert!(services.stdout.contains("10.96.0.10:80/TCP"), "{}", services.stdout);
    has_words(&cproxy(sandbox, &["get", "services", "-o", "name"]).failure(1).stderr);
    // The next agent is no riddle.
    let mut next = start_agent(sandbox);
    cproxy(sandbox, &["wait", "--timeout", "5s"]).success();
    next.stop();
    let check = cproxy(sandbox, &["check"]).stdout;
    let words = "no agent runs: Services work as of the last change";
    assert!(check.lines().any(|line| line.starts_with("degraded") && line.contains(words)), "{check}");
    // Failure at the start.
    cproxy(sandbox, &["run", "--manifests", "/nowhere"]).failure(2);
    for command in ["check", "status"] {
        let said = cproxy(sandbox, &[command]).stdout;
        assert!(said.contains("; the last one has ended: --manifests /nowhere: "), "{said}");
    }
    let by_name = Answer::to(&world.sandbox, &["default/web"]);
    assert!(
        by_name.0.code == 4 && by_name.verdict().starts_with("default/web: unknown: only a running agent"),
        "{}",
        by_name.verdict()
    );
}

#[test]
fn one_screen_shows_agent_source_and_table() {
    let mut world = World::start([1, 2]);
    let status = |world: &World, arguments: &[&str]| cproxy(&world.sandbox, &[&["status"], arguments].concat());
    let json = status(&world, &["-o", "json"]).success().json();
    assert_eq!((&json["ok"], &json["agent"], &json["problems"]), (&true.into(), &"ready".into(), &0.into()), "{json}");
    assert_eq!((&json["services"], &json["pid"]), (&1.into(), &world.agent.pid().into()), "{json}");
    assert!(json["calls_per_second"]["refusals"] == 0.0 && json["silence"].is_null(), "{json}");
    let text = status(&world, &[]).success().stdout;
    for words in ["version     0.", "ready for ", "source      manifests ", "1; ", "problems    none", " refusals, "] {
        assert!(text.contains(words), "{words}: {text}");
    }
    manifest::write_text(&world.sandbox.manifest_dir(), "bad.yaml", "a: [");
    eventually(SYNC, "a problem", || {
        let status = status(&world, &[]);
        if status.code == 1 && status.stdout.contains("1 (cproxy get problems)") { Ok(()) } else { Err(status.stdout) }
    });
    world.agent.kill();
    let text = status(&world, &[]).failure(1).stdout;
    assert!(text.contains("the agent was killed") && !text.contains("problems"), "{text}");
    let json = status(&world, &["-o", "json"]).failure(1).stdout;
    assert!(json.contains("\"agent\": \"killed\"") && json.contains("\"ready_seconds\": null"), "{json}");
}

#[test]
fn an_agent_that_is_stopped() {
    let mut world = World::start([1]);
    world.agent.signal(Signal::STOP);
    let pid = world.agent.pid();
    let words = [&*format!("process {pid}, is stopped"), &*format!("kill -CONT {pid}")];
    let answer = explain(&world).forwarded().has("degraded", "agent", &words);
    assert!(answer.verdict().contains("unless that has changed: the agent, process"), "{}", answer.verdict());
    let names = cproxy(&world.sandbox, &["get", "services", "-o", "name"]);
    assert!(names.code == 1 && words.iter().all(|word| names.stderr.contains(word)), "{names:?}");
    let check = cproxy(&world.sandbox, &["check"]).success().stdout;
    let silent = ["only the agent knows"];
    for (state, name, words) in
        [("degraded", "agent", &words[..]), ("unknown", "hooks", &silent), ("unknown", "source", &silent)]
    {
        let is_it = |line: &&str| line.starts_with(state) && line.split_whitespace().nth(1) == Some(name);
        let line = check.lines().find(is_it).unwrap_or_else(|| panic!("{state} {name}: {check}"));
        assert!(words.iter().all(|word| line.contains(word)), "{check}");
    }
    let status = cproxy(&world.sandbox, &["status", "-o", "json"]).failure(1).stdout;
    assert!(status.contains("\"agent\": \"stopped\""), "{status}");
    world.agent.signal(Signal::CONT);
}

#[test]
fn programs_that_were_never_installed() {
    let sandbox = Sandbox::for_test();
    let status = cproxy(&sandbox, &["status"]).failure(1).stdout;
    assert!(status.contains("none runs, and there is no table") && !status.contains("root"), "{status}");
    Answer::to(&sandbox, &[CALL]).says(4, &["unknown: ", "no cproxy table is installed"]).has(
        "degraded",
        "agent",
        &["no agent runs"],
    );
}

#[test]
fn a_cgroup_that_is_excluded() {
    let World { sandbox, agent, .. } = World::start([1]);
    let dir = sandbox.cgroup().join("opted-out");
    fs::create_dir(&dir).unwrap();
    let (mut process, pid) = waiting(&sandbox, Placement::Hooked);
    fs::write(dir.join("cgroup.procs"), &pid).unwrap();
    Answer::to(&sandbox, &[CALL, "--pid", &pid]).forwarded();
    drop(agent);
    let agent = cproxy_tests::world::start_agent_with(&sandbox, ["--exclude-cgroup", dir.to_str().unwrap()]);
    Answer::to(&sandbox, &[CALL, "--pid", &pid])
        .fails_because(&["direct without translation: its cgroup is excluded (--exclude-cgroup"])
        .has("broken", "process", &[&pid, "sleep"]);
    Answer::to(&sandbox, &[CALL]).forwarded();
    drop(agent);
    process.kill();
    fs::remove_dir(&dir).unwrap();
}

#[test]
fn a_user_and_a_port_that_are_excluded() {
    let world = World::builder()
        .pods([1])
        .objects(web_with([1]))
        .args(["--exclude-port", "80", "--exclude-uid", "1234"])
        .start();
    explain(&world).fails_because(&["port 80 is excluded (--exclude-port"]);
    drop(world);
    let world = World::builder().pods([1]).objects(web_with([1])).args(["--exclude-uid", "1234"]).start();
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "1234", "--clear-groups", "sleep", "1000"]);
    let mut process = Daemon::spawn(&world.sandbox, "sleep", Placement::Hooked, command);
    process.wait_until(SYNC, "it is the user's", |process| {
        let status =
            fs::read_to_string(format!("/proc/{}/status", process.pid())).map_err(|error| error.to_string())?;
        if status.contains("Uid:\t1234") { Ok(()) } else { Err(status) }
    });
    let pid = process.pid().to_string();
    Answer::to(&world.sandbox, &[CALL, "--pid", &pid]).fails_because(&["its user 1234 is excluded (--exclude-uid"]);
    explain(&world).forwarded();
}

#[test]
fn a_cgroup_without_hooks() {
    let world = World::start([1]);
    let (_process, pid) = waiting(&world.sandbox, Placement::Beside);
    Answer::to(&world.sandbox, &[CALL, "--pid", &pid]).fails_because(&[
        "direct without translation: its cgroup",
        "is not in or below the one that cproxy is attached to (--cgroup)",
    ]);
    let none = cproxy(&world.sandbox, &["explain", CALL, "--pid", "4194303"]);
    assert_eq!(none.code, 2, "{none:?}");
    assert!(none.stderr.contains("--pid 4194303: there is no such process"), "{none:?}");
}
