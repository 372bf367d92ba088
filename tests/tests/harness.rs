//! The harness itself: it leaves no remains, and the things it starts are real.

#![expect(clippy::unwrap_used, reason = "a test that finds something else than it expects has failed")]

use std::{
    io::{BufRead as _, BufReader},
    net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4},
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use cproxy_tests::{
    control_plane::{ControlPlane, NODE},
    echo, http,
    manifest::{Endpoint, Service, Slice, write, write_text},
    memory::MemoryLimit,
    process::{Agent, Daemon, RunningAgent, eventually, run},
    sandbox::{self, Netns, Placement, Sandbox, TEST_PREFIX},
};

/// Limit on every wait, longer than any takes.
const PATIENCE: Duration = Duration::from_secs(10);

const POD: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 244, 0, 5));
const VIP: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 96, 0, 10), 80);

/// Traces of a sandbox, which disappear with it.
struct Traces {
    cgroup: PathBuf,
    directory: PathBuf,
    netns: PathBuf,
}

impl Traces {
    fn of(sandbox: &Sandbox) -> Self {
        let traces =
            Self { cgroup: sandbox.cgroup_parent().into(), directory: sandbox.dir().into(), netns: thread_namespace() };
        assert!(sandbox.cgroup().join("cgroup.procs").exists());
        let own = sandbox.cgroup().strip_prefix(traces.cgroup.parent().unwrap()).unwrap();
        assert!(own_cgroup().ends_with(own), "the process is in {:?}", own_cgroup());
        assert!(is_mounted_below(&traces.directory));
        traces
    }

    fn assert_gone(&self, before: &(PathBuf, PathBuf)) {
        assert!(!self.cgroup.exists(), "{:?} is still there", self.cgroup);
        assert!(!self.directory.exists(), "{:?} is still there", self.directory);
        assert!(!is_mounted_below(&self.directory));
        assert_ne!(self.netns, thread_namespace());
        assert_eq!(before, &(own_cgroup(), thread_namespace()));
    }
}

fn thread_namespace() -> PathBuf {
    std::fs::read_link("/proc/thread-self/ns/net").unwrap()
}

fn own_cgroup() -> PathBuf {
    let text = std::fs::read_to_string("/proc/self/cgroup").unwrap();
    text.lines().find_map(|line| line.strip_prefix("0::")).unwrap().into()
}

fn is_mounted_below(directory: &Path) -> bool {
    cproxy_mountinfo::list().unwrap().iter().any(|mount| mount.point.starts_with(directory))
}

fn sleeper() -> Command {
    let mut command = Command::new("sleep");
    command.arg("1000").stdout(Stdio::null()).stderr(Stdio::null());
    command
}

