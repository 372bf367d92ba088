//! The API server as a source: slim objects, a client whose sockets are never translated, watches.

mod answer;
mod client;
mod dial;
mod dns;
mod failure;
mod kinds;
mod kubeconfig;
pub mod objects;
mod pace;
mod pause;
mod sent;
pub mod split;
mod watch;

pub use client::{ApiServer, ClientError, LastHeard, client, configure};
pub use dial::known_addresses;
pub use watch::watch;
