//! Wait for an agent's progress, seen from its run directory.

use std::{
    io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use cproxy_core::{Action, ServiceName};

use super::{
    client::{explain_silence, fetch_gauges, fetch_services, fetch_source},
    files::{is_ready, read_line},
    life::{KILLED, Life, failure, life, obstacle},
    protocol::{CLOSED, LIMITED, RESPONSE_TIMEOUT, UNUSABLE},
};
use crate::report::SourceReport;

/// Interval of the first polls for a file: `cproxy wait` must not delay a boot.
const PAUSE: Duration = Duration::from_millis(2);
/// Interval of later polls, and of requests to the agent.
const PAUSE_LONG: Duration = Duration::from_millis(50);
/// Time after which polls are less frequent.
const EAGER: Duration = Duration::from_secs(1);
/// Interval of reports of what is missing.
const REPORT_INTERVAL: Duration = Duration::from_secs(2);
/// Time for the agent's response after the timeout: a wait with timeout 0 still sends a request.
const LAST_RESPONSE: Duration = Duration::from_millis(500);

/// Conditions to wait for.
#[derive(Clone, Debug)]
pub struct Conditions {
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
    #[error("not ready{after}: {1}", after = if .0.is_zero() { String::new() } else { format!(" after {:?}", .0) })]
    TimedOut(Duration, String),
    /// The agent cannot run on this machine.
    #[error("cannot run here: {0}")]
    Unusable(String),
    /// The agent does not answer this user.
    #[error("{0}")]
    NotAllowed(String),
}

/// Waits until all conditions hold. Meanwhile, `report` is told what is missing, not too often.
///
/// # Errors
/// The timeout with the missing condition, an agent that cannot run here, or that does not answer this user.
pub fn wait(conditions: &Conditions, mut report: impl FnMut(&str)) -> Result<(), WaitError> {
    let start = Instant::now();
    let left = || conditions.timeout.saturating_sub(start.elapsed());
    let (mut report_at, mut reported) = (REPORT_INTERVAL, String::new());
    loop {
        let Some(missing) = first_missing(conditions, left())? else { return Ok(()) };
        let left = left();
        if left.is_zero() {
            return Err(WaitError::TimedOut(conditions.timeout, missing.explain(&conditions.run_dir)));
        }
        if start.elapsed() >= report_at {
            report_at += REPORT_INTERVAL;
            let reason = missing.explain(&conditions.run_dir);
            if reason != reported {
                report(&reason);
                reported = reason;
            }
        }
        let is_eager = matches!(missing, Missing::Ready) && start.elapsed() < EAGER;
        let pause = if is_eager { PAUSE } else { PAUSE_LONG };
        thread::sleep(pause.min(left));
    }
}

/// Caveat of an agent whose programs are attached below the cgroup root.
#[must_use]
pub fn read_limits(run_dir: &Path) -> Option<String> {
    read_line(run_dir, LIMITED)
}

/// Condition that does not hold yet.
enum Missing {
    Ready,
    /// The agent that was ready was killed.
    Agent,
    Response(io::Error),
    /// The Service, and whether the agent serves it.
    Service(ServiceName, bool),
}

/// Action of a frontend with endpoints.
const FORWARD: &str = Action::Forward.as_str();

fn first_missing(conditions: &Conditions, left: Duration) -> Result<Option<Missing>, WaitError> {
    if !is_ready(&conditions.run_dir) {
        let unusable = read_line(&conditions.run_dir, UNUSABLE);
        return unusable.map_or(Ok(Some(Missing::Ready)), |reason| Err(WaitError::Unusable(reason)));
    }
    match life(&conditions.run_dir) {
        Life::Killed => return Ok(Some(Missing::Agent)),
        Life::Unknown if let Some(reason) = obstacle(&conditions.run_dir) => {
            return Ok(Some(Missing::Response(io::Error::other(reason))));
        }
        _ => {}
    }
    if conditions.services.is_empty() {
        return Ok(None);
    }
    let rows = match fetch_services(&conditions.run_dir, left.clamp(LAST_RESPONSE, RESPONSE_TIMEOUT)) {
        Ok(rows) => rows,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return Err(WaitError::NotAllowed(explain_silence(&conditions.run_dir, &error)));
        }
        Err(error) => return Ok(Some(Missing::Response(error))),
    };
    // Without an endpoint: whether there is a frontend.
    let lacking = |service: &ServiceName| {
        let name = service.to_string();
        let mut frontends = rows.iter().filter(|row| row.service.as_ref() == Some(&name)).peekable();
        let is_served = frontends.peek().is_some();
        let has_endpoint = frontends.any(|row| row.action == FORWARD);
        (!has_endpoint).then(|| Missing::Service(service.clone(), is_served))
    };
    Ok(conditions.services.iter().find_map(lacking))
}

