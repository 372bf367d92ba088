//! IPVS with direct routing, in a machine of its own, in front of guests that receive.

use std::{
    collections::BTreeSet,
    fs,
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use cproxy_tests::{
    guest::{Guest, GuestImage, Kernel, path_from_env},
    http,
    manifest::{Endpoint, Service, Slice},
    outside::{API_SERVER, Outside},
    sandbox::{Netns, Sandbox},
};
use serde_json::{Value, json};

use crate::common::{PATIENCE, report};

/// The bridge of all machines, and the router's address on it.
const BRIDGE: &str = "machines";
const ROUTER: &str = "10.3.0.1";
const BALANCER: &str = "10.3.0.2";
const GUESTS: [&str; 2] = ["10.3.0.11", "10.3.0.12"];
/// The client, and the router's address on its link.
const CLIENT: &str = "198.51.100.7";
const GATEWAY: &str = "198.51.100.1";
/// The address that clients call, and its range.
const RECEIVED: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 10);
const RANGE: &str = "203.0.113.0/24";
/// Port of clients; the servers have another one.
const PORT: u16 = 80;
const TARGET: u16 = 8080;

/// Number of clients that call all the time.
const CLIENTS: usize = 3;
/// Limit on a call, longer than any takes that arrives.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);

/// First process of the balancer. It runs what is typed.
const BALANCER_INIT: &str = "#!/bin/sh
mount -t devtmpfs devtmpfs /dev
ip link set lo up
ip address add $RECEIVED/32 dev lo
echo 1 >/proc/sys/net/ipv4/ip_forward
ipvsadm -L >/dev/null
# Connections to a backend that is gone find another one.
echo 1 >/proc/sys/net/ipv4/vs/expire_nodest_conn
ipvsadm -A -t $RECEIVED:80 -s rr && echo 'balancer: stands'
while read -r line; do eval \"$line\" && echo \"did: $line\"; done
";

/// Server of a guest, whose answers name the guest and the client. It runs what is typed.
const SERVER: &str = "#!/bin/sh
httpd -p 8080 -h /www && echo 'server: listens'
while read -r line; do eval \"$line\" && echo \"did: $line\"; done
";
const ANSWER: &str = "#!/bin/sh
printf 'Content-Type: text/plain\\r\\n\\r\\n%s %s' \"$(cat /www/name)\" \"$REMOTE_ADDR\"
";

/// Answers and errors of clients, each with its time.
#[derive(Default)]
struct Log {
    answers: Vec<(Instant, String)>,
    errors: Vec<(Instant, String)>,
}

/// Clients that call until this is dropped.
struct Calls<'l> {
    log: &'l Mutex<Log>,
    is_over: &'l AtomicBool,
}

impl Calls<'_> {
    /// Waits until exactly these guests have answered a number of calls that began from now on.
    fn wait_for(&self, guests: &[&str]) {
        let (start, wanted) = (Instant::now(), guests.iter().copied().collect::<BTreeSet<_>>());
        loop {
            let log = self.log.lock().unwrap();
            let since: Vec<_> = log.answers.iter().filter(|(at, _)| *at > start).map(|(_, by)| &**by).collect();
            let enough = since.len() >= 20 * CLIENTS;
            if enough && since.iter().copied().collect::<BTreeSet<_>>() == wanted {
                return;
            }
            assert!(start.elapsed() < PATIENCE, "{} answers, by {:?}; {:?}", since.len(), since.last(), log.errors);
            drop(log);
            thread::sleep(Duration::from_millis(100));
        }
    }

    fn errors_since(&self, start: Instant) -> Vec<(Instant, String)> {
        let log = self.log.lock().unwrap();
        log.errors.iter().filter(|(at, _)| *at >= start).cloned().collect()
    }
}

impl Drop for Calls<'_> {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

/// Calls until the test is over.
fn call(client: &Netns, log: &Mutex<Log>, is_over: &AtomicBool) {
    client.enter().unwrap();
    while !is_over.load(Ordering::Relaxed) {
        let start = Instant::now();
        let answer = http::get_within(SocketAddr::from((RECEIVED, PORT)), "/cgi-bin/who", CALL_TIMEOUT);
        let mut log = log.lock().unwrap();
        match answer {
            Ok(answer) => {
                let (guest, peer) = answer.split_once(' ').expect("the guest and the client");
                // httpd listens on a socket of IPv6, which also takes IPv4.
                assert_eq!(peer, format!("[::ffff:{CLIENT}]"));
                log.answers.push((start, guest.to_owned()));
            }
            Err(error) => log.errors.push((start, error.to_string())),
        }
    }
}

/// Runs a command in a machine. `number` makes its answer on the console differ from earlier ones.
fn run(machine: &mut Guest, number: u32, command: &str) {
    let line = format!("{command}; : {number}");
    machine.type_line(&line);
    machine.wait_line(&format!("did: {line}"), PATIENCE);
}

fn service() -> Value {
    Service::new("received").cluster_ips(["10.96.0.40"]).tcp("http", PORT, TARGET).load_balancer_ip(RECEIVED).into()
}

fn slice(guests: &[&str]) -> Value {
    Slice::v4("received").tcp("http", TARGET).ready(guests).into()
}

