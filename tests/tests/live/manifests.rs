//! Manifests on a file system that others also change, as a host does with a guest's.

#![expect(clippy::unwrap_used, reason = "a failed call is a failed test")]

use std::{fs, path::Path, process::Command, thread, time::Duration};

use cproxy_tests::{
    manifest::{self, http_service},
    process::{Agent, Daemon, RunningAgent, eventually},
    sandbox::{Placement, Sandbox},
    seccomp::{use_up_inotify_instances, use_up_inotify_watches},
    world::{SYNC, cluster_ip, pod, rows, start_agent},
};
use rustix::fs::statfs;

/// Time for two scans, and for the file system's cache of one second.
const LOOKS: Duration = Duration::from_secs(30);
/// Magic number of `statfs(2)` (include/uapi/linux/magic.h).
const FUSE_SUPER_MAGIC: u64 = 0x6573_5546;

fn write_service(dir: &Path, name: &str, number: u8) {
    let objects = http_service(name, cluster_ip(number).v4, [pod(number).v4]);
    manifest::write(dir, &format!("{name}.json"), objects);
}

/// The backends of all frontends.
fn backends(sandbox: &Sandbox) -> String {
    let rows = rows(sandbox, "services");
    let addresses = rows.iter().filter_map(|row| row.pointer("/backends/0/address"));
    addresses.map(|address| format!("{} ", address.as_str().unwrap())).collect()
}

fn wait_backends(sandbox: &Sandbox, expected: &str) {
    eventually(LOOKS, format!("backends {expected}"), || {
        let found = backends(sandbox);
        if found == expected { Ok(()) } else { Err(found) }
    });
}

/// Changes below a shared mount, as a host makes them, raise no event in the guest.
#[test]
fn changes_by_others_are_found_on_a_shared_file_system() {
    let sandbox = Sandbox::for_test();
    let [host, guest] = ["host", "guest"].map(|name| sandbox.dir().join(name));
    fs::create_dir(&host).unwrap();
    fs::create_dir(&guest).unwrap();
    let mut bindfs = Command::new("bindfs");
    bindfs.arg("-f").arg(&host).arg(&guest);
    let mut shared = Daemon::spawn(&sandbox, "bindfs", Placement::Unhooked, bindfs);
    shared.wait_until(SYNC, "the file system is mounted", |_| {
        let magic = statfs(&guest).unwrap().f_type as u64;
        if magic == FUSE_SUPER_MAGIC { Ok(()) } else { Err(format!("{magic:#x}")) }
    });

    write_service(&host, "a", 1);
    let mut agent = Agent::new(&sandbox).manifests(&guest).start();
    assert_eq!(backends(&sandbox), "10.244.0.1 ");
    write_service(&host, "a", 2);
    write_service(&host, "b", 3);
    wait_backends(&sandbox, "10.244.0.2 10.244.0.3 ");
    fs::remove_file(host.join("a.json")).unwrap();
    wait_backends(&sandbox, "10.244.0.3 ");
    agent.stop();
    shared.stop();
}

#[test]
fn without_inotify_manifests_are_polled_and_the_cause_is_named() {
    for (forbid, cause) in [
        (use_up_inotify_instances as fn(), "inotify: Too many open files (fs.inotify.max_user_instances"),
        (use_up_inotify_watches, "inotify: No space left on device (fs.inotify.max_user_watches"),
    ] {
        let sandbox = Sandbox::for_test();
        let dir = sandbox.manifest_dir();
        write_service(&dir, "a", 1);
        let follow = || {
            sandbox.enter();
            forbid();
            let mut agent = Agent::new(&sandbox).manifests(&dir).start();
            agent.wait_log(cause, SYNC);
            write_service(&dir, "a", 2);
            write_service(&dir, "b", 3);
            wait_backends(&sandbox, "10.244.0.2 10.244.0.3 ");
            fs::remove_dir_all(&dir).unwrap();
            fs::create_dir(&dir).unwrap();
            write_service(&dir, "c", 1);
            wait_backends(&sandbox, "10.244.0.1 ");
            agent.stop();
        };
        // The agent ends with the thread that started it.
        thread::scope(|scope| scope.spawn(follow).join().unwrap());
    }
}

/// The number of times that the agent has been woken.
fn wake_ups(agent: &RunningAgent) -> String {
    let status = fs::read_to_string(format!("/proc/{}/status", agent.pid())).unwrap();
    status.lines().find(|line| line.starts_with("voluntary_ctxt_switches:")).unwrap().to_owned()
}

#[test]
fn at_rest_nothing_wakes_an_agent_with_manifests_of_its_own_machine() {
    let sandbox = Sandbox::for_test();
    write_service(&sandbox.manifest_dir(), "a", 1);
    let mut agent = start_agent(&sandbox);
    // Work after the start takes as long as other tests let it.
    eventually(SYNC * 6, "five seconds without a wake-up", || {
        let before = wake_ups(&agent);
        thread::sleep(Duration::from_secs(5));
        let after = wake_ups(&agent);
        if after == before { Ok(()) } else { Err(format!("{before}, then {after}")) }
    });
    agent.stop();
}
