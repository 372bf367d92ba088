//! `cproxy trace`: events, filters, counters and the switch between the two sets of programs, by real system calls.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a failed call is a failed test")]

use std::{
    net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket},
    os::fd::AsFd,
    path::{Path, PathBuf},
    process::{Command, Stdio, id},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use aya::maps::MapData;
use cproxy_datapath::bpf::{Attachments, PinDir, Program, ServiceCounters, attached};
use cproxy_tests::{
    echo,
    manifest::{Service, Slice},
    process::{Daemon, Signal, cproxy, cproxy_command, eventually, run},
    sandbox::{Placement, Sandbox},
    world::{Form, SYNC, WEB, World, counter, pod, ready, start_agent, start_agent_with, web, while_connecting},
};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::Value;

/// Limit on the time until programs are loaded and switched.
const SWITCH: Duration = Duration::from_secs(30);

fn trace_dir(sandbox: &Sandbox) -> PathBuf {
    PinDir::new(&sandbox.pin_dir()).object("trace")
}

/// Ids of the programs behind the links.
fn program_ids(sandbox: &Sandbox) -> Vec<u32> {
    let pins = PinDir::new(&sandbox.pin_dir());
    Program::ALL.iter().map(|program| pinned_program(&pins.object(program.link))).collect()
}

/// Id of a pinned program, or of the program behind a pinned link.
fn pinned_program(path: &Path) -> u32 {
    let link = cproxy_datapath::bpf::syscalls::obj_get(path, 0).unwrap();
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", std::os::fd::AsRawFd::as_raw_fd(&link.as_fd())));
    let info = info.unwrap();
    let line = info.lines().find_map(|line| line.strip_prefix("prog_id:")).unwrap_or_else(|| panic!("{info}"));
    line.trim().parse().unwrap()
}

fn command(sandbox: &Sandbox, arguments: &[&str]) -> Command {
    cproxy_command(sandbox, &[&["trace"], arguments].concat())
}

/// Starts a tracer, and waits until all links lead to its programs.
pub(crate) fn start(sandbox: &Sandbox, arguments: &[&str]) -> Daemon {
    let before = program_ids(sandbox);
    let mut tracer = Daemon::spawn(sandbox, "trace", Placement::Hooked, command(sandbox, arguments));
    wait_for_switch(&mut tracer, sandbox, &before);
    tracer
}

fn wait_for_switch(tracer: &mut Daemon, sandbox: &Sandbox, before: &[u32]) {
    tracer.wait_until(SWITCH, "the tracing set is behind all links", |_| {
        let now = program_ids(sandbox);
        let is_switched = before.iter().zip(&now).all(|(before, now)| before != now);
        if is_switched { Ok(()) } else { Err(format!("{before:?} {now:?}")) }
    });
}

