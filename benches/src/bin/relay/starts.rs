//! The agent's start through a relay, beside its start from the API server.

use anyhow::{Context as _, Result};
use cproxy_benches::start;
use cproxy_tests::{
    control_plane::{ADDRESS, NODE, PORT},
    kube_proxy::nft,
    population::Shape,
    process::Agent,
};
use serde_json::Value;

use crate::place::Place;

/// Source of an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    ApiServer,
    Relay,
}

/// One start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Start {
    /// Time until `ready` is there, and until the lists are complete, as the agent logs it.
    pub(crate) ready_ms: f64,
    pub(crate) list_ms: f64,
    pub(crate) cpu_ms: f64,
    /// Bytes of packets from the server, until the agent has ended.
    pub(crate) bytes: u64,
}

/// Starts of one source.
pub(crate) struct Starts {
    pub(crate) shape: Shape,
    pub(crate) source: Source,
    pub(crate) all: Vec<Start>,
}

/// Starts an agent from each source in turn.
pub(crate) fn measure(place: &Place<'_>, count: u32) -> Result<Vec<Starts>> {
    let relay = place.start_relay(0, &[])?;
    count_bytes(place);
    let mut both =
        [Source::ApiServer, Source::Relay].map(|source| Starts { shape: place.shape, source, all: Vec::new() });
    for _ in 0..count {
        for starts in &mut both {
            let start = start(place, starts.source)?;
            eprintln!("{} from {:?}: {start:?}", place.shape, starts.source);
            starts.all.push(start);
        }
    }
    nft(place.sandbox, &["delete", "table", "ip", "starts"], "");
    drop(relay);
    Ok(both.into())
}

fn start(place: &Place<'_>, source: Source) -> Result<Start> {
    let (url, port) = match source {
        Source::ApiServer => (place.control_plane.server_url(), PORT.to_string()),
        Source::Relay => {
            let address = Place::relay_address();
            let port = address.rsplit_once(':').context("an address has a port")?.1;
            (format!("http://{address}"), port.to_owned())
        }
    };
    let agent = Agent::new(place.sandbox).kubeconfig(place.control_plane.agent_kubeconfig());
    let agent = agent.args(["--apiserver", &url, "--node-name", NODE]);
    let before = sent_bytes(place, &port)?;
    let found = start::measure(place.sandbox, agent)?;
    let bytes = sent_bytes(place, &port)? - before;
    let field = |name: &str| found.get(name).and_then(Value::as_f64).unwrap_or(f64::NAN);
    Ok(Start { ready_ms: field("ready_ms"), list_ms: field("list_ms"), cpu_ms: field(start::CPU), bytes })
}

/// Starts to count the bytes that API server and relay send to clients.
fn count_bytes(place: &Place<'_>) {
    let rules = format!(
        "table ip starts {{\n\
             counter of_{PORT} {{ }}\n\
             counter of_7443 {{ }}\n\
             chain output {{\n\
                 type filter hook output priority 0;\n\
                 ip saddr {ADDRESS} tcp sport {PORT} counter name of_{PORT}\n\
                 ip saddr 127.0.0.1 tcp sport 7443 counter name of_7443\n\
             }}\n\
         }}\n"
    );
    nft(place.sandbox, &["-f", "-"], &rules);
}

fn sent_bytes(place: &Place<'_>, port: &str) -> Result<u64> {
    let output = nft(place.sandbox, &["--json", "list", "counter", "ip", "starts", &format!("of_{port}")], "").json();
    let items = output.get("nftables").and_then(Value::as_array).context("no counters")?;
    items.iter().find_map(|item| item.pointer("/counter/bytes")?.as_u64()).context("no counter of bytes")
}
