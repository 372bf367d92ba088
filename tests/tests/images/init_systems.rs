//! The service files for OpenRC, runit and s6, each under the real one in a root of its own: a workload starts after
//! Services work, a killed agent comes back, and a machine where cproxy is switched off is left alone.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use cproxy_tests::{
    init_systems::{self, steps},
    sandbox::Sandbox,
};

use crate::{
    output, repository,
    root::{boot, guest, program},
};

/// Settings with cproxy switched on and off. They are in the file: OpenRC mounts a /proc of its own, over the one with
/// the test's kernel command line.
const ON: &str = "manifests = /etc/cproxy/manifests\n";
const OFF: &str = "enabled = false\nmanifests = /etc/cproxy/manifests\n";

/// Start of each script: file systems, and helpers. `agent` prints the agent's process id: a service's check is a
/// process of the same program. `returned PID` tells whether there is another agent.
const PRELUDE: &str = "export PATH=/usr/bin:/bin:/usr/sbin:/sbin\n\
    mount -t sysfs sysfs /sys; mount -t cgroup2 cgroup2 /sys/fs/cgroup; mount -t bpf bpf /sys/fs/bpf\n\
    mkdir -p /var/log /etc/sv /var/cache /tmp\n\
    rm -rf /run/* /var/log/* /tmp/*; mkdir /run/service; : >/tmp/workload\n\
    does() { \"$@\" >/tmp/output 2>&1; echo \"$*: $?\"; cat /tmp/output >>/tmp/all; }\n\
    until_it() { n=0; until \"$@\" >/dev/null 2>&1; do n=$((n + 1)); [ $n -lt 300 ] || return 1; sleep 0.1; done; }\n\
    is_run() { [ \"$(tr '\\0' ' ' <\"/proc/$1/cmdline\")\" = '/usr/bin/cproxy run ' ]; }\n\
    agent() { for pid in $(pidof cproxy); do is_run \"$pid\" 2>/dev/null && echo \"$pid\"; done; }\n\
    returned() { new=$(agent); [ -n \"$new\" ] && [ \"$new\" != \"$1\" ]; }\n\
    has_gone() { [ -z \"$(agent)\" ]; }\n";

/// Script of a workload: the page's line, and a witness.
fn workload(rest: &str) -> String {
    let line = steps("cproxy wait || exit 1");
    format!("{line}[ ! -e /run/cproxy/ready ] || echo with Services >>/tmp/workload\n{rest}")
}

/// A root with the init systems and cproxy's service files.
fn root(sandbox: &Sandbox) -> PathBuf {
    let root = guest(sandbox);
    output(Command::new("tar").arg("-C").arg(&root).arg("-xf").arg(init_systems::archive()));
    let overlay = repository().join("images/rootfs/usr/share");
    output(Command::new("cp").arg("-R").arg(overlay).arg(root.join("usr")));
    root
}

/// Runs a script as the first process and returns its output.
fn run(sandbox: &Sandbox, root: &Path, settings: &str, script: &str) -> String {
    fs::write(root.join("etc/cproxy/cproxy.conf"), settings).unwrap();
    let failed = "[ ! -e /tmp/all ] || sed 's/^/    /' /tmp/all\n";
    program(root, "etc/cproxy/first", &format!("{PRELUDE}{script}{failed}"));
    boot(sandbox, root, "quiet\n", "/etc/cproxy/first").1
}

/// Lines of the output that start with this.
fn lines<'t>(log: &'t str, start: &str) -> Vec<&'t str> {
    log.lines().filter_map(|line| line.strip_prefix(start)).collect()
}

/// Asserts what all of them do: the workload comes after Services work, a killed agent comes back, a reload reaches it,
/// a restart is ready again, and a stop leaves the table.
fn assert_life(log: &str) {
    assert_eq!(lines(log, "workload: "), ["with Services"], "{log}");
    let expected = ["it is back", "settings were read again", "ready after a restart", "stopped"];
    assert_eq!(lines(log, "check: "), expected, "{log}");
    assert!(log.contains("10.244.0.1:8080"), "the table is gone:\n{log}");
}

