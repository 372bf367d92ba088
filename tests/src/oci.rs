//! The image with the agent alone, read as a container runtime reads it (opencontainers/image-spec).

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::guest::path_from_env;

/// Variable with the layout that `cargo xtask image oci` makes.
pub const OCI_VARIABLE: &str = "CPROXY_OCI";

/// An image of one layer.
#[derive(Debug)]
pub struct OciImage {
    /// Archive of its files.
    pub layer: PathBuf,
    /// Configuration with the process and its environment.
    pub config: Value,
}

impl OciImage {
    /// The image that the environment names.
    ///
    /// # Panics
    /// When the variable is not set, or names no layout.
    pub fn from_env() -> Self {
        let layout = path_from_env(OCI_VARIABLE, "cargo xtask test");
        let blob = |descriptor: &Value| {
            let digest = descriptor.get("digest").and_then(Value::as_str).expect("a descriptor has a digest");
            layout.join("blobs").join(digest.replace(':', "/"))
        };
        let first = |list: &Value, name: &str| list.get(name).and_then(|list| list.get(0)).expect(name).clone();
        let index = json(&layout.join("index.json"));
        let manifest = json(&blob(&first(&index, "manifests")));
        let config = json(&blob(manifest.get("config").expect("a manifest has a config")));
        Self { layer: blob(&first(&manifest, "layers")), config: config.get("config").expect("a config").clone() }
    }
}

fn json(path: &Path) -> Value {
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
