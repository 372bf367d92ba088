//! API servers that have lost their objects, or cannot read them: the table stays until a second list agrees.

use std::{
    iter,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use cproxy_testing::responses::list;
use cproxy_tests::{
    api::{Api, Reply, is_watch, stored},
    manifest::http_service,
    process::{Agent, cproxy, eventually},
    sandbox::Sandbox,
};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(60);

/// Time for a decision that waits for nothing.
const AT_ONCE: Duration = Duration::from_secs(9);

const SERVICES: usize = 3;

/// Versions of the lists with objects and without.
const WHOLE: &str = "7";
const EMPTY: &str = "9";

/// Server with some Services as long as it does not forget them.
fn serve(sandbox: &Sandbox, forgets: &Arc<AtomicBool>) -> Api {
    let forgets = forgets.clone();
    Api::serve(sandbox, move |target| {
        let (is_empty, is_watch) = (forgets.load(Ordering::Relaxed), is_watch(target));
        match (is_watch, is_empty) {
            (true, true) if target.contains(&format!("resourceVersion={WHOLE}")) => Reply::error(410),
            (true, true) => Reply::chunks([]).open(),
            // It ends soon, so that the next one shows what has happened.
            (true, false) => Reply::chunks(iter::from_fn(|| {
                thread::sleep(Duration::from_millis(200));
                None
            })),
            (false, true) => Reply::text(list(EMPTY, &[])),
            (false, false) => Reply::text(list(WHOLE, &objects(target))),
        }
    })
}

/// Objects of the requested kind.
fn objects(target: &str) -> Vec<Value> {
    let object = |number| {
        let (name, vip) = (format!("web-{number}"), format!("10.96.0.{number}"));
        let [service, slice] = stored(http_service(&name, vip, [format!("10.244.0.{number}")]));
        if target.contains("/services?") { service } else { slice }
    };
    (1..=SERVICES).map(object).collect()
}

fn agent_of<'s>(sandbox: &'s Sandbox, servers: &[&Api]) -> Agent<'s> {
    let urls = servers.iter().map(|server| server.url()).collect::<Vec<_>>().join(",");
    let kubeconfig = servers.first().map(|server| server.kubeconfig(sandbox));
    let agent = Agent::new(sandbox).kubeconfig(kubeconfig.unwrap_or_default());
    agent.args(["--apiserver", &urls, "--pod-ip", "10.244.0.99"])
}

/// Number of frontends that lead to a backend, without an agent too.
fn serving(sandbox: &Sandbox) -> usize {
    let rows = cproxy(sandbox, &["get", "services", "-o", "json"]).json();
    let rows = rows.as_array().into_iter().flatten();
    rows.filter(|row| row["backends"].as_array().is_some_and(|backends| !backends.is_empty())).count()
}

fn doubts(sandbox: &Sandbox) -> u64 {
    let counters = cproxy(sandbox, &["get", "counters", "-o", "json"]).json();
    counters.get("lists_doubted").and_then(Value::as_u64).unwrap_or_default()
}

#[test]
fn an_empty_list_is_written_once_the_server_says_so_again_after_ten_seconds() {
    let sandbox = Sandbox::for_test();
    let forgets = Arc::default();
    let server = serve(&sandbox, &forgets);
    let mut agent = agent_of(&sandbox, &[&server]).start();
    assert_eq!(serving(&sandbox), SERVICES);
    forgets.store(true, Ordering::Relaxed);
    let line = agent.wait_log("lacks 3 of 3 Services: they stay", PATIENCE);
    let doubted = Instant::now();
    assert!(line.contains(&server.url()) && line.contains("WARN"), "{line}");
    assert_eq!(serving(&sandbox), SERVICES);
    assert!(agent.is_ready() && doubts(&sandbox) >= 1);
    agent.wait_log("agrees: 3 of 3 Services are gone", PATIENCE);
    assert!(doubted.elapsed() > Duration::from_secs(8), "{:?}", doubted.elapsed());
    eventually(PATIENCE, "the table is empty", || match serving(&sandbox) {
        0 => Ok(()),
        left => Err(left),
    });
}

#[test]
fn a_server_that_has_its_objects_again_takes_nothing_away() {
    let sandbox = Sandbox::for_test();
    let forgets = Arc::default();
    let server = serve(&sandbox, &forgets);
    let mut agent = agent_of(&sandbox, &[&server]).start();
    forgets.store(true, Ordering::Relaxed);
    agent.wait_log("lacks 3 of 3 Services: they stay", PATIENCE);
    forgets.store(false, Ordering::Relaxed);
    agent.wait_log("has most Services again", PATIENCE);
    assert_eq!(serving(&sandbox), SERVICES);
    assert!(!agent.log().contains("are gone"), "{}", agent.log());
}

/// An agent that starts compares with the table that the last one has left.
#[test]
fn another_server_is_asked_at_once() {
    let sandbox = Sandbox::for_test();
    let forgets = Arc::default();
    let server = serve(&sandbox, &forgets);
    agent_of(&sandbox, &[&server]).start().stop();
    let empty = serve(&sandbox, &Arc::new(AtomicBool::new(true)));
    let mut agent = agent_of(&sandbox, &[&empty, &server]).spawn();
    agent.wait_log("would leave 3 of 3 addresses", PATIENCE);
    agent.wait_ready(AT_ONCE);
    assert_eq!((serving(&sandbox), doubts(&sandbox)), (SERVICES, 1));
    let line = agent.wait_log("have most addresses again", PATIENCE);
    assert!(line.contains(&server.url()), "{line}");
    assert!(!agent.log().contains("lose their backends"), "{}", agent.log());
}
