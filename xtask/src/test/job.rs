//! One test, or the tests of one binary, as a process of its own.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    process::{Pid, PidfdFlags, WaitId, WaitIdOptions},
};

use super::summary::Counts;
use crate::{paths, run};

/// Number of lines of a failed test's output that are shown.
const SHOWN_LINES: usize = 300;

/// Environment variables.
pub(super) type Variables = Vec<(OsString, OsString)>;

/// How a job has ended.
pub(super) struct Ended {
    pub(super) counts: Counts,
    pub(super) elapsed: Duration,
    /// CPU time of the process and of all that it has waited for.
    pub(super) cpu: Duration,
    /// File with all of its output.
    pub(super) log: PathBuf,
    /// Why it failed, if it did not end by itself with a code.
    pub(super) note: Option<String>,
}

/// The task of a process.
pub(super) enum Work {
    /// One test.
    Test(String),
    /// Tests of a binary; all, if none is named.
    Tests(Vec<String>),
    /// Something that is no test binary, and counts as one test.
    Command,
}

impl Work {
    fn arguments(&self) -> Vec<&str> {
        match self {
            Self::Test(test) => vec!["--exact", test, "--no-capture", "--test-threads=1"],
            Self::Tests(tests) if tests.is_empty() => Vec::new(),
            Self::Tests(tests) => ["--exact"].into_iter().chain(tests.iter().map(String::as_str)).collect(),
            Self::Command => Vec::new(),
        }
    }
}

/// Runs a command to its end, or to the end of its time.
pub(super) fn run(command: &mut Command, work: &Work, name: &str, limit: Option<Duration>) -> Result<Ended> {
    let log = log_file(name)?;
    let file = File::create(&log).with_context(|| format!("creating {}", log.display()))?;
    let twin = file.try_clone().with_context(|| format!("opening {} twice", log.display()))?;
    command.args(work.arguments()).stdin(Stdio::null()).stdout(file).stderr(twin);
    let start = Instant::now();
    let mut child = command.spawn().with_context(|| run::cannot_start(command))?;
    let is_late = !has_ended(&child, limit).with_context(|| format!("waiting for {name}"))?;
    if is_late {
        // Its daemons end with it, and the next sandbox sweeps the rest.
        child.kill().with_context(|| format!("killing {name}"))?;
        has_ended(&child, None).with_context(|| format!("waiting for {name}"))?;
    }
    let cpu = cpu_time(&child).unwrap_or_default();
    let status = child.wait().with_context(|| format!("waiting for {name}"))?;
    let (counts, note) = verdict(work, status, &log);
    let late = limit.filter(|_| is_late).map(|limit| format!("killed after {} s", limit.as_secs()));
    Ok(Ended { counts, elapsed: start.elapsed(), cpu, log, note: late.or(note) })
}

fn verdict(work: &Work, status: ExitStatus, log: &Path) -> (Counts, Option<String>) {
    let one = |passed: bool| Counts { passed: passed.into(), failed: (!passed).into(), skipped: 0 };
    let died = (!status.success()).then(|| format!("ended with {status}"));
    match work {
        Work::Command => (one(status.success()), died),
        Work::Test(_) | Work::Tests(_) => {
            let text = fs::read(log).unwrap_or_default();
            let lines = String::from_utf8_lossy(&text);
            let mut counts = lines.lines().map(Counts::parse).fold(Counts::default(), |mut sum, counts| {
                sum += counts;
                sum
            });
            let is_told = status.success() == (counts.failed == 0);
            if is_told && counts != Counts::default() {
                return (counts, None);
            }
            counts.failed += 1;
            let note = died.unwrap_or_else(|| "ran no test".to_owned());
            (counts, Some(format!("a test binary ended before its tests did ({note})")))
        }
    }
}

/// Waits for a child's end and leaves it to be waited for: until then, the kernel tells its CPU time. False after the
/// time limit.
fn has_ended(child: &Child, limit: Option<Duration>) -> io::Result<bool> {
    let pid = Pid::from_child(child);
    if let Some(limit) = limit {
        let handle = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).map_err(io::Error::other)?;
            match rustix::event::poll(&mut [PollFd::new(&handle, PollFlags::IN)], Some(&left)) {
                Ok(0) => return Ok(false),
                Ok(_) => return Ok(true),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    loop {
        match rustix::process::waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {
            Err(rustix::io::Errno::INTR) => {}
            result => return Ok(result.map(|_| true)?),
        }
    }
}

/// CPU time of a process that has ended and of the children that it has waited for.
fn cpu_time(child: &Child) -> Option<Duration> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).ok()?;
    let ticks_per_second = u32::try_from(rustix::param::clock_ticks_per_second()).ok()?;
    Duration::from_secs(ticks(&stat)?).checked_div(ticks_per_second)
}

