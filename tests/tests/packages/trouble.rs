//! Packages where something is in their way: each message says what and why.

use std::{fs, process::Command};

use cproxy_tests::sandbox::Sandbox;

use crate::{
    lifecycle::install_and_start,
    machine::{Machine, agent_package, release_file, repacked},
};

#[test]
fn a_package_over_an_installation_by_hand_names_what_is_in_its_way() {
    let sandbox = Sandbox::for_test();
    let machine = Machine::boot(&sandbox);
    let _server = machine.with_service();
    // The documented way without packages, with the unit changed and another copy in PATH.
    let overlay = machine.bring(&release_file("cproxy-rootfs-", ".tar.gz"));
    machine.does(&format!(
        "tar -C / -xf {overlay} && echo 'manifests = /etc/cproxy/manifests' >>/etc/cproxy/cproxy.conf\n\
         cp /usr/lib/systemd/system/cproxy.service /etc/systemd/system/ && cp /usr/bin/cproxy /usr/local/bin/\n\
         ln -s /usr/share/cproxy/init.d /etc/init.d/cproxy && systemctl daemon-reload"
    ));
    machine.start();

    let package = machine.bring(&agent_package());
    let install = format!("dpkg --force-confold --install {package}");
    let said = machine.without_interruption(|| machine.does(&install));
    for expected in [
        "/usr/bin/cproxy (cproxy ",
        "was installed without a package; the package's replaces it",
        "/etc/systemd/system/cproxy.service is in force instead of the package's unit",
        "/usr/local/bin/cproxy comes before the package's /usr/bin/cproxy in PATH: remove it",
        "/etc/init.d/cproxy is a link made by hand",
    ] {
        assert!(said.contains(expected), "{expected}:\n{said}");
    }
    machine.does("grep -q '^manifests' /etc/cproxy/cproxy.conf && test ! -L /etc/init.d/cproxy");
    assert_eq!(machine.does("dpkg --verify cproxy | grep -v /etc/ || true"), "");
    machine.assert_served();
}

#[test]
fn a_half_finished_installation_says_what_is_missing_and_is_repaired_by_another() {
    let sandbox = Sandbox::for_test();
    let machine = Machine::boot(&sandbox);
    let package = machine.bring(&agent_package());
    machine.does(&format!("dpkg --unpack {package}"));
    let program = machine.path("/usr/bin/cproxy");
    let file = fs::OpenOptions::new().write(true).open(&program).unwrap();
    file.set_len(4096).unwrap();
    drop(file);

    let output = machine.run("dpkg --configure --pending");
    let said = output.stdout + &output.stderr;
    assert_ne!(output.code, 0, "{said}");
    assert!(
        said.contains("cproxy: /usr/bin/cproxy does not run") && said.contains("Install the package again"),
        "{said}"
    );
    assert!(machine.does("dpkg --status cproxy").contains("half-configured"));

    machine.does(&format!("dpkg --install {package}"));
    assert!(machine.does("dpkg --status cproxy").contains("Status: install ok installed"));
    assert_eq!(machine.does("dpkg --verify cproxy"), "");
}

/// Copy of the machine's root, in which an image is made.
const COPY: &str = "mkdir /image && cp -a /bin /etc /lib* /sbin /usr /var /image\n\
                    mkdir /image/dev /image/tmp /image/proc && mknod -m 666 /image/dev/null c 1 3";

/// An image is made in a root without a running system: nothing is started, and nothing of the host is touched.
#[test]
fn a_package_is_installed_and_removed_where_no_system_runs() {
    let sandbox = Sandbox::for_test();
    let machine = Machine::boot(&sandbox);
    let package = machine.bring(&agent_package());
    machine.does(COPY);
    let inside = |script: &str| machine.does(&format!("chroot /image sh -c '{script}'"));
    let said = inside(&format!("dpkg --install {package}"));
    assert!(!said.contains("systemctl"), "{said}");
    inside("test -L /etc/systemd/system/multi-user.target.wants/cproxy.service");
    machine.does("test ! -e /run/cproxy && test ! -e /etc/systemd/system/multi-user.target.wants/cproxy.service");
    let said = inside("dpkg --purge cproxy");
    assert!(!said.contains("removing the table"), "{said}");
}

/// A package in an image is upgraded with the machine's processes in sight.
#[test]
fn an_image_is_made_beside_a_running_agent() {
    let sandbox = Sandbox::for_test();
    let machine = Machine::boot(&sandbox);
    let _server = machine.with_service();
    let packages = [agent_package(), repacked(&sandbox, "9.0.0-1", |_| ())].map(|package| machine.bring(&package));
    machine.does(COPY);
    machine.does("mount --bind /proc /image/proc");
    install_and_start(&machine);
    let pid = machine.does("systemctl show --property MainPID --value cproxy");
    for package in packages {
        machine.without_interruption(|| machine.does(&format!("chroot /image dpkg --install {package}")));
    }
    machine.does("chroot /image dpkg --purge cproxy");
    assert_eq!(machine.does("systemctl show --property MainPID --value cproxy"), pid);
    machine.assert_served();
}

/// The shell of each system reads its scripts.
#[test]
fn shells_accept_the_scripts_of_packages() {
    let scripts = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../images/packages/scripts");
    for entry in fs::read_dir(scripts).unwrap() {
        let script = entry.unwrap().path();
        for shell in [&["dash"][..], &["bash", "--posix"], &["busybox", "sh"]] {
            let (program, arguments) = shell.split_first().unwrap();
            let status = Command::new(program).args(arguments).arg("-n").arg(&script).status().unwrap();
            assert!(status.success(), "{program}: {}", script.display());
        }
    }
}
