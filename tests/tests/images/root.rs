//! The initramfs as a root directory, whose first process runs in namespaces and a cgroup of its own, as in a guest.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use cproxy_tests::{
    manifest::{self, Endpoint, Service, Slice},
    process::Daemon,
    sandbox::{Placement, Sandbox},
};

use crate::{command, image, output, repository};

const RUN: Duration = Duration::from_secs(60);

/// The initramfs, unpacked into the sandbox, with a Service to serve.
pub(crate) fn guest(sandbox: &Sandbox) -> PathBuf {
    image("initramfs", "022", sandbox.dir());
    let root = sandbox.dir().join("guest");
    fs::create_dir(&root).unwrap();
    let unpack = "gzip -dc ../initramfs.cpio.gz | busybox cpio -i";
    output(command("sh", &["-c", unpack]).current_dir(&root));
    // A shell opens it for programs in the background.
    output(command("mknod", &["-m", "666"]).arg(root.join("dev/null")).args(["c", "1", "3"]));
    fs::create_dir(root.join("etc/cproxy/manifests")).unwrap();
    let service = Service::new("web").cluster_ips(["10.96.0.10"]).tcp("http", 80, 8080);
    let slice = Slice::v4("web").tcp("http", 8080).endpoint(Endpoint::ready("10.244.0.1"));
    manifest::write(&root.join("etc/cproxy/manifests"), "web.json", [service.into(), slice.into()]);
    for (from, to) in
        [("rootfs/usr/share/cproxy/init.d", "etc/cproxy/init.d"), ("kata/prestart/10-cproxy", "etc/cproxy/hook")]
    {
        fs::copy(repository().join("images").join(from), root.join(to)).unwrap();
    }
    root
}

pub(crate) fn program(root: &Path, name: &str, text: &str) {
    let path = root.join(name);
    fs::write(&path, format!("#!/bin/sh\n{text}")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Runs a program of the guest as its first process, with this kernel command line.
pub(crate) fn boot(sandbox: &Sandbox, root: &Path, cmdline: &str, first: &str) -> (Option<i32>, String) {
    let cmdline = manifest::write_text(sandbox.dir(), "cmdline", cmdline);
    let mut unshare = command("unshare", &["--mount", "--pid", "--fork", "--kill-child", "--cgroup", "sh", "-euc"]);
    unshare.arg(
        "mount -t proc proc \"$1/proc\"; mount --bind \"$2\" \"$1/proc/cmdline\"; \
         mount --bind /dev/null \"$1/proc/sys/kernel/ctrl-alt-del\"; \
         exec env -i --default-signal PATH=\"$PATH\" chroot \"$1\" \"$3\"",
    );
    unshare.arg("sh").arg(root).arg(cmdline).arg(first);
    let mut guest = Daemon::spawn(sandbox, "guest", Placement::Hooked, unshare);
    let status = guest.wait(RUN);
    (status.and_then(|status| status.code()), guest.log())
}
