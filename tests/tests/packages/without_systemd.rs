//! Installation, upgrade and removal on systems without systemd: Debian with OpenRC, with runit and with the package's
//! init script alone, and a root with busybox alone.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use cproxy_tests::{
    http,
    init_systems::{self, steps},
    sandbox::Sandbox,
};

use crate::machine::{Machine, VIP, agent_package, debian, release_file, repacked};

const SETTING: &str = "echo 'manifests = /etc/cproxy/manifests' >>/etc/cproxy/cproxy.conf";

/// Installs the package, and a setting.
fn install(machine: &Machine<'_>) {
    let package = machine.bring(&agent_package());
    let said = machine.does(&format!("dpkg --install {package}"));
    assert!(!said.contains("systemctl"), "{said}");
    machine.does(SETTING);
}

/// Adds the other init systems.
fn add_init_systems(machine: &Machine<'_>) {
    let archive = machine.bring(&init_systems::archive());
    machine.does(&format!("tar -C / --keep-directory-symlink -xf {archive}"));
}

/// Installs a newer package while calls go on. Its agent then serves.
fn upgrade(machine: &Machine<'_>, sandbox: &Sandbox, change: impl FnOnce(&Path)) {
    let newer = machine.bring(&repacked(sandbox, "9.0.0-1", change));
    machine.without_interruption(|| machine.does(&format!("dpkg --install {newer}")));
    assert_new_agent(machine);
}

/// Asserts that an agent serves and that it is none of a program that was replaced.
fn assert_new_agent(machine: &Machine<'_>) {
    machine.does("cproxy wait --timeout 60s");
    let programs = machine.does("for pid in $(pidof cproxy); do readlink /proc/$pid/exe; done");
    assert!(!programs.is_empty() && programs.lines().all(|path| path == "/usr/bin/cproxy"), "{programs}");
    machine.assert_served();
}

/// Removes the package, with agent and table.
fn remove(machine: &Machine<'_>) {
    let said = machine.does("dpkg --remove cproxy && ! pidof cproxy");
    assert!(said.contains("removing the table"), "{said}");
    http::get((VIP, 80), "/").expect_err("no ClusterIP is served any more");
}

#[test]
fn debian_with_openrc_installs_upgrades_and_removes_the_package() {
    let sandbox = Sandbox::for_test();
    let machine = Machine::idle(&sandbox, &debian());
    let _server = machine.with_service();
    add_init_systems(&machine);
    // In place of the scripts of the package initscripts, which mount file systems.
    machine.does(
        "printf '#!/sbin/openrc-run\\nstart() { :; }\\n' >/etc/init.d/localmount; chmod +x /etc/init.d/localmount",
    );
    machine.does("mkdir -p /etc/conf.d; openrc sysinit; openrc boot; openrc default; rc-status --runlevel");
    install(&machine);
    machine.does(&steps("dpkg-divert"));
    machine.does(&steps("rc-update add cproxy"));
    machine.does("rc-service cproxy start && cproxy wait --timeout 60s && rc-service cproxy status");
    machine.assert_served();
    assert_rotated(&machine, "logrotate --force /etc/logrotate.conf", "rc-service cproxy reload");

    upgrade(&machine, &sandbox, |files| {
        let script = files.join("etc/init.d/cproxy");
        fs::write(&script, fs::read_to_string(&script).unwrap() + "# Of the next version.\n").unwrap();
    });
    machine.does("rc-service cproxy status");
    remove(&machine);
    machine.does("dpkg --purge cproxy && test ! -e /etc/runlevels/default/cproxy-wait");
    machine.does("test ! -e /usr/bin/cproxy && test -e /etc/cproxy/manifests/web.json");
}

/// As where no runlevel is known.
#[test]
fn debian_with_the_init_script_alone_installs_upgrades_and_removes_the_package() {
    let sandbox = Sandbox::for_test();
    let machine = Machine::idle(&sandbox, &debian());
    let _server = machine.with_service();
    install(&machine);
    // The end of the pipe is not waited for, although the agent goes on.
    machine.does("timeout 60 sh -c '/etc/init.d/cproxy start | cat' && /etc/init.d/cproxy status");
    machine.assert_served();
    upgrade(&machine, &sandbox, |_| ());
    remove(&machine);
    // The script stays, with nothing to start.
    let said = machine.does("/etc/init.d/cproxy start");
    assert!(said.contains("/usr/bin/cproxy is not installed"), "{said}");
    // The process of a stale pid file is left alone.
    machine.does("sleep 100 & echo $! >/run/cproxy.pid; /etc/init.d/cproxy stop; kill $!");
}

