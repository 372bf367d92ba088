//! `cproxy check`, and kernels without the features that it calls optional.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a failed call or a missing name is a failed test")]

use std::{
    collections::BTreeMap,
    fs,
    net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket},
    os::fd::AsFd,
    process::Command,
};

use cproxy_datapath::bpf::{
    self, Features, PinDir, Program, ProgramSet,
    syscalls::{bpf_attach_type, bpf_prog_type, exit, link_create, load_program, move_to},
};
use cproxy_tests::{
    UNMOUNT_CGROUP2,
    manifest::{self, Service, Slice},
    nameserver::{NameAnswer, Nameserver, program_with_nameserver},
    process::{Agent, Output, cproxy, cproxy_binary, cproxy_with_variable, eventually, run},
    sandbox::{Placement, Sandbox},
    world::{SYNC, start_agent},
};
use serde_json::Value;

/// Names that are part of the contract; more may be added.
const NAMES: [&str; 28] = [
    "kernel",
    "capabilities",
    "cgroup2",
    "bpffs",
    "run_dir",
    "cgroup_bpf",
    "map_hash",
    "map_array",
    "map_lru_hash",
    "map_percpu_array",
    "map_sk_storage",
    "map_array_of_maps",
    "program_connect4",
    "program_connect6",
    "program_sendmsg4",
    "program_sendmsg6",
    "program_recvmsg4",
    "program_recvmsg6",
    "program_getpeername4",
    "program_getpeername6",
    "program_sock_release",
    "errno_helper",
    "restore",
    "confinement",
    "attached",
    "source",
    "ipv4",
    "ipv6",
];

/// Runs a shell script in a mount namespace of its own, where `$cproxy` is the program under test with the sandbox's
/// directories.
fn script(sandbox: &Sandbox, text: &str) -> Output {
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-euc", text]);
    command.env("cproxy", cproxy_binary()).env("dir", sandbox.dir());
    command.env("CPROXY_CGROUP", sandbox.cgroup());
    command.env("CPROXY_PIN_DIR", sandbox.pin_dir()).env("CPROXY_RUN_DIR", sandbox.run_dir());
    run(sandbox, Placement::Hooked, command, "", SYNC)
}

/// State and detail of each requirement, by name, from the text.
fn requirements(output: &Output) -> BTreeMap<&str, (&str, &str)> {
    let requirement = |line| {
        let (state, rest) = str::split_once(line, ' ').unwrap();
        let (name, detail) = rest.trim_start().split_once(' ').unwrap();
        (name, (state, detail.trim_start()))
    };
    // The last line sums them up.
    output.stdout.lines().take_while(|line| !line.is_empty()).map(requirement).collect()
}

/// Checks that the command fails, names these requirements as missing in both formats and describes the first with
/// these words.
fn assert_missing(output: &Output, names: &[&str], words: &[&str]) {
    assert_eq!(output.code, 1, "{output:?}");
    let found = requirements(output);
    for name in names {
        assert_eq!(found[name].0, "missing", "{name}: {output:?}");
        assert!(output.stderr.contains(name), "{name}: {output:?}");
    }
    for word in words {
        assert!(found[names[0]].1.contains(word), "{word:?} is missing in {:?}", found[names[0]]);
    }
    assert_eq!(output.stderr.lines().count(), 1, "{output:?}");
}

