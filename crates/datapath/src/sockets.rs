//! Closes sockets that we translated and whose backend left the VIP's set, matched by address and cookie.
//!
//! A connected UDP socket learns nothing when its backend goes: its datagrams vanish, for ever. So it is closed under
//! the application, which sees ECONNABORTED when it receives, or EDESTADDRREQ when it sends, and connects anew.
//! [`terminate_stale`] asks the whole machine for sockets that are connected to backends that have retired:
//!
//! 1. In each network namespace (`namespaces`), the kernel lists them (`socket_lists`), with the peer that the packets
//!    really go to, an inode and a cookie. For a TCP socket the cookie, or the socket storage that the kernel shows,
//!    leads to the VIP that the application connected to.
//! 2. For a UDP socket only a descriptor does: its owner is found by the inode, and a duplicate of the descriptor gives
//!    the state that the programs keep with the socket (`owners`).
//! 3. A socket whose present peer is the backend of its translation, and no longer in the set of that VIP
//!    (`staleness`), is closed by its addresses and its cookie: no other socket, nor one that has reconnected, is ever
//!    hit (`terminate`).
//!
//! A kernel that cannot list sockets shows them in `/proc/net` (`proc_net`); they are then counted, not closed.
//!
//! [`list`] shows all translated sockets, [`list_direct`] those that are connected to a frontend itself.
//! [`close_denied`] closes those that network policy no longer allows. [`find_missing_owners`] finds places of TCP
//! sockets that have gone.

mod closing;
mod denied;
mod diag;
pub mod diag_message;
mod direct;
mod error;
mod filter;
mod listing;
mod local_ends;
mod namespaces;
mod older;
mod owners;
mod places;
mod probe;
pub mod proc_net;
mod processes;
mod socket_lists;
mod staleness;
mod terminate;
mod thread;

use cproxy_core::Protocol;

pub use self::{
    denied::{ClosedDenied, close_denied},
    direct::{DirectSocket, list_direct},
    error::{AbilityError, DiagError, OwnersError, SocketsError},
    listing::{BackendState, Listing, TranslatedSocket, list},
    local_ends::{listening, local_ends_in_use},
    older::has_older_socket,
    owners::BROKER_NAME,
    places::{GoneOwners, MissingOwners, find_missing_owners},
    probe::{Abilities, probe},
    terminate::{Outcome, terminate_stale},
};

/// Stale sockets to close.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TerminateSockets {
    /// None.
    None,
    /// Connected UDP sockets.
    #[default]
    Udp,
    /// UDP and TCP, with MPTCP.
    All,
}

impl TerminateSockets {
    /// Whether stale sockets of a protocol are closed.
    #[must_use]
    pub fn closes(self, protocol: Protocol) -> bool {
        match self {
            Self::None => false,
            Self::Udp => protocol == Protocol::Udp,
            Self::All => true,
        }
    }
}
