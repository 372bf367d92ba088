//! Start order of programs that need Services: `cproxy wait`, notification of the init system, and settings of the
//! machine.

use std::{
    os::unix::net::UnixDatagram,
    path::Path,
    time::{Duration, Instant},
};

use cproxy_tests::{
    manifest::{self, Endpoint, Service, Slice},
    process::{Agent, Daemon, Signal, cproxy, cproxy_command, cproxy_with_privileges, cproxy_with_variable},
    sandbox::{Placement, Sandbox},
    world::{SYNC, start_agent},
};

const VIP: &str = "10.96.0.10";
const POD: &str = "10.244.0.1";

fn write_service(sandbox: &Sandbox, endpoint: Endpoint) {
    let service = Service::new("web").cluster_ips([VIP]).tcp("http", 80, 8080);
    let slice = Slice::v4("web").tcp("http", 8080).endpoint(endpoint);
    manifest::write(&sandbox.manifest_dir(), "web.json", [service.into(), slice.into()]);
}

fn wait(sandbox: &Sandbox, flags: &[&str]) -> (i32, String) {
    let output = cproxy(sandbox, &[&["wait"], flags].concat());
    assert_eq!(output.stdout, "");
    (output.code, output.stderr)
}

/// Checks that the command succeeds at once and prints the agent's cgroup, which is not the machine's root.
#[track_caller]
fn assert_ready(sandbox: &Sandbox, flags: &[&str]) {
    let (code, message) = wait(sandbox, flags);
    let place =
        format!("cproxy: ready, attached to {}, serving only processes in and below ", sandbox.cgroup().display());
    assert!(code == 0 && message.starts_with(&place) && message.lines().count() == 1, "{code}: {message}");
}

/// A `cproxy wait` in the background.
fn waiter(sandbox: &Sandbox, flags: &[&str]) -> Daemon {
    let command = cproxy_command(sandbox, &[&["wait"], flags].concat());
    Daemon::spawn(sandbox, "wait", Placement::Hooked, command)
}

#[test]
fn wait_ends_when_the_table_is_complete() {
    let sandbox = Sandbox::for_test();
    write_service(&sandbox, Endpoint::not_ready(POD));
    let (code, message) = wait(&sandbox, &["--timeout", "50ms"]);
    assert_eq!(code, 1);
    assert!(
        message.starts_with("cproxy: not ready after 50ms: no agent runs with the run directory ")
            && message.lines().count() == 1,
        "{message}"
    );

    let mut early = waiter(&sandbox, &["--timeout", "20s"]);
    let mut served = waiter(&sandbox, &["--timeout", "20s", "--for", "default/web, default/web"]);
    assert_eq!(early.exit_status(), None);
    let mut agent = start_agent(&sandbox);
    assert!(early.wait(SYNC).unwrap().success(), "{}", early.log());

    assert_eq!(
        wait(&sandbox, &["--for", "default/web", "--timeout", "50ms"]),
        (
            1,
            "cproxy: not ready after 50ms: Service default/web has no eligible endpoint: `cproxy explain \
             default/web` says why\n"
                .to_owned()
        )
    );
    assert_eq!(served.exit_status(), None);
    write_service(&sandbox, Endpoint::ready(POD));
    assert!(served.wait(SYNC).unwrap().success(), "{}", served.log());
    assert_ready(&sandbox, &["--timeout", "0"]);
    agent.stop();
    assert_eq!(wait(&sandbox, &["--timeout", "0"]).0, 1, "an agent that was stopped is not ready");
}

#[test]
fn the_policy_decides_how_a_timeout_ends() {
    let sandbox = Sandbox::for_test();
    let (code, message) = wait(&sandbox, &["--timeout", "1ms", "--on-timeout", "start"]);
    assert_eq!(code, 0);
    assert!(message.ends_with("; going on without it (--on-timeout start)\n"), "{message}");
    for (flags, named) in [
        (["--timeout", "soon"], "30s, 500ms or 2m"),
        (["--for", "web"], "default/web"),
        (["--on-timeout", "hope"], "fail, start"),
    ] {
        let (code, message) = wait(&sandbox, &flags);
        assert_eq!(code, 2, "{message}");
        assert!(message.contains(named) && message.lines().count() == 1, "{message}");
    }
}

