//! Walk of the canary: in this process, or in a child where the hooks do not run for this process.

use std::{
    fmt::Display,
    fs::File,
    io::{self, Write as _},
    path::Path,
};

use cproxy_core::{Address, Protocol};
use cproxy_datapath::{
    bpf::{PinDir, is_cgroup2},
    canary::{Obstacle, Route, WalkError, walk, walk_denied},
};
use rustix::fs::{Mode, OFlags, openat};
use serde::Serialize;
use serde_json::Value;

use crate::{
    privileges::{Broker, run_child},
    report::{CanaryReport, read_answer},
};

/// Outcome of all routes.
#[derive(Debug, Serialize)]
pub(super) struct Walked {
    pub(super) report: CanaryReport,
    /// Whether ports of the canary are in use.
    pub(super) needs_ports: bool,
}

impl Walked {
    /// No route was walked.
    pub(super) fn not(reason: &dyn Display) -> Self {
        Self { report: CanaryReport::NotWalked(reason.to_string()), needs_ports: false }
    }
}

/// Walks the routes in this process.
pub(super) fn walk_all(routes: &[Route], pins: &PinDir) -> Walked {
    let outcomes: Vec<_> = routes.iter().map(|route| walk(route, pins)).collect();
    let mut obstacle = None;
    let mut symptoms = Vec::new();
    for (route, outcome) in routes.iter().zip(&outcomes) {
        match outcome {
            Ok(()) => {}
            Err(WalkError::Hook { hooks, symptom }) => symptoms.push(format!("{hooks}: {symptom}")),
            Err(WalkError::Obstacle(found)) => obstacle = Some((Address::from(route.frontend.ip()).family(), found)),
        }
    }
    if let Err(WalkError::Hook { hooks, symptom }) = walk_denied(pins) {
        symptoms.push(format!("{hooks}: {symptom}"));
    }
    let is_reached = outcomes.iter().any(Result::is_ok);
    let report = match obstacle {
        _ if !symptoms.is_empty() => CanaryReport::Failed(symptoms.join("; ")),
        Some((family, obstacle)) if is_reached && *obstacle == Obstacle::NoAddress => {
            CanaryReport::Partly { reason: format!("{family}: {obstacle}"), is_absent: true }
        }
        Some((_, obstacle)) => CanaryReport::NotWalked(obstacle.to_string()),
        None => CanaryReport::Reached,
    };
    Walked { report, needs_ports: matches!(obstacle, Some((_, Obstacle::PortInUse))) }
}

/// Walks the routes in a child inside a cgroup. The child opens `cgroup.procs`: the agent's filter forbids it.
pub(super) fn walk_in(cgroup: &Path, pins: &PinDir, routes: &[Route], broker: Option<&Broker>) -> Walked {
    let failed = |error: &dyn Display| {
        Walked::not(&format_args!("the agent is not in {}, and a child cannot enter it: {error}", cgroup.display()))
    };
    let dir = match File::open(cgroup) {
        Ok(dir) => dir,
        Err(error) => return failed(&error),
    };
    let words: Vec<_> = ["canary".into()].into_iter().chain(routes.iter().map(|route| text(route).into())).collect();
    let output = match run_child(broker, pins.directory(), &words, dir.into()) {
        Ok(output) => output,
        Err(error) => return Walked::not(&error),
    };
    let read = |walked: &Value| {
        let report = CanaryReport::read(walked.get("report")?)?;
        Some(Walked { report, needs_ports: walked.get("needs_ports")?.as_bool()? })
    };
    let stderr = String::from_utf8_lossy(&output.stderr);
    read_answer(&output.stdout, read).unwrap_or_else(|_| failed(&stderr.trim().trim_start_matches("cproxy: ")))
}

/// Implementation of `cproxy canary`, the child of the agent, whose stdin is the directory of a cgroup. Returns the
/// outcome as JSON.
///
/// # Errors
/// This process cannot enter the cgroup, or a route is not one.
pub fn walk_canary(pin_dir: &Path, routes: &[String]) -> io::Result<String> {
    let processes = openat(io::stdin(), "cgroup.procs", OFlags::WRONLY | OFlags::NOFOLLOW, Mode::empty())?;
    if !is_cgroup2(&processes)? {
        return Err(io::Error::other("it is not on cgroup2"));
    }
    // "0" is the process that writes.
    File::from(processes).write_all(b"0")?;
    let routes = routes.iter().map(|text| parse(text).ok_or(io::ErrorKind::InvalidInput.into()));
    let walked = walk_all(&routes.collect::<io::Result<Vec<_>>>()?, &PinDir::new(pin_dir));
    Ok(serde_json::to_string(&walked)?)
}

/// A route as an argument.
fn text(route: &Route) -> String {
    format!("{},{},{}", route.protocol, route.frontend, route.backend)
}

fn parse(text: &str) -> Option<Route> {
    let mut parts = text.split(',');
    let protocol = match parts.next()? {
        "TCP" => Protocol::Tcp,
        "UDP" => Protocol::Udp,
        _ => return None,
    };
    Some(Route { protocol, frontend: parts.next()?.parse().ok()?, backend: parts.next()?.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_is_an_argument() {
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            let (frontend, backend) = ("[2001:2::fffe]:7".parse().unwrap(), "[::1]:4000".parse().unwrap());
            let route = Route { protocol, frontend, backend };
            assert_eq!(parse(&text(&route)), Some(route));
        }
        assert_eq!(["", "TCP", "TCP,1.2.3.4:7", "SCTP,1.2.3.4:7,1.2.3.4:7"].map(parse), [None; 4]);
    }
}
