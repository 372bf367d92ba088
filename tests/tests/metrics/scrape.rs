//! The metrics as scrapers read them.

use std::{collections::BTreeSet, env, fs, net::UdpSocket, path::Path, process::Command, time::Duration};

use cproxy_tests::{
    echo,
    process::{Output, cproxy, eventually, run},
    sandbox::{Placement, Sandbox},
    world::{Form, World, counter, web_with},
};

use crate::client::{FLAGS, METRICS, PATIENCE, get, get_as, value, world};

/// Header of Prometheus.
const OPEN_METRICS: &str = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5";

/// Runs the promtool in the directory that this variable names, or else the one that is installed.
const PROMTOOL: &str = "CPROXY_PROMTOOL";

/// Runs promtool.
pub(crate) fn promtool(sandbox: &Sandbox, arguments: &[&str], input: &str) -> Output {
    let built = env::var_os(PROMTOOL).map(|directory| Path::new(&directory).join("promtool"));
    let mut command = Command::new(built.unwrap_or_else(|| "promtool".into()));
    command.args(arguments);
    run(sandbox, Placement::Unhooked, command, input, Duration::from_secs(60))
}

/// Names of the metrics in a text, by their heads.
fn names(text: &str) -> BTreeSet<&str> {
    text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect()
}

#[test]
fn promtool_accepts_both_formats() {
    let world = world();
    let text = get(METRICS, "/metrics");
    assert!(text.head.contains("text/plain; version=0.0.4"), "{}", text.head);
    let checked = promtool(&world.sandbox, &["check", "metrics"], &text.body);
    assert_eq!((checked.code, &*checked.stderr), (0, ""), "{}", text.body);

    let open = get_as(METRICS, "/metrics", OPEN_METRICS);
    assert!(open.head.contains("application/openmetrics-text; version=1.0.0"), "{}", open.head);
    assert!(open.body.ends_with("# EOF\n"));
    // promtool reads OpenMetrics strictly where it makes a database of them, which takes times.
    let timed = |line: &str| if line.starts_with('#') { format!("{line}\n") } else { format!("{line} 1700000000\n") };
    let file = world.sandbox.dir().join("metrics.txt");
    fs::write(&file, open.body.lines().map(timed).collect::<String>()).unwrap();
    let database = world.sandbox.dir().join("database");
    let paths = [&file, &database].map(|path: &std::path::PathBuf| path.display().to_string());
    let made = promtool(&world.sandbox, &["tsdb", "create-blocks-from", "openmetrics", &paths[0], &paths[1]], "");
    assert_eq!(made.code, 0, "{made:?}");
}

#[test]
fn metrics_and_documents_have_the_same_names() {
    let _world = world();
    let text = get(METRICS, "/metrics").body;
    let shown = names(&text);
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("docs/reference.md");
    let page = fs::read_to_string(page).unwrap();
    let section = page.split("\n### Metrics\n").nth(1).and_then(|rest| rest.split("\n## ").next()).unwrap();
    let documented: BTreeSet<_> = section
        .split('`')
        .filter(|text| ["cproxy_", "kubeproxy_", "process_"].iter().any(|start| text.starts_with(start)))
        .map(|text| text.split('{').next().unwrap())
        .collect();
    // The kernel of this machine may not count the time of programs, manifests have no API server, the programs may not
    // count by Service, and the agent neither enforces a network policy nor receives for load balancers.
    let is_optional = |name: &&str| {
        name.starts_with("cproxy_hook_") && *name != "cproxy_hook_checks_total"
            || name.starts_with("cproxy_service_")
            || name.starts_with("cproxy_policy_")
            || name.starts_with("cproxy_received_")
            || *name == "cproxy_api_server_silent_seconds"
    };
    assert_eq!(shown.difference(&documented).collect::<Vec<_>>(), [&""; 0], "not documented");
    let missing: Vec<_> = documented.difference(&shown).copied().filter(|name| !is_optional(name)).collect();
    assert_eq!(missing, [""; 0], "not shown");
}

