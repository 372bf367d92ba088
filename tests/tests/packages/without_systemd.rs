//! Installation, upgrade and removal on systems without systemd: Debian with OpenRC, and a root with busybox alone.

use std::{env, fs, path::PathBuf, process::Command};

use cproxy_documents::blocks;
use cproxy_tests::{guest::path_from_env, http, sandbox::Sandbox};

use crate::machine::{Machine, VIP, agent_package, debian, release_file, repacked};

/// Variable with the archive of the init systems.
const INIT_SYSTEMS_VARIABLE: &str = "CPROXY_INIT_SYSTEMS";
/// Page with the steps of an installation.
const PAGE: &str = "docs/integrations/plain-node.md";
const SETTING: &str = "echo 'manifests = /etc/cproxy/manifests' >>/etc/cproxy/cproxy.conf";

#[test]
fn debian_with_openrc_installs_upgrades_and_removes_the_package() {
    let sandbox = Sandbox::for_test();
    let machine = Machine::idle(&sandbox, &debian());
    let _server = machine.with_service();
    let archive = machine.bring(&path_from_env(INIT_SYSTEMS_VARIABLE, "cargo xtask test"));
    machine.does(&format!("tar -C / --keep-directory-symlink -xf {archive}"));
    // In place of the scripts of the package initscripts, which mount file systems.
    machine.does(
        "printf '#!/sbin/openrc-run\\nstart() { :; }\\n' >/etc/init.d/localmount; chmod +x /etc/init.d/localmount",
    );
    machine.does("mkdir -p /etc/conf.d; openrc sysinit; openrc boot; openrc default; rc-status --runlevel");

    let package = machine.bring(&agent_package());
    let said = machine.does(&format!("dpkg --install {package}"));
    assert!(!said.contains("systemctl"), "{said}");
    machine.does(SETTING);
    machine.does(&steps("dpkg-divert"));
    machine.does(&steps("rc-update add cproxy"));
    machine.does("rc-service cproxy start && cproxy wait --timeout 60s && rc-service cproxy status");
    machine.assert_served();

    let pids = machine.does("pidof cproxy");
    let newer = machine.bring(&repacked(&sandbox, "9.0.0-1", |files| {
        let script = files.join("etc/init.d/cproxy");
        fs::write(&script, fs::read_to_string(&script).unwrap() + "# Of the next version.\n").unwrap();
    }));
    let said = machine.without_interruption(|| machine.does(&format!("dpkg --install {newer}")));
    machine.does("rc-service cproxy status && cproxy wait --timeout 60s");
    assert_ne!(machine.does("pidof cproxy"), pids, "the new agent runs: {said}");
    machine.assert_served();

    let said = machine.does("dpkg --remove cproxy");
    assert!(said.contains("removing the table"), "{said}");
    machine.does("! pidof cproxy");
    http::get((VIP, 80), "/").expect_err("no ClusterIP is served any more");
    machine.does("dpkg --purge cproxy && test ! -e /etc/runlevels/default/cproxy-wait");
    machine.does("test ! -e /usr/bin/cproxy && test -e /etc/cproxy/manifests/web.json");
}

/// The init script of the package alone, as where no runlevel is known.
#[test]
fn debian_without_a_running_init_uses_the_packages_script() {
    let sandbox = Sandbox::for_test();
    let machine = Machine::idle(&sandbox, &debian());
    let _server = machine.with_service();
    let package = machine.bring(&agent_package());
    machine.does(&format!("dpkg --install {package}"));
    machine.does(SETTING);
    // The end of the pipe is not waited for, although the agent goes on.
    machine.does("timeout 60 sh -c '/etc/init.d/cproxy start | cat' && /etc/init.d/cproxy status");
    machine.assert_served();
    let pids = machine.does("pidof cproxy");
    let newer = machine.bring(&repacked(&sandbox, "9.0.0-1", |_| ()));
    machine.without_interruption(|| machine.does(&format!("dpkg --force-confold --install {newer}")));
    assert_ne!(machine.does("pidof cproxy"), pids, "the new agent runs");
    machine.assert_served();

    machine.does("dpkg --remove cproxy && ! pidof cproxy");
    http::get((VIP, 80), "/").expect_err("no ClusterIP is served any more");
    // The script stays, with nothing to start.
    let said = machine.does("/etc/init.d/cproxy start");
    assert!(said.contains("/usr/bin/cproxy is not installed"), "{said}");
    // The process of a stale pid file is left alone.
    machine.does("sleep 100 & echo $! >/run/cproxy.pid; /etc/init.d/cproxy stop; kill $!");
}

#[test]
fn runit_gets_the_new_agent_and_loses_it_with_the_package() {
    let sandbox = Sandbox::for_test();
    let machine = Machine::idle(&sandbox, &debian());
    let _server = machine.with_service();
    let archive = machine.bring(&path_from_env(INIT_SYSTEMS_VARIABLE, "cargo xtask test"));
    machine.does(&format!("tar -C / --keep-directory-symlink -xf {archive}"));
    let package = machine.bring(&agent_package());
    machine.does(&format!("dpkg --install {package}"));
    machine.does(SETTING);
    machine.does("ln -s default /etc/runit/runsvdir/current; runsvdir /etc/service >/dev/null 2>&1 &");
    machine.does(&steps("ln -s /etc/sv/cproxy"));
    machine.does("cproxy wait --timeout 60s");
    machine.assert_served();
    let pids = machine.does("pidof cproxy");
    let newer = machine.bring(&repacked(&sandbox, "9.0.0-1", |_| ()));
    machine.without_interruption(|| machine.does(&format!("dpkg --force-confold --install {newer}")));
    assert_ne!(machine.does("pidof cproxy"), pids, "the new agent runs");
    machine.does("dpkg --remove cproxy && ! pidof cproxy");
    http::get((VIP, 80), "/").expect_err("no ClusterIP is served any more");
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
    machine.does("/etc/init.d/S30cproxy start && /etc/init.d/S30cproxy status && cproxy get services");
    machine.assert_served();

    let pids = machine.does("pidof cproxy");
    // Without etc, which has the settings.
    machine.without_interruption(|| {
        machine.does(&format!("zcat {archive} | tar -C / -xf - usr"));
        machine.does("/etc/init.d/S30cproxy restart")
    });
    assert_ne!(machine.does("pidof cproxy"), pids, "the new agent runs");
    machine.assert_served();

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

/// The page's commands that contain these words.
fn steps(words: &str) -> String {
    let page = fs::read_to_string(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..").join(PAGE)).unwrap();
    let block = blocks(&page).into_iter().find(|block| block.text.contains(words));
    block.unwrap_or_else(|| panic!("{PAGE} has no block with {words:?}")).text
}
