//! One start of the agent: the times in its log, and its CPU time.

use std::time::Duration;

use anyhow::{Context as _, Result};
use cproxy_tests::{
    process::{Agent, cproxy},
    sandbox::Sandbox,
    usage::cpu_time,
};
use serde_json::{Map, Value};

/// Limit on a start, longer than any takes.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Field of the agent's CPU time, beside those of the log line `ready`.
pub const CPU: &str = "cpu_ms";

/// Starts the agent, waits until it is ready, ends it and removes what it has left behind. Returns the fields of its
/// log line `ready`, and [`CPU`] until then, which contains that of the child that installs the programs.
///
/// # Errors
/// The log has no such line.
pub fn measure(sandbox: &Sandbox, agent: Agent<'_>) -> Result<Map<String, Value>> {
    let (mut agent, _) = agent.args(["--log-format", "json"]).start_and_time(TIMEOUT);
    let cpu = cpu_time(agent.pid());
    agent.stop();
    cproxy(sandbox, &["cleanup"]).success();
    let log = agent.log();
    let mut lines = log.lines().filter_map(|line| serde_json::from_str::<Map<_, _>>(line).ok());
    let mut line = lines.find(|line| line.contains_key("ready_ms")).context("no line of the log says `ready`")?;
    line.insert(CPU.to_owned(), (cpu.as_secs_f64() * 1_000.0).into());
    Ok(line)
}
