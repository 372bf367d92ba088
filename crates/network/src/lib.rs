//! The VM's network: its changes, its own addresses, and the setup of sockets before they connect.

mod changes;
mod local_routes;
mod own_addresses;
mod path;
mod route;
mod socket_setup;

pub use changes::NetworkChanges;
pub use local_routes::{LocalAddresses, LocalRoutes, ROUTE_PROTOCOL};
pub use own_addresses::{DetectedAddresses, OwnAddresses};
pub use path::NetworkPath;
pub use socket_setup::SocketSetup;
