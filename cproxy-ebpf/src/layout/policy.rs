//! The same list for the maps of network policy, with [`POLICY_LAYOUT_VERSION`].

use core::mem::offset_of;

use super::LineSink;
use crate::policy::{
    DENIED_CANARIES, DENIED_CANARY_PORT, Denial, DenialKey, EGRESS, EXEMPT_CGROUPS_MAX, IntervalWord,
    LRU_ELEMENTS_PER_CPU, NO_RULE, POLICY_COUNTERS_MAX, POLICY_DENIALS_MIN, POLICY_LAYOUT_VERSION, POLICY_RANGES_MAX,
    POLICY_REFUSED_SLOT, POLICY_REPLIES_MIN, POLICY_ROOM_MIN, PROTOCOL_SCTP, PolicyCounter, REPLY_SECONDS, ReplyKey,
    RunsWord, State, StateWord,
};

/// Calls `$callback` with all types in maps, each with all its fields.
macro_rules! shared_types {
    ($callback:ident, $line:ident) => {
        $callback! { $line
            Denial { count, last_ns, rule, is_audited }
            DenialKey { peer, port, protocol, direction }
            ReplyKey { peer, peer_port, own_port }
            State { word, netns_cookie, exempt_cgroups }
        }
    };
}

shared_types!(pod, unused);

/// Variants of [`PolicyCounter`]. It does not compile if one is missing.
fn enums(line: LineSink<'_>) {
    for counter in [
        PolicyCounter::DeniedIngress,
        PolicyCounter::DeniedEgress,
        PolicyCounter::AuditedIngress,
        PolicyCounter::AuditedEgress,
        PolicyCounter::DeniedSockets,
    ] {
        let name = match counter {
            PolicyCounter::DeniedIngress => "DeniedIngress",
            PolicyCounter::DeniedEgress => "DeniedEgress",
            PolicyCounter::AuditedIngress => "AuditedIngress",
            PolicyCounter::AuditedEgress => "AuditedEgress",
            PolicyCounter::DeniedSockets => "DeniedSockets",
        };
        line("PolicyCounter", name, counter as u64);
    }
}

/// Addresses, and words of samples.
fn words(line: LineSink<'_>) {
    let sum = |address: &[u32; 4]| address.iter().fold(0, |sum, &word| sum * 31 + u64::from(word));
    DENIED_CANARIES.iter().for_each(|address| line("constant", "DENIED_CANARIES", sum(address)));
    let states = [
        StateWord::new(1, false, false, false),
        StateWord::new(0, true, false, false),
        StateWord::new(0, false, true, false),
        StateWord::new(0, false, false, true),
    ];
    states.iter().for_each(|state| line("function", "StateWord::new", state.0));
    let runs = RunsWord::new((0x0001_2345, 0x678), (0x000f_edcb, 0xa98));
    line("function", "RunsWord::new", runs.0);
    for interval in [IntervalWord::new(6, 0x1234, 0x5678, true, 0x9a), IntervalWord::new(17, 1, 2, false, NO_RULE)] {
        line("function", "IntervalWord::new", interval.0);
    }
    line("function", "IntervalWord::up_to", IntervalWord::up_to(6, 0x1234).0);
}

/// Calls `line` with each line of the layout, except for the maps, always in the same order.
pub fn describe(line: LineSink<'_>) {
    shared_types!(fields, line);
    constants! { line
        POLICY_LAYOUT_VERSION POLICY_ROOM_MIN POLICY_RANGES_MAX POLICY_REPLIES_MIN POLICY_DENIALS_MIN
        LRU_ELEMENTS_PER_CPU POLICY_COUNTERS_MAX EXEMPT_CGROUPS_MAX REPLY_SECONDS PROTOCOL_SCTP POLICY_REFUSED_SLOT
        EGRESS NO_RULE DENIED_CANARY_PORT
    }
    enums(line);
    words(line);
}