#[test]
fn where_cproxy_runs_every_requirement_is_met_and_nothing_is_changed() {
    let sandbox = Sandbox::for_test();
    let output = cproxy(&sandbox, &["check", "-o", "wide"]).success();
    let found = requirements(&output);
    for name in NAMES {
        assert_eq!(found.get(name).map(|(state, _)| *state), Some("ok"), "{name}: {output:?}");
    }
    assert_eq!(found["attached"].1, "not installed");
    assert_eq!(found["api_server"].0, "degraded", "no source is known: {output:?}");
    assert_eq!(found["source"].1, "no agent has been started");
    assert_eq!(found["agent"].1, "none has been started");
    assert_eq!(output.stderr, "");
    let folded = cproxy(&sandbox, &["check"]).success();
    let (state, detail) = requirements(&folded)["kernel_features"];
    assert!(state == "ok" && detail.ends_with("are there; -o wide lists them"), "{folded:?}");
    assert!(folded.stdout.lines().count() < 30, "{folded:?}");
    assert!(!sandbox.pin_dir().exists() && fs::read_dir(sandbox.run_dir()).unwrap().next().is_none());

    let json = cproxy(&sandbox, &["check", "-o", "json"]).json();
    let names: Vec<_> = json.as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(names.len(), found.len());
    assert!(NAMES.iter().all(|name| names.contains(name)), "{json}");
    let optional = |row: &&Value| row["required"] == false && row["state"].is_string() && row["detail"].is_string();
    assert!(json.as_array().unwrap().iter().filter(optional).any(|row| row["name"] == "errno_helper"), "{json}");
}

#[test]
fn settings_and_manifests_that_run_refuses_are_named() {
    let sandbox = Sandbox::for_test();
    let file = sandbox.dir().join("cproxy.conf");
    fs::write(&file, "nodename = x\n").unwrap();
    let output = cproxy_with_variable(&sandbox, &["check"], ("CPROXY_CONFIG", file.to_str().unwrap()));
    assert_missing(&output, &["settings"], &["cproxy.conf, line 1", "\"nodename\" is not a setting"]);
    for (variable, value, reason) in [
        ("CPROXY_BALANCE", "hope", "invalid value 'hope' for '--balance <METHOD>'"),
        ("CPROXY_EXCLUDE_UID", "web", "invalid value 'web' for '--exclude-uid <UID>...'"),
        ("CPROXY_EXCLUDE_PORT", "1,2,3,4,5,6,7,8,9", "--exclude-port: 9 values; at most 8 are allowed"),
        ("CPROXY_EXCLUDE_CGROUP", "/nowhere", "--exclude-cgroup /nowhere"),
    ] {
        let output = cproxy_with_variable(&sandbox, &["check"], (variable, value));
        assert_missing(&output, &["settings"], &[reason]);
    }
    let output = cproxy_with_variable(&sandbox, &["check"], ("CPROXY_NODENAME", "x")).success();
    let (state, detail) = requirements(&output)["settings"];
    assert!(state == "degraded" && detail.contains("CPROXY_NODENAME is no setting"), "{output:?}");
    // Kubernetes makes these for a Service of the name `cproxy`.
    let of_others = ["CPROXY_PORT", "CPROXY_SERVICE_HOST", "CPROXY_PORT_443_TCP_ADDR", "CPROXY_RELAY_LISTEN"];
    let empty = ["CPROXY_NODENAME", "CPROXY_NODE_NAME", "CPROXY_BALANCE"];
    for (name, value) in of_others.map(|name| (name, "x")).into_iter().chain(empty.map(|name| (name, ""))) {
        let output = cproxy_with_variable(&sandbox, &["check"], (name, value)).success();
        assert!(!requirements(&output).contains_key("settings"), "{name}: {output:?}");
    }
    assert_missing(&cproxy(&sandbox, &["check", "--manifests", "/nowhere"]), &["manifests"], &["/nowhere"]);
    fs::write(sandbox.manifest_dir().join("bad.yaml"), "a: [").unwrap();
    let output = cproxy(&sandbox, &["check", "--manifests", sandbox.manifest_dir().to_str().unwrap()]).success();
    let (state, detail) = requirements(&output)["manifests"];
    assert!(state == "degraded" && detail.contains("bad.yaml"), "{output:?}");
}

