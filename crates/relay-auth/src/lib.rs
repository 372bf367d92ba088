//! Clients of the relay: how they came in, whose credentials they have, and which objects they may see.
//!
//! [`identify`] turns a [`Peer`] and a bearer token into an [`Identity`], with a [`TokenReviewer`] for tokens.
//! [`Views::select`] turns the identity into a [`ClientView`]. Both refuse with a [`Refusal`], which has all that a
//! response and a counter need.

mod certificate;
mod identify;
mod identity;
mod leases;
mod peer;
mod peer_address;
mod refusal;
mod review;
mod reviewer;
mod token;
mod views;

pub use self::{
    identify::identify,
    identity::{Identity, Source},
    leases::{Lease, Leases},
    peer::Peer,
    peer_address::{Origin, PeerAddress},
    refusal::{Reason, Refusal, RefusalCounters},
    review::{Review, ReviewError, parse_review, review_body},
    reviewer::{ReviewCounts, ReviewSettings, ReviewTransport, TokenReviewer},
    views::{ClientView, Pattern, PatternError, PolicyClient, Views, ViewsError},
};
