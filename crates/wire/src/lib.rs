//! Kubernetes API: client, lists, watches and decoding. The client's sockets are never translated.

mod address;
mod backoff;
mod client;
mod configuration;
mod connection;
mod connector;
mod decode;
mod dns;
mod error_text;
mod exec_plugin;
mod failure;
mod follow;
mod head;
mod kubeconfig;
mod last_contact;
mod message;
mod message_reader;
mod rate_limit;
mod resources;
mod response;
mod selectors;
pub mod split;
mod step;
mod tls;
mod transport;
mod watch;
mod watch_event;
mod watch_state;

pub use address::ServerAddress;
pub use client::ApiClient;
pub use configuration::{ApiServer, ClientError, Configuration, configure};
pub use last_contact::LastContact;
pub use transport::{Body, BoxError, Link, Received, Transport};
pub use watch::watch;
