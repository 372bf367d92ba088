//! The same list for the maps of received addresses, with [`RECEIVE_LAYOUT_VERSION`].

use core::mem::offset_of;

use super::LineSink;
use crate::receive::{
    DatagramKey, LISTENER_SLOTS, LISTENERS_MAX, ListenerKey, RECEIVE_COUNTERS_MAX, RECEIVE_LAYOUT_VERSION,
    RECEIVED_DATAGRAMS_MIN, RECEIVED_MAX, RECEIVED_SOURCES_MAX, ReceiveCounter, ReceivedKey, ReceivedWord,
};

/// Calls `$callback` with all types in maps, each with all its fields.
macro_rules! shared_types {
    ($callback:ident, $line:ident) => {
        $callback! { $line
            DatagramKey { peer, peer_port, own_port }
            ListenerKey { netns_cookie, address, port, slot, padding }
            ReceivedKey { address, port, protocol, padding }
        }
    };
}

shared_types!(pod, unused);

/// Variants of [`ReceiveCounter`]. It does not compile if one is missing.
fn enums(line: LineSink<'_>) {
    for counter in [
        ReceiveCounter::Connections,
        ReceiveCounter::Datagrams,
        ReceiveCounter::OtherPorts,
        ReceiveCounter::NoListener,
        ReceiveCounter::ListenersLost,
        ReceiveCounter::OtherSources,
    ] {
        let name = match counter {
            ReceiveCounter::Connections => "Connections",
            ReceiveCounter::Datagrams => "Datagrams",
            ReceiveCounter::OtherPorts => "OtherPorts",
            ReceiveCounter::NoListener => "NoListener",
            ReceiveCounter::ListenersLost => "ListenersLost",
            ReceiveCounter::OtherSources => "OtherSources",
        };
        line("ReceiveCounter", name, counter as u64);
    }
}

/// Calls `line` with each line of the layout, except for the maps, always in the same order.
pub fn describe(line: LineSink<'_>) {
    shared_types!(fields, line);
    constants! { line
        RECEIVE_LAYOUT_VERSION RECEIVED_MAX RECEIVED_SOURCES_MAX LISTENERS_MAX LISTENER_SLOTS RECEIVED_DATAGRAMS_MIN
        RECEIVE_COUNTERS_MAX
    }
    enums(line);
    line("function", "ReceivedWord::new", ReceivedWord::new(0x1234, 0x5678).0.into());
}
