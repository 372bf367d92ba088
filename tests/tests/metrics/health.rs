//! Health checks in each state of the agent.

use std::{thread, time::Duration};

use cproxy_tests::{
    control_plane::{ControlPlane, NODE},
    manifest::http_service,
    process::{Agent, cproxy, eventually},
    sandbox::Sandbox,
};
use nix::{
    sys::{
        ptrace::{self, Options},
        wait::waitpid,
    },
    unistd::Pid,
};
use serde_json::json;

use crate::client::{FLAGS, HEALTHZ, PATIENCE, get, try_get, value, world};

/// Waits until a check has this status code. Returns the body.
fn expect(path: &str, code: u16) -> String {
    eventually(PATIENCE, format_args!("{path} answers {code}"), || match try_get(HEALTHZ, path) {
        Ok(response) if response.code == code => Ok(response.body),
        other => Err(format!("{other:?}")),
    })
}

#[test]
fn an_agent_that_is_ready_is_healthy_live_and_ready() {
    let _world = world();
    let health = get(HEALTHZ, "/healthz");
    assert_eq!(health.code, 200, "{health:?}");
    let json = health.json();
    assert_eq!((&json["healthy"], json.get("nodeEligible")), (&json!(true), None));
    assert_eq!(json["status"]["IPv4"], json["status"]["IPv6"]);
    assert_eq!(json["lastUpdated"], json["currentTime"]);
    assert!(health.head.to_lowercase().contains("content-type: application/json"), "{health:?}");
    assert_eq!(get(HEALTHZ, "/livez").code, 200);
    let ready = get(HEALTHZ, "/readyz");
    assert_eq!((ready.code, &*ready.body), (200, "ok"));
    assert_eq!(value("kubeproxy_proxy_healthz_total{code=\"200\"}"), 1.0);
    assert_eq!(value("kubeproxy_proxy_livez_total{code=\"200\"}"), 1.0);
    assert_eq!(value("kubeproxy_proxy_livez_total{code=\"503\"}"), 0.0);
}

#[test]
fn each_thing_that_is_pending_is_named_until_the_first_sync_the_control_plane_is_real() {
    let sandbox = Sandbox::for_test();
    let mut control_plane = ControlPlane::start(&sandbox);
    let kubeconfig = control_plane.agent_kubeconfig();
    control_plane.stop_api_server();
    let mut agent = Agent::new(&sandbox).kubeconfig(kubeconfig).args(["--node-name", NODE]).args(FLAGS).spawn();
    let pending = expect("/readyz", 503);
    let kinds = ["Services", "EndpointSlices", "Nodes"].map(|kind| format!("there is no complete list of {kind} yet"));
    assert_eq!(
        pending.lines().collect::<Vec<_>>(),
        [&kinds[..], &["the table is not written yet".to_owned()]].concat()
    );
    // As kube-proxy: a start is no reason to be restarted, but a Node that is not known is not eligible.
    assert_eq!(get(HEALTHZ, "/livez").code, 200);
    let health = get(HEALTHZ, "/healthz");
    assert_eq!((health.code, &health.json()["nodeEligible"]), (503, &json!(false)));
    assert_eq!(value("cproxy_ready"), 0.0);

    control_plane.start_api_server();
    control_plane.apply([json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})]);
    agent.wait_ready(PATIENCE);
    assert_eq!(expect("/readyz", 200), "ok");
    expect("/healthz", 200);
    assert_eq!(get(HEALTHZ, "/healthz").json()["nodeEligible"], true);

    // An API server that is gone leaves the table in force: nothing is pending, and staleness grows.
    control_plane.stop_api_server();
    eventually(PATIENCE, "staleness grows", || match value("cproxy_api_server_silent_seconds") {
        seconds if seconds >= 2.0 => Ok(()),
        seconds => Err(seconds),
    });
    for path in ["/healthz", "/livez", "/readyz"] {
        assert_eq!(get(HEALTHZ, path).code, 200, "{path}");
    }
}

#[test]
fn a_restored_agent_is_not_ready_until_its_table_is_compared_the_control_plane_is_real() {
    let sandbox = Sandbox::for_test();
    let mut control_plane = ControlPlane::start(&sandbox);
    control_plane.apply(http_service("web", "10.96.0.10", ["10.244.0.1"]));
    let mut agent = Agent::new(&sandbox).kubeconfig(control_plane.agent_kubeconfig()).args(FLAGS).start();
    control_plane.stop_api_server();
    cproxy(&sandbox, &["reseed"]).success();
    agent.wait_log("cproxy reseed: choosing from a new seed", PATIENCE);
    let pending = expect("/readyz", 503);
    assert_eq!(pending, "the table has not been compared with the API server since the VM was restored\n");
    assert_eq!(get(HEALTHZ, "/healthz").code, 200);
    assert_eq!(value("cproxy_resumes_total{sign=\"reseed\"}"), 1.0);
    control_plane.start_api_server();
    assert_eq!(expect("/readyz", 200), "ok");
}

#[test]
fn a_loop_that_hangs_is_not_live() {
    let world = world();
    let main_thread = Pid::from_raw(world.agent.pid() as i32);
    // Only this thread of the agent stops.
    ptrace::seize(main_thread, Options::empty()).unwrap();
    ptrace::interrupt(main_thread).unwrap();
    waitpid(main_thread, None).unwrap();
    let checks: Vec<_> = ["/livez", "/healthz", "/readyz"].map(|path| thread::spawn(move || get_inside(path))).into();
    for check in checks {
        let response = check.join().unwrap();
        assert_eq!(response.code, 503, "{response:?}");
    }
    ptrace::detach(main_thread, None).unwrap();
    for path in ["/livez", "/healthz", "/readyz"] {
        expect(path, 200);
    }
    assert_eq!(value("kubeproxy_proxy_livez_total{code=\"503\"}"), 1.0);
}

/// A check from a thread that was started in the sandbox.
fn get_inside(path: &str) -> crate::client::Response {
    get(HEALTHZ, path)
}

#[test]
fn programs_that_others_detach_are_put_back_and_counted() {
    let world = world();
    let before = value("cproxy_reattachments_total");
    let pins = cproxy_datapath::bpf::PinDir::new(&world.sandbox.pin_dir());
    std::fs::remove_file(pins.object("connect4")).unwrap();
    // A look, which repairs.
    cproxy(&world.sandbox, &["check"]);
    eventually(Duration::from_secs(10), "the programs are attached again", || {
        match value("cproxy_reattachments_total") {
            now if now > before => Ok(()),
            now => Err(now),
        }
    });
    assert_eq!(value("cproxy_programs_effective"), 1.0);
}