/// Events so far.
pub(crate) fn events(tracer: &Daemon) -> Vec<Value> {
    tracer.log().lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// Waits for an event with these fields.
pub(crate) fn wait_event(tracer: &mut Daemon, fields: &[(&str, Value)]) -> Value {
    tracer.wait_until(SYNC, &format!("an event with {fields:?}"), |tracer| {
        let has_all = |event: &Value| fields.iter().all(|(name, value)| event.get(*name) == Some(value));
        events(tracer).into_iter().find(has_all).ok_or_else(|| tracer.tail())
    })
}

fn unused() -> SocketAddr {
    Form::V4.address(WEB, 81)
}

/// `web` without endpoints.
fn without_endpoints() -> Vec<Value> {
    cproxy_tests::world::web_with([])
}

#[test]
fn each_verdict_is_shown_with_its_reason() {
    let world = World::start([1]);
    let before = program_ids(&world.sandbox);
    let verdicts = "forwarded,refused,dropped,direct,reversed,closed";
    let mut tracer = start(&world.sandbox, &["-o", "json", "--verdict", verdicts]);
    drop(TcpStream::connect(Form::V4.web()).unwrap());
    let forwarded = wait_event(
        &mut tracer,
        &[
            ("verdict", "forwarded".into()),
            ("pid", id().into()),
            ("call", "connect".into()),
            ("protocol", "TCP".into()),
        ],
    );
    for (field, expected) in [
        ("service", Value::from("default/web")),
        ("address", WEB.v4.to_string().into()),
        ("port", 80.into()),
        ("reason", "random".into()),
        ("uid", 0.into()),
    ] {
        assert_eq!(forwarded.get(field), Some(&expected), "{forwarded}");
    }
    assert_eq!(forwarded["backend"]["address"], Value::from(pod(1).v4.to_string()), "{forwarded}");
    assert!(forwarded["command"].is_string() && forwarded["cgroup"].as_u64() > Some(0), "{forwarded}");
    let socket = forwarded["socket_cookie"].clone();
    wait_event(&mut tracer, &[("verdict", "closed".into()), ("socket_cookie", socket)]);
    echo::ask_name(Form::V6.web()).unwrap();
    wait_event(&mut tracer, &[("verdict", "reversed".into()), ("call", "getpeername".into())]);
    echo::ask_udp(Form::V6.web()).unwrap();
    wait_event(&mut tracer, &[("verdict", "forwarded".into()), ("call", "send".into()), ("protocol", "UDP".into())]);
    wait_event(&mut tracer, &[("verdict", "reversed".into()), ("call", "receive".into())]);
    echo::ask_connected_udp(Form::V4.web()).unwrap();
    wait_event(&mut tracer, &[("verdict", "forwarded".into()), ("call", "connect".into()), ("protocol", "UDP".into())]);
    assert!(echo::is_refused(TcpStream::connect(unused())));
    let unknown = [("verdict", "refused".into()), ("reason", "unknown-port".into()), ("service", "default/web".into())];
    wait_event(&mut tracer, &unknown);
    world.set(without_endpoints(), |rows| rows.iter().all(|row| row["action"] == "refuse"));
    assert!(echo::is_refused(TcpStream::connect(Form::V4.web())));
    wait_event(&mut tracer, &[("verdict", "refused".into()), ("reason", "no-endpoint".into())]);
    let local = web().spec("internalTrafficPolicy", "Local".into());
    world.set(std::iter::once(local.into()).chain(ready([1])), |rows| rows.iter().all(|row| row["action"] == "drop"));
    UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"?", Form::V4.web()).unwrap_err();
    wait_event(
        &mut tracer,
        &[("verdict", "dropped".into()), ("reason", "not-allowed".into()), ("call", "send".into())],
    );
    assert!(tracer.stop().success());
    assert_eq!(program_ids(&world.sandbox), before, "the same programs as before");
    assert!(!trace_dir(&world.sandbox).exists());
    assert_eq!(counter(&world.sandbox, "hook_repairs"), 0);
}

#[test]
fn filters_hold_back_other_calls() {
    let world = World::start([1]);
    let pid = id().to_string();
    let web_v4 = WEB.v4.to_string();
    let calls = || {
        for form in [Form::V4, Form::V6] {
            echo::ask_name(form.web()).unwrap();
            echo::ask_udp(form.web()).unwrap();
        }
        assert!(echo::is_refused(TcpStream::connect(unused())));
    };
    let none = "1";
    for (arguments, expected) in [
        (&[&*web_v4][..], 3),
        (&["10.96.0.10:80"], 1),
        (&["10.96.0.10:80/udp"], 1),
        (&["default/web"], 4),
        (&["10.96.0.77"], 0),
        (&["--protocol", "tcp"], 3),
        (&["--verdict", "refused"], 1),
        (&["--pid", none], 0),
        (&["--process-cgroup", world.sandbox.cgroup().to_str().unwrap()], 5),
        (&["--process-cgroup", world.sandbox.cgroup_beside().to_str().unwrap()], 0),
    ] {
        // The agent's canary is another process.
        let of_test: &[&str] = if arguments.contains(&"--pid") { &[] } else { &["--pid", &pid] };
        let verdicts: &[&str] =
            if arguments.contains(&"--verdict") { &[] } else { &["--verdict", "forwarded,refused"] };
        let all = [&["-o", "json"], of_test, verdicts, arguments].concat();
        let mut tracer = start(&world.sandbox, &all);
        calls();
        // The end takes all events that are there with it.
        tracer.wait_until(SYNC, &format!("{arguments:?}"), |tracer| {
            if events(tracer).len() >= expected { Ok(()) } else { Err(tracer.tail()) }
        });
        assert!(tracer.stop().success());
        assert_eq!(events(&tracer).len(), expected, "{arguments:?}: {}", tracer.log());
    }
}

