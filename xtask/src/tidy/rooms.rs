//! Rooms of crates: no module imports one above it, and no files import each other in a circle.

use std::path::Path;

use anyhow::{Context as _, Result};

use super::{circles, imports::Imports};

/// Sources of the crates whose files import each other in no circle, with their rooms.
const CRATES: [(&str, &[Room]); 12] = [
    ("cproxy/src", &AGENT),
    ("cproxy-relay/src", &[]),
    ("crates/core/src", &[]),
    ("crates/daemon/src", &[]),
    ("crates/datapath/src", &[("bpf", &["sockets"])]),
    ("crates/network/src", &[]),
    ("crates/policy/src", &[]),
    ("crates/protobuf/src", &[]),
    ("crates/relay/src", &[]),
    ("crates/relay-auth/src", &[]),
    ("crates/transcode/src", &[]),
    ("crates/wire/src", &WIRE),
];

/// Module with those above it, which it may not import.
type Room = (&'static str, &'static [&'static str]);

/// Rooms of the agent that are above its plain modules.
const ALL_ROOMS: [&str; 8] = ["agent", "cli", "diagnose", "mailbox", "report", "run_dir", "state", "status_http"];

/// Rooms of the agent.
const AGENT: [Room; 15] = [
    ("config", &["agent", "cli", "diagnose", "status_http", "mailbox", "report", "run_dir", "state"]),
    ("state", &["agent", "cli", "diagnose", "status_http", "mailbox", "report", "run_dir"]),
    ("report", &["agent", "cli", "diagnose", "status_http", "mailbox", "run_dir"]),
    ("mailbox", &["agent", "cli", "diagnose", "status_http", "run_dir"]),
    ("run_dir", &["agent", "cli", "diagnose", "status_http"]),
    ("status_http", &["agent", "cli", "diagnose"]),
    ("diagnose", &["cli"]),
    ("agent", &["cli", "diagnose"]),
    ("canary", &ALL_ROOMS),
    ("controls", &ALL_ROOMS),
    ("manifests", &ALL_ROOMS),
    ("privileges", &ALL_ROOMS),
    ("problem_log", &ALL_ROOMS),
    ("target", &ALL_ROOMS),
    ("agent/tasks", &["agent/queries", "agent/reconciler", "agent/start"]),
];

/// Rooms of the client of the Kubernetes API.
const WIRE: [Room; 5] = [
    ("transport", &["credentials", "client", "codec", "watch", "diagnosis"]),
    ("credentials", &["client", "codec", "watch", "diagnosis"]),
    ("client", &["codec", "watch", "diagnosis"]),
    ("codec", &["transport", "credentials", "client", "watch", "diagnosis"]),
    ("watch", &["credentials", "diagnosis"]),
];

/// Breaches of all crates below `root`.
pub(super) fn breaches(root: &Path) -> Result<Vec<String>> {
    let mut breaches = Vec::new();
    for (directory, rooms) in CRATES {
        let imports = Imports::read(&root.join(directory)).with_context(|| format!("reading {directory}"))?;
        let found = circles::breaches(&imports.graph()).into_iter().chain(of_rooms(&imports, rooms));
        breaches.extend(found.map(|breach| format!("{directory}/{breach}")));
    }
    Ok(breaches)
}

/// Imports of modules above the own one.
fn of_rooms(imports: &Imports, rooms: &[Room]) -> Vec<String> {
    let is_in = |path: &[String], room: &str| room.split('/').eq(path.iter().take(room.split('/').count()));
    let mut breaches = Vec::new();
    for (file, module, imported) in imports.files() {
        let above = rooms.iter().filter(|(room, _)| is_in(module, room)).flat_map(|(_, above)| above.iter());
        let found = above.filter(|room| imported.iter().any(|import| is_in(&import.path, room)));
        let breach = |room| format!("{}: imports `{room}`, which is above it (ARCHITECTURE.md)", file.display());
        breaches.extend(found.map(breach));
    }
    breaches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_import_none_above_them() {
        let breaches = |name: &str, text: &str| {
            let imports = Imports::of([(name.into(), text.to_owned())]).unwrap();
            of_rooms(&imports, &AGENT).len()
        };
        for text in
            ["use crate::agent::Status;", "use crate::{\n    agent::Status,\n};", "fn f() { crate::agent::f() }"]
        {
            for (name, expected) in
                [("run_dir.rs", 1), ("run_dir/server.rs", 1), ("state/status.rs", 1), ("cli/run.rs", 0)]
            {
                assert_eq!(breaches(name, text), expected, "{name}: {text}");
            }
        }
        assert_eq!(breaches("run_dir/server.rs", "use crate::mailbox::Mailbox;"), 0);
        assert_eq!(breaches("agent/tasks/health.rs", "use super::super::queries::Query;"), 1);
    }
}