#[test]
fn openrc_supervises_the_agent_and_starts_a_workload_when_services_work() {
    let sandbox = Sandbox::for_test();
    let root = root(&sandbox);
    let install = format!(
        "printf '#!/sbin/openrc-run\\nstart() {{\\n    /bin/workload\\n}}\\n' >/etc/init.d/containerd\n\
         printf '#!/sbin/openrc-run\\nstart() {{\\n    :\\n}}\\n' >/etc/init.d/localmount\n\
         chmod 755 /etc/init.d/*; rc-update add containerd default\n{}",
        steps("rc-update add cproxy")
    );
    program(&root, "bin/workload", &workload(""));
    fs::create_dir_all(root.join("etc/conf.d")).unwrap();
    let start = "openrc sysinit; openrc boot; openrc default\necho \"workload: $(cat /tmp/workload)\"\n";
    let script = format!(
        "{{\n{install}{start}}} 2>&1\ndoes rc-service cproxy status\n\
         old=$(agent); kill -9 \"$old\"; until_it returned \"$old\" && until_it cproxy get config && \\\n\
         echo 'check: it is back'\n\
         does rc-service cproxy status; cproxy wait; does rc-service cproxy reload\n\
         until_it grep 'settings were read again' /var/log/cproxy.log && echo 'check: settings were read again'\n\
         does rc-service cproxy restart; cproxy wait && echo 'check: ready after a restart'\n\
         does rc-service cproxy stop; has_gone && echo 'check: stopped'; does rc-service cproxy status\n\
         cproxy get services\ncproxy cleanup\n"
    );
    let log = run(&sandbox, &root, ON, &script);
    assert_life(&log);
    assert_eq!(
        lines(&log, "rc-service cproxy "),
        ["status: 0", "status: 0", "reload: 0", "restart: 0", "stop: 0", "status: 3"],
        "{log}"
    );

    let script = format!(
        "{{\n{start}}} 2>&1\nhas_gone && echo 'check: none runs'\n\
         echo \"said: $(grep -c disabled /var/log/cproxy.log)\"; does rc-service cproxy status\n\
         does rc-service containerd status; [ -e /run/cproxy ] || echo 'check: no run directory'\n\
         does rc-service cproxy stop; does rc-service cproxy status\n"
    );
    let log = run(&sandbox, &root, OFF, &script);
    assert_eq!(lines(&log, "check: "), ["none runs", "no run directory"], "{log}");
    assert_eq!(lines(&log, "said: "), ["1"], "it is not started again: {log}");
    assert_eq!(lines(&log, "rc-service cproxy "), ["status: 0", "stop: 0", "status: 3"], "{log}");
    assert_eq!(lines(&log, "rc-service containerd "), ["status: 0"], "{log}");
    assert!(log.contains("cproxy is switched off on this machine"), "{log}");
}