/// The sum of utime, stime, cutime and cstime (proc_pid_stat(5)).
fn ticks(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(") ")?;
    let times = fields.split_whitespace().skip(11).take(4);
    times.map(|field| field.parse::<u64>().ok()).sum()
}

/// File for the output of a job. Jobs of one name, as with `--repeat`, run at the same time: each has its own.
fn log_file(name: &str) -> Result<PathBuf> {
    static COUNTS: Mutex<BTreeMap<String, usize>> = Mutex::new(BTreeMap::new());
    let directory = directory();
    fs::create_dir_all(&directory).with_context(|| format!("creating {}", directory.display()))?;
    let mut counts = COUNTS.lock().unwrap_or_else(PoisonError::into_inner);
    let count = counts.entry(name.to_owned()).or_default();
    *count += 1;
    let number = if *count == 1 { String::new() } else { format!(".{count}") };
    Ok(directory.join(format!("{}{number}.log", name.replace("::", "."))))
}

/// Directory of the tests' output.
pub(super) fn directory() -> PathBuf {
    paths::target().join("test-logs")
}

/// The end of a job's output.
pub(super) fn tail(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    let skipped = lines.len().saturating_sub(SHOWN_LINES);
    let mut shown = String::new();
    if skipped > 0 {
        shown = format!("({skipped} lines before these are in {})\n", log.display());
    }
    for line in lines.iter().skip(skipped) {
        shown.push_str(line);
        shown.push('\n');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, work: &Work, limit: Option<Duration>) -> Ended {
        let mut command = Command::new("/bin/sh");
        // The arguments of the work become the script's own parameters.
        command.args(["-c", script, "sh"]);
        let name = format!("xtask::job::{}", script.len());
        run(&mut command, work, &name, limit).unwrap()
    }

    #[test]
    fn a_command_counts_as_one_test() {
        assert_eq!(shell("exit 0", &Work::Command, None).counts, Counts { passed: 1, ..Counts::default() });
        let failed = shell("echo because; exit 3", &Work::Command, None);
        assert_eq!(failed.counts, Counts { failed: 1, ..Counts::default() });
        assert_eq!(tail(&failed.log), "because\n");
        assert_eq!(failed.note.as_deref(), Some("ended with exit status: 3"));
    }

    #[test]
    fn jobs_of_one_name_have_files_of_their_own() {
        let [one, other] = ["echo one; exit 0", "echo two; exit 0"].map(|script| shell(script, &Work::Command, None));
        assert_eq!([tail(&one.log), tail(&other.log)], ["one\n", "two\n"]);
    }

    #[test]
    fn a_binary_that_ends_before_its_tests_has_failed() {
        let line = "test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s";
        let test = Work::Test("a".to_owned());
        let passed = shell(&format!("echo '{line}'"), &test, None);
        assert_eq!((passed.counts.passed, passed.counts.failed, passed.note), (1, 0, None));
        let died = shell(&format!("echo '{line}'; kill -9 $$"), &test, None);
        assert_eq!(died.counts.failed, 1);
        assert!(died.note.unwrap().contains("signal: 9"));
        let silent = shell(": no test", &test, None);
        assert_eq!(silent.counts.failed, 1);
        assert!(silent.note.unwrap().contains("ran no test"));
    }

    #[test]
    fn a_test_that_takes_too_long_is_killed() {
        let ended = shell("exec sleep 1000", &Work::Command, Some(Duration::from_millis(50)));
        assert_eq!(ended.counts.failed, 1);
        assert_eq!(ended.note.as_deref(), Some("killed after 0 s"));
    }

    #[test]
    fn cpu_time_is_that_of_the_process_and_its_children() {
        let stat = "7 (a b) c) S 1 7 7 0 -1 4194304 1 2 3 4 11 22 33 44 20 0 1 0";
        assert_eq!(ticks(stat), Some(110));
        assert_eq!(ticks(""), None);
    }
}
