//! CPUs of the processes: relay and load generator have one each, so that neither takes the other's time. API server,
//! etcd and everything else run where the kernel puts them.

use std::fs;

use anyhow::{Context as _, Result};
use rustix::{
    process::Pid,
    thread::{CpuSet, sched_setaffinity},
};

/// CPU of the relay.
pub(crate) const RELAY_CPU: usize = 0;
/// CPU of the load generator.
pub(crate) const GENERATOR_CPU: usize = 1;

/// Keeps the threads of a process, and those that they start later, on one CPU.
pub(crate) fn to_cpu(pid: u32, cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    for thread in fs::read_dir(format!("/proc/{pid}/task")).context("reading the threads of a process")? {
        let id = thread?.file_name().to_string_lossy().parse().context("reading the threads of a process")?;
        sched_setaffinity(Pid::from_raw(id), &set).context("pinning a process to a CPU")?;
    }
    Ok(())
}
