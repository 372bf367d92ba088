//! Output of `cargo xtask image`: the same bytes each time, in forms that other tools accept, with scripts that work as
//! documented. The scripts run in namespaces and a cgroup of their own, as in a guest.

#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed call is a failed test")]

mod documents;
mod init_systems;
mod root;
mod scripts;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use cproxy_tests::process::cproxy_binary;

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
        ("-rw-r--r--", "usr/share/cproxy/logrotate"),
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

/// Scripts of init systems in the overlay's directory `usr/share/cproxy`.
const SERVICE_SCRIPTS: [&str; 11] = [
    "init.d",
    "openrc/cproxy",
    "openrc/cproxy-wait",
    "runit/cproxy/check",
    "runit/cproxy/finish",
    "runit/cproxy/log/run",
    "runit/cproxy/run",
    "s6/cproxy/data/check",
    "s6/cproxy/finish",
    "s6/cproxy/log/run",
    "s6/cproxy/run",
];

#[test]
fn shells_accept_the_scripts() {
    let images = repository().join("images");
    let shared = |name: &str| images.join("rootfs/usr/share/cproxy").join(name);
    let own = ["init", "kata/prestart/10-cproxy"].map(|name| images.join(name)).into_iter();
    for script in own.chain(SERVICE_SCRIPTS.map(shared)) {
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
