//! The API server with its objects' writer, and the agent's way to it, which can be broken.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
};

use cproxy_tests::{
    Server,
    api::refuse_over_tls,
    control_plane::{ADDRESS, ControlPlane, NAME, PORT, role_binding},
    echo,
    manifest::{Service, Slice, write_text},
    nameserver::{NameAnswer, Nameserver},
    process::{cproxy, eventually},
    relay::{Fault, Relay},
    sandbox::Sandbox,
    storm::addresses::{LONER, SERVICES, backend, cluster_ip},
    world,
    writer::Writer,
};
use serde_json::{Value, json};

use crate::{PATIENCE, resolver, script::Trouble};

/// ClusterIPs of Services that do not change: of nameservers, of a pod that refuses, and of an echo server.
pub(crate) const NAMESERVER_VIP: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10 + SERVICES as u8);
pub(crate) const REFUSING: usize = SERVICES + 1;
pub(crate) const ECHO: usize = SERVICES + 2;

/// Frontends of those, and of `default/kubernetes`.
pub(crate) const FRONTENDS_BESIDE: usize = 4;

/// Name that the echo server answers with.
pub(crate) const ECHO_NAME: &str = "echo";

/// Addresses of the machine's nameserver, of the relay, of a server that is no API server, and of a broken one.
pub(crate) const NAMESERVER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 53);
const RELAY: Ipv4Addr = Ipv4Addr::LOCALHOST;
const STRANGER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 4);
const BROKEN: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 5);

/// Bytes from the server after which a connection breaks.
const PART_OF_A_RESPONSE: usize = 6_000;

/// A priority level without room, which refuses the agent with 429.
const NO_ROOM: &str = r#"
apiVersion: flowcontrol.apiserver.k8s.io/v1
kind: PriorityLevelConfiguration
metadata: {name: no-room}
spec: {type: Limited, limited: {nominalConcurrencyShares: 0, lendablePercent: 0, borrowingLimitPercent: 0,
       limitResponse: {type: Reject}}}
---
apiVersion: flowcontrol.apiserver.k8s.io/v1
kind: FlowSchema
metadata: {name: no-room}
spec:
  priorityLevelConfiguration: {name: no-room}
  matchingPrecedence: 2
  rules:
  - subjects: [{kind: User, user: {name: cproxy}}]
    resourceRules: [{verbs: ['*'], apiGroups: ['*'], resources: ['*'], namespaces: ['*'], clusterScope: true}]
"#;

/// A control plane, and the agent's way to it.
pub(crate) struct Cluster<'s> {
    pub(crate) sandbox: &'s Sandbox,
    pub(crate) control_plane: ControlPlane<'s>,
    pub(crate) writer: Writer,
    relay: Option<Relay>,
    relay_address: SocketAddr,
    names: Nameserver,
    _servers: (Vec<Nameserver>, [Server; 3]),
}

impl<'s> Cluster<'s> {
    pub(crate) fn start(sandbox: &'s Sandbox) -> Self {
        let control_plane = ControlPlane::start(sandbox);
        let writer = Writer::new(&control_plane);
        let relay = Relay::start_at(sandbox, (RELAY, 0).into(), server());
        let relay_address = relay.address();
        let names = Nameserver::start(sandbox, NAMESERVER, has_address(RELAY));
        let pods = [1, 2, 3, 4].map(|number| backend(LONER + number).v4);
        let nameservers = pods[..2].iter().map(|pod| Nameserver::start(sandbox, *pod, has_address(resolver::ADDRESS)));
        let servers = [
            echo::tcp(sandbox, (pods[3], world::TCP + 2), ECHO_NAME),
            echo::tcp(sandbox, (STRANGER, relay_address.port()), "no API server"),
            refuse_over_tls(sandbox, (BROKEN, relay_address.port()).into(), (500, ""), control_plane.serving_files()),
        ];
        let http = |name, service: usize, pod, port| {
            let service = Service::new(name).cluster_ips([cluster_ip(service).v4]).tcp("http", world::PORT, port);
            [service.into(), Slice::v4(name).tcp("http", port).ready([pod]).into()]
        };
        let dns: [Value; 2] = [
            Service::new("dns").cluster_ips([NAMESERVER_VIP]).udp("dns", 53, 53).into(),
            Slice::v4("dns").udp("dns", 53).ready(&pods[..2]).into(),
        ];
        writer.create(dns);
        // A port of a pod without a listener.
        writer.create(http("refusing", REFUSING, pods[2], world::TCP + 2));
        writer.create(http("echo", ECHO, pods[3], world::TCP + 2));
        let servers = (nameservers.collect(), servers);
        Self { sandbox, control_plane, writer, relay: Some(relay), relay_address, names, _servers: servers }
    }

