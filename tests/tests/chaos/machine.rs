//! Events of the machine: MPTCP connects, cgroups and addresses that come and go, and programs that others detach.

use std::{fs, net::Ipv4Addr, num::NonZeroU32, os::fd::AsFd, process::Command};

use cproxy_datapath::bpf::{
    PinDir,
    syscalls::{
        bpf_attach_type::{self, *},
        bpf_prog_type, exit, link_detach, link_update, load_program, move_to, obj_get,
    },
};
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

/// Links without which new calls have no Service. Without others, sockets would show another peer.
const LINKS: [(&str, bpf_attach_type); 4] = [
    ("connect4", BPF_CGROUP_INET4_CONNECT),
    ("connect6", BPF_CGROUP_INET6_CONNECT),
    ("sendmsg4", BPF_CGROUP_UDP4_SENDMSG),
    ("sendmsg6", BPF_CGROUP_UDP6_SENDMSG),
];

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

/// Detaches a program behind the agent's back, or replaces it by one that lets everything pass.
pub(crate) fn disturb_hook(sandbox: &Sandbox, random: &mut Random) {
    let (name, attach_type) = random.pick(&LINKS);
    let link = obj_get(&PinDir::new(&sandbox.pin_dir()).object(name), 0).unwrap();
    if random.percent(50) {
        eprintln!("{name} is detached");
        link_detach(link.as_fd()).unwrap();
    } else {
        eprintln!("{name} is replaced");
        let program_type = bpf_prog_type::BPF_PROG_TYPE_CGROUP_SOCK_ADDR;
        let program = load_program(program_type, attach_type as u32, &[move_to(0, 1), exit()], "somebody_elses");
        link_update(link.as_fd(), program.unwrap().as_fd()).unwrap();
    }
}