#[test]
fn the_canary_is_left_out_unless_a_destination_names_it() {
    const CANARY: &str = "198.51.100.7";
    let world = World::builder().pods([1]).objects(cproxy_tests::world::web_with([1]));
    let world = world.args(["--canary-address", CANARY]).start();
    let mut tracer = start(&world.sandbox, &["-o", "json"]);
    cproxy(&world.sandbox, &["check"]).success();
    echo::ask_name(Form::V4.web()).unwrap();
    wait_event(&mut tracer, &[("address", "10.96.0.10".into())]);
    assert!(tracer.stop().success());
    assert!(events(&tracer).iter().all(|event| event["address"] != CANARY), "{}", tracer.log());

    let mut tracer = start(&world.sandbox, &["-o", "json", CANARY]);
    cproxy(&world.sandbox, &["check"]).success();
    wait_event(&mut tracer, &[("address", CANARY.into())]);
    assert!(tracer.stop().success());
}

#[test]
fn an_excluded_port_is_shown() {
    let world =
        World::builder().pods([1]).objects(cproxy_tests::world::web_with([1])).args(["--exclude-port", "80"]).start();
    let mut tracer = start(&world.sandbox, &["-o", "json", "--count", "1"]);
    // Nothing answers there.
    UdpSocket::bind("0.0.0.0:0").unwrap().connect(Form::V4.web()).ok();
    wait_event(&mut tracer, &[("verdict", "direct".into()), ("reason", "excluded-port".into())]);
    assert!(tracer.wait(SYNC).unwrap().success(), "one event was wanted");
    assert!(!trace_dir(&world.sandbox).exists());
}

#[test]
fn a_killed_tracer_is_replaced_by_the_agent() {
    let world = World::start([1]);
    let mut tracer = start(&world.sandbox, &[]);
    let tracing = program_ids(&world.sandbox);
    let check = || cproxy(&world.sandbox, &["check", "-o", "json"]);
    drop(check());
    assert_eq!(program_ids(&world.sandbox), tracing, "the agent leaves a tracer alone");
    tracer.kill();
    drop(check());
    assert!(program_ids(&world.sandbox).iter().zip(&tracing).all(|(now, before)| now != before));
    assert!(!trace_dir(&world.sandbox).exists());
    echo::ask_name(Form::V4.web()).unwrap();
}

#[test]
fn the_agent_may_end_and_start_meanwhile_and_the_next_tracer_follows_a_killed_one() {
    let mut world = World::start([1]);
    let mut tracer = start(&world.sandbox, &["-o", "json"]);
    let tracing = program_ids(&world.sandbox);
    world.agent.kill();
    drop(TcpStream::connect(Form::V4.web()).unwrap());
    wait_event(&mut tracer, &[("verdict", "forwarded".into()), ("pid", id().into())]);
    let agent = start_agent(&world.sandbox);
    eventually(SWITCH, "the tracer switches again", || {
        let now = program_ids(&world.sandbox);
        if now == tracing { Ok(()) } else { Err(format!("{now:?}")) }
    });
    world.agent = agent;
    world.agent.kill();
    let agents: Vec<_> = Program::ALL
        .iter()
        .map(|program| pinned_program(&trace_dir(&world.sandbox).join(format!("{}_replaced", program.link))))
        .collect();
    tracer.kill();
    // Without an agent, the next tracer puts the agent's programs back.
    let mut next = start(&world.sandbox, &["-o", "json"]);
    assert!(next.stop().success());
    assert!(!trace_dir(&world.sandbox).exists());
    assert_eq!(program_ids(&world.sandbox), agents);
    echo::ask_name(Form::V4.web()).unwrap();
}

#[test]
fn a_second_tracer_and_one_without_a_table_say_why_they_end() {
    let world = World::start([1]);
    let mut tracer = start(&world.sandbox, &[]);
    let second = cproxy(&world.sandbox, &["trace", "--duration", "1s"]);
    assert!(second.code == 1 && second.stderr.contains("another cproxy trace"), "{}", second.stderr);
    tracer.signal(Signal::INT);
    assert!(tracer.wait(SYNC).unwrap().success());
    let unknown = cproxy(&world.sandbox, &["trace", "default/nothing"]);
    assert!(unknown.code == 1 && unknown.stderr.contains("default/nothing"), "{}", unknown.stderr);
    let nowhere = cproxy(&world.sandbox, &["trace", "--pin-dir", "/nowhere"]);
    assert!(nowhere.code == 1 && nowhere.stderr.contains("/nowhere"), "{}", nowhere.stderr);
}

