//! Agents whose system calls are recorded by `strace`.

use std::{fs, path::PathBuf, process::Command, time::Duration};

use rustix::process::{Pid, Signal, kill_process};

use crate::{
    process::{Agent, AgentSettings, Daemon, eventually},
    program::Settings as _,
    sandbox::{Placement, Sandbox},
};

/// Limit on the time until an agent is ready or has ended.
const TIMEOUT: Duration = Duration::from_secs(60);

/// An agent whose system calls are recorded. It ends when this value is dropped.
#[derive(Debug)]
pub struct RecordedAgent {
    tracer: Daemon,
    settings: AgentSettings,
    trace: PathBuf,
}

impl RecordedAgent {
    /// Starts an agent on the sandbox's manifests.
    pub fn start(sandbox: &Sandbox) -> Self {
        let (agent, settings) = Agent::new(sandbox).manifests(sandbox.manifest_dir()).command();
        let trace = sandbox.dir().join("trace");
        // The file of an earlier agent would pass for this one's.
        drop(fs::remove_file(&trace));
        let mut command = Command::new("strace");
        command.args(["--follow-forks", "--quiet=all", "--decode-fds=path", "--output"]).arg(&trace);
        command.arg(agent.get_program()).args(agent.get_args());
        for (name, value) in agent.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        Self { tracer: Daemon::spawn(sandbox, "strace", Placement::Hooked, command), settings, trace }
    }

    /// Waits until the agent is ready, or has ended. Returns whether it is ready.
    ///
    /// # Panics
    /// When neither happens within a minute.
    pub fn settle(&mut self) -> bool {
        eventually(TIMEOUT, "the agent is ready or has ended", || {
            match (self.tracer.exit_status(), self.settings.check_ready().is_ok()) {
                (Some(_), _) => Ok(false),
                (None, true) => Ok(true),
                (None, false) => Err(self.tracer.tail()),
            }
        })
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> bool {
        self.tracer.exit_status().is_some()
    }

    /// Its log.
    pub fn log(&self) -> String {
        self.tracer.log()
    }

    /// Its recorded calls, one a line, with the paths of descriptors.
    pub fn trace(&self) -> String {
        fs::read_to_string(&self.trace).unwrap_or_default()
    }

    /// Sends a signal to the agent.
    pub fn signal(&self, signal: Signal) {
        for child in self.children() {
            // It may have ended already.
            kill_process(child, signal).ok();
        }
    }

    /// The agent; a child of its own is none of the tracer's.
    fn children(&self) -> Vec<Pid> {
        let tracer = self.tracer.pid();
        let children = fs::read_to_string(format!("/proc/{tracer}/task/{tracer}/children")).unwrap_or_default();
        children.split_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect()
    }

    /// Kills it.
    ///
    /// # Panics
    /// When it is still there after a minute.
    pub fn kill(&mut self) {
        // The tracer's end would leave it running. A child of its own ends with it.
        self.signal(Signal::KILL);
        assert!(self.tracer.wait(TIMEOUT).is_some(), "the traced agent has not ended");
    }
}

impl Drop for RecordedAgent {
    fn drop(&mut self) {
        if self.tracer.exit_status().is_none() {
            self.kill();
        }
    }
}
