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
mod network_changes;
mod pace;
mod pause;
mod selectors;
mod sent;
mod socket_setup;
pub mod split;
mod watch;

pub use client::{ApiServer, ClientError, client, configure};
pub use dial::known_addresses;
pub use heard::LastHeard;
pub use kube::Config;
pub use network_changes::NetworkChanges;
pub use socket_setup::SocketSetup;
pub use watch::watch;
