//! Messages and behaviour of cproxy on errors: one line with the cause and the remedy, the right exit code, no half
//! attached programs, no lost state.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a failed call is a failed test")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use cproxy_datapath::bpf::PinDir;
use cproxy_tests::{
    UNMOUNT_CGROUP2,
    manifest::{self, Service, Slice, http_service},
    process::{
        Agent, Output, cproxy, cproxy_binary, cproxy_command, cproxy_with_input, cproxy_with_variable, eventually, run,
    },
    sandbox::{Placement, Sandbox},
};
use serde_json::{Value, json};

const SYNC: Duration = Duration::from_secs(10);

fn pins(sandbox: &Sandbox) -> PinDir {
    PinDir::new(&sandbox.pin_dir())
}

/// Checks that `cproxy run` with these arguments ends by itself with this exit code and one line with all `needles`,
/// and has attached nothing.
fn run_fails(sandbox: &Sandbox, args: &[&str], code: i32, needles: &[&str]) {
    let output = cproxy(sandbox, &[&["run"], args].concat());
    assert_fails(&output, code, needles);
    assert_nothing_attached(&sandbox.pin_dir());
}

fn assert_fails(output: &Output, code: i32, needles: &[&str]) {
    assert_eq!(output.code, code, "{output:?}");
    let complaints: Vec<_> = output.stderr.lines().filter(|line| line.starts_with("cproxy: ")).collect();
    let [complaint] = complaints.as_slice() else { panic!("not one line: {output:?}") };
    for needle in needles {
        assert!(complaint.contains(needle), "{needle:?} is missing in {complaint:?}");
    }
}

fn assert_nothing_attached(pin_dir: &Path) {
    let pins = |dir: &Path| fs::read_dir(dir).into_iter().flatten().map(|entry| entry.unwrap().path()).collect();
    let versions: Vec<PathBuf> = pins(pin_dir);
    let objects: Vec<PathBuf> = versions.iter().flat_map(|dir| -> Vec<PathBuf> { pins(dir) }).collect();
    assert_eq!(objects, Vec::<PathBuf>::new(), "something is half attached");
}

fn web() -> [Value; 2] {
    http_service("web", "10.96.0.10", ["10.244.0.1"])
}

#[test]
fn credentials_in_an_address_are_neither_used_nor_repeated() {
    let sandbox = Sandbox::for_test();
    let kubeconfig = manifest::write_text(
        sandbox.dir(),
        "kubeconfig",
        "{current-context: a, contexts: [{name: a, context: {cluster: c, user: u}}], users: [{name: u, user: {}}],\n\
         clusters: [{name: c, cluster: {server: 'https://user:hidden@10.0.0.1'}}]}\n",
    );
    for arguments in [
        ["--apiserver", "https://user:hidden@10.0.0.1:6443"],
        ["--apiserver", "https://10.0.0.1/?token=hidden"],
        ["--apiserver", "https://user:hidden@[::1"],
        ["--kubeconfig", kubeconfig.to_str().unwrap()],
    ] {
        let output = cproxy(&sandbox, &[&["run"], arguments.as_slice()].concat());
        assert_ne!(output.code, 0);
        assert!(output.stderr.contains(arguments[0]), "{output:?}");
        let wait = cproxy(&sandbox, &["wait", "--timeout", "0"]);
        assert!(wait.stderr.contains(arguments[0]), "{wait:?}");
        for text in [&output.stdout, &output.stderr, &wait.stderr] {
            assert!(!text.contains("hidden"), "{text}");
        }
    }
    let settings = manifest::write_text(sandbox.dir(), "settings", "apiserver = https://user:hidden@10.0.0.1\n");
    let output = cproxy_with_variable(&sandbox, &["run"], ("CPROXY_CONFIG", settings.to_str().unwrap()));
    assert!(output.code == 2 && output.stderr.contains("settings, line 1"), "{output:?}");
    assert!(!output.stderr.contains("hidden"), "{output:?}");
}

/// A manifest with a good Service.
fn good(sandbox: &Sandbox) -> PathBuf {
    manifest::write(&sandbox.manifest_dir(), "web.json", web())
}

