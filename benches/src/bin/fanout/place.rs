//! The control plane that all clients follow, and counts of its cost.

use std::{
    fs,
    net::IpAddr,
    ops::Range,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use cproxy_benches::{node, subject};
use cproxy_tests::{
    control_plane::{ADDRESS, ControlPlane, PORT, role_binding},
    kube_proxy::nft,
    population::Shape,
    sandbox::{NEIGHBOURS_CIDR, Sandbox},
    usage::{Memory, cpu_time, forget_peak},
    writer::Writer,
};
use serde_json::Value;

use crate::fleet::Fleet;

/// User that reads a Service while agents start. Unlike an administrator it has to queue, and not with the agents.
pub(crate) const BYSTANDER: &str = "nobody";
const BYSTANDER_ROLE: &str = "system:aggregate-to-view";

/// Profile of the API server's heap, after a garbage collection.
const HEAP: &str = "/debug/pprof/heap?gc=1&debug=1";

/// Limit on a run of `nft`, and on the end of network namespaces.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Pause between two polls for the end of network namespaces.
const PAUSE: Duration = Duration::from_millis(50);

/// A process is at rest if it uses at most one of this many parts of a CPU: a client, and the API server, which is
/// never quite idle.
const CLIENT_PART: u32 = 50;
const SERVER_PART: u32 = 5;

/// Bytes that a client at rest may receive: bookmarks and news of a lease.
const BYTES_AT_REST: u64 = 2 << 10;

/// The sandbox and its control plane.
pub(crate) struct Place<'s> {
    pub(crate) sandbox: &'s Sandbox,
    pub(crate) control_plane: ControlPlane<'s>,
    /// The agent of `--beside`.
    pub(crate) before: Option<PathBuf>,
    writer: Writer,
    /// Number of changes of the Service so far.
    changes: usize,
    services: u32,
}

/// Counters at one moment.
#[derive(Clone, Copy)]
pub(crate) struct Moment {
    pub(crate) at: Instant,
    pub(crate) server_cpu: Duration,
    pub(crate) clients_cpu: Duration,
    pub(crate) received_bytes: u64,
    /// Connections of clients that the API server has accepted, all fleets together.
    pub(crate) accepted: u64,
}

/// Cost between two moments, of all clients together.
pub(crate) struct Cost {
    /// CPU time of the API server beyond that of an idle one.
    pub(crate) server_cpu_s: f64,
    pub(crate) clients_cpu: Duration,
    pub(crate) sent_bytes: u64,
    pub(crate) connections: u64,
}

impl<'s> Place<'s> {
    /// Starts a control plane with the measured Service alone.
    pub(crate) fn prepare(sandbox: &'s Sandbox, before: Option<PathBuf>) -> Self {
        let control_plane = ControlPlane::start(sandbox);
        node::create(sandbox, &control_plane);
        control_plane.apply([role_binding(BYSTANDER_ROLE, BYSTANDER)]);
        count_connections(sandbox);
        let writer = Writer::new(&control_plane);
        writer.create(subject::objects());
        Self { sandbox, control_plane, before, writer, changes: 0, services: 0 }
    }

    /// Creates the Services that are missing.
    pub(crate) fn grow(&mut self, shape: Shape) {
        eprintln!("{shape}: creating the objects");
        let missing: Range<u32> = self.services..shape.services;
        self.writer.create(shape.objects(missing));
        self.services = shape.services;
    }

    /// Process ID of the API server.
    pub(crate) fn server(&self) -> Result<u32> {
        self.control_plane.api_server_pid().context("the API server does not run")
    }

    /// The measured Service's present backend.
    pub(crate) fn backend(&self) -> IpAddr {
        subject::backend(self.changes)
    }

    /// Makes one change and returns the time from sending it until each client has it.
    pub(crate) fn change(&mut self, fleet: &Fleet) -> Result<Vec<Duration>> {
        let looking = fleet.look_for(subject::backend(self.changes + 1));
        let sent = Instant::now();
        self.change_unseen();
        let seen = looking.wait().with_context(|| format!("change {}", self.changes))?;
        Ok(seen.into_iter().map(|seen| seen.saturating_duration_since(sent)).collect())
    }

