//! All settings of `cproxy run` and `cproxy wait`, each once. Flags, variables, kernel parameters, lines of the file,
//! help, completions, `cproxy get config`, changes on SIGHUP, the tables of docs/reference.md and the example file
//! follow from here.

use std::path::PathBuf;

use clap::ArgAction;
use cproxy_core::{Address, AddressRange, Balance, ExternalIps, ObjectName, is_label, is_subdomain, parse_address};
use cproxy_daemon::{ListenAddress, LogFormat};
use cproxy_datapath::sockets::TerminateSockets;
use cproxy_wire::ServerAddress;
use tracing::Level;

use super::{
    CanaryAddresses,
    choice::{ExcludeNetns, ExistingConnections, OnTimeout, PolicyMode, ServiceCounting, choice},
    setting::settings,
};
use crate::canary;

settings! {
    /// Switch of a machine that has cproxy in its image.
    SwitchSettings {
        /// Whether cproxy does anything on this machine: if not, `run` removes what an earlier start has left, and ends
        #[arg(value_name = "true|false", default_value = "true", action = ArgAction::Set,
              value_parser = choice::<bool>())]
        "enabled" enabled: bool, OnRestart, Shown,
            { without: "", example: "",
              effect: "`false` leaves this machine [as one without cproxy](#a-switch-for-each-machine). Also of \
                       `wait`." };
    }
}

settings! {
    /// Source of Services and EndpointSlices.
    SourceSettings {
        /// Kubeconfig of the API server to follow; default: the pod's ServiceAccount
        #[arg(value_name = "FILE", conflicts_with = "manifests")]
        "kubeconfig" kubeconfig: Option<PathBuf>, OnReload, Shown,
            { without: "none", example: "/etc/cproxy/kubeconfig",
              effect: "Follow the API server of the kubeconfig's current context. Not with `--manifests`." };
        /// Files or directories to follow instead of an API server, separated by commas
        #[arg(value_name = "PATH", num_args = 1.., value_delimiter = ',',
              conflicts_with_all = ["kubeconfig", "apiserver", "tls_server_name"])]
        "manifests" manifests: Vec<PathBuf>, OnRestart, Shown,
            { without: "none", example: "/etc/cproxy/manifests",
              effect: "Follow [files or directories](#source-manifests) instead of an API server." };
        /// Real addresses of API servers, best first: https://HOST, unix:///PATH, vsock://CID:PORT
        #[arg(value_name = "URL", num_args = 1.., value_delimiter = ',', conflicts_with = "manifests")]
        "apiserver" apiserver: Vec<ServerAddress>, OnReload, Shown,
            { without: "the kubeconfig's, or `KUBERNETES_SERVICE_HOST`",
              example: "https://10.0.0.1:6443,https://10.0.0.2:6443",
              effect: "[Addresses](#source-api-server) of API servers in order of preference: `https://10.0.0.1:6443`, \
                       `unix:///PATH` or `vsock://CID:PORT`." };
        /// Name expected in the API server's certificate; default: from kubeconfig or URL
        #[arg(value_name = "NAME", conflicts_with = "manifests")]
        "tls-server-name" tls_server_name: Option<String>, OnReload, Shown,
            { without: "the kubeconfig's, or the URL's host", example: "kubernetes.default.svc",
              effect: "Name that the API server's certificate must have." };
    }
}

settings! {
    /// Table until the first complete sync.
    BootstrapSettings {
        /// File with Services and EndpointSlices to serve until the first complete sync
        #[arg(value_name = "FILE")]
        "bootstrap" bootstrap: Option<PathBuf>, OnRestart, Shown,
            { without: "none", example: "/etc/cproxy/bootstrap.yaml",
              effect: "Serve the Services and EndpointSlices of this manifest until the first complete sync, in \
                       addition to the table that the kernel has already." };
    }
}

settings! {
    /// Name of the node.
    NodeNameSettings {
        /// Name of this node, for local endpoints, zone hints and node ports
        #[arg(value_name = "NAME", value_parser = parse_node_name)]
        "node-name" node_name: Option<String>, OnRestart, Shown,
            { without: "none", example: "node-1",
              effect: "Name of this node. Endpoints on it are local for `internalTrafficPolicy: Local`. The agent \
                       follows the Node: its zone selects hints, and node ports are served on its InternalIPs. \
                       Without this flag no endpoint is local, and hints have no effect." };
    }
}

