//! Network policy in the kernel: programs, maps, links and their pins, apart from those of the table.
//!
//! `<pin-dir>/policy-v<layout>/` holds the maps, the programs (`prog_<link>`) and, while a policy isolates the pod, the
//! links. A program of the socket address hooks runs behind the one that translates, since it was attached later; the
//! kernel keeps that order while programs behind links are replaced.

mod directory;
mod error;
mod events;
mod hooks;
mod install;
mod maps;
mod names;
mod program;
mod reader;

pub use self::{
    directory::PolicyPins,
    error::PolicyError,
    hooks::{PolicyHooks, other_lookup_programs},
    install::install_policy,
    maps::{PolicyMaps, PolicySettings},
    program::policy_programs,
    reader::{DeniedPeer, PolicyDecision, PolicyInForce, PolicyReader},
};
pub(super) use self::{
    events::send_events,
    install::{loader_of_policy, lru_entries},
    program::LOOKUP,
};
