//! Agents whose system calls fail, and agents that are killed before or after one. A tracer does that from outside,
//! with ptrace(2).
//!
//! Calls are told apart by their site: what they do, and to what. A dry run records them; [`chosen_injections`] makes a
//! list of faults from that, at the first and the last call of each site.

mod call;
mod tracer;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    path::PathBuf,
    process::ExitStatus,
    sync::Arc,
    thread::JoinHandle,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};

use self::tracer::Shared;
use crate::{
    process::{Agent, AgentSettings, eventually},
    program::Settings as _,
    random::{self, Random},
    sandbox::{Placement, Sandbox},
};

/// Variable with a part of the description of the only faults that are of interest.
const FAULT_VARIABLE: &str = "CPROXY_FAULT";

/// Limit on the time until an agent is ready or has ended.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Effect of a call, and its object: `bpf MAP_UPDATE_ELEM FRONTENDS`, say. It begins with `child` for a process that
/// the agent has started.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Site(String);

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A recorded call.
#[derive(Clone, Debug)]
pub struct Call {
    /// Its site.
    pub site: Site,
    /// Errors that the kernel can give for it.
    errors: &'static [i32],
}

/// An object in the kernel, by its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BpfObject {
    /// A map.
    Map(u32),
    /// A program.
    Program(u32),
    /// A link.
    Link(u32),
}

/// Event at a system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The process is killed before the call.
    KillBefore,
    /// The process is killed after the call.
    KillAfter,
    /// The call fails with this error, and does nothing.
    Error(i32),
    /// The same with one of the errors that the kernel can give, by its number among them, which may exceed theirs.
    AnyError(usize),
}

/// Fault at one call.
#[derive(Clone, Debug)]
pub struct Injection {
    /// Site of the call; any if there is none.
    pub site: Option<Site>,
    /// Number of the call among those of its site. The first is 1.
    pub number: usize,
    /// Event at the call.
    pub fault: Fault,
}

impl Injection {
    /// Whether the process is killed.
    pub fn kills(&self) -> bool {
        matches!(self.fault, Fault::KillBefore | Fault::KillAfter)
    }

    /// Whether the error is one of a kernel that would not do better another time.
    pub fn refuses(&self) -> bool {
        matches!(self.fault, Fault::Error(libc::EPERM | libc::EAFNOSUPPORT))
    }
}

impl fmt::Display for Injection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.fault {
            Fault::KillBefore => write!(f, "killed before")?,
            Fault::KillAfter => write!(f, "killed after")?,
            Fault::Error(error) => write!(f, "refused ({}) at", std::io::Error::from_raw_os_error(error))?,
            Fault::AnyError(number) => write!(f, "refused (error {number}) at")?,
        }
        write!(f, " call {}", self.number)?;
        self.site.as_ref().map_or(Ok(()), |site| write!(f, " of {site}"))
    }
}

/// Whether a random sample of faults is tried, and not all of a soak or those that `CPROXY_FAULT` names.
pub fn is_sample() -> bool {
    std::env::var_os(FAULT_VARIABLE).is_none() && !random::is_soak()
}

/// Faults at these calls: those whose description contains `CPROXY_FAULT`, or all in a soak, or else a random sample.
pub fn chosen_injections(name: &str, calls: &[Call], sample: usize) -> Vec<Injection> {
    let (all, seed) = (injections(calls), random::seed());
    eprintln!("{name}: CPROXY_SEED={seed}: {} calls, {} faults", calls.len(), all.len());
    if let Ok(text) = std::env::var(FAULT_VARIABLE) {
        return all.into_iter().filter(|injection| injection.to_string().contains(&text)).collect();
    }
    if random::is_soak() { all } else { Random::new(seed).shuffled(&all).into_iter().take(sample).collect() }
}

/// The calls of a recording that another has, too: how often some are made depends on the load of the machine.
pub fn common(calls: Vec<Call>, other: &[Call]) -> Vec<Call> {
    let mut left = BTreeMap::<&Site, usize>::new();
    other.iter().for_each(|call| *left.entry(&call.site).or_default() += 1);
    let mut is_left = |call: &Call| {
        let left = left.get_mut(&call.site).filter(|left| **left != 0);
        left.is_some_and(|left| {
            *left -= 1;
            true
        })
    };
    calls.into_iter().filter(|call| is_left(call)).collect()
}

