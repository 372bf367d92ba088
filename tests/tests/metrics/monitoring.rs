//! Dashboard and alert rules, with a real Prometheus that scrapes a real agent.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use cproxy_tests::{
    control_plane::ControlPlane,
    echo,
    manifest::http_service,
    process::{Agent, Daemon, cproxy, eventually},
    sandbox::{Placement, Sandbox},
    world::{Form, serve_pods},
};
use serde_json::{Value, json};

use crate::{
    client::{FLAGS, HEALTHZ, METRICS, PATIENCE, get, try_get},
    scrape::promtool,
};

const PROMETHEUS: &str = "127.0.0.1:9090";

fn monitoring() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("images/monitoring")
}

/// A Prometheus that scrapes the agent each second, with the rules.
fn prometheus(sandbox: &Sandbox) -> Daemon {
    let rules = monitoring().join("rules.yaml");
    let configuration = json!({
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [rules],
        "scrape_configs": [{"job_name": "cproxy", "static_configs": [{"targets": [METRICS]}]}],
    });
    let file = sandbox.dir().join("prometheus.json");
    fs::write(&file, configuration.to_string()).unwrap();
    let mut command = Command::new("prometheus");
    command.arg(format!("--config.file={}", file.display()));
    command.arg(format!("--storage.tsdb.path={}", sandbox.dir().join("tsdb").display()));
    command.arg(format!("--web.listen-address={PROMETHEUS}"));
    Daemon::spawn(sandbox, "prometheus", Placement::Unhooked, command)
}

/// Result of a query of Prometheus.
fn query(expression: &str) -> Result<Vec<Value>, String> {
    let escaped: String = expression.bytes().map(|byte| format!("%{byte:02X}")).collect();
    let response = try_get(PROMETHEUS, &format!("/api/v1/query?query={escaped}")).map_err(|error| error.to_string())?;
    if response.code != 200 {
        return Err(format!("{expression}: {response:?}"));
    }
    let body = response.body;
    // The body may come in chunks.
    let json = body.get(body.find('{').unwrap_or_default()..=body.rfind('}').unwrap_or_default()).unwrap_or_default();
    let json: Value = serde_json::from_str(json).map_err(|error| format!("{error}: {body}"))?;
    json.pointer("/data/result").and_then(Value::as_array).cloned().ok_or_else(|| format!("{expression}: {body}"))
}

/// Title and query of each target of the dashboard.
fn panels() -> Vec<(String, String)> {
    let text = fs::read_to_string(monitoring().join("dashboard.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let panels = dashboard.get("panels").and_then(Value::as_array).unwrap().iter();
    let targets = panels.flat_map(|panel| {
        let title = panel["title"].as_str().unwrap();
        let targets = panel["targets"].as_array().unwrap().iter();
        targets.map(move |target| (title.to_owned(), target["expr"].as_str().unwrap().to_owned()))
    });
    // As Grafana replaces them.
    targets.map(|(title, query)| (title, query.replace("$job", ".+").replace("$__rate_interval", "30s"))).collect()
}

#[test]
fn the_rules_pass_their_own_tests() {
    let sandbox = Sandbox::for_test();
    for (command, file) in [("check", "rules.yaml"), ("test", "rules-test.yaml")] {
        let file = monitoring().join(file).display().to_string();
        let output = promtool(&sandbox, &[command, "rules", &file], "");
        assert_eq!(output.code, 0, "{output:?}");
    }
    let text = fs::read_to_string(monitoring().join("rules.yaml")).unwrap();
    let tests = fs::read_to_string(monitoring().join("rules-test.yaml")).unwrap();
    let alerts: Vec<_> = text.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(alerts.len() > 5);
    for alert in alerts {
        assert!(tests.contains(&format!("alertname=\"{alert}\"")), "{alert} has no test");
    }
}

#[test]
fn each_panel_shows_data_of_a_real_run_the_control_plane_is_real() {
    const ENABLED: &str = "/proc/sys/kernel/bpf_stats_enabled";
    let sandbox = Sandbox::for_test();
    let _servers = serve_pods(&sandbox, [1]);
    let control_plane = ControlPlane::shared(&sandbox);
    control_plane.apply(http_service("web", "10.96.0.10", ["10.244.0.1"]));
    let _agent = Agent::new(&sandbox).kubeconfig(control_plane.agent_kubeconfig()).args(FLAGS).start();
    let before = fs::read_to_string(ENABLED).unwrap();
    fs::write(ENABLED, "1").unwrap();
    let _prometheus = prometheus(&sandbox);
    let mut rounds = 0;
    let mut pending = panels();
    assert!(pending.len() > 20, "{pending:?}");
    eventually(PATIENCE * 2, "each panel has data", || {
        rounds += 1;
        echo::ask_name(Form::V4.web()).ok();
        get(HEALTHZ, "/healthz");
        if rounds == 5 {
            cproxy(&sandbox, &["reseed"]).success();
        }
        pending.retain(|(_, expression)| !query(expression).is_ok_and(|result| !result.is_empty()));
        let first = pending.first().map(|(title, expression)| format!("{title}: {:?}", query(expression)));
        if pending.is_empty() { Ok(()) } else { Err(format!("{} panels have none: {first:?}", pending.len())) }
    });
    fs::write(ENABLED, before).unwrap();
    // OpenMetrics is scraped without a complaint.
    assert_eq!(query("up{job=\"cproxy\"} == 1").unwrap().len(), 1);
    assert_eq!(query("count(ALERTS{alertstate=\"firing\"})").unwrap(), Vec::<Value>::new());
}
