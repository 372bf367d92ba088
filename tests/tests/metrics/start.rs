//! Start and end of the endpoints: addresses of all kinds, those in use, and no endpoint at all.

use std::{
    fs,
    io::ErrorKind,
    net::TcpListener,
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
};

use cproxy_tests::{
    manifest,
    process::{Agent, Signal, cproxy, eventually},
    sandbox::Sandbox,
    world::{SYNC, web_with},
};

use crate::client::{HEALTHZ, METRICS, PATIENCE, agent, get, get_unix, try_get};

fn sandbox() -> Sandbox {
    let sandbox = Sandbox::for_test();
    manifest::write(&sandbox.manifest_dir(), "web.json", web_with([1]));
    sandbox
}

/// Number of threads of a process by their names.
fn threads(pid: u32) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let names = tasks.filter_map(|task| fs::read_to_string(task.unwrap().path().join("comm")).ok());
    names.map(|name| name.trim().to_owned()).collect()
}

#[test]
fn without_an_address_there_is_neither_a_thread_nor_a_socket() {
    let sandbox = sandbox();
    let agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir()).start();
    assert!(!threads(agent.pid()).contains(&"endpoints".to_owned()));
    for address in [METRICS, HEALTHZ] {
        assert_eq!(try_get(address, "/metrics").unwrap_err().kind(), ErrorKind::ConnectionRefused);
    }
}

#[test]
fn endpoints_share_an_address_and_a_unix_socket_is_removed_at_the_end() {
    let sandbox = sandbox();
    let path: PathBuf = sandbox.dir().join("status.sock");
    let address = format!("unix://{}", path.display());
    let start = || {
        let agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir());
        agent.args(["--metrics-bind-address", &address, "--healthz-bind-address", &address]).start()
    };
    let mut agent = start();
    assert!(threads(agent.pid()).contains(&"endpoints".to_owned()));
    for request in ["/metrics", "/healthz", "/livez", "/readyz"] {
        assert_eq!(get_unix(&path, request).code, 200, "{request}");
    }
    // The file of an agent that was killed is replaced.
    agent.kill();
    assert!(path.exists());
    let mut agent = start();
    assert_eq!(get_unix(&path, "/readyz").body, "ok");
    agent.stop();
    assert!(!path.exists());
}

#[test]
fn sockets_that_somebody_removes_are_made_again() {
    let sandbox = sandbox();
    let status = sandbox.dir().join("status.sock");
    let address = format!("unix://{}", status.display());
    let agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir());
    let mut agent = agent.args(["--metrics-bind-address", &address]).start();
    let own = sandbox.run_dir().join("cproxy.sock");
    let again = |path: &Path| {
        let what = format!("{} is made again", path.display());
        eventually(PATIENCE, &what, || UnixStream::connect(path).map(drop));
    };
    for _ in 0..2 {
        fs::remove_file(&status).unwrap();
        again(&status);
        assert_eq!(get_unix(&status, "/metrics").code, 200);
        fs::remove_file(&own).unwrap();
        again(&own);
        cproxy(&sandbox, &["set", "log-level", "info"]).success();
    }
    // Another process's file keeps the agent from its place, and is not removed.
    fs::write(sandbox.dir().join("other"), "another file").unwrap();
    fs::rename(sandbox.dir().join("other"), &own).unwrap();
    agent.wait_log("a file that is no socket is there; trying again", SYNC);
    assert_eq!(fs::read_to_string(&own).unwrap(), "another file");
    fs::remove_file(&own).unwrap();
    again(&own);
    agent.stop();
    assert!(!status.exists() && !own.exists());
}

#[test]
fn a_missing_socket_of_a_running_agent_is_named() {
    let sandbox = sandbox();
    let mut agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir()).start();
    agent.signal(Signal::STOP);
    fs::remove_file(sandbox.run_dir().join("cproxy.sock")).unwrap();
    let output = cproxy(&sandbox, &["set", "log-level", "info"]);
    agent.signal(Signal::CONT);
    assert!(output.stderr.contains("but somebody removed its socket: the agent makes it again"), "{output:?}");
}

#[test]
fn the_log_has_the_port_that_the_kernel_has_chosen() {
    let sandbox = sandbox();
    let agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir());
    let any = "127.0.0.1:0";
    let mut agent = agent.args(["--metrics-bind-address", any, "--healthz-bind-address", any]).spawn();
    let flags = "--metrics-bind-address and --healthz-bind-address: listening on ";
    let line = agent.wait_log(flags, SYNC);
    agent.wait_ready(SYNC);
    let (_, address) = line.split_once(flags).unwrap();
    assert_eq!((get(address, "/metrics").code, get(address, "/livez").code), (200, 200), "{line}");
}

