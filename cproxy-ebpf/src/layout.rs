//! List of all types, constants and functions that agent and programs share. A test compares it with the one recorded
//! for [`LAYOUT_VERSION`]. The types become [`aya::Pod`] through it.

use core::mem::{offset_of, size_of};

use crate::{
    AFFINITY_MAX, Affinity, AffinityEntry, AffinityKey, BACKENDS_MAX, BACKENDS_MIN, Backend, Balance, COUNTERS_MAX,
    Counter, EXCLUDED_CGROUP, EXCLUDED_CGROUPS_MAX, EXCLUDED_OTHER_NETNS, EXCLUSIONS_MAX, ExcludedCgroup,
    FLOW_FROM_BACKEND, FLOW_FROM_VIP, FLOW_IDLE_MAX, FLOWS_PER_SOCKET, FRONTENDS_MAX, FRONTENDS_MIN, Flow, FlowKey,
    FlowValue, FrontendKey, LAYOUT_VERSION, OWN_ADDRESS_V4, OWN_ADDRESS_V6, OwnAddress, PROTOCOL_ANY, PROTOCOL_TCP,
    PROTOCOL_UDP, REFUSED_PORT, REFUSED_SLOT, SET_BACKENDS_MAX, SET_UNKNOWN_PORT, SETS_MAX, SETS_MIN,
    SOCKET_UNTRANSLATED, Set, SetWord, Settings, SocketState, TCP_FULL_BYTES, TCP_FULL_MESSAGE_BYTES, TCP_LEVELS_MORE,
    TCP_PLACE_CLOSED, TCP_PLACE_FREE, TCP_PLACES, TCP_WITHOUT_PLACE, TURNS_MAX, TcpPlaceId, Translation, UDP_FLOWS_MAX,
    UDP_HAS_OVERFLOWED, UNCOUNTED, UdpState, V4_MAPPED_WORD, affinity_time, choose, choose_evenly, choose_in_turn,
    digest, filter_bit, filter_bit_of_prefix, filter_prefix_v4, filter_prefix_v6, flow_digest, is_tcp_moving, is_v4,
    tcp_level_places, tcp_moving, tcp_places, turn_of, v4_mapped,
};

/// Receiver of the layout's lines: kind or type, name, and the number on which both sides agree.
pub type LineSink<'a> = &'a mut dyn FnMut(&str, &str, u64);

/// Calls `$callback` with all types in maps, each with all its fields.
macro_rules! shared_types {
    ($callback:ident, $line:ident) => {
        $callback! { $line
            AffinityKey { id, zero, netns_cookie }
            Backend { address, port, counter, digest }
            ExcludedCgroup { id, level, kind }
            Flow { translation, epoch }
            FlowKey { socket_cookie, address, port, direction, zero }
            FlowValue { address, port, zero, slot }
            FrontendKey { address, port, protocol, zero }
            OwnAddress { current, zero, addresses }
            Set { word, affinity }
            Settings {
                seed, filter_v4, filter_v6, balance, excluded_cgroup_count, excluded_uid_count, excluded_port_count,
                epoch, excluded_cgroups, excluded_uids, excluded_ports
            }
            SocketState { peer, flags }
            Translation { vip, backend, vip_port, backend_port, slot }
            UdpState { clock, flags, next, vips, backends, used, flows }
        }
    };
}

macro_rules! pod {
    ($line:ident $($name:ident { $($field:ident),+ })+) => { $(
        // SAFETY: repr(C) with explicit padding and integers only: every byte is initialised, and any bit pattern is
        // valid. A type that is not in the list cannot be used in a map.
        unsafe impl aya::Pod for $name {}
    )+ };
}
shared_types!(pod, unused);

macro_rules! fields {
    ($line:ident $($name:ident { $($field:ident),+ })+) => { $(
        // Does not compile if a field is not in the list.
        let _: fn($name) = |$name { $($field: _),+ }| ();
        $line(stringify!($name), "size", size_of::<$name>() as u64);
        $( $line(stringify!($name), stringify!($field), offset_of!($name, $field) as u64); )+
    )+ };
}

macro_rules! constants {
    ($line:ident $($name:ident)+) => { $( $line("constant", stringify!($name), $name as u64); )+ };
}

pub mod policy;
pub mod receive;

/// Variants of [`Counter`] and [`Balance`]. It does not compile if one is missing.
fn enums(line: LineSink<'_>) {
    for counter in [
        Counter::Forwarded,
        Counter::Refused,
        Counter::Dropped,
        Counter::UdpFlowsInserted,
        Counter::StateLost,
        Counter::AffinityLost,
        Counter::UdpFlowsRemoved,
    ] {
        let name = match counter {
            Counter::Forwarded => "Forwarded",
            Counter::Refused => "Refused",
            Counter::Dropped => "Dropped",
            Counter::UdpFlowsInserted => "UdpFlowsInserted",
            Counter::StateLost => "StateLost",
            Counter::AffinityLost => "AffinityLost",
            Counter::UdpFlowsRemoved => "UdpFlowsRemoved",
        };
        line("Counter", name, counter as u64);
    }
    for balance in [Balance::Random, Balance::RoundRobin] {
        let name = match balance {
            Balance::Random => "Random",
            Balance::RoundRobin => "RoundRobin",
        };
        line("Balance", name, balance as u64);
    }
}

