//! The relay without I/O: objects and their history, watches of clients, and the wire format.
//!
//! ```text
//! updates -> Collection (objects, history) -> Watch (a position in it) -> bytes
//!                                          -> Snapshot -> List -> bytes
//! ```

mod collection;
mod discovery;
mod event;
mod filter;
mod json;
mod kind;
mod list;
mod object;
mod objects;
mod policies;
mod query;
mod selector;
mod watch;
mod watchers;
mod wire;

pub use collection::{Collection, Outcome, Snapshot, Summary, Update, WatchStart};
pub use discovery::discovery;
pub use filter::{Filter, Visibility};
pub use json::object_json;
pub use kind::{KINDS, Kind, POLICY_KINDS, served_kinds};
pub use list::List;
pub use object::{Meta, Object, ObjectError, Relayed, Upstream, parse_version};
pub use policies::{
    Interest, InterestWatch, Policies, PolicyChange, PolicyInput, PolicyKind, PolicyObject, PolicyScope, PolicyStart,
    PolicySummary, PolicyUpdate, PolicyWatch, policy_deletion, policy_object_name,
};
pub use query::{
    ListParameters, ObjectRequest, Operation, Target, VersionWish, WatchParameters, not_found, parse,
    upstream_selectors,
};
pub use selector::{Selector, SelectorError};
pub use watch::{Watch, WatchOptions};
pub use wire::{Change, Format, Status, envelope};
