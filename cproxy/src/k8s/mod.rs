//! The API server as a source: slim objects, a client whose sockets are never translated, watches.

mod answer;
mod client;
mod course;
mod dial;
mod dns;
mod failure;
mod head;
mod heard;
mod kinds;
mod kubeconfig;
mod line;
pub mod objects;
mod pace;
mod pause;
mod selectors;
mod sent;
pub mod split;
mod watch;

pub use client::{ApiServer, ClientError, client, configure};
pub use dial::known_addresses;
pub use heard::LastHeard;
pub use watch::watch;
