//! Commands' side of the socket.

use std::{
    cell::Cell,
    collections::BTreeMap,
    fs,
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::{Duration, Instant},
};

use cproxy_core::sorted_map;
use cproxy_wire::read_json;
use rustix::{net::sockopt::socket_peercred, process::Pid};
use serde_json::{Value, value::RawValue};
use tracing::Level;

use super::{
    connection::{agent, connect},
    life::{KILLED, Life, life},
    lock,
    protocol::{
        REQUEST_CONFIG, REQUEST_EXPLAIN, REQUEST_GAUGES, REQUEST_HEALTH, REQUEST_HOLD, REQUEST_LOG, REQUEST_LOG_LEVEL,
        REQUEST_POLICY, REQUEST_PROBLEMS, REQUEST_RECEIVE, REQUEST_RESEED, REQUEST_SERVICES, REQUEST_SOURCE,
        RESPONSE_TIMEOUT, SOCKET,
    },
};
use crate::{
    config::SettingRow,
    report::{
        AgentReport, FrontendRow, HealthReport, PodPolicyReport, ProblemRow, ReceivedRow, SourceReport, read_answer,
    },
    target::Target,
};

/// Bound on a response, more than a full table has.
const RESPONSE_BYTES_MAX: usize = 256 << 20;

/// Time for the response of an agent that has not responded to the request before.
const SILENT_TIMEOUT: Duration = Duration::from_millis(100);

/// Error of a request without any response.
const NO_ANSWER: &str = "no answer in time";

thread_local! {
    /// Whether the agent has not responded to the last request. A command makes all of its requests in one thread.
    static IS_SILENT: Cell<bool> = const { Cell::new(false) };
}

/// Whether an agent listens in the run directory.
pub(super) fn is_agent_listening(run_dir: &Path) -> bool {
    connect(run_dir).is_ok()
}

/// Frontends of a running agent, without backends.
///
/// # Errors
/// No agent is running there, or it does not respond within `timeout`, which is not zero.
pub fn fetch_services(run_dir: &Path, timeout: Duration) -> io::Result<Vec<FrontendRow>> {
    let response = fetch(run_dir, REQUEST_SERVICES, timeout)?;
    // One row at a time, since there may be very many.
    let rows: Vec<&RawValue> = read_json(&response)?;
    rows.into_iter().map(|row| read_answer(row.get().as_bytes(), FrontendRow::read)).collect()
}

/// Gauges of a running agent, by name.
///
/// # Errors
/// As [`fetch_services`].
pub fn fetch_gauges(run_dir: &Path, timeout: Duration) -> io::Result<BTreeMap<String, u64>> {
    let read = |gauges: &Value| {
        let gauges = gauges.as_object()?.iter();
        gauges.map(|(name, value)| Some((name.clone(), value.as_u64()?))).collect::<Option<Vec<_>>>()
    };
    read_answer(&fetch(run_dir, REQUEST_GAUGES, timeout)?, read).map(sorted_map)
}

/// Source of a running agent.
///
/// # Errors
/// As [`fetch_services`]. An agent of an earlier version gives an answer of another form
/// ([`io::ErrorKind::InvalidData`]).
pub fn fetch_source(run_dir: &Path) -> io::Result<SourceReport> {
    read_answer(&fetch(run_dir, REQUEST_SOURCE, RESPONSE_TIMEOUT)?, SourceReport::read)
}

/// Health of a running agent's programs, after a look at them.
///
/// # Errors
/// As [`fetch_source`].
pub fn fetch_health(run_dir: &Path) -> io::Result<HealthReport> {
    read_answer(&fetch(run_dir, REQUEST_HEALTH, RESPONSE_TIMEOUT)?, HealthReport::read)
}

/// Present problems of a running agent.
///
/// # Errors
/// As [`fetch_source`].
pub fn fetch_problems(run_dir: &Path) -> io::Result<Vec<ProblemRow>> {
    let read = |rows: &Value| Some(rows.as_array().into_iter().flatten().map(ProblemRow::read).collect());
    read_answer(&fetch(run_dir, REQUEST_PROBLEMS, RESPONSE_TIMEOUT)?, read)
}

