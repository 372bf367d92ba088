//! Missing or wrong configuration at a guest's start: one line reports it, and the policy decides whether the workload
//! runs.

use cproxy_tests::{
    guest::{GuestImage, Kernel},
    outside::{API_SERVER, Outside, SECRETS, pod},
    sandbox::Sandbox,
};

use crate::common::{PATIENCE, values_of};

const WORKLOAD: &str = "#!/bin/sh\necho 'workload: running'\n";

/// The console of a guest whose workload, depending on `on_timeout`, starts in any case or not at all. The reason that
/// is given for the timeout depends on how far a slow guest has come.
fn console(image: GuestImage<'_>, on_timeout: &str) -> String {
    let image = image.parameter("cproxy.timeout=4s").parameter(format!("cproxy.on-timeout={on_timeout}"));
    let console = image.program("etc/cproxy/workload", WORKLOAD).start().wait_end(PATIENCE);
    let is_running = !values_of(&console, "workload: ").is_empty();
    assert_eq!(is_running, on_timeout == "start", "{console}");
    let code = if is_running { 0 } else { 1 };
    assert!(console.contains(&format!("init: ending with {code}")), "{console}");
    assert!(console.contains("cproxy: not ready after 4s: "), "{console}");
    console
}

#[track_caller]
fn assert_logged(console: &str, words: &[&str]) {
    assert!(console.lines().any(|line| words.iter().all(|words| line.contains(words))), "{words:?}:\n{console}");
}

#[test]
fn a_guest_that_does_not_reach_its_source_says_why() {
    let sandbox = Sandbox::for_test();
    let outside = Outside::start(&sandbox);

    let without_network = || outside.guest().parameter("cproxy.apiserver=https://192.0.2.1:6443").without_network();
    for policy in ["fail", "start"] {
        let console = console(without_network(), policy);
        assert_logged(&console, &["WARN", "192.0.2.1:6443", "etwork"]);
    }

    let other_authority = rcgen::generate_simple_self_signed(["elsewhere".to_owned()]).unwrap().cert.pem();
    let wrong_ca = outside.guest().parameter(API_SERVER).file(&format!("{SECRETS}/ca.crt"), other_authority);
    let console_of_wrong_ca = console(wrong_ca, "fail");
    assert_logged(&console_of_wrong_ca, &["WARN", "api.test:6443", "certificate"]);

    let without_credentials = GuestImage::new(&sandbox, &Kernel::from_env()).parameter(API_SERVER);
    let console_without_credentials = console(without_credentials, "fail");
    assert_logged(&console_without_credentials, &["no credentials for https://api.test:6443", SECRETS]);
}

#[test]
fn a_guest_names_each_missing_or_wrong_setting() {
    let sandbox = Sandbox::for_test();
    let outside = Outside::start(&sandbox);
    for (parameter, words) in [
        ("nothing=said", "--apiserver"),
        ("cproxy.apiserver=somewhere", "invalid value 'somewhere' for '--apiserver"),
        (
            "cproxy.api-server=https://api.test:6443",
            "kernel parameter cproxy.api-server: \"api-server\" is not a setting",
        ),
    ] {
        let console = console(outside.guest().parameter(parameter), "start");
        assert_logged(&console, &["cproxy: not ready after 4s: the agent has ended: ", words]);
    }
}

#[test]
fn an_api_server_that_comes_late_is_followed_then() {
    let sandbox = Sandbox::for_test();
    let mut outside = Outside::start(&sandbox);
    outside.control_plane.stop_api_server();
    let image = outside.guest().parameter(API_SERVER).parameter("cproxy.timeout=1s");
    let workload = "echo 'workload: running'\nuntil wget -qO- http://web.default.svc; do sleep 1; done\n\
         echo 'workload: served'\n";
    let mut guest = pod(image.parameter("cproxy.on-timeout=start"), workload).start();
    guest.wait_line("workload: running", PATIENCE);
    outside.control_plane.start_api_server();
    guest.wait_line("workload: served", PATIENCE);
    assert!(guest.wait_end(PATIENCE).contains("init: ending with 0"));
}

#[test]
fn a_root_that_cannot_be_written_is_enough() {
    let sandbox = Sandbox::for_test();
    let outside = Outside::start(&sandbox);
    let image = outside.guest().parameter(API_SERVER).parameter("GUEST_INIT=/guest/read-only");
    let read_only =
        "#!/bin/sh\nmount -o remount,ro / && ! touch /x 2>/dev/null && echo 'guest: read-only'\nexec /init\n";
    let image = image.program("guest/read-only", read_only).program("etc/cproxy/workload", WORKLOAD);
    let console = image.start().wait_end(PATIENCE);
    assert!(console.contains("guest: read-only") && console.contains("ready after"), "{console}");
    assert!(console.contains("workload: running") && console.contains("init: ending with 0"), "{console}");
}

/// This signal is Ctrl-Alt-Del, as Firecracker sends it.
#[test]
fn shutting_down_does_not_wait_for_services() {
    let sandbox = Sandbox::for_test();
    let image = GuestImage::new(&sandbox, &Kernel::from_env())
        .parameter("cproxy.manifests=/nowhere")
        .parameter("cproxy.timeout=300s")
        .parameter("cproxy.on-timeout=start")
        .parameter("GUEST_INIT=/guest/impatient")
        .program("guest/impatient", "#!/bin/sh\n(sleep 5; kill -INT 1) &\nexec /init\n")
        .program("etc/cproxy/workload", WORKLOAD);
    let console = image.start().wait_end(PATIENCE);
    assert!(console.contains("init: ending with 143"), "{console}");
    assert!(!console.contains("workload: ") && !console.contains("Kernel panic"), "{console}");
}
