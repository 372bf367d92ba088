//! Fate of a connection from outside to the address of a load balancer.

use std::{net::IpAddr, path::Path};

use cproxy_core::{Address, AddressRange, Frontend, parse_address};
use cproxy_datapath::bpf::{PinDir, ReceiveMaps};
use serde::Serialize;

use super::ingress;
use crate::{
    report::ReceivedRow,
    run_dir::{explain_silence, fetch_received},
};

/// Fate of a connection or datagram to the address of a load balancer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ReceiveAnswer {
    /// received, refused, or not received: then the address is as any other to this machine.
    pub verdict: String,
    /// Word for the cause: listener, no-listener, loopback-listener, other-listener, too-old-listener, other-address,
    /// other-port, other-client, policy, or datagrams.
    pub code: String,
    /// Cause, for people.
    pub reason: String,
    /// Address and port as they are received; `None` if they are not.
    pub received: Option<ReceivedRow>,
}

impl ReceiveAnswer {
    fn new(code: &str, reason: String, received: Option<&ReceivedRow>) -> Self {
        let verdict = match code {
            "listener" | "datagrams" => "received",
            "other-address" => "not received",
            _ => "refused",
        };
        Self { verdict: verdict.to_owned(), code: code.to_owned(), reason, received: received.cloned() }
    }

    /// Whether it reaches the pod.
    #[must_use]
    pub fn is_received(&self) -> bool {
        self.verdict == "received"
    }

    /// The answer as a line.
    #[must_use]
    pub fn line(&self) -> String {
        format!("{}: {}\n", self.verdict, self.reason)
    }
}

/// The answer for a call to an address and port, of a client if one is given.
///
/// # Errors
/// Why that cannot be said, as without a running agent.
pub fn receive(to: Frontend, from: Option<IpAddr>, pins: &PinDir, run_dir: &Path) -> Result<ReceiveAnswer, String> {
    let rows = fetch_received(run_dir).map_err(|error| explain_silence(run_dir, &error))?;
    let rows = rows.ok_or("nothing is received here: `cproxy run --receive` does that")?;
    let of_address = |row: &&ReceivedRow| parse_address(&row.address) == Some(to.address);
    let of_port = |row: &&ReceivedRow| row.port == to.port && row.protocol == to.protocol.to_string();
    let Some(row) = rows.iter().filter(of_address).find(of_port) else {
        return Ok(not_received(to, rows.iter().any(|row| of_address(&row))));
    };
    if from.is_some_and(|from| Address::from(from).family() != to.address.family()) {
        return Err("--from: a client and the address that it calls are of the same family".to_owned());
    }
    if let Some(from) = from
        && let Some(answer) = of_client(row, to, from, pins, run_dir)?
    {
        return Ok(answer);
    }
    Ok(of_listener(row))
}

fn not_received(to: Frontend, has_address: bool) -> ReceiveAnswer {
    let Frontend { address, port, protocol } = to;
    if has_address {
        let reason = format!("port {port}/{protocol} of {address} is not received (`cproxy get problems`)");
        return ReceiveAnswer::new("other-port", reason, None);
    }
    let reason = format!(
        "no Service of which this pod is an endpoint has {address} in its status.loadBalancer, it is in no range \
         of --receive, or a device of this machine has it"
    );
    ReceiveAnswer::new("other-address", reason, None)
}

/// The answer if a client is not let in.
fn of_client(
    row: &ReceivedRow,
    to: Frontend,
    from: IpAddr,
    pins: &PinDir,
    run_dir: &Path,
) -> Result<Option<ReceiveAnswer>, String> {
    let ranges = || row.sources.iter().filter_map(|range| AddressRange::parse(range));
    if !row.sources.is_empty() && !ranges().any(|range| range.contains(from.into())) {
        let reason = format!("loadBalancerSourceRanges let in {} alone", row.sources.join(", "));
        return Ok(Some(ReceiveAnswer::new("other-client", reason, Some(row))));
    }
    let of_pod = Frontend { port: row.pod_port, ..to };
    let verdict = ingress(from, of_pod, pins, run_dir).transpose().map_err(|error| error.to_string())?;
    Ok(verdict.filter(|answer| !answer.is_allowed()).map(|answer| {
        let reason = format!("port {} of the pod: {}", row.pod_port, answer.line().trim());
        ReceiveAnswer::new("policy", reason, Some(row))
    }))
}

fn of_listener(row: &ReceivedRow) -> ReceiveAnswer {
    let port = row.pod_port;
    let service = row.service.as_ref().map_or_else(
        || "for sockets that stand, as no Service wants it any more".to_owned(),
        |service| format!("for Service {service}"),
    );
    let (code, reason) = match row.listener.as_deref() {
        None => ("datagrams", format!("datagrams go to port {port} of this pod, {service}")),
        Some("yes") => ("listener", format!("a socket listens on port {port} of this pod, {service}")),
        Some("loopback") => (
            "loopback-listener",
            format!("the socket that listens on port {port} is bound to a loopback address: let it listen on all"),
        ),
        Some("elsewhere") => (
            "other-listener",
            format!("the socket that listens on port {port} is bound to another address: let it listen on all"),
        ),
        Some("too-old") => (
            "too-old-listener",
            format!(
                "the socket that listens on port {port} is not found: it has listened since before cproxy ran (start \
                 its program again), is bound to an interface, is an MPTCP socket, which this kernel keeps out, or \
                 came when {} others listened (received_listeners_lost of `cproxy get counters`)",
                ReceiveMaps::LISTENERS_MAX
            ),
        ),
        Some(_) => ("no-listener", format!("no socket listens on port {port} of this pod")),
    };
    ReceiveAnswer::new(code, reason, Some(row))
}
