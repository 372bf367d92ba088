//! The command line as the manual and completions have it.

use clap::Command;

/// Commands and flags for people: without what the agent runs itself.
#[must_use]
pub fn manual() -> Command {
    let cli = super::command();
    let shown: Vec<_> = cli.get_subcommands().filter(|command| !command.is_hide_set()).cloned().collect();
    let mut manual = Command::new("cproxy").version(env!("CARGO_PKG_VERSION")).subcommands(shown);
    if let Some(about) = cli.get_about() {
        manual = manual.about(about.clone());
    }
    manual
}
