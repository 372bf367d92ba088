//! Background tasks of the agent. They reach the task that owns the table by its mailbox alone.

pub(super) mod health;
pub(super) mod own_addresses;
pub(super) mod reload;
pub(super) mod resume;
pub(super) mod stale_sockets;
pub(super) mod takeover;
pub(super) mod tcp_places;
