//! Output of `cargo xtask image`: the same bytes each time, in forms that other tools accept, with scripts that work as
//! documented. The scripts run in namespaces and a cgroup of their own, as in a guest.

#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed call is a failed test")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use cproxy_tests::{
    manifest::{self, Endpoint, Service, Slice},
    process::{Daemon, cproxy_binary},
    sandbox::{Placement, Sandbox},
};

const RUN: Duration = Duration::from_secs(60);

/// Runs a command to its end and returns the output of both streams.
fn output(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(output.status.success(), "{command:?}: {text}");
    text
}

fn command(program: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments);
    command
}

/// A directory that is removed when it is dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("cproxy-images-{}-{name}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

fn image(form: &str, umask: &str, out: &Path) {
    let xtask = std::env::var_os("CPROXY_XTASK").expect("CPROXY_XTASK is not set: run `cargo xtask test`");
    let mut command = command("sh", &["-c", &format!("umask {umask}; exec \"$0\" \"$@\"")]);
    command.arg(xtask).args(["image", form, "--agent"]).arg(cproxy_binary()).arg("--out").arg(out);
    output(&mut command);
}

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// All files below a directory, with their contents.
fn files(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(self::files(&path));
        } else {
            files.insert(path.clone(), fs::read(&path).unwrap());
        }
    }
    files
}

#[test]
fn the_same_bytes_come_out_twice() {
    let scratch = Scratch::new("twice");
    for form in ["rootfs", "initramfs", "oci", "relay"] {
        let [first, second] = ["first", "second"].map(|name| scratch.0.join(form).join(name));
        image(form, "022", &first);
        image(form, "077", &second);
        let [first, second] = [first, second].map(|dir| {
            let below = |(path, content): (PathBuf, _)| (path.strip_prefix(&dir).unwrap().to_owned(), content);
            files(&dir).into_iter().map(below).collect::<BTreeMap<_, _>>()
        });
        assert!(!first.is_empty() && first == second, "{form}: {:?}", first.keys());
    }
}

#[test]
fn the_rootfs_has_the_agent_and_its_units() {
    let scratch = Scratch::new("rootfs");
    image("rootfs", "022", &scratch.0);
    let list = output(command("busybox", &["tar", "-tvf"]).arg(scratch.0.join("rootfs.tar")));
    for (mode, path) in [
        ("-rwxr-xr-x", "usr/bin/cproxy"),
        ("-rwxr-xr-x", "usr/share/cproxy/init.d"),
        ("-rw-r--r--", "etc/cproxy/cproxy.conf"),
        ("-rw-r--r--", "usr/lib/tmpfiles.d/cproxy.conf"),
        ("-rw-r--r--", "usr/lib/systemd/system/cproxy.service"),
        ("-rw-r--r--", "usr/lib/systemd/system/cproxy-wait.service"),
        ("drwxr-xr-x", "usr/bin/"),
    ] {
        let is_it = |line: &&str| line.starts_with(mode) && line.ends_with(&format!(" {path}"));
        assert!(list.lines().any(|line| is_it(&line)), "{mode} {path}:\n{list}");
    }
    assert!(list.lines().all(|line| line.contains(" root/root ")), "{list}");
}

#[test]
fn systemd_accepts_the_units() {
    let scratch = Scratch::new("units");
    image("rootfs", "022", &scratch.0);
    let root = scratch.0.join("root");
    fs::create_dir(&root).unwrap();
    output(command("tar", &["-xf", "../rootfs.tar"]).current_dir(&root));
    // Units and a program that the verified units refer to, and that every machine has.
    let own = root.join("usr/lib/systemd/system");
    for entry in fs::read_dir("/usr/lib/systemd/system").unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() && path.extension().is_some_and(|kind| kind == "target" || kind == "slice") {
            fs::copy(&path, own.join(path.file_name().unwrap())).unwrap();
        }
    }
    fs::create_dir(root.join("bin")).unwrap();
    fs::copy("/bin/kill", root.join("bin/kill")).unwrap();
    let mut verify = command("systemd-analyze", &["verify", "--man=no"]);
    verify.arg(format!("--root={}", root.display())).args(["cproxy.service", "cproxy-wait.service"]);
    // systemd-analyze succeeds in any case.
    assert_eq!(output(&mut verify), "");
}

