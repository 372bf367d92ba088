//! Agents of older table layouts, built from the commits of their time.

use std::{env, path::PathBuf};

/// Variable with the agents: `LAYOUT=PATH`, separated by commas.
const VARIABLE: &str = "CPROXY_OLDER_AGENTS";

/// Agent of an older layout.
#[derive(Clone, Debug)]
pub struct OlderAgent {
    /// Version of its layout.
    pub layout: u32,
    /// The program.
    pub binary: PathBuf,
}

/// All of them.
///
/// # Panics
/// When the variable is missing or wrong.
pub fn older_agents() -> Vec<OlderAgent> {
    let value = env::var(VARIABLE).unwrap_or_else(|_| panic!("{VARIABLE} is not set: use `cargo xtask test`"));
    let read = |entry: &str| {
        let (layout, binary) = entry.split_once('=')?;
        Some(OlderAgent { layout: layout.parse().ok()?, binary: binary.into() })
    };
    value.split(',').map(|entry| read(entry).unwrap_or_else(|| panic!("{entry} in {VARIABLE}"))).collect()
}