/// Runs cproxy under another program, such as one that drops capabilities.
fn under(sandbox: &Sandbox, program: &str, args: &[&str], cproxy_args: &[&str]) -> Output {
    let mut command = Command::new(program);
    command.args(args).arg(cproxy_binary()).args(cproxy_args);
    run(sandbox, Placement::Hooked, command, "", SYNC)
}

/// `cproxy run` on a good manifest, with the sandbox's directories.
fn run_args(sandbox: &Sandbox) -> Vec<String> {
    let text = |path: &Path| path.display().to_string();
    [
        ["--manifests".to_owned(), text(&good(sandbox))],
        ["--cgroup".to_owned(), text(sandbox.cgroup())],
        ["--pin-dir".to_owned(), text(&sandbox.pin_dir())],
        ["--run-dir".to_owned(), text(&sandbox.run_dir())],
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[test]
fn wrong_usage_is_one_line_and_exit_code_2() {
    let sandbox = Sandbox::for_test();
    let cases: [(&[&str], &str); 21] = [
        (&["run", "--manifest", "x"], "--manifest"),
        (&["run", "--kubeconfig"], "--kubeconfig"),
        (&["run", "--kubeconfig", "a", "--manifests", "b"], "cannot be used with"),
        (&["run", "--apiserver", "10.0.0.1"], "https://"),
        (&["run", "--apiserver", "ftp://x"], "https://"),
        (&["run", "--apiserver", "http://10.0.0.1"], "'--apiserver <URL>...': over http the token could be read"),
        (&["get", "pods"], "services"),
        (&["get", "services", "-o", "xml"], "json"),
        (&["resolve"], "--manifests"),
        (&["resolve", "--manifests", ".", "--explain", "web"], "default/web"),
        (&["resolve", "--manifests", ".", "--explain", "a/b/c"], "default/web"),
        (&["run", "--node-name", "a,b=c"], "a node's name"),
        (&["resolve", "--manifests", ".", "--pod-ip", "10.0.0.0/8"], "not a valid IP address"),
        (&["resolve", "--manifests", ".", "--node-ip", "node"], "not a valid IP address"),
        (&["resolve", "--manifests", ".", "--node-ip", "127.0.0.1"], "cannot be served on this address"),
        (&["resume"], "resume"),
        (&["run", "--exclude-uid", "root"], "expected a user id, a number: `id -u root` prints it"),
        (&["explain", "--pid", "sh", "default/web"], "expected a process id"),
        (&["trace", "--count", "0"], "expected a number from 1"),
        (&["get"], "<STATE>"),
        (&["set"], "log-level"),
    ];
    for (args, needle) in cases {
        assert_fails(&cproxy(&sandbox, args), 2, &[needle]);
    }
    for (args, variable, text) in [
        (&["run"], "CPROXY_LOG_LEVEL", "loud"),
        (&["run"], "CPROXY_EXCLUDE_UID", "0,root"),
        (&["wait"], "CPROXY_TIMEOUT", "soon"),
    ] {
        let output = cproxy_with_variable(&sandbox, args, (variable, text));
        assert_fails(&output, 2, &[&format!("cproxy: {variable}: invalid value ")]);
    }
    assert_eq!(cproxy::<&str>(&sandbox, &[]).code, 2);
    assert!(cproxy(&sandbox, &["run", "--help"]).success().stdout.contains("--bootstrap"));
    assert!(cproxy(&sandbox, &["version"]).success().stdout.starts_with("cproxy 0."));
    assert!(cproxy(&sandbox, &["--version"]).success().stdout.starts_with("cproxy 0."));
}

#[test]
fn a_kubeconfig_that_cannot_be_used_is_named() {
    let sandbox = Sandbox::for_test();
    let file = |name: &str, text: &str| manifest::write_text(sandbox.dir(), name, text).display().to_string();
    let missing = sandbox.dir().join("nowhere").display().to_string();
    run_fails(&sandbox, &["--kubeconfig", &missing], 2, &[&missing, "No such file"]);
    let directory = sandbox.dir().display().to_string();
    run_fails(&sandbox, &["--kubeconfig", &directory], 2, &[&directory]);
    for (name, text, needle) in [
        ("broken", "clusters: [{", "YAML"),
        ("empty", "", "context"),
        ("no-context", "apiVersion: v1\nkind: Config\nclusters: []\n", "context"),
        ("lost-cluster", "current-context: c\ncontexts: [{name: c, context: {cluster: none, user: u}}]\n", "none"),
        (
            "lost-ca",
            "current-context: c\ncontexts: [{name: c, context: {cluster: k, user: u}}]\nusers: [{name: u, user: {}}]\n\
             clusters: [{name: k, cluster: {server: 'https://127.0.0.1', certificate-authority: /nowhere/ca.crt}}]\n",
            "/nowhere/ca.crt",
        ),
        (
            "no-text",
            "current-context: c\ncontexts: [{name: c, context: {cluster: k, user: u}}]\n\
             clusters: [{name: k, cluster: {server: 'https://127.0.0.1'}}]\nusers: [{name: u, user: {token: [t]}}]\n",
            "users[0].user",
        ),
    ] {
        let path = file(name, text);
        run_fails(&sandbox, &["--kubeconfig", &path], 1, &[&path, needle]);
    }
    let lost_token = file(
        "lost-token",
        "current-context: c\ncontexts: [{name: c, context: {cluster: k, user: u}}]\n\
         clusters: [{name: k, cluster: {server: 'https://127.0.0.1'}}]\n\
         users: [{name: u, user: {tokenFile: /nowhere/token}}]\n",
    );
    run_fails(&sandbox, &["--kubeconfig", &lost_token], 1, &["/nowhere/token", "No such file"]);
}

/// The shipped binary has no tables to unwind Rust code.
#[test]
fn an_error_is_one_line_also_where_backtraces_are_wanted() {
    let sandbox = Sandbox::for_test();
    let output = under(&sandbox, "env", &["RUST_BACKTRACE=full"], &["resolve", "--manifests", "/nowhere"]);
    assert_fails(&output, 1, &["/nowhere"]);
}

#[test]
fn output_that_cannot_be_written_is_an_error_that_says_why() {
    let sandbox = Sandbox::for_test();
    let empty = sandbox.manifest_dir().display().to_string();
    for command in [
        &["version"][..],
        &["run", "--help"],
        &["resolve", "--manifests", &empty],
        &["resolve", "-o", "json", "--manifests", &empty],
    ] {
        for (place, reason) in [("/dev/full", "No space left on device"), ("&-", "Bad file descriptor")] {
            let script = format!("exec \"$0\" \"$@\" >{place}");
            let output = under(&sandbox, "sh", &["-c", &script], command);
            assert_fails(&output, 1, &["cannot write to stdout: ", reason]);
        }
        let output = under(&sandbox, "sh", &["-c", "\"$0\" \"$@\" | true"], command);
        assert_eq!((output.code, &*output.stderr), (0, ""), "a reader that has had enough is no error");
    }
    // A pipe without a reader in place of stderr.
    manifest::write_text(&sandbox.manifest_dir(), "bad.yaml", "a: [");
    for (command, code) in [(&["resolve", "--manifests", &empty][..], 1), (&["get"], 2), (&["set", "x"], 2)] {
        let (_, writer) = std::io::pipe().unwrap();
        let mut program = cproxy_command(&sandbox, command);
        let status = program.stdout(std::process::Stdio::null()).stderr(writer).status().unwrap();
        assert_eq!(status.code(), Some(code), "{command:?}: {status}");
    }
}

#[test]
fn without_a_source_outside_a_pod_the_error_names_the_flags() {
    let sandbox = Sandbox::for_test();
    run_fails(&sandbox, &[], 1, &["--kubeconfig", "--manifests"]);
    run_fails(&sandbox, &["--apiserver", "https://127.0.0.1:1"], 1, &["--kubeconfig", "serviceaccount"]);
}

#[test]
fn a_missing_privilege_or_kernel_feature_is_named() {
    let sandbox = Sandbox::for_test();
    let args = run_args(&sandbox);
    let args: Vec<_> = std::iter::once("run").chain(args.iter().map(String::as_str)).collect();

    let unprivileged = under(&sandbox, "setpriv", &["--bounding-set=-all", "--inh-caps=-all"], &args);
    assert_fails(&unprivileged, 1, &["missing CAP_BPF", "root"]);
    let half = under(&sandbox, "setpriv", &["--bounding-set=-all,+bpf", "--inh-caps=-all"], &args);
    assert_fails(&half, 1, &["missing CAP_NET_ADMIN"]);

    let old = under(&sandbox, "setarch", &["--uname-2.6"], &args);
    assert_fails(&old, 1, &["kernel 2.6.", "too old", "5.13"]);

    let no_cgroup = ["--cgroup", "/tmp", "--manifests", &good(&sandbox).display().to_string()].map(str::to_owned);
    run_fails(&sandbox, &no_cgroup.each_ref().map(String::as_str), 2, &["--cgroup /tmp", "cgroup2"]);

    let pin_dir = sandbox.dir().join("no-bpffs").display().to_string();
    let manifests = good(&sandbox).display().to_string();
    run_fails(&sandbox, &["--pin-dir", &pin_dir, "--manifests", &manifests], 2, &[&pin_dir, "bpffs", "mount -t bpf"]);
    assert!(!Path::new(&pin_dir).exists());
    for (command, code) in [(&["get", "services"][..], 1), (&["trace"], 1), (&["explain", "10.96.0.1:80"], 4)] {
        let output = cproxy(&sandbox, &[command, &["--pin-dir", &pin_dir]].concat());
        let text = format!("{}{}", output.stdout, output.stderr);
        assert!(output.code == code && text.contains("not on a bpf filesystem"), "{command:?}: {text}");
    }
    assert_nothing_attached(&sandbox.pin_dir());
}

/// Runs a shell script in a mount namespace of its own, where `$cproxy` is the program under test.
fn script(sandbox: &Sandbox, text: &str) -> Output {
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-euc", text]).env("cproxy", cproxy_binary());
    command.env("manifests", good(sandbox)).env("dir", sandbox.dir());
    command.env("pins", sandbox.pin_dir()).env("cgroup", sandbox.cgroup());
    run(sandbox, Placement::Hooked, command, "", Duration::from_secs(30))
}

#[test]
fn a_kernel_without_cgroup2_is_named() {
    let sandbox = Sandbox::for_test();
    let output = script(
        &sandbox,
        &format!(
            "grep -v cgroup2 /proc/filesystems >$dir/filesystems; mount --bind $dir/filesystems /proc/filesystems
             {UNMOUNT_CGROUP2}
             exec $cproxy run --manifests $manifests --pin-dir $pins --run-dir $dir/run"
        ),
    );
    assert_fails(&output, 1, &["no cgroup2", "CONFIG_CGROUP_BPF"]);
    assert_nothing_attached(&sandbox.pin_dir());
}

#[test]
fn cgroup2_and_bpffs_are_mounted_where_they_are_missing() {
    let sandbox = Sandbox::for_test();
    // The mounts go with the script's own mount namespace. For bpffs the programs are attached to the sandbox's cgroup;
    // for cgroup2 only the mount is checked, since attaching to the root would affect this machine.
    let bpffs = script(
        &sandbox,
        "mount -t tmpfs none /sys/fs/bpf
         $cproxy run --manifests $manifests --cgroup $cgroup --run-dir $dir/run2 2>$dir/log & agent=$!
         for attempt in $(seq 100); do [ -e $dir/run2/ready ] && break; sleep 0.1; done
         stat -f -c %T /sys/fs/bpf; stat -c %a /sys/fs/bpf | tail -c 4; kill $agent; wait $agent; $cproxy cleanup",
    );
    assert!(bpffs.clone().success().stdout.starts_with("bpf_fs\n700\n"), "{bpffs:?}");
    let cgroup2 = script(
        &sandbox,
        &format!(
            "{UNMOUNT_CGROUP2}
             mkdir -p $pins/v99
             $cproxy run --manifests $manifests --pin-dir $pins --run-dir $dir/run3 || echo code $?
             stat -f -c %T $dir/run3/cgroup2; rmdir $pins/v99"
        ),
    );
    assert_eq!(cgroup2.stdout, "code 1\ncgroup2fs\n", "{cgroup2:?}");
}

#[test]
fn a_run_directory_that_cannot_be_written_is_named_before_anything_is_attached() {
    let sandbox = Sandbox::for_test();
    let output = script(
        &sandbox,
        "mkdir $dir/readonly; mount -t tmpfs -o ro none $dir/readonly
         exec $cproxy run --manifests $manifests --cgroup $cgroup --pin-dir $pins --run-dir $dir/readonly",
    );
    assert_fails(&output, 1, &["--run-dir", "readonly", "Read-only file system"]);
    assert_nothing_attached(&sandbox.pin_dir());
}

#[test]
fn a_pin_directory_of_another_layout_is_left_alone() {
    let sandbox = Sandbox::for_test();
    let manifests = good(&sandbox).display().to_string();
    let pin_dir = sandbox.pin_dir().display().to_string();
    fs::create_dir_all(sandbox.pin_dir().join("v99")).unwrap();
    let cleanup = format!("cproxy cleanup --pin-dir {pin_dir}");
    run_fails(&sandbox, &["--manifests", &manifests], 1, &["layout 99", &cleanup]);
    assert_fails(&cproxy(&sandbox, &["get", "services"]), 1, &["layout 99"]);
    cproxy(&sandbox, &["cleanup"]).success();
    assert!(!sandbox.pin_dir().exists());

    // The name is right, but the map is a different one.
    fs::create_dir_all(pins(&sandbox).versioned()).unwrap();
    let foreign = aya::maps::Array::<aya::maps::MapData, u64>::create(8, 0).unwrap();
    foreign.pin(pins(&sandbox).object("FRONTENDS")).unwrap();
    let output = cproxy(&sandbox, &["run", "--manifests", &manifests]);
    assert_fails(&output, 1, &["FRONTENDS", "8 byte values", &cleanup]);
    assert_eq!(fs::read_dir(pins(&sandbox).versioned()).unwrap().count(), 1, "nothing was added");
    cproxy(&sandbox, &["cleanup"]).success();
}

#[test]
fn a_failing_installation_leaves_nothing() {
    let sandbox = Sandbox::for_test();
    fs::create_dir_all(pins(&sandbox).versioned()).unwrap();
    let pin_dir = sandbox.pin_dir().display().to_string();
    let output = cproxy(&sandbox, &["install", "--cgroup", "/tmp", "--pin-dir", &pin_dir]);
    assert_fails(&output, 1, &["/tmp", "cannot attach cproxy_"]);
    assert_nothing_attached(&sandbox.pin_dir());
}

#[test]
fn a_second_agent_and_a_cleanup_are_refused_while_one_runs() {
    let sandbox = Sandbox::for_test();
    let manifests = good(&sandbox);
    let mut agent = Agent::new(&sandbox).manifests(&manifests).start();
    let second = cproxy(&sandbox, &["run", "--manifests", &manifests.display().to_string()]);
    assert_fails(&second, 1, &["in use by a running cproxy"]);
    let pin_dir = sandbox.pin_dir().with_file_name("other").display().to_string();
    let beside = cproxy(&sandbox, &["run", "--manifests", &manifests.display().to_string(), "--pin-dir", &pin_dir]);
    assert_fails(&beside, 1, &["--run-dir", "in use by a running cproxy"]);
    assert!(!Path::new(&pin_dir).exists(), "nothing is left there");
    assert!(agent.is_ready(), "the first is not disturbed");
    assert_fails(&cproxy(&sandbox, &["cleanup"]), 1, &["in use by a running cproxy"]);
    let unprivileged = under(
        &sandbox,
        "setpriv",
        &["--reuid=65534", "--clear-groups"],
        &["get", "services", "--pin-dir", &sandbox.pin_dir().display().to_string()],
    );
    assert_fails(&unprivileged, 1, &["bpf/cproxy/v", "Permission denied", "root"]);
    agent.kill();
    assert!(agent.is_ready(), "a killed agent takes nothing away");
    cproxy(&sandbox, &["cleanup"]).success();
    assert!(!agent.is_ready(), "nothing is ready without a table");
    assert_fails(&cproxy(&sandbox, &["get", "services"]), 1, &["cproxy run", "--pin-dir"]);
}

#[test]
fn manifests_that_cannot_be_used_are_named() {
    let sandbox = Sandbox::for_test();
    let missing = sandbox.dir().join("nowhere.yaml").display().to_string();
    run_fails(&sandbox, &["--manifests", &missing], 2, &[&missing, "No such file"]);
    assert_fails(&cproxy(&sandbox, &["resolve", "--manifests", &missing]), 1, &[&missing]);
    let broken = manifest::write_text(sandbox.dir(), "broken.yaml", "kind: [").display().to_string();
    let manifests = good(&sandbox).display().to_string();
    run_fails(&sandbox, &["--manifests", &manifests, "--bootstrap", &broken], 1, &["--bootstrap", &broken]);
    run_fails(&sandbox, &["--manifests", &manifests, "--bootstrap", &missing], 2, &["--bootstrap", &missing]);

    let resolve = cproxy(&sandbox, &["resolve", "-o", "json", "--manifests", &manifests, &broken]);
    assert_eq!(resolve.code, 1);
    assert!(resolve.stderr.contains(&broken), "{}", resolve.stderr);
    let table: Value = serde_json::from_str(&resolve.stdout).unwrap();
    assert_eq!(table.as_array().unwrap().len(), 1, "the good file is resolved all the same");
}

#[test]
fn explain_names_why_a_service_is_not_in_the_table() {
    let sandbox = Sandbox::for_test();
    let headless = Service::new("headless").headless().tcp("http", 80, 80);
    let external = Service::new("external").cluster_ips(["10.96.0.11"]).spec("type", json!("ExternalName"));
    let other = Service::new("other").cluster_ips(["10.96.0.12"]).label("service.kubernetes.io/service-proxy-name", "");
    let [service, slice] = web();
    let objects = [service, slice, headless.into(), external.into(), other.into()];
    let file = manifest::write(&sandbox.manifest_dir(), "all.json", objects).display().to_string();
    let explain = |name: &str| cproxy(&sandbox, &["resolve", "-o", "json", "--manifests", &file, "--explain", name]);
    for (name, reason) in [
        ("default/nowhere", "no such Service"),
        ("default/headless", "headless"),
        ("default/external", "ExternalName"),
        ("default/other", "service-proxy-name"),
    ] {
        assert_fails(&explain(name), 1, &[name, reason]);
    }
    let explained = explain("default/web");
    assert!(explained.stdout.find("frontends") < explained.stdout.find("endpoints"), "keys are in the declared order");
    let explained = explained.json();
    let used = explained["endpoints"].as_array().unwrap().iter().map(|line| line["used"].as_str().unwrap());
    let used: Vec<_> = used.collect();
    assert_eq!(explained["frontends"].as_array().unwrap().len(), 1);
    assert!(!used.is_empty() && used.iter().all(|used| *used == "yes"), "{explained}");
    let from =
        |path: &str, input: &str| cproxy_with_input(&sandbox, &["resolve", "--manifests", path], input).success();
    assert_eq!(from("-", &fs::read_to_string(&file).unwrap()).stdout, from(&file, "").stdout);
}

#[test]
fn a_bad_object_harms_only_itself_and_is_named() {
    let sandbox = Sandbox::for_test();
    let no_ports = Service::new("portless").cluster_ips(["10.96.0.11"]);
    let bad_port = Service::new("odd").cluster_ips(["10.96.0.12"]).tcp("high", 80, 80).port("sctp", "SCTP", 81, 81);
    let bad_ip = Service::new("lost").cluster_ips(["10.96.0.999"]).tcp("http", 80, 80);
    let bad_slice =
        Slice::v4("web").name("web-bad").tcp("http", 8080).ready(["not-an-address", "fd00::1", "10.244.0.2"]);
    let no_ip = Service::new("nowhere").tcp("http", 80, 80);
    let twice = Service::new("zweb").cluster_ips(["10.96.0.10"]).tcp("http", 80, 80).client_ip_affinity(100_000);
    let orphan = json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": {"name": "orphan"},
                        "addressType": "IPv4", "endpoints": [], "ports": []});
    let typed = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "typed"},
                       "spec": {"clusterIP": "10.96.0.13", "ports": [{"port": "eighty"}]}});
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}});
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}});
    let [service, slice] = web();
    let objects =
        [service, slice, no_ports.into(), bad_port.into(), bad_ip.into(), bad_slice.into(), orphan, typed, pod];
    let objects = objects.into_iter().chain([secret, no_ip.into(), twice.into()]);
    let file = manifest::write(&sandbox.manifest_dir(), "all.json", objects).display().to_string();

    let resolve = cproxy(&sandbox, &["resolve", "-o", "json", "--manifests", &file]).success();
    let table: Value = serde_json::from_str(&resolve.stdout).unwrap();
    let frontends: Vec<_> = table.as_array().unwrap().iter().map(|row| row["address"].as_str().unwrap()).collect();
    assert_eq!(frontends, ["10.96.0.10", "10.96.0.12"]);
    assert_eq!(table[0]["backends"].as_array().unwrap().len(), 2);

    let agent = Agent::new(&sandbox).manifests(&file).start();
    let log = agent.log();
    for needles in [
        ["Service default/portless", "spec.ports", "no ports"],
        ["Service default/odd", "spec.ports[1]", "SCTP"],
        ["Service default/lost", "10.96.0.999", "not served"],
        ["EndpointSlice default/web-bad", "endpoints[0].addresses[0]", "not-an-address"],
        ["EndpointSlice default/web-bad", "endpoints[1].addresses[0]", "addressType"],
        ["EndpointSlice default/orphan", "kubernetes.io/service-name", "not used"],
        ["Service default/typed", "spec.ports[0].port", "eighty"],
        ["Service default/nowhere", "spec.clusterIP", "not served"],
        ["Service default/zweb", "10.96.0.10:80/TCP", "belongs to Service default/web"],
        ["Service default/zweb", "spec.sessionAffinityConfig.clientIP.timeoutSeconds", "86400"],
        ["kind Secret (v1)", "not used", "reads only Services"],
    ] {
        for (text, place) in [(&resolve.stderr, "resolve"), (&log, "run")] {
            let found = text.lines().any(|line| needles.iter().all(|needle| line.contains(needle)));
            assert!(found, "{needles:?} in no line of {place}: {text}");
            assert!(!text.contains("Pod"), "objects of network policies are passed over: {text}");
        }
    }
    assert_eq!(cproxy(&sandbox, &["get", "services", "-o", "json"]).json(), table, "the kernel has what resolve says");
}

