//! An API server, or a proxy before it, that sends wrong answers: the agent's memory stays small, it reports the error,
//! and it goes on once the server works again.

#![expect(clippy::indexing_slicing, clippy::unwrap_used, reason = "a failed call is a failed test")]

use std::{
    fs, iter,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, AtomicU16, Ordering},
    },
    thread,
    time::Duration,
};

use cproxy_testing::{
    encoding::{self, envelope, envelope_start, field, frame, varint},
    responses::{self, event, status},
};
use cproxy_tests::{
    Server,
    api::{Api, LIST_VERSION, Reply, is_watch, kind, stored},
    echo,
    manifest::{http_service, write_text},
    process::{Agent, RunningAgent, cproxy, eventually},
    sandbox::Sandbox,
    usage::Memory,
};
use serde_json::{Value, json};

type Answer = Box<dyn FnMut(&str) -> Reply + Send>;

const PATIENCE: Duration = Duration::from_secs(60);

/// The only ClusterIP in the kernel once all is well.
const ADDRESS: &str = "10.96.0.10";

fn is_list(target: &str) -> bool {
    !is_watch(target)
}

/// The only object of the requested kind.
fn object(target: &str) -> Value {
    let [service, slice] = stored(http_service("web", ADDRESS, ["10.244.0.1"]));
    if target.contains("/services?") { service } else { slice }
}

/// A second object of the requested kind.
fn other(target: &str) -> Value {
    let mut other = object(target);
    other["metadata"]["name"] = "other".into();
    other["spec"]["clusterIP"] = "10.96.0.11".into();
    other["spec"]["clusterIPs"] = json!(["10.96.0.11"]);
    other
}

fn list(items: &[Value]) -> String {
    responses::list(LIST_VERSION, items)
}

/// Answer of a healthy server: a list of one object, and a watch without events.
fn well(target: &str) -> Reply {
    Reply::well(target, &[object(target)])
}

/// A list of one object in protobuf.
fn protobuf_list(target: &str) -> Vec<u8> {
    responses::protobuf_list(kind(target), LIST_VERSION, &[object(target)])
}

fn in_protobuf(target: &str, body: Vec<u8>) -> Reply {
    let list = "application/vnd.kubernetes.protobuf";
    let watch = "application/vnd.kubernetes.protobuf;stream=watch";
    Reply::chunks([body]).content_type(if is_watch(target) { watch } else { list })
}

/// Answer of a healthy server that sends protobuf.
fn well_in_protobuf(target: &str) -> Reply {
    if is_watch(target) { in_protobuf(target, Vec::new()).open() } else { in_protobuf(target, protobuf_list(target)) }
}

fn start(sandbox: &Sandbox, api: &Api) -> RunningAgent {
    Agent::new(sandbox).kubeconfig(api.kubeconfig(sandbox)).args(["--pod-ip", "10.244.0.9"]).spawn()
}

/// A VM's network may come up after all its programs have started.
#[test]
fn a_network_that_comes_late_ends_the_pause_between_attempts() {
    let sandbox = Sandbox::for_test();
    let api = Api::serve(&sandbox, well);
    let address = |verb| {
        let mut ip = Command::new("ip");
        assert!(ip.args(["address", verb, "127.0.0.1/8", "dev", "lo"]).status().unwrap().success());
    };
    address("del");
    let mut agent = start(&sandbox, &api);
    // The next pauses are 6.4 s at least.
    for kind in ["services", "endpointslices"] {
        agent.wait_until(PATIENCE, "four attempts have failed", |agent| {
            let failed = agent.log().matches(&format!("cannot list {kind} at ")).count();
            if failed >= 4 { Ok(()) } else { Err(format!("{failed} of {kind}")) }
        });
    }
    address("add");
    agent.wait_ready(Duration::from_secs(5));
    assert_serves(&sandbox, &mut agent);
}

fn assert_serves(sandbox: &Sandbox, agent: &mut RunningAgent) {
    agent.wait_ready(PATIENCE);
    let rows = cproxy(sandbox, &["get", "services", "-o", "json"]).json();
    assert_eq!(rows.pointer("/0/address"), Some(&ADDRESS.into()), "{rows}: {}", agent.tail());
    assert_eq!(rows.pointer("/0/backends/0/address"), Some(&"10.244.0.1".into()), "{rows}");
}

