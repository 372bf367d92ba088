//! Start order, and the environment of the workload.

use cproxy_tests::{
    manifest,
    outside::{API_SERVER, Outside, nameserver_objects, pod},
    sandbox::Sandbox,
};
use serde_json::{Value, json};

use crate::common::{PATIENCE, report, values_of};

/// Workload that prints its environment.
const WORKLOAD: &str = r#"
[ ! -e /run/cproxy/ready ] || echo "workload: the table is complete"
echo "workload: web is $(wget -qO- http://web.default.svc)"
echo "kernel: $(uname -r)"
echo "jit: $(cat /proc/sys/net/core/bpf_jit_enable 2>/dev/null || echo 0)"
[ -e /sys/kernel/btf/vmlinux ] && echo "btf: yes" || echo "btf: no"
echo "get: $(cproxy get services -o json | tr -d '\n')"
echo "check: $(cproxy check -o json | tr -d '\n')"
cproxy trace default/web --verdict forwarded --count 1 -o json > /run/traced &
until [ -s /run/traced ]; do wget -qO- http://web.default.svc > /run/answer; done
wait
echo "trace: $(cat /run/traced)"
"#;

#[test]
fn the_workload_finds_services_by_name_from_its_first_moment() {
    let sandbox = Sandbox::for_test();
    let outside = Outside::start(&sandbox);
    let console = pod(outside.guest().parameter(API_SERVER), WORKLOAD).start().wait_end(PATIENCE);
    let found = values_of(&console, "workload: ");
    assert_eq!(found[0], "the table is complete", "{console}");
    assert!(["web is pod-1", "web is pod-2"].contains(&found[1]), "{console}");
    assert!(console.contains("init: ending with 0"), "{console}");
    let ready = console.find("ready after").unwrap();
    assert!(ready < console.find("init: running").unwrap(), "{console}");
    assert!(!console.contains('\u{1b}'), "no colours: {console}");

    let services: Value = serde_json::from_str(values_of(&console, "get: ")[0]).unwrap();
    let names: Vec<_> = services.as_array().unwrap().iter().map(|row| row["service"].as_str().unwrap()).collect();
    assert_eq!(names, ["default/kubernetes", "kube-system/kube-dns", "kube-system/kube-dns", "default/web"]);
    let traced: Value = serde_json::from_str(values_of(&console, "trace: ")[0]).unwrap();
    assert_eq!((&traced["service"], &traced["command"]), (&json!("default/web"), &json!("wget")), "{traced}");
    report_kernel(&console);
}

/// Reports the kernel's features and cproxy's use of them.
fn report_kernel(console: &str) {
    let checks: Vec<Value> = serde_json::from_str(values_of(console, "check: ")[0]).unwrap();
    let text = |check: &Value, field: &str| check[field].as_str().unwrap_or_default().to_owned();
    let is_required = |check: &&Value| check["required"] == true;
    let failed: Vec<_> = checks.iter().filter(is_required).filter(|check| check["state"] != "ok").collect();
    assert_eq!(failed, [&Value::Null; 0]);
    let yes = |is: bool| if is { "yes" } else { "no" };
    report("1 version", values_of(console, "kernel: ")[0]);
    report("2 BPF JIT", yes(values_of(console, "jit: ") != ["0"]));
    report("3 kernel BTF", values_of(console, "btf: ")[0]);
    let missing: Vec<_> =
        checks.iter().filter(|check| check["state"] != "ok").map(|check| text(check, "detail")).collect();
    report("4 degrades", if missing.is_empty() { "nothing".to_owned() } else { missing.join("; ") }.as_str());
    let programs = checks.iter().filter(|check| text(check, "name").starts_with("program_"));
    let verified =
        programs.filter_map(|check| text(check, "detail").split(' ').find_map(|word| word.parse::<u32>().ok()));
    report("5 verified instructions of the largest program", &verified.max().unwrap_or_default().to_string());
    report("6 agent against an API server outside, named in DNS", "ready, then the workload");
    report("7 by ClusterIP, from the workload's start", "DNS over UDP and HTTP answered");
    report("8 calls in `cproxy trace`", "forwarded, with process and Service");
}

#[test]
fn a_guest_where_cproxy_is_disabled_is_as_one_without() {
    let sandbox = Sandbox::for_test();
    let outside = Outside::start(&sandbox);
    let workload = "sleep 2\n[ -e /run/cproxy ] || echo \"workload: no run directory\"\n\
                    [ -n \"$(ls /sys/fs/bpf)\" ] || echo \"workload: no pins\"\n\
                    pidof cproxy || echo \"workload: no process\"\ncproxy check | head -1\n";
    let image = outside.guest().parameter(API_SERVER).parameter("cproxy.enabled=false");
    let console = pod(image, workload).start().wait_end(PATIENCE);
    let reason = "cproxy is disabled on this machine (enabled = false, kernel parameter cproxy.enabled)";
    assert_eq!(values_of(&console, "workload: "), ["no run directory", "no pins", "no process"], "{console}");
    assert!(console.contains(&format!("cproxy: {reason}; not waiting")), "{console}");
    // A console that is busy takes no line of a log.
    assert!(console.matches(&format!("INFO {reason}")).count() <= 1, "it is not started again: {console}");
    assert!(console.contains("degraded  enabled"), "{console}");
}

#[test]
fn bootstrap_services_are_served_before_the_first_sync() {
    let sandbox = Sandbox::for_test();
    let outside = Outside::start(&sandbox);
    let image = outside
        .guest()
        // This port has no listener.
        .parameter("cproxy.apiserver=https://api.test:6444")
        .parameter("cproxy.bootstrap=/etc/cproxy/bootstrap.json")
        .parameter("cproxy.timeout=20s")
        .parameter("cproxy.on-timeout=start")
        .file("etc/cproxy/bootstrap.json", manifest::list(nameserver_objects()));
    let workload = "echo \"workload: $(nslookup web.default.svc.cluster.local | tr '\\n' ' ')\"";
    let console = pod(image, workload).start().wait_end(PATIENCE);
    assert!(console.contains("; going on without it (--on-timeout start)"), "{console}");
    assert!(values_of(&console, "workload: ")[0].contains("10.96.0.20"), "{console}");
    assert!(console.find("serving 2 frontends of --bootstrap").is_some(), "{console}");
}
