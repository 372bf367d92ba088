//! The API server as a source: slim objects, a client whose sockets are never translated, watches.

mod client;
mod dial;
mod dns;
pub mod objects;
mod pace;
mod sent;
mod watch;

pub use client::{ApiServer, ClientError, LastHeard, client, configure};
pub use dial::known_addresses;
pub use watch::watch;
