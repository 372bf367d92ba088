//! The demonstration in a virtual machine: from power-on to a workload that resolves a Service's name, with the API
//! server, the pods and the cluster's nameserver outside. Every printed statement is checked first.

use std::{process::ExitCode, time::Duration};

use cproxy_tests::{
    outside::{API_SERVER, Outside, pod},
    sandbox::Sandbox,
    supervised,
};

/// Prefix of the names of all objects of the demonstration.
const PREFIX: &str = "cproxy-demo";

/// Limit on every wait, longer than any takes.
const PATIENCE: Duration = Duration::from_secs(180);

/// Script of the workload.
const WORKLOAD: &str = r#"
address=$(nslookup web.default.svc.cluster.local | sed -n 's/^Address: *\(10.*\)/\1/p')
echo "workload: web.default.svc is $address (asked 10.96.0.10, a ClusterIP)"
echo "workload: http://web.default.svc answered $(wget -qO- http://web.default.svc)"
echo "kernel: $(uname -r)"
echo "memory: $(sed -n 's/^MemTotal: *//p' /proc/meminfo)"
"#;

/// Console messages with their meanings, in the required order.
const EVENTS: [(&str, &str); 7] = [
    ("guest: the kernel has started", "the kernel has started its first process"),
    ("following the API server", "cproxy runs, and asks the API server for Services"),
    ("attached to", "cproxy's programs are attached"),
    ("ready after", "cproxy's table is complete"),
    ("init: running", "the workload starts"),
    ("workload: web.default.svc is 10.96.0.20", ""),
    ("workload: http://web.default.svc answered pod-", ""),
];

fn main() -> ExitCode {
    supervised::run(PREFIX, demonstrate)
}

fn demonstrate() -> Result<(), String> {
    let sandbox = Sandbox::new(PREFIX);
    println!("Everything happens in a network namespace of its own; nothing of this machine is changed.\n");
    println!(
        "1. Outside of the VM: etcd, kube-apiserver, two pods that serve HTTP, and a nameserver that is a pod, too"
    );
    let outside = Outside::start(&sandbox);
    println!("     default/web           10.96.0.20:80   to pod-1 and pod-2");
    println!("     kube-system/kube-dns  10.96.0.10:53   to a dnsmasq that knows web.default.svc.cluster.local");
    println!("2. A VM is switched on: 1 CPU, emulated without KVM (many times slower than a real one), 128 MiB");
    println!("     its command line has {API_SERVER}; its files are what `cargo xtask image initramfs` makes,");
    println!("     with a token, the authority's certificate and the workload added");
    let mut guest = pod(outside.guest().parameter(API_SERVER), WORKLOAD).start();
    println!("     {:>9}", "seconds");
    println!("     {:>9.2}  power on", 0.0);
    let mut latest = Duration::ZERO;
    for (needle, meaning) in EVENTS {
        let (at, line) = guest.wait_line(needle, PATIENCE);
        if at < latest {
            return Err(format!("{line:?} came too early"));
        }
        latest = at;
        println!("     {:>9.2}  {}", at.as_secs_f64(), if meaning.is_empty() { &line } else { meaning });
    }
    let console = guest.wait_end(PATIENCE);
    let said = |label| console.lines().find_map(|line| line.strip_prefix(label)).unwrap_or("?");
    let (end, _) = guest.wait_line("init: ending with 0", PATIENCE);
    println!("     {:>9.2}  the workload has ended, and the VM with it", end.as_secs_f64());
    println!("     its kernel was {}, its memory {}", said("kernel: "), said("memory: "));
    let directory = sandbox.dir().to_owned();
    drop((guest, outside));
    drop(sandbox);
    if directory.exists() {
        return Err(format!("{} should be gone and is not", directory.display()));
    }
    println!("The VM, the control plane and all else are gone: nothing is left.");
    Ok(())
}
