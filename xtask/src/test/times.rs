//! How long each test took when it last passed on this machine, by which the longest start first.

use std::{collections::BTreeMap, fs, path::PathBuf, time::Duration};

use anyhow::{Context as _, Result};

use crate::paths;

/// Times by the names of tests, in seconds.
#[derive(Default)]
pub(super) struct Times(BTreeMap<String, f64>);

impl Times {
    /// Reads what earlier runs have written. What cannot be read is as good as nothing.
    pub(super) fn read() -> Self {
        let text = file().ok().and_then(|file| fs::read_to_string(file).ok()).unwrap_or_default();
        Self(serde_json::from_str(&text).unwrap_or_default())
    }

    /// The last time of a test.
    pub(super) fn of(&self, test: &str) -> Option<f64> {
        self.0.get(test).copied()
    }

    pub(super) fn record(&mut self, test: &str, time: Duration) {
        // Milliseconds are enough.
        self.0.insert(test.to_owned(), (time.as_secs_f64() * 1e3).round() / 1e3);
    }

    /// Writes them, beside the file's place first.
    pub(super) fn write(&self) -> Result<()> {
        let file = file()?;
        let temporary = file.with_extension(std::process::id().to_string());
        let text = serde_json::to_string_pretty(&self.0).context("times of tests")?;
        fs::write(&temporary, text).with_context(|| format!("writing {}", temporary.display()))?;
        fs::rename(&temporary, &file).with_context(|| format!("writing {}", file.display()))
    }
}

fn file() -> Result<PathBuf> {
    let cache = paths::cache()?;
    fs::create_dir_all(&cache).with_context(|| format!("creating {}", cache.display()))?;
    Ok(cache.join("test-seconds.json"))
}