#[test]
fn cleanup_ends_a_tracer_and_leaves_nothing() {
    let mut world = World::start([1]);
    let mut tracer = start(&world.sandbox, &[]);
    world.agent.stop();
    cproxy(&world.sandbox, &["cleanup"]).success();
    assert!(!world.sandbox.pin_dir().exists());
    let status = tracer.wait(SYNC).unwrap();
    assert!(status.code() == Some(1) && tracer.log().contains("is gone"), "{}", tracer.log());
    assert!(attached(&PinDir::new(&world.sandbox.pin_dir())).iter().all(|(_, id)| id.is_err()));
}

#[test]
fn switching_under_load_loses_no_call() {
    let world = World::start(1..=3);
    while_connecting("the sets are switched", || {
        for _ in 0..3 {
            let mut tracer = start(&world.sandbox, &[]);
            assert!(tracer.stop().success());
        }
    });
}

#[test]
fn counters_by_service_are_exact() {
    const THREADS: usize = 4;
    const CALLS: usize = 200;
    let world = World::start(1..=3);
    let mut tracer = start(&world.sandbox, &["--summary"]);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for _ in 0..CALLS {
                    // Only connect() counts; the socket needs no server's answer.
                    UdpSocket::bind("0.0.0.0:0").unwrap().connect(Form::V4.web()).unwrap();
                    assert!(echo::is_refused(TcpStream::connect(unused())));
                }
            });
        }
    });
    let row = format!("default/web   {}           {}", THREADS * CALLS, THREADS * CALLS);
    tracer.wait_log(&row, SYNC);
    assert!(tracer.stop().success());
    assert_eq!(
        ServiceCounters::read(&PinDir::new(&world.sandbox.pin_dir())).unwrap(),
        None,
        "the agent does not count"
    );
}

/// A Service with one UDP port, and its only endpoint.
fn of_udp(name: &str, address: Ipv4Addr) -> [Value; 2] {
    let service = Service::new(name).cluster_ips([address]).udp("dns", 53, 53);
    [service.into(), Slice::v4(name).udp("dns", 53).ready([pod(1).v4]).into()]
}

#[test]
fn each_of_1024_frontends_has_exact_counters_on_every_cpu() {
    let address = |number: u16| Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 97, 0, 0)) + u32::from(number));
    let objects = (0..1_024).flat_map(|number| of_udp(&format!("service-{number}"), address(number)));
    let world = World::builder().pods([1]).objects(objects).args(["--service-counters"]).start();
    let cpus: Vec<_> = {
        let all = sched_getaffinity(None).unwrap();
        (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)).collect()
    };
    for cpu in &cpus {
        let connect_to_each = || {
            let mut only = CpuSet::new();
            only.set(*cpu);
            sched_setaffinity(None, &only).unwrap();
            for number in 0..1_024 {
                UdpSocket::bind("0.0.0.0:0").unwrap().connect((address(number), 53)).unwrap();
            }
        };
        thread::scope(|scope| scope.spawn(connect_to_each).join().unwrap());
    }
    let counters = ServiceCounters::read(&PinDir::new(&world.sandbox.pin_dir())).unwrap().unwrap();
    // The canary's frontends are not among them.
    let of_services = counters.frontends.iter().filter(|(frontend, _)| frontend.port == 53);
    let counts: Vec<_> = of_services.map(|(_, counts)| counts.connections).collect();
    let wrong = counts.iter().filter(|connections| **connections != cpus.len() as u64).count();
    assert_eq!((counts.len(), wrong), (1_024, 0));
}

#[test]
fn a_summary_counts_on_when_a_service_is_made_again() {
    let world =
        World::builder().pods([1]).objects(of_udp("dns", Ipv4Addr::new(10, 97, 0, 1))).args(["--service-counters"]);
    let world = world.start();
    let connect = |calls: usize| {
        for _ in 0..calls {
            UdpSocket::bind("0.0.0.0:0").unwrap().connect("10.97.0.1:53").unwrap();
        }
    };
    connect(7);
    let mut tracer = start(&world.sandbox, &["--summary"]);
    world.set(vec![], <[Value]>::is_empty);
    world.set(of_udp("dns", Ipv4Addr::new(10, 97, 0, 1)), |rows| !rows.is_empty());
    connect(5);
    tracer.wait_log("default/dns   5 ", SYNC);
    connect(3);
    assert!(tracer.stop().success());
    assert!(tracer.log().contains("default/dns   8 "), "calls of the last second: {}", tracer.log());
}

