//! Older programs, built from the commits of their time: the last agent of the table layout before the present one, and
//! agent and relay of the last release.

use std::{env, path::PathBuf};

/// Variable with the directory of the programs: `layout-6/cproxy`, `0.2.0/cproxy` and `0.2.0/cproxy-relay`.
const VARIABLE: &str = "CPROXY_OLDER_PROGRAMS";

/// An older agent.
#[derive(Clone, Debug)]
pub struct OlderAgent {
    /// Its version, in words.
    pub name: &'static str,
    /// Version of its table layout.
    pub layout: u32,
    /// The program.
    pub binary: PathBuf,
}

/// All of them, the oldest first.
///
/// # Panics
/// When the variable is missing.
pub fn older_agents() -> [OlderAgent; 2] {
    [OlderAgent { name: "layout 6", layout: 6, binary: program("layout-6/cproxy") }, released_agent()]
}

/// The agent of the last release.
///
/// # Panics
/// As [`older_agents`].
pub fn released_agent() -> OlderAgent {
    OlderAgent { name: "release 0.2.0", layout: 7, binary: program("0.2.0/cproxy") }
}

/// The relay of the last release.
///
/// # Panics
/// As [`older_agents`].
pub fn released_relay() -> PathBuf {
    program("0.2.0/cproxy-relay")
}

fn program(path: &str) -> PathBuf {
    let directory = env::var_os(VARIABLE).unwrap_or_else(|| panic!("{VARIABLE} is not set: use `cargo xtask test`"));
    PathBuf::from(directory).join(path)
}
