//! Faults of the agent's source: a real API server that is gone, or that does not accept the agent.

use std::fs;

use cproxy_tests::{
    control_plane::ControlPlane,
    manifest::{self, http_service},
    process::{Agent, cproxy, eventually},
    sandbox::Sandbox,
    world::{SYNC, start_agent},
};
use serde_json::json;

use super::{Answer, first_question::from_outside};

const CALL: &str = "10.96.0.10:80";

/// Waits until a line about the source has this state and all these words.
#[track_caller]
fn expect_source(sandbox: &Sandbox, state: &str, words: &[&str]) -> Answer {
    eventually(SYNC * 4, format_args!("source {state} {words:?}"), || {
        let answer = Answer::to(sandbox, &[CALL]);
        let is_it = |line: &&str| line.starts_with(state) && words.iter().all(|word| line.contains(word));
        if answer.lines("source").iter().any(is_it) { Ok(answer) } else { Err(answer.0.stdout) }
    })
}

#[test]
fn a_manifest_with_a_mistake() {
    let sandbox = Sandbox::for_test();
    let dir = sandbox.manifest_dir();
    manifest::write(&dir, "web.json", [http_service("web", "10.96.0.10", ["10.244.0.1"])].concat());
    let mistake = "kind: Service\nmetadata: {name: x}\n  spec: nonsense\n";
    fs::write(dir.join("bad.yaml"), mistake).unwrap();
    let mut agent = start_agent(&sandbox);
    const WORDS: [&str; 2] = ["bad.yaml", "line 3"];
    for target in ["default/x", "10.96.0.11:80"] {
        let answer = Answer::to(&sandbox, &[target]);
        assert!(WORDS.iter().all(|word| answer.verdict().contains(word)), "{}", answer.verdict());
        drop(answer.has("degraded", "unread", &WORDS));
    }
    let check = cproxy(&sandbox, &["check"]).success().stdout;
    let problems = check.lines().find(|line| line.starts_with("degraded  problems")).unwrap();
    assert!(WORDS.iter().all(|word| problems.contains(word)), "{problems}");
    let rows = || cproxy(&sandbox, &["get", "problems", "-o", "json"]).success().json();
    let found = rows();
    assert_eq!(found.as_array().unwrap().len(), 1, "{found}");
    assert!(found[0]["object"].as_str().unwrap().ends_with("/bad.yaml"), "{found}");
    let table = cproxy(&sandbox, &["get", "problems"]).success().stdout;
    assert!(table.starts_with("OBJECT") && table.lines().count() == 2, "{table}");
    // An object that cannot be served is another.
    let broken = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "broken", "namespace": "default"},
                        "spec": {"clusterIP": "10.96.0.300", "ports": [{"port": 80}]}});
    manifest::write(&dir, "broken.json", [broken]);
    eventually(SYNC, "two problems", || if rows().as_array().unwrap().len() == 2 { Ok(()) } else { Err(rows()) });

    fs::write(dir.join("bad.yaml"), "").unwrap();
    fs::remove_file(dir.join("broken.json")).unwrap();
    agent.wait_log("bad.yaml: can be read again", SYNC);
    eventually(SYNC, "no problem", || if rows() == json!([]) { Ok(()) } else { Err(rows()) });
}

#[test]
fn an_api_server_that_is_gone_or_does_not_accept_the_agent() {
    let sandbox = Sandbox::for_test();
    sandbox.add_addresses(["10.244.0.1"]);
    let mut control_plane = ControlPlane::start(&sandbox);
    control_plane.apply(http_service("web", "10.96.0.10", ["10.244.0.1"]));
    let headless = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "headless", "namespace": "default"},
        "spec": {"clusterIP": "None", "ports": [{"port": 80}]},
    });
    let other = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {
            "name": "other", "namespace": "default", "labels": {"service.kubernetes.io/service-proxy-name": "x"},
        },
        "spec": {"clusterIP": "10.96.0.11", "ports": [{"port": 80}]},
    });
    control_plane.apply([headless, other]);
    let agent = Agent::new(&sandbox).kubeconfig(control_plane.agent_kubeconfig()).start();
    expect_source(&sandbox, "ok", &["follows https://", "1st choice"]).forwarded();
    // The agent asks the API server for those that it does not follow.
    Answer::to(&sandbox, &["default/headless"]).says(0, &["headless (clusterIP None)"]);
    Answer::to(&sandbox, &["default/other"]).fails_because(&["gives it to another proxy"]);
    Answer::to(&sandbox, &["10.96.0.11:80"])
        .fails_because(&["Service default/other is not served", "gives it to another proxy"]);
    Answer::to(&sandbox, &["default/missing"]).fails_because(&["has no Service default/missing"]);

    control_plane.kill_api_server();
    expect_source(&sandbox, "degraded", &["cannot", "refused"]).forwarded();
    drop(from_outside(&sandbox, &["web.default", "80"]).forwarded().has("degraded", "source", &["cannot", "refused"]));
    control_plane.start_api_server();
    expect_source(&sandbox, "ok", &["follows https://"]).forwarded();
    drop(agent);

    // An agent that is refused from the beginning serves the table that it finds.
    let revoked = sandbox.dir().join("revoked.kubeconfig");
    let kubeconfig = fs::read_to_string(control_plane.agent_kubeconfig()).unwrap();
    let token = control_plane.token("cproxy");
    assert!(kubeconfig.contains(&token), "the kubeconfig has the token");
    fs::write(&revoked, kubeconfig.replace(&token, "revoked")).unwrap();
    let agent = Agent::new(&sandbox).kubeconfig(&revoked).spawn();
    let answer = expect_source(&sandbox, "degraded", &["cannot list", "401"]).forwarded();
    answer.has("degraded", "agent", &["no complete list"]);
    for (question, words) in [("default/web", "not found: "), ("10.96.0.99:80", "direct to the address itself: ")] {
        Answer::to(&sandbox, &[question]).says(4, &[words, ", as far as the agent knows: its source is stale"]);
    }
    let waited = cproxy(&sandbox, &["wait", "--timeout", "50ms"]).failure(1);
    assert!(waited.stderr.contains("has received nothing from its source yet: ") && waited.stderr.contains("401"));
    drop(agent);
    let agent = Agent::new(&sandbox).kubeconfig(control_plane.kubeconfig_for("nobody")).spawn();
    expect_source(&sandbox, "degraded", &["not permitted to list services", "grant the verbs list and watch"])
        .forwarded();
    drop(agent);
}
