//! Log lines on stderr: their format, and their level, which may change while the agent runs.

use std::{
    env,
    io::{self, IsTerminal},
    sync::{Arc, Mutex, PoisonError},
};

use clap::ValueEnum;
use tracing::{
    Event, Level, Metadata, Subscriber,
    level_filters::LevelFilter,
    subscriber::{Interest, set_global_default},
};
use tracing_subscriber::{
    fmt,
    layer::{Context, Layer, SubscriberExt},
    registry,
};

use crate::{json_lines::JsonLines, log_limit::LogLimit, log_output::LogOutput, recent_lines::RecentLines};

/// Format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Text
    #[default]
    Text,
    /// JSON objects
    Json,
}

/// Filter of log lines by level and rate, and the last lines. Clones are the same filter.
#[derive(Clone, Debug)]
pub struct LogFilter {
    level: Arc<Mutex<Level>>,
    limit: LogLimit,
    recent: RecentLines,
}

impl LogFilter {
    /// Starts the log.
    #[must_use]
    pub fn start(level: Level, format: LogFormat) -> Self {
        let filter = Self { level: Arc::new(Mutex::new(level)), ..Self::unused() };
        let recent = filter.recent.clone();
        // Opened before rights are given up.
        LogOutput::get();
        let lines = fmt::layer().with_target(false).with_writer(move || recent.beside(LogOutput::get()));
        // There is one log in a process, so that none was set before.
        let started = match format {
            LogFormat::Text => {
                // As everywhere (no-color.org). A serial console is a terminal, too.
                let is_plain = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
                let lines = lines.with_ansi(io::stderr().is_terminal() && !is_plain);
                set_global_default(registry().with(lines).with(filter.clone()))
            }
            LogFormat::Json => set_global_default(registry().with(lines.event_format(JsonLines)).with(filter.clone())),
        };
        debug_assert!(started.is_ok());
        filter
    }

    /// Filter of no log.
    #[must_use]
    pub fn unused() -> Self {
        let (limit, recent) = (LogLimit::default(), RecentLines::default());
        Self { level: Arc::new(Mutex::new(Level::INFO)), limit, recent }
    }

    /// Changes the level.
    pub fn set_level(&self, level: Level) {
        *self.level.lock().unwrap_or_else(PoisonError::into_inner) = level;
        // Each place in the code remembers whether it is enabled.
        tracing::callsite::rebuild_interest_cache();
    }

    /// The last lines.
    #[must_use]
    pub fn recent(&self) -> String {
        self.recent.text()
    }

    fn level(&self) -> Level {
        *self.level.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn shows(&self, metadata: &Metadata<'_>) -> bool {
        // cproxy reports the errors of its libraries itself.
        metadata.target().starts_with("cproxy") && *metadata.level() <= self.level()
    }
}

impl<S: Subscriber> Layer<S> for LogFilter {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        if self.shows(metadata) { Interest::always() } else { Interest::never() }
    }

    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        self.shows(metadata)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::from_level(self.level()))
    }

    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        // The log is not limited at level debug.
        self.level() >= Level::DEBUG || self.limit.admits(event.metadata())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_level_changes_for_places_that_were_reached_before() {
        #[derive(Clone, Default)]
        struct Lines(Arc<Mutex<Vec<u8>>>);
        impl io::Write for Lines {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0.lock().unwrap().extend(bytes);
                Ok(bytes.len())
            }

            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }

        let lines = Lines::default();
        let filter = LogFilter::unused();
        let writer = lines.clone();
        let shown = fmt::layer().without_time().with_level(false).with_target(false).with_ansi(false);
        let subscriber = registry().with(shown.with_writer(move || writer.clone())).with(filter.clone());
        tracing::subscriber::with_default(subscriber, || {
            let log = |round: u32| {
                tracing::info!("info {round}");
                tracing::debug!("debug {round}");
                tracing::info!(target: "library", "other");
            };
            log(1);
            filter.set_level(Level::DEBUG);
            log(2);
            filter.set_level(Level::WARN);
            log(3);
            filter.set_level(Level::INFO);
            log(4);
        });
        let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        assert_eq!(text.lines().collect::<Vec<_>>(), ["info 1", "info 2", "debug 2", "info 4"]);
    }
}