#[test]
fn without_privileges_missing_capabilities_and_skipped_checks_are_named() {
    let sandbox = Sandbox::for_test();
    let none = script(&sandbox, "exec setpriv --bounding-set=-all --inh-caps=-all $cproxy check -o wide");
    assert_missing(&none, &["capabilities"], &["missing CAP_BPF", "root"]);
    for name in ["cgroup_bpf", "map_hash", "program_getpeername6", "attached"] {
        assert_eq!(requirements(&none)[name].0, "unknown", "{name}: {none:?}");
    }
    assert_eq!(requirements(&none)["cgroup2"].0, "ok");
    let json = script(&sandbox, "exec setpriv --bounding-set=-all --inh-caps=-all $cproxy check -o json");
    assert_eq!(json.code, 1);
    let rows: Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(rows.as_array().unwrap().len(), requirements(&none).len());

    let half = script(&sandbox, "exec setpriv --bounding-set=-all,+net_admin --inh-caps=-all $cproxy check");
    assert_missing(&half, &["capabilities"], &["missing CAP_BPF:"]);
    let enough = script(
        &sandbox,
        "exec setpriv --bounding-set=-all,+bpf,+net_admin,+perfmon --inh-caps=-all $cproxy check -o wide",
    );
    assert_eq!(requirements(&enough.success())["program_connect4"].0, "ok", "these three are enough");
}

#[test]
fn a_file_system_that_can_be_mounted_is_not_missing_and_is_not_mounted() {
    let sandbox = Sandbox::for_test();
    let bare = format!(
        "mount -t tmpfs none /sys/fs/bpf; {UNMOUNT_CGROUP2}
         unset CPROXY_CGROUP CPROXY_PIN_DIR; export CPROXY_RUN_DIR=$dir/new"
    );
    let output = script(
        &sandbox,
        &format!("{bare}; $cproxy check; [ ! -e $dir/new ]; [ $(stat -f -c %T /sys/fs/bpf) = tmpfs ]"),
    )
    .success();
    let found = requirements(&output);
    for (name, place) in [("cgroup2", "/new/cgroup2"), ("bpffs", "/sys/fs/bpf")] {
        let (state, detail) = found[name];
        assert!(state == "ok" && detail.starts_with("not mounted yet") && detail.ends_with(place), "{output:?}");
    }
    let unable = format!(
        "{bare}; exec setpriv --bounding-set=-all,+bpf,+net_admin,+perfmon --inh-caps=-all $cproxy check -o wide"
    );
    assert_missing(&script(&sandbox, &unable), &["cgroup2", "bpffs"], &["CAP_SYS_ADMIN", "--cgroup"]);
}

/// Runs two scripts, the second one in a cgroup namespace of its own. As in a container, its own cgroup is the root
/// there, and the machine's root is `/..`. No `--cgroup` is given.
fn confined(sandbox: &Sandbox, outside: &str, inside: &str) -> Output {
    let mut command = Command::new("unshare");
    let script = format!("{outside}; exec unshare --cgroup sh -euc \"$inside\"");
    command.args(["--mount", "--propagation", "private", "sh", "-euc", &script]).env("inside", inside);
    command.env("cproxy", cproxy_binary()).env("dir", sandbox.dir());
    command.env("CPROXY_PIN_DIR", sandbox.pin_dir()).env("CPROXY_RUN_DIR", sandbox.run_dir());
    run(sandbox, Placement::Hooked, command, "", SYNC)
}

#[test]
fn the_cgroup_root_is_recognised_at_any_mount_point() {
    let sandbox = Sandbox::for_test();
    // The mount is listed before or after the private one, and its path has a blank.
    for (name, outside, inside) in [
        (
            "in front",
            "mkdir \"$dir/in front\" $dir/own; mount -t cgroup2 none \"$dir/in front\"",
            "mount -t cgroup2 none $dir/own",
        ),
        (
            "be hind",
            "mkdir \"$dir/be hind\" $dir/root; mount -t cgroup2 none $dir/root",
            "mount -t cgroup2 none $dir/own; mount --move $dir/root \"$dir/be hind\"",
        ),
    ] {
        let inside = format!("{inside}; $cproxy check");
        let output = confined(&sandbox, &format!("{UNMOUNT_CGROUP2}; {outside}"), &inside).success();
        let place = sandbox.dir().join(name).display().to_string();
        assert_eq!(requirements(&output)["cgroup2"], ("ok", place.as_str()));
    }
}