/// Sample results of the shared functions.
fn functions(line: LineSink<'_>) {
    let (v4, v6) = (v4_mapped(0x0102_0304), [1, 2, 3, 4]);
    let word = SetWord::new(0x0102_0304, 0x0506, 0x0708, true);
    let [[first, second], [more, other]] = [0, 2].map(|level| tcp_places(0x0102_0304_0506_0708, level));
    for (name, value) in [
        ("affinity_time", affinity_time(0x0102_0304_0506_0708).into()),
        ("choose", choose(0x0102_0304, 0x0506_0708, 1_000).into()),
        ("choose_evenly", choose_evenly(0x8102_0304, 1_000).into()),
        ("choose_in_turn", choose_in_turn(7, 0x0506_0708_0102_0304, word).into()),
        ("digest", digest(&v6, 5).into()),
        ("filter_bit", filter_bit(&v4) ^ filter_bit(&v6)),
        ("filter_bit_of_prefix", filter_bit_of_prefix(0x0102_0304)),
        ("filter_prefix_v4", filter_prefix_v4(&v4).into()),
        ("filter_prefix_v6", filter_prefix_v6(&v6).into()),
        ("flow_digest", flow_digest(0x0102_0304).into()),
        ("is_v4", (is_v4(&v4) && !is_v4(&v6)).into()),
        ("is_tcp_moving", (is_tcp_moving(tcp_moving(1)) && !is_tcp_moving(u64::MAX)).into()),
        ("tcp_level_places", tcp_level_places(2).into()),
        ("tcp_moving", tcp_moving(0x0102_0304_0506_0708)),
        ("tcp_places", u64::from(first) << 32 | u64::from(second)),
        ("tcp_places", u64::from(more) << 32 | u64::from(other)),
        ("turn_of", turn_of(0x0102_0304).into()),
        ("v4_mapped", v4.iter().fold(0, |sum, &word| sum * 31 + u64::from(word))),
        ("SetWord::new", word.0),
        ("TcpPlaceId::new", TcpPlaceId::new(1, 2).0.into()),
        ("Affinity::new", Affinity::new(1, 2).0),
        ("AffinityEntry::new", AffinityEntry::new(1, 2).0),
    ] {
        line("function", name, value);
    }
}

/// Calls `line` with each line of the layout, except for the maps, always in the same order.
pub fn describe(line: LineSink<'_>) {
    shared_types!(fields, line);
    constants! { line
        LAYOUT_VERSION FRONTENDS_MIN FRONTENDS_MAX SETS_MIN SETS_MAX BACKENDS_MIN BACKENDS_MAX AFFINITY_MAX
        UDP_FLOWS_MAX PROTOCOL_TCP PROTOCOL_UDP PROTOCOL_ANY V4_MAPPED_WORD SET_UNKNOWN_PORT SET_BACKENDS_MAX
        SOCKET_UNTRANSLATED TCP_FULL_BYTES TCP_FULL_MESSAGE_BYTES TCP_LEVELS_MORE TCP_PLACE_CLOSED TCP_PLACE_FREE
        TCP_PLACES TCP_WITHOUT_PLACE FLOWS_PER_SOCKET UDP_HAS_OVERFLOWED FLOW_IDLE_MAX FLOW_FROM_VIP FLOW_FROM_BACKEND
        TURNS_MAX EXCLUSIONS_MAX EXCLUDED_CGROUPS_MAX COUNTERS_MAX EXCLUDED_CGROUP EXCLUDED_OTHER_NETNS OWN_ADDRESS_V4
        OWN_ADDRESS_V6 REFUSED_PORT REFUSED_SLOT UNCOUNTED
    }
    enums(line);
    functions(line);
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::{collections::BTreeSet, string::String};

    use super::*;

    /// Names of public items with this prefix in a source.
    fn defined(source: &'static str, prefix: &'static str) -> impl Iterator<Item = &'static str> {
        let is_name = |char: char| char.is_ascii_alphanumeric() || char == '_';
        let lines = source.lines().filter_map(move |line| line.strip_prefix(prefix));
        lines.filter_map(move |rest| rest.split(|char| !is_name(char)).next())
    }

    #[test]
    fn every_shared_item_is_in_the_layout() {
        let lists: [(_, fn(LineSink<'_>)); 2] =
            [(include_str!("lib.rs"), describe), (include_str!("policy.rs"), policy::describe)];
        for (source, describe) in lists {
            let mut listed = BTreeSet::new();
            describe(&mut |of, name, _| {
                let is_item = matches!(of, "constant" | "function");
                listed.insert(String::from(if is_item { name } else { of }));
            });
            for kind in ["pub const fn ", "pub const ", "pub struct ", "pub enum ", "pub type "] {
                for name in defined(source, kind).filter(|name| *name != "fn") {
                    // A type of one word is covered by its constructor; a `SetId` is a number.
                    let is_there =
                        listed.contains(name) || listed.contains(&std::format!("{name}::new")) || name == "SetId";
                    assert!(is_there, "{kind}{name} is shared, but not in the layout");
                }
            }
        }
    }
}
