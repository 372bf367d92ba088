//! Ways to a server: its address, name resolution, TCP, proxies, TLS, and what requests and responses are carried by.

pub(crate) mod address;
pub(crate) mod connector;
pub(crate) mod dns;
pub(crate) mod hosts;
pub(crate) mod link;
pub(crate) mod time_limit;
pub(crate) mod tls;
