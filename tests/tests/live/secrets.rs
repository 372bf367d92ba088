//! Secrets of the agent that a server or an exec plugin repeats: none reaches what is logged or shown.

#![expect(clippy::unwrap_used, reason = "a failed call is a failed test")]

use std::{fs, os::unix::fs::PermissionsExt, time::Duration};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use cproxy_testing::responses::status;
use cproxy_tests::{
    api::{Api, Reply},
    manifest::write_text,
    process::{Agent, RunningAgent, cproxy, eventually},
    sandbox::Sandbox,
};
use serde_json::json;

const PATIENCE: Duration = Duration::from_secs(30);
const TOKEN: &str = "k8s-aws-v1.aHR0cHM6Ly9zdHMuZXUtd2VzdC0xLmFtYXpvbmF3cy5jb20v";
const PASSWORD: &str = "correct horse battery";
/// End of each message.
const WORDS: &str = ", you see";

/// An API server that refuses every request with this message.
fn refusing(sandbox: &Sandbox, message: &str) -> Api {
    let status = status(403, message);
    Api::serve(sandbox, move |_| Reply::status(403, &status))
}

/// All that the agent logs, shows and collects, after it has logged [`WORDS`].
fn shown(sandbox: &Sandbox, agent: &mut RunningAgent) -> Vec<(&'static str, String)> {
    agent.wait_log(WORDS, PATIENCE);
    let report = sandbox.dir().join("report.tar");
    let output = |arguments: &[&str]| {
        let output = cproxy(sandbox, arguments);
        output.stdout + &output.stderr
    };
    vec![
        ("check", output(&["check"])),
        ("explain", output(&["explain", "10.96.0.10:80"])),
        ("config", output(&["get", "config"])),
        ("bugreport", output(&["bugreport", "--file", report.to_str().unwrap()])),
        ("report", String::from_utf8_lossy(&fs::read(report).unwrap()).into_owned()),
        ("log", agent.log()),
    ]
}

/// Checks that everything was shown, and that the report has the agent's log.
#[track_caller]
fn assert_no_secret(shown: &[(&str, String)], secrets: &[&str]) {
    let report = shown.iter().find(|(what, _)| *what == "report").map(|(_, text)| &**text);
    assert!(report.is_some_and(|report| report.contains(WORDS)), "the report lacks the log: {report:.400?}");
    for (what, text) in shown {
        assert!(!text.is_empty(), "{what} shows nothing");
        for secret in secrets {
            assert!(!text.contains(secret), "{what} shows {secret}:\n{text:.4000}");
        }
    }
}

#[test]
fn a_server_that_repeats_the_token_in_any_encoding_does_not_reach_the_log() {
    let encoded = BASE64_STANDARD.encode(format!("Authorization: Bearer {TOKEN}"));
    let sandbox = Sandbox::for_test();
    let message = format!("not for Bearer {TOKEN}; {encoded}; {}, you see", &TOKEN[..30]);
    let api = refusing(&sandbox, &message);
    let mut agent = Agent::new(&sandbox).kubeconfig(api.kubeconfig_of(&sandbox, json!({"token": TOKEN}))).spawn();
    let shown = shown(&sandbox, &mut agent);
    assert!(agent.log().contains("(removed)"), "{}", agent.tail());
    assert_no_secret(&shown, &[&TOKEN[..30], &TOKEN[30..], &encoded[20..60]]);
}

#[test]
fn a_server_that_repeats_a_password_does_not_reach_the_log() {
    let encoded = BASE64_STANDARD.encode(format!("admin:{PASSWORD}"));
    let sandbox = Sandbox::for_test();
    let api = refusing(&sandbox, &format!("Basic {encoded} is {PASSWORD}, you see"));
    let user = json!({"username": "admin", "password": PASSWORD});
    let mut agent = Agent::new(&sandbox).kubeconfig(api.kubeconfig_of(&sandbox, user)).spawn();
    let shown = shown(&sandbox, &mut agent);
    assert_no_secret(&shown, &[PASSWORD, &encoded]);
}

#[test]
fn an_exec_plugin_that_prints_what_it_was_given_does_not_reach_the_log() {
    let sandbox = Sandbox::for_test();
    let api = refusing(&sandbox, "no");
    let printed = json!({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",
                         "status": {"token": TOKEN}});
    let script = format!("#!/bin/sh\necho '{printed}'\necho \"with $SECRET and {TOKEN}, you see\" >&2\nexit 3\n");
    let plugin = write_text(sandbox.dir(), "login", &script);
    fs::set_permissions(&plugin, fs::Permissions::from_mode(0o755)).unwrap();
    let exec = json!({"apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never", "command": plugin,
                      "env": [{"name": "SECRET", "value": PASSWORD}]});
    let mut agent = Agent::new(&sandbox).kubeconfig(api.kubeconfig_of(&sandbox, json!({"exec": exec}))).spawn();
    let shown = shown(&sandbox, &mut agent);
    eventually(PATIENCE, "the plugin is named", || {
        let log = agent.log();
        if log.contains("exec plugin") && log.contains("(removed)") { Ok(()) } else { Err(log) }
    });
    assert_no_secret(&shown, &[PASSWORD, TOKEN]);
}
