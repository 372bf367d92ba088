//! Sockets that the kernel opens for a program, such as those of a network file system, or those behind an MPTCP
//! socket.

use std::{fs, net::SocketAddr};

use crate::{
    build,
    fixture::{Cluster, DOWN, GREETING, OFFSET, PODS, WEB, pod_addresses, pod_number, print_report, vips},
};

/// File systems with clients in the kernel.
const FILE_SYSTEMS: [&str; 5] = ["nfs4", "cifs", "9p", "ceph", "afs"];

/// Reports the file systems available for a test on this kernel. There were none on the kernel of the first run; MPTCP
/// stands in for them.
#[test]
fn network_file_systems() {
    let known = fs::read_to_string("/proc/filesystems").unwrap();
    let report = FILE_SYSTEMS.map(|name| {
        let is_known = known.lines().any(|line| line.split_whitespace().last() == Some(name));
        let verdict = if is_known { "in this kernel, but without a test" } else { "not in this kernel" };
        format!("{name}: {verdict}")
    });
    print_report(&report.join("\n"));
}

/// The connecting socket and its state are the kernel's own, so the application's socket shows the pod as its peer.
#[test]
fn mptcp() {
    build::go();
    let cluster = Cluster::start();
    for vip in vips(WEB) {
        let vip = SocketAddr::new(vip, GREETING);
        let mut go = build::go();
        go.args(["client", &format!("mptcp={vip}")]);
        let output = cluster.run(go).success();
        let fields: Vec<_> = output.stdout.trim().split('\t').collect();
        let pod = pod_number(fields[1]);
        assert!(PODS.contains(&pod), "{output:?}");
        let family = usize::from(vip.is_ipv6());
        assert_eq!(fields[2], SocketAddr::new(pod_addresses(pod)[family], GREETING + OFFSET).to_string());
    }
    for vip in vips(DOWN) {
        let mut go = build::go();
        go.args(["client", &format!("mptcp={}", SocketAddr::new(vip, GREETING))]);
        assert!(cluster.run(go).success().stdout.contains("\trefused\t"));
    }
}
