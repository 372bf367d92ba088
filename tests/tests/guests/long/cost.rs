//! Cost of cproxy in a small guest: memory, and time until the workload starts.

use std::{collections::BTreeMap, time::Duration};

use cproxy_tests::{
    outside::{API_SERVER, Outside},
    population::Shape,
    sandbox::Sandbox,
    writer::Writer,
};

use crate::common::{report, values_of};

/// Limit on a run, since a list of five thousand Services takes long on an emulated processor.
const PATIENCE: Duration = Duration::from_secs(600);

/// Memory budget in a guest of 128 MiB, for 100 Services with 10 endpoints each.
const BUDGET_KIB: u64 = 12 * 1024;

/// Number of timed starts.
const TURNS: usize = 3;

const WITHOUT_CPROXY: [&str; 2] = ["GUEST_INIT=/guest/without", "quiet"];
const WITH_CPROXY: [&str; 2] = [API_SERVER, "cproxy.timeout=300s"];

/// Workload that prints its start time, the free memory, and the agent's part of the used memory.
const MEASURE: &str = "#!/bin/sh
read -r uptime rest </proc/uptime
echo \"uptime: $uptime\"
sleep 3
sync
echo 3 >/proc/sys/vm/drop_caches
sed -n 's/^MemFree: *\\([0-9]*\\) kB/free: \\1/p' /proc/meminfo
for status in /proc/[0-9]*/status; do
    grep -q '^Name:.cproxy$' $status && sed -n 's/^RssAnon:[^0-9]*\\([0-9]*\\) kB/anonymous: \\1/p' $status
done
true
";

/// Workload on the same machine without cproxy: its file is removed, and only the workload's mounts are made.
const WITHOUT: &str = "#!/bin/sh
rm /usr/bin/cproxy
mount -t sysfs sysfs /sys; mount -t devtmpfs devtmpfs /dev; mount -t tmpfs tmpfs /run
mount -t cgroup2 cgroup2 /sys/fs/cgroup
ip link set lo up
/etc/cproxy/workload
poweroff -f
";

/// Measurements of one guest.
struct Measured {
    uptime: f64,
    free_kib: u64,
    anonymous_kib: u64,
}

fn measure(outside: &Outside<'_>, parameters: &[&str]) -> Measured {
    let image = outside.guest().program("etc/cproxy/workload", MEASURE).program("guest/without", WITHOUT);
    let image = parameters.iter().fold(image, |image, parameter| image.parameter(*parameter));
    let console = image.start().wait_end(PATIENCE);
    let number = |label| values_of(&console, label).first().map_or_else(|| "0".to_owned(), |text| (*text).to_owned());
    assert_ne!(number("free: "), "0", "{console}");
    Measured {
        uptime: number("uptime: ").parse().unwrap(),
        free_kib: number("free: ").parse().unwrap(),
        anonymous_kib: number("anonymous: ").parse().unwrap(),
    }
}

#[test]
fn a_small_guest_pays_little_memory() {
    let sandbox = Sandbox::for_test();
    let outside = Outside::start(&sandbox);
    let writer = Writer::new(&outside.control_plane);
    let mut measured = BTreeMap::new();
    measured.insert("without", measure(&outside, &WITHOUT_CPROXY));
    let before = ["cproxy.apiserver=https://192.0.2.1:6444", "cproxy.timeout=2s", "cproxy.on-timeout=start"];
    measured.insert("before sync", measure(&outside, &before));
    for (name, before, services) in [("100 x 10", 0, 100), ("5,000 x 10", 100, 5000)] {
        writer.create(Shape::new(5000, 10).objects(before..services));
        measured.insert(name, measure(&outside, &WITH_CPROXY));
        if services == 100 {
            report_time(&outside);
        }
    }
    let without = &measured["without"];
    let cost = |name: &str| without.free_kib.saturating_sub(measured[name].free_kib);
    let mib = |kib: u64| format!("{:.1} MiB", kib as f64 / 1024.0);
    for (number, name) in ["before sync", "100 x 10", "5,000 x 10"].into_iter().enumerate() {
        let anonymous = measured[name].anonymous_kib;
        report(
            &format!("9{number} memory with cproxy instead of without, {name}"),
            &format!("{}, of it the agent's own {}", mib(cost(name)), mib(anonymous)),
        );
    }
    assert!(cost("100 x 10") <= BUDGET_KIB, "{} KiB", cost("100 x 10"));
}

/// Reports the least time of several starts, in turn: other load of the machine can only increase a time.
fn report_time(outside: &Outside<'_>) {
    let least = |times: &[f64]| times.iter().copied().fold(f64::INFINITY, f64::min);
    let turns = |_| [WITHOUT_CPROXY, WITH_CPROXY].map(|parameters| measure(outside, &parameters).uptime);
    let (without, with): (Vec<_>, Vec<_>) = (0..TURNS).map(turns).map(|[without, with]| (without, with)).unzip();
    report(
        "99 seconds from the kernel's start to the workload's, without and with cproxy at 100 x 10, emulated",
        &format!("{:.2}, {:.2}", least(&without), least(&with)),
    );
}
