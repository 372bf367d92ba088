//! Files as a source: Services and EndpointSlices in YAML or JSON, followed by inotify.

mod contents;
mod document;
mod files;
mod parse;
mod rescan;
mod watch;
mod yaml;

pub use contents::{Contents, Wanted, Whole};
pub use files::{Change, Files, ManifestError};
pub use parse::parse;
pub use watch::{Watcher, watch};