fn wait_for_both(sandbox: &Sandbox) {
    eventually(PATIENCE, "both are served", || {
        let output = cproxy(sandbox, &["get", "services", "-o", "json"]);
        let rows = if output.code == 0 { output.json() } else { Value::Null };
        if rows.as_array().is_some_and(|rows| rows.len() == 2) { Ok(()) } else { Err(rows) }
    });
}

/// Peak memory of the agent so far.
fn peak_kib(agent: &RunningAgent) -> u64 {
    Memory::of(agent.pid()).peak >> 10
}

/// Peak memory of an agent with a healthy server, the base for a debug build.
fn usual_peak_kib() -> u64 {
    let sandbox = Sandbox::for_test();
    let api = Api::serve(&sandbox, well);
    let mut agent = start(&sandbox, &api);
    assert_serves(&sandbox, &mut agent);
    peak_kib(&agent)
}

/// Replies as `well`, but as `bad` to the first requests for Services for which `is_bad` holds.
fn at_first(
    times: usize,
    is_bad: fn(&str) -> bool,
    bad: impl Fn(&str) -> Reply + Send + 'static,
    well: fn(&str) -> Reply,
) -> impl FnMut(&str) -> Reply + Send + 'static {
    let mut left = times;
    move |target| {
        if left > 0 && target.contains("/services?") && is_bad(target) {
            left -= 1;
            return bad(target);
        }
        well(target)
    }
}

#[test]
fn a_healthy_server_is_followed_without_a_warning() {
    let sandbox = Sandbox::for_test();
    let api = Api::serve(&sandbox, well);
    let mut agent = start(&sandbox, &api);
    assert_serves(&sandbox, &mut agent);
    assert!(!agent.log().contains("WARN"), "{}", agent.log());
}

#[test]
fn a_list_of_100_megabytes_takes_no_more_memory_than_its_longest_object() {
    let usual = usual_peak_kib();
    let sandbox = Sandbox::for_test();
    let api = Api::serve(&sandbox, |target| {
        if is_watch(target) || !target.contains("/services?") {
            return well(target);
        }
        // Each is the same Service, since the agent's stored objects are not under test here.
        let mut service = object(target);
        service["metadata"]["annotations"] = json!({"long": "x".repeat(100_000)});
        let item = format!("{service},").into_bytes();
        let first = br#"{"metadata":{"resourceVersion":"7"},"items":["#.to_vec();
        let last = format!("{service}]}}").into_bytes();
        Reply::chunks(iter::once(first).chain(iter::repeat_n(item, 1000)).chain(iter::once(last)))
    });
    let mut agent = start(&sandbox, &api);
    assert_serves(&sandbox, &mut agent);
    let more = peak_kib(&agent).saturating_sub(usual);
    assert!(more < 2 * 1024, "{more} KiB more than usual");
}