#[test]
fn the_policy_decides_about_wrong_settings_of_the_machine() {
    let sandbox = Sandbox::for_test();
    let file = sandbox.dir().join("cproxy.conf");
    let wait = |text: &str| {
        std::fs::write(&file, text).unwrap();
        let output = cproxy_with_variable(&sandbox, &["wait"], ("CPROXY_CONFIG", file.to_str().unwrap()));
        (output.code, output.stderr)
    };
    for (setting, wrong) in [
        ("timeout = soon\n", "invalid value 'soon' for '--timeout <TIME>': "),
        ("timeout = 1ms\nfor = default/web,web\n", "invalid value 'web' for '--for <NAMESPACE/NAME>': "),
    ] {
        let (code, message) = wait(setting);
        assert_eq!((code, message.lines().count()), (2, 1), "{message}");
        assert!(message.contains(wrong) && message.contains("cproxy wait --help"), "{message}");
    }
    let (code, message) = wait("timeout = 1ms\nfor = web\non-timeout = start\n");
    assert_eq!((code, message.lines().count()), (0, 2), "{message}");
    assert!(
        message.contains("for '--for <NAMESPACE/NAME>': expected a name like default/web; waiting without it"),
        "{message}"
    );
    assert!(message.contains("not ready after 1ms: "), "{message}");

    // An invalid time has no effect: the command still waits until all is ready.
    write_service(&sandbox, Endpoint::ready(POD));
    let mut agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir()).spawn();
    let (code, message) = wait("timeout = soon\non-timeout = start\n");
    assert_eq!((code, message.lines().count()), (0, 2), "{message}");
    assert!(message.contains("; waiting without it (--on-timeout start)"), "{message}");
    assert!(agent.is_ready());
    agent.stop();
}

#[test]
fn wait_beside_a_stopped_agent_ends_at_its_timeout() {
    let sandbox = Sandbox::for_test();
    write_service(&sandbox, Endpoint::not_ready(POD));
    let mut agent = start_agent(&sandbox);
    agent.signal(Signal::STOP);
    for timeout in ["0", "2s"] {
        let start = Instant::now();
        let (code, message) = wait(&sandbox, &["--for", "default/web", "--timeout", timeout]);
        let over = start.elapsed().saturating_sub(Duration::from_secs(2));
        assert_eq!(code, 1, "{message}");
        let pid = agent.pid();
        assert!(
            message.contains(&format!(": the agent, process {pid}, is stopped: `kill -CONT {pid}` lets it go on")),
            "{message}"
        );
        assert!(over < Duration::from_millis(1500), "{timeout}: {over:?} too long");
    }
    // None waits for an answer. A report has the second of `status` in it.
    let report = sandbox.dir().join("report.tar");
    for (arguments, most) in [
        (&["get", "services"][..], 1000),
        (&["explain", "10.96.0.10:80"], 1000),
        (&["check"], 2000),
        (&["bugreport", "-o", report.to_str().unwrap()], 5000),
    ] {
        let timed = |_| {
            let start = Instant::now();
            let output = cproxy(&sandbox, arguments);
            (start.elapsed(), output)
        };
        // A busy machine may slow one of them; one that waits does so each time.
        let runs: Vec<_> = (0..3).map(timed).collect();
        assert!(runs.iter().any(|(time, _)| *time < Duration::from_millis(most)), "{arguments:?}: {runs:?}");
    }
    agent.signal(Signal::CONT);
    agent.stop();
}

/// Names of the files in a directory that may be missing.
fn names_in(dir: &Path) -> Vec<String> {
    let files = std::fs::read_dir(dir).into_iter().flatten().flatten();
    // The file of a lock stays.
    files.map(|file| file.file_name().display().to_string()).filter(|name| name != "lock").collect()
}

