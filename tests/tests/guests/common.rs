//! What the tests here have in common.

use std::{fs, time::Duration};

/// What begins the names of the sandboxes here.
pub(crate) const PREFIX: &str = "cproxy-test";

/// Long enough for a guest that emulates its processor on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(180);

/// Says what was found out, for whoever asked for it: `cargo xtask vm test` makes a table of it.
pub(crate) fn report(what: &str, is: &str) {
    println!("{what}: {is}");
    let Some(path) = std::env::var_os("CPROXY_GUEST_REPORT") else { return };
    let mut text = fs::read_to_string(&path).unwrap_or_default();
    text += &format!("{}\n", serde_json::json!({"what": what, "is": is}));
    fs::write(&path, text).expect("cannot write the report");
}

/// What follows `label` on a line of a console.
pub(crate) fn said<'t>(console: &'t str, label: &str) -> Vec<&'t str> {
    console.lines().filter_map(|line| line.strip_prefix(label)).map(str::trim).collect()
}
