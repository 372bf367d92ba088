//! Steps of an application in each cell of the matrix, the same against a host and against a Service.

use crate::{
    socket::{ReceiveCall, SendCall},
    world::SocketKind,
};

/// Call under test in a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Call {
    Connect,
    Reconnect,
    /// AF_UNSPEC, then reconnect.
    Unspec,
    Sendto,
    Sendmsg,
    SendmsgCmsg,
    Sendmmsg,
    Send,
    Recv,
    Recvfrom,
    Recvmsg,
    Recvmmsg,
    Getpeername,
    IoUring,
}

impl Call {
    pub(crate) const ALL: [Self; 14] = [
        Self::Connect,
        Self::Reconnect,
        Self::Unspec,
        Self::Sendto,
        Self::Sendmsg,
        Self::SendmsgCmsg,
        Self::Sendmmsg,
        Self::Send,
        Self::Recv,
        Self::Recvfrom,
        Self::Recvmsg,
        Self::Recvmmsg,
        Self::Getpeername,
        Self::IoUring,
    ];
}

/// Role of the application's peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Role {
    /// The destination under test.
    Target,
    /// A Service that forwards, in every cell.
    Other,
    /// A host that belongs to no Service, in every cell.
    Plain,
}

/// One system call, or several of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Connect(Role),
    ConnectByUring(Role),
    /// Connects with AF_UNSPEC.
    Disconnect,
    Peer,
    /// Sends messages, each to a role or to the socket's peer. Several go with one `sendmmsg()`.
    Send(SendCall, Vec<Option<Role>>),
    /// Sends without reading an answer, since the socket may be connected to another peer.
    SendAside(SendCall, Option<Role>),
    /// Receives this number of messages.
    Receive(ReceiveCall, usize),
    /// Sends a datagram to the socket from a host that the socket has never sent to.
    Stranger,
}

use Role::{Other, Plain, Target};
use Step::{Connect, ConnectByUring, Disconnect, Peer, Receive, SendAside, Stranger};

/// Steps of a cell.
pub(crate) fn script(kind: SocketKind, call: Call) -> Vec<Step> {
    match kind {
        SocketKind::Tcp | SocketKind::UdpConnected => connected(call),
        SocketKind::UdpUnconnected => unconnected(call),
    }
}

fn send(call: SendCall, to: Option<Role>) -> Step {
    Step::Send(call, vec![to])
}

/// Sends to the socket's peer and receives the answer.
fn exchange() -> [Step; 2] {
    [send(SendCall::Send, None), Receive(ReceiveCall::Recvfrom, 1)]
}

/// Sends to a role and receives the answer.
fn ask(role: Role) -> [Step; 2] {
    [send(SendCall::Sendto, Some(role)), Receive(ReceiveCall::Recvfrom, 1)]
}

/// Connects and checks the connection.
fn visit(role: Role) -> Vec<Step> {
    steps([vec![Connect(role), Peer], exchange().into()])
}

fn steps<const N: usize>(parts: [Vec<Step>; N]) -> Vec<Step> {
    parts.into_iter().flatten().collect()
}

fn connected(call: Call) -> Vec<Step> {
    match call {
        Call::Connect => visit(Target),
        Call::Reconnect => [Target, Other, Target, Plain, Target].into_iter().flat_map(visit).collect(),
        Call::Unspec => steps([
            visit(Target),
            vec![Disconnect, Peer, send(SendCall::Send, None)],
            visit(Target),
            vec![Disconnect],
            visit(Other),
            vec![Disconnect],
            visit(Target),
        ]),
        Call::Sendto => connected_sends(SendCall::Sendto),
        Call::Sendmsg => connected_sends(SendCall::Sendmsg),
        Call::SendmsgCmsg => connected_sends(SendCall::SendmsgCmsg),
        Call::Sendmmsg => steps([
            connected_sends(SendCall::Sendmmsg),
            vec![Step::Send(SendCall::Sendmmsg, vec![None, Some(Target), None])],
        ]),
        Call::Send => steps([vec![Connect(Target)], exchange().into(), exchange().into(), vec![Peer]]),
        Call::Recv => connected_receives(ReceiveCall::Recv),
        Call::Recvfrom => connected_receives(ReceiveCall::Recvfrom),
        Call::Recvmsg => connected_receives(ReceiveCall::Recvmsg),
        Call::Recvmmsg => connected_receives(ReceiveCall::Recvmmsg),
        Call::Getpeername => steps([
            vec![Peer, Connect(Target), Peer, Peer],
            exchange().into(),
            vec![Peer, Connect(Other), Peer, Connect(Target), Peer, Disconnect, Peer],
        ]),
        Call::IoUring => steps([
            vec![ConnectByUring(Target), Peer],
            vec![send(SendCall::UringSend, None), Receive(ReceiveCall::UringRecv, 1)],
            vec![send(SendCall::UringSendmsg, None), Receive(ReceiveCall::UringRecvmsg, 1)],
            vec![send(SendCall::UringSendmsg, Some(Target)), Receive(ReceiveCall::UringRecvmsg, 1)],
            vec![ConnectByUring(Other), Peer, ConnectByUring(Target), Peer],
            vec![send(SendCall::UringSend, None), Receive(ReceiveCall::UringRecvmsg, 1)],
        ]),
    }
}