/// The pod's policy, as a running agent enforces it; `None` if it enforces none.
///
/// # Errors
/// As [`fetch_source`].
pub fn fetch_policy(run_dir: &Path) -> io::Result<Option<PodPolicyReport>> {
    let read = |report: &Value| if report.is_null() { Some(None) } else { PodPolicyReport::read(report).map(Some) };
    read_answer(&fetch(run_dir, REQUEST_POLICY, RESPONSE_TIMEOUT)?, read)
}

/// Ports that a running agent receives for load balancers; `None` if it is to receive none.
///
/// # Errors
/// As [`fetch_source`].
pub fn fetch_received(run_dir: &Path) -> io::Result<Option<Vec<ReceivedRow>>> {
    let read = |rows: &Value| Some(rows.as_array().map(|rows| rows.iter().map(ReceivedRow::read).collect()));
    read_answer(&fetch(run_dir, REQUEST_RECEIVE, RESPONSE_TIMEOUT)?, read)
}

/// A running agent's view of a destination.
///
/// # Errors
/// As [`fetch_source`].
pub fn fetch_explanation(run_dir: &Path, target: &Target) -> io::Result<AgentReport> {
    read_answer(&fetch(run_dir, &format!("{REQUEST_EXPLAIN}{target}\n"), RESPONSE_TIMEOUT)?, AgentReport::read)
}

/// Settings of a running agent.
///
/// # Errors
/// As [`fetch_services`].
pub fn fetch_config(run_dir: &Path) -> io::Result<Vec<SettingRow>> {
    let read = |rows: &Value| rows.as_array()?.iter().map(SettingRow::read).collect();
    read_answer(&fetch(run_dir, REQUEST_CONFIG, RESPONSE_TIMEOUT)?, read)
}

/// The last lines of a running agent's log.
///
/// # Errors
/// As [`request_reseed`].
pub fn fetch_log(run_dir: &Path) -> io::Result<String> {
    Ok(String::from_utf8_lossy(&fetch(run_dir, REQUEST_LOG, RESPONSE_TIMEOUT)?).into_owned())
}

/// Changes the level of a running agent's log. Returns its response: `ok`, or `error: ` and the reason.
///
/// # Errors
/// As [`request_reseed`].
pub fn request_log_level(run_dir: &Path, level: Level) -> io::Result<String> {
    let request = format!("{REQUEST_LOG_LEVEL}{}\n", level.as_str().to_lowercase());
    String::from_utf8(fetch(run_dir, &request, RESPONSE_TIMEOUT)?).map_err(io::Error::other)
}

/// Has a running agent choose from a new seed. Returns its response: `ok`, or `error: ` and the reason.
///
/// # Errors
/// No agent is running there, or it does not respond in time.
pub fn request_reseed(run_dir: &Path, is_before_snapshot: bool) -> io::Result<String> {
    let request = if is_before_snapshot { REQUEST_HOLD } else { REQUEST_RESEED };
    String::from_utf8(fetch(run_dir, request, RESPONSE_TIMEOUT)?).map_err(io::Error::other)
}

/// The failure of a request, and its remedy where there is one.
pub fn explain_silence(run_dir: &Path, error: &io::Error) -> String {
    let socket = run_dir.join(SOCKET);
    match error.kind() {
        io::ErrorKind::InvalidData => "the running agent is of another version and does not say".to_owned(),
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused if lock::is_held(run_dir) => format!(
            "an agent runs with the run directory {}, but somebody removed its socket: the agent makes it again, or \
             its log says why it cannot",
            run_dir.display()
        ),
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused if life(run_dir) == Life::Killed => {
            format!("{KILLED}: start cproxy run")
        }
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => format!(
            "no agent runs with the run directory {}: start cproxy run, or pass its --run-dir",
            run_dir.display()
        ),
        io::ErrorKind::PermissionDenied => {
            format!("only root may ask the agent at {}: run this as root", socket.display())
        }
        _ => stopped_agent(run_dir).unwrap_or_else(|| format!("no agent answers at {}: {error}", socket.display())),
    }
}

/// Words for an agent that a signal or a debugger has stopped, if it is so. Only root can learn that.
pub fn stopped_agent(run_dir: &Path) -> Option<String> {
    let pid = agent(run_dir).ok().filter(|agent| matches!(state_of(*agent), Some('T' | 't')))?.as_raw_nonzero();
    Some(format!("the agent, process {pid}, is stopped: `kill -CONT {pid}` lets it go on"))
}

