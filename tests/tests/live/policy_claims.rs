//! Claims about who can undo a network policy, each by what it says.

use std::{
    net::{SocketAddr, SocketAddrV4, UdpSocket},
    process::Command,
};

use cproxy_tests::{
    echo,
    process::{cproxy_binary, run},
    sandbox::Placement,
    world::{SYNC, TCP},
};
use rustix::net::{AddressFamily, SendFlags, SocketType, ipproto, sendto, socket};

use crate::policy::{CLIENT, DENIED, OTHER, Pods, REFUSED, WEB, both, connects, kind};

/// A user without capabilities.
const NOBODY: [&str; 4] = ["--reuid=65534", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all"];

#[test]
fn a_process_without_rights_cannot_undo_a_policy() {
    let pods = Pods::new();
    pods.write(&[both()], "other");
    let _agent = pods.enforce();
    let _client = echo::tcp_in(&pods.client, (CLIENT.v4, TCP), "client");
    let _other = echo::tcp_in(&pods.other, (OTHER.v4, TCP), "other");
    let as_nobody = |script: &str| {
        let mut command = Command::new("setpriv");
        command.args(NOBODY).args(["bash", "-c", script]);
        run(&pods.sandbox, Placement::Hooked, command, "", SYNC)
    };
    let open = |host: std::net::Ipv4Addr| as_nobody(&format!("exec 3<>/dev/tcp/{host}/{TCP} && head -c 6 <&3"));
    assert_eq!(open(CLIENT.v4).success().stdout, "client");
    let denied = open(OTHER.v4);
    assert!(denied.code != 0 && denied.stderr.contains("Operation not permitted"), "{denied:?}");
    // Neither pins nor exempt cgroups, nor the command that removes a policy, are its own.
    let pins = pods.sandbox.pin_dir();
    for script in [
        format!("rm -rf {0}/* {0}", pins.display()),
        format!("echo 0 > {}/cgroup.procs", pods.sandbox.cgroup_beside().display()),
        format!("{} cleanup --policy-too --pin-dir {}", cproxy_binary().display(), pins.display()),
    ] {
        assert!(as_nobody(&script).code != 0, "{script}");
    }
    assert_eq!(kind(connects(OTHER.v4, TCP)), DENIED);
}

/// A sender without any policy cannot change the verdict of a receiver's guest.
#[test]
fn ingress_holds_against_a_sender_that_no_policy_binds() {
    let pods = Pods::new();
    pods.write(&[both()], "other");
    let _agent = pods.enforce();
    let _web = echo::tcp(&pods.sandbox, (WEB.v4, TCP), "web");
    // All of root's rights at the sender, and any source port.
    for _ in 0..3 {
        assert_eq!(pods.other.run(|| kind(connects(WEB.v4, TCP))), REFUSED);
    }
    assert_eq!(pods.client.run(|| kind(connects(WEB.v4, TCP))), Ok(()));
}

/// Why containers of a pod with a policy must not have CAP_NET_RAW.
#[test]
fn raw_sockets_send_past_a_policy() {
    let pods = Pods::new();
    pods.write(&[both()], "other");
    let _agent = pods.enforce();
    let to = SocketAddrV4::new(OTHER.v4, TCP);
    let receiver = pods.other.run(|| UdpSocket::bind(to)).unwrap();
    receiver.set_read_timeout(Some(SYNC)).unwrap();
    assert_eq!(kind(UdpSocket::bind((WEB.v4, 0)).unwrap().send_to(b"?", to)), DENIED);
    let raw = socket(AddressFamily::INET, SocketType::RAW, Some(ipproto::UDP)).unwrap();
    // A header of UDP: ports, length, no checksum.
    let mut datagram = Vec::new();
    for field in [4_711, TCP, 9, 0] {
        datagram.extend(field.to_be_bytes());
    }
    datagram.push(b'!');
    sendto(&raw, &datagram, SendFlags::empty(), &SocketAddr::V4(SocketAddrV4::new(OTHER.v4, 0))).unwrap();
    let mut buffer = [0; 8];
    assert_eq!(receiver.recv(&mut buffer).unwrap(), 1);
    assert_eq!(buffer.first(), Some(&b'!'));
}