#[test]
fn a_port_that_takes_a_right_which_the_agent_has_given_up_is_named() {
    let sandbox = sandbox();
    let manifests = sandbox.manifest_dir().display().to_string();
    let output = cproxy(&sandbox, &["run", "--manifests", &manifests, "--metrics-bind-address", "127.0.0.1:80"]);
    assert_eq!(output.code, 1, "{output:?}");
    assert!(output.stderr.contains("--metrics-bind-address 127.0.0.1:80: Permission denied"), "{output:?}");
    assert!(output.stderr.contains("; choose a port from 1024"), "{output:?}");
    let output = cproxy(&sandbox, &["run", "--manifests", &manifests, "--metrics-bind-address", "192.0.2.99:8080"]);
    assert_eq!(output.code, 2, "the address is not this machine's: {output:?}");
}

#[test]
fn an_address_in_use_is_named_and_nothing_is_attached() {
    let sandbox = sandbox();
    let _tcp = TcpListener::bind(METRICS).unwrap();
    let socket = sandbox.dir().join("used.sock");
    let _unix = UnixListener::bind(&socket).unwrap();
    let unix = format!("unix://{}", socket.display());
    let manifests = sandbox.manifest_dir().display().to_string();
    for (flag, address) in
        [("--metrics-bind-address", METRICS), ("--healthz-bind-address", METRICS), ("--metrics-bind-address", &unix)]
    {
        let output = cproxy(&sandbox, &["run", "--manifests", &manifests, flag, address]);
        let expected = format!("cproxy: {flag} {address}: Address already in use; choose another address");
        assert_eq!(output.code, 1, "{output:?}");
        assert!(output.stderr.lines().any(|line| line == expected), "{expected:?} is missing in {}", output.stderr);
        let attached = fs::read_dir(sandbox.pin_dir()).into_iter().flatten().flatten();
        let pins = attached.flat_map(|version| fs::read_dir(version.path()).into_iter().flatten()).count();
        assert_eq!(pins, 0, "something is attached");
    }
    for address in ["10249", "localhost:10249", "http://127.0.0.1:10249", "unix://a", "vsock://1"] {
        let output = cproxy(&sandbox, &["run", "--manifests", &manifests, "--metrics-bind-address", address]);
        assert_eq!(output.code, 2, "{output:?}");
        assert!(output.stderr.contains("expected IP:PORT, unix:///PATH or vsock://CID:PORT"), "{output:?}");
    }
}

#[test]
fn another_address_counts_at_the_next_start() {
    let sandbox = sandbox();
    let config = sandbox.dir().join("cproxy.conf");
    fs::write(&config, format!("metrics-bind-address = {METRICS}\n")).unwrap();
    let mut agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir()).env("CPROXY_CONFIG", &config).start();
    fs::write(&config, format!("metrics-bind-address = {HEALTHZ}\n")).unwrap();
    agent.signal(Signal::HUP);
    let line = agent.wait_log("takes effect when the agent starts again", PATIENCE);
    assert!(line.contains(&format!("--metrics-bind-address changed from {METRICS} to {HEALTHZ}")), "{line}");
    assert_eq!(get(METRICS, "/metrics").code, 200);
}

#[test]
fn endpoints_keep_the_rights_of_the_agent() {
    let sandbox = sandbox();
    let agent = agent(&sandbox).start();
    let status = |task: &str| fs::read_to_string(format!("/proc/{}/task/{task}/status", agent.pid())).unwrap();
    let rights = |task: &str| {
        let status = status(task);
        let fields = status
            .lines()
            .filter(|line| ["CapPrm", "CapEff", "NoNewPrivs", "Seccomp:"].iter().any(|f| line.starts_with(f)));
        fields.map(str::to_owned).collect::<Vec<_>>()
    };
    let main = rights(&agent.pid().to_string());
    assert!(main.contains(&"Seccomp:\t2".to_owned()), "{main:?}");
    for task in fs::read_dir(format!("/proc/{}/task", agent.pid())).unwrap() {
        assert_eq!(rights(&task.unwrap().file_name().into_string().unwrap()), main);
    }
    assert_eq!(get(METRICS, "/metrics").code, 200);
    assert!(!agent.log().contains("ENOSYS"));
}
