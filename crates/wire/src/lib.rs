//! Kubernetes API: client, lists, watches and decoding. The client's sockets are never translated.

mod backoff;
mod client;
mod connector;
mod content_type;
mod decode;
mod dns;
mod error_text;
mod failure;
mod follow;
mod head;
mod kubeconfig;
mod last_contact;
mod message;
mod message_reader;
mod protobuf;
mod rate_limit;
mod resources;
mod response;
mod selectors;
pub mod split;
mod status;
mod step;
mod watch;
mod watch_event;
mod watch_state;

pub use client::{ApiServer, ClientError, client, configure, is_api_server_url};
pub use connector::known_addresses;
pub use kube::Config;
pub use last_contact::LastContact;
pub use watch::watch;
