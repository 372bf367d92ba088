//! Programs of network policy. Those of the socket address hooks are attached behind the programs that translate, so
//! that they see the backend; `sk_lookup` sees what comes in.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

mod binary;
#[path = "policy_programs/decision.rs"]
mod decision;
#[path = "policy_programs/denials.rs"]
mod denials;
#[path = "policy_programs/egress.rs"]
mod egress;
mod endpoint;
#[path = "policy_programs/events.rs"]
mod events;
#[path = "policy_programs/exemption.rs"]
mod exemption;
#[path = "policy_programs/incoming_events.rs"]
mod incoming_events;
#[path = "policy_programs/ingress.rs"]
mod ingress;
#[path = "policy_programs/lookup.rs"]
mod lookup;
#[path = "policy_programs/maps.rs"]
mod maps;
mod own_address;
mod peer;
#[path = "policy_programs/replies.rs"]
mod replies;
#[path = "policy_programs/setsockopt.rs"]
mod setsockopt;
mod sock_addr;
#[path = "policy_programs/sock_create.rs"]
mod sock_create;
mod subprogram;
