//! Kernels without a feature that cproxy needs: one line names it, nothing waits, and the policy decides.

use std::time::{Duration, Instant};

use cproxy_tests::{
    guest::{GuestImage, Kernel},
    sandbox::Sandbox,
};

use crate::common::{PATIENCE, values_of};

/// Words of the message for each missing option.
const WORDS: [(&str, &str); 2] = [("CGROUP_BPF", "CONFIG_CGROUP_BPF"), ("CGROUPS", "cgroup2")];

#[test]
fn a_missing_kernel_option_is_reported_in_one_line() {
    let kernels =
        std::env::var("CPROXY_LACKING_KERNELS").expect("CPROXY_LACKING_KERNELS is not set: run `cargo xtask vm test`");
    let sandbox = Sandbox::for_test();
    for kernel in kernels.split(',') {
        let (option, directory) = kernel.split_once('=').unwrap();
        let words = WORDS.iter().find(|(name, _)| *name == option).unwrap().1;
        for (policy, code) in [("fail", 1), ("start", 0)] {
            let started = Instant::now();
            let image = GuestImage::new(&sandbox, &Kernel::at(directory))
                .parameter("cproxy.manifests=/etc/cproxy")
                .parameter("cproxy.timeout=300s")
                .parameter(format!("cproxy.on-timeout={policy}"))
                .program("etc/cproxy/workload", "#!/bin/sh\necho 'workload: running'\n");
            let console = image.start().wait_end(PATIENCE);
            assert!(started.elapsed() < Duration::from_secs(300), "the guest still waits: {console}");
            let line = console.lines().find(|line| line.starts_with("cproxy: cannot run here: "));
            assert!(line.is_some_and(|line| line.contains(words)), "{option}: {console}");
            assert_eq!(values_of(&console, "workload: ").is_empty(), code == 1, "{console}");
            assert!(console.contains(&format!("init: ending with {code}")), "{console}");
        }
    }
}
