//! The client: one connection to one of the servers, which is chosen, watched and replaced.

pub(crate) mod api_client;
pub(crate) mod connection;
pub(crate) mod look_up;
pub(crate) mod rate_limit;
