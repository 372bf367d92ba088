//! The run directory and the pin directory on a machine with other users, who know their paths and may create them
//! first.

#![expect(clippy::unwrap_used, reason = "a failed call is a failed test")]

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use cproxy_tests::{
    manifest::{self, Service},
    process::{Agent, Daemon, Output, cproxy, cproxy_binary, run},
    sandbox::{Placement, Sandbox},
};

const SYNC: Duration = Duration::from_secs(10);
const OTHER_USER: [&str; 3] = ["--reuid=65534", "--regid=65534", "--clear-groups"];
const PRECIOUS: &str = "root's own\n";

/// A command of another, unprivileged user.
fn of_other_user(sandbox: &Sandbox, program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(OTHER_USER).arg(program).env("dir", sandbox.dir()).env("run", sandbox.run_dir());
    command
}

/// Runs a shell script as another user.
fn as_other_user(sandbox: &Sandbox, script: &str) -> Output {
    let mut command = of_other_user(sandbox, Path::new("/bin/sh"));
    command.args(["-euc", script]);
    run(sandbox, Placement::Unhooked, command, "", SYNC)
}

fn agent(sandbox: &Sandbox) -> Agent<'_> {
    let service = Service::new("web").cluster_ips(["10.96.0.10"]).tcp("http", 80, 8080);
    manifest::write(&sandbox.manifest_dir(), "web.json", [service.into()]);
    Agent::new(sandbox).manifests(sandbox.manifest_dir())
}

/// Checks that the agent ends by itself with these words.
#[track_caller]
fn assert_refused(agent: Agent<'_>, words: &[&str]) {
    let mut agent = agent.spawn();
    assert!(!agent.wait(SYNC).unwrap().success());
    let log = agent.log();
    let line = log.lines().find(|line| line.starts_with("cproxy: ")).unwrap();
    assert!(words.iter().all(|word| line.contains(word)), "{words:?}: {line}");
}

/// A directory with these permissions, and a file beside it that only its owner may access.
fn place(sandbox: &Sandbox, name: &str, mode: u32) -> (PathBuf, PathBuf) {
    let (dir, precious) = (sandbox.dir().join(name), sandbox.dir().join("precious"));
    fs::create_dir(&dir).unwrap();
    fs::set_permissions(&dir, fs::Permissions::from_mode(mode)).unwrap();
    fs::write(&precious, PRECIOUS).unwrap();
    (dir, precious)
}

#[test]
fn other_users_can_wait_for_the_agent_and_cannot_keep_it_from_starting() {
    let sandbox = Sandbox::for_test();
    agent(&sandbox).start().stop();

    let mut lock = of_other_user(&sandbox, Path::new("flock"));
    lock.arg("--nonblock").arg(sandbox.run_dir()).args(["sh", "-c", "echo held; exec sleep 60"]);
    let mut holder = Daemon::spawn(&sandbox, "flock", Placement::Unhooked, lock);
    holder.wait_log("held", SYNC);
    let mut running = agent(&sandbox).start();

    let lock = as_other_user(&sandbox, "for file in $run/*; do flock --nonblock $file true && echo $file; done; true");
    let locked: Vec<_> = lock.stdout.lines().map(|path| path.rsplit('/').next().unwrap()).collect();
    assert!(!locked.is_empty() && !locked.contains(&"lock"), "{lock:?}");
    let mut wait = of_other_user(&sandbox, &cproxy_binary());
    wait.args(["wait", "--timeout", "0", "--run-dir"]).arg(sandbox.run_dir());
    run(&sandbox, Placement::Unhooked, wait, "", SYNC).success();
    running.stop();
}