#[test]
fn container_tools_accept_the_layout() {
    let scratch = Scratch::new("oci");
    image("oci", "022", &scratch.0);
    let dir = format!("{}/oci", scratch.path());
    let inspected = output(&mut command("skopeo", &["inspect", "--config", &format!("oci:{dir}")]));
    for part in ["\"User\": \"0:0\"", "\"/usr/bin/cproxy\"", "\"org.opencontainers.image.title\": \"cproxy\""] {
        assert!(inspected.contains(part), "{part}: {inspected}");
    }
    let version = output(Command::new(cproxy_binary()).arg("version"));
    let image = format!("{dir}:{}", version.split_whitespace().nth(1).unwrap());
    output(&mut command("umoci", &["stat", "--image", &image]));
    let bundle = format!("{}/bundle", scratch.path());
    output(&mut command("umoci", &["unpack", "--rootless", "--image", &image, &bundle]));
    let agent = Path::new(&bundle).join("rootfs/usr/bin/cproxy");
    assert_eq!(agent.metadata().unwrap().permissions().mode() & 0o7777, 0o755);
    assert!(fs::read(agent).unwrap() == fs::read(cproxy_binary()).unwrap(), "another agent");
    assert_eq!(files(&Path::new(&bundle).join("rootfs")).len(), 1);
}

#[test]
fn container_tools_accept_the_relays_layout() {
    let scratch = Scratch::new("relay");
    image("relay", "022", &scratch.0);
    let dir = format!("oci:{}/relay", scratch.path());
    let inspected = output(&mut command("skopeo", &["inspect", "--config", &dir]));
    for part in ["\"User\": \"65532:65532\"", "\"/usr/bin/cproxy-relay\"", "\"Apache-2.0\""] {
        assert!(inspected.contains(part), "{part}: {inspected}");
    }
}

#[test]
fn systemd_accepts_the_unit_of_the_relay() {
    let scratch = Scratch::new("relay-unit");
    let root = scratch.0.join("root");
    let own = root.join("usr/lib/systemd/system");
    fs::create_dir_all(&own).unwrap();
    fs::create_dir_all(root.join("usr/bin")).unwrap();
    fs::create_dir_all(root.join("bin")).unwrap();
    for entry in fs::read_dir("/usr/lib/systemd/system").unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() && path.extension().is_some_and(|kind| kind == "target" || kind == "slice") {
            fs::copy(&path, own.join(path.file_name().unwrap())).unwrap();
        }
    }
    fs::copy("/bin/kill", root.join("bin/kill")).unwrap();
    fs::copy("/bin/kill", root.join("usr/bin/cproxy-relay")).unwrap();
    fs::copy(repository().join("images/relay/cproxy-relay.service"), own.join("cproxy-relay.service")).unwrap();
    let mut verify = command("systemd-analyze", &["verify", "--man=no"]);
    verify.arg(format!("--root={}", root.display())).arg("cproxy-relay.service");
    assert_eq!(output(&mut verify), "");
}

#[test]
fn shells_accept_the_scripts() {
    let images = repository().join("images");
    for script in ["init", "rootfs/usr/share/cproxy/init.d", "kata/prestart/10-cproxy"].map(|name| images.join(name)) {
        assert_ne!(script.metadata().unwrap().permissions().mode() & 0o100, 0, "{}", script.display());
        output(command("sh", &["-n"]).arg(&script));
        output(command("busybox", &["sh", "-n"]).arg(&script));
    }
}