#[test]
fn no_call_through_ipvs_fails_that_ipvs_itself_does_not_lose() {
    let sandbox = Sandbox::for_test();
    let outside = Outside::start(&sandbox);
    let client = sandbox.empty_neighbour();
    sandbox.ip(&format!(
        "link add {BRIDGE} type bridge\naddress add {ROUTER}/24 dev {BRIDGE}\nlink set {BRIDGE} up\n\
         route add {RECEIVED} via {BALANCER} dev {BRIDGE}\n\
         link add client type veth peer name eth0 netns {}\naddress add {GATEWAY}/24 dev client\nlink set client up\n",
        client.path().display()
    ));
    sandbox.ip_in(
        &client,
        &format!("address add {CLIENT}/24 dev eth0\nlink set eth0 up\nroute add default via {GATEWAY}\n"),
    );
    sandbox.netns().run(|| fs::write("/proc/sys/net/ipv4/ip_forward", "1")).unwrap();
    outside.control_plane.apply([service(), slice(&GUESTS)]);
    let status = json!({"status": service()["status"]}).to_string();
    let patch = ["patch", "service", "received", "--subresource=status", "--type=merge", "-p", &status];
    outside.control_plane.kubectl(&patch, "");

    let kernel = Kernel::at(path_from_env("CPROXY_BALANCER_KERNEL", "cargo xtask vm test"));
    let program = ["/usr/sbin/ipvsadm", "/sbin/ipvsadm"].map(Path::new);
    let program = program.into_iter().find(|path| path.is_file()).expect("ipvsadm is not installed");
    let mut balancer = GuestImage::new(&sandbox, &kernel)
        .on_bridge(BRIDGE, &format!("{BALANCER}/24"), ROUTER)
        .program_of_host(program)
        .program("guest/balancer", BALANCER_INIT)
        .parameter("GUEST_INIT=/guest/balancer")
        .parameter(format!("RECEIVED={RECEIVED}"))
        .start();
    let mut guests = GUESTS.map(|address| {
        let image = outside.guest().parameter(API_SERVER).parameter(format!("cproxy.receive={RANGE}"));
        let image = image.on_bridge(BRIDGE, &format!("{address}/24"), ROUTER);
        let image = image.file("www/name", address).program("www/cgi-bin/who", ANSWER);
        image.program("etc/cproxy/workload", SERVER).start()
    });
    balancer.wait_line("balancer: stands", PATIENCE);
    guests.iter_mut().for_each(|guest| drop(guest.wait_line("server: listens", PATIENCE)));
    let [one, other] = GUESTS;
    let mut number = 0;
    let mut run = |machine: &mut Guest, command: &str| {
        number += 1;
        run(machine, number, command);
    };
    let real = |verb: &str, guest: &str, rest: &str| format!("ipvsadm {verb} -t {RECEIVED}:80 -r {guest} {rest}");
    for guest in GUESTS {
        run(&mut balancer, &real("-a", guest, "-g -w 1"));
    }

    let (log, is_over) = (Mutex::default(), AtomicBool::new(false));
    thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| call(&client, &log, &is_over));
        }
        let (calls, start) = (Calls { log: &log, is_over: &is_over }, Instant::now());
        calls.wait_for(&GUESTS);
        // The balancer takes a backend away, which then leaves the Service, and brings it back.
        let drained =
            format!("sleep 1; until ipvsadm -Ln | grep '{one}:' | grep -q ' 0 *[0-9]* *$'; do sleep 0.2; done");
        run(&mut balancer, &real("-e", one, "-g -w 0"));
        run(&mut balancer, &drained);
        run(&mut balancer, &real("-d", one, ""));
        outside.control_plane.apply([slice(&[other])]);
        run(&mut guests[0], &format!("until ! cproxy get receive | grep -q {RECEIVED}; do sleep 0.2; done"));
        calls.wait_for(&[other]);
        outside.control_plane.apply([slice(&GUESTS)]);
        run(&mut guests[0], &format!("until cproxy get receive | grep -q {RECEIVED}; do sleep 0.2; done"));
        run(&mut balancer, &real("-a", one, "-g -w 1"));
        calls.wait_for(&GUESTS);
        // A pod that is not ready still gets what the balancer sends.
        let unready = Slice::v4("received").tcp("http", TARGET).endpoint(Endpoint::not_ready(one)).ready([other]);
        outside.control_plane.apply([unready.into()]);
        calls.wait_for(&GUESTS);
        // An agent is killed, and its supervisor starts it again.
        run(&mut guests[1], "kill -9 $(pidof cproxy)");
        calls.wait_for(&GUESTS);
        run(&mut guests[1], "until cproxy status >/dev/null 2>&1; do sleep 0.2; done");
        calls.wait_for(&GUESTS);
        let errors = calls.errors_since(start);
        assert!(errors.is_empty(), "{errors:?}");
        // A backend fails. IPVS sends to it until it is told.
        guests[0].power_off();
        thread::sleep(Duration::from_secs(2));
        run(&mut balancer, &real("-d", one, ""));
        let told = Instant::now();
        calls.wait_for(&[other]);
        let errors = calls.errors_since(told);
        assert!(errors.is_empty(), "{errors:?}");
    });
    let log = log.into_inner().unwrap();
    println!("{} calls were answered; {} failed while a backend was gone", log.answers.len(), log.errors.len());
    report("10 behind IPVS with direct routing", "no call fails but those to a backend that is gone");
}
