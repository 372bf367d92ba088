//! Firecracker's boot protocol as far as QEMU has it: an ELF kernel that is entered directly, memory-mapped virtio
//! devices that the command line names, a root file system on a disk; no firmware, no PCI, no ACPI, no initramfs. The
//! disk is made by the steps of docs/integrations/firecracker.md.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use cproxy_tests::{
    guest::{INITRAMFS_VARIABLE, KERNEL_VARIABLE, ROOTFS_VARIABLE},
    outside::Outside,
    process::Daemon,
    sandbox::{Placement, Sandbox},
};

use crate::common::{PATIENCE, report, values_of};

/// The machine: without firmware and its tables, so that the kernel knows only what its command line says. Certificates
/// need the time, which Firecracker gives by KVM and this machine by its clock chip.
const MACHINE: &str = "microvm,acpi=off,rtc=on,isa-serial=on,auto-kernel-cmdline=on";

/// Command line as for Firecracker, with its boot arguments.
const COMMAND_LINE: &str = "console=ttyS0 reboot=k panic=1 quiet root=/dev/vda rw init=/init \
                            ip=10.0.2.15::10.0.2.2:255.255.255.0::eth0:off \
                            cproxy.kubeconfig=/etc/cproxy/kubeconfig cproxy.node-name=node-1 cproxy.for=default/web";

/// Workload that prints what the machine is, and the answer of a Service.
const WORKLOAD: &str = "#!/bin/sh
echo \"root: $(grep ' / ' /proc/mounts | tail -1 | cut -d' ' -f3)\"
echo \"pci: $(ls /sys/bus/pci/devices 2>/dev/null | wc -l)\"
echo \"acpi: $(ls /sys/firmware/acpi/tables 2>/dev/null | wc -l)\"
echo \"virtio: $(ls -l /sys/bus/virtio/devices | grep -c virtio-mmio)\"
echo \"workload: web is $(wget -qO- http://10.96.0.20/)\"
";

fn path_of(variable: &str) -> PathBuf {
    std::env::var_os(variable).map(PathBuf::from).expect("a variable is missing: run `cargo xtask vm test`")
}

fn shell(directory: &Path, script: &str, arguments: &[&Path]) {
    let status = Command::new("sh").args(["-euc", script, "sh"]).args(arguments).current_dir(directory).status();
    assert!(status.unwrap().success(), "{script}");
}

/// A disk with busybox, the overlay, the first process and the files of this guest.
fn disk(directory: &Path, files: &[(&str, String)]) -> PathBuf {
    let root = directory.join("ROOTFS");
    fs::create_dir_all(&root).unwrap();
    let initramfs = path_of(INITRAMFS_VARIABLE);
    shell(&root, "gzip -dc \"$1\" | busybox cpio -i 2>/dev/null", &[&initramfs]);
    shell(&root, "tar -xf \"$1\"", &[&path_of(ROOTFS_VARIABLE)]);
    let init = Path::new(env!("CARGO_MANIFEST_DIR")).join("../images/init");
    shell(directory, "install -m 755 \"$1\" ROOTFS/init", &[&init]);
    for (name, content) in files {
        fs::write(root.join("etc/cproxy").join(name), content).unwrap();
    }
    fs::set_permissions(root.join("etc/cproxy/workload"), fs::Permissions::from_mode(0o755)).unwrap();
    shell(directory, "mke2fs -q -t ext4 -d ROOTFS disk.ext4 64M", &[]);
    directory.join("disk.ext4")
}

#[test]
fn a_guest_boots_from_an_elf_kernel_and_a_disk_without_firmware_pci_and_acpi() {
    let kernel = path_of(KERNEL_VARIABLE).join("vmlinux");
    let sandbox = Sandbox::for_test();
    let outside = Outside::start(&sandbox);
    let kubeconfig = fs::read_to_string(outside.control_plane.agent_kubeconfig()).unwrap();
    let mut kubeconfig: serde_json::Value = serde_json::from_str(&kubeconfig).unwrap();
    let authority = outside.control_plane.ca_pem();
    kubeconfig["clusters"][0]["cluster"]["certificate-authority"] = "/etc/cproxy/ca.crt".into();
    let files = [("kubeconfig", kubeconfig.to_string()), ("ca.crt", authority), ("workload", WORKLOAD.to_owned())];
    let disk = disk(sandbox.dir(), &files);

    let mut qemu = Command::new("qemu-system-x86_64");
    qemu.args(["-M", MACHINE, "-cpu", "qemu64,+rdrand", "-accel", "tcg", "-smp", "1", "-m", "128"]);
    qemu.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio"]);
    qemu.arg("-kernel").arg(&kernel).args(["-append", COMMAND_LINE]);
    qemu.arg("-drive").arg(format!("id=root,if=none,format=raw,file={}", disk.display()));
    qemu.args(["-device", "virtio-blk-device,drive=root"]);
    qemu.args(["-netdev", "user,id=net", "-device", "virtio-net-device,netdev=net"]);
    let mut guest = Daemon::spawn(&sandbox, "microvm", Placement::Unhooked, qemu);
    let ended = guest.wait(PATIENCE);
    let console = guest.log().replace('\r', "");
    assert!(ended.is_some(), "it has not ended: {console}");
    for (what, is) in [("root: ", "ext4"), ("pci: ", "0"), ("acpi: ", "0"), ("virtio: ", "2")] {
        assert_eq!(values_of(&console, what), [is], "{what}{console}");
    }
    let answer = values_of(&console, "workload: ");
    assert!(["web is pod-1", "web is pod-2"].contains(&answer.concat().as_str()), "{console}");
    assert!(console.contains("init: ending with 0"), "{console}");
    report("9 ELF kernel, memory-mapped virtio, ext4 root, without firmware, PCI and ACPI", "boots, Services work");
}
