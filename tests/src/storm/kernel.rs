//! The kernel's table, as `cproxy get` shows it.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use serde_json::Value;

use super::addresses::{Set, TCP_PORTS, UDP_PORTS, backend, cluster_ip};
use crate::{
    process::{cproxy, eventually},
    sandbox::Sandbox,
    world::PORT,
};

/// Limit on the time until the table follows, on the slowest machines.
const PATIENCE: Duration = Duration::from_secs(120);

/// Waits until the kernel has these sets and this many frontends in all, and the agent has nothing more to write.
///
/// # Panics
/// When that takes minutes.
pub fn wait(sandbox: &Sandbox, wanted: &[(usize, Option<Set>)], frontends: usize) {
    eventually(PATIENCE, "the table follows", || {
        let rows = cproxy(sandbox, &["get", "services", "-o", "json"]).success().json();
        let rows = rows.as_array().map_or(&[][..], Vec::as_slice);
        let count = rows.len();
        let table: HashMap<_, _> = rows.iter().map(|row| ((row["protocol"] == "TCP", address(row)), row)).collect();
        for (service, set) in wanted {
            for (family, is_tcp) in [(0, true), (0, false), (1, true), (1, false)] {
                let row = table.get(&(is_tcp, SocketAddr::new(cluster_ip(*service).addresses()[family], PORT)));
                check(row.copied(), *set, family, is_tcp).map_err(|reason| format!("Service {service}: {reason}"))?;
            }
        }
        if count == frontends { Ok(()) } else { Err(format!("{count} frontends instead of {frontends}")) }
    });
    // A set is in force before sockets with its predecessor are updated. The agent's loop answers after both.
    eventually(PATIENCE, "the agent has written everything", || match problems(sandbox)? {
        0 => Ok(()),
        problems => Err(format!("{problems} problems")),
    });
}

/// Waits until the agent knows that two Services claim one frontend.
///
/// # Panics
/// When that takes minutes.
pub fn wait_until_contested(sandbox: &Sandbox) {
    eventually(PATIENCE, "two Services claim a frontend", || match problems(sandbox)? {
        0 => Err("no problems".to_owned()),
        _ => Ok(()),
    });
}

/// The number of the agent's problems with objects.
fn problems(sandbox: &Sandbox) -> Result<u64, String> {
    let counters = cproxy(sandbox, &["get", "counters", "-o", "json"]).json();
    counters["object_problems"].as_u64().ok_or("the agent does not answer".to_owned())
}

/// Address and port of a frontend or a backend.
fn address(row: &Value) -> SocketAddr {
    let address = row["address"].as_str().and_then(|text| text.parse::<IpAddr>().ok()).unwrap();
    SocketAddr::new(address, row["port"].as_u64().unwrap().try_into().unwrap())
}

fn check(row: Option<&Value>, set: Option<Set>, family: usize, is_tcp: bool) -> Result<(), String> {
    let (row, set) = match (row, set) {
        (Some(row), Some(set)) => (row, set),
        (None, None) => return Ok(()),
        (row, set) => return Err(format!("{row:?} instead of {set:?}")),
    };
    let port = if is_tcp { TCP_PORTS } else { UDP_PORTS }[set.port];
    let wanted = set.ready().map(|number| SocketAddr::new(backend(number).addresses()[family], port));
    let backends: Vec<_> = row["backends"].as_array().unwrap().iter().map(address).collect();
    if wanted.eq(backends.iter().copied()) {
        return Ok(());
    }
    Err(format!("{} backends from {:?} on instead of {set:?}", backends.len(), backends.first()))
}
