//! Cgroups of the processes that are served: made before the hooks or after them, at mount points of any name, and in
//! cgroup namespaces. Guests with version 1 are in the suite `guests`.

#![expect(clippy::unwrap_used, reason = "a failed call is a failed test")]

use std::{net::SocketAddr, process::Command};

use cproxy_tests::{
    Server, UNMOUNT_CGROUP2,
    manifest::{self, http_service},
    process::{Output, cproxy_binary, run},
    sandbox::{Placement, Sandbox},
    world::{PORT, SYNC, serve_pod_and_vip, start_agent},
};
use rustix::net::{AddressFamily, SocketType, connect, getpeername, socket};

const VIP: &str = "10.96.0.10";
const POD: &str = "10.244.0.1";

fn at(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(address.parse().unwrap(), port)
}

/// The servers and the Service.
fn serve(sandbox: &Sandbox) -> [Server; 2] {
    manifest::write(&sandbox.manifest_dir(), "web.json", http_service("web", VIP, [POD]));
    serve_pod_and_vip(sandbox, POD, VIP)
}

/// Runs a script in a mount namespace, and in a cgroup namespace whose root is the sandbox's cgroup, as in a container.
/// The agent then finds no other cgroup to attach to.
fn confined(sandbox: &Sandbox, script: &str) -> Output {
    let mut command = Command::new("unshare");
    let outside = format!("{UNMOUNT_CGROUP2}; exec unshare --cgroup sh -euc \"$script\"");
    command.args(["--mount", "--propagation", "private", "sh", "-euc", &outside]).env("script", script);
    command.env("cproxy", cproxy_binary()).env("dir", sandbox.dir());
    command.env("CPROXY_PIN_DIR", sandbox.pin_dir()).env("CPROXY_RUN_DIR", sandbox.run_dir());
    run(sandbox, Placement::Hooked, command, "", 2 * SYNC)
}

/// The mount point has each character that /proc/self/mountinfo escapes, and others that scripts trip over.
#[test]
fn processes_of_before_and_cgroups_of_later_are_served_at_a_mount_point_with_blanks() {
    let sandbox = Sandbox::for_test();
    let _servers = serve(&sandbox);
    let output = confined(
        &sandbox,
        r#"
        own="$dir/of \"its\" own	\\040
#"
        mkdir "$own"; mount -t cgroup2 none "$own"; cd "$own"
        export web="curl --http0.9 --silent --max-time 1 http://10.96.0.10/"
        start() { until [ -e "$dir/go" ]; do sleep 0.05; done; echo "$1: $($web)"; }
        start before & before=$!
        mkdir early; (sh -c 'echo $PPID >early/cgroup.procs'; start early) & early=$!
        until grep -q . early/cgroup.procs; do sleep 0.05; done
        $cproxy run --manifests "$dir/manifests" 2>"$dir/log" & agent=$!
        $cproxy wait --timeout 10s
        touch "$dir/go"; wait $before; wait $early
        mkdir -p later/below
        sh -c 'echo 0 >later/below/cgroup.procs; echo "later: $($web)"'
        sh -c 'echo 0 >later/below/cgroup.procs; echo "namespace: $(unshare --cgroup $web)"'
        sh -c 'echo 0 >later/below/cgroup.procs; echo "user: $(setpriv --reuid 65534 --clear-groups $web)"'
        rmdir later/below; mkdir later/below
        sh -c 'echo 0 >later/below/cgroup.procs; echo "again: $($web)"'
        $cproxy check | grep -E ' (cgroup2|attached) '
        kill $agent; wait $agent
        $cproxy cleanup
        rmdir later/below later early
        "#,
    )
    .success();
    for process in ["before", "early", "later", "namespace", "user", "again"] {
        let line = format!("{process}: pod");
        assert!(output.stdout.lines().any(|found| found.starts_with(&line)), "{line}: {output:?}");
    }
    // It is printed in one line.
    let place = "of \"its\" own \\040 #, NOT the cgroup root";
    assert_eq!(output.stdout.matches(place).count(), 2, "{place}: {output:?}");
    let place = "of \"its\" own\u{fffd}\\040\u{fffd}#, NOT the cgroup root";
    assert!(output.stderr.contains(place), "{place}: {output:?}");
}

/// A socket belongs to the cgroup in which it was made, whoever connects it.
#[test]
fn sockets_of_before_the_hooks_are_served() {
    let sandbox = Sandbox::for_test();
    let _servers = serve(&sandbox);
    let tcp = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    let _agent = start_agent(&sandbox);
    connect(&tcp, &at(VIP, PORT)).unwrap();
    assert_eq!(SocketAddr::try_from(getpeername(&tcp).unwrap().unwrap()).unwrap(), at(VIP, PORT));
}