/// This happens in a container without a mount of the machine's cgroups.
#[test]
fn a_cgroup_below_the_root_is_a_warning_of_every_command() {
    let sandbox = Sandbox::for_test();
    let service = Service::new("web").cluster_ips(["10.96.0.10"]).tcp("http", 80, 8080);
    manifest::write(&sandbox.manifest_dir(), "web.json", [service.into()]);
    let inside = "mkdir $dir/own; mount -t cgroup2 none $dir/own
         $cproxy run --manifests $dir/manifests 2>$dir/log & agent=$!
         $cproxy wait --timeout 10s; kill $agent; wait $agent; $cproxy check; cat $dir/log >&2; $cproxy cleanup";
    let output = confined(&sandbox, UNMOUNT_CGROUP2, inside).success();
    let place = format!("{}/own, NOT the cgroup root, ", sandbox.dir().display());
    for line in [format!("cproxy: ready, attached to {place}"), format!(" WARN attached to {place}")] {
        assert!(output.stderr.contains(&line), "{line}: {output:?}");
    }
    let found = requirements(&output);
    for (name, start) in [("cgroup2", place.clone()), ("attached", format!("to {place}"))] {
        let (state, detail) = found[name];
        assert!(state == "degraded" && detail.starts_with(&start) && detail.contains("--cgroup"), "{name}: {output:?}");
    }
}

#[test]
fn each_missing_requirement_has_its_own_line() {
    let sandbox = Sandbox::for_test();
    let old = script(&sandbox, "exec setarch --uname-2.6 $cproxy check");
    assert_missing(&old, &["kernel"], &["kernel 2.6.", "too old", "5.13"]);
    let nowhere = sandbox.dir().display().to_string();
    let args = ["check", "--cgroup", "/tmp", "--pin-dir", &nowhere, "--run-dir", "/proc/version/run"];
    let output = cproxy(&sandbox, &args);
    assert_missing(&output, &["cgroup2", "bpffs", "run_dir"], &["--cgroup /tmp", "cgroup2"]);
    let found = requirements(&output);
    assert!(found["bpffs"].1.contains(&nowhere) && found["run_dir"].1.contains("/proc/version"), "{output:?}");
    assert_eq!(found.values().filter(|(state, _)| *state == "missing").count(), 3, "{output:?}");
}

#[test]
fn check_names_the_hooked_cgroup_until_the_hooks_are_gone() {
    let sandbox = Sandbox::for_test();
    let attached = || {
        let output = cproxy(&sandbox, &["check"]);
        let (state, detail) = requirements(&output)["attached"];
        (output.code, format!("{state} {detail}"))
    };
    let start = |cgroup| {
        Agent::new(&sandbox).cgroup(cgroup).manifests(sandbox.manifest_dir()).start().stop();
    };
    start(sandbox.cgroup().to_owned());
    let asked = format!("ok to {}, serving only processes in and below it", sandbox.cgroup().display());
    let (code, answer) = attached();
    assert!(code == 0 && answer.starts_with(&asked), "also with the agent dead: {answer}");

    let other = sandbox.cgroup().join("other");
    fs::create_dir(&other).unwrap();
    start(other.clone());
    let (code, answer) = attached();
    assert!(code == 0 && answer.starts_with("degraded to another cgroup, with id "), "{answer}");

    // The kernel releases the link some time after the cgroup.
    fs::remove_dir(&other).unwrap();
    eventually(SYNC, "the hooks are gone with their cgroup", || match attached() {
        (1, answer) if answer.contains("its cgroup is gone") => Ok(()),
        (code, answer) => Err(format!("{code}: {answer}")),
    });
    start(sandbox.cgroup().to_owned());
    assert_eq!(attached().0, 0, "a new agent attaches anew");

    fs::remove_file(PinDir::new(&sandbox.pin_dir()).object("recvmsg4")).unwrap();
    let (code, answer) = attached();
    assert!(code == 1 && answer.starts_with("missing recvmsg4: No such file"), "{answer}");
}

