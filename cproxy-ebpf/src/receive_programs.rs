//! Programs for connections and datagrams to the addresses of load balancers. The one that looks sockets up is also
//! that of network policy.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

mod binary;
#[path = "receive_programs/datagrams.rs"]
mod datagrams;
#[path = "policy_programs/decision.rs"]
mod decision;
#[path = "policy_programs/denials.rs"]
mod denials;
mod endpoint;
#[path = "policy_programs/incoming_events.rs"]
mod incoming_events;
#[path = "policy_programs/ingress.rs"]
mod ingress;
#[path = "receive_programs/listeners.rs"]
mod listeners;
#[path = "receive_programs/lookup.rs"]
mod lookup;
#[path = "policy_programs/maps.rs"]
mod maps;
mod own_address;
#[path = "receive_programs/receive_maps.rs"]
mod receive_maps;
#[path = "policy_programs/replies.rs"]
mod replies;
mod sock_addr;
mod subprogram;