#[test]
fn a_machine_where_cproxy_is_disabled_is_as_one_without() {
    let sandbox = Sandbox::for_test();
    write_service(&sandbox, Endpoint::ready(POD));
    start_agent(&sandbox).stop();
    assert!(sandbox.pin_dir().exists());
    let file = sandbox.dir().join("cproxy.conf");
    std::fs::write(&file, "enabled = false\nmanifests = /nowhere\n").unwrap();
    let variable = ("CPROXY_CONFIG", file.to_str().unwrap());
    let disabled = |arguments: &[&str]| cproxy_with_variable(&sandbox, arguments, variable);
    let reason = format!("cproxy is disabled on this machine (enabled = false, {}, line 1)", file.display());
    let run = disabled(&["run"]);
    assert_eq!(run.code, 3, "{run:?}");
    assert!(run.stderr.contains(&format!("{reason}: detached and removed ")), "{run:?}");
    let left = || [sandbox.pin_dir(), sandbox.run_dir()].map(|dir| names_in(&dir)).concat();
    assert_eq!(left(), [""; 0], "{run:?}");
    let again = disabled(&["run"]);
    assert_eq!((again.code, again.stderr.trim_end().ends_with(&reason)), (3, true), "{again:?}");
    assert_eq!(left(), [""; 0], "{again:?}");

    let start = Instant::now();
    let wait = disabled(&["wait", "--for", "default/web", "--timeout", "20s"]);
    assert_eq!((wait.code, wait.stderr), (0, format!("cproxy: {reason}; not waiting\n")));
    assert!(start.elapsed() < SYNC);
    let check = disabled(&["check"]);
    assert!(check.stdout.starts_with("degraded") && check.stdout.contains(&reason), "{check:?}");
    let status = disabled(&["status"]);
    assert!(status.code == 1 && status.stdout.contains(&format!("agent       {reason}\n")), "{status:?}");
    let explain = disabled(&["explain", "10.96.0.10:80"]);
    assert_eq!(explain.code, 4, "{explain:?}");
    assert!(explain.stdout.lines().next().is_some_and(|line| line.contains(&reason)), "{explain:?}");
    // A nearer place switches it on again.
    let enabled = disabled(&["wait", "--enabled", "true", "--timeout", "0"]);
    assert_eq!(enabled.code, 1, "{enabled:?}");
    let wrong = disabled(&["run", "--enabled", "perhaps"]);
    assert_eq!(wrong.code, 2, "{wrong:?}");
    assert!(wrong.stderr.contains("--enabled") && wrong.stderr.contains("true, false"), "{wrong:?}");
}

#[test]
fn wait_ends_at_once_when_the_agent_cannot_run_here() {
    let sandbox = Sandbox::for_test();
    write_service(&sandbox, Endpoint::ready(POD));
    let mut agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir()).cgroup("/proc").spawn();
    assert!(!agent.wait(SYNC).unwrap().success());
    let start = Instant::now();
    let (code, message) = wait(&sandbox, &["--timeout", "20s"]);
    assert!(start.elapsed() < SYNC);
    assert_eq!(
        (code, message.as_str()),
        (
            1,
            "cproxy: cannot run here: --cgroup /proc: not a cgroup2 directory; \
             pass a directory of a cgroup2 mount (mount -t cgroup2 none DIR)\n"
        )
    );

    let mut agent = Agent::new(&sandbox).manifests("/nowhere").spawn();
    assert!(!agent.wait(SYNC).unwrap().success());
    let (code, message) = wait(&sandbox, &["--timeout", "50ms"]);
    assert_eq!(code, 1);
    assert!(message.contains("the agent has ended: --manifests /nowhere: No such file"), "{message}");

    let mut agent = Agent::new(&sandbox).arg("--apiserver").arg("nonsense").spawn();
    assert_eq!(agent.wait(SYNC).unwrap().code(), Some(2));
    let (code, message) = wait(&sandbox, &["--timeout", "50ms"]);
    assert_eq!(code, 1);
    assert!(message.contains("the agent has ended: invalid value 'nonsense' for '--apiserver"), "{message}");

    let _agent = start_agent(&sandbox);
    // The previous agent's state is gone.
    assert_ready(&sandbox, &[]);
}