/// State of a process: `T` if a signal has stopped it, `t` if a debugger has (proc_pid_stat(5)).
fn state_of(pid: Pid) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

/// A command asks several times, and waits for a silent agent once.
fn fetch(run_dir: &Path, request: &str, timeout: Duration) -> io::Result<Vec<u8>> {
    let stream = connect(run_dir)?;
    // Not `t`: the stop of a tracer is short.
    if socket_peercred(&stream).is_ok_and(|agent| state_of(agent.pid) == Some('T')) {
        return Err(timed_out(&[]));
    }
    let timeout = if IS_SILENT.get() { timeout.min(SILENT_TIMEOUT) } else { timeout };
    let response = exchange(stream, request, timeout);
    let is_silent = response.as_ref().is_err_and(|error| error.to_string() == NO_ANSWER);
    IS_SILENT.set(is_silent);
    response
}

/// Sends a request to an agent at the other end, and reads its response.
///
/// # Errors
/// It does not respond within `timeout`, which is not zero, or its response has no end.
pub fn exchange(mut stream: UnixStream, request: &str, timeout: Duration) -> io::Result<Vec<u8>> {
    stream.write_all(request.as_bytes())?;
    // Another user's socket may send bytes for ever; the agent itself stops after `RESPONSE_TIMEOUT`.
    let end = Instant::now() + timeout + RESPONSE_TIMEOUT;
    let mut response = Vec::new();
    let mut chunk = [0; 64 << 10];
    loop {
        let left = end.saturating_duration_since(Instant::now()).min(timeout);
        if left.is_zero() || response.len() > RESPONSE_BYTES_MAX {
            return Err(timed_out(&response));
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut chunk) {
            Ok(0) => return Ok(response),
            Ok(count) => response.extend_from_slice(chunk.get(..count).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(timed_out(&response)),
            Err(error) => return Err(error),
        }
    }
}

/// The system's own text for a timeout does not help the user.
fn timed_out(response: &[u8]) -> io::Error {
    let message = if response.is_empty() { NO_ANSWER } else { "no end of the answer" };
    io::Error::new(io::ErrorKind::TimedOut, message)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::net::UnixListener, thread};

    use super::*;

    #[test]
    fn a_silent_agent_is_waited_for_once() {
        let dir = std::env::temp_dir().join(format!("cproxy-silent-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let listener = UnixListener::bind(dir.join(SOCKET)).unwrap();
        let ask = |timeout| fetch(&dir, REQUEST_GAUGES, timeout);
        assert_eq!(ask(Duration::from_millis(50)).unwrap_err().to_string(), NO_ANSWER);
        let start = Instant::now();
        assert_eq!(ask(Duration::from_secs(60)).unwrap_err().to_string(), NO_ANSWER);
        assert!(start.elapsed() < Duration::from_secs(30));
        let answer = || {
            for _ in 0..3 {
                let (mut stream, _) = listener.accept().unwrap();
                stream.read_exact(&mut [0; REQUEST_GAUGES.len()]).unwrap();
                stream.write_all(b"{}").ok();
            }
        };
        thread::scope(|scope| {
            scope.spawn(answer);
            assert_eq!(ask(RESPONSE_TIMEOUT).unwrap(), b"{}");
        });
        assert!(!IS_SILENT.get(), "it answers again");
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_response_without_end_is_an_error() {
        let dir = std::env::temp_dir().join(format!("cproxy-client-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let listener = UnixListener::bind(dir.join(SOCKET)).unwrap();
        for (pause, size) in [(Duration::from_millis(5), 1), (Duration::ZERO, 1 << 20)] {
            thread::scope(|scope| {
                scope.spawn(|| {
                    let (mut stream, _) = listener.accept().unwrap();
                    while stream.write_all(&vec![b' '; size]).is_ok() {
                        thread::sleep(pause);
                    }
                });
                let error = fetch(&dir, REQUEST_GAUGES, Duration::from_secs(1)).unwrap_err();
                assert_eq!(error.to_string(), "no end of the answer");
            });
        }
        fs::remove_dir_all(&dir).unwrap();
    }
}