#[test]
fn filters_that_match_no_call_are_refused() {
    let sandbox = Sandbox::for_test();
    for (arguments, wrong) in [
        (["--protocol", "udp", "10.96.0.10:80"].as_slice(), "--protocol: no DESTINATION has this protocol"),
        (&["--protocol", "tcp", "10.96.0.10:53/udp"], "--protocol: no DESTINATION has this protocol"),
        (&["--pid", "99999999"], "--pid 99999999: there is no such process"),
    ] {
        let output = run(&sandbox, Placement::Hooked, command(&sandbox, arguments), "", SYNC);
        assert_eq!(output.code, 2, "{output:?}");
        assert!(output.stderr.contains(wrong), "{output:?}");
    }
}

#[test]
fn the_agent_removes_what_a_tracer_left_that_was_killed_before_it_traced() {
    let world = World::start([1]);
    let before = program_ids(&world.sandbox);
    // As a tracer does before it puts its programs in force.
    std::fs::create_dir(trace_dir(&world.sandbox)).unwrap();
    let map = MapData::from_pin(PinDir::new(&world.sandbox.pin_dir()).object("COUNTERS")).unwrap();
    map.pin(trace_dir(&world.sandbox).join("connect4")).unwrap();
    cproxy(&world.sandbox, &["check"]);
    eventually(SYNC, "the pins are removed", || {
        if trace_dir(&world.sandbox).exists() { Err("they are there".to_owned()) } else { Ok(()) }
    });
    assert_eq!(program_ids(&world.sandbox), before);
}

/// Rows of `get services`, by port.
fn row_of(sandbox: &Sandbox, address: &str, protocol: &str) -> Value {
    let rows = cproxy(sandbox, &["get", "services", "-o", "json"]).success().json();
    let is_wanted = |row: &&Value| row["address"] == address && row["protocol"] == protocol;
    rows.as_array().unwrap().iter().find(is_wanted).cloned().unwrap_or_default()
}

#[test]
fn an_agent_counts_by_service_also_while_a_tracer_is_at_work_and_after_a_restart() {
    let args = ["--service-counters"];
    let mut world = World::builder().pods([1]).objects(cproxy_tests::world::web_with([1])).args(args).start();
    let web_v4 = WEB.v4.to_string();
    let call = || {
        UdpSocket::bind("0.0.0.0:0").unwrap().connect(Form::V4.web()).unwrap();
    };
    let counted = |sandbox: &Sandbox| {
        let row = row_of(sandbox, &web_v4, "UDP");
        (row["connections"].as_u64(), row["refused"].as_u64(), row["dropped"].as_u64())
    };
    assert_eq!(counted(&world.sandbox), (Some(0), Some(0), Some(0)));
    call();
    call();
    assert_eq!(counted(&world.sandbox), (Some(2), Some(0), Some(0)));
    let wide = cproxy(&world.sandbox, &["get", "services", "-o", "wide"]).success().stdout;
    assert!(wide.lines().next().unwrap().contains("CONNECTIONS   REFUSED   DROPPED"), "{wide}");
    // A tracer counts in the agent's map, and shows the calls since its start.
    let mut tracer = start(&world.sandbox, &["--summary"]);
    call();
    tracer.wait_log("default/web   1             0         0", SYNC);
    assert!(tracer.stop().success());
    assert_eq!(counted(&world.sandbox), (Some(3), Some(0), Some(0)));
    world.agent.stop();
    call();
    world.agent = start_agent_with(&world.sandbox, args);
    call();
    assert_eq!(counted(&world.sandbox), (Some(5), Some(0), Some(0)));
    world.set(without_endpoints(), |rows| rows.iter().all(|row| row["action"] == "refuse"));
    UdpSocket::bind("0.0.0.0:0").unwrap().connect(Form::V4.web()).unwrap_err();
    assert_eq!(counted(&world.sandbox), (Some(5), Some(1), Some(0)));
    world.set(vec![], <[Value]>::is_empty);
    world.set(cproxy_tests::world::web_with([1]), |rows| !rows.is_empty());
    assert_eq!(counted(&world.sandbox), (Some(0), Some(0), Some(0)), "another Service at the same address");
    world.agent.stop();
    world.agent = start_agent(&world.sandbox);
    assert_eq!(counted(&world.sandbox), (None, None, None));
    assert_eq!(ServiceCounters::read(&PinDir::new(&world.sandbox.pin_dir())).unwrap(), None);
    assert_eq!(counter(&world.sandbox, "hook_repairs"), 0);
}