    /// Makes one change.
    pub(crate) fn change_unseen(&mut self) {
        self.changes += 1;
        self.writer.replace([subject::slice(self.changes)]);
    }

    /// Crashes and restarts the API server, and returns the time until it is ready.
    pub(crate) fn restart(&mut self) -> Duration {
        let crashed = Instant::now();
        self.control_plane.kill_api_server();
        self.control_plane.start_api_server();
        let took = crashed.elapsed();
        self.writer = Writer::new(&self.control_plane);
        took
    }

    /// Memory of the API server that is in use, without garbage and without what is only kept for later: heap and
    /// stacks.
    pub(crate) fn live_bytes(&self) -> Result<u64> {
        let collect = || self.control_plane.kubectl(&["get", "--raw", HEAP], "");
        // Go's pools keep what they hold for one more collection.
        collect();
        live_bytes(&collect()).context("no sizes in the heap's profile")
    }

    /// Memory of the API server.
    pub(crate) fn memory(&self) -> Result<Memory> {
        self.server().map(Memory::of)
    }

    /// Resets the peak of the API server's memory to its present resident memory, and returns that.
    pub(crate) fn forget_peak(&self) -> Result<u64> {
        forget_peak(self.server()?);
        Ok(self.memory()?.resident)
    }

    /// Share of a CPU that the API server takes while it is idle.
    pub(crate) fn idle_rate(&self, interval: Duration) -> Result<f64> {
        let server = self.server()?;
        let (before, started) = (cpu_time(server), Instant::now());
        thread::sleep(interval);
        Ok((cpu_time(server) - before).as_secs_f64() / started.elapsed().as_secs_f64())
    }

    /// The counters, with those of the fleet if there is one.
    pub(crate) fn moment(&self, fleet: Option<&Fleet>) -> Result<Moment> {
        Ok(Moment {
            at: Instant::now(),
            server_cpu: cpu_time(self.server()?),
            clients_cpu: fleet.map(Fleet::cpu).unwrap_or_default(),
            received_bytes: fleet.map(Fleet::received_bytes).transpose()?.unwrap_or_default(),
            accepted: self.accepted()?,
        })
    }

    /// Waits until neither API server nor clients have done anything for an interval.
    pub(crate) fn rest(&self, fleet: Option<&Fleet>, interval: Duration) -> Result<Moment> {
        let count = fleet.map_or(0, |fleet| fleet.pids().len() as u32);
        let deadline = Instant::now() + subject::TIMEOUT;
        let mut before = self.moment(fleet)?;
        loop {
            thread::sleep(interval);
            let now = self.moment(fleet)?;
            if now.is_at_rest_since(&before, interval, count) {
                return Ok(now);
            }
            ensure!(Instant::now() < deadline, "not at rest within {:?}", subject::TIMEOUT);
            before = now;
        }
    }

    /// Waits until the network namespaces of former clients are gone, so that their end costs no later clients.
    pub(crate) fn clear(&self) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        while fs::read_to_string("/proc/thread-self/net/dev").context("reading the links")?.contains("near") {
            ensure!(Instant::now() < deadline, "the links of former clients stay");
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    fn accepted(&self) -> Result<u64> {
        packets(&nft(self.sandbox, &["--json", "list", "counter", "ip", "fanout", "accepted"], "").stdout)
            .context("no counter of connections")
    }
}

impl Moment {
    /// Cost since `before`. `idle` is the share of a CPU that an idle API server takes.
    pub(crate) fn since(&self, before: &Self, idle: f64) -> Cost {
        let interval = self.at.saturating_duration_since(before.at).as_secs_f64();
        let server_cpu = self.server_cpu.saturating_sub(before.server_cpu).as_secs_f64();
        Cost {
            server_cpu_s: server_cpu - idle * interval,
            clients_cpu: self.clients_cpu.saturating_sub(before.clients_cpu),
            sent_bytes: self.received_bytes.saturating_sub(before.received_bytes),
            connections: self.accepted - before.accepted,
        }
    }

