//! Installation, upgrade and removal of Debian's packages.

use std::{fs, process::Command};

use cproxy_tests::{http, manifest, older::older_agents, sandbox::Sandbox};
use serde_json::json;

use crate::machine::{Machine, VIP, agent_package, release_file, repacked};

const SETTINGS: &str = "/etc/cproxy/cproxy.conf";

/// Adds a setting to the agent's file, as an administrator does.
fn configure(machine: &Machine<'_>) {
    machine.does(&format!("echo 'manifests = /etc/cproxy/manifests' >>{SETTINGS}"));
}

/// Installs the agent's package, configures it and starts the agent.
pub(crate) fn install_and_start(machine: &Machine<'_>) {
    let package = machine.bring(&agent_package());
    machine.does(&format!("dpkg --install {package}"));
    configure(machine);
    machine.start();
}

#[test]
fn a_package_is_installed_and_its_agent_starts_when_it_is_told() {
    let sandbox = Sandbox::for_test();
    let machine = Machine::boot(&sandbox);
    let _server = machine.with_service();
    let package = machine.bring(&agent_package());
    let said = machine.does(&format!("dpkg --install {package}"));
    assert!(said.contains("settings are in /etc/cproxy/cproxy.conf; then run"), "{said}");
    assert_eq!(machine.does("dpkg --verify cproxy"), "");
    assert_eq!(machine.does("systemctl is-enabled cproxy").trim(), "enabled");
    assert_eq!(machine.run("systemctl is-active cproxy").stdout.trim(), "inactive");
    let units = machine.does("systemctl list-unit-files --no-legend 'cproxy*'");
    assert_eq!(units.lines().count(), 2, "systemd takes nothing for another unit: {units}");
    let conffiles = machine.does("dpkg-query --showformat '${Conffiles}' --show cproxy");
    for file in [SETTINGS, "/etc/init.d/cproxy", "/etc/logrotate.d/cproxy"] {
        assert!(conffiles.contains(file), "{file}: {conffiles}");
    }
    for file in [
        "/usr/share/man/man8/cproxy-run.8.gz",
        "/usr/share/bash-completion/completions/cproxy",
        "/usr/share/doc/cproxy/copyright",
        "/usr/share/doc/cproxy/licences.txt.gz",
        "/etc/rc2.d/S01cproxy",
    ] {
        machine.does(&format!("test -s {file}"));
    }
    configure(&machine);
    machine.start();
    machine.assert_served();
}

#[test]
fn an_upgrade_keeps_table_settings_and_the_state_of_the_service() {
    let sandbox = Sandbox::for_test();
    let machine = Machine::boot(&sandbox);
    let _server = machine.with_service();
    install_and_start(&machine);
    let pid = machine.does("systemctl show --property MainPID --value cproxy");

    // The package has another file of settings, too, and the administrator is not there to choose.
    let newer = repacked(&sandbox, "9.0.0-1", |files| {
        let settings = files.join(SETTINGS.trim_start_matches('/'));
        let text = fs::read_to_string(&settings).unwrap();
        fs::write(&settings, text + "# A setting of the next version.\n").unwrap();
    });
    let newer = machine.bring(&newer);
    machine.without_interruption(|| machine.does(&format!("dpkg --force-confold --install {newer}")));
    assert_ne!(machine.does("systemctl show --property MainPID --value cproxy"), pid, "the new agent runs");
    assert_eq!(machine.does("systemctl is-active cproxy").trim(), "active");
    assert!(machine.does(&format!("cat {SETTINGS}")).ends_with("manifests = /etc/cproxy/manifests\n"));
    machine.does(&format!("grep -q 'of the next version' {SETTINGS}.dpkg-dist"));
    machine.assert_served();

    // Neither a stopped nor a disabled service comes back by an upgrade.
    machine.does("systemctl disable --now cproxy");
    let newest = machine.bring(&repacked(&sandbox, "9.0.1-1", |_| ()));
    machine.without_interruption(|| machine.does(&format!("dpkg --force-confold --install {newest}")));
    assert_eq!(machine.run("systemctl is-active cproxy").stdout.trim(), "inactive");
    assert_eq!(machine.run("systemctl is-enabled cproxy").stdout.trim(), "disabled");
}

#[test]
fn a_removal_takes_the_table_away_and_leaves_what_the_administrator_made() {
    let sandbox = Sandbox::for_test();
    let machine = Machine::boot(&sandbox);
    let _server = machine.with_service();
    install_and_start(&machine);
    machine.does("systemctl enable cproxy-wait");
    machine.assert_served();

    let said = machine.does("dpkg --remove cproxy");
    assert!(said.contains("ClusterIPs end on this machine"), "{said}");
    http::get((VIP, 80), "/").expect_err("no ClusterIP is served any more");
    machine.does("! pidof cproxy");
    // The container runtime would not start with a link to a unit that is gone.
    assert_eq!(machine.does("find /etc/systemd -name 'cproxy-wait*'"), "");
    machine.does(&format!("grep -q manifests {SETTINGS}"));

    machine.does("dpkg --purge cproxy");
    machine.does(&format!("test ! -e {SETTINGS} && test ! -e /etc/init.d/cproxy"));
    machine.does("test -e /etc/cproxy/manifests/web.json");
    assert_eq!(machine.does("find /etc /usr /var/lib/systemd -name 'cproxy*' -not -path '/etc/cproxy*'"), "");
}

