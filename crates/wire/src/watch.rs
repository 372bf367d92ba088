//! Lists and watches: the state machine, the requests that it asks for, and their events.

pub(crate) mod driver;
pub(crate) mod event;
pub(crate) mod failure;
pub(crate) mod io;
pub(crate) mod last_contact;
pub(crate) mod message_reader;
pub(crate) mod requester;
pub(crate) mod response;
pub(crate) mod selectors;
pub(crate) mod state;
pub(crate) mod store;
pub(crate) mod subscriber;
pub(crate) mod view_token;
