//! Runs the steps of a cell and records the application's observations and the receivers of messages, in words that are
//! the same for a host and for a Service.

use std::{
    collections::BTreeMap,
    io,
    net::{SocketAddr, UdpSocket},
    sync::atomic::{AtomicU64, Ordering},
};

use cproxy_tests::witness::{Token, Witness, parse_answer, response};

use crate::{
    message::Buffer,
    script::{Role, Step},
    socket::{ReceiveCall, SendCall, Socket, Waiting},
    world::{Form, Host, SocketKind, count_lost_answer, host, patience},
};

/// Host that the application never sends to.
pub(crate) const STRANGER: Host = host(9);
/// Source address in control data.
pub(crate) const SOURCE: Host = host(8);

/// Unspecified source.
const ANY: Host = Host::new([0; 4], [0; 8]);

const STRANGER_PORT: u16 = 9;
const STRANGER_NAME: &str = "stranger";

/// A host or Service in a role.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Party {
    /// Host at which the application finds it.
    pub(crate) host: Host,
    /// Port at which the application finds it.
    pub(crate) port: u16,
    /// Where it stands for it that nobody listens, as connected datagram sockets find it.
    pub(crate) closed: Option<(Host, u16)>,
    /// Names of the servers behind it.
    pub(crate) servers: &'static [&'static str],
}

/// The party in each role.
pub(crate) type Cast = BTreeMap<Role, Party>;

/// One run of a script.
pub(crate) struct Play<'a> {
    cast: &'a Cast,
    witness: &'a Witness,
    form: Form,
    kind: SocketKind,
    socket: Socket,
    /// Role that the socket is connected to.
    connected: Option<Role>,
    /// Number of answers under way.
    outstanding: usize,
    /// Last server of each role, since the socket last connected.
    answered_by: BTreeMap<Role, String>,
    sent: Vec<Sent>,
    trace: Vec<String>,
}

/// A message with its source port.
struct Sent {
    token: Token,
    port: Option<u16>,
    is_gone: bool,
}

/// Runs a script and returns the observations.
pub(crate) fn play(cast: &Cast, witness: &Witness, form: Form, kind: SocketKind, script: &[Step]) -> Vec<String> {
    let socket = if kind == SocketKind::Tcp { form.tcp() } else { form.udp() };
    let (sent, trace) = (Vec::new(), Vec::new());
    let answered_by = BTreeMap::new();
    let mut play =
        Play { cast, witness, form, kind, socket, connected: None, outstanding: 0, answered_by, sent, trace };
    for step in script {
        let line = format!("{step:?}: {}", play.step(step));
        play.trace.push(line);
    }
    play.find_receiver();
    play.trace
}