#[test]
fn metrics_are_the_counters_of_the_command_line() {
    let world = world();
    for _ in 0..5 {
        echo::ask_name(Form::V4.web()).unwrap();
    }
    for (series, name) in [
        ("cproxy_connections_total", "forwarded"),
        ("cproxy_entries{resource=\"frontends\"}", "frontends"),
        ("cproxy_entries{resource=\"backends\"}", "backends"),
        ("cproxy_entries_max{resource=\"frontends\"}", "frontends_max"),
        ("cproxy_entries_max{resource=\"backends\"}", "backends_max"),
        ("cproxy_object_problems", "object_problems"),
        ("cproxy_reattachments_total", "hook_repairs"),
    ] {
        // A look at the programs, or a write, may come in between.
        eventually(PATIENCE, "they are the same", || match (value(series), counter(&world.sandbox, name) as f64) {
            (metric, counter) if metric == counter => Ok(()),
            different => Err(format!("{series}: {different:?}")),
        });
    }
    assert_eq!(value("cproxy_connections_total"), 5.0);
    let wide = cproxy(&world.sandbox, &["get", "counters", "-o", "wide"]).success().stdout;
    assert!(wide.lines().all(|line| line.split_whitespace().count() > 2), "each has a meaning: {wide}");
    assert_eq!(value("cproxy_services"), 1.0);
    assert_eq!(value("cproxy_entries_max{resource=\"frontends\"}"), 262_144.0);
    // A write is counted once the table has it.
    let (syncs, changes) =
        ("kubeproxy_sync_proxy_rules_duration_seconds_count", "kubeproxy_sync_proxy_rules_service_changes_total");
    let before = (value(syncs), value(changes));
    world.set_pods([]);
    eventually(PATIENCE, "the write is counted", || match (value(syncs), value(changes)) {
        now if now.0 > before.0 => Ok(()),
        now => Err(format!("{now:?}")),
    });
    assert_eq!(value("kubeproxy_sync_full_proxy_rules_duration_seconds_count"), 1.0);
    assert_eq!(value("kubeproxy_sync_proxy_rules_endpoint_changes_pending"), 0.0);
    assert!(value("kubeproxy_sync_proxy_rules_last_timestamp_seconds") > 1.7e9);
}

#[test]
fn calls_are_shown_by_service_if_the_agent_counts_them() {
    let args = FLAGS.into_iter().chain(["--service-counters"]);
    let world = World::builder().pods([1]).objects(web_with([1])).args(args).start();
    let of_web = |kind: &str| value(&format!("cproxy_service_{kind}_total{{namespace=\"default\",service=\"web\"}}"));
    let call = || UdpSocket::bind("0.0.0.0:0").unwrap().connect(Form::V4.web());
    call().unwrap();
    call().unwrap();
    assert_eq!((of_web("connections"), of_web("refusals"), of_web("drops")), (2.0, 0.0, 0.0));
    world.set_pods([]);
    call().unwrap_err();
    assert_eq!((of_web("connections"), of_web("refusals"), of_web("drops")), (2.0, 1.0, 0.0));
    let checked = promtool(&world.sandbox, &["check", "metrics"], &get(METRICS, "/metrics").body);
    assert_eq!((checked.code, &*checked.stderr), (0, ""));
}

#[test]
fn the_time_of_the_programs_is_shown_if_the_kernel_counts_it() {
    const ENABLED: &str = "/proc/sys/kernel/bpf_stats_enabled";
    struct Reset(String);
    impl Drop for Reset {
        fn drop(&mut self) {
            fs::write(ENABLED, &self.0).ok();
        }
    }
    let _world = world();
    let reset = Reset(fs::read_to_string(ENABLED).unwrap());
    fs::write(ENABLED, "0").unwrap();
    assert!(!get(METRICS, "/metrics").body.contains("cproxy_hook_seconds_total"));
    fs::write(ENABLED, "1").unwrap();
    let before = value("cproxy_hook_runs_total{hook=\"connect4\"}");
    echo::ask_name(Form::V4.web()).unwrap();
    let now = value("cproxy_hook_runs_total{hook=\"connect4\"}");
    drop(reset);
    assert!(now > before, "{before} {now}");
}