impl Missing {
    fn explain(&self, run_dir: &Path) -> String {
        let failure = failure(run_dir);
        match self {
            Self::Agent => format!("{KILLED}: start cproxy run"),
            _ if let Some(reason) = failure => format!("the agent has ended: {reason}"),
            Self::Response(error) => explain_silence(run_dir, error),
            Self::Service(service, is_served) => {
                let what = if *is_served { "has no eligible endpoint" } else { "does not exist, or is not served" };
                format!("Service {service} {what}: `cproxy explain {service}` says why")
            }
            Self::Ready => match (fetch_gauges(run_dir, LAST_RESPONSE), read_line(run_dir, CLOSED)) {
                (Err(error), _) => explain_silence(run_dir, &error),
                (Ok(_), Some(reason)) => format!("the pod's policy is not in force: {reason}"),
                (Ok(gauges), None) if gauges.contains_key("api_server_silent_seconds") => {
                    "the agent has reached its API server but has no complete list of all kinds yet, or has not \
                     compared its table since the VM was restored; see its log"
                        .to_owned()
                }
                (Ok(_), None) => match fetch_source(run_dir) {
                    Ok(SourceReport::ApiServer { failure: Some(failure), .. }) => {
                        format!("the agent has received nothing from its source yet: {failure}")
                    }
                    _ => "the agent has received nothing from its source yet; see its log".to_owned(),
                },
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::run_dir::{
        files::boot_id,
        protocol::{FAILED, READY},
    };

    fn conditions(name: &str) -> Conditions {
        let run_dir = std::env::temp_dir().join(format!("cproxy-wait-{}-{name}", std::process::id()));
        fs::remove_dir_all(&run_dir).ok();
        Conditions { run_dir, timeout: Duration::from_millis(30), services: Vec::new() }
    }

    fn outcome(conditions: &Conditions) -> String {
        wait(conditions, |_| {}).map_or_else(|error| error.to_string(), |()| "ready".to_owned())
    }

    #[test]
    fn the_missing_condition_is_named() {
        let ready = conditions("missing");
        let none = format!("no agent runs with the run directory {}: start ", ready.run_dir.display());
        assert!(outcome(&ready).starts_with(&format!("not ready after 30ms: {none}")), "{}", outcome(&ready));
        let at_once = Conditions { timeout: Duration::ZERO, ..ready.clone() };
        assert!(outcome(&at_once).starts_with(&format!("not ready: {none}")), "{}", outcome(&at_once));
        fs::create_dir(&ready.run_dir).unwrap();
        fs::write(ready.run_dir.join(FAILED), "no route\nat all").unwrap();
        assert_eq!(outcome(&ready), "not ready after 30ms: the agent has ended: no route");
        fs::write(ready.run_dir.join(UNUSABLE), "too old").unwrap();
        assert_eq!(outcome(&Conditions { timeout: Duration::MAX, ..ready.clone() }), "cannot run here: too old");
        fs::write(ready.run_dir.join(READY), "of another boot\n").unwrap();
        assert_eq!(outcome(&ready), "cannot run here: too old");
        fs::write(ready.run_dir.join(READY), boot_id()).unwrap();
        fs::remove_file(ready.run_dir.join(FAILED)).unwrap();
        assert_eq!(outcome(&ready), format!("not ready after 30ms: {KILLED}: start cproxy run"));
        let opened = cproxy_datapath::owned_dir::open(&ready.run_dir).unwrap();
        let _alive = crate::run_dir::life::show(&opened).unwrap();
        fs::write(ready.run_dir.join(FAILED), "no route").unwrap();
        assert_eq!(outcome(&ready), "ready", "an earlier failure does not count");
        let service = Conditions { services: vec![ServiceName::new("default", "web")], ..ready.clone() };
        assert!(outcome(&service).starts_with("not ready after 30ms: "), "{}", outcome(&service));
        fs::remove_dir_all(&ready.run_dir).unwrap();
    }
}