#[test]
fn the_agents_record_is_of_its_own_programs_while_a_tracer_is_at_work() {
    let world = World::start([1]);
    let pins = PinDir::new(&world.sandbox.pin_dir());
    let mut tracer = start(&world.sandbox, &[]);
    let recorded = Attachments::record(&pins, world.sandbox.cgroup()).unwrap();
    assert_eq!(recorded.differences(), []);
    assert!(tracer.stop().success());
    assert_eq!(recorded.differences(), []);
}

#[test]
fn a_program_that_cannot_be_put_back_is_reported_and_the_agent_mends_it() {
    let world = World::start([1]);
    let mut tracer = start(&world.sandbox, &[]);
    let tracing = program_ids(&world.sandbox);
    std::fs::remove_file(trace_dir(&world.sandbox).join("connect4_replaced")).unwrap();
    assert_eq!(tracer.stop().code(), Some(1));
    assert!(tracer.log().contains("connect4: the agent's program could not be put back"), "{}", tracer.log());
    let now = program_ids(&world.sandbox);
    assert_eq!(now.iter().zip(&tracing).filter(|(now, before)| now == before).count(), 1, "the others are put back");
    drop(cproxy(&world.sandbox, &["check", "-o", "json"]));
    assert!(program_ids(&world.sandbox).iter().zip(&tracing).all(|(now, before)| now != before));
    assert!(!trace_dir(&world.sandbox).exists());
    echo::ask_name(Form::V4.web()).unwrap();
}

/// Calls without a pause until this returns.
fn flood<R>(during: impl FnOnce() -> R) -> R {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                UdpSocket::bind("0.0.0.0:0").unwrap().connect(Form::V4.web()).unwrap();
            }
        });
        let result = during();
        is_over.store(true, Ordering::Relaxed);
        result
    })
}

#[test]
fn a_tracer_obeys_signals_in_a_flood() {
    let world = World::start([1]);
    let mut tracer = start(&world.sandbox, &["-o", "json"]);
    flood(|| {
        wait_event(&mut tracer, &[("verdict", "forwarded".into()), ("protocol", "UDP".into())]);
        let start = Instant::now();
        tracer.signal(Signal::INT);
        assert!(tracer.wait(SYNC).unwrap().success());
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    });
    assert!(!trace_dir(&world.sandbox).exists());
}

#[test]
fn a_tracer_ends_although_its_reader_does_not_read() {
    let world = World::start([1]);
    let before = program_ids(&world.sandbox);
    let mut command = command(&world.sandbox, &["-o", "json"]);
    world.sandbox.place(command.stdin(Stdio::null()).stdout(Stdio::piped()), Placement::Hooked);
    let mut tracer = command.spawn().unwrap();
    let is_switched = |now: &[u32]| before.iter().zip(now).all(|(before, now)| before != now);
    eventually(SWITCH, "the tracing set is behind all links", || {
        let now = program_ids(&world.sandbox);
        if is_switched(&now) { Ok(()) } else { Err(format!("{now:?}")) }
    });
    flood(|| thread::sleep(Duration::from_secs(1)));
    let pid = rustix::process::Pid::from_child(&tracer);
    rustix::process::kill_process(pid, Signal::INT).unwrap();
    let status = eventually(SWITCH, "the tracer ends", || tracer.try_wait().unwrap().ok_or("it runs"));
    assert!(status.success());
    assert_eq!(program_ids(&world.sandbox), before);
}

#[test]
fn a_flood_loses_events_and_says_so_but_no_call() {
    const CALLS: usize = 5_000;
    let world = World::start([1]);
    let mut tracer = start(&world.sandbox, &["-o", "json", "--protocol", "udp", "--pid", &id().to_string()]);
    // A tracer that reads nothing: the ring buffer has no room for all.
    tracer.signal(Signal::STOP);
    for _ in 0..CALLS {
        UdpSocket::bind("0.0.0.0:0").unwrap().connect(Form::V4.web()).unwrap();
    }
    tracer.signal(Signal::CONT);
    tracer.wait_log("events were lost", SYNC);
    assert!(tracer.stop().success());
    let lost: usize = tracer
        .log()
        .lines()
        .filter_map(|line| line.strip_prefix("cproxy: ")?.split_once(" events were lost")?.0.parse::<usize>().ok())
        .sum();
    assert_eq!(events(&tracer).len() + lost, CALLS);
}