settings! {
    /// Addresses of node and VM, and what others may do with addresses.
    NodeSettings {
        /// Addresses of this node that serve node ports, separated by commas; default: from its Node
        #[arg(value_name = "IP", num_args = 1.., value_delimiter = ',', value_parser = parse_node_ip)]
        "node-ip" node_ip: Vec<Address>, OnReload, Shown,
            { without: "InternalIPs of the Node", example: "192.0.2.10",
              effect: "Addresses on which node ports are served. Without this flag and without a Node, no node port is \
                       served." };
        /// Addresses of this VM for loadBalancerSourceRanges, separated by commas; detected by `run`
        #[arg(value_name = "IP", num_args = 1.., value_delimiter = ',', value_parser = parse_ip)]
        "pod-ip" pod_ip: Vec<Address>, OnReload, Shown,
            { without: "detected", example: "10.244.0.10",
              effect: "Addresses of the VM, compared with `loadBalancerSourceRanges`; no Service's external or load \
                       balancer address takes them. UDP sockets that are refused are connected to them. Detected as \
                       the source address of the route to the API server, or else of the default route, and detected \
                       again when routes, addresses or links change." };
        /// Use of `spec.externalIPs`, which whoever may write a Service can set to any address
        #[arg(value_name = "USE", default_value = "serve", value_parser = choice::<ExternalIps>())]
        "external-ips" external_ips: ExternalIps, OnReload, Shown,
            { without: "", example: "",
              effect: "Whether `spec.externalIPs` of Services are served, which whoever may write a Service can set to \
                       [any address](semantics.md#whose-address). ClusterIPs and addresses of this VM cannot be taken \
                       that way." };
    }
}

settings! {
    /// Place of the programs.
    CgroupSettings {
        /// cgroup2 directory whose processes are served; default: the cgroup2 root
        #[arg(value_name = "DIR")]
        "cgroup" cgroup: Option<PathBuf>, OnRestart, Shown,
            { without: "the cgroup2 root", example: "/sys/fs/cgroup",
              effect: "cgroup2 directory to attach to: processes in and below it are served. In a container, [mount \
                       the root](#the-cgroup)." };
    }
}

settings! {
    /// Calls that are translated, and how.
    TrafficSettings {
        /// Do not translate calls in or below these cgroups; at most 4, separated by commas
        #[arg(value_name = "DIR", num_args = 1.., value_delimiter = ',')]
        "exclude-cgroup" exclude_cgroup: Vec<PathBuf>, OnReload, Shown,
            { without: "none", example: "/sys/fs/cgroup/mesh",
              effect: "[Do not translate](#exclusions) calls of processes in or below these cgroup2 directories; at \
                       most 4, or 3 beside `--exclude-netns others`." };
        /// Do not translate calls of these users; at most 8, separated by commas
        #[arg(value_name = "UID", num_args = 1.., value_delimiter = ',', value_parser = parse_uid)]
        "exclude-uid" exclude_uid: Vec<u32>, OnReload, Shown,
            { without: "none", example: "1337",
              effect: "Do not translate calls of processes of these users; at most 8." };
        /// Do not translate calls to these ports; at most 8, separated by commas
        #[arg(value_name = "PORT", num_args = 1.., value_delimiter = ',', value_parser = parse_port)]
        "exclude-port" exclude_port: Vec<u16>, OnReload, Shown,
            { without: "none", example: "15001",
              effect: "Do not translate calls to these destination ports; at most 8." };
        /// Network namespaces in which calls are not translated
        #[arg(value_name = "NAMESPACES", default_value = "none", value_parser = choice::<ExcludeNetns>())]
        "exclude-netns" exclude_netns: ExcludeNetns, OnReload, Shown,
            { without: "", example: "",
              effect: "`others`: [do not translate](#exclusions) calls of sockets in other network namespaces than the \
                       agent's. Counts as one of the cgroups." };
        /// How to choose backends
        #[arg(value_name = "METHOD", default_value = "random", value_parser = choice::<Balance>())]
        "balance" balance: Balance, OnReload, Shown,
            { without: "", example: "",
              effect: "Choice of a backend for a new connection: at random, or each in turn. Round robin spreads a few \
                       long-lived connections of one VM better: of 40 connections to 10 endpoints, each endpoint gets \
                       4. Over many VMs there is no difference." };
        /// Sockets to close when they are stale
        #[arg(value_name = "SOCKETS", default_value = "udp", value_parser = choice::<TerminateSockets>())]
        "terminate-sockets" terminate_sockets: TerminateSockets, OnReload, Shown,
            { without: "", example: "",
              effect: "[Stale sockets](#stale-sockets) to close." };
    }
}

