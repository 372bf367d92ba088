//! The client: one connection to one of the servers, which is chosen, watched and replaced.

pub(crate) mod api_client;
pub(crate) mod call;
mod client_status;
mod configuration_reader;
pub(crate) mod connect_error;
pub(crate) mod connection;
pub(crate) mod look_up;
mod pending_renewal;
pub(crate) mod rate_limit;
mod renewals;
mod server_choice;
mod session;
#[cfg(test)]
mod test_server;