#[test]
fn a_file_that_breaks_keeps_its_last_good_content() {
    let sandbox = Sandbox::for_test();
    let file = good(&sandbox);
    let mut agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir()).start();
    let backends = || {
        let rows = cproxy(&sandbox, &["get", "services", "-o", "json"]).json();
        rows.pointer("/0/backends").and_then(Value::as_array).map_or(0, Vec::len)
    };
    manifest::write_text(&sandbox.manifest_dir(), "web.json", "{ this is: [no manifest");
    agent.wait_log("its last content stays", SYNC);
    assert!(agent.log().contains("web.json"), "the file is named");
    assert_eq!(backends(), 1);
    fs::write(&file, "").unwrap();
    agent.wait_log("it is empty", SYNC);
    assert_eq!(backends(), 1);
    let fifo = sandbox.manifest_dir().join("pipe.yaml");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
    agent.wait_log("/pipe.yaml: not a regular file", SYNC);
    fs::rename(&fifo, sandbox.manifest_dir().join("moved-pipe.yaml")).unwrap();
    agent.wait_log("moved-pipe.yaml: not a regular file", SYNC);
    fs::create_dir(sandbox.manifest_dir().join("directory.yaml")).unwrap();
    agent.wait_log("directory.yaml: not a regular file", SYNC);
    // The slice is valid again, and another one comes and goes.
    let slice = Slice::v4("web").name("more").tcp("http", 8080).ready(["10.244.0.2", "10.244.0.3"]);
    let more = manifest::write(&sandbox.manifest_dir(), "more.json", [slice.into()]);
    eventually(SYNC, "the new file counts", || (backends() == 3).then_some(()).ok_or("not yet"));
    fs::remove_file(&more).unwrap();
    eventually(SYNC, "the file that is gone does not", || (backends() == 1).then_some(()).ok_or("not yet"));
    fs::remove_file(&file).unwrap();
    eventually(SYNC, "nothing is left", || (backends() == 0).then_some(()).ok_or("not yet"));
}

