//! Addresses, sockets that listen on them, TLS, and the connections that they accept.

pub(crate) mod acceptor;
pub(crate) mod address;
pub(crate) mod guest_sockets;
pub(crate) mod listener;
pub(crate) mod tls;
