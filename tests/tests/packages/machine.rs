//! A machine: processes in namespaces of their own, over a root file system that no test changes. It is a Debian with a
//! running systemd, which `cargo xtask test` makes with debootstrap, or any other root. What a test runs in it is also
//! written into a transcript: a file for each machine in the directory `transcripts` of cargo's output.

use std::{
    env,
    fs::{self, File},
    io::Write as _,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use cproxy_tests::{
    Done, Server,
    guest::path_from_env,
    http,
    manifest::{self, http_service},
    process::{Daemon, Output, eventually, run},
    sandbox::{Placement, Sandbox},
};

/// Limit on the boot, and on each command.
const PATIENCE: Duration = Duration::from_secs(120);

/// Variable with the root file system.
const DEBIAN_VARIABLE: &str = "CPROXY_DEBIAN";
/// Variable with a release for this machine's architecture.
const RELEASE_VARIABLE: &str = "CPROXY_RELEASE";

pub(crate) const VIP: &str = "10.96.0.20";
const POD: &str = "10.244.0.1";

/// Set-up of the machine, as a container manager makes it: file systems of its own, the settings of this machine's
/// kernel read-only, and a first process. The arguments are the root file system, a directory for changes to it, one
/// for the kernel's use, the mount point, and the script of the first process.
const BOOT: &str = r#"set -eu
mount --make-rprivate /
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2,workdir=$3" "$4"
cd "$4"
mount -t proc proc proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t bpf bpf sys/fs/bpf
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=755 tmpfs dev
for node in null zero full random urandom tty; do : >"dev/$node"; mount --bind "/dev/$node" "dev/$node"; done
ln -s /proc/self/fd dev/fd
mkdir -p .before
pivot_root . .before
exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    sh -c "umount -l /.before; mount --make-rshared /; : >/run/is-up; $5"
"#;
/// First process that is systemd, and one that does nothing.
const SYSTEMD: &str = "exec /lib/systemd/systemd --log-color=0";
const IDLE: &str = "while :; do sleep 1000 & wait $!; done";

/// The machine.
pub(crate) struct Machine<'s> {
    sandbox: &'s Sandbox,
    _daemon: Daemon,
    /// Process id of its first process, outside.
    init: String,
    transcript: File,
}

impl<'s> Machine<'s> {
    /// Boots Debian with systemd.
    pub(crate) fn boot(sandbox: &'s Sandbox) -> Self {
        let machine = Self::with_first_process(sandbox, &debian(), SYSTEMD);
        eventually(PATIENCE, "systemd has started its units", || {
            let state = machine.run("[ -e /run/systemd/system ] && systemctl is-system-running");
            if ["running", "degraded"].contains(&state.stdout.trim()) { Ok(()) } else { Err(format!("{state:?}")) }
        });
        machine
    }

    /// Starts a machine with this root file system, whose first process does nothing.
    pub(crate) fn idle(sandbox: &'s Sandbox, root: &Path) -> Self {
        Self::with_first_process(sandbox, root, IDLE)
    }

    fn with_first_process(sandbox: &'s Sandbox, root: &Path, first: &str) -> Self {
        let directories = ["changes", "work", "root"].map(|name| sandbox.dir().join(name));
        for directory in &directories {
            fs::create_dir(directory).unwrap();
        }
        let mut unshare = Command::new("unshare");
        unshare.args(["--mount", "--pid", "--fork", "--kill-child", "--cgroup", "--uts", "--ipc", "sh", "-c", BOOT]);
        unshare.arg("boot").arg(root).args(directories).arg(first);
        let mut daemon = Daemon::spawn(sandbox, "machine", Placement::Hooked, unshare);
        let children = format!("/proc/{0}/task/{0}/children", daemon.pid());
        let init = daemon.wait_until(PATIENCE, "its first process", |_| {
            let children = fs::read_to_string(&children).unwrap_or_default();
            children.split_whitespace().next().map(str::to_owned).ok_or("not there yet")
        });
        let machine = Self { sandbox, _daemon: daemon, init, transcript: transcript() };
        eventually(PATIENCE, "the machine has its file systems", || {
            // Its first process may still be in the file systems of this machine.
            let output = machine.inside("[ -e /run/is-up ]");
            if output.code == 0 { Ok(()) } else { Err(format!("{output:?}")) }
        });
        machine
    }

    /// Runs a script in it.
    pub(crate) fn run(&self, script: &str) -> Output {
        let output = self.inside(script);
        let Output { code, stdout, stderr } = &output;
        let failed = if *code == 0 { String::new() } else { format!("[{code}]\n") };
        write!(&self.transcript, "# {script}\n{stdout}{stderr}{failed}").unwrap();
        output
    }