/// Calls on a connected socket. A stream keeps unread answers, so the steps without a read come last.
fn connected_sends(call: SendCall) -> Vec<Step> {
    let from = ReceiveCall::Recvfrom;
    steps([
        vec![Connect(Target), send(call, None), Receive(from, 1), send(call, Some(Target)), Receive(from, 1)],
        vec![SendAside(call, Some(Other)), SendAside(call, Some(Plain)), SendAside(SendCall::Send, None), Peer],
    ])
}

fn connected_receives(call: ReceiveCall) -> Vec<Step> {
    let say = || send(SendCall::Send, None);
    vec![Connect(Target), say(), Receive(call, 1), say(), say(), Receive(call, 2), Receive(call, 1), Peer]
}

fn unconnected(call: Call) -> Vec<Step> {
    match call {
        Call::Connect => steps([ask(Target).into(), visit(Target)]),
        Call::Reconnect => {
            steps([ask(Target).into(), visit(Other), visit(Target), visit(Plain), visit(Target), ask(Target).into()])
        }
        // On IPv6 a disconnected socket keeps its former source address (net/ipv4/udp.c, `__udp_disconnect`), and
        // receives nothing sent to others.
        Call::Unspec => steps([
            visit(Target),
            vec![Disconnect, Peer],
            ask(Target).into(),
            visit(Other),
            vec![Disconnect],
            ask(Other).into(),
            vec![Connect(Target), Peer, Disconnect],
            vec![SendAside(SendCall::Sendto, Some(Other)), SendAside(SendCall::Sendto, Some(Plain)), Peer],
        ]),
        Call::Sendto => unconnected_sends(SendCall::Sendto),
        Call::Sendmsg => unconnected_sends(SendCall::Sendmsg),
        Call::SendmsgCmsg => unconnected_sends(SendCall::SendmsgCmsg),
        Call::Sendmmsg => steps([
            unconnected_sends(SendCall::Sendmmsg),
            send_many([Target, Other, Plain]),
            send_many([Plain, Target, Other]),
            send_many([Other, Other, Target]),
        ]),
        Call::Send => steps([
            vec![send(SendCall::Send, None), Peer],
            ask(Target).into(),
            vec![send(SendCall::Send, None), send(SendCall::Sendmsg, None), send(SendCall::SendmsgCmsg, None)],
        ]),
        Call::Recv => unconnected_receives(ReceiveCall::Recv),
        Call::Recvfrom => unconnected_receives(ReceiveCall::Recvfrom),
        Call::Recvmsg => unconnected_receives(ReceiveCall::Recvmsg),
        Call::Recvmmsg => unconnected_receives(ReceiveCall::Recvmmsg),
        Call::Getpeername => {
            steps([vec![Peer], ask(Target).into(), vec![Peer, Connect(Target), Peer, Disconnect, Peer]])
        }
        Call::IoUring => {
            [(SendCall::UringSendmsg, Target), (SendCall::UringSend, Other), (SendCall::UringSend, Target)]
                .into_iter()
                .chain([(SendCall::UringSendmsg, Plain)])
                .flat_map(|(call, role)| [send(call, Some(role)), Receive(ReceiveCall::UringRecvmsg, 1)])
                .collect()
        }
    }
}

fn unconnected_sends(call: SendCall) -> Vec<Step> {
    [Target, Plain, Other, Target, Target]
        .into_iter()
        .flat_map(|role| [send(call, Some(role)), Receive(ReceiveCall::Recvfrom, 1)])
        .collect()
}

/// Sends to several roles by one call, whose answers come in any order.
fn send_many(roles: [Role; 3]) -> Vec<Step> {
    vec![Step::Send(SendCall::Sendmmsg, roles.map(Some).into()), Receive(ReceiveCall::Recvmmsg, 3)]
}

fn unconnected_receives(call: ReceiveCall) -> Vec<Step> {
    let say = |role| send(SendCall::Sendto, Some(role));
    vec![
        say(Target),
        Receive(call, 1),
        say(Plain),
        Receive(call, 1),
        Stranger,
        Receive(call, 1),
        say(Target),
        say(Other),
        Stranger,
        Receive(call, 3),
        Receive(call, 1),
    ]
}
