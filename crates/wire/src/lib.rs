//! Kubernetes API: client, lists, watches and decoding. The client's sockets are never translated.

mod backoff;
mod client;
mod codec;
mod credentials;
mod diagnosis;
mod error_text;
mod located;
mod transport;
mod watch;

pub use backoff::jitter;
pub use client::{
    api_client::ApiClient,
    look_up::{service_named, service_with_cluster_ip},
};
pub use codec::{decode::Decoded, resource::WatchedResource, split};
pub use credentials::{
    configuration::{ApiServer, ClientError, Configuration, configure},
    exec_plugin::refuse as refuse_exec_plugins,
    file,
    setup_error::SetupError,
};
pub use diagnosis::{
    access_review::{AccessReview, Right},
    diagnose,
    finding::{Finding, Grade},
};
pub use located::{FieldError, read_json, read_located};
pub use transport::{
    address::{AddressError, ServerAddress},
    dns::probe_nameservers,
    link::{Body, BoxError, Link, Received, Transport},
};
pub use watch::{
    driver::follow_resource,
    event::{ResponseOrigin, WatchEvent},
    last_contact::LastContact,
    selectors::{FieldSelector, Selectors},
    state::BOOKMARK_WATCH_TIME,
    store::{ENDPOINT_SLICES, SERVICES, watch},
    subscriber::{Subscriber, Wanted},
};
