//! `sk_lookup`: what comes in and belongs to no connection.

use aya_ebpf::{bindings::sk_action, macros::sk_lookup, programs::SkLookupContext};

use crate::ingress::{Packet, is_denied};

#[sk_lookup]
fn cproxy_policy_in(ctx: SkLookupContext) -> u32 {
    if is_denied(&Packet::read(ctx.lookup)) { sk_action::SK_DROP } else { sk_action::SK_PASS }
}
