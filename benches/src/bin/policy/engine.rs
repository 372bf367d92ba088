//! Subjects of the comparison: enforcement of a pod's policy by cproxy or by a packet filter of the kernel, with the
//! same peers and ports as objects for the agent and as rules.

use std::{
    env,
    fmt::{self, Write as _},
    fs, io, iter,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use cproxy_benches::kube_proxy::LEGACY_IPTABLES;
use cproxy_tests::{
    manifest::{self, http_service},
    process::Daemon,
    sandbox::{Netns, Placement, Sandbox},
};
use serde_json::{Value, json};

/// Port of all that a policy allows, for both protocols.
pub(crate) const PORT: u16 = 8080;
/// The peer that a policy allows, and one that it does not.
pub(crate) const ALLOWED: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 1);
pub(crate) const DENIED: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 2);
/// First address of the other peers.
const FIRST_PEER: Ipv4Addr = Ipv4Addr::new(10, 128, 0, 0);
/// Addresses of each range but that of [`ALLOWED`].
const RANGE_ADDRESSES: u32 = 16;

/// Variable with the directory of the engines of others.
const ENGINES_VARIABLE: &str = "CPROXY_POLICY_ENGINES";
/// The queue that kube-network-policies listens on by default.
const QUEUE: u16 = 100;
/// Limit on the start of an engine with all of its objects.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// The pod's name and namespace.
pub(crate) const POD: &str = "shop/web";

/// Enforcement of a pod's policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Engine {
    /// No policy.
    Nobody,
    /// cproxy, for which no policy selects the pod.
    CproxyNotIsolated,
    /// cproxy, with pods as peers.
    Cproxy,
    /// cproxy, with an ipBlock for each peer.
    CproxyRanges,
    /// nftables: connection tracking and a set.
    Nftables,
    /// Legacy iptables: connection tracking and an ipset.
    Ipset,
    /// Legacy iptables: connection tracking and a rule for each peer.
    Iptables,
    /// kube-network-policies, which the kernel asks about the first packet of each connection.
    Queue,
}

/// One way to enforce a policy, with this number of peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Subject {
    pub(crate) engine: Engine,
    pub(crate) peers: u32,
    /// Whether it is measured a second time, to show the effect of chance.
    pub(crate) is_again: bool,
}

