//! Installation of the programs, in a child of the agent.

use std::{
    ffi::OsString,
    io,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

use cproxy_core::printable;
use cproxy_datapath::bpf::{self, Environment, PinDir, PinLock};
use tokio::sync::oneshot;

use super::error::AgentError;
use crate::{
    config::{Choice, ServiceCounting},
    privileges::{Broker, run_child},
    run_dir::Failure,
};

/// Exit code of `cproxy install` if another attempt may succeed (sysexits.h, EX_TEMPFAIL).
pub const EXIT_RETRY: u8 = 75;

/// Loads and attaches the programs in a child, whose memory is freed when it ends. Meanwhile the source may deliver.
pub(super) async fn install_in_child(
    environment: &Environment,
    lock: &PinLock,
    counters: ServiceCounting,
    broker: Option<Arc<Broker>>,
) -> Result<(), AgentError> {
    let words = ["install".into(), environment.cgroup.clone().into(), Choice::name(counters).into()];
    let stdout = in_child(environment, lock, broker, words.to_vec()).await?;
    let cgroup = printable(&environment.cgroup.display().to_string());
    tracing::debug!("attached to {cgroup}: {}", stdout.trim().replace('\n', ", "));
    Ok(())
}

/// Loads the programs of network policy in a child; if the agent `receives`, it attaches those for received addresses,
/// too.
pub(super) async fn load_policy_in_child(
    environment: &Environment,
    lock: &PinLock,
    broker: Option<Arc<Broker>>,
    receives: bool,
) -> Result<(), AgentError> {
    let action = if receives { "receive" } else { "load" };
    let words = ["policy".into(), action.into(), environment.cgroup.clone().into(), "none".into()];
    in_child(environment, lock, broker, words.to_vec()).await.map(drop)
}

/// Has a child do what its words say. Returns what it prints.
async fn in_child(
    environment: &Environment,
    lock: &PinLock,
    broker: Option<Arc<Broker>>,
    words: Vec<OsString>,
) -> Result<String, AgentError> {
    let path = PathBuf::from("/proc/self/exe");
    let failed = |error| AgentError::Child(path.clone(), error);
    // The child shares the lock: if it outlives the agent, the next agent must not start beside it.
    let lock = lock.share().map_err(failed)?;
    let pin_dir = environment.pin_dir.clone();
    let (sender, ended) = oneshot::channel();
    let wait = move || drop(sender.send(run_child(broker.as_deref(), &pin_dir, &words, lock)));
    thread::Builder::new().name("install".to_owned()).spawn(wait).map_err(failed)?;
    let output = ended.await.map_err(io::Error::other).flatten().map_err(failed)?;
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.success() {
        return Ok(stdout.into_owned());
    }
    let mut lines: Vec<_> = stderr.lines().collect();
    let Some(last) = lines.pop().filter(|_| output.status.code().is_some()) else {
        return Err(AgentError::InstallEnded(output.status));
    };
    // The verifier's log, if there is one, precedes the message.
    lines.into_iter().for_each(cproxy_daemon::write_stderr_line);
    let failure = if output.status.code() == Some(EXIT_RETRY.into()) { Failure::Transient } else { Failure::Lasting };
    Err(AgentError::Install(last.trim_start_matches("cproxy: ").to_owned(), failure))
}

/// Implementation of `cproxy install`, the child that the agent starts.
///
/// # Errors
/// As [`bpf::install`].
pub fn install_programs(pin_dir: &Path, cgroup: &Path, counters: ServiceCounting) -> Result<String, bpf::InstallError> {
    // Without its agent, the child could not report anything. The next agent repairs an interrupted installation.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)).ok();
    // If that fails, everything works, and the maps' memory counts as the agent's.
    bpf::leave_memory_cgroup().ok();
    let set = match counters {
        ServiceCounting::Off => bpf::ProgramSet::Plain,
        ServiceCounting::On => bpf::ProgramSet::Tracing,
    };
    let pins = PinDir::new(pin_dir);
    let programs = bpf::install(&pins, cgroup, bpf::Features::probe(), set)?;
    // Those that translate may have been attached again, and have to run first.
    super::policy::attach_behind(&pins, cgroup).map_err(|error| bpf::InstallError::Policy(Box::new(error)))?;
    let line = |(program, count): &(bpf::Program, u32)| format!("{} ({count} instructions verified)", program.name);
    Ok(programs.iter().map(line).collect::<Vec<_>>().join("\n"))
}