settings! {
    /// Network policy of the pod.
    PolicySettings {
        /// Enforcement of the NetworkPolicies that select this pod, as a relay with `--policies` has them
        #[arg(value_name = "MODE", default_value = "off", value_parser = choice::<PolicyMode>())]
        "policy" policy: PolicyMode, OnRestart, Shown,
            { without: "", example: "",
              effect: "[Enforce](policy.md) the NetworkPolicies that select this pod, or only record what they would \
                       deny. The source is a [relay](relay.md#network-policies) with `--policies`, or manifests and \
                       `--policy-pod`." };
        /// Pod that this VM is, where manifests are the source: NAMESPACE/NAME
        #[arg(value_name = "POD", value_parser = parse_pod)]
        "policy-pod" policy_pod: Option<ObjectName>, OnRestart, Shown,
            { without: "the pod of the only policy that the relay shows", example: "shop/web-0",
              effect: "Pod whose policy is enforced, as NAMESPACE/NAME. Manifests need it." };
        /// Addresses of the node beside those of its status, which may always talk with the pod, separated by commas
        #[arg(value_name = "IP", num_args = 1.., value_delimiter = ',', value_parser = parse_ip)]
        "policy-node-ip" policy_node_ip: Vec<Address>, OnRestart, Shown,
            { without: "none", example: "10.244.0.1",
              effect: "Addresses of the pod's node beside its `status.hostIPs`, such as that of a bridge, from which \
                       probes come. No policy denies traffic with them." };
        /// Do not apply the policy to calls in or below these cgroups; at most 8, separated by commas
        #[arg(value_name = "DIR", num_args = 1.., value_delimiter = ',')]
        "policy-exempt-cgroup" policy_exempt_cgroup: Vec<PathBuf>, OnRestart, Shown,
            { without: "none", example: "/sys/fs/cgroup/system.slice",
              effect: "Cgroup2 directories of the guest's own daemons: the policy does not apply to calls of \
                       processes in or below them; at most 8. What comes in is looked at all the same." };
        /// Connections of the pod that a change of its policy no longer allows
        #[arg(value_name = "ACTION", default_value = "keep", value_parser = choice::<ExistingConnections>())]
        "policy-existing" policy_existing: ExistingConnections, OnRestart, Shown,
            { without: "", example: "",
              effect: "Keep or close connections that a change of the policy [no longer \
                       allows](policy.md#connections-that-stand). Closing takes `CONFIG_INET_DIAG_DESTROY`." };
    }
}

settings! {
    /// Traffic from outside.
    ReceiveSettings {
        /// Receive what comes to addresses of load balancers in these ranges, of Services that this pod backs
        #[arg(value_name = "CIDR", num_args = 1.., value_delimiter = ',', value_parser = parse_range)]
        "receive" receive: Vec<AddressRange>, OnRestart, Shown,
            { without: "none", example: "203.0.113.0/24,2001:db8:1::/64",
              effect: "[Receive](receive.md) what a load balancer with direct return sends to its own address, for \
                       Services that this pod is an endpoint of: the address comes from `status.loadBalancer` and is \
                       in one of these ranges. The port may be another one than the pod's." };
    }
}

settings! {
    /// Counters by Service.
    CounterSettings {
        /// Count calls by Service, for `cproxy get services -o wide` and metrics; each call then costs more
        #[arg(value_name = "on|off", num_args = 0..=1, default_missing_value = "on",
              default_value = "off", value_parser = choice::<ServiceCounting>())]
        "service-counters" service_counters: ServiceCounting, OnRestart, Shown,
            { without: "", example: "",
              effect: "Count connections, refusals and drops by frontend, for [`get services -o wide`](#get-services) \
                       and [metrics](#metrics). Each translated, refused or dropped call [costs \
                       more](operations.md#watching-calls)." };
    }
}

settings! {
    /// Tests by the agent itself, and what monitoring sees.
    MonitoringSettings {
        /// Addresses of no Service, one of each family, by which the agent tests its own programs; `none`: no tests
        #[arg(value_name = "ADDRESSES", default_value = canary::ADDRESSES)]
        "canary-address" canary_address: CanaryAddresses, OnRestart, Shown,
            { without: "", example: "",
              effect: "Addresses of no Service and no machine, one of each family, by which the agent [tests its \
                       programs](operations.md#programs-without-effect). `none`: it does not." };
        /// Address of /metrics: IP:PORT, unix:///PATH or vsock://CID:PORT; default: off
        #[arg(value_name = "ADDRESS")]
        "metrics-bind-address" metrics_bind_address: Option<ListenAddress>, OnRestart, Shown,
            { without: "off", example: "127.0.0.1:10249",
              effect: "Serve [`/metrics`](#metrics) at `IP:PORT`, `unix:///PATH` or `vsock://CID:PORT` (CID \
                       4294967295: any of this VM)." };
        /// Address of /healthz, /livez and /readyz, which may be the same; default: off
        #[arg(value_name = "ADDRESS")]
        "healthz-bind-address" healthz_bind_address: Option<ListenAddress>, OnRestart, Shown,
            { without: "off", example: "127.0.0.1:10256",
              effect: "Serve [`/healthz`, `/livez` and `/readyz`](#health-checks) there. It may be the address of the \
                       metrics." };
    }
}

