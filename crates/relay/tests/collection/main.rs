//! The relay's objects, the history of their changes, and watches of clients.

mod histories;
mod memory;
mod watches;