fn is_running(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

#[test]
fn a_sandbox_leaves_nothing_behind() {
    let before = (own_cgroup(), thread_namespace());
    let sandbox = Sandbox::for_test();
    let traces = Traces::of(&sandbox);
    std::fs::write(sandbox.pin_dir().with_file_name("unused"), "").unwrap_err();
    std::fs::create_dir(sandbox.pin_dir()).unwrap();
    std::fs::create_dir(sandbox.cgroup().join("below")).unwrap();
    let mut forgotten = sandbox.child_in(sleeper()).spawn().unwrap();
    drop(sandbox);
    traces.assert_gone(&before);
    forgotten.wait().unwrap();
}

/// The kernel's list of mounts writes blanks as `\040`.
#[test]
fn a_sandbox_with_a_blank_in_its_path_leaves_nothing_behind() {
    let before = (own_cgroup(), thread_namespace());
    let sandbox = Sandbox::new("cproxy-test blank");
    assert!(sandbox.dir().to_str().unwrap().contains(' '));
    let traces = Traces::of(&sandbox);
    drop(sandbox);
    traces.assert_gone(&before);
}

#[test]
fn a_sandbox_leaves_nothing_behind_after_a_panic() {
    let before = (own_cgroup(), thread_namespace());
    let mut seen = None;
    // An open file keeps the bpffs busy while it is unmounted.
    let mut held = None;
    let result = catch_unwind(AssertUnwindSafe(|| {
        let sandbox = Sandbox::for_test();
        let hooked = Daemon::spawn(&sandbox, "hooked", Placement::Hooked, sleeper());
        let unhooked = Daemon::spawn(&sandbox, "unhooked", Placement::Unhooked, sleeper());
        held = Some(std::fs::File::open(sandbox.dir().join("bpf")).unwrap());
        seen = Some((Traces::of(&sandbox), [hooked.pid(), unhooked.pid()]));
        panic!("on purpose");
    }));
    assert!(result.is_err() && held.is_some());
    let (traces, pids) = seen.expect("the closure came to its end");
    traces.assert_gone(&before);
    assert!(!pids.into_iter().any(is_running));
}

#[test]
fn a_memory_limit_holds_and_leaves_nothing_behind() {
    let sandbox = Sandbox::for_test();
    let limit = MemoryLimit::new(&sandbox, 8 << 20, Path::new("/bin/sh"));
    let run_limited = |script: &str| {
        let mut command = Command::new(limit.launcher());
        command.args(["-c", script]);
        run(&sandbox, Placement::Unhooked, command, "", PATIENCE)
    };
    assert_eq!(run_limited("head -c 100000 /dev/zero | tail -c 1 | wc -c").success().stdout.trim(), "1");
    assert_eq!(limit.killed(), 0);
    // tail has to keep all of its input. The kernel may kill another process, too, before tail's memory is free.
    run_limited("head -c 64000000 /dev/zero | tail -c 64000000 | wc -c");
    assert!(limit.killed() >= 1);
    assert!((1 << 20..=8 << 20).contains(&limit.peak_bytes()), "{}", limit.peak_bytes());
    let path = limit.path().to_owned();
    assert!(path.exists());
    drop(limit);
    assert!(!path.exists());
}

/// Variable that marks the process of the test below that is to be killed.
const SACRIFICED: &str = "CPROXY_TEST_SACRIFICED";
/// Beginning of the lines in which that process names its things.
const OWNS: &str = "owns: ";

/// An agent and the pod that it serves at [`VIP`].
fn served_pod(sandbox: &Sandbox, name: &str) -> (RunningAgent, echo::Server) {
    sandbox.add_address(POD);
    let pod = echo::tcp(sandbox, SocketAddr::new(POD, 8080), name);
    let service = Service::new("web").cluster_ips([VIP.ip().to_string()]).tcp("http", VIP.port(), 8080);
    let slice = Slice::v4("web").tcp("http", 8080).ready([POD]);
    write(&sandbox.manifest_dir(), "web.json", [service.into(), slice.into()]);
    let agent = Agent::new(sandbox).manifests(sandbox.manifest_dir()).start();
    (agent, pod)
}

fn a_test_that_is_killed() -> ! {
    let sandbox = Sandbox::for_test();
    let (agent, _pod) = served_pod(&sandbox, "of the killed");
    let mut stranger = sandbox.child_in(sleeper()).spawn().unwrap();
    assert_eq!(echo::ask_tcp(VIP).unwrap().name, "of the killed");
    for path in [sandbox.cgroup_parent(), sandbox.dir()] {
        println!("{OWNS}{}", path.display());
    }
    for pid in [agent.pid(), stranger.id()] {
        println!("{OWNS}{pid}");
    }
    // Both end long after this process.
    stranger.wait().unwrap();
    unreachable!("nobody has killed this test");
}

#[test]
fn a_killed_test_leaves_nothing_and_its_neighbour_does_not_notice() {
    const THIS: &str = "a_killed_test_leaves_nothing_and_its_neighbour_does_not_notice";
    if std::env::var_os(SACRIFICED).is_some() {
        a_test_that_is_killed();
    }
    let sandbox = Sandbox::for_test();
    let (mut agent, pod) = served_pod(&sandbox, "of the neighbour");
    echo::while_a_client_connects(VIP, "of the neighbour", || {
        let mut other = Command::new(std::env::current_exe().unwrap());
        other.args(["--exact", THIS, "--no-capture", "--test-threads=1"]).env(SACRIFICED, "1");
        let other = sandbox.place(&mut other, Placement::Unhooked);
        let mut other = other.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(other.stdout.take().unwrap()).lines().map(Result::unwrap);
        let owned = lines.filter_map(|line| Some(line.split_once(OWNS)?.1.to_owned())).take(4).collect::<Vec<_>>();
        other.kill().unwrap();
        other.wait().unwrap();
        let [cgroup, directory, agent, stranger] = <[String; 4]>::try_from(owned).unwrap();
        let exist = || [&cgroup, &directory].map(|path| Path::new(path).exists());
        assert_eq!(exist(), [true, true]);
        // As the next sandbox does. Another test may be at it already, and is then left to it.
        eventually(PATIENCE, "the remains are removed", || {
            sandbox::sweep(TEST_PREFIX);
            if exist() == [false, false] { Ok(()) } else { Err(format!("{:?}", exist())) }
        });
        assert_eq!([agent, stranger].map(|pid| is_running(pid.parse().unwrap())), [false, false]);
    });
    // The first connection, the one that is kept, and those of the client.
    assert!(pod.served() > 2);
    assert_eq!(agent.exit_status(), None);
}

#[test]
fn children_are_where_they_were_put() {
    let sandbox = Sandbox::for_test();
    let cgroup_of = |placement| {
        let mut command = Command::new("sh");
        command.args(["-c", "cat >&2; grep ^0:: /proc/self/cgroup; readlink /proc/self/ns/net; exit 3"]);
        // The thread is outside the sandbox's network namespace.
        let output = sandbox.outside().run(|| run(&sandbox, placement, command, "input", PATIENCE));
        assert_eq!((output.code, output.stderr.as_str()), (3, "input"));
        assert_eq!(output.stdout.lines().nth(1), thread_namespace().to_str());
        output.stdout.lines().next().unwrap().to_owned()
    };
    assert_eq!(cgroup_of(Placement::Hooked), format!("0::{}", own_cgroup().display()));
    assert_ne!(cgroup_of(Placement::Unhooked), cgroup_of(Placement::Hooked));
}

/// A parent without cgroups of neighbours: agents watch the parent of theirs.
#[test]
fn the_cgroups_of_a_sandbox_are_in_one_of_its_own() {
    let sandbox = Sandbox::for_test();
    let parent = sandbox.cgroup_parent();
    assert_eq!([sandbox.cgroup(), sandbox.cgroup_beside()].map(Path::parent), [Some(parent); 2]);
    assert_eq!(std::fs::read_to_string(parent.join("cgroup.procs")).unwrap(), "");
}

#[test]
fn the_log_and_the_end_of_a_daemon_are_observed() {
    let sandbox = Sandbox::for_test();
    let mut command = Command::new("sh");
    command.args(["-c", "trap 'echo bye; exit 7' TERM; echo hello; while :; do sleep 0.01; done"]);
    let mut daemon = Daemon::spawn(&sandbox, "talker", Placement::Hooked, command);
    assert_eq!(daemon.wait_log("hell", PATIENCE), "hello");
    assert_eq!(daemon.wait(Duration::from_millis(1)), None);
    assert_eq!(daemon.stop().code(), Some(7));
    assert_eq!(daemon.log(), "hello\nbye\n");
    let asked = catch_unwind(AssertUnwindSafe(|| daemon.wait_log("never", PATIENCE)));
    assert!(asked.is_err(), "an ended process writes no more");
}

#[test]
fn an_agent_gets_the_paths_of_its_sandbox() {
    use std::os::unix::fs::PermissionsExt;
    let sandbox = Sandbox::for_test();
    let script = "#!/bin/sh\necho \"$@\"\ntest \"$8\" = --fail && exit 9\n: >\"$7/ready\"\nexec sleep 1000\n";
    let stub = write_text(sandbox.dir(), "stub", script);
    std::fs::set_permissions(&stub, PermissionsExt::from_mode(0o755)).unwrap();

    let mut agent = Agent::new(&sandbox).binary(&stub).manifests("m").start();
    let [cgroup, pins, run] = [sandbox.cgroup().to_owned(), sandbox.pin_dir(), sandbox.run_dir()];
    let [cgroup, pins, run] = [cgroup.display(), pins.display(), run.display()];
    let args = format!("run --cgroup {cgroup} --pin-dir {pins} --run-dir {run} --manifests m\n");
    assert_eq!(agent.log(), args);
    agent.stop();

    let started = Instant::now();
    let mut agent = Agent::new(&sandbox).binary(&stub).arg("--fail").spawn();
    let waited = catch_unwind(AssertUnwindSafe(|| agent.wait_ready(PATIENCE)));
    assert!(waited.is_err() && started.elapsed() < PATIENCE, "an agent that has ended is never ready");
}

#[test]
fn servers_are_reached_inside_the_sandbox_and_only_there() {
    let sandbox = Sandbox::for_test();
    let addresses = [POD, "2001:db8::5".parse().unwrap()];
    sandbox.add_addresses(addresses);
    for address in addresses {
        let [tcp, udp, web] = [7000, 7000, 80].map(|port| SocketAddr::new(address, port));
        let servers =
            [echo::tcp(&sandbox, tcp, "t1"), echo::udp(&sandbox, udp, "u1"), http::serve(&sandbox, web, "w1")];
        sandbox.outside().run(|| {
            // Any answer there comes from another server.
            drop(std::net::TcpStream::connect_timeout(&tcp, Duration::from_millis(50)));
        });
        let (greeting, stream) = echo::connect_tcp(tcp).unwrap();
        assert_eq!((greeting.name.as_str(), greeting.client), ("t1", stream.local_addr().unwrap()));
        echo::ping_tcp(&stream, "still there?").unwrap();
        assert_eq!(echo::ask_udp(udp).unwrap(), ("u1".to_owned(), udp));
        assert_eq!(http::get(web, "/any").unwrap(), "w1\n");
        assert_eq!(servers.each_ref().map(echo::Server::served), [1, 1, 1]);
        drop(servers);
        echo::ask_tcp(tcp).unwrap_err();
        echo::ping_tcp(&stream, "still there?").unwrap_err();
    }
}

#[test]
fn a_namespace_can_be_entered_through_its_path() {
    let sandbox = Sandbox::for_test();
    let outside = Netns::current();
    assert!(outside.path().exists());
    let mut nsenter = Command::new("nsenter");
    nsenter.arg(format!("--net={}", sandbox.netns().path().display())).args(["readlink", "/proc/self/ns/net"]);
    let output = nsenter.output().expect("nsenter belongs to util-linux");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), thread_namespace().to_str().unwrap());
}

