//! `connect()`: rewrites the destination before the kernel looks up a route, so no packet ever carries the VIP.
//!
//! An AF_INET6 socket that connects to an IPv4-mapped address runs connect6, not connect4 (`tcp_v6_pre_connect` and
//! `udpv6_pre_connect` in net/ipv6). Both programs use IPv4-mapped addresses, so they find the same frontend.
//! MSG_FASTOPEN, by which `sendto()` connects, runs them, too (`__inet_stream_connect` in net/ipv4/af_inet.c).
//!
//! No network refuses the `connect()` of a datagram socket, which sends nothing: programs use it to learn their own
//! address. So where a stream is refused or dropped, a datagram socket is connected to an address of the VM at which
//! nobody listens (`own_address`). It has the source address that it would have towards a pod; its first datagram
//! is refused.

use aya_ebpf::{macros::cgroup_sock_addr, programs::SockAddrContext};
use cproxy_ebpf::{
    Counter, PROTOCOL_UDP, REFUSED_SLOT, Translation,
    observation::{Call, Reason},
};

use crate::{
    endpoint::Endpoint,
    flows,
    lookup::{FoundSet, look_up},
    maps::{backend, count, count_forwarded},
    observe,
    own_address::own_address,
    peer::{self, is_agents, is_translated},
    sock_addr::{ALLOW, Family, V4, V6, protocol, read_endpoint, rewrite},
    tcp,
};

#[cgroup_sock_addr(connect4)]
fn cproxy_connect4(ctx: SockAddrContext) -> i32 {
    connect::<V4>(&ctx)
}

#[cgroup_sock_addr(connect6)]
fn cproxy_connect6(ctx: SockAddrContext) -> i32 {
    connect::<V6>(&ctx)
}

#[inline(always)]
fn connect<F: Family>(ctx: &SockAddrContext) -> i32 {
    let Some(protocol) = protocol(ctx) else { return ALLOW };
    let destination = read_endpoint::<F>(ctx);
    let set = look_up(ctx, &destination, protocol);
    if set.is_none() {
        observe::direct(ctx, Call::Connect, protocol, &destination, set.id);
        return connect_directly(ctx, &destination, protocol);
    }
    if peer::is_agents_socket(ctx) {
        return ALLOW;
    }
    if set.is_empty() {
        observe::denied(ctx, Call::Connect, protocol, &destination, &set, Reason::None);
        return if protocol == PROTOCOL_UDP { connect_to_nobody::<F>(ctx, &destination, &set) } else { set.deny() };
    }
    connect_to_service::<F>(ctx, &destination, protocol, &set)
}

/// Connects to an address that is not a Service's. If the socket remembers an earlier peer, that is replaced: it must
/// not pass for the new one.
#[inline(always)]
fn connect_directly(ctx: &SockAddrContext, destination: &Endpoint, protocol: u8) -> i32 {
    if protocol != PROTOCOL_UDP {
        if let Some(peer) = tcp::peer_to_replace(ctx) {
            peer::record_direct(peer, destination);
        }
        return ALLOW;
    }
    match peer::socket_state(ctx) {
        Some(state) if is_agents(state) => return ALLOW,
        Some(state) => {
            remember_previous_peer(ctx, &state.peer);
            peer::record_direct(&mut state.peer, destination);
        }
        // The socket has only sent datagrams so far. If one of its flows leads to this address, replies must show the
        // address from now on.
        None if flows::udp_state(ctx).is_some() => {
            if let Some(state) = peer::socket_state_or_new(ctx) {
                peer::record_direct(&mut state.peer, destination);
            }
        }
        None => return ALLOW,
    }
    if let Some(flows) = flows::udp_state(ctx) {
        flows::unclaim_backend(flows, destination);
    }
    ALLOW
}

/// Connects to a backend. Each connect chooses anew.
#[inline(always)]
fn connect_to_service<F: Family>(ctx: &SockAddrContext, vip: &Endpoint, protocol: u8, set: &FoundSet) -> i32 {
    let slot = set.choose_slot(ctx);
    let Some(backend) = backend(slot) else {
        observe::denied(ctx, Call::Connect, protocol, vip, set, Reason::TableReplaced);
        return set.deny();
    };
    let peer = if protocol == PROTOCOL_UDP {
        prepare_udp_peer(ctx, vip, &Endpoint::new(&backend.address, backend.port))
    } else {
        tcp::claim_peer(ctx)
    };
    match peer {
        Some(peer) => peer::record_translated(peer, vip, &backend.address, backend.port, slot),
        None => count(Counter::StateLost),
    }
    count_forwarded(backend);
    observe::translated(ctx, Call::Connect, protocol, vip, backend, set);
    rewrite::<F>(ctx, &backend.address, backend.port)
}

/// Connects a datagram socket to a Service that refuses or drops: the socket's datagrams are refused. Without an
/// address of the VM, the kernel decides whether there is a network to connect to.
#[inline(always)]
fn connect_to_nobody<F: Family>(ctx: &SockAddrContext, vip: &Endpoint, set: &FoundSet) -> i32 {
    count(if set.word.drops() { Counter::Dropped } else { Counter::Refused });
    let Some(own) = own_address(vip) else { return ALLOW };
    match prepare_udp_peer(ctx, vip, &own) {
        Some(peer) => peer::record_translated(peer, vip, &own.address, own.port, REFUSED_SLOT),
        None => count(Counter::StateLost),
    }
    rewrite::<F>(ctx, &own.address, own.port)
}

/// Storage for the new peer of a UDP socket. The previous peer becomes a flow.
#[inline(always)]
fn prepare_udp_peer<'s>(ctx: &'s SockAddrContext, vip: &Endpoint, backend: &Endpoint) -> Option<&'s mut Translation> {
    let state = peer::socket_state_or_new(ctx)?;
    remember_previous_peer(ctx, &state.peer);
    // A connected socket receives from its peer only. Datagrams to the VIP now go to the new peer, and datagrams of the
    // new peer belong to no other VIP.
    if let Some(flows) = flows::udp_state(ctx) {
        flows::retire_vip(flows, vip);
        flows::unclaim_backend(flows, backend);
    }
    Some(&mut state.peer)
}

/// Keeps the previous peer of a connected UDP socket as a flow. Replies under way still show its VIP, and so does
/// `getpeername()` if this connect fails and the socket keeps its peer.
#[inline(always)]
fn remember_previous_peer(ctx: &SockAddrContext, peer: &Translation) {
    if is_translated(peer)
        && let Some(flows) = flows::udp_state_or_new(ctx)
    {
        flows::insert_retired(flows, peer);
    }
}
