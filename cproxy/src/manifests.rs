//! Files as a source: Services and EndpointSlices in YAML or JSON, followed by inotify.

mod contents;
mod document;
mod files;
mod parse;
mod poller;
mod watch;

pub use contents::{Contents, ParseOptions, WholeObject};
pub use files::{Change, Files, ManifestError};
pub use parse::parse;
pub use watch::{Watcher, watch};