#[test]
fn a_response_without_end_is_given_up_and_named() {
    let usual = usual_peak_kib();
    let endless = |start: &'static str, more: &'static [u8]| {
        move |_: &str| Reply::chunks(iter::once(start.as_bytes().to_vec()).chain(iter::repeat(more.repeat(4096))))
    };
    let line = at_first(1, is_watch, endless("", b"x"), well);
    let event = at_first(1, is_watch, endless(r#"{"type":"ADDED","object":{"#, br#""a":{"#), well);
    let item = at_first(1, is_list, endless(r#"{"items":[{"metadata":{"#, br#""a":[{},"#), well);
    let metadata = at_first(1, is_list, endless(r#"{"metadata":{""#, b"x"), well);
    let answers: [(Answer, &str); 4] =
        [(Box::new(line), "watch"), (Box::new(event), "watch"), (Box::new(item), "list"), (Box::new(metadata), "list")];
    for (answer, verb) in answers {
        let sandbox = Sandbox::for_test();
        let api = Api::serve(&sandbox, answer);
        let mut agent = start(&sandbox, &api);
        let line = agent.wait_log("one object is longer than 8388608 bytes; trying again", PATIENCE);
        assert!(line.contains(&format!("cannot {verb} services at http://127.0.0.1:")), "{line}");
        let more = peak_kib(&agent).saturating_sub(usual);
        assert!(more < 10 * 1024, "{more} KiB more than usual");
        assert_serves(&sandbox, &mut agent);
    }
}

#[test]
fn a_broken_or_meaningless_response_is_requested_again() {
    let half = |target: &str| {
        let mut event = event("ADDED", &object(target));
        event.truncate(event.len() / 2);
        event
    };
    let half_list = |target: &str| list(&[object(target)]).replace("}]", "");
    let cut = "the connection was closed in the middle of the response";
    let answers: [(Answer, &str); 8] = [
        (Box::new(at_first(1, is_watch, move |target| Reply::chunks([half(target)]), well)), "EOF while"),
        (Box::new(at_first(1, is_watch, |_| Reply::text("<html>\n"), well)), "cannot be read"),
        (Box::new(at_first(1, is_watch, |_| Reply::text("\u{0}\n{}\n"), well)), "cannot be read"),
        (Box::new(at_first(2, is_list, move |target| Reply::text(half_list(target)).cut(), well)), cut),
        (Box::new(at_first(1, is_list, move |target| Reply::text(half_list(target)), well)), "ends in the middle"),
        (Box::new(at_first(1, is_list, |_| Reply::text(r#"{"kind":"Status"}"#), well)), "it has no items"),
        (Box::new(at_first(1, is_list, |_| Reply::text(r#"{"items":[]}"#), well)), "without resourceVersion"),
        (Box::new(at_first(1, is_list, |_| Reply::chunks([]), well)), "ends in the middle"),
    ];
    for (answer, complaint) in answers {
        let sandbox = Sandbox::for_test();
        let api = Api::serve(&sandbox, answer);
        let mut agent = start(&sandbox, &api);
        agent.wait_log("; trying again", PATIENCE);
        assert_serves(&sandbox, &mut agent);
        let log = agent.log();
        let line = log.lines().find(|line| line.contains("WARN") && line.contains("; trying again")).unwrap();
        assert!(line.contains("services") && line.contains(complaint), "{complaint:?} is not in {line}");
    }
}

#[test]
fn broken_protobuf_is_named_and_requested_again() {
    let whole = |target: &str| envelope(kind(target), &encoding::object(&object(target)));
    type IsBad = fn(&str) -> bool;
    type BreakUp = fn(Vec<u8>) -> Vec<u8>;
    let cases: [(IsBad, BreakUp, &str); 9] = [
        (is_watch, |whole| frame("ADDED", &whole)[..40].to_vec(), "it ends in the middle of a frame"),
        (is_watch, |_| vec![0xff; 100], "one object is longer than 8388608 bytes"),
        (is_watch, |_| vec![0, 0, 0, 8, 0x0a, 0x7f, b'A', b'D', b'D', b'E', b'D', 0], "longer than its message"),
        (is_watch, |whole| frame("ADDED", &[b"k9s\0", &whole[4..]].concat()), "not protobuf of Kubernetes"),
        (is_watch, |whole| frame("MOVED", &whole), "at Service default/web: \"MOVED\" is no type of a watch event"),
        (is_list, |list| list[..list.len() - 9].to_vec(), "not a list: it ends in the middle"),
        (
            is_list,
            |_| [&envelope_start("ServiceList"), &[0x12][..], &varint(1 << 40), b"x"].concat(),
            "not a list: it ends in the middle",
        ),
        (is_list, |_| envelope("PodList", &field(2, b"")), "PodList where ServiceList is asked for"),
        (is_list, |_| b"<html>".to_vec(), "it is not protobuf of Kubernetes"),
    ];
    for (is_bad, break_up, complaint) in cases {
        let sandbox = Sandbox::for_test();
        let bad = move |target: &str| {
            let good = if is_watch(target) { whole(target) } else { protobuf_list(target) };
            in_protobuf(target, break_up(good))
        };
        let api = Api::serve(&sandbox, at_first(1, is_bad, bad, well_in_protobuf));
        let mut agent = start(&sandbox, &api);
        let line = agent.wait_log("; trying again", PATIENCE);
        assert!(line.contains("services at http://127.0.0.1:") && line.contains(complaint), "{complaint:?}: {line}");
        assert_serves(&sandbox, &mut agent);
    }
}

#[test]
fn an_object_in_protobuf_that_cannot_be_read_does_not_end_the_watch() {
    let sandbox = Sandbox::for_test();
    let api = Api::serve(&sandbox, |target| {
        if is_list(target) || !target.contains("/services?") {
            return well_in_protobuf(target);
        }
        let good = encoding::object(&object(target));
        // A varint where spec is a message, a group that never ends, and a field that is longer than the bound.
        let names = |name: &str| {
            let mut named = object(target);
            named["metadata"]["name"] = name.into();
            field(1, &encoding::object(&json!({"metadata": named["metadata"]}))[2..])
        };
        let objects = [
            [good.clone(), vec![0x10, 7]].concat(),
            [names("grouped"), vec![0x9b, 0x06]].concat(),
            [names("long"), field(99, &vec![b'x'; 9 << 20])].concat(),
            encoding::object(&other(target)),
        ];
        let frames = objects.iter().flat_map(|object| frame("MODIFIED", &envelope("Service", object))).collect();
        in_protobuf(target, frames).open()
    });
    let mut agent = start(&sandbox, &api);
    assert_serves(&sandbox, &mut agent);
    agent.wait_log("Service default/web: failed to decode Protobuf message: Service.spec: invalid wire type", PATIENCE);
    agent.wait_log("Service default/grouped: failed to decode Protobuf message", PATIENCE);
    agent.wait_log("Service default/long: longer than 8388608 bytes: this Service is not served", PATIENCE);
    wait_for_both(&sandbox);
    assert!(!agent.log().contains("trying again"), "{}", agent.log());
}

#[test]
fn a_response_that_is_no_list_or_watch_is_described() {
    let redirect = |_: &str| Reply::chunks([]).code(302);
    let html = |_: &str| Reply::text("<html>").content_type("text/html");
    let answers: [(Answer, &str); 2] = [
        (Box::new(at_first(1, is_list, redirect, well)), ": Found (302); trying again"),
        (Box::new(at_first(1, is_list, html, well)), "Content-Type of the response is \"text/html\", which was not"),
    ];
    for (answer, complaint) in answers {
        let sandbox = Sandbox::for_test();
        let api = Api::serve(&sandbox, answer);
        let mut agent = start(&sandbox, &api);
        agent.wait_log(complaint, PATIENCE);
        assert_serves(&sandbox, &mut agent);
    }
}

/// A FIFO would stop the agent's only thread.
#[test]
fn a_token_file_that_is_no_file_is_named_and_the_last_token_stays() {
    let sandbox = Sandbox::for_test();
    // Each watch ends at once, so that the file is read again and again.
    let api = Api::serve(&sandbox, |target| if is_watch(target) { Reply::chunks([]) } else { well(target) });
    let token = write_text(sandbox.dir(), "token", "secret");
    let kubeconfig = api.kubeconfig_of(&sandbox, json!({"tokenFile": "token"}));
    let mut agent = Agent::new(&sandbox).kubeconfig(kubeconfig).args(["--pod-ip", "10.244.0.9"]).spawn();
    assert_serves(&sandbox, &mut agent);
    // Renamed: there is no moment without a file, which the agent would name as well.
    let fifo = sandbox.dir().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    fs::rename(&fifo, &token).unwrap();
    let line = agent.wait_log("what was read last stays in use", PATIENCE);
    assert!(line.contains(&format!("token file {}: not a regular file", token.display())), "{line}");
    let asked = api.asked().len();
    eventually(PATIENCE, "it asks on", || if api.asked().len() > asked { Ok(()) } else { Err("it does not") });
    assert_serves(&sandbox, &mut agent);
}

#[test]
fn an_object_that_cannot_be_read_does_not_end_the_watch() {
    let sandbox = Sandbox::for_test();
    let api = Api::serve(&sandbox, |target| {
        if is_list(target) || !target.contains("/services?") {
            return well(target);
        }
        let mut bad = object(target);
        bad["spec"]["ports"] = 5.into();
        let events = [event("MODIFIED", &bad), event("ADDED", &other(target))];
        Reply::chunks(events).open()
    });
    let mut agent = start(&sandbox, &api);
    assert_serves(&sandbox, &mut agent);
    agent.wait_log("Service default/web: spec.ports: invalid type", PATIENCE);
    wait_for_both(&sandbox);
}

#[test]
fn objects_of_another_kind_change_nothing_and_are_named() {
    let sandbox = Sandbox::for_test();
    let api = Api::serve(&sandbox, |target| {
        let mut other = object(target);
        other["kind"] = "Pod".into();
        other["metadata"]["resourceVersion"] = "12".into();
        if is_list(target) {
            well(target)
        } else {
            Reply::chunks([event("ADDED", &other), event("DELETED", &other)]).open()
        }
    });
    let mut agent = start(&sandbox, &api);
    assert_serves(&sandbox, &mut agent);
    for kind in ["Service", "EndpointSlice"] {
        agent.wait_log(&format!("Pod where {kind} is asked for"), PATIENCE);
    }
    assert_serves(&sandbox, &mut agent);
}

/// Kubernetes before 1.31 does not know the field that excludes headless Services.
#[test]
fn a_field_that_the_server_does_not_know_is_left_out_of_requests() {
    let sandbox = Sandbox::for_test();
    let api = Api::serve(&sandbox, |target| {
        if target.contains("fieldSelector=spec.clusterIP") { Reply::error(400) } else { well(target) }
    });
    let mut agent = start(&sandbox, &api);
    assert_serves(&sandbox, &mut agent);
    agent.wait_log("asking again without fieldSelector spec.clusterIP!=None", PATIENCE);
    assert!(!agent.log().contains("WARN"), "{}", agent.log());
    let asked = api.asked().into_iter().filter(|target| target.contains("fieldSelector"));
    assert_eq!(asked.count(), 1, "once is enough");
}

#[test]
fn an_event_that_stays_unreadable_leads_to_a_new_list() {
    let sandbox = Sandbox::for_test();
    let mut lists = 0;
    let api = Api::serve(&sandbox, move |target| {
        if !target.contains("/services?") {
            return well(target);
        }
        if is_watch(target) {
            let half = r#"{"type":"MODIFIED","object":{"metadata":{"name":"web","namespace":"default","labels":{]"#;
            return Reply::chunks([format!("{half}\n").into_bytes()]).open();
        }
        lists += 1;
        let both = [object(target), other(target)];
        Reply::text(list(&both[..lists.min(both.len())]))
    });
    let mut agent = start(&sandbox, &api);
    agent.wait_log("the response cannot be read at Service default/web: ", PATIENCE);
    wait_for_both(&sandbox);
    let asked = api.asked().into_iter().filter(|target| target.contains("/services?"));
    let are_lists: Vec<_> = asked.map(|target| is_list(&target)).take(4).collect();
    assert_eq!(are_lists, [true, false, false, true], "it is listed after the second time");
}

#[test]
fn an_object_that_is_too_long_is_named_and_harms_no_other() {
    let long = |target: &str, name: &str| {
        // The API server writes long fields after the names.
        let metadata = json!({"name": name, "namespace": "default", "resourceVersion": "6"}).to_string();
        let metadata = metadata.trim_end_matches('}');
        let head = format!(r#"{{"metadata":{metadata},"annotations":{{"long":""#);
        let filler = iter::repeat_n(vec![b'x'; 90_000], 100);
        let tail = format!(r#""}}}},"spec":{}}}"#, object(target)["spec"]);
        iter::once(head.into_bytes()).chain(filler).chain([tail.into_bytes()])
    };
    let long_event = move |target: &str, name: &str| {
        let start = iter::once(br#"{"type":"ADDED","object":"#.to_vec());
        start.chain(long(target, name)).chain([b"}\n".to_vec()])
    };
    let in_list = move |target: &str| {
        if is_watch(target) || !target.contains("/services?") {
            return well(target);
        }
        let start = iter::once(br#"{"metadata":{"resourceVersion":"7"},"items":["#.to_vec());
        let end = format!(",{},{}]}}", object(target), other(target)).into_bytes();
        Reply::chunks(start.chain(long(target, "long")).chain([end]))
    };
    let in_watch = move |target: &str| {
        if is_list(target) || !target.contains("/services?") {
            return well(target);
        }
        Reply::chunks(long_event(target, "long").chain([event("ADDED", &other(target))])).open()
    };
    let answers: [Answer; 2] = [Box::new(in_list), Box::new(in_watch)];
    for answer in answers {
        let sandbox = Sandbox::for_test();
        let api = Api::serve(&sandbox, answer);
        let mut agent = start(&sandbox, &api);
        agent.wait_log("Service default/long: longer than 8388608 bytes: this Service is not served", PATIENCE);
        wait_for_both(&sandbox);
        assert!(!agent.log().contains("trying again"), "{}", agent.log());
    }
}

/// Proxy variables in a pod's environment are meant for its applications.
#[test]
fn proxies_of_the_environment_are_ignored() {
    let sandbox = Sandbox::for_test();
    let api = Api::serve(&sandbox, well);
    let agent = Agent::new(&sandbox).kubeconfig(api.kubeconfig(&sandbox)).args(["--pod-ip", "10.244.0.9"]);
    let agent = agent.env("HTTPS_PROXY", "http://192.0.2.9:3128").env("https_proxy", "no URL at all");
    let mut agent = agent.env("HTTP_PROXY", "http://192.0.2.9:3128").spawn();
    assert_serves(&sandbox, &mut agent);
    agent.wait_log("HTTPS_PROXY is set and not used", PATIENCE);
}

#[test]
fn a_watch_that_is_too_old_is_listed_anew() {
    let gone = status(410, "too old");
    let answers: [fn(&str, &Value) -> Reply; 2] =
        [|_, gone| Reply::chunks([event("ERROR", gone)]), |_, _| Reply::error(410)];
    for answer in answers {
        let sandbox = Sandbox::for_test();
        let (mut is_first, mut has_gone, gone) = (true, false, gone.clone());
        let api = Api::serve(&sandbox, move |target| {
            if !target.contains("/services?") {
                return well(target);
            }
            if is_list(target) && std::mem::take(&mut is_first) {
                return Reply::text(list(&[]));
            }
            if is_watch(target) && !std::mem::replace(&mut has_gone, true) {
                assert!(target.ends_with("&resourceVersion=7"), "{target} does not begin at the list's version");
                return answer(target, &gone);
            }
            if is_list(target) {
                assert!(target.ends_with("&resourceVersion=7&resourceVersionMatch=NotOlderThan"), "{target}");
            }
            well(target)
        });
        let mut agent = start(&sandbox, &api);
        agent.wait_log("the watch of services is too old to be resumed: listing anew", PATIENCE);
        agent.wait_ready(PATIENCE);
        eventually(PATIENCE, "it is served", || {
            let rows = cproxy(&sandbox, &["get", "services", "-o", "json"]).json();
            if rows.pointer("/0/address") == Some(&ADDRESS.into()) { Ok(()) } else { Err(rows) }
        });
        assert!(!agent.log().contains("trying again"), "{}", agent.log());
    }
}

/// Address of the only Service, and the name of its pod, which answers there.
const WEB: (&str, u16) = (ADDRESS, 80);
const POD: &str = "web-pod";

fn serve_pod(sandbox: &Sandbox) -> Server {
    sandbox.add_address("10.244.0.1");
    echo::tcp(sandbox, "10.244.0.1:8080", POD)
}

fn assert_connects() {
    assert_eq!(echo::ask_tcp(WEB).unwrap().name, POD);
}

/// Answer of a watch that ends after a second, so that the next request comes soon.
fn short_watch(events: Vec<Vec<u8>>) -> Reply {
    let pause = || {
        thread::sleep(Duration::from_secs(1));
        Vec::new()
    };
    Reply::chunks(events.into_iter().chain(iter::once_with(pause)))
}

/// The second object, as a change after the version of all lists.
fn later(target: &str) -> Vec<u8> {
    let mut other = other(target);
    other["metadata"]["resourceVersion"] = "9".into();
    event("ADDED", &other)
}

fn service_requests(api: &Api) -> Vec<String> {
    api.asked().into_iter().filter(|target| target.contains("/services?")).collect()
}

#[test]
fn a_server_that_refuses_everything_for_a_while_is_resumed_without_a_list() {
    for code in [401, 403, 429, 500, 502, 503, 504] {
        let sandbox = Sandbox::for_test();
        let _pod = serve_pod(&sandbox);
        let refusal = Arc::new(AtomicU16::new(0));
        let current = refusal.clone();
        let mut was_refused = false;
        let api = Api::serve(&sandbox, move |target| {
            match current.load(Ordering::Relaxed) {
                0 => {}
                code => {
                    was_refused = true;
                    return Reply::error(code);
                }
            }
            if is_list(target) {
                return well(target);
            }
            let has_change = was_refused && target.contains("/services?") && target.ends_with("resourceVersion=7");
            short_watch(has_change.then(|| later(target)).into_iter().collect())
        });
        let mut agent = start(&sandbox, &api);
        assert_serves(&sandbox, &mut agent);
        assert_connects();
        refusal.store(code, Ordering::Relaxed);
        let silence = || {
            let counters = cproxy(&sandbox, &["get", "counters", "-o", "json"]).json();
            counters["api_server_silent_seconds"].as_u64().unwrap()
        };
        let least = silence();
        agent.wait_until(PATIENCE, "it is refused twice", |agent| {
            match agent.log().matches("watch services").count() {
                2.. => Ok(()),
                less => Err(less),
            }
        });
        assert!(silence() > least, "{code}: nothing is confirmed");
        assert_serves(&sandbox, &mut agent);
        assert_connects();
        refusal.store(0, Ordering::Relaxed);
        wait_for_both(&sandbox);
        assert_connects();
        let lists = service_requests(&api).iter().filter(|target| is_list(target)).count();
        // A server that does not have the version (504) is asked again once, and then for a list.
        assert!(lists == 1 || code == 504, "{code}: {lists} lists");
    }
}

/// Steps of a server that lists fewer objects for a moment.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
enum Step {
    Whole,
    /// Lists break off after the first of two objects.
    Broken,
    /// A list stops after the first object.
    Halting,
    /// The list ends there.
    Fewer,
    /// The other object comes back.
    Back,
}

#[test]
fn a_list_with_fewer_objects_counts_once_it_is_complete() {
    let sandbox = Sandbox::for_test();
    let _pod = serve_pod(&sandbox);
    let step = Arc::new(AtomicU8::new(Step::Whole as u8));
    let current = step.clone();
    let has_halted = Arc::new(AtomicBool::new(false));
    let theirs = has_halted.clone();
    let is_at = move |least: Step| current.load(Ordering::Relaxed) >= least as u8;
    let api = Api::serve(&sandbox, move |target| {
        if !target.contains("/services?") {
            return well(target);
        }
        let both = list(&[object(target), other(target)]);
        match (is_watch(target), target.contains("resourceVersion=8")) {
            (false, _) if !is_at(Step::Broken) => Reply::text(both),
            (true, _) if !is_at(Step::Broken) => short_watch(Vec::new()),
            (true, false) => Reply::error(410),
            (true, true) if is_at(Step::Back) => short_watch(vec![later(target)]),
            (true, true) => short_watch(Vec::new()),
            (false, _) => {
                let start = format!("{{\"metadata\":{{\"resourceVersion\":\"8\"}},\"items\":[{}", object(target));
                if !is_at(Step::Halting) {
                    return Reply::text(start).cut();
                }
                let (is_at, has_halted) = (is_at.clone(), theirs.clone());
                let end = move || {
                    has_halted.store(true, Ordering::Relaxed);
                    while !is_at(Step::Fewer) {
                        thread::sleep(Duration::from_millis(20));
                    }
                    b"]}".to_vec()
                };
                Reply::chunks(iter::once(start.into_bytes()).chain(iter::once_with(end)))
            }
        }
    });
    // A list that halts must not hold up the end of the test.
    let _end = OnDrop(step.clone());
    let mut agent = start(&sandbox, &api);
    agent.wait_ready(PATIENCE);
    wait_for_both(&sandbox);
    let go_to = |next: Step| step.store(next as u8, Ordering::Relaxed);
    go_to(Step::Broken);
    agent.wait_log("cannot list services", PATIENCE);
    wait_for_both(&sandbox);
    assert_connects();
    go_to(Step::Halting);
    let halts = || if has_halted.load(Ordering::Relaxed) { Ok(()) } else { Err("not yet") };
    eventually(PATIENCE, "a list halts", halts);
    wait_for_both(&sandbox);
    assert_connects();
    go_to(Step::Fewer);
    eventually(PATIENCE, "one is left", || {
        let rows = cproxy(&sandbox, &["get", "services", "-o", "json"]).json();
        if rows.as_array().is_some_and(|rows| rows.len() == 1) { Ok(()) } else { Err(rows) }
    });
    assert_serves(&sandbox, &mut agent);
    assert_connects();
    go_to(Step::Back);
    wait_for_both(&sandbox);
    assert_connects();
}

/// Takes the steps to their last when it is dropped.
struct OnDrop(Arc<AtomicU8>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.store(Step::Back as u8, Ordering::Relaxed);
    }
}

/// Text that would clear a screen, colour it, begin a line and turn the text after it around.
const STEERING: &str = "a\u{1b}[2J\u{9b}31m\r\nFORGED\u{202e}\u{2028}b";

/// An object of the requested kind with that text wherever the API has text, and beside it one that is served.
fn steering(target: &str) -> [Value; 2] {
    let mut broken = object(target);
    broken["metadata"] = json!({
        "name": format!("broken{STEERING}"), "namespace": STEERING, "resourceVersion": "5",
        "labels": {"kubernetes.io/service-name": STEERING}, "annotations": {STEERING: STEERING},
    });
    let mut served = object(target);
    served["metadata"]["namespace"] = STEERING.into();
    if target.contains("/services?") {
        broken["spec"] = json!({
            "type": STEERING, "clusterIP": STEERING, "clusterIPs": [STEERING], "externalIPs": [STEERING],
            "sessionAffinity": STEERING, "internalTrafficPolicy": STEERING, "externalTrafficPolicy": STEERING,
            "loadBalancerSourceRanges": [STEERING], "trafficDistribution": STEERING,
            "ports": [{"name": STEERING, "port": 80, "protocol": STEERING, "appProtocol": STEERING}],
        });
        broken["status"] = json!({"loadBalancer": {"ingress": [{"ip": STEERING, "ipMode": STEERING}]}});
        served["metadata"]["name"] = STEERING.into();
        served["spec"]["ports"][0]["name"] = STEERING.into();
    } else {
        broken["addressType"] = STEERING.into();
        served["metadata"]["labels"]["kubernetes.io/service-name"] = STEERING.into();
        served["ports"][0]["name"] = STEERING.into();
        let mut strange = served["endpoints"][0].clone();
        strange["addresses"] = json!([STEERING]);
        for field in ["nodeName", "zone", "hostname"] {
            strange[field] = STEERING.into();
        }
        strange["hints"] = json!({"forZones": [{"name": STEERING}]});
        served["endpoints"].as_array_mut().unwrap().push(strange);
    }
    [broken, served]
}

/// Checks that a text steers no terminal and that no name begins a line of it.
#[track_caller]
fn assert_plain(what: &str, text: &str) {
    let steers = |char: char| (char.is_control() && char != '\n') || "\u{202e}\u{2028}".contains(char);
    assert!(!text.contains(steers), "{what}: {:?}", text.escape_debug().to_string());
    assert!(!text.lines().any(|line| line.starts_with("FORGED")), "{what}: {text}");
}

#[test]
fn names_from_a_server_steer_no_terminal_and_begin_no_line() {
    for format in ["text", "json"] {
        let sandbox = Sandbox::for_test();
        let refuse = |_: &str| {
            let status = json!({"kind": "Status", "message": STEERING, "reason": STEERING, "code": 403});
            Reply::status(403, &status)
        };
        let serve = |target: &str| match is_watch(target) {
            true => Reply::chunks([
                event(STEERING, &object(target)),
                event("ERROR", &json!({"kind": "Status", "message": STEERING, "reason": STEERING, "code": 500})),
            ]),
            false => Reply::text(list(&steering(target))),
        };
        let api = Api::serve(&sandbox, at_first(2, is_list, refuse, serve));
        let agent = Agent::new(&sandbox).kubeconfig(api.kubeconfig(&sandbox)).args(["--log-format", format]);
        let mut agent = agent.start();
        // The broken objects, the watch's change of an unknown type, and its error.
        agent.wait_log("broken", PATIENCE);
        agent.wait_until(PATIENCE, "the error of a watch", |agent| {
            if agent.log().matches("FORGED").count() > 5 { Ok(()) } else { Err(agent.log()) }
        });
        assert_plain("log", &agent.log());

        let wait = ["wait", "--timeout", "0", "--for", "default/web"];
        let commands: [&[&str]; 10] = [
            &["get", "services"],
            &["get", "services", "-o", "json"],
            &["get", "services", "-o", "yaml"],
            &["get", "services", "-o", "name"],
            &["get", "backends"],
            &["get", "backends", "-o", "json"],
            &["get", "counters"],
            &["check"],
            &["check", "-o", "json"],
            &wait,
        ];
        for command in commands {
            let output = cproxy(&sandbox, command);
            assert_plain(&command.join(" "), &format!("{}{}", output.stdout, output.stderr));
        }
        let services = cproxy(&sandbox, &["get", "services", "-o", "json"]).json();
        let name = services.pointer("/0/service").and_then(Value::as_str).unwrap();
        assert!(name.contains("FORGED"), "it was printed: {services}");

        let objects = ["/services?", "/endpointslices?"].map(steering).concat();
        let manifests = write_text(sandbox.dir(), "objects.json", &list(&objects));
        for format in ["table", "json"] {
            let output = cproxy(&sandbox, &["resolve", "--manifests", manifests.to_str().unwrap(), "-o", format]);
            assert_plain("resolve", &format!("{}{}", output.stdout, output.stderr));
            assert!(output.stderr.contains("FORGED"), "{output:?}");
        }
    }
}