#[test]
fn wait_ends_at_once_for_a_user_whom_the_agent_does_not_answer() {
    let sandbox = Sandbox::for_test();
    write_service(&sandbox, Endpoint::ready(POD));
    let _agent = start_agent(&sandbox);
    let start = Instant::now();
    let nobody = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let ready = cproxy_with_privileges(&sandbox, &nobody, &["wait", "--timeout", "20s"]);
    assert_eq!(ready.code, 0, "{ready:?}");
    let wait = cproxy_with_privileges(&sandbox, &nobody, &["wait", "--for", "default/web", "--timeout", "20s"]);
    assert!(start.elapsed() < SYNC);
    let says = wait.stderr.starts_with("cproxy: only root may ask the agent") && wait.stderr.ends_with("as root\n");
    assert!(wait.code == 1 && says, "{wait:?}");
}

#[test]
fn the_init_system_is_notified_when_the_agent_is_ready() {
    let sandbox = Sandbox::for_test();
    write_service(&sandbox, Endpoint::ready(POD));
    let path = sandbox.dir().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(SYNC)).unwrap();
    let mut agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir()).env("NOTIFY_SOCKET", &path).spawn();
    let mut message = [0; 64];
    let length = socket.recv(&mut message).unwrap();
    assert_eq!(&message[..length], b"READY=1");
    assert!(agent.is_ready(), "and not before");
    agent.stop();
}

#[test]
fn settings_of_a_file_give_way_to_nearer_sources() {
    let sandbox = Sandbox::for_test();
    write_service(&sandbox, Endpoint::ready(POD));
    let file = sandbox.dir().join("cproxy.conf");
    let start = |text: &str| {
        std::fs::write(&file, text).unwrap();
        Agent::new(&sandbox).env("CPROXY_CONFIG", &file)
    };
    let manifests =
        format!("# where Services are from\nmanifests = {}\n\nlog-level = warn\n", sandbox.manifest_dir().display());
    let mut agent = start(&manifests).start();
    assert_eq!(agent.log(), "", "the level is the file's");
    agent.stop();
    let mut agent = start(&manifests).arg("--log-level").arg("info").start();
    assert_ne!(agent.log(), "", "the level is the flag's");
    agent.stop();
    start("apiserver = https://10.0.0.1\n").manifests(sandbox.manifest_dir()).start().stop();

    for (text, message) in [
        (
            "log-level = warn\nlog-lvl = warn\n",
            ", line 2: \"log-lvl\" is not a setting; settings are named like the flags: apiserver, ",
        ),
        ("apiserver\n", ", line 1: \"apiserver\" has no value; "),
        ("log-level = loud\n", "invalid value 'loud' for '--log-level <LEVEL>'"),
    ] {
        let mut agent = start(text).manifests(sandbox.manifest_dir()).spawn();
        assert_eq!(agent.wait(SYNC).unwrap().code(), Some(2));
        assert!(agent.log().contains(message) && agent.log().lines().count() == 1, "{}", agent.log());
    }
}

#[test]
fn an_agent_that_is_stopped_the_moment_it_is_ready_ends_in_order() {
    let sandbox = Sandbox::for_test();
    write_service(&sandbox, Endpoint::ready(POD));
    let path = sandbox.dir().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(SYNC)).unwrap();
    for _ in 0..20 {
        let mut agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir()).env("NOTIFY_SOCKET", &path).spawn();
        socket.recv(&mut [0; 64]).unwrap();
        let status = agent.stop();
        assert!(status.success(), "{status}: {}", agent.tail());
    }
}
