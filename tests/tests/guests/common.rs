//! Common parts of these tests.

use std::{fs, time::Duration};

/// Limit on every wait, long enough for a guest with an emulated processor on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(180);

/// Prints a finding for `cargo xtask vm test`, which makes a table of them.
pub(crate) fn report(what: &str, is: &str) {
    println!("{what}: {is}");
    let Some(path) = std::env::var_os("CPROXY_GUEST_REPORT") else { return };
    let mut text = fs::read_to_string(&path).unwrap_or_default();
    text += &format!("{}\n", serde_json::json!({"what": what, "is": is}));
    fs::write(&path, text).expect("cannot write the report");
}

/// Texts after `label` on the console's lines.
pub(crate) fn values_of<'t>(console: &'t str, label: &str) -> Vec<&'t str> {
    console.lines().filter_map(|line| line.strip_prefix(label)).map(str::trim).collect()
}