impl Play<'_> {
    fn step(&mut self, step: &Step) -> String {
        match step {
            Step::Connect(role) => self.connect(Socket::connect, *role),
            Step::ConnectByUring(role) => self.connect(Socket::connect_by_uring, *role),
            Step::Disconnect => {
                self.answered_by.clear();
                self.connected = None;
                outcome(self.socket.disconnect(), |()| "ok".to_owned())
            }
            Step::Peer => outcome(self.socket.peer(), |address| self.name_of(address)),
            Step::Send(call, to) => {
                // Answers to another source would not reach a connected socket.
                let source = if self.kind == SocketKind::UdpUnconnected { SOURCE } else { ANY };
                let result = self.send(*call, to, source);
                let gone = to.iter().take(*result.as_ref().unwrap_or(&0));
                self.outstanding += gone.filter(|role| !self.is_refused(**role)).count();
                outcome(result, |count| format!("{count} sent"))
            }
            Step::SendAside(call, role) => outcome(self.send(*call, &[*role], SOURCE), |count| format!("{count} sent")),
            Step::Receive(call, count) => self.receive(*call, *count),
            Step::Stranger => self.stranger(),
        }
    }

    fn connect(&mut self, call: fn(&Socket, SocketAddr) -> io::Result<()>, role: Role) -> String {
        let party = &self.cast[&role];
        let (host, port) = party.closed.unwrap_or((party.host, party.port));
        let result = call(&self.socket, self.form.address(host, port));
        if result.is_ok() {
            self.answered_by.clear();
            self.connected = Some(role);
        }
        outcome(result, |()| "ok".to_owned())
    }

    /// Sends to each of `to`. Control data asks for `source`.
    fn send(&mut self, call: SendCall, to: &[Option<Role>], source: Host) -> io::Result<usize> {
        let first = self.sent.len();
        let mut messages = Vec::new();
        for role in to {
            let token = fresh_token();
            let mut message = Buffer::sending(&token, role.map(|role| self.address(role)));
            if call == SendCall::SendmsgCmsg {
                message.control(self.form.address(source, 0).ip());
            }
            messages.push(message);
            self.sent.push(Sent { token, port: None, is_gone: false });
        }
        let result = self.socket.send(call, &mut messages);
        let port = self.socket.local().ok().map(|address| address.port());
        let is_refused: Vec<_> = to.iter().map(|role| self.is_refused(*role)).collect();
        let gone = self.sent.iter_mut().skip(first).take(*result.as_ref().unwrap_or(&0));
        for (sent, is_refused) in gone.zip(&is_refused) {
            (sent.is_gone, sent.port) = (!is_refused, port);
        }
        if result.as_ref().is_ok_and(|&count| is_refused.iter().take(count).any(|is_refused| *is_refused)) {
            self.socket.wait_for_refusal();
        }
        result
    }

    /// Whether a datagram is sent to a peer where nobody listens.
    fn is_refused(&self, to: Option<Role>) -> bool {
        let is_peer = to.is_none() && self.kind != SocketKind::Tcp;
        is_peer && self.connected.is_some_and(|role| self.cast[&role].servers.is_empty())
    }

    /// Receives messages and sorts their descriptions, since answers of several servers come in any order.
    fn receive(&mut self, call: ReceiveCall, count: usize) -> String {
        let expected = self.outstanding.min(count);
        let (waiting, count) = if expected == 0 { (Waiting::No, count) } else { (Waiting::Yes, expected) };
        self.outstanding -= expected;
        let per_call = if call == ReceiveCall::Recvmmsg { count } else { 1 };
        let mut seen = Vec::new();
        while seen.len() < count {
            let mut messages: Vec<_> = (0..per_call).map(|_| Buffer::receiving()).collect();
            match self.socket.receive(call, waiting, &mut messages) {
                Ok(received) => seen.extend(messages.iter().take(received).map(|message| self.describe(message))),
                Err(error) => {
                    seen.push(error_name(&error));
                    break;
                }
            }
            if seen.len() < count && call == ReceiveCall::Recvmmsg {
                seen.push("nothing more".to_owned());
                break;
            }
        }
        if expected > 0 && seen.len() < count || seen.iter().any(|line| line == "EAGAIN") && waiting == Waiting::Yes {
            count_lost_answer();
        }
        seen.sort();
        seen.join(", ")
    }

    fn describe(&mut self, message: &Buffer) -> String {
        let from = message.name().map_or_else(|| "no address".to_owned(), |address| self.name_of(address));
        let Some((_, server)) = parse_answer(message.bytes()) else {
            return format!("{} bytes from {from}", message.bytes().len());
        };
        let Some(role) = self.role_of_server(&server) else { return format!("{server}'s answer from {from}") };
        let first = self.answered_by.entry(role).or_insert_with(|| server.clone());
        let constancy = if *first == server { "" } else { " (not the server of before)" };
        format!("{role:?}'s answer{constancy} from {from}")
    }

    fn stranger(&mut self) -> String {
        let port = self.socket.local().expect("a bound socket").port();
        if self.kind != SocketKind::UdpUnconnected || port == 0 {
            return "nowhere to send to".to_owned();
        }
        let to_itself = if self.form == Form::V6 { "::1" } else { "127.0.0.1" };
        let socket = UdpSocket::bind(stranger_address(self.form)).expect("the stranger's address");
        socket.send_to(&response(fresh_token(), STRANGER_NAME), (to_itself, port)).expect("it is on this host");
        self.outstanding += 1;
        "sent".to_owned()
    }

    /// Checks that each sent message has one receiver, and each failed one has none.
    fn find_receiver(&mut self) {
        let mut lines = Vec::new();
        for (number, sent) in self.sent.iter().enumerate() {
            let receipts = if sent.is_gone {
                self.witness.wait(sent.token, patience())
            } else {
                self.witness.receipts(sent.token)
            };
            let mut line = format!("message {number} received by");
            for receipt in &receipts {
                let role = self.role_of_server(&receipt.server);
                let by = role.map_or_else(|| receipt.server.clone(), |role| format!("{role:?}"));
                let port = if Some(receipt.client.port()) == sent.port { "" } else { " from another port" };
                let source = if SOURCE.is_at(receipt.client.ip()) { " from the source asked for" } else { "" };
                line.extend([" ", &by, port, source]);
            }
            if sent.is_gone && receipts.is_empty() {
                count_lost_answer();
            }
            lines.push(line);
        }
        self.trace.extend(lines);
    }

    fn address(&self, role: Role) -> SocketAddr {
        let party = self.cast[&role];
        self.form.address(party.host, party.port)
    }

    /// Description of an address: its role and form.
    fn name_of(&self, address: SocketAddr) -> String {
        let form = match address {
            SocketAddr::V4(_) => "v4",
            SocketAddr::V6(address) if address.ip().to_ipv4_mapped().is_some() => "v4-mapped",
            SocketAddr::V6(_) => "v6",
        };
        let is_here = |host: Host, port| host.is_at(address.ip()) && port == address.port();
        let is_at = |party: &&Party| {
            is_here(party.host, party.port) || party.closed.is_some_and(|(host, port)| is_here(host, port))
        };
        if STRANGER.is_at(address.ip()) && address.port() == STRANGER_PORT {
            return format!("the stranger ({form})");
        }
        match self.cast.iter().find(|(_, party)| is_at(party)) {
            Some((role, _)) => format!("{role:?} ({form})"),
            None => address.to_string(),
        }
    }

    fn role_of_server(&self, server: &str) -> Option<Role> {
        self.cast.iter().find(|(_, party)| party.servers.contains(&server)).map(|(role, _)| *role)
    }
}