#[test]
fn the_example_names_all_settings_and_no_others() {
    let example = fs::read_to_string(repository().join("images/rootfs/etc/cproxy/cproxy.conf")).unwrap();
    assert!(example.lines().all(|line| line.is_empty() || line.starts_with('#')), "a setting is in force");
    let settings = example.lines().filter_map(|line| line.strip_prefix('#')?.split_once(" = "));
    let named: BTreeSet<_> = settings.map(|(name, _)| name.to_owned()).collect();
    let known = ["run", "wait"].map(|verb| output(Command::new(cproxy_binary()).args([verb, "--help"])));
    let flags = known.iter().flat_map(|help| help.lines()).filter_map(|line| line.strip_prefix("      --"));
    let known: BTreeSet<_> =
        flags.filter_map(|flag| Some(flag.split_once(" <").or_else(|| flag.split_once(" [<"))?.0.to_owned())).collect();
    assert_eq!(named, known);
}

/// The initramfs, unpacked into the sandbox, with a Service to serve.
fn guest(sandbox: &Sandbox) -> PathBuf {
    image("initramfs", "022", sandbox.dir());
    let root = sandbox.dir().join("guest");
    fs::create_dir(&root).unwrap();
    let unpack = "gzip -dc ../initramfs.cpio.gz | busybox cpio -i";
    output(command("sh", &["-c", unpack]).current_dir(&root));
    fs::create_dir(root.join("etc/cproxy/manifests")).unwrap();
    let service = Service::new("web").cluster_ips(["10.96.0.10"]).tcp("http", 80, 8080);
    let slice = Slice::v4("web").tcp("http", 8080).endpoint(Endpoint::ready("10.244.0.1"));
    manifest::write(&root.join("etc/cproxy/manifests"), "web.json", [service.into(), slice.into()]);
    for (from, to) in
        [("rootfs/usr/share/cproxy/init.d", "etc/cproxy/init.d"), ("kata/prestart/10-cproxy", "etc/cproxy/hook")]
    {
        fs::copy(repository().join("images").join(from), root.join(to)).unwrap();
    }
    root
}