    fn inside(&self, script: &str) -> Output {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.init, "--all", "--root", "--wd", "env", "-i", "LC_ALL=C"]);
        command.args(["DEBIAN_FRONTEND=noninteractive", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "sh", "-c", script]);
        run(self.sandbox, Placement::Hooked, command, "", PATIENCE)
    }

    /// Runs a script that must succeed, and returns both of its outputs.
    pub(crate) fn does(&self, script: &str) -> String {
        let output = self.run(script);
        assert_eq!(output.code, 0, "{script}: {}{}", output.stdout, output.stderr);
        output.stdout + &output.stderr
    }

    /// A path of the machine, from outside.
    pub(crate) fn path(&self, inside: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root", self.init)).join(inside.trim_start_matches('/'))
    }

    /// Copies a file into the machine and returns its path there.
    pub(crate) fn bring(&self, file: &Path) -> String {
        let inside = format!("/var/tmp/{}", file.file_name().unwrap().to_str().unwrap());
        fs::copy(file, self.path(&inside)).unwrap();
        inside
    }

    /// Serves a Service and returns its server: settings in the agent's file, and manifests.
    pub(crate) fn with_service(&self) -> Server {
        self.sandbox.add_address(POD);
        let server = http::serve(self.sandbox, (POD, 8080), "pod-1");
        let manifests = self.path("/etc/cproxy/manifests");
        fs::create_dir_all(&manifests).unwrap();
        manifest::write(&manifests, "web.json", http_service("web", VIP, [POD]));
        server
    }

    /// Starts the agent by its unit, and waits for the table.
    pub(crate) fn start(&self) {
        self.does("systemctl start --no-block cproxy && cproxy wait --timeout 60s || { journalctl -u cproxy; false; }");
    }

    /// Asserts that the Service answers.
    pub(crate) fn assert_served(&self) {
        assert_eq!(http::get((VIP, 80), "/").expect("the Service answers"), "pod-1\n");
    }

    /// Runs `change` while another thread calls the Service all the time. Each call must be answered.
    pub(crate) fn without_interruption<T>(&self, change: impl FnOnce() -> T) -> T {
        let end = AtomicBool::new(false);
        thread::scope(|scope| {
            let calls = scope.spawn(|| {
                self.sandbox.enter();
                let mut calls = 0;
                while !end.load(Ordering::Relaxed) {
                    http::get((VIP, 80), "/").unwrap_or_else(|error| panic!("call {calls}: {error}"));
                    calls += 1;
                }
                calls
            });
            let result = {
                let _done = Done(&end);
                change()
            };
            assert!(calls.join().expect("a call was not answered") > 0);
            result
        })
    }
}

/// The file of the test's next machine.
fn transcript() -> File {
    let program = env::current_exe().unwrap();
    // target/PROFILE/deps/PROGRAM
    let directory = program.ancestors().nth(3).unwrap().join("transcripts");
    fs::create_dir_all(&directory).unwrap();
    let name = thread::current().name().unwrap_or("main").replace("::", ".");
    File::create(directory.join(format!("{name}.txt"))).unwrap()
}

/// Debian's root file system.
pub(crate) fn debian() -> PathBuf {
    path_from_env(DEBIAN_VARIABLE, "cargo xtask test")
}

/// A file of the release, by the start and the end of its name.
pub(crate) fn release_file(start: &str, end: &str) -> PathBuf {
    let entries = fs::read_dir(release()).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| name.starts_with(start) && name.ends_with(end));
    assert_eq!(names.len(), 1, "{start}*{end}: {names:?}");
    release().join(names.concat())
}

/// The directory of the release.
pub(crate) fn release() -> PathBuf {
    path_from_env(RELEASE_VARIABLE, "cargo xtask test")
}

/// The agent's package.
pub(crate) fn agent_package() -> PathBuf {
    release_file("cproxy_", ".deb")
}

/// The same package with another version, after a change to its files.
pub(crate) fn repacked(sandbox: &Sandbox, version: &str, change: impl FnOnce(&Path)) -> PathBuf {
    let files = sandbox.dir().join(format!("package-{version}"));
    let package = sandbox.dir().join(format!("cproxy_{version}.deb"));
    let dpkg_deb = |arguments: &[&Path]| {
        let mut command = Command::new("dpkg-deb");
        command.args(arguments);
        run(sandbox, Placement::Unhooked, command, "", PATIENCE).success();
    };
    dpkg_deb(&["--raw-extract".as_ref(), &agent_package(), &files]);
    let control = files.join("DEBIAN/control");
    let text = fs::read_to_string(&control).unwrap();
    let lines = text.lines().map(|line| match line.starts_with("Version: ") {
        true => format!("Version: {version}\n"),
        false => format!("{line}\n"),
    });
    fs::write(&control, lines.collect::<String>()).unwrap();
    // They are of the former files.
    fs::remove_file(files.join("DEBIAN/md5sums")).unwrap();
    change(&files);
    dpkg_deb(&["--build".as_ref(), "--root-owner-group".as_ref(), "-Zgzip".as_ref(), &files, &package]);
    fs::remove_dir_all(&files).unwrap();
    package
}
