//! Files as a source: Services and EndpointSlices in YAML or JSON, followed by inotify.

mod document;
mod files;
mod parse;
mod watch;

pub use files::{Change, Files, ManifestError};
pub use parse::{Manifest, parse};
pub use watch::{Watcher, watch};