fn stranger_address(form: Form) -> SocketAddr {
    let form = if form == Form::V6 { Form::V6 } else { Form::V4 };
    form.address(STRANGER, STRANGER_PORT)
}

fn outcome<T>(result: io::Result<T>, describe: impl FnOnce(T) -> String) -> String {
    result.map_or_else(|error| error_name(&error), describe)
}

/// Name of an expected error.
pub(crate) fn error_name(error: &io::Error) -> String {
    let name = match error.raw_os_error() {
        Some(libc::EAGAIN) => "EAGAIN",
        Some(libc::EAFNOSUPPORT) => "EAFNOSUPPORT",
        Some(libc::ECONNREFUSED) => "ECONNREFUSED",
        Some(libc::ECONNRESET) => "ECONNRESET",
        Some(libc::EDESTADDRREQ) => "EDESTADDRREQ",
        Some(libc::EHOSTUNREACH) => "EHOSTUNREACH",
        Some(libc::EINVAL) => "EINVAL",
        Some(libc::EISCONN) => "EISCONN",
        Some(libc::ENETUNREACH) => "ENETUNREACH",
        Some(libc::ENOTCONN) => "ENOTCONN",
        Some(libc::EPERM) => "EPERM",
        Some(libc::EPIPE) => "EPIPE",
        _ => return error.to_string(),
    };
    name.to_owned()
}

/// A new, unique token.
pub(crate) fn fresh_token() -> Token {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes()
}
