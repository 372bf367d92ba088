//! The scripts for guests without systemd: the first process, and the System V init script.

use cproxy_tests::sandbox::Sandbox;

use crate::root::{boot, guest, program};

/// Mask of ignored signals in the form of /proc/PID/status: a bit for each, from signal 1 on.
const SIGINT_AND_SIGQUIT: u64 = 0b110;

#[test]
fn init_runs_the_workload_when_services_work() {
    let sandbox = Sandbox::for_test();
    let root = guest(&sandbox);
    let workload = "echo \"arguments: $*\"; echo '{}' | /etc/cproxy/hook && echo hook passed; cproxy get services\n\
                    kill \"$(pidof cproxy)\"; sleep 2; cproxy wait && echo it is back\n\
                    grep SigIgn /proc/self/status; echo \"variables: $(env | grep -c CPROXY)\"\nexit 7\n";
    program(&root, "etc/cproxy/workload", workload);
    let cmdline = "quiet nomodules cproxy.manifests=/etc/cproxy/manifests reboot=k -- /etc/cproxy/workload a b\n";
    let (_, log) = boot(&sandbox, &root, cmdline, "/init");
    for line in ["arguments: a b", "hook passed", "10.244.0.1:8080", "it is back", "init: ending with 7"] {
        assert!(log.contains(line), "{line:?} is not in:\n{log}");
    }
    // The caller of the tests may ignore others, as nohup does.
    let ignored = log.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    assert_eq!(ignored.map(|signals| signals & SIGINT_AND_SIGQUIT), Some(0), "signals are ignored:\n{log}");
    assert!(log.contains("variables: 0"), "settings are in the workload's environment:\n{log}");

    program(&root, "bin/stubborn", "trap 'echo told to end; exit 3' TERM; kill -INT 1; while :; do sleep 0.1; done\n");
    let cmdline = "cproxy.manifests=/etc/cproxy/manifests -- /bin/stubborn\n";
    let (_, log) = boot(&sandbox, &root, cmdline, "/init");
    assert!(log.contains("told to end") && log.contains("init: ending with 3"), "{log}");

    let (_, log) = boot(&sandbox, &root, "cproxy.manifests=/etc/cproxy/manifests -- /bin/nowhere\n", "/init");
    assert!(log.contains("cproxy: /bin/nowhere: No such file") && log.contains("init: ending with 127"), "{log}");

    let (_, log) = boot(&sandbox, &root, "cproxy.apiserver=https://192.0.2.1 cproxy.timeout=100ms\n", "/init");
    assert!(log.contains("init: ending with 1") && !log.contains("arguments"), "{log}");
    let cmdline = "cproxy.manifests=/none cproxy.timeout=100ms cproxy.for=web cproxy.on-timeout=start -- \
                   /bin/echo in spite of that\n";
    let (_, log) = boot(&sandbox, &root, cmdline, "/init");
    assert!(log.contains("expected a name like default/web; waiting without it"), "{log}");
    assert!(log.contains("\nin spite of that\n") && log.contains("init: ending with 0"), "{log}");
}

#[test]
fn the_sysv_script_starts_stops_and_reports_its_status() {
    let sandbox = Sandbox::for_test();
    let root = guest(&sandbox);
    let text = "export PATH=/usr/bin:/bin:/usr/sbin:/sbin\n\
                mount -t sysfs sysfs /sys; mount -t cgroup2 cgroup2 /sys/fs/cgroup; mount -t bpf bpf /sys/fs/bpf\n\
                mkdir -p /var/log\n\
                does() { echo \"does $1\"; sh /etc/cproxy/init.d \"$1\"; echo \"$1: $?\"; }\n\
                does status; does start; does status\n\
                answers() { until cproxy get config >/dev/null 2>&1; do sleep 0.1; done; }\n\
                kill -9 \"$(pidof cproxy)\"; answers; cproxy wait; does status\n\
                does restart; answers; cproxy wait; does reload\n\
                until grep -o 'settings were read again' /var/log/cproxy.log; do sleep 0.1; done\n\
                does status; does stop; does status; cproxy get services; does other\n";
    program(&root, "etc/cproxy/first", text);
    let (_, log) = boot(&sandbox, &root, "cproxy.manifests=/etc/cproxy/manifests\n", "/etc/cproxy/first");
    let codes: Vec<_> =
        log.lines().filter(|line| line.split_once(": ").is_some_and(|(_, code)| code.len() == 1)).collect();
    let expected = [
        "status: 3",
        "start: 0",
        "status: 0",
        "status: 0",
        "restart: 0",
        "reload: 0",
        "status: 0",
        "stop: 0",
        "status: 3",
        "other: 2",
    ];
    assert_eq!(codes, expected, "{log}");
    assert!(log.contains("settings were read again"), "{log}");
    assert!(log.contains("10.244.0.1:8080"), "the table is gone:\n{log}");

    let text = "export PATH=/usr/bin:/bin:/usr/sbin:/sbin; rm /var/log/cproxy.log\n\
                does() { sh /etc/cproxy/init.d \"$1\"; echo \"$1: $?\"; }\n\
                does start; until grep -qs disabled /var/log/cproxy.log; do sleep 0.1; done\n\
                while pidof cproxy; do sleep 0.1; done > /var/log/pids\n\
                does status; pidof cproxy || echo none runs; grep -c disabled /var/log/cproxy.log\n";
    program(&root, "etc/cproxy/first", text);
    let (_, log) = boot(&sandbox, &root, "cproxy.enabled=false\n", "/etc/cproxy/first");
    assert!(log.ends_with("start: 0\ncproxy is not running\nstatus: 3\nnone runs\n1\n"), "{log}");
}
