//! A log that nobody reads: the agent goes on, tells how many lines were left out, and ends when it is told to.

use std::time::Duration;

use cproxy_tests::{
    manifest::{self, Service, http_service},
    process::{Agent, FullPipe, Signal, cproxy, eventually},
    sandbox::Sandbox,
};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(60);

/// Addresses of the backends.
fn backends(sandbox: &Sandbox) -> Vec<String> {
    let rows = cproxy(sandbox, &["get", "services", "-o", "json"]).json();
    let backends = rows.pointer("/0/backends").and_then(Value::as_array).into_iter().flatten();
    backends.map(|backend| backend["address"].as_str().unwrap_or_default().to_owned()).collect()
}

#[test]
fn a_pipe_that_nobody_reads_stops_neither_the_table_nor_the_end() {
    let sandbox = Sandbox::for_test();
    let files = sandbox.dir().join("m");
    std::fs::create_dir(&files).expect("a directory");
    let write = |pod: &str| manifest::write(&files, "web.json", http_service("web", "10.96.0.10", [pod]));
    write("10.244.0.1");
    let pipe = FullPipe::new();
    let mut agent = Agent::new(&sandbox).manifests(&files).stderr(pipe.writer()).start();
    let odd = |name: &str| {
        let odd = Service::new(name).cluster_ips(["127.0.0.9"]).tcp("http", 80, 80);
        manifest::write(&files, "odd.json", [odd.into()]);
    };
    odd("odd");
    write("10.244.0.2");
    eventually(PATIENCE, "the table follows", || match backends(&sandbox) {
        backends if backends == ["10.244.0.2"] => Ok(()),
        backends => Err(format!("{backends:?}")),
    });
    let counters = cproxy(&sandbox, &["get", "counters", "-o", "json"]).json();
    assert!(counters["log_lines_left_out"].as_u64() > Some(1), "{counters}");
    // Somebody reads, and has the next lines.
    let mut log = pipe.read();
    odd("odder");
    while !log.contains("lines were left out") || !log.contains("odder") {
        log = log.trim_start_matches('\n').to_owned() + &pipe.read();
    }
    // Full again, so that its last line has no place.
    pipe.fill();
    agent.signal(Signal::TERM);
    assert!(agent.wait(Duration::from_secs(10)).is_some_and(|status| status.success()));
}