    fn is_at_rest_since(&self, before: &Self, interval: Duration, clients: u32) -> bool {
        self.server_cpu.saturating_sub(before.server_cpu) <= interval / SERVER_PART
            && self.clients_cpu.saturating_sub(before.clients_cpu) <= interval / CLIENT_PART * clients
            && self.received_bytes - before.received_bytes <= BYTES_AT_REST * u64::from(clients)
    }
}

/// Starts to count the connections that the API server accepts from network namespaces beside the sandbox's: the
/// packets with SYN and ACK that it sends there.
fn count_connections(sandbox: &Sandbox) {
    let rules = format!(
        "table ip fanout {{\n\
             counter accepted {{ }}\n\
             chain output {{\n\
                 type filter hook output priority 0;\n\
                 ip saddr {ADDRESS} ip daddr {NEIGHBOURS_CIDR} tcp sport {PORT} tcp flags & (syn | ack) == syn | ack \
                 counter name accepted\n\
             }}\n\
         }}\n"
    );
    nft(sandbox, &["-f", "-"], &rules);
}

/// Packets of the only counter in the output of `nft --json`.
fn packets(nft: &str) -> Option<u64> {
    let output = serde_json::from_str::<Value>(nft).ok()?;
    output.get("nftables")?.as_array()?.iter().find_map(|item| item.pointer("/counter/packets")?.as_u64())
}

/// Sum of the heap's live objects and the stacks, from a heap profile as text.
fn live_bytes(profile: &str) -> Option<u64> {
    let number = |name: &str| {
        let line = profile.lines().find_map(|line| line.strip_prefix("# ")?.strip_prefix(name)?.strip_prefix(" = "))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    Some(number("HeapAlloc")? + number("Stack")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moment(server_ms: u64, clients_ms: u64, received_bytes: u64) -> Moment {
        let [server_cpu, clients_cpu] = [server_ms, clients_ms].map(Duration::from_millis);
        Moment { at: Instant::now(), server_cpu, clients_cpu, received_bytes, accepted: 0 }
    }

    #[test]
    fn rest_is_when_server_clients_and_links_are_quiet() {
        let before = moment(1_000, 1_000, 1_000);
        let is_at_rest = |now: Moment| now.is_at_rest_since(&before, Duration::from_secs(1), 10);
        assert!(is_at_rest(moment(1_200, 1_200, 1_000 + 10 * BYTES_AT_REST)));
        assert!(!is_at_rest(moment(1_201, 1_000, 1_000)));
        assert!(!is_at_rest(moment(1_000, 1_201, 1_000)));
        assert!(!is_at_rest(moment(1_000, 1_000, 1_001 + 10 * BYTES_AT_REST)));
    }

    #[test]
    fn a_cost_is_without_that_of_an_idle_server() {
        let before = moment(0, 0, 5);
        let after = Moment { at: before.at + Duration::from_secs(2), accepted: 3, ..moment(1_000, 20, 9) };
        let cost = after.since(&before, 0.1);
        assert!((cost.server_cpu_s - 0.8).abs() < 1e-9);
        assert_eq!((cost.clients_cpu, cost.sent_bytes, cost.connections), (Duration::from_millis(20), 4, 3));
    }

    #[test]
    fn live_memory_is_that_of_objects_and_stacks() {
        let profile = "heap profile: 1: 2\n# runtime.MemStats\n# HeapAlloc = 100\n# HeapSys = 900\n# Stack = 20 / 30\n";
        assert_eq!(live_bytes(profile), Some(120));
        assert_eq!(live_bytes("# HeapAlloc = 100\n"), None);
    }

    #[test]
    fn the_counter_is_found_in_the_list() {
        let output = r#"{"nftables": [{"metainfo": {}}, {"counter": {"name": "accepted", "packets": 7, "bytes": 1}}]}"#;
        assert_eq!(packets(output), Some(7));
        assert_eq!(packets(r#"{"nftables": []}"#), None);
        assert_eq!(packets("no JSON"), None);
    }
}
