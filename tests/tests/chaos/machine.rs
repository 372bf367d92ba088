//! Events of the machine: MPTCP connects, cgroups and addresses that come and go.

use std::{fs, net::Ipv4Addr, num::NonZeroU32, process::Command};

use cproxy_ebpf::TCP_PLACES;
use cproxy_tests::{
    process::{eventually, run},
    random::Random,
    sandbox::{Placement, Sandbox},
    storm::addresses::cluster_ip,
    world::{Form, PORT},
};
use rustix::{
    io::Errno,
    net::{AddressFamily, Protocol, SocketType, connect, socket},
};

use crate::{
    PATIENCE,
    cluster::{ECHO, ECHO_NAME, REFUSING},
};

const MPTCP: Protocol = Protocol::from_raw(NonZeroU32::new(262).expect("not zero"));

/// Cgroups that are made at once.
const CGROUPS: usize = 4;

/// Connects so often that these sockets take all places, which they keep.
pub(crate) fn take_places() {
    for _ in 0..4 * TCP_PLACES {
        let socket = socket(AddressFamily::INET, SocketType::STREAM, Some(MPTCP)).unwrap();
        let connected = connect(&socket, &Form::V4.address(cluster_ip(REFUSING), PORT));
        assert_eq!(connected, Err(Errno::CONNREFUSED));
    }
}

/// Makes cgroups, connects in each, and removes them.
pub(crate) fn use_cgroups(sandbox: &Sandbox) {
    for number in 0..CGROUPS {
        let outer = sandbox.cgroup().join(format!("pod-{number}"));
        let inner = outer.join("container");
        fs::create_dir_all(&inner).unwrap();
        let mut client = Command::new("sh");
        let address = Form::V4.address(cluster_ip(ECHO), PORT);
        // The server answers at once, and keeps the connection.
        let script = "echo $$ > $dir/cgroup.procs
            curl --http0.9 --silent --no-buffer --max-time 60 --output $out http://$address/ &
            until [ -s $out ] || ! kill -0 $!; do sleep 0.05; done
            kill $! || true
            cat $out; rm $out";
        client.args(["-euc", script]).env("dir", &inner).env("address", address.to_string());
        client.env("out", sandbox.dir().join("cgroup-client"));
        let output = run(sandbox, Placement::Hooked, client, "", PATIENCE);
        assert!(output.stdout.starts_with(ECHO_NAME), "in a new cgroup: {output:?}");
        eventually(PATIENCE, "its client has gone", || {
            let members = fs::read_to_string(inner.join("cgroup.procs")).unwrap();
            if members.is_empty() { Ok(()) } else { Err(members) }
        });
        [inner, outer].iter().for_each(|dir| fs::remove_dir(dir).unwrap());
    }
}

/// Adds and removes an address, which wakes the agent.
pub(crate) fn change_network(sandbox: &Sandbox, random: &mut Random) {
    let address = Ipv4Addr::new(198, 51, 100, random.below(250) as u8);
    sandbox.ip(&format!("address add {address}/32 dev lo\naddress del {address}/32 dev lo\n"));
}
