//! Cost of a process, as the kernel counts it.

use std::{collections::HashMap, ffi::OsString, fs, time::Duration};

use rustix::param::clock_ticks_per_second;

/// The memory of a process, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Currently resident memory.
    pub resident: u64,
    /// Resident memory without a file behind it, which the kernel cannot reclaim when memory is short.
    pub anonymous: u64,
    /// Peak of resident memory since the start, or since [`forget_peak`].
    pub peak: u64,
}

impl Memory {
    /// Memory of a running process.
    pub fn of(pid: u32) -> Self {
        let status = read(pid, "status");
        let bytes = |name| field(&status, name).unwrap_or_else(|| panic!("the kernel does not tell {name}")) << 10;
        Self { resident: bytes("VmRSS"), anonymous: bytes("RssAnon"), peak: bytes("VmHWM") }
    }
}

/// Resets the kernel's count of the peak.
pub fn forget_peak(pid: u32) {
    fs::write(format!("/proc/{pid}/clear_refs"), "5").expect("cannot reset the peak of a process's memory");
}

/// CPU time of a process, all its threads, and its children that have ended. The children's time is in steps of 10 ms.
pub fn cpu_time(pid: u32) -> Duration {
    own_cpu_time(pid) + children_cpu_time(pid)
}

/// Number of times that each thread of a process has gone to sleep and was woken later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sleeps(HashMap<OsString, u64>);

impl Sleeps {
    /// Counts so far.
    pub fn of(pid: u32) -> Self {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("the process has ended");
        let count = |task: fs::DirEntry| {
            let status = fs::read_to_string(task.path().join("status")).ok()?;
            Some((task.file_name(), field(&status, "voluntary_ctxt_switches")?))
        };
        Self(tasks.flatten().filter_map(count).collect())
    }

    /// Total since `earlier`, without threads that have ended since: the kernel keeps no count of them.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> u64 {
        let before = |thread| earlier.0.get(thread).copied().unwrap_or_default();
        self.0.iter().map(|(thread, count)| count.saturating_sub(before(thread))).sum()
    }
}

/// CPU time to the nanosecond, finer than that of `/proc`.
fn own_cpu_time(pid: u32) -> Duration {
    let (mut clock, mut time) = (0, libc::timespec { tv_sec: 0, tv_nsec: 0 });
    // SAFETY: the call writes a clock's id into a live variable.
    let found = unsafe { libc::clock_getcpuclockid(pid as libc::pid_t, &raw mut clock) };
    assert_eq!(found, 0, "process {pid} has ended");
    // SAFETY: the call writes a time into a live variable.
    let read = unsafe { libc::clock_gettime(clock, &raw mut time) };
    assert_eq!(read, 0, "process {pid} has ended");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn children_cpu_time(pid: u32) -> Duration {
    let ticks = children_ticks(&read(pid, "stat")).expect("/proc/<pid>/stat is not as it was");
    Duration::from_secs_f64(ticks as f64 / clock_ticks_per_second() as f64)
}

/// CPU ticks of children from `pid (name) state ppid ...`. The name may contain anything; user and system time of
/// children are the 16th and 17th fields.
fn children_ticks(stat: &str) -> Option<u64> {
    let (_, after_name) = stat.rsplit_once(") ")?;
    let mut times = after_name.split(' ').skip(13);
    Some(times.next()?.parse::<u64>().ok()? + times.next()?.parse::<u64>().ok()?)
}

fn read(pid: u32, file: &str) -> String {
    fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_else(|error| panic!("process {pid}: {error}"))
}

/// A field of the form `Name:   123 kB`.
fn field(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    value.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn childrens_times_are_found_behind_any_name() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194304 100 200 0 0 11 12 130 140 20 0 1 0 5 6 7\n";
        assert_eq!(children_ticks(stat), Some(270));
        assert_eq!(children_ticks("7 (a) S 1"), None);
    }

    #[test]
    fn ended_threads_do_not_reduce_the_count() {
        let sleeps = |counts: &[(&str, u64)]| Sleeps(counts.iter().map(|&(thread, n)| (thread.into(), n)).collect());
        assert_eq!(sleeps(&[("1", 7), ("3", 2)]).since(&sleeps(&[("1", 5), ("2", 100)])), 4);
    }

    #[test]
    fn the_memory_and_cpu_time_of_a_process_are_read() {
        let own = std::process::id();
        let memory = Memory::of(own);
        assert!(memory.anonymous > 0 && memory.resident >= memory.anonymous && memory.peak >= memory.resident);
        assert!(cpu_time(own) > Duration::ZERO);
    }
}
