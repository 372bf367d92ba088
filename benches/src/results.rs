//! Files of results.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde_json::Value;

/// Writes a result as indented JSON.
///
/// # Errors
/// The file, or its directory, cannot be written.
pub fn write(path: &Path, result: &Value) -> Result<()> {
    let text = format!("{result:#}\n");
    let directory = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(directory)
        .and_then(|()| fs::write(path, text))
        .with_context(|| format!("writing {}", path.display()))
}

/// Where a benchmark's results go unless it is told: `<benchmark>.json` in the directory `bench` of cargo's output, which
/// the benchmark itself runs from.
#[must_use]
pub fn default_output(benchmark: &str) -> PathBuf {
    let own = std::env::current_exe().unwrap_or_default();
    own.ancestors().nth(2).unwrap_or(Path::new(".")).join("bench").join(benchmark).with_extension("json")
}
