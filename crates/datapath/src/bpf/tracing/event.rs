//! Events in the agent's types.

use cproxy_core::{Address, Backend, Frontend};
use cproxy_ebpf::{
    FrontendKey,
    observation::{Call, Event, Reason, Verdict},
    policy::NO_RULE,
};
use cproxy_policy::Direction;

use crate::bpf::encoding;

/// Event of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceEvent {
    /// `CLOCK_MONOTONIC` in nanoseconds.
    pub time_ns: u64,
    /// Id of the process; `None` before Linux 6.1.
    pub pid: Option<u32>,
    /// Name of the thread; `None` before Linux 6.1.
    pub command: Option<String>,
    /// User of the process.
    pub uid: u32,
    /// Id of the process's cgroup.
    pub cgroup_id: u64,
    /// Cookie of the socket's network namespace.
    pub netns_cookie: u64,
    /// Cookie of the socket.
    pub socket_cookie: u64,
    /// Destination that the application names.
    pub frontend: Frontend,
    /// Backend, if there is one.
    pub backend: Option<Backend>,
    /// Verdict, such as `forwarded`.
    pub verdict: &'static str,
    /// System call, such as `connect`.
    pub call: &'static str,
    /// Reason, such as `random`, if there is one.
    pub reason: Option<&'static str>,
    /// Denial by network policy. The frontend is then the peer, with the port that was called.
    pub denial: Option<TracedDenial>,
}

/// Denial by network policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TracedDenial {
    /// Direction of the traffic.
    pub direction: Direction,
    /// Rule that has denied it; `None`: no rule has allowed it.
    pub rule: Option<u32>,
}

/// Names of verdicts.
const VERDICTS: [(Verdict, &str); 8] = [
    (Verdict::Forwarded, "forwarded"),
    (Verdict::Refused, "refused"),
    (Verdict::Dropped, "dropped"),
    (Verdict::Direct, "direct"),
    (Verdict::Reversed, "reversed"),
    (Verdict::Closed, "closed"),
    (Verdict::Denied, "denied"),
    (Verdict::Audited, "audited"),
];

/// Name of a verdict.
pub(super) fn name_of(verdict: Verdict) -> Option<&'static str> {
    VERDICTS.into_iter().find(|(known, _)| *known == verdict).map(|(_, name)| name)
}

/// Names of system calls.
const CALLS: [(Call, &str); 5] = [
    (Call::Connect, "connect"),
    (Call::Send, "send"),
    (Call::Receive, "receive"),
    (Call::PeerName, "getpeername"),
    (Call::Close, "close"),
];

/// Names of reasons.
const REASONS: [(Reason, &str); 11] = [
    (Reason::Random, "random"),
    (Reason::RoundRobin, "round-robin"),
    (Reason::Affinity, "affinity"),
    (Reason::NoEndpoint, "no-endpoint"),
    (Reason::UnknownPort, "unknown-port"),
    (Reason::NotAllowed, "not-allowed"),
    (Reason::ExcludedPort, "excluded-port"),
    (Reason::ExcludedUid, "excluded-uid"),
    (Reason::ExcludedCgroup, "excluded-cgroup"),
    (Reason::TableReplaced, "table-replaced"),
    (Reason::NoMemory, "no-memory"),
];

/// Element of the ring buffer, read field by field in the order of the structure.
struct Fields<'b>(&'b [u8]);

impl Fields<'_> {
    fn bytes<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*bytes)
    }

    fn address(&mut self) -> Option<[u32; 4]> {
        let words = [self.bytes()?, self.bytes()?, self.bytes()?, self.bytes()?];
        Some(words.map(u32::from_ne_bytes))
    }

    fn event(&mut self) -> Option<Event> {
        let numbers = [self.bytes()?, self.bytes()?, self.bytes()?, self.bytes()?];
        let [time_ns, socket_cookie, netns_cookie, cgroup_id] = numbers.map(u64::from_ne_bytes);
        let (vip, backend) = (self.address()?, self.address()?);
        let [vip_port, backend_port] = [self.bytes()?, self.bytes()?].map(u16::from_ne_bytes);
        let [protocol, verdict, call, reason] = self.bytes()?;
        let [pid, uid] = [self.bytes()?, self.bytes()?].map(u32::from_ne_bytes);
        let command = self.bytes()?;
        Some(Event {
            time_ns,
            socket_cookie,
            netns_cookie,
            cgroup_id,
            vip,
            backend,
            vip_port,
            backend_port,
            protocol,
            verdict,
            call,
            reason,
            pid,
            uid,
            command,
        })
    }
}

impl TraceEvent {
    /// Reads an element of the ring buffer; `None` if it is none of this build.
    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let event = Fields(bytes).event()?;
        let (port, protocol) = (event.vip_port, event.protocol);
        let frontend = encoding::frontend(&FrontendKey { address: event.vip, port, protocol, zero: 0 })?;
        let is_denial = [Verdict::Denied, Verdict::Audited].iter().any(|verdict| *verdict as u8 == event.verdict);
        let [rule, ..] = event.backend;
        let direction = if event.call == Call::Receive as u8 { Direction::Ingress } else { Direction::Egress };
        let denial = is_denial.then(|| TracedDenial { direction, rule: Some(rule).filter(|rule| *rule != NO_RULE) });
        let backend = (!is_denial && event.backend != [0; 4])
            .then(|| Backend { address: Address::from_words(event.backend), port: u16::from_be(event.backend_port) });
        let command: Vec<u8> = event.command.into_iter().take_while(|byte| *byte != 0).collect();
        Some(Self {
            time_ns: event.time_ns,
            pid: Some(event.pid).filter(|pid| *pid != 0),
            command: Some(String::from_utf8_lossy(&command).into_owned()).filter(|command| !command.is_empty()),
            uid: event.uid,
            cgroup_id: event.cgroup_id,
            netns_cookie: event.netns_cookie,
            socket_cookie: event.socket_cookie,
            frontend,
            backend,
            verdict: VERDICTS.into_iter().find(|(known, _)| *known as u8 == event.verdict)?.1,
            call: CALLS.into_iter().find(|(known, _)| *known as u8 == event.call)?.1,
            denial,
            reason: REASONS.into_iter().find(|(known, _)| *known as u8 == event.reason).map(|(_, name)| name),
        })
    }
}
