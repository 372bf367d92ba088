//! Time that the programs have taken, which the kernel counts if it is asked to (`kernel.bpf_stats_enabled`).

use std::{fs, io, os::fd::AsFd as _, time::Duration};

use super::{
    pins::PinDir,
    program::Program,
    syscalls::{link_cgroup, obj_get, program_by_id, program_info},
};

const STATS_ENABLED: &str = "/proc/sys/kernel/bpf_stats_enabled";

/// Runs of a program while the kernel has counted them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HookTime {
    /// Name of the program's link.
    pub hook: &'static str,
    /// Time of all runs.
    pub time: Duration,
    /// Number of runs.
    pub runs: u64,
}

/// Runs of the programs that are attached; none if the kernel does not count them now. A program that was attached
/// again counts from zero.
///
/// # Errors
/// A program cannot be read, which takes CAP_SYS_ADMIN.
pub fn hook_times(pins: &PinDir) -> io::Result<Vec<HookTime>> {
    if !fs::read_to_string(STATS_ENABLED).is_ok_and(|value| value.trim() == "1") {
        return Ok(Vec::new());
    }
    let times = Program::ALL.into_iter().map(|program| {
        let link = obj_get(&pins.object(program.link), 0)?;
        let info = program_info(program_by_id(link_cgroup(link.as_fd())?.program_id)?.as_fd())?;
        Ok(HookTime { hook: program.link, time: Duration::from_nanos(info.run_time_ns), runs: info.run_cnt })
    });
    times.collect()
}
