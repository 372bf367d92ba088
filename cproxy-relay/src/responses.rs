//! Responses to requests of clients.

pub(crate) mod body;
pub(crate) mod handler;
pub(crate) mod lists;
pub(crate) mod policy_objects;
