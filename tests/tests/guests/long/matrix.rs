//! Every socket call of the suite `matrix`, on this kernel.

use std::{path::PathBuf, time::Duration};

use cproxy_tests::{
    guest::{GuestImage, Kernel},
    process::cproxy_binary,
    sandbox::Sandbox,
};

use crate::common::{report, values_of};

/// Limit on a run of interpreted programs on an emulated processor.
const PATIENCE: Duration = Duration::from_secs(30 * 60);

#[test]
fn every_socket_call_is_as_on_any_other_kernel() {
    let sandbox = Sandbox::for_test();
    let console = run(GuestImage::new(&sandbox, &Kernel::from_env()).memory_mib(1024), "");
    let result = values_of(&console, "test result: ").first().copied().unwrap_or("it did not end");
    report("8 every socket call (suite `matrix`)", result.split("; 0 ignored").next().unwrap_or(result));
    assert_eq!(values_of(&console, "matrix: "), ["0"], "{console}");
}

/// Reports, without a limit. The times of the calls are instructions: the emulator makes each take a nanosecond.
#[test]
fn calls_are_counted_in_instructions() {
    let sandbox = Sandbox::for_test();
    let image = GuestImage::new(&sandbox, &Kernel::from_env()).memory_mib(1024).counting_instructions(0);
    let console = run(image, "cost::");
    assert_eq!(values_of(&console, "matrix: "), ["0"], "{console}");
    let measured = |call: &str, form: &str| {
        let label = format!("cost of {call}, {form}: ");
        let texts = values_of(&console, &label);
        let numbers = texts.first().and_then(|text| text.split_once(" and "));
        let (with, without) = numbers.unwrap_or_else(|| panic!("no {label:?}: {console}"));
        (with.parse::<f64>().unwrap(), without.parse::<f64>().unwrap())
    };
    for call in ["connect()", "sendto()"] {
        let shown = ["v4", "v6"].map(|form| {
            let (with, without) = measured(call, form);
            format!("{:.0} more, {:.3} times", with - without, with / without)
        });
        report(
            &format!("89 instructions of {call} to a ClusterIP, beside one to the pod without programs, IPv4; IPv6"),
            &shown.join("; "),
        );
    }
}

/// The kernel's LRU maps keep elements for each CPU.
#[test]
fn a_guest_with_many_cpus_remembers_as_many_peers() {
    let sandbox = Sandbox::for_test();
    let image = GuestImage::new(&sandbox, &Kernel::from_env()).memory_mib(2048).cpus(CPUS);
    let console = run(image, "replies_and_denials_of_many_peers");
    let is_line = |line: &&str| line.trim().ends_with(&format!("{CPUS} CPUs"));
    assert!(console.lines().any(|line| is_line(&line)), "{console}");
    assert_eq!(values_of(&console, "matrix: "), ["0"], "{console}");
}

/// CPUs of a large guest.
const CPUS: u32 = 16;

/// Runs the tests of the suite with a part of their names in a guest, and returns its console.
fn run(image: GuestImage<'_>, filter: &str) -> String {
    let matrix = std::env::var_os("CPROXY_MATRIX").map(PathBuf::from);
    let matrix = matrix.expect("CPROXY_MATRIX is not set: run `cargo xtask vm test`");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let ip = std::env::split_paths(&path).map(|directory| directory.join("ip")).find(|file| file.is_file());
    // Programs of the guest's architecture, if that is another one.
    let programs = std::env::var_os("CPROXY_GUEST_PROGRAMS").map(PathBuf::from);
    let workload = format!(
        "#!/bin/sh\nmkdir -p /tmp\nPATH=/usr/sbin:/usr/bin:/sbin:/bin:/host\nexport PATH\n\
         CPROXY_BIN=/usr/bin/cproxy {} {filter} --test-threads=1 --nocapture 2>&1\n",
        matrix.display()
    );
    let image = image
        .program_of_host(&matrix)
        .parameter("GUEST_INIT=/guest/matrix")
        .program("guest/matrix", format!("#!/bin/sh\n{SET_UP}\n/guest/workload\necho \"matrix: $?\"\npoweroff -f\n"))
        .program("guest/workload", workload);
    let image = match programs {
        Some(archive) => image.unpack(&archive, ""),
        None => image.program_of_host(&ip.expect("no program ip in PATH")),
    };
    assert!(cproxy_binary().is_file());
    image.start().wait_end(PATIENCE)
}

/// Set-up without an agent; the tests start their own.
const SET_UP: &str = "mount -t sysfs sysfs /sys; mount -t devtmpfs devtmpfs /dev; mount -t tmpfs tmpfs /run
mkdir -p /tmp /sys/fs/cgroup /sys/fs/bpf
mount -t cgroup2 cgroup2 /sys/fs/cgroup; mount -t bpf bpf /sys/fs/bpf
ip link set lo up";