#[test]
fn manifests_appear_in_one_step() {
    let sandbox = Sandbox::for_test();
    let objects = [
        Service::new("web").cluster_ips(["10.96.0.10"]).tcp("http", 80, 8080).into(),
        Slice::v4("web").tcp("http", 8080).ready([POD]).endpoint(Endpoint::terminating(POD, true).node("n")).into(),
    ];
    let path = write(&sandbox.manifest_dir(), "web.json", objects);
    let read = serde_json::from_slice::<serde_json::Value>(&std::fs::read(path).unwrap()).unwrap();
    assert_eq!(read["items"][0]["spec"]["clusterIPs"], serde_json::json!(["10.96.0.10"]));
    assert_eq!(read["items"][1]["endpoints"][1]["conditions"]["terminating"], true);
    assert_eq!(std::fs::read_dir(sandbox.manifest_dir()).unwrap().count(), 1);
}

#[test]
fn the_control_plane_is_real() {
    let sandbox = Sandbox::for_test();
    let started = Instant::now();
    let mut control_plane = ControlPlane::start(&sandbox);
    println!("the control plane took {:?} to start", started.elapsed());
    assert_eq!(std::fs::read_to_string(sandbox.cgroup().join("cgroup.procs")).unwrap().lines().count(), 1);

    let service = Service::new("web").dual_stack().tcp("http", 80, 8080).client_ip_affinity(60);
    let slice = Slice::v4("web").tcp("http", 8080).ready([POD]);
    control_plane.apply([service.into(), slice.into()]);
    let addresses = control_plane.kubectl(&["get", "service", "web", "-o", "jsonpath={.spec.clusterIPs}"], "");
    assert!(addresses.starts_with("[\"10.96.") && addresses.contains("\"fd00:10:96::"), "{addresses}");

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let version = runtime.block_on(async { control_plane.client().await.apiserver_version().await.unwrap() });
    assert_eq!((version.major.as_str(), version.minor.as_str()), ("1", "36"));

    assert_agent_rights(&control_plane);

    let started = Instant::now();
    control_plane.stop_api_server();
    println!("the API server took {:?} to stop", started.elapsed());
    assert_ne!(control_plane.try_kubectl("admin", &["get", "services"], "").code, 0);
    let started = Instant::now();
    control_plane.start_api_server();
    println!("the API server took {:?} to start again", started.elapsed());
    eventually(PATIENCE, "the Service is still there", || {
        let output = control_plane.try_kubectl("cproxy", &["get", "services"], "");
        if output.stdout.contains("web") { Ok(()) } else { Err(output.stderr) }
    });
}

/// Checks that the agent may list and watch two kinds of objects and one Node, and has no right beyond those of every
/// user.
fn assert_agent_rights(control_plane: &ControlPlane<'_>) {
    let rights = |user| {
        let output = control_plane.try_kubectl(user, &["auth", "can-i", "--list", "--no-headers"], "").success();
        output.stdout.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect::<Vec<_>>()
    };
    let everybody = rights("nobody");
    let mut agent = rights("cproxy");
    agent.retain(|right| !everybody.contains(right));
    agent.sort();
    let node = format!("nodes [] [{NODE}] [list watch]");
    assert_eq!(agent, ["endpointslices.discovery.k8s.io [] [] [list watch]", &node, "services [] [] [list watch]"]);
    let refused = control_plane.try_kubectl("nobody", &["get", "services"], "");
    assert!(refused.stderr.contains("Forbidden"), "{}", refused.stderr);
}