    /// A kubeconfig for the agent, with its token and the authority in files of their own.
    pub(crate) fn kubeconfig(&self) -> PathBuf {
        let url = format!("https://{NAME}:{}", self.relay_address.port());
        let text = fs::read_to_string(self.control_plane.kubeconfig_at("cproxy", &url)).unwrap();
        let mut config: Value = serde_json::from_str(&text).unwrap();
        self.trust();
        self.write_token(&self.control_plane.token("cproxy"));
        config["clusters"][0]["cluster"]["certificate-authority"] = "agent-ca.crt".into();
        config["users"][0]["user"] = json!({"tokenFile": "agent-token"});
        write_text(self.sandbox.dir(), "agent.kubeconfig", &config.to_string())
    }

    fn trust(&self) {
        write_text(self.sandbox.dir(), "agent-ca.crt", &self.control_plane.ca_pem());
    }

    fn write_token(&self, token: &str) {
        write_text(self.sandbox.dir(), "agent-token", token);
    }

    /// Ends the agent's connections.
    pub(crate) fn cut(&self) {
        if let Some(relay) = &self.relay {
            relay.cut();
        }
    }

    fn set_fault(&self, fault: Option<Fault>) {
        if let Some(relay) = &self.relay {
            relay.set_fault(fault);
        }
    }

    /// Keeps a copy of all objects.
    pub(crate) fn back_up(&mut self) {
        self.control_plane.back_up();
        self.writer = Writer::new(&self.control_plane);
    }

    pub(crate) fn begin(&mut self, trouble: Trouble) {
        match trouble {
            Trouble::Refused => drop(self.relay.take()),
            Trouble::LosesRequests => self.set_fault(Some(Fault::LosesRequests)),
            Trouble::LosesResponses => self.set_fault(Some(Fault::LosesResponses)),
            Trouble::Forgets => self.set_fault(Some(Fault::Forgets)),
            Trouble::Breaks => self.set_fault(Some(Fault::EndsAfter(PART_OF_A_RESPONSE))),
            Trouble::Garbage => self.set_fault(Some(Fault::Garbles)),
            Trouble::Unauthorized => self.write_token("nobody has this"),
            Trouble::Forbidden => {
                self.control_plane.kubectl(&["delete", "clusterrolebinding", "cproxy-cproxy"], "");
            }
            Trouble::TooManyRequests => drop(self.control_plane.kubectl(&["apply", "-f", "-"], NO_ROOM)),
            Trouble::InternalError => self.names.set(has_address(BROKEN)),
            Trouble::EtcdStandsStill => self.control_plane.freeze_etcd(true),
            Trouble::ServerKilled => self.control_plane.kill_api_server(),
            Trouble::AuthorityRenewed => {
                self.control_plane.renew_authority();
                eventually(PATIENCE, "the server shows its new certificate", || {
                    let output = self.control_plane.try_kubectl("admin", &["get", "--raw", "/readyz"], "");
                    if output.code == 0 { Ok(()) } else { Err(output.stderr) }
                });
                self.writer = Writer::new(&self.control_plane);
            }
            Trouble::NoName => self.names.set(NameAnswer::NoName),
            Trouble::WrongAddress => self.names.set(has_address(STRANGER)),
            Trouble::EtcdRestored => {
                self.control_plane.restore();
                self.writer = Writer::new(&self.control_plane);
            }
        }
    }

    pub(crate) fn end(&mut self, trouble: Trouble) {
        match trouble {
            Trouble::Refused => {
                self.relay = Some(Relay::start_at(self.sandbox, self.relay_address, server()));
            }
            Trouble::LosesRequests | Trouble::LosesResponses | Trouble::Forgets => {
                self.set_fault(None);
                // Without the lost bytes, a connection never goes on.
                self.cut();
            }
            Trouble::Breaks | Trouble::Garbage => self.set_fault(None),
            Trouble::Unauthorized => self.write_token(&self.control_plane.token("cproxy")),
            Trouble::Forbidden => self.control_plane.apply([role_binding("cproxy", "cproxy")]),
            Trouble::TooManyRequests => drop(self.control_plane.kubectl(&["delete", "-f", "-"], NO_ROOM)),
            Trouble::EtcdStandsStill => self.control_plane.freeze_etcd(false),
            Trouble::ServerKilled => {
                self.control_plane.start_api_server();
                self.writer = Writer::new(&self.control_plane);
            }
            Trouble::AuthorityRenewed => self.trust(),
            Trouble::NoName | Trouble::WrongAddress | Trouble::InternalError => self.names.set(has_address(RELAY)),
            Trouble::EtcdRestored => {}
        }
    }

    /// The table that the API server's objects give, as rows of `get services`.
    pub(crate) fn resolved(&self) -> Value {
        let get = ["get", "services,endpointslices.discovery.k8s.io", "--all-namespaces", "-o", "json"];
        let file = write_text(self.sandbox.dir(), "objects.json", &self.control_plane.kubectl(&get, ""));
        cproxy(self.sandbox, &["resolve", "--manifests", &file.display().to_string(), "-o", "json"]).json()
    }
}

fn server() -> SocketAddr {
    SocketAddr::new(ADDRESS, PORT)
}

fn has_address(address: Ipv4Addr) -> NameAnswer {
    NameAnswer::Addresses(vec![address])
}

impl Drop for Cluster<'_> {
    fn drop(&mut self) {
        self.control_plane.discard();
    }
}