#[test]
fn a_run_directory_of_another_user_is_refused_and_nothing_in_it_is_followed() {
    let sandbox = Sandbox::for_test();
    let (_, precious) = place(&sandbox, "open", 0o777);
    let links = "mkdir $dir/open/run; for name in .ready .new failed; do ln -s $dir/precious $dir/open/run/$name; done";
    as_other_user(&sandbox, links).success();
    let run_dir = sandbox.dir().join("open/run");
    assert_refused(agent(&sandbox).run_dir(&run_dir), &["--run-dir", "open/run: made by another user (uid 65534)"]);
    assert_eq!(fs::read_to_string(&precious).unwrap(), PRECIOUS);
    assert_eq!(fs::read_dir(&run_dir).unwrap().count(), 3, "nothing was taken away, nor left");

    let check = cproxy(&sandbox, &["check", "--run-dir", run_dir.to_str().unwrap()]);
    let said = check.stdout.lines().find(|line| line.contains(" run_dir ")).unwrap();
    assert!(check.code == 1 && said.contains("made by another user"), "{check:?}");

    std::os::unix::fs::symlink(sandbox.run_dir(), sandbox.dir().join("link")).unwrap();
    for name in ["link", "link/"] {
        assert_refused(agent(&sandbox).run_dir(sandbox.dir().join(name)), &["--run-dir", "a symbolic link"]);
    }
}

/// An `emptyDir` has these permissions: the kubelet lets all users write there.
#[test]
fn in_a_run_directory_that_all_can_write_no_link_is_followed() {
    let sandbox = Sandbox::for_test();
    let (run_dir, precious) = place(&sandbox, "shared", 0o777);
    let links = "for name in .ready .new ready limited failed unusable cproxy.sock; do \
                 ln -s $dir/precious $dir/shared/$name; done";
    as_other_user(&sandbox, links).success();
    let mut running = agent(&sandbox).run_dir(&run_dir).spawn();
    // The path existed before, as a link.
    running.wait_log("ready after", SYNC);
    assert!(fs::symlink_metadata(run_dir.join("ready")).unwrap().is_file());
    running.stop();
    let mut failing = Agent::new(&sandbox).manifests("/nowhere").run_dir(&run_dir).spawn();
    assert!(!failing.wait(SYNC).unwrap().success());
    assert!(fs::read_to_string(run_dir.join("failed")).unwrap().contains("/nowhere"));
    assert_eq!(fs::read_to_string(&precious).unwrap(), PRECIOUS);

    let lock = "rm -f $dir/shared/lock; touch $dir/shared/lock";
    let links = "rm -f $dir/shared/lock; ln -s $dir/precious $dir/shared/lock";
    for script in [lock, links] {
        as_other_user(&sandbox, script).success();
        assert_refused(agent(&sandbox).run_dir(&run_dir), &["--run-dir", "`lock`", "remove that file"]);
    }
}

#[test]
fn a_pin_directory_of_another_user_is_refused_and_cleanup_follows_nothing() {
    let sandbox = Sandbox::for_test();
    let (treasure, _) = place(&sandbox, "treasure", 0o755);
    fs::write(treasure.join("file"), PRECIOUS).unwrap();
    as_other_user(&sandbox, "mkdir $dir/bpf/cproxy").success();
    assert_refused(agent(&sandbox), &["bpf/cproxy: made by another user (uid 65534)"]);

    as_other_user(&sandbox, "ln -s $dir/treasure $dir/bpf/cproxy/v99").success();
    let cleanup = cproxy(&sandbox, &["cleanup"]);
    assert!(cleanup.code == 1 && cleanup.stderr.contains("v99: a symbolic link"), "{cleanup:?}");
    assert_eq!(fs::read_to_string(treasure.join("file")).unwrap(), PRECIOUS);
}

