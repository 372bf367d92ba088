//! Environment of the measurement: pods and Services of both families in a sandbox, with the agent's programs but
//! without the agent.

use std::{
    fs::File,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket},
    os::fd::AsFd as _,
    path::PathBuf,
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result};
use cproxy_benches::bpf::{AttachType, Link, Program};
use cproxy_ebpf::LAYOUT_VERSION;
use cproxy_tests::{
    manifest::{self, Service, Slice},
    process::{Agent, Daemon, cproxy_binary},
    sandbox::{Placement, Sandbox},
};
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, bind, socket_with,
    sockopt::{Timeout, set_ipv6_v6only, set_socket_timeout},
};
use serde_json::Value;

const PREFIX: &str = "cproxy-bench";

/// Number of backends of the Service.
const PODS: u8 = 10;

const VIP_PORT: u16 = 80;
const TCP_PORT: u16 = 8080;
const UDP_PORT: u16 = 8081;

/// Queue length, more than the connections of a block.
const BACKLOG: i32 = 1_000;

/// Limit on every wait, longer than any step takes.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// An address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    V4,
    V6,
}

/// Both of them.
pub(crate) const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

impl Family {
    /// Digit in the names of hooks.
    pub(crate) fn digit(self) -> char {
        match self {
            Self::V4 => '4',
            Self::V6 => '6',
        }
    }

    /// Family as `socket()` takes it.
    pub(crate) fn domain(self) -> AddressFamily {
        match self {
            Self::V4 => AddressFamily::INET,
            Self::V6 => AddressFamily::INET6,
        }
    }

    fn service(self, host: u16) -> IpAddr {
        let [high, low] = host.to_be_bytes();
        match self {
            Self::V4 => Ipv4Addr::new(10, 96, high, low).into(),
            Self::V6 => Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, host).into(),
        }
    }

    fn pod(self, host: u8) -> IpAddr {
        match self {
            Self::V4 => Ipv4Addr::new(10, 244, 0, host).into(),
            Self::V6 => Ipv6Addr::new(0xfd00, 0x10, 0x244, 0, 0, 0, 0, u16::from(host)).into(),
        }
    }

    /// The ClusterIP of the Service that is measured.
    fn vip(self) -> IpAddr {
        self.service(10)
    }

    /// The ClusterIP of a Service without endpoints.
    fn down(self) -> IpAddr {
        self.service(11)
    }

    /// An address without a Service in the range of ClusterIPs, so that the programs cannot rule it out at once.
    fn stray(self) -> IpAddr {
        self.service(12)
    }

    fn pods(self) -> impl Iterator<Item = IpAddr> {
        (1..=PODS).map(move |host| self.pod(host))
    }

    /// Address that clients bind to.
    fn client(self) -> IpAddr {
        self.pod(PODS + 1)
    }
}

/// The servers of one family.
pub(crate) struct Peers {
    pub(crate) family: Family,
    /// Listener on every address.
    pub(crate) listener: TcpListener,
    /// The pods' UDP sockets.
    pub(crate) pods: Vec<UdpSocket>,
    /// A UDP socket on the address without a Service.
    pub(crate) stray: UdpSocket,
}

impl Peers {
    fn start(family: Family) -> io::Result<Self> {
        let udp = |address| {
            let socket = UdpSocket::bind((address, UDP_PORT))?;
            // The sockets are drained without waiting.
            socket.set_nonblocking(true)?;
            Ok(socket)
        };
        let pods = family.pods().map(udp).collect::<io::Result<_>>()?;
        Ok(Self { family, listener: listen(family)?, pods, stray: udp(family.stray())? })
    }

    /// The address of the Service; both protocols have the same port.
    pub(crate) fn vip(&self) -> SocketAddr {
        SocketAddr::new(self.family.vip(), VIP_PORT)
    }

    /// The Service without endpoints.
    pub(crate) fn down(&self) -> SocketAddr {
        SocketAddr::new(self.family.down(), VIP_PORT)
    }