#[test]
fn check_names_what_a_running_agent_follows() {
    let sandbox = Sandbox::for_test();
    let source = || {
        let output = cproxy(&sandbox, &["check"]).success();
        let (state, detail) = requirements(&output)["source"];
        format!("{state} {detail}")
    };
    let service = Service::new("web").cluster_ips(["10.96.0.10"]).tcp("http", 80, 8080);
    manifest::write(&sandbox.manifest_dir(), "web.json", [service.into()]);
    let mut agent = start_agent(&sandbox);
    assert_eq!(source(), format!("ok manifests {}", sandbox.manifest_dir().display()));
    agent.kill();
    assert_eq!(source(), "degraded no agent runs, which would say", "a crash leaves the socket");

    let _agent = Agent::new(&sandbox).args(["--apiserver", "unix:///nowhere,unix:///either"]).spawn();
    eventually(SYNC, "the agent tries its servers", || match source() {
        text if text.starts_with("degraded follows unix:///")
            && text.contains("confirmed nothing yet; cannot list") =>
        {
            Ok(())
        }
        text => Err(text),
    });
}

/// Errors of calls to a Service without endpoints, for each of its addresses and both protocols.
fn errors(vips: &[SocketAddr]) -> Vec<Option<i32>> {
    let tcp = |vip: &SocketAddr| TcpStream::connect(vip).unwrap_err().raw_os_error();
    let udp = |vip: &SocketAddr| {
        let local: SocketAddr = if vip.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }.parse().unwrap();
        UdpSocket::bind(local).unwrap().send_to(b"?", vip).unwrap_err().raw_os_error()
    };
    vips.iter().flat_map(|vip| [tcp(vip), udp(vip)]).collect()
}