#[test]
fn another_user_learns_whether_the_agent_lives() {
    let sandbox = Sandbox::for_test();
    let mut agent = agent(&sandbox).start();
    for path in [sandbox.dir().to_owned(), sandbox.run_dir()] {
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let as_other_user = |arguments: &[&str]| {
        let mut command = of_other_user(&sandbox, &cproxy_binary());
        command.args(arguments).env("CPROXY_RUN_DIR", sandbox.run_dir()).env("CPROXY_PIN_DIR", sandbox.pin_dir());
        run(&sandbox, Placement::Unhooked, command, "", SYNC)
    };
    let line = |check: &Output, name: &str| -> String {
        let mut lines = check.stdout.lines().filter(|line| line.split_whitespace().nth(1) == Some(name));
        lines.next().unwrap_or_else(|| panic!("{name}: {check:?}")).to_owned()
    };
    let check = as_other_user(&["check"]);
    assert!(line(&check, "agent").starts_with("ok"), "{check:?}");
    for name in ["hooks", "tasks", "source", "confinement"] {
        let line = line(&check, name);
        assert!(line.starts_with("unknown") && line.contains("run this as root"), "{line}");
    }
    as_other_user(&["wait", "--timeout", "1s"]).success();
    agent.kill();
    let check = as_other_user(&["check"]);
    assert!(line(&check, "agent").starts_with("degraded  agent"), "{check:?}");
    let waited = as_other_user(&["wait", "--timeout", "50ms"]).failure(1);
    assert!(waited.stderr.contains("the agent was killed") && waited.stderr.contains("start cproxy run"), "{waited:?}");
}

#[test]
fn a_request_of_another_user_who_can_connect_is_refused() {
    let sandbox = Sandbox::for_test();
    let mut agent = agent(&sandbox).start();
    cproxy(&sandbox, &["reseed"]).success();
    for path in [sandbox.dir().to_owned(), sandbox.run_dir(), sandbox.run_dir().join("cproxy.sock")] {
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
    }
    let mut command = of_other_user(&sandbox, &cproxy_binary());
    command.args(["reseed", "--run-dir"]).arg(sandbox.run_dir());
    let refused = run(&sandbox, Placement::Unhooked, command, "", SYNC);
    assert_eq!(refused.code, 1, "{}", refused.stderr);
    agent.wait_log("a request of another user is refused", SYNC);
}

/// Anyone can make files there, in the place of the agent's.
#[test]
fn in_a_run_directory_that_all_can_write_only_the_owners_files_are_believed() {
    let sandbox = Sandbox::for_test();
    let (run_dir, _) = place(&sandbox, "shared", 0o777);
    let made = |name: &str| {
        let path = run_dir.join(name);
        fs::remove_file(&path).ok();
        path
    };
    let give = |path: &Path| std::os::unix::fs::chown(path, Some(65534), None).unwrap();
    let socket = std::os::unix::net::UnixListener::bind(made("cproxy.sock")).unwrap();
    give(&run_dir.join("cproxy.sock"));
    fs::write(made("ready"), "").unwrap();
    let wait = |for_service: &[&str]| {
        let arguments = ["wait", "--timeout", "50ms", "--run-dir", run_dir.to_str().unwrap()];
        cproxy(&sandbox, &[&arguments, for_service].concat()).failure(1).stderr
    };
    let of_another = |name: &str| format!("its file `{name}` was made by another user (uid 65534)");
    let said = wait(&["--for", "default/web"]);
    assert!(said.contains("the agent was killed"), "{said}");
    give(&run_dir.join("ready"));
    let said = wait(&[]);
    assert!(said.contains(&of_another("cproxy.sock")), "{said}");
    drop(socket);

    for name in ["cproxy.sock", "ready"] {
        made(name);
    }
    let mut running = agent(&sandbox).run_dir(&run_dir).spawn();
    running.wait_log("ready after", SYNC);
    let as_other_user = |arguments: &[&str]| {
        let mut command = of_other_user(&sandbox, &cproxy_binary());
        command.args(arguments).env("CPROXY_RUN_DIR", &run_dir).env("CPROXY_PIN_DIR", sandbox.pin_dir());
        run(&sandbox, Placement::Unhooked, command, "", SYNC)
    };
    fs::set_permissions(sandbox.dir(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(made("alive")).unwrap();
    as_other_user(&["wait", "--timeout", "1s"]).success();
    made("ready");
    cproxy(&sandbox, &["check", "--run-dir", run_dir.to_str().unwrap()]);
    as_other_user(&["wait", "--timeout", "1s"]).success();
    running.kill();
    let said = as_other_user(&["wait", "--timeout", "50ms"]).failure(1).stderr;
    assert!(said.contains("its file `alive` is no socket: remove it"), "{said}");
    fs::remove_dir(run_dir.join("alive")).unwrap();
    let _socket = std::os::unix::net::UnixDatagram::bind(made("alive")).unwrap();
    give(&run_dir.join("alive"));
    let said = as_other_user(&["wait", "--timeout", "50ms"]).failure(1).stderr;
    assert!(said.contains(&of_another("alive")), "{said}");
}
