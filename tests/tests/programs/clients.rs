//! The same questions in several languages, and curl. A client has an argument OPERATION=TARGET for each question, and
//! prints the argument, the answer and the peer as the program sees it, separated by tabs. The operations:
//!
//! - `http`: a GET; the body, which is a pod's name
//! - `tcp`: a connection; the first line, which is a pod's name. The target may be a name with several addresses, of
//!   which the first may refuse
//! - `udp`, `unconnected`: a datagram and its answer by a connected and by an unconnected socket; the name in it
//! - `resolve`: the addresses of a name
//!
//! The answer is `refused` if the program received ECONNREFUSED.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    process::Command,
};

use crate::{
    build,
    fixture::{Cluster, DNS, DOWN, GREETING, HALVES, HTTP, PODS, QUESTION, WEB, forms, pod_number, vips},
};

/// A question with its expected answer.
struct Question {
    argument: String,
    expected: Expected,
}

#[derive(Clone)]
enum Expected {
    /// One of the Service's pods, with the requested address as the peer.
    Pod(SocketAddr),
    Refused,
    /// These addresses in any order.
    Addresses(BTreeSet<IpAddr>),
    /// The only address in the answer of a pod of [`DNS`].
    Who,
}

fn question(operation: &str, target: impl std::fmt::Display, expected: Expected) -> Question {
    Question { argument: format!("{operation}={target}"), expected }
}

/// Questions for every language.
fn questions() -> Vec<Question> {
    let mut questions = vec![question("resolve", "who.test", Expected::Who)];
    for family in 0..2 {
        let at = |service: u8, port| SocketAddr::new(vips(service)[family], port);
        // With either order of families, one of the two names begins with the address that refuses.
        let half = HALVES[family];
        let name = ["half-v4.test", "half-v6.test"][family];
        questions.push(question("resolve", name, Expected::Addresses(vips(half).into())));
        questions.push(question("tcp", format!("{name}:{GREETING}"), Expected::Pod(at(half, GREETING))));
        questions.push(question("http", format!("http://{}/", at(WEB, HTTP)), Expected::Pod(at(WEB, HTTP))));
        for (operation, port) in [("tcp", GREETING), ("udp", QUESTION), ("unconnected", QUESTION)] {
            questions.push(question(operation, at(WEB, port), Expected::Pod(at(WEB, port))));
            questions.push(question(operation, at(DOWN, port), Expected::Refused));
        }
    }
    questions
}

/// Asks, with the Service [`DNS`] as nameserver.
fn ask(client: Command, questions: &[Question]) {
    let cluster = Cluster::start();
    let _dns = cluster.serve_names();
    let mut client = client;
    client.args(questions.iter().map(|question| &question.argument));
    let resolv_conf = vips(DNS).map(|vip| format!("nameserver {vip}\n")).concat();
    let output = cluster.run(cluster.with_resolv_conf(&resolv_conf, &client));
    let lines: Vec<_> = output.stdout.lines().collect();
    for (line, question) in lines.iter().zip(questions) {
        check(line, question);
    }
    assert!(output.code == 0 && lines.len() == questions.len(), "{output:#?}");
}

fn check(line: &str, question: &Question) {
    let fields: Vec<_> = line.split('\t').collect();
    let [argument, answer, peer] = fields[..] else { panic!("{line:?}") };
    assert_eq!(argument, question.argument);
    let addresses = || answer.split(' ').map(canonical).collect::<BTreeSet<_>>();
    match &question.expected {
        Expected::Pod(vip) => {
            assert!(PODS.contains(&pod_number(answer)), "{line}");
            // Java's HTTP client does not return its peer.
            assert!(peer == "-" && argument.starts_with("http") || socket_address(peer) == *vip, "{line}");
        }
        Expected::Refused => assert_eq!((answer, peer), ("refused", "-"), "{line}"),
        Expected::Addresses(wanted) => assert_eq!(addresses(), *wanted, "{line}"),
        Expected::Who => assert!(["192.0.2.1", "192.0.2.2"].contains(&answer), "{line}"),
    }
}

/// The address in canonical form, since programs print it in several forms.
fn canonical(address: &str) -> IpAddr {
    address.parse::<IpAddr>().unwrap_or_else(|error| panic!("{address:?}: {error}")).to_canonical()
}

fn socket_address(text: &str) -> SocketAddr {
    let address: SocketAddr = text.parse().unwrap_or_else(|error| panic!("{text:?}: {error}"));
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

#[test]
fn go_without_libc() {
    let mut go = build::go();
    go.arg("client");
    ask(go, &questions());
}

#[test]
fn java_with_its_ipv4_mapped_sockets() {
    let mut questions = questions();
    // Java does not show refusals to unconnected sockets.
    questions.retain(|question| {
        !(question.argument.starts_with("unconnected=") && matches!(question.expected, Expected::Refused))
    });
    ask(build::java(), &questions);
}

#[test]
fn node_with_libuv_and_c_ares() {
    let mut questions = questions();
    questions.push(question("resolve-c-ares", "who.test", Expected::Who));
    let [vip, _, mapped] = forms(WEB, QUESTION);
    let [_, _, mapped_down] = forms(DOWN, QUESTION);
    for operation in ["udp", "unconnected"] {
        questions.push(question(operation, mapped, Expected::Pod(vip)));
        questions.push(question(operation, mapped_down, Expected::Refused));
    }
    ask(build::node(), &questions);
}

#[test]
fn curl_by_address_and_by_name() {
    let cluster = Cluster::start();
    let _dns = cluster.serve_names();
    let get = |authority: String| {
        let mut curl = Command::new("curl");
        // Only a refusal makes curl use the next address of a name: for anything else it would wait an hour.
        curl.args(["--silent", "--show-error", "--happy-eyeballs-timeout-ms", "3600000", "--max-time", "15"]);
        curl.args(["--write-out", "%{remote_ip} %{remote_port}", &format!("http://{authority}/")]);
        let resolv_conf = format!("nameserver {}\n", vips(DNS)[0]);
        cluster.run(cluster.with_resolv_conf(&resolv_conf, &curl))
    };
    let check = |authority: String, vip: IpAddr| {
        let output = get(authority).success();
        let (pod, peer) = output.stdout.split_once('\n').unwrap();
        assert!(PODS.contains(&pod_number(pod)), "{output:?}");
        assert_eq!(peer, format!("{vip} {HTTP}"));
    };
    for vip in vips(WEB) {
        check(SocketAddr::new(vip, HTTP).to_string(), vip);
    }
    check(format!("half-v4.test:{HTTP}"), vips(HALVES[0])[0]);
    check(format!("half-v6.test:{HTTP}"), vips(HALVES[1])[1]);
    for vip in vips(DOWN) {
        let output = get(SocketAddr::new(vip, HTTP).to_string());
        assert_eq!(output.code, 7, "CURLE_COULDNT_CONNECT: {output:?}");
        assert!(output.stderr.contains("Connection refused") || output.stderr.contains("t connect to server"));
    }
}
