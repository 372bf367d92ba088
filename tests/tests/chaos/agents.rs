//! The agent under test, and its successors and predecessors.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use cproxy_ebpf::LAYOUT_VERSION;
use cproxy_tests::{
    faults::{Fault, Injection, TracedAgent},
    nameserver::program_with_nameserver,
    process::{Agent, RunningAgent, Signal, cproxy_binary},
    random::Random,
    sandbox::Sandbox,
    storm::Storm,
};

use crate::{PATIENCE, cluster::NAMESERVER};

/// Variable with agents of older layouts: `LAYOUT=PATH`, separated by commas.
const OLDER_VARIABLE: &str = "CPROXY_OLDER_AGENTS";

/// System calls in whose place there is a fault, with errors that they can give.
const CALLS: [(&str, &[&str]); 4] = [
    ("bpf", &["EPERM", "ENOMEM", "EINVAL", "EBUSY", "EAGAIN", "E2BIG", "ENOSPC"]),
    ("mount,umount2,rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat", &["EPERM", "EROFS", "ENOSPC", "EBUSY"]),
    ("flock,fcntl", &["ENOLCK", "EINTR", "EAGAIN", "EBADF"]),
    ("socket,bind,sendto,recvfrom,recvmsg,sendmsg", &["EPERM", "ENOBUFS", "EAFNOSUPPORT", "EINTR"]),
];

/// Largest number of a call that is replaced by a fault.
const CALL_MAX: usize = 60;

/// The same for an upgrade.
const UPGRADE_CALL_MAX: usize = 300;

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
        let text = env::var(OLDER_VARIABLE).unwrap_or_else(|_| panic!("{OLDER_VARIABLE} is not set"));
        let older: Vec<_> = text.split(',').filter_map(|entry| entry.split_once('=')).collect();
        let (layout, older) = random.pick(&older);
        eprintln!("the first agent has layout {layout}");
        let program = |name, path: &Path| program_with_nameserver(sandbox, name, path, NAMESERVER);
        let (present, older) = (program("present-agent", &cproxy_binary()), program("older-agent", Path::new(older)));
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
            let number = 1 + random.below(UPGRADE_CALL_MAX);
            eprintln!("killed at call {number} of bpf(2)");
            self.trace(Injection { calls: "bpf", fault: Fault::Kill, number }, random, || {});
        }
        self.start_next(random);
    }

    /// Starts an agent with a fault in place of a call, which lives for as long as `work` takes, and then an ordinary
    /// one.
    pub(crate) fn start_with_fault(&mut self, random: &mut Random, work: impl FnOnce()) {
        let (calls, errors) = random.pick(&CALLS);
        let fault = if random.percent(30) { Fault::Kill } else { Fault::Error(random.pick(errors)) };
        let injection = Injection { calls, fault, number: 1 + random.below(CALL_MAX) };
        eprintln!("{injection:?}");
        self.kill();
        self.trace(injection, random, work);
        self.start_next(random);
    }

    fn trace(&self, injection: Injection, random: &mut Random, work: impl FnOnce()) {
        let mut agent = TracedAgent::start_agent(self.sandbox, self.next(random), injection.calls, Some(injection));
        if agent.settle() {
            work();
        }
        agent.kill();
        assert!(!agent.log().contains("panicked"), "{injection:?}: {}", agent.log());
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
