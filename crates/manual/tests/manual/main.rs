//! The command lines of agent and relay: the manual that is generated from them, and the documents that name them.

mod documents;
mod generated;
