//! The arrangements of cgroups in guests, one after the other in one guest: version 2 alone, both versions, and version
//! 1 alone, as in Kata by default. In each, processes from before the agent, in cgroups that are made later, and in a
//! cgroup namespace of their own connect through a ClusterIP.

use std::path::Path;

use cproxy_tests::{
    guest::{GuestImage, Kernel},
    http,
    manifest::{self, http_service},
    sandbox::Sandbox,
};

use crate::common::{PATIENCE, values_of};

const VIP: &str = "10.96.0.20";
const POD: &str = "10.244.0.1";

/// Host program, as busybox's does not know cgroup namespaces.
const UNSHARE: &str = "/usr/bin/unshare";

/// Shell functions of the processes.
const FUNCTIONS: &str = r#"
# enter NAME: moves this shell into a cgroup of each hierarchy that the machine has mounted.
enter() {
    for mount in $(awk '/ - cgroup/ && $5 !~ "^/run/" {print $5}' /proc/self/mountinfo); do
        dir=$(printf %b "$mount")/$1
        mkdir -p "$dir"
        # As container runtimes and network plugins do.
        [ ! -e "$dir/net_cls.classid" ] || echo 0x100001 >"$dir/net_cls.classid"
        [ ! -e "$dir/net_prio.ifpriomap" ] || echo "lo 5" >"$dir/net_prio.ifpriomap"
        echo $$ >"$dir/cgroup.procs"
    done
}
web() { timeout 10 wget -qO- http://VIP 2>&1; }
"#;

const MACHINE: &str = r#"#!/bin/busybox sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin NO_COLOR=1
mount -t sysfs sysfs /sys; mount -t devtmpfs dev /dev; mount -t tmpfs tmpfs /run
mount -t bpf -o mode=700 bpf /sys/fs/bpf
ip link set lo up
try() {
    mkfifo /run/go-$1
    sh -c '. /guest/functions; enter before; read -r _ <$1; echo "$0 before: $(web)"' $1 /run/go-$1 &
    before=$!
    until grep -q before /proc/$before/cgroup; do sleep 0.1; done
    cproxy run --manifests /etc/cproxy/manifests 2>/run/log &
    agent=$!
    cproxy wait --timeout 60s || cat /run/log
    echo "$1 check: $(cproxy check | grep -E ' (cgroup2|attached) ' | tr -s ' ' | tr '\n' ';')"
    echo "$1 warnings: $(grep -c ' WARN ' /run/log)"
    echo >/run/go-$1; wait $before
    sh -c '. /guest/functions; enter later/below; echo "$0 later: $(web)"' $1
    sh -c '. /guest/functions; enter later/confined
        echo "$0 confined: $(/usr/bin/unshare --cgroup sh -c ". /guest/functions; web")"' $1
    kill $agent; wait $agent
    cproxy cleanup
}
mount -t cgroup2 cgroup2 /sys/fs/cgroup
try v2
umount /sys/fs/cgroup
mount -t tmpfs tmpfs /sys/fs/cgroup
for controllers in cpu,cpuacct memory pids devices freezer net_cls,net_prio; do
    mkdir /sys/fs/cgroup/$controllers
    mount -t cgroup -o $controllers cgroup /sys/fs/cgroup/$controllers && echo "v1 mounted: $controllers"
done
mkdir /sys/fs/cgroup/systemd "/sys/fs/cgroup/uni fied"
mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
mount -t cgroup2 cgroup2 "/sys/fs/cgroup/uni fied"
try hybrid
umount "/sys/fs/cgroup/uni fied"
try v1
poweroff -f
"#;

#[test]
fn every_arrangement_of_cgroups_is_served() {
    let sandbox = Sandbox::for_test();
    sandbox.add_address(POD);
    let _pod = http::serve(&sandbox, (POD, 8080), "pod-1");
    let console = GuestImage::new(&sandbox, &Kernel::from_env())
        .memory_mib(256)
        .parameter("GUEST_INIT=/guest/machine")
        .program("guest/machine", MACHINE)
        .file("guest/functions", FUNCTIONS.replace("VIP", VIP))
        .file("etc/cproxy/manifests/web.json", manifest::list(http_service("web", VIP, [POD])))
        .program_of_host(Path::new(UNSHARE))
        .start()
        .wait_end(PATIENCE);
    for (arrangement, place) in
        [("v2", "/sys/fs/cgroup"), ("hybrid", "/sys/fs/cgroup/uni fied"), ("v1", "/run/cproxy/cgroup2")]
    {
        let answers = |what: &str| values_of(&console, &format!("{arrangement} {what}:"));
        assert_eq!(answers("check"), [format!("ok cgroup2 {place};ok attached to {place};")], "{console}");
        assert_eq!(answers("warnings"), ["0"], "{console}");
        for process in ["before", "later", "confined"] {
            assert_eq!(answers(process), ["pod-1"], "{arrangement}, {process}: {console}");
        }
    }
    // Kernels differ in the controllers that version 1 has: since 6.11, memory is an option of its own.
    assert!(!values_of(&console, "v1 mounted:").is_empty(), "there is no controller of version 1: {console}");
}
