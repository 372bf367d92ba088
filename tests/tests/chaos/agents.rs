//! The agent under test, and its successors and predecessors.

use std::{
    fs,
    path::{Path, PathBuf},
};

use cproxy_ebpf::LAYOUT_VERSION;
use cproxy_tests::{
    faults::{Fault, Injection, TracedAgent},
    nameserver::program_with_nameserver,
    older::older_agents,
    process::{Agent, RunningAgent, Signal, cproxy_binary},
    random::Random,
    sandbox::Sandbox,
    storm::Storm,
};

use crate::{PATIENCE, cluster::NAMESERVER};

/// Largest number of a call that has a fault.
const CALL_MAX: usize = 300;

/// The same for an upgrade.
const UPGRADE_CALL_MAX: usize = 500;

/// Largest number of an error among those of a call.
const ERROR_MAX: usize = 6;

/// The running agent, and how others are started in its place.
pub(crate) struct Agents<'s> {
    sandbox: &'s Sandbox,
    storm: &'s Storm,
    kubeconfig: PathBuf,
    /// File of settings.
    settings: PathBuf,
    present: PathBuf,
    older: PathBuf,
    running: RunningAgent,
}

impl<'s> Agents<'s> {
    /// Starts an agent of an older layout.
    pub(crate) fn start_older(
        sandbox: &'s Sandbox,
        storm: &'s Storm,
        kubeconfig: PathBuf,
        random: &mut Random,
    ) -> Self {
        let agents: Vec<_> = older_agents().into_iter().filter(|older| older.layout < LAYOUT_VERSION).collect();
        let older = &agents[random.below(agents.len())];
        eprintln!("the first agent has layout {}", older.layout);
        let program = |name, path: &Path| program_with_nameserver(sandbox, name, path, NAMESERVER);
        let (present, older) = (program("present-agent", &cproxy_binary()), program("older-agent", &older.binary));
        let settings = sandbox.dir().join("cproxy.conf");
        fs::write(&settings, "").unwrap();
        // It counts as one that closes sockets.
        assert!(storm.next_agent_closes());
        let mut running = Agent::new(sandbox).binary(&older).kubeconfig(&kubeconfig).start();
        running.wait_ready(PATIENCE);
        Self { sandbox, storm, kubeconfig, settings, present, older, running }
    }

    pub(crate) fn running(&mut self) -> &mut RunningAgent {
        &mut self.running
    }

    /// A present agent. Every other one closes sockets of backends that have left, of TCP perhaps, too.
    fn next(&self, random: &mut Random) -> Agent<'s> {
        let closes = match (self.storm.next_agent_closes(), random.percent(50)) {
            (false, _) => "none",
            (true, false) => "udp",
            (true, true) => "all",
        };
        let agent = Agent::new(self.sandbox).binary(&self.present).kubeconfig(&self.kubeconfig);
        agent.args(["--terminate-sockets", closes]).env("CPROXY_CONFIG", &self.settings)
    }

    /// Starts the next agent and waits for nothing.
    pub(crate) fn start_next(&mut self, random: &mut Random) {
        self.running = self.next(random).start();
    }

    pub(crate) fn kill(&mut self) {
        self.check();
        self.running.kill();
    }

    pub(crate) fn stop(&mut self) {
        self.check();
        self.wait_until_handled(Signal::TERM);
        let status = self.running.stop();
        assert!(status.success(), "SIGTERM is a clean end: {status}: {}", self.running.tail());
    }

    /// Replaces the first agent under load. The new one may be killed on the way.
    pub(crate) fn upgrade(&mut self, random: &mut Random) {
        let end = if random.percent(50) { Self::stop } else { Self::kill };
        end(self);
        if random.percent(50) {
            let fault = random.pick(&[Fault::KillBefore, Fault::KillAfter]);
            self.trace(Injection { site: None, number: 1 + random.below(UPGRADE_CALL_MAX), fault }, random, || {});
        }
        self.start_next(random);
    }

    /// Starts an agent with a fault in place of a call, which lives for as long as `work` takes, and then an ordinary
    /// one.
    pub(crate) fn start_with_fault(&mut self, random: &mut Random, work: impl FnOnce()) {
        let error = Fault::AnyError(random.below(ERROR_MAX));
        let fault = random.weighted(&[(20, Fault::KillBefore), (20, Fault::KillAfter), (60, error)]);
        let injection = Injection { site: None, number: 1 + random.below(CALL_MAX), fault };
        self.kill();
        self.trace(injection, random, work);
        self.start_next(random);
    }

    fn trace(&self, injection: Injection, random: &mut Random, work: impl FnOnce()) {
        let what = injection.to_string();
        eprintln!("an agent is {what}");
        let mut agent = TracedAgent::start_agent(self.sandbox, self.next(random), Some(injection));
        if agent.settle() {
            work();
        }
        agent.kill();
        assert!(!agent.log().contains("panicked"), "{what}: {}", agent.log());
    }

    /// An agent of an older layout refuses to start.
    pub(crate) fn try_older(&mut self, random: &mut Random) {
        self.kill();
        let mut older = Agent::new(self.sandbox).binary(&self.older).kubeconfig(&self.kubeconfig).start();
        let status = older.wait(PATIENCE).expect("an older agent ends");
        let refuses = format!("holds table layout {LAYOUT_VERSION}");
        assert!(status.code() == Some(1) && older.log().contains(&refuses), "{status}: {}", older.log());
        self.start_next(random);
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