    /// The TCP address of a pod, in an order like that of a Service's choices. Over IPv6, the kernel takes some 200 ns
    /// longer for pods in turn.
    pub(crate) fn pod_tcp(&self, number: usize) -> SocketAddr {
        let random = (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        SocketAddr::new(self.family.pod((random % u64::from(PODS)) as u8 + 1), TCP_PORT)
    }

    /// The UDP address of a pod.
    pub(crate) fn pod_udp(&self) -> SocketAddr {
        SocketAddr::new(self.family.pod(1), UDP_PORT)
    }

    /// A TCP address without a Service in the range of ClusterIPs.
    pub(crate) fn stray_tcp(&self) -> SocketAddr {
        SocketAddr::new(self.family.stray(), TCP_PORT)
    }

    /// A UDP address without a Service in the range of ClusterIPs.
    pub(crate) fn stray_udp(&self) -> SocketAddr {
        SocketAddr::new(self.family.stray(), UDP_PORT)
    }

    /// A new UDP socket of a client.
    pub(crate) fn client(&self) -> io::Result<UdpSocket> {
        let socket = UdpSocket::bind((self.family.client(), 0))?;
        socket.set_read_timeout(Some(TIMEOUT))?;
        Ok(socket)
    }

    /// Empties the servers' UDP sockets; returns a pod that has received a datagram, if any.
    pub(crate) fn drain(&self) -> Option<&UdpSocket> {
        let mut buffer = [0; 16];
        let mut hit = None;
        for server in self.pods.iter().chain([&self.stray]) {
            while server.recv_from(&mut buffer).is_ok() {
                hit = Some(server);
            }
        }
        hit
    }
}

/// A listener on every address of one family.
fn listen(family: Family) -> io::Result<TcpListener> {
    let socket = socket_with(family.domain(), SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let wildcard = match family {
        Family::V4 => IpAddr::from(Ipv4Addr::UNSPECIFIED),
        Family::V6 => {
            set_ipv6_v6only(&socket, true)?;
            Ipv6Addr::UNSPECIFIED.into()
        }
    };
    set_socket_timeout(&socket, Timeout::Recv, Some(TIMEOUT))?;
    bind(&socket, &SocketAddr::new(wildcard, TCP_PORT))?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// A hook, named as in the pin directory.
pub(crate) struct Hook {
    pub(crate) name: &'static str,
    attach_type: AttachType,
}

/// All hooks (include/uapi/linux/bpf.h, `enum bpf_attach_type`).
pub(crate) const HOOKS: [Hook; 9] = [
    Hook { name: "connect4", attach_type: AttachType(10) },
    Hook { name: "connect6", attach_type: AttachType(11) },
    Hook { name: "sendmsg4", attach_type: AttachType(14) },
    Hook { name: "sendmsg6", attach_type: AttachType(15) },
    Hook { name: "recvmsg4", attach_type: AttachType(19) },
    Hook { name: "recvmsg6", attach_type: AttachType(20) },
    Hook { name: "getpeername4", attach_type: AttachType(29) },
    Hook { name: "getpeername6", attach_type: AttachType(30) },
    Hook { name: "sock_release", attach_type: AttachType::SOCK_RELEASE },
];

/// Programs on the cgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attached {
    /// No program.
    Nothing,
    /// An empty program on each hook.
    Empty,
    /// cproxy's programs.
    Cproxy,
}

/// Both programs for a hook.
struct Pair {
    hook: &'static Hook,
    empty: Program,
    /// cproxy's program; `None` if the agent has none for this hook.
    cproxy: Option<Program>,
}

/// The programs, and the ones attached to the sandbox's cgroup.
pub(crate) struct Programs {
    pairs: Vec<Pair>,
    cgroup: File,
    attached: Attached,
    links: Vec<Link>,
}

impl Programs {
    /// Detaches the agent's programs from its pinned links and keeps them.
    fn detach(sandbox: &Sandbox) -> Result<Self> {
        let pair = |hook: &'static Hook| {
            let pin = pin(sandbox, hook);
            let empty = Program::empty(hook.attach_type);
            let cproxy = match Program::detach_from(&pin) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                result => Some(result.with_context(|| format!("detaching the program of {}", pin.display()))?),
            };
            Ok(Pair { hook, empty: empty.with_context(|| format!("loading an empty {} program", hook.name))?, cproxy })
        };
        let cgroup = File::open(sandbox.cgroup()).context("opening the sandbox's cgroup")?;
        let pairs = HOOKS.iter().map(pair).collect::<Result<_>>()?;
        Ok(Self { pairs, cgroup, attached: Attached::Nothing, links: Vec::new() })
    }

