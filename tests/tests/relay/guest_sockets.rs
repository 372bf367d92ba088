//! Guests of a host, each with a Unix socket of its own.

use std::{
    fs,
    os::unix::{
        fs::{MetadataExt, chown},
        net::UnixListener,
    },
    path::Path,
};

use cproxy_tests::{manifest, process::eventually, sandbox::Sandbox};

use crate::{
    access::names,
    client::Client,
    fixture::{Cluster, PATIENCE, SERVICES},
};

/// User of a VMM that has given up its rights.
const VMM_USER: u32 = 64_999;

/// The host's side of a VM's vsock, as a VMM makes it.
fn start_vm(directory: &Path, name: &str) -> UnixListener {
    let directory = directory.join(name);
    fs::create_dir_all(&directory).unwrap();
    let path = directory.join("v.sock");
    let socket = UnixListener::bind(&path).unwrap();
    chown(&path, Some(VMM_USER), Some(VMM_USER)).unwrap();
    socket
}

#[test]
fn guests_that_come_later_are_served_and_seen_by_their_sockets() {
    let sandbox = Sandbox::for_test();
    let cluster = Cluster::shared(&sandbox);
    let vms = sandbox.dir().join("vm");
    let _early = start_vm(&vms, "a-1");
    let views = format!(
        "views:\n- {{name: a, match: {{unixPaths: ['{0}/a-*']}}, namespaces: [team-a]}}\n\
         - {{name: others, match: {{unixPaths: ['{0}/*']}}, namespaces: [team]}}\n",
        vms.display()
    );
    let views = manifest::write_text(sandbox.dir(), "views.yaml", &views);
    let listen = format!("unix://{}/*/v.sock_6443", vms.display());
    let mut relay = cluster.relay().listen(listen).without_authentication().arg("--views").arg(views).start();
    let socket = |name: &str| vms.join(name).join("v.sock_6443");
    let client = |name: &str| {
        let path = socket(name).display().to_string();
        Client::new(&sandbox, "http://localhost").args(["--unix-socket".to_owned(), path])
    };
    let wait_for = |name: &str| {
        eventually(PATIENCE, format!("the relay listens for {name}"), || {
            if client(name).is_refused("/readyz") { Err("not yet") } else { Ok(()) }
        });
    };
    wait_for("a-1");
    assert!(names(&client("a-1"), SERVICES).contains("team-a/web"));
    assert_eq!(fs::metadata(socket("a-1")).unwrap().uid(), VMM_USER, "the VMM may connect");

    let late = start_vm(&vms, "b-1");
    wait_for("b-1");
    let seen = names(&client("b-1"), SERVICES);
    assert!(seen.contains("team/web") && !seen.contains("team-a/web"), "{seen:?}");

    drop(late);
    fs::remove_file(vms.join("b-1/v.sock")).unwrap();
    eventually(PATIENCE, "the socket of a VM that has ended is removed", || {
        if socket("b-1").exists() { Err("not yet") } else { Ok(()) }
    });
    // A new VM of the same name has a directory of its own.
    fs::remove_dir_all(vms.join("b-1")).unwrap();
    let _again = start_vm(&vms, "b-1");
    wait_for("b-1");
    relay.terminate(PATIENCE);
    assert!(!socket("a-1").exists() && !socket("b-1").exists(), "{}", relay.tail());
}
