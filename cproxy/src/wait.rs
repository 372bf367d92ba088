//! Wait for an agent's progress, seen from its run directory.

use std::{
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use cproxy_core::{Action, ServiceName, printable};
use rustix::fs::{Mode, OFlags};

use crate::admin;

/// File in the run directory: the table has been complete since this agent started.
pub const READY: &str = "ready";
/// File in the run directory: the programs are attached below the cgroup root, with the place in one line.
pub const LIMITED: &str = "limited";
/// File in the run directory: the reason why the last agent has ended, in one line.
pub const FAILED: &str = "failed";
/// As [`FAILED`], if another attempt on this machine would fail in the same way.
pub const UNUSABLE: &str = "unusable";

/// Bound on the size of a file in the run directory; the agent writes less.
const SMALL_BYTES_MAX: u64 = 16 << 10;

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Interval of the first polls for a file: `cproxy wait` must not delay a boot.
const PAUSE: Duration = Duration::from_millis(2);
/// Interval of later polls, and of requests to the agent.
const PAUSE_LONG: Duration = Duration::from_millis(50);
/// Time after which polls are less frequent.
const EAGER: Duration = Duration::from_secs(1);
/// Time for the agent's answer after the timeout: a wait with timeout 0 still asks.
const LAST_ANSWER: Duration = Duration::from_millis(500);

/// Conditions to wait for.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Run directory of the agent.
    pub run_dir: PathBuf,
    /// Longest time to wait.
    pub timeout: Duration,
    /// Services of which some frontend leads to an endpoint.
    pub services: Vec<ServiceName>,
}

/// Reason why the wait failed.
#[derive(Debug, thiserror::Error)]
pub enum WaitError {
    /// Timeout.
    #[error("not ready after {0:?}: {1}")]
    TimedOut(Duration, String),
    /// The agent cannot run on this machine.
    #[error("cproxy cannot run here: {0}")]
    Unusable(String),
}

/// Waits until all conditions hold.
///
/// # Errors
/// The timeout with the missing conditions, or an agent that cannot run here.
pub fn wait(wanted: &Wanted) -> Result<(), WaitError> {
    let start = Instant::now();
    let left = || wanted.timeout.saturating_sub(start.elapsed());
    loop {
        let Some(missing) = missing(wanted, left())? else { return Ok(()) };
        let left = left();
        if left.is_zero() {
            return Err(WaitError::TimedOut(wanted.timeout, missing.explain(&wanted.run_dir)));
        }
        let is_eager = matches!(missing, Missing::Ready) && start.elapsed() < EAGER;
        let pause = if is_eager { PAUSE } else { PAUSE_LONG };
        thread::sleep(pause.min(left));
    }
}

/// The line of a ready agent whose programs are attached below the cgroup root.
#[must_use]
pub fn limits(run_dir: &Path) -> Option<String> {
    read_line(&run_dir.join(LIMITED)).ok()
}

/// Conditions that do not hold yet.
enum Missing {
    Ready,
    Answer(io::Error),
    Service(ServiceName),
}

/// Action of a frontend with endpoints.
const FORWARD: &str = Action::Forward.as_str();

fn missing(wanted: &Wanted, left: Duration) -> Result<Option<Missing>, WaitError> {
    if !is_ready(&wanted.run_dir.join(READY)) {
        let unusable = read_line(&wanted.run_dir.join(UNUSABLE)).ok();
        return unusable.map_or(Ok(Some(Missing::Ready)), |reason| Err(WaitError::Unusable(reason)));
    }
    if wanted.services.is_empty() {
        return Ok(None);
    }
    let rows = match admin::ask_services(&wanted.run_dir, left.clamp(LAST_ANSWER, admin::TIMEOUT)) {
        Ok(rows) => rows,
        Err(error) => return Ok(Some(Missing::Answer(error))),
    };
    let is_served = |service: &&ServiceName| {
        let name = service.to_string();
        rows.iter().any(|row| row.service.as_ref() == Some(&name) && row.action == FORWARD)
    };
    Ok(wanted.services.iter().find(|service| !is_served(service)).cloned().map(Missing::Service))
}

/// Whether the file exists and is from this boot.
fn is_ready(file: &Path) -> bool {
    read_small(file).is_ok_and(|boot| boot.is_empty() || boot == this_boot())
}