#[test]
fn a_kernel_without_the_errno_helper_refuses_with_eperm() {
    const EPERM: Option<i32> = Some(1);
    const ECONNREFUSED: Option<i32> = Some(111);
    let sandbox = Sandbox::for_test();
    let service = Service::new("idle").cluster_ips(["10.96.0.10", "fd00:10:96::a"]).tcp("a", 80, 80).udp("b", 80, 80);
    manifest::write(&sandbox.manifest_dir(), "idle.json", [service.into()]);
    let _agent = start_agent(&sandbox);
    let vips = ["10.96.0.10:80", "[fd00:10:96::a]:80", "[::ffff:10.96.0.10]:80"].map(|vip| vip.parse().unwrap());
    assert_eq!(errors(&vips), [ECONNREFUSED; 6]);

    let pins = PinDir::new(&sandbox.pin_dir());
    let objects = || {
        let mut names: Vec<_> =
            fs::read_dir(pins.versioned()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let before = objects();
    let install = |errno_helper| -> BTreeMap<&str, u32> {
        let counts = bpf::install(&pins, sandbox.cgroup(), Features { errno_helper }, ProgramSet::Plain).unwrap();
        counts.into_iter().map(|(program, count)| (program.link, count)).collect()
    };
    let without = install(false);
    assert_eq!(errors(&vips), [EPERM; 6]);
    let with = install(true);
    assert_eq!(errors(&vips), [ECONNREFUSED; 6]);
    for link in ["connect4", "connect6"] {
        assert!(without[link] < with[link], "the verifier has looked at the call: {without:?}, {with:?}");
    }
    assert_eq!(with.len(), Program::ALL.len());
    assert_eq!(objects(), before, "constants are not pinned");
}

/// State and detail of the line `other_programs`.
fn other_programs(sandbox: &Sandbox) -> String {
    let output = cproxy(sandbox, &["check"]).success();
    let (state, detail) = requirements(&output)["other_programs"];
    format!("{state} {detail}")
}

#[test]
fn another_cproxy_is_named_once() {
    let sandbox = Sandbox::for_test();
    let below = sandbox.cgroup().join("below");
    fs::create_dir(&below).unwrap();
    let pins = PinDir::new(&sandbox.pin_dir().with_file_name("another"));
    fs::create_dir_all(pins.versioned()).unwrap();
    bpf::install(&pins, &below, Features::probe(), ProgramSet::Plain).unwrap();
    let expected = format!("degraded another cproxy is attached to {} (9 programs)", below.display());
    assert_eq!(other_programs(&sandbox), expected);
    fs::remove_dir(&below).unwrap();
}

#[test]
fn programs_of_others_are_named_with_their_cgroup() {
    let sandbox = Sandbox::for_test();
    let line = || other_programs(&sandbox);
    assert!(line().starts_with("ok none in "), "{}", line());
    let below = sandbox.cgroup().join("below");
    fs::create_dir(&below).unwrap();
    let hook = bpf_attach_type::BPF_CGROUP_INET4_CONNECT;
    let program_type = bpf_prog_type::BPF_PROG_TYPE_CGROUP_SOCK_ADDR;
    let program = load_program(program_type, hook as u32, &[move_to(0, 1), exit()], "somebody_elses").unwrap();
    let link = link_create(program.as_fd(), fs::File::open(&below).unwrap().as_fd(), hook as u32).unwrap();
    let expected = |text: &str| {
        text.starts_with("degraded ")
            && text.ends_with(&format!(" (somebody_elses) at connect4 in {}", below.display()))
    };
    assert!(expected(&line()), "{}", line());
    let _agent = start_agent(&sandbox);
    assert!(expected(&line()), "ours are not among them: {}", line());
    drop(link);
    fs::remove_dir(&below).unwrap();
    eventually(SYNC, "the program has gone", || if line().starts_with("ok ") { Ok(()) } else { Err(line()) });
}

#[test]
fn backends_without_a_route_are_counted() {
    let sandbox = Sandbox::for_test();
    sandbox.add_address("10.244.0.1");
    let service = Service::new("web").cluster_ips(["10.96.0.10", "fd00:10:96::a"]).tcp("http", 80, 8080);
    let slice = Slice::v4("web").tcp("http", 8080).ready(["10.244.0.1", "203.0.113.9"]);
    manifest::write(&sandbox.manifest_dir(), "web.json", [service.into(), slice.into()]);
    let _agent = start_agent(&sandbox);
    let output = cproxy(&sandbox, &["check"]).success();
    let (state, detail) = requirements(&output)["ipv4"];
    assert!(state == "degraded" && detail.starts_with("no route to 1 of 2 backends, such as 203.0.113.9"), "{detail}");
    assert_eq!(requirements(&output)["ipv6"], ("ok", "no default route; no Service needs it"));
}

#[test]
fn the_nameserver_is_asked_as_applications_ask_it() {
    let sandbox = Sandbox::for_test();
    let pod = Ipv4Addr::new(10, 244, 0, 53);
    sandbox.add_address(pod);
    let names = Nameserver::start(&sandbox, pod, NameAnswer::NoName);
    let vip = Ipv4Addr::new(10, 96, 0, 10);
    let service = Service::new("kube-dns").namespace("kube-system").cluster_ips([vip]).udp("dns", 53, 53);
    let slice = Slice::v4("kube-dns").namespace("kube-system").udp("dns", 53).ready([pod]);
    manifest::write(&sandbox.manifest_dir(), "dns.json", [service.into(), slice.into()]);
    let program = program_with_nameserver(&sandbox, "check", &cproxy_binary(), vip);
    let line = |placement| {
        let mut command = Command::new(&program);
        command.arg("check").env("CPROXY_CGROUP", sandbox.cgroup());
        command.env("CPROXY_PIN_DIR", sandbox.pin_dir()).env("CPROXY_RUN_DIR", sandbox.run_dir());
        let output = run(&sandbox, placement, command, "", SYNC).success();
        let (state, detail) = requirements(&output)["dns"];
        format!("{state} {detail}")
    };
    let without = line(Placement::Hooked);
    assert!(without.starts_with("degraded ") && without.contains("not by name"), "{without}");
    let _agent = start_agent(&sandbox);
    let found = line(Placement::Hooked);
    assert!(found.starts_with("ok 10.96.0.10 (kube-system/kube-dns) answered after "), "{found}");
    let outside = line(Placement::Unhooked);
    assert!(outside.starts_with("ok 10.96.0.10 (kube-system/kube-dns) is a ClusterIP, and this process"), "{outside}");
    names.set(NameAnswer::Silence);
    let silent = line(Placement::Hooked);
    assert!(silent.contains("10.96.0.10 (kube-system/kube-dns): no answer within 2s"), "{silent}");
}