impl Engine {
    /// Name of those with a policy, without the number of peers.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Nobody => "no policy",
            Self::CproxyNotIsolated => "cproxy, not isolated",
            Self::Cproxy => "cproxy",
            Self::CproxyRanges => "cproxy, ipBlocks",
            Self::Nftables => "nftables, set",
            Self::Ipset => "iptables, ipset",
            Self::Iptables => "iptables, rules",
            Self::Queue => "kube-network-policies",
        }
    }

    /// Whether an agent enforces.
    pub(crate) fn is_of_cproxy(self) -> bool {
        matches!(self, Self::CproxyNotIsolated | Self::Cproxy | Self::CproxyRanges)
    }

    /// Whether calls of the pod, and to it, are looked at.
    pub(crate) fn isolates(self) -> bool {
        !matches!(self, Self::Nobody | Self::CproxyNotIsolated)
    }

    /// Writes the rules of a packet filter into the network namespace.
    fn program(self, netns: &Netns, peers: u32, scratch: &Path) -> Result<()> {
        let legacy = |applet: &'static str| [LEGACY_IPTABLES, applet].map(str::to_owned).to_vec();
        let commands = match self {
            Self::Nftables => vec![(vec!["nft".to_owned(), "-f".to_owned(), "-".to_owned()], nftables(peers))],
            Self::Ipset => vec![
                (vec!["ipset".to_owned(), "restore".to_owned()], ipset(peers)),
                (legacy("iptables-restore"), iptables_with_ipset()),
            ],
            Self::Iptables => vec![(legacy("iptables-restore"), iptables(peers))],
            Self::Queue => vec![(legacy("iptables-restore"), iptables_with_queue())],
            _ => Vec::new(),
        };
        for (words, input) in commands {
            let file = scratch.join("rules");
            fs::write(&file, input).context("writing into the sandbox")?;
            let what = words.join(" ");
            let output = netns.run(|| -> io::Result<_> {
                let (program, args) = words.split_first().ok_or(io::ErrorKind::InvalidInput)?;
                Command::new(program).args(args).stdin(Stdio::from(fs::File::open(&file)?)).output()
            });
            let output = output.with_context(|| format!("running `{what}`"))?;
            ensure!(output.status.success(), "`{what}`: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(())
    }
}

impl Subject {
    pub(crate) const fn new(engine: Engine, peers: u32) -> Self {
        Self { engine, peers, is_again: false }
    }

    /// Objects for the pod's agent: a Service, and the policy if cproxy enforces one.
    pub(crate) fn objects(self, pod: Ipv4Addr) -> Vec<Value> {
        let mut objects: Vec<_> = http_service("web", "10.96.0.10", [ALLOWED]).into();
        objects.push(namespace());
        match self.engine {
            Engine::Cproxy => {
                objects.extend(self.pods(pod));
                objects.push(selecting_policy());
            }
            Engine::CproxyRanges => {
                objects.push(pod_object("web", "web", pod));
                let blocks: Vec<_> = ranges(self.peers).map(|cidr| json!({"ipBlock": {"cidr": cidr}})).collect();
                objects.push(policy(&blocks.into()));
            }
            _ => objects.push(pod_object("web", "web", pod)),
        }
        objects
    }

    /// Puts what enforces the policy, if it is not the agent, into the pod's network namespace. An engine that the
    /// kernel asks runs for as long as the value is kept.
    pub(crate) fn enforce(self, sandbox: &Sandbox, netns: &Netns, pod: Ipv4Addr) -> Result<Option<Daemon>> {
        let queue = (self.engine == Engine::Queue).then(|| self.start_queue(sandbox, netns, pod)).transpose()?;
        self.engine.program(netns, self.peers, sandbox.dir())?;
        Ok(queue)
    }

    /// The pod and its peers.
    fn pods(self, pod: Ipv4Addr) -> impl Iterator<Item = Value> {
        let peers = addresses(self.peers).enumerate();
        let peers = peers.map(|(number, peer)| pod_object(&format!("peer-{number}"), "peer", peer));
        iter::once(pod_object("web", "web", pod)).chain(peers)
    }

    fn start_queue(self, sandbox: &Sandbox, netns: &Netns, pod: Ipv4Addr) -> Result<Daemon> {
        let objects = json!({
            "namespaces": [namespace()], "pods": self.pods(pod).collect::<Vec<_>>(),
            "networkPolicies": [selecting_policy()],
        });
        let name = format!("queue-{}", self.peers);
        let file = manifest::write_text(sandbox.dir(), &format!("{name}.json"), &objects.to_string());
        // The engine runs under the process ID of nsenter.
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", netns.path().display()));
        command.args(["sh", "-c", &format!("exec \"$0\" -queue {QUEUE} <\"$1\"")]);
        command.arg(engines()?).arg(file);
        let mut queue = Daemon::spawn(sandbox, &name, Placement::Unhooked, command);
        queue.wait_until(START_TIMEOUT, "a queue of the kernel", |_| {
            let queues = netns.run(|| fs::read_to_string("/proc/thread-self/net/netfilter/nfnetlink_queue"));
            queues
                .map_err(|error| error.to_string())
                .and_then(|all| if all.is_empty() { Err("none yet".to_owned()) } else { Ok(()) })
        });
        Ok(queue)
    }
}

/// The program with the engines of others.
pub(crate) fn engines() -> Result<PathBuf> {
    let directory = env::var_os(ENGINES_VARIABLE).with_context(|| format!("{ENGINES_VARIABLE} is not set"))?;
    Ok(Path::new(&directory).join("policies"))
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.engine.name())?;
        if self.engine.isolates() {
            write!(f, ", {}", self.peers)?;
        }
        f.write_str(if self.is_again { ", again" } else { "" })
    }
}

/// The addresses of all peers, [`ALLOWED`] in the middle.
fn addresses(count: u32) -> impl Iterator<Item = Ipv4Addr> {
    let other = |number| Ipv4Addr::from_bits(FIRST_PEER.to_bits() + number);
    (0..count).map(move |number| if number == count / 2 { ALLOWED } else { other(number) })
}

/// The ranges of all peers, that of [`ALLOWED`] in the middle.
fn ranges(count: u32) -> impl Iterator<Item = String> {
    let other = |number| format!("{}/28", Ipv4Addr::from_bits(FIRST_PEER.to_bits() + number * RANGE_ADDRESSES));
    let own = format!("{}/31", Ipv4Addr::from_bits(ALLOWED.to_bits() & !1));
    (0..count).map(move |number| if number == count / 2 { own.clone() } else { other(number) })
}

fn object(version: &str, kind: &str, metadata: Value, spec: Value) -> Value {
    json!({"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec})
}

fn pod_object(name: &str, app: &str, address: Ipv4Addr) -> Value {
    let mut pod = object("v1", "Pod", json!({"name": name, "namespace": "shop", "labels": {"app": app}}), json!({}));
    if let Some(fields) = pod.as_object_mut() {
        fields.insert("status".to_owned(), json!({"phase": "Running", "podIPs": [{"ip": address}]}));
    }
    pod
}

fn namespace() -> Value {
    object("v1", "Namespace", json!({"name": "shop"}), json!({}))
}

/// A policy that allows the pods that [`Subject::pods`] has as peers.
fn selecting_policy() -> Value {
    policy(&json!([{"podSelector": {"matchLabels": {"app": "peer"}}}]))
}

/// A policy that allows these peers in both directions.
fn policy(peers: &Value) -> Value {
    let ports = json!([{"port": PORT, "protocol": "TCP"}, {"port": PORT, "protocol": "UDP"}]);
    let spec = json!({
        "podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": peers, "ports": ports}], "egress": [{"to": peers, "ports": ports}],
    });
    object("networking.k8s.io/v1", "NetworkPolicy", json!({"name": "peers", "namespace": "shop"}), spec)
}