fn program(root: &Path, name: &str, text: &str) {
    let path = root.join(name);
    fs::write(&path, format!("#!/bin/sh\n{text}")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Runs a program of the guest as its first process, with this kernel command line.
fn boot(sandbox: &Sandbox, root: &Path, cmdline: &str, first: &str) -> (Option<i32>, String) {
    let cmdline = manifest::write_text(sandbox.dir(), "cmdline", cmdline);
    let mut unshare = command("unshare", &["--mount", "--pid", "--fork", "--kill-child", "--cgroup", "sh", "-euc"]);
    unshare.arg(
        "mount -t proc proc \"$1/proc\"; mount --bind \"$2\" \"$1/proc/cmdline\"; \
         mount --bind /dev/null \"$1/proc/sys/kernel/ctrl-alt-del\"; \
         exec env -i --default-signal PATH=\"$PATH\" chroot \"$1\" \"$3\"",
    );
    unshare.arg("sh").arg(root).arg(cmdline).arg(first);
    let mut guest = Daemon::spawn(sandbox, "guest", Placement::Hooked, unshare);
    let status = guest.wait(RUN);
    (status.and_then(|status| status.code()), guest.log())
}

/// Mask of ignored signals in the form of /proc/PID/status: a bit for each, from signal 1 on.
const SIGINT_AND_SIGQUIT: u64 = 0b110;

#[test]
fn init_runs_the_workload_when_services_work() {
    let sandbox = Sandbox::for_test();
    let root = guest(&sandbox);
    let workload = "echo \"arguments: $*\"; echo '{}' | /etc/cproxy/hook && echo hook passed; cproxy get services\n\
                    kill \"$(pidof cproxy)\"; sleep 2; cproxy wait && echo it is back\n\
                    grep SigIgn /proc/self/status; echo \"variables: $(env | grep -c CPROXY)\"\nexit 7\n";
    program(&root, "etc/cproxy/workload", workload);
    let cmdline = "quiet nomodules cproxy.manifests=/etc/cproxy/manifests reboot=k -- /etc/cproxy/workload a b\n";
    let (_, log) = boot(&sandbox, &root, cmdline, "/init");
    for line in ["arguments: a b", "hook passed", "10.244.0.1:8080", "it is back", "init: ending with 7"] {
        assert!(log.contains(line), "{line:?} is not in:\n{log}");
    }
    // The caller of the tests may ignore others, as nohup does.
    let ignored = log.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    assert_eq!(ignored.map(|signals| signals & SIGINT_AND_SIGQUIT), Some(0), "signals are ignored:\n{log}");
    assert!(log.contains("variables: 0"), "settings are in the workload's environment:\n{log}");

    program(&root, "bin/stubborn", "trap 'echo told to end; exit 3' TERM; kill -INT 1; while :; do sleep 0.1; done\n");
    let cmdline = "cproxy.manifests=/etc/cproxy/manifests -- /bin/stubborn\n";
    let (_, log) = boot(&sandbox, &root, cmdline, "/init");
    assert!(log.contains("told to end") && log.contains("init: ending with 3"), "{log}");

    let (_, log) = boot(&sandbox, &root, "cproxy.manifests=/etc/cproxy/manifests -- /bin/nowhere\n", "/init");
    assert!(log.contains("cproxy: /bin/nowhere: No such file") && log.contains("init: ending with 127"), "{log}");

    let (_, log) = boot(&sandbox, &root, "cproxy.apiserver=https://192.0.2.1 cproxy.timeout=100ms\n", "/init");
    assert!(log.contains("init: ending with 1") && !log.contains("arguments"), "{log}");
    let cmdline = "cproxy.manifests=/none cproxy.timeout=100ms cproxy.for=web cproxy.on-timeout=start -- \
                   /bin/echo in spite of that\n";
    let (_, log) = boot(&sandbox, &root, cmdline, "/init");
    assert!(log.contains("expected a name like default/web; waiting without it"), "{log}");
    assert!(log.contains("\nin spite of that\n") && log.contains("init: ending with 0"), "{log}");
}

#[test]
fn the_sysv_script_starts_stops_and_reports_its_status() {
    let sandbox = Sandbox::for_test();
    let root = guest(&sandbox);
    let text = "export PATH=/usr/bin:/bin:/usr/sbin:/sbin\n\
                mount -t sysfs sysfs /sys; mount -t cgroup2 cgroup2 /sys/fs/cgroup; mount -t bpf bpf /sys/fs/bpf\n\
                mkdir -p /var/log\n\
                does() { echo \"does $1\"; sh /etc/cproxy/init.d \"$1\"; echo \"$1: $?\"; }\n\
                does status; does start; does status\n\
                kill -9 \"$(pidof cproxy)\"; sleep 2; cproxy wait; does status\n\
                does restart; does reload; sleep 2; grep -o 'settings were read again' /var/log/cproxy.log\n\
                does status; does stop; does status; cproxy get services; does other\n";
    program(&root, "etc/cproxy/first", text);
    let (_, log) = boot(&sandbox, &root, "cproxy.manifests=/etc/cproxy/manifests\n", "/etc/cproxy/first");
    let codes: Vec<_> =
        log.lines().filter(|line| line.split_once(": ").is_some_and(|(_, code)| code.len() == 1)).collect();
    let expected = [
        "status: 3",
        "start: 0",
        "status: 0",
        "status: 0",
        "restart: 0",
        "reload: 0",
        "status: 0",
        "stop: 0",
        "status: 3",
        "other: 2",
    ];
    assert_eq!(codes, expected, "{log}");
    assert!(log.contains("settings were read again"), "{log}");
    assert!(log.contains("10.244.0.1:8080"), "the table is gone:\n{log}");

    let text = "export PATH=/usr/bin:/bin:/usr/sbin:/sbin; rm /var/log/cproxy.log\n\
                does() { sh /etc/cproxy/init.d \"$1\"; echo \"$1: $?\"; }\n\
                does start; until grep -q disabled /var/log/cproxy.log; do sleep 0.1; done\n\
                while pidof cproxy; do sleep 0.1; done > /var/log/pids\n\
                does status; pidof cproxy || echo none runs; grep -c disabled /var/log/cproxy.log\n";
    program(&root, "etc/cproxy/first", text);
    let (_, log) = boot(&sandbox, &root, "cproxy.enabled=false\n", "/etc/cproxy/first");
    assert!(log.ends_with("start: 0\ncproxy is not running\nstatus: 3\nnone runs\n1\n"), "{log}");
}