#[test]
fn a_removal_ends_a_network_policy() {
    let sandbox = Sandbox::for_test();
    let machine = Machine::boot(&sandbox);
    let _server = machine.with_service();
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "default", "name": "this"},
        "status": {"phase": "Running", "podIPs": [{"ip": "10.244.0.9"}]},
    });
    let policy = json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"namespace": "default", "name": "deny-all"},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]},
    });
    manifest::write(&machine.path("/etc/cproxy/manifests"), "policy.json", [pod, policy]);
    let package = machine.bring(&agent_package());
    machine.does(&format!("dpkg --install {package}"));
    configure(&machine);
    machine.does(&format!("printf 'policy = enforce\\npolicy-pod = default/this\\n' >>{SETTINGS}"));
    machine.start();
    assert!(machine.does("cproxy check").contains("the pod is isolated for ingress and egress"));

    let said = machine.does("dpkg --remove cproxy");
    assert!(said.contains("cproxy: removing the table and any network policy"), "{said}");
    machine.does("test ! -e /sys/fs/bpf/cproxy");
}

#[test]
fn an_upgrade_over_an_older_table_layout_interrupts_nothing_and_the_way_back_says_why_not() {
    let sandbox = Sandbox::for_test();
    let machine = Machine::boot(&sandbox);
    let _server = machine.with_service();
    let [older, _] = older_agents();
    let package = repacked(&sandbox, "0.0.1-1", |files| {
        fs::copy(&older.binary, files.join("usr/bin/cproxy")).unwrap();
    });
    let (before, now) = (machine.bring(&package), machine.bring(&agent_package()));
    machine.does(&format!("dpkg --install {before}"));
    configure(&machine);
    machine.start();
    assert!(machine.does("cproxy version").contains(&format!("layout {}", older.layout)));

    let said = machine.without_interruption(|| machine.does(&format!("dpkg --install {now}")));
    assert!(!said.contains("not ready"), "{said}");
    assert!(!machine.does("cproxy version").contains(&format!("layout {}", older.layout)));

    let said = machine.without_interruption(|| machine.does(&format!("dpkg --install {before}")));
    assert!(said.contains("going back from"), "{said}");
    assert!(said.contains("a table of before stays in force"), "{said}");
    assert!(said.contains("holds table layout") && said.contains("`cproxy cleanup"), "{said}");

    machine.without_interruption(|| machine.does(&format!("dpkg --install {now}")));
    assert_eq!(machine.does("systemctl is-active cproxy").trim(), "active");
}

#[test]
fn a_system_extension_brings_the_agent_to_a_system_without_packages() {
    let sandbox = Sandbox::for_test();
    let machine = Machine::boot(&sandbox);
    let _server = machine.with_service();
    // Its image needs a loop device, which this machine has not; a directory of the same content does not.
    let extensions = machine.path("/var/lib/extensions");
    fs::create_dir_all(&extensions).unwrap();
    let mut unpack = Command::new("unsquashfs");
    unpack.args(["-quiet", "-no-progress", "-dest"]).arg(extensions.join("cproxy"));
    let unpacked = unpack.arg(release_file("cproxy_", ".raw")).status().unwrap();
    assert!(unpacked.success());
    configure(&machine);
    machine.does("systemd-sysext merge && systemctl daemon-reload");
    let wants = machine.does("systemctl show multi-user.target --property Wants");
    assert!(wants.contains("cproxy.service"), "{wants}");
    machine.start();
    machine.assert_served();
    // It goes as it came.
    machine.does("systemctl stop cproxy && cproxy cleanup && systemd-sysext unmerge && test ! -e /usr/bin/cproxy");
}

#[test]
fn the_relays_package_is_installed_and_removed_apart() {
    let sandbox = Sandbox::for_test();
    let machine = Machine::boot(&sandbox);
    let package = machine.bring(&release_file("cproxy-relay_", ".deb"));
    let said = machine.does(&format!("dpkg --install {package}"));
    assert!(said.contains("put a kubeconfig at /etc/cproxy-relay/kubeconfig"), "{said}");
    assert_eq!(machine.run("systemctl is-enabled cproxy-relay").stdout.trim(), "disabled");
    machine.does("cproxy-relay version && test ! -e /usr/bin/cproxy");
    machine.does("dpkg --purge cproxy-relay");
    assert_eq!(machine.does("find /etc /usr -name 'cproxy*'"), "");
}
