//! The agent under test, and its successors and predecessors.

use std::{
    fs,
    path::{Path, PathBuf},
};

use cproxy_ebpf::LAYOUT_VERSION;
use cproxy_tests::{
    faults::{Fault, Injection, TracedAgent},
    older::{OlderAgent, older_agents},
    process::{Agent, RunningAgent, Signal, cproxy_binary},
    random::Random,
    sandbox::Sandbox,
    storm::Storm,
};

use crate::{PATIENCE, source::Source};

/// Largest number of a call that has a fault.
const CALL_MAX: usize = 300;

/// The same for an upgrade.
const UPGRADE_CALL_MAX: usize = 500;

/// Largest number of an error among those of a call.
const ERROR_MAX: usize = 6;

fn agent<'s>(
    sandbox: &'s Sandbox,
    binary: &Path,
    arguments: &[PathBuf; 2],
    settings: &Path,
    closes: &str,
) -> Agent<'s> {
    let agent = Agent::new(sandbox).binary(binary).args(arguments);
    agent.args(["--terminate-sockets", closes]).env("CPROXY_CONFIG", settings)
}

/// The running agent, and how others are started in its place.
pub(crate) struct Agents<'s> {
    sandbox: &'s Sandbox,
    storm: &'s Storm,
    /// Its source.
    arguments: [PathBuf; 2],
    /// File of settings.
    settings: PathBuf,
    present: PathBuf,
    older: [OlderAgent; 2],
    running: RunningAgent,
}

impl<'s> Agents<'s> {
    /// Starts the present agent, or an older one by its index.
    pub(crate) fn start(sandbox: &'s Sandbox, storm: &'s Storm, source: &Source<'_>, first: Option<usize>) -> Self {
        let (arguments, settings) = (source.arguments(), sandbox.dir().join("cproxy.conf"));
        fs::write(&settings, "").unwrap();
        let present = source.program("present-agent", &cproxy_binary());
        let older = older_agents().map(|agent| {
            let binary = source.program(&format!("agent-of-layout-{}", agent.layout), &agent.binary);
            OlderAgent { binary, ..agent }
        });
        let binary = first.map_or(&present, |index| &older[index].binary);
        let agent = agent(sandbox, binary, &arguments, &settings, storm.next_agent_closes());
        let running = agent.start();
        Self { sandbox, storm, arguments, settings, present, older, running }
    }

    pub(crate) fn running(&mut self) -> &mut RunningAgent {
        &mut self.running
    }

    /// The next agent. Each closes other sockets of backends that have left.
    fn next(&self, binary: &Path) -> Agent<'s> {
        agent(self.sandbox, binary, &self.arguments, &self.settings, self.storm.next_agent_closes())
    }

    /// Starts the next agent and waits for nothing.
    pub(crate) fn start_next(&mut self) {
        self.running = self.next(&self.present).spawn();
    }

    pub(crate) fn kill(&mut self) {
        self.check();
        self.running.kill();
    }

    pub(crate) fn stop(&mut self) {
        self.check();
        self.wait_until_handled(Signal::TERM);
        self.running.signal(Signal::TERM);
        let status = self.running.wait(PATIENCE).expect("an agent ends");
        assert!(status.success(), "SIGTERM is a clean end: {status}: {}", self.running.tail());
    }

    /// Ends the first agent, in one of two ways.
    pub(crate) fn end(&mut self, random: &mut Random) {
        if random.percent(50) { self.stop() } else { self.kill() }
    }

    /// Starts the present agent in the place of the first one. One may be killed on the way.
    pub(crate) fn upgrade(&mut self, is_killed: bool, random: &mut Random) {
        if is_killed {
            let fault = random.pick(&[Fault::KillBefore, Fault::KillAfter]);
            self.trace(Injection { site: None, number: 1 + random.below(UPGRADE_CALL_MAX), fault }, || {});
        }
        self.start_next();
    }

    /// Starts an agent with a fault in place of a call, which lives for as long as `work` takes, and then an ordinary
    /// one.
    pub(crate) fn start_with_fault(&mut self, random: &mut Random, work: impl FnOnce()) {
        let error = Fault::AnyError(random.below(ERROR_MAX));
        let fault = random.weighted(&[(20, Fault::KillBefore), (20, Fault::KillAfter), (60, error)]);
        let injection = Injection { site: None, number: 1 + random.below(CALL_MAX), fault };
        self.kill();
        self.trace(injection, work);
        self.start_next();
    }

    fn trace(&self, injection: Injection, work: impl FnOnce()) {
        let what = injection.to_string();
        eprintln!("an agent is {what}");
        let mut agent = TracedAgent::start_agent(self.sandbox, self.next(&self.present), Some(injection));
        if agent.settle() {
            work();
        }
        agent.kill();
        assert!(!agent.log().contains("panicked"), "{what}: {}", agent.log());
    }

    /// Starts each older agent. One of an older layout refuses the table; any other takes it over, and gives it back.
    pub(crate) fn try_older(&mut self) {
        for older in self.older.clone() {
            self.stop();
            self.running = self.next(&older.binary).spawn();
            if older.layout < LAYOUT_VERSION {
                let status = self.running.wait(PATIENCE).expect("an agent of an older layout ends");
                let (log, refuses) = (self.running.log(), format!("holds table layout {LAYOUT_VERSION}"));
                assert!(status.code() == Some(1) && log.contains(&refuses), "{status}: {log}");
            } else {
                self.wait_ready();
                self.stop();
            }
            self.start_next();
        }
    }

    /// Changes settings while it runs.
    pub(crate) fn hang_up(&mut self, random: &mut Random) {
        fs::write(&self.settings, format!("exclude-port = {}\n", 20_000 + random.below(1_000))).unwrap();
        self.wait_until_handled(Signal::HUP);
        self.running.signal(Signal::HUP);
    }

    /// Waits until a signal is not the end of a process that has just started.
    fn wait_until_handled(&mut self, signal: Signal) {
        let bit = 1 << (signal.as_raw() - 1);
        self.running.wait_until(PATIENCE, "the agent handles signals", |agent| {
            let status = fs::read_to_string(format!("/proc/{}/status", agent.pid())).unwrap_or_default();
            let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
            let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default();
            if caught & bit == bit { Ok(()) } else { Err("not yet") }
        });
    }

    /// Waits until it is ready.
    pub(crate) fn wait_ready(&mut self) {
        self.running.wait_ready(PATIENCE);
        self.check();
    }

    /// It has not ended by itself, and nothing in it has failed.
    pub(crate) fn check(&mut self) {
        let status = self.running.exit_status();
        assert!(status.is_none(), "the agent has ended: {status:?}: {}", self.running.log());
        assert!(!self.running.log().contains("panicked"), "{}", self.running.log());
    }
}
