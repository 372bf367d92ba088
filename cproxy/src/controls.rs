//! Parts of a running agent that commands reach without the task that owns the table: log and settings in force.

use std::sync::{Arc, Mutex, PoisonError};

use cproxy_daemon::LogFilter;
use tracing::Level;

use crate::config::{Config, SettingRow};

/// Origin of a level that a command has set.
const BY_COMMAND: &str = "cproxy set";

/// Log and settings in force. Clones are the same.
#[derive(Clone, Debug)]
pub struct Controls {
    log: LogFilter,
    settings: Arc<Mutex<Vec<SettingRow>>>,
}

impl Controls {
    /// Controls of an agent with this log and configuration.
    #[must_use]
    pub fn new(log: LogFilter, config: &Config) -> Self {
        Self { log, settings: Arc::new(Mutex::new(config.rows())) }
    }

    /// Controls without settings and without lines of a log.
    #[must_use]
    pub fn of_nothing() -> Self {
        Self { log: LogFilter::unused(), settings: Arc::default() }
    }

    /// Takes another configuration, whose level counts from now on.
    pub fn configure(&self, config: &Config) {
        self.log.set_level(config.log.log_level);
        *self.settings.lock().unwrap_or_else(PoisonError::into_inner) = config.rows();
    }

    /// Shows at least this level until the next call of [`Self::configure`].
    pub fn show(&self, level: Level) {
        self.log.set_level(level);
    }

    /// Sets the level of the log, until the agent reads its settings again.
    pub fn set_log_level(&self, level: Level) {
        let mut settings = self.settings.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(row) = settings.iter_mut().find(|row| row.name == "log-level") {
            (row.value, row.origin) = (Some(level.as_str().to_lowercase()), BY_COMMAND.to_owned());
        }
        drop(settings);
        let name = level.as_str().to_lowercase();
        tracing::info!(name: "log_level_set", "log level is now {name} (cproxy set)");
        self.log.set_level(level);
    }

    /// Settings in force.
    #[must_use]
    pub fn settings(&self) -> Vec<SettingRow> {
        self.settings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The last lines of the log.
    #[must_use]
    pub fn recent_log(&self) -> String {
        self.log.recent()
    }
}