/// All faults at the first and the last call of each site, in the order of the first calls.
pub fn injections(calls: &[Call]) -> Vec<Injection> {
    let mut counts = BTreeMap::<&Site, usize>::new();
    for call in calls {
        *counts.entry(&call.site).or_default() += 1;
    }
    let mut injections = Vec::new();
    for call in calls {
        let Some(count) = counts.remove(&call.site) else { continue };
        let numbers: &[usize] = if count == 1 { &[1] } else { &[1, count] };
        for &number in numbers {
            let errors = call.errors.iter().copied().map(Fault::Error);
            let faults = [Fault::KillBefore, Fault::KillAfter].into_iter().chain(errors);
            injections.extend(faults.map(|fault| Injection { site: Some(call.site.clone()), number, fault }));
        }
    }
    injections
}

/// A traced agent. It ends when this value is dropped.
#[derive(Debug)]
pub struct TracedAgent {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    pid: Pid,
    settings: AgentSettings,
    log: PathBuf,
}

impl TracedAgent {
    /// Starts an agent on the sandbox's manifests, perhaps with a fault.
    pub fn start(sandbox: &Sandbox, injection: Option<Injection>) -> Self {
        Self::start_agent(sandbox, Agent::new(sandbox).manifests(sandbox.manifest_dir()), injection)
    }

    /// The same with any agent.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start_agent(sandbox: &Sandbox, agent: Agent<'_>, injection: Option<Injection>) -> Self {
        let (mut command, settings) = agent.command();
        let log = sandbox.dir().join("traced.log");
        let output = std::fs::File::create(&log).expect("cannot create a log file in the sandbox");
        let errors = output.try_clone().expect("cannot duplicate a descriptor");
        sandbox.place(command.stdin(std::process::Stdio::null()).stdout(output).stderr(errors), Placement::Hooked);
        let directory = sandbox.dir().to_string_lossy().into_owned();
        let shared = Arc::new(Shared::new(injection));
        let (thread, pid) = tracer::spawn(command, directory, Arc::clone(&shared));
        Self { shared, thread: Some(thread), pid, settings, log }
    }

    /// Waits until the agent is ready, or has ended. Returns whether it is ready.
    ///
    /// # Panics
    /// When neither happens within a minute.
    pub fn settle(&mut self) -> bool {
        eventually(TIMEOUT, "the agent is ready or has ended", || {
            match (self.exit_status(), self.settings.check_ready().is_ok()) {
                (Some(_), _) => Ok(false),
                (None, true) => Ok(true),
                (None, false) => Err(self.log()),
            }
        })
    }

    /// Its exit status, if it has ended.
    pub fn exit_status(&self) -> Option<ExitStatus> {
        self.shared.exit_status()
    }

    /// The process.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Its log.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Takes the recorded calls: those since the start, or since the last time.
    pub fn take_calls(&self) -> Vec<Call> {
        self.shared.take_calls()
    }

    /// Number of recorded calls that have not been taken.
    pub fn call_count(&self) -> usize {
        self.shared.call_count()
    }

    /// Sets a fault for a call from now on.
    pub fn inject(&self, injection: Injection) {
        self.shared.arm(injection);
    }

    /// Objects that its processes have made.
    pub fn made(&self) -> BTreeSet<BpfObject> {
        self.shared.made()
    }

    /// Whether the call of the last injection was made.
    pub fn was_hit(&self) -> bool {
        self.shared.was_hit()
    }

    /// Kills it, and waits until all its processes have ended.
    ///
    /// # Panics
    /// When the tracer has panicked.
    pub fn kill(&mut self) {
        self.end(Signal::KILL);
    }

    /// Ends it by SIGTERM, and waits until all its processes have ended.
    ///
    /// # Panics
    /// When the tracer has panicked.
    pub fn stop(&mut self) {
        self.end(Signal::TERM);
    }

    fn end(&mut self, signal: Signal) {
        if self.exit_status().is_none() {
            // It may have ended since.
            kill_process(self.pid, signal).ok();
        }
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the tracer has panicked");
        }
    }
}

impl Drop for TracedAgent {
    fn drop(&mut self) {
        if self.exit_status().is_none() {
            kill_process(self.pid, Signal::KILL).ok();
        }
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
        if std::thread::panicking() {
            eprintln!("---- the log of the traced agent ----\n{}\n----", self.log());
        }
    }
}
