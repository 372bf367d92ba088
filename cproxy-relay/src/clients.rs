//! Connections of clients, and the limits of what each client may take from the others.

pub(crate) mod budget;
pub(crate) mod connection;
pub(crate) mod refusal_log;
pub(crate) mod request_limit;
pub(crate) mod serve;
pub(crate) mod slots;
pub(crate) mod throttle;
pub(crate) mod unsent;
