//! Files as a source: Services, EndpointSlices and objects of network policies in YAML or JSON, followed by inotify.

mod contents;
mod document;
mod files;
mod parse;
mod policy_json;
mod policy_objects;
mod poller;
mod watch;

pub use contents::{Contents, ParseOptions, WholeObject};
pub use files::{Change, Files, ManifestError};
pub use parse::parse;
pub use policy_objects::{PolicyKind, PolicyObject, PolicyObjects};
pub use watch::{Watcher, watch};