#[test]
fn a_source_that_is_a_pipe_is_refused_and_not_waited_for() {
    let sandbox = Sandbox::for_test();
    let fifo = sandbox.dir().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
    let fifo = fifo.to_str().unwrap();
    let web = good(&sandbox);
    for arguments in [vec!["--manifests", fifo], vec!["--bootstrap", fifo, "--manifests", web.to_str().unwrap()]] {
        let refused = cproxy(&sandbox, &[&["run"], &arguments[..]].concat()).failure(2);
        assert!(refused.stderr.contains(&format!("{} {fifo}: not a regular file", arguments[0])), "{refused:?}");
    }
}

#[test]
fn a_manifest_directory_that_goes_and_comes_back_is_followed() {
    let sandbox = Sandbox::for_test();
    let dir = sandbox.dir().join("outer/inner");
    fs::create_dir_all(&dir).unwrap();
    manifest::write(&dir, "web.json", web());
    let mut agent = Agent::new(&sandbox).manifests(&dir).start();
    let frontends = || {
        let rows = cproxy(&sandbox, &["get", "services", "-o", "json"]).json();
        let address = |row: &Value| row["address"].as_str().unwrap_or_default().to_owned();
        rows.as_array().into_iter().flatten().map(address).collect::<Vec<_>>()
    };
    for round in 0..3 {
        match round {
            0 => fs::rename(&dir, sandbox.dir().join("away")).unwrap(),
            1 => fs::remove_dir_all(&dir).unwrap(),
            _ => fs::remove_dir_all(dir.parent().unwrap()).unwrap(),
        }
        agent.wait_until(SYNC, "one complaint for each time", |agent| {
            let count = agent.log().matches("inner: No such file or directory; its last content stays").count();
            if count > round { Ok(()) } else { Err(count) }
        });
        // `remove_dir_all` removes the file before its directory: an agent that reads between the two has seen it go.
        if round == 0 {
            assert_eq!(frontends(), ["10.96.0.10"]);
        }
        fs::create_dir_all(&dir).unwrap();
        let [_, slice] = web();
        let other = Service::new("web").cluster_ips([format!("10.96.0.{}", 20 + round)]).tcp("http", 80, 8080);
        manifest::write(&dir, "web.json", [other.into(), slice]);
        let expected = [format!("10.96.0.{}", 20 + round)];
        eventually(SYNC, "the new directory counts", || {
            let now = frontends();
            if now == expected { Ok(()) } else { Err(format!("{now:?}: {}", agent.tail())) }
        });
        manifest::write(&dir, "web.json", web());
        eventually(SYNC, "and is followed", || (frontends() == ["10.96.0.10"]).then_some(()).ok_or("not yet"));
    }
}

#[test]
fn every_flag_can_come_from_the_environment() {
    let sandbox = Sandbox::for_test();
    // An empty variable counts as absent.
    let empty = ["CPROXY_CONFIG", "CPROXY_APISERVER", "CPROXY_LOG_LEVEL", "CPROXY_NODE_IP"];
    let agent = empty.into_iter().fold(Agent::new(&sandbox), |agent, variable| agent.env(variable, ""));
    let _agent = agent.env("CPROXY_MANIFESTS", good(&sandbox)).start();
    assert!(pins(&sandbox).object("connect4").exists());
}
