//! Agents whose system calls fail, and agents that are killed before one: `strace` does that from outside.

use std::{fs, path::PathBuf, process::Command, time::Duration};

use rustix::process::{Pid, Signal, kill_process};

use crate::{
    process::{Agent, Daemon, eventually},
    sandbox::{Placement, Sandbox},
};

/// Limit on the time until an agent is ready or has ended.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Event in place of a system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The process is killed before the call.
    Kill,
    /// The call fails with the error of this name.
    Error(&'static str),
}

/// Fault of a call, by its number among the calls of its process.
#[derive(Clone, Copy, Debug)]
pub struct Injection {
    /// Names of system calls, separated by commas.
    pub calls: &'static str,
    /// Event in place of the call.
    pub fault: Fault,
    /// The first is 1. It counts for the agent and its child alike.
    pub number: usize,
}

/// A traced agent. It ends when this value is dropped.
#[derive(Debug)]
pub struct TracedAgent {
    tracer: Daemon,
    ready: PathBuf,
    trace: PathBuf,
}

impl TracedAgent {
    /// Starts an agent on the sandbox's manifests in which these system calls are recorded, and one of them is replaced
    /// by a fault.
    pub fn start(sandbox: &Sandbox, calls: &str, injection: Option<Injection>) -> Self {
        let agent = Agent::new(sandbox).manifests(sandbox.manifest_dir());
        Self::start_agent(sandbox, agent, calls, injection)
    }

    /// The same with any agent.
    pub fn start_agent(sandbox: &Sandbox, agent: Agent<'_>, calls: &str, injection: Option<Injection>) -> Self {
        let (agent, ready) = agent.command();
        let trace = sandbox.dir().join("trace");
        // The file of an earlier agent would pass for this one's.
        drop(fs::remove_file(&trace));
        let mut command = Command::new("strace");
        command
            .args(["--follow-forks", "--quiet=all", "--decode-fds=path"])
            .arg(format!("--trace={calls}"))
            .arg("--output")
            .arg(&trace);
        command.args(injection.map(|Injection { calls, fault, number }| match fault {
            Fault::Kill => format!("--inject={calls}:signal=KILL:when={number}"),
            Fault::Error(name) => format!("--inject={calls}:error={name}:when={number}"),
        }));
        command.arg(agent.get_program()).args(agent.get_args());
        for (name, value) in agent.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        Self { tracer: Daemon::spawn(sandbox, "strace", Placement::Hooked, command), ready, trace }
    }

    /// Waits until the agent is ready, or has ended. Returns whether it is ready.
    ///
    /// # Panics
    /// When neither happens within a minute.
    pub fn settle(&mut self) -> bool {
        eventually(TIMEOUT, "the agent is ready or has ended", || {
            match (self.tracer.exit_status(), self.ready.exists()) {
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

    /// The largest number of recorded calls of one of its processes so far.
    pub fn calls(&self) -> usize {
        let text = self.trace();
        let mut by_process = std::collections::BTreeMap::<&str, usize>::new();
        // A call that another process interrupts takes a second line, which has no opening bracket after its name.
        for line in text.lines().filter(|line| !line.contains("resumed>")) {
            if let Some((process, call)) = line.split_once(' ')
                && call.trim_start().starts_with(|char: char| char.is_ascii_alphabetic())
            {
                *by_process.entry(process).or_default() += 1;
            }
        }
        by_process.into_values().max().unwrap_or_default()
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

impl Drop for TracedAgent {
    fn drop(&mut self) {
        if self.tracer.exit_status().is_none() {
            self.kill();
        }
    }
}
