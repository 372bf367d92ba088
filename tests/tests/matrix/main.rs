//! The datapath by all system calls of applications: the matrix ([`cells`]), the state of one socket ([`flows`]),
//! shared sockets ([`handles`]), other ways to connect ([`opening`]), network policy ([`policed`]), addresses of
//! load balancers ([`received`]), session affinity ([`affinity`]), the evenness of the choice ([`balance`]) and the
//! cost of calls ([`cost`]).
//!
//! Nothing here depends on timing: every wait ends with its event, and a wait without it is a failure.

#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that finds something else than it expects has failed"
)]

mod choice;
mod message;
mod play;
mod script;
mod servers;
mod socket;
mod world;

mod affinity;
mod balance;
mod cells;
mod cost;
mod flows;
mod handles;
mod opening;
mod policed;
mod received;