fn nftables(peers: u32) -> String {
    let elements: Vec<_> = addresses(peers).map(|peer| peer.to_string()).collect();
    let elements = elements.join(", ");
    let chain = |hook: &str, interface: &str, address: &str| {
        format!(
            "chain {hook} {{\ntype filter hook {hook} priority filter; policy drop;\n\
             ct state established,related accept\n{interface} lo accept\n\
             ip {address} @peers tcp dport {PORT} accept\nip {address} @peers udp dport {PORT} accept\n}}\n"
        )
    };
    let (input, output) = (chain("input", "iif", "saddr"), chain("output", "oif", "daddr"));
    format!(
        "table ip peers_only {{\nset peers {{\ntype ipv4_addr\nelements = {{ {elements} }}\n}}\n{input}{output}}}\n"
    )
}

fn ipset(peers: u32) -> String {
    let mut text = "create peers hash:ip maxelem 65536\n".to_owned();
    for peer in addresses(peers) {
        // Writing into a string cannot fail.
        writeln!(text, "add peers {peer}").ok();
    }
    text
}

const IPTABLES_HEAD: &str = "*filter\n:INPUT DROP [0:0]\n:FORWARD DROP [0:0]\n:OUTPUT DROP [0:0]\n";

/// Rules of both directions that come first.
const IPTABLES_FIRST: &str = "\
-A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A OUTPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A INPUT -i lo -j ACCEPT
-A OUTPUT -o lo -j ACCEPT
";

fn iptables_with_ipset() -> String {
    let rule = |chain: &str, direction: &str, protocol: &str| {
        format!("-A {chain} -p {protocol} --dport {PORT} -m set --match-set peers {direction} -j ACCEPT\n")
    };
    let both =
        ["tcp", "udp"].map(|protocol| [rule("INPUT", "src", protocol), rule("OUTPUT", "dst", protocol)].concat());
    format!("{IPTABLES_HEAD}{IPTABLES_FIRST}{}COMMIT\n", both.concat())
}

/// Rules that hand the first packet of each connection to a queue, as kube-network-policies' own do with nftables.
fn iptables_with_queue() -> String {
    let queue = ["INPUT", "OUTPUT"].map(|chain| format!("-A {chain} -j NFQUEUE --queue-num {QUEUE}\n"));
    format!("{IPTABLES_HEAD}{IPTABLES_FIRST}{}COMMIT\n", queue.concat())
}

/// A chain for each direction and protocol, with a rule for each peer.
fn iptables(peers: u32) -> String {
    let (mut chains, mut rules) = (IPTABLES_HEAD.to_owned(), IPTABLES_FIRST.to_owned());
    for (hook, address) in [("INPUT", "-s"), ("OUTPUT", "-d")] {
        for protocol in ["tcp", "udp"] {
            let chain = format!("{hook}-{protocol}");
            // Writing into a string cannot fail.
            writeln!(chains, ":{chain} - [0:0]").ok();
            writeln!(rules, "-A {hook} -p {protocol} -j {chain}").ok();
            for peer in addresses(peers) {
                writeln!(rules, "-A {chain} {address} {peer} -p {protocol} --dport {PORT} -j ACCEPT").ok();
            }
        }
    }
    format!("{chains}{rules}COMMIT\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_allowed_peer_is_one_of_them_and_the_denied_is_in_no_range() {
        for count in [1, 10, 10_000] {
            let all: Vec<_> = addresses(count).collect();
            assert_eq!((all.len() as u32, all[all.len() / 2]), (count, ALLOWED));
            assert!(!all.contains(&DENIED));
        }
        assert_eq!(ranges(3).collect::<Vec<_>>(), ["10.128.0.0/28", "10.244.0.0/31", "10.128.0.32/28"]);
    }

    #[test]
    fn each_filter_has_a_rule_or_an_element_for_each_peer() {
        assert_eq!(iptables(10).matches("--dport 8080").count(), 4 * 10);
        assert_eq!(ipset(10).lines().count(), 11);
        assert_eq!(nftables(10).matches("10.128.0.").count(), 9);
    }

    #[test]
    fn subjects_are_named_by_who_enforces_and_for_how_many() {
        assert_eq!(Subject::new(Engine::Nobody, 0).to_string(), "no policy");
        assert_eq!(Subject { is_again: true, ..Subject::new(Engine::Nobody, 0) }.to_string(), "no policy, again");
        assert_eq!(Subject::new(Engine::Cproxy, 10).to_string(), "cproxy, 10");
    }
}