    /// The program of a hook, if there is one.
    pub(crate) fn get(&self, hook: &str, which: Attached) -> Option<&Program> {
        let pair = self.pairs.iter().find(|pair| pair.hook.name == hook)?;
        match which {
            Attached::Nothing => None,
            Attached::Empty => Some(&pair.empty),
            Attached::Cproxy => pair.cproxy.as_ref(),
        }
    }

    /// Attaches `wanted` and detaches all others.
    pub(crate) fn attach(&mut self, wanted: Attached) -> Result<()> {
        if self.attached == wanted {
            return Ok(());
        }
        self.attached = Attached::Nothing;
        self.links.drain(..).try_for_each(Link::detach).context("detaching a program")?;
        for Pair { hook, empty, cproxy } in &self.pairs {
            let program = match wanted {
                Attached::Nothing => None,
                Attached::Empty => Some(empty),
                Attached::Cproxy => cproxy.as_ref(),
            };
            let link = program.map(|program| program.attach(hook.attach_type, self.cgroup.as_fd())).transpose();
            self.links.extend(link.with_context(|| format!("attaching a program to {}", hook.name))?);
        }
        self.attached = wanted;
        Ok(())
    }

    /// The number of other users' programs on these hooks, on other cgroups.
    pub(crate) fn of_others(&self) -> Result<usize> {
        let count =
            cproxy_benches::bpf::count_links(&HOOKS.map(|hook| hook.attach_type)).context("listing BPF links")?;
        Ok(count.saturating_sub(self.links.len()))
    }
}

/// The sandbox with its contents.
pub(crate) struct Place {
    pub(crate) sandbox: Sandbox,
    pub(crate) peers: [Peers; 2],
    /// Reader of all events, with [`Observation::Trace`].
    pub(crate) tracer: Option<Daemon>,
    pub(crate) programs: Programs,
}

/// Observation of calls by cproxy's programs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Observation {
    /// The plain set.
    None,
    /// The tracing set, which counts by Service.
    Counters,
    /// The tracing set, whose events `cproxy trace` prints.
    Trace,
}

impl Observation {
    /// Remark for the report.
    pub(crate) fn note(self) -> Option<&'static str> {
        match self {
            Self::None => None,
            Self::Counters => {
                Some("cproxy's programs are the tracing set, which counts by Service (`run --service-counters`).")
            }
            Self::Trace => Some("cproxy's programs are the tracing set, which reports each call to `cproxy trace`."),
        }
    }
}

impl Place {
    /// Lets an agent write the table with `services` other Services and load the programs. Then the agent ends, so
    /// that only the kernel's work is measured, and that of the tracer, if there is one.
    pub(crate) fn prepare(services: u16, observation: Observation) -> Result<Self> {
        let sandbox = Sandbox::new(PREFIX);
        for family in FAMILIES {
            sandbox.add_addresses(family.pods().chain([family.client(), family.stray()]));
        }
        let peers = FAMILIES.map(Peers::start);
        let [v4, v6] = peers.map(|peers| peers.context("starting the servers"));
        manifest::write(&sandbox.manifest_dir(), "services.json", objects(services));
        let counters = if observation == Observation::Counters { "on" } else { "off" };
        let agent = Agent::new(&sandbox).manifests(sandbox.manifest_dir());
        let mut agent = agent.args(["--service-counters", counters]).start();
        let tracer = (observation == Observation::Trace).then(|| start_tracer(&sandbox));
        agent.stop();
        let programs = Programs::detach(&sandbox)?;
        Ok(Self { sandbox, peers: [v4?, v6?], tracer, programs })
    }
}