/// Identity of this boot; empty if the kernel does not provide it.
#[must_use]
pub fn this_boot() -> String {
    fs::read_to_string(BOOT_ID).unwrap_or_default()
}

impl Missing {
    fn explain(self, run_dir: &Path) -> String {
        if let Ok(reason) = read_line(&run_dir.join(FAILED)) {
            return format!("the agent has ended: {reason}");
        }
        let silent = |error| format!("no agent answers at {}: {error}", run_dir.join(admin::SOCKET).display());
        match self {
            Self::Answer(error) => silent(error),
            Self::Service(service) => format!("Service {service} has no endpoint that is ready"),
            Self::Ready => match admin::ask_gauges(run_dir, LAST_ANSWER) {
                Err(error) => silent(error),
                Ok(gauges) if gauges.contains_key("api_server_silent_seconds") => {
                    "the agent has heard its API server and has no complete list of all kinds yet; its log tells more"
                        .to_owned()
                }
                Ok(_) => "the agent has heard nothing from its source yet; its log tells more".to_owned(),
            },
        }
    }
}

/// In a directory that others can write, an agent's file may be replaced by a file that never ends, or by a link to one
/// that only root can read.
fn read_small(path: &Path) -> io::Result<String> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = fs::File::from(rustix::fs::open(path, flags, Mode::empty())?);
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("not a file"));
    }
    let mut text = String::new();
    file.take(SMALL_BYTES_MAX).read_to_string(&mut text)?;
    Ok(text)
}

fn read_line(path: &Path) -> io::Result<String> {
    let text = read_small(path)?;
    Ok(printable(text.lines().next().unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_small_files_are_read() {
        let dir = std::env::temp_dir().join(format!("cproxy-wait-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let path = |name: &str| dir.join(name);
        fs::write(path("file"), "word\n").unwrap();
        fs::write(path("large"), vec![b'x'; 1 << 20]).unwrap();
        std::os::unix::fs::symlink("file", path("link")).unwrap();
        std::os::unix::fs::symlink("/dev/zero", path("endless")).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, path("fifo"), rustix::fs::FileType::Fifo, Mode::RUSR, 0).unwrap();
        let read = |name: &str| read_small(&path(name)).ok();
        assert_eq!(read("file").as_deref(), Some("word\n"));
        assert_eq!(read("large").map(|text| text.len() as u64), Some(SMALL_BYTES_MAX));
        assert_eq!(["link", "endless", "fifo", "missing", "."].map(read), [const { None::<String> }; 5]);
        fs::remove_dir_all(&dir).unwrap();
    }

    fn wanted(name: &str) -> Wanted {
        let run_dir = std::env::temp_dir().join(format!("cproxy-wait-{}-{name}", std::process::id()));
        fs::remove_dir_all(&run_dir).ok();
        Wanted { run_dir, timeout: Duration::from_millis(30), services: Vec::new() }
    }

    fn outcome(wanted: &Wanted) -> String {
        wait(wanted).map_or_else(|error| error.to_string(), |()| "ready".to_owned())
    }

    #[test]
    fn what_is_missing_is_named() {
        let wanted = wanted("missing");
        assert!(outcome(&wanted).starts_with("not ready after 30ms: no agent answers at "), "{}", outcome(&wanted));
        fs::create_dir(&wanted.run_dir).unwrap();
        fs::write(wanted.run_dir.join(FAILED), "no route\nat all").unwrap();
        assert_eq!(outcome(&wanted), "not ready after 30ms: the agent has ended: no route");
        fs::write(wanted.run_dir.join(UNUSABLE), "too old").unwrap();
        assert_eq!(outcome(&Wanted { timeout: Duration::MAX, ..wanted.clone() }), "cproxy cannot run here: too old");
        fs::write(wanted.run_dir.join(READY), "of another boot\n").unwrap();
        assert_eq!(outcome(&wanted), "cproxy cannot run here: too old");
        fs::write(wanted.run_dir.join(READY), this_boot()).unwrap();
        assert_eq!(outcome(&wanted), "ready", "an earlier failure does not count");
        let service = Wanted { services: vec![ServiceName::new("default", "web")], ..wanted.clone() };
        assert!(outcome(&service).starts_with("not ready after 30ms: "), "{}", outcome(&service));
        fs::remove_dir_all(&wanted.run_dir).unwrap();
    }
}