#[test]
fn debians_logrotate_rotates_the_log_of_the_init_script() {
    let sandbox = Sandbox::for_test();
    let machine = Machine::idle(&sandbox, &debian());
    let _server = machine.with_service();
    add_init_systems(&machine);
    install(&machine);
    let rotate = "logrotate --verbose /etc/logrotate.conf 2>&1";
    let said = machine.does(rotate);
    assert!(said.contains("/var/log/cproxy.log does not exist -- skipping"), "{said}");
    machine.does("timeout 60 sh -c '/etc/init.d/cproxy start'");
    assert_rotated(&machine, "logrotate --force /etc/logrotate.conf", "/etc/init.d/cproxy reload");

    // A long log does not wait for the end of the week.
    let said = machine.does(rotate);
    assert!(said.contains("log does not need rotating"), "{said}");
    machine.does("yes 'a line' | head -c 11M >>/var/log/cproxy.log");
    assert_rotated(&machine, "logrotate /etc/logrotate.conf", "/etc/init.d/cproxy reload");
    machine.does("zcat /var/log/cproxy.log.2.gz | grep 'the agent keeps'");
    for _ in 0..6 {
        machine.does("echo 'a line' >>/var/log/cproxy.log; logrotate --force /etc/logrotate.conf");
    }
    let files = "cproxy.log cproxy.log.1 cproxy.log.2.gz cproxy.log.3.gz cproxy.log.4.gz";
    assert_eq!(machine.does("cd /var/log; echo cproxy.log*").trim(), files);

    remove(&machine);
    machine.does("test -e /etc/logrotate.d/cproxy && dpkg --purge cproxy && test ! -e /etc/logrotate.d/cproxy");
    assert_eq!(machine.does("ls /var/log").matches("cproxy").count(), 0);
}

/// Asserts that what is in the log is in the next file after a rotation, and that the agent goes on in the log.
fn assert_rotated(machine: &Machine<'_>, rotate: &str, reload: &str) {
    let size = |file: &str| machine.does(&format!("stat -c %s {file}")).trim().parse::<u64>().unwrap();
    let before = size("/var/log/cproxy.log");
    assert!(before > 0);
    machine.does(&format!("cp /var/log/cproxy.log /var/tmp/before && {rotate}"));
    // The agent may have written meanwhile.
    machine.does("head -c $(stat -c %s /var/tmp/before) /var/log/cproxy.log.1 | cmp - /var/tmp/before");
    let left = size("/var/log/cproxy.log");
    assert!(left < before, "{left} bytes after {before}");
    machine.does(&format!(
        "{reload} || exit; tries=0; until grep -a 'settings were read again' /var/log/cproxy.log; do
             tries=$((tries + 1)); [ $tries -lt 600 ] || {{ cat /var/log/cproxy.log; exit 1; }}
             sleep 0.1
         done"
    ));
    // A writer that does not append would leave a hole of zeros.
    assert_eq!(machine.does("tr -dc '\\000' </var/log/cproxy.log | wc -c").trim(), "0");
}

#[test]
fn debian_with_runit_installs_upgrades_and_removes_the_package() {
    let sandbox = Sandbox::for_test();
    let machine = Machine::idle(&sandbox, &debian());
    let _server = machine.with_service();
    add_init_systems(&machine);
    install(&machine);
    machine.does("ln -s default /etc/runit/runsvdir/current; runsvdir /etc/service >/dev/null 2>&1 &");
    machine.does(&steps("ln -s /etc/sv/cproxy"));
    machine.does("cproxy wait --timeout 60s");
    machine.assert_served();
    upgrade(&machine, &sandbox, |_| ());
    remove(&machine);
}

#[test]
fn a_root_with_busybox_alone_installs_upgrades_and_removes_the_archive() {
    let sandbox = Sandbox::for_test();
    let root = busybox_root(&sandbox);
    let machine = Machine::idle(&sandbox, &root);
    let _server = machine.with_service();
    machine.does("! ls /lib /lib64 /usr/lib");
    let archive = machine.bring(&release_file("cproxy-rootfs-", ".tar.gz"));
    machine.does(&format!("zcat {archive} | tar -C / -xf -"));
    machine.does(SETTING);
    machine.does("mkdir -p /etc/init.d && ln -s /usr/share/cproxy/init.d /etc/init.d/S30cproxy");
    // As under nohup: no shell may trap a signal that it was started without.
    machine.does("trap '' HUP; /etc/init.d/S30cproxy start && /etc/init.d/S30cproxy status && cproxy get services");
    machine.assert_served();
    assert_rotated(&machine, &steps("cproxy.log.1"), "/etc/init.d/S30cproxy reload");

    // Without etc, which has the settings.
    machine.without_interruption(|| {
        machine.does(&format!("zcat {archive} | tar -C / -xf - usr"));
        machine.does("/etc/init.d/S30cproxy restart")
    });
    assert_new_agent(&machine);

    machine.does("/etc/init.d/S30cproxy stop && cproxy cleanup && ! pidof cproxy");
    http::get((VIP, 80), "/").expect_err("no ClusterIP is served any more");
}

/// The release's initramfs without the agent: busybox and empty directories.
fn busybox_root(sandbox: &Sandbox) -> PathBuf {
    let root = sandbox.dir().join("busybox");
    fs::create_dir(&root).unwrap();
    let initramfs = release_file("cproxy-initramfs-", ".cpio.gz");
    let mut unpack = Command::new("sh");
    unpack.args(["-c", "gzip -dc \"$1\" | busybox cpio -i", "sh"]).arg(initramfs).current_dir(&root);
    let unpacked = unpack.output().unwrap();
    assert!(unpacked.status.success(), "{unpacked:?}");
    fs::remove_file(root.join("usr/bin/cproxy")).unwrap();
    ["var/log", "var/tmp"].iter().for_each(|directory| fs::create_dir_all(root.join(directory)).unwrap());
    root
}
