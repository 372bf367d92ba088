//! A guest whose state was saved and is restored later, while its clock and its connections stay behind.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use cproxy_tests::{
    guest::{Guest, GuestImage},
    http,
    manifest::http_service,
    outside::{API_SERVER, Outside},
    sandbox::Sandbox,
};

use crate::common::{PATIENCE, values_of};

/// Two pods in the guest itself, so that connections to them need no network, and a client of the Service `moves`.
/// Lines from the console are commands.
const WORKLOAD: &str = r#"#!/bin/sh
stty -echo
exec 4<&0
pod() {
    ip address add $2/32 dev lo
    mkdir /www-$1 && echo $1 >/www-$1/index.html
    busybox httpd -p $2:8080 -h /www-$1
}
pod old 10.244.0.9
pod new 10.244.0.10
echo "restore: $(cproxy check | grep ' restore ')"
(while read -r line <&4; do eval "$line"; done) &
last=
while :; do
    answer=$(timeout 10 wget -qO- http://10.96.0.30 2>&1) || echo "workload: failed: $answer"
    [ "$answer" = "$last" ] || echo "workload: now $answer"
    last=$answer
    sleep 0.05
done
"#;

/// Waits for commands, so that clones need little time.
const CLONE: &str = r#"#!/bin/sh
stty -echo
echo "workload: waits"
while read -r line; do eval "$line"; done
"#;

/// ClusterIP of the Service with several pods, and their number.
const MANY_VIP: &str = "10.96.0.31";
const MANY: u8 = 10;

/// Number of copies of one snapshot.
const CLONES: usize = 20;

/// Smallest number of pods that clones which choose at random are connected to; fewer have a probability of 1e-9.
const DIFFERENT_MIN: usize = 4;

/// Time after which a dead connection is noticed without a sign of the restore, by the kernel's probes.
const UNNOTICED: Duration = Duration::from_secs(15);

fn image<'s>(outside: &Outside<'s>, workload: &str) -> GuestImage<'s> {
    outside.guest().parameter(API_SERVER).with_generation_id().program("etc/cproxy/workload", workload)
}

/// Time from now on until the client reaches the other pod.
fn wait_for_new(guest: &mut Guest) -> Duration {
    let start = Instant::now();
    guest.wait_line("workload: now new", PATIENCE);
    start.elapsed()
}

fn text(guest: &Guest) -> String {
    guest.lines().iter().map(|(_, line)| format!("{line}\n")).collect()
}

fn assert_caught_up(guest: &Guest, took: Duration, sign: &str) {
    let console = text(guest);
    assert_eq!(values_of(&console, "workload: failed"), [""; 0], "{console}");
    assert!(console.contains(sign), "{console}");
    assert!(took < UNNOTICED, "{took:?}: {console}");
}

#[test]
fn a_restored_guest_catches_up_when_its_network_is_back_or_its_clock_is_set() {
    let sandbox = Sandbox::for_test();
    let outside = Outside::start(&sandbox);
    outside.control_plane.apply(http_service("moves", "10.96.0.30", ["10.244.0.9"]));
    let image = image(&outside, WORKLOAD);
    let mut guest = image.start_to_save();
    guest.wait_line("workload: now old", PATIENCE);
    let has_generation_id = text(&guest).contains("VM generation id and");
    let saved = guest.save(&image);
    outside.control_plane.apply(http_service("moves", "10.96.0.30", ["10.244.0.10"]));

    // The clock stays wrong.
    let mut guest = saved.restore();
    guest.set_cable(false);
    guest.resume();
    guest.type_line("echo \"workload: was restored\"");
    guest.wait_line("workload: was restored", PATIENCE);
    guest.type_line("until [ \"$(cat /sys/class/net/eth0/carrier)\" = 0 ]; do sleep 0.1; done; echo 'cable: no'");
    guest.wait_line("cable: no", PATIENCE);
    guest.set_cable(true);
    let took = wait_for_new(&mut guest);
    println!("the table was right {took:?} after the network was back");
    assert_caught_up(&guest, took, "choosing from a new seed");
    drop(guest);

    // Another sign, and the network is there from the start.
    let mut guest = saved.restore();
    guest.resume();
    let sign = if has_generation_id {
        "the VM was restored from a snapshot"
    } else {
        guest.type_line("date -s @$(($(date +%s) + 60))");
        "the clock was set, perhaps after a restore of the VM"
    };
    guest.wait_line(sign, PATIENCE);
    let took = wait_for_new(&mut guest);
    assert_caught_up(&guest, took, sign);
    guest.type_line("cproxy reseed; cproxy wait --timeout 120s && echo \"ready: again\"");
    guest.wait_line("ready: again", PATIENCE);
    assert!(text(&guest).contains("ready again after"), "{}", text(&guest));
}

#[test]
fn clones_of_one_snapshot_spread_over_the_backends() {
    let sandbox = Sandbox::for_test();
    let outside = Outside::start(&sandbox);
    let pods: Vec<_> = (1..=MANY).map(|number| format!("10.244.1.{number}")).collect();
    sandbox.add_addresses(&pods);
    let _servers: Vec<_> = pods.iter().map(|pod| http::serve(&sandbox, (pod.as_str(), 8080), pod)).collect();
    outside.control_plane.apply(http_service("many", MANY_VIP, pods.iter().map(String::as_str)));
    let image = image(&outside, CLONE);
    let mut guest = image.start_to_save();
    guest.wait_line("workload: waits", PATIENCE);
    let saved = guest.save(&image);

    let mut chosen = BTreeSet::new();
    for _ in 0..CLONES {
        let mut clone = saved.restore();
        clone.resume();
        clone.type_line(&format!("cproxy reseed && echo \"clone: $(wget -qO- http://{MANY_VIP})\""));
        let (_, line) = clone.wait_line("clone: 10.244.1.", PATIENCE);
        chosen.insert(line);
    }
    println!("{CLONES} clones have chosen {} of {MANY} pods", chosen.len());
    assert!(chosen.len() >= DIFFERENT_MIN, "{chosen:?}");
}