settings! {
    /// The pin directory.
    PinDirSettings {
        /// Directory on a BPF file system for pinned maps and links
        #[arg(value_name = "DIR", default_value = "/sys/fs/bpf/cproxy")]
        "pin-dir" pin_dir: PathBuf, OnRestart, Shown,
            { without: "", example: "",
              effect: "Directory on a BPF file system for [maps and links](#pin-directory)." };
    }
}

settings! {
    /// The run directory.
    RunDirSettings {
        /// Directory for the agent's files, such as `ready` and `cproxy.sock`
        #[arg(value_name = "DIR", default_value = "/run/cproxy")]
        "run-dir" run_dir: PathBuf, OnRestart, Shown,
            { without: "", example: "",
              effect: "Directory for [the agent's files](#run-directory)." };
    }
}

settings! {
    /// The log.
    LogSettings {
        /// Least severe level to log
        #[arg(value_name = "LEVEL", default_value = "info", value_parser = choice::<Level>())]
        "log-level" log_level: Level, OnReload, Shown,
            { without: "", example: "",
              effect: "Least severe level to log." };
        /// Log lines as text or as JSON objects
        #[arg(value_name = "FORMAT", value_enum, default_value = "text")]
        "log-format" log_format: LogFormat, OnRestart, Shown,
            { without: "", example: "",
              effect: "Log lines as text or as one JSON object each." };
    }
}

settings! {
    /// How long `cproxy wait` waits, and for what. It reads them at each start.
    WaitSettings {
        /// Longest time to wait, in seconds or with a unit: ms, s or m
        #[arg(value_name = "TIME", default_value = "30s")]
        "timeout" timeout: String, OnRestart, Shown,
            { without: "", example: "",
              effect: "Longest time to wait: seconds, or a number with the unit `ms`, `s` or `m`." };
        /// Also wait until these Services have an eligible endpoint, separated by commas
        #[arg(value_name = "NAMESPACE/NAME", num_args = 1.., value_delimiter = ',')]
        "for" services: Vec<String>, OnRestart, Shown,
            { without: "none", example: "kube-system/kube-dns",
              effect: "Wait also until each of these Services has an eligible endpoint." };
        /// Result on failure or if a value is invalid
        #[arg(value_name = "POLICY", default_value = "fail", value_parser = choice::<OnTimeout>())]
        "on-timeout" on_timeout: OnTimeout, OnRestart, Shown,
            { without: "", example: "",
              effect: "`fail`: exit with 1 after the timeout or if cproxy cannot run here, with 2 if `--timeout` or \
                       `--for` is invalid. `start`: exit with 0 in these cases; with an invalid value, wait without \
                       it. Both print what is missing." };
    }
}

fn parse_pod(text: &str) -> Result<ObjectName, String> {
    match text.split_once('/') {
        Some((namespace, name)) if is_label(namespace) && is_subdomain(name) => Ok(ObjectName::new(namespace, name)),
        _ => Err("expected NAMESPACE/POD".to_owned()),
    }
}

/// Node name without characters that have a meaning in a field selector.
fn parse_node_name(text: &str) -> Result<String, String> {
    let belongs = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
    let is_name = text.bytes().all(belongs);
    is_name
        .then(|| text.to_owned())
        .ok_or_else(|| "a node's name has only letters, digits, dashes, dots and underscores".to_owned())
}

fn parse_ip(text: &str) -> Result<Address, String> {
    parse_address(text.trim()).ok_or_else(|| "not a valid IP address".to_owned())
}

fn parse_range(text: &str) -> Result<AddressRange, String> {
    AddressRange::parse(text.trim()).ok_or_else(|| "not a range of addresses, such as 203.0.113.0/24".to_owned())
}

fn parse_node_ip(text: &str) -> Result<Address, String> {
    let address = parse_ip(text)?;
    if address.is_special() { Err("node ports cannot be served on this address".to_owned()) } else { Ok(address) }
}

fn parse_uid(text: &str) -> Result<u32, String> {
    // The last id is that of no user (chown(2)).
    let uid = text.trim().parse().ok().filter(|&uid| uid != u32::MAX);
    uid.ok_or_else(|| format!("expected a user id, a number: `id -u {}` prints it", shown_name(text)))
}

/// The text if it may be a user's name.
fn shown_name(text: &str) -> &str {
    if text.starts_with(|first: char| first.is_ascii_alphabetic()) { text } else { "NAME" }
}

fn parse_port(text: &str) -> Result<u16, String> {
    let port = text.trim().parse().ok().filter(|&port| port != 0);
    port.ok_or_else(|| "expected a port from 1 to 65535".to_owned())
}