#[test]
fn runit_supervises_the_agent_and_starts_a_workload_when_services_work() {
    let sandbox = Sandbox::for_test();
    let root = root(&sandbox);
    program(&root, "bin/workload", &workload("exec sleep 1000\n"));
    // Debian's package makes the first link when it is installed.
    let start = format!(
        "ln -sfn default /etc/runit/runsvdir/current; rm -rf /etc/sv/* /etc/service/*\nmkdir /etc/sv/workload\n\
         cp /bin/workload /etc/sv/workload/run; ln -s /etc/sv/workload /etc/service/\n{}\
         runsvdir /etc/service >/dev/null 2>&1 &\nuntil_it [ -p /etc/sv/cproxy/supervise/control ]\n",
        steps("/etc/service/")
    );
    let script = format!(
        "{start}until_it [ -s /tmp/workload ]; echo \"workload: $(cat /tmp/workload)\"\n\
         does sv start cproxy; does sv status cproxy\n\
         old=$(agent); kill -9 \"$old\"; until_it returned \"$old\" && until_it cproxy get config && \\\n\
         echo 'check: it is back'\n\
         does sv start cproxy; does sv hup cproxy\n\
         until_it grep 'settings were read again' /var/log/cproxy/current && echo 'check: settings were read again'\n\
         does sv restart cproxy; cproxy wait && echo 'check: ready after a restart'\n\
         does sv stop cproxy; has_gone && echo 'check: stopped'\n\
         cproxy get services\ncproxy cleanup\n"
    );
    let log = run(&sandbox, &root, ON, &script);
    assert_life(&log);
    let codes: Vec<_> = log.lines().filter(|line| line.starts_with("sv ") && line.ends_with(": 0")).collect();
    assert_eq!(codes.len(), 6, "{log}");

    let script = format!(
        "{start}\
         is_down() {{ sv status cproxy | grep '^down:'; }}\n\
         until_it grep disabled /var/log/cproxy/current; until_it is_down && echo 'check: down'\n\
         sleep 2; has_gone && echo 'check: none runs'; [ -e /run/cproxy ] || echo 'check: no run directory'\n\
         echo \"said: $(grep -c disabled /var/log/cproxy/current)\"\n\
         until_it sh -c 'sv status workload | grep ^run:' && echo 'check: the workload runs'\n"
    );
    let log = run(&sandbox, &root, OFF, &script);
    assert_eq!(lines(&log, "check: "), ["down", "none runs", "no run directory", "the workload runs"], "{log}");
    assert_eq!(lines(&log, "said: "), ["1"], "it is not started again: {log}");
}

#[test]
fn s6_supervises_the_agent_and_starts_a_workload_when_services_work() {
    let sandbox = Sandbox::for_test();
    let root = root(&sandbox);
    program(&root, "bin/workload", &workload("exec sleep 1000\n"));
    let start = format!(
        "mkdir /run/service/workload; cp /bin/workload /run/service/workload/run\n\
         s6-svscan /run/service >/dev/null 2>&1 &\nuntil_it s6-svok /run/service/workload\n{}\
         until_it s6-svok /run/service/cproxy\n",
        steps("s6-svscanctl")
    );
    let script = format!(
        "{start}until_it [ -s /tmp/workload ]; echo \"workload: $(cat /tmp/workload)\"\n\
         does s6-svwait -U -t 30000 /run/service/cproxy; does s6-svstat -u /run/service/cproxy\n\
         old=$(agent); kill -9 \"$old\"; until_it returned \"$old\" && until_it cproxy get config && \\\n\
         echo 'check: it is back'\n\
         does s6-svwait -U -t 30000 /run/service/cproxy; does s6-svc -h /run/service/cproxy\n\
         until_it grep 'settings were read again' /var/log/cproxy/current && echo 'check: settings were read again'\n\
         does s6-svc -wR -T 30000 -r /run/service/cproxy; cproxy wait && echo 'check: ready after a restart'\n\
         does s6-svc -wD -T 10000 -d /run/service/cproxy; has_gone && echo 'check: stopped'\n\
         cproxy get services\ncproxy cleanup\n"
    );
    let log = run(&sandbox, &root, ON, &script);
    assert_life(&log);
    let codes: Vec<_> = log.lines().filter(|line| line.starts_with("s6-") && line.ends_with(": 0")).collect();
    assert_eq!(codes.len(), 6, "{log}");

    let script = format!(
        "{start}\
         is_down() {{ s6-svstat /run/service/cproxy | grep '^down'; }}\n\
         until_it grep disabled /var/log/cproxy/current; until_it is_down && echo 'check: down'\n\
         sleep 2; has_gone && echo 'check: none runs'; [ -e /run/cproxy ] || echo 'check: no run directory'\n\
         echo \"said: $(grep -c disabled /var/log/cproxy/current)\"\n\
         until_it s6-svwait -u -t 5000 /run/service/workload && echo 'check: the workload runs'\n"
    );
    let log = run(&sandbox, &root, OFF, &script);
    assert_eq!(lines(&log, "check: "), ["down", "none runs", "no run directory", "the workload runs"], "{log}");
    assert_eq!(lines(&log, "said: "), ["1"], "it is not started again: {log}");
}