/// Starts `cproxy trace` for the verdicts that it shows unasked, and waits until its programs are behind all links.
fn start_tracer(sandbox: &Sandbox) -> Daemon {
    let before = linked_programs(sandbox);
    let mut command = Command::new("sh");
    command.args(["-c", "exec \"$0\" trace > /dev/null"]).arg(cproxy_binary());
    command.env("CPROXY_PIN_DIR", sandbox.pin_dir()).env("CPROXY_RUN_DIR", sandbox.run_dir());
    let mut tracer = Daemon::spawn(sandbox, "trace", Placement::Unhooked, command);
    tracer.wait_until(TIMEOUT, "the tracer's programs are behind all links", |_| {
        let now = linked_programs(sandbox);
        let is_switched = before.iter().zip(&now).all(|(before, now)| now.is_none() || before != now);
        if is_switched { Ok(()) } else { Err(format!("{before:?} {now:?}")) }
    });
    tracer
}

/// Id of the program behind each pinned link.
fn linked_programs(sandbox: &Sandbox) -> [Option<u32>; HOOKS.len()] {
    HOOKS.each_ref().map(|hook| Link::open(&pin(sandbox, hook)).and_then(|link| link.program_id()).ok())
}

/// Pin of a hook's link.
fn pin(sandbox: &Sandbox, hook: &Hook) -> PathBuf {
    sandbox.pin_dir().join(format!("v{LAYOUT_VERSION}")).join(hook.name)
}

fn objects(others: u16) -> Vec<Value> {
    let dual_stack = |name: &str, addresses: [IpAddr; 2]| {
        let service = Service::new(name).cluster_ips(addresses);
        Value::from(service.tcp("tcp", VIP_PORT, TCP_PORT).udp("udp", VIP_PORT, UDP_PORT))
    };
    let ports = |slice: Slice| slice.tcp("tcp", TCP_PORT).udp("udp", UDP_PORT);
    let slices = |name: &str| {
        [ports(Slice::v4(name)).ready(Family::V4.pods()), ports(Slice::v6(name)).ready(Family::V6.pods())]
            .map(Value::from)
    };
    let mut objects = vec![dual_stack("down", FAMILIES.map(Family::down))];
    objects.push(dual_stack("subject", FAMILIES.map(Family::vip)));
    objects.extend(slices("subject"));
    for other in 0..others {
        let name = format!("other-{other}");
        objects.push(dual_stack(&name, FAMILIES.map(|family| family.service(0x100 + other))));
        objects.extend(slices(&name));
    }
    objects
}

#[cfg(test)]
mod tests {
    use cproxy_ebpf::{filter_bit, v4_mapped};

    use super::*;

    fn bit(address: IpAddr) -> u64 {
        filter_bit(&match address {
            IpAddr::V4(address) => v4_mapped(u32::from_ne_bytes(address.octets())),
            IpAddr::V6(address) => {
                let words =
                    address.octets().as_chunks().0.iter().map(|word| u32::from_ne_bytes(*word)).collect::<Vec<_>>();
                words.try_into().unwrap()
            }
        })
    }

    #[test]
    fn pods_are_outside_the_services_prefix_and_the_stray_address_is_inside() {
        for family in FAMILIES {
            let inside = bit(family.vip());
            assert_eq!([bit(family.stray()), bit(family.down())], [inside; 2]);
            assert!(family.pods().chain([family.client()]).all(|pod| bit(pod) != inside));
        }
    }
}
