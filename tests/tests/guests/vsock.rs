//! A guest without a network, whose agent reaches the API server through a vsock device: by a proxy on the host, which
//! has credentials, by cproxy-relay, or by a forwarder.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    thread,
};

use cproxy_tests::{
    control_plane::{self, ControlPlane, NODE},
    guest::{GuestImage, Kernel},
    manifest::http_service,
    outside::SECRETS,
    relay_server::RelayServer,
    sandbox::Sandbox,
};
use tokio::{net, runtime, sync::oneshot};

use crate::common::PATIENCE;

/// Port of the host, whose CID is always 2.
const PORT: u32 = 6443;
const API_SERVER: &str = "cproxy.apiserver=vsock://2:6443";

/// Address of a pod inside the guest.
const POD: &str = "10.244.0.9";

/// Workload that serves as a pod, and is a client of Services that come later.
const WORKLOAD: &str = r#"#!/bin/sh
ip address add 10.244.0.9/32 dev lo
mkdir /www && echo "the pod in the guest" >/www/index.html
busybox httpd -p 10.244.0.9:8080 -h /www
echo "workload: the table is complete"
cproxy wait --timeout 120s --for default/first && echo "workload: first is $(wget -qO- http://10.96.0.30)"
cproxy wait --timeout 120s --for default/second && echo "workload: second is $(wget -qO- http://10.96.0.31)"
"#;

/// Workload that ends at once.
const IDLE: &str = "#!/bin/sh\necho 'workload: the table is complete'\n";

/// Workload that ends once the host has looked.
const WAITING: &str =
    "#!/bin/sh\necho 'workload: the table is complete'\ncproxy wait --timeout 120s --for default/end\n";

/// A guest with neither a network card nor credentials.
fn guest<'s>(sandbox: &'s Sandbox, workload: &str) -> GuestImage<'s> {
    let image = GuestImage::new(sandbox, &Kernel::from_env()).without_network().parameter(API_SERVER);
    image.parameter(format!("cproxy.node-name={NODE}")).program("etc/cproxy/workload", workload)
}

/// A forwarder of the host between a guest's vsock and the API server, which ends when the returned value is dropped.
fn forwarder(socket: &Path) -> oneshot::Sender<()> {
    let (end, mut ended) = oneshot::channel();
    let listener = UnixListener::bind(socket).unwrap();
    listener.set_nonblocking(true).unwrap();
    thread::spawn(move || {
        let runtime = runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            let listener = net::UnixListener::from_std(listener).unwrap();
            loop {
                let (mut guest, _) = tokio::select! {
                    accepted = listener.accept() => accepted.unwrap(),
                    _ = &mut ended => break,
                };
                drop(tokio::spawn(async move {
                    let mut server = net::TcpStream::connect((control_plane::ADDRESS, control_plane::PORT)).await?;
                    tokio::io::copy_bidirectional(&mut guest, &mut server).await
                }));
            }
        });
    });
    end
}

#[test]
fn an_agent_without_a_network_follows_the_api_server_through_vsock() {
    let sandbox = Sandbox::for_test();
    let control_plane = ControlPlane::start(&sandbox);
    let image = guest(&sandbox, WORKLOAD).with_vsock();
    let socket = image.vsock_socket(PORT).display().to_string();
    let mut first_proxy = control_plane.start_kubectl_proxy(&socket);
    let mut guest = image.start();
    guest.wait_line("workload: the table is complete", PATIENCE);

    control_plane.apply(http_service("first", "10.96.0.30", [POD]));
    guest.wait_line("workload: first is the pod in the guest", PATIENCE);

    // The proxy's successor is cproxy-relay, which listens at the same path.
    first_proxy.kill();
    control_plane.apply(http_service("second", "10.96.0.31", [POD]));
    let relay = RelayServer::new(&sandbox).kubeconfig(control_plane.kubeconfig_for("admin"));
    let _relay = relay.listen(format!("unix://{socket}")).without_authentication().start();
    guest.wait_line("workload: second is the pod in the guest", PATIENCE);
    let console = guest.wait_end(PATIENCE);
    assert!(console.contains("init: ending with 0"), "{console}");
}

/// Gets a path from a port of the guest.
fn get_from_guest(entrance: &Path, port: u32, path: &str) -> io::Result<String> {
    let mut stream = UnixStream::connect(entrance)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(format!("CONNECT {port}\n").as_bytes())?;
    let mut answer = BufReader::new(stream.try_clone()?);
    let mut response = String::new();
    answer.read_line(&mut response)?;
    assert!(response.starts_with("OK "), "{response:?}");
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: guest\r\n\r\n").as_bytes())?;
    response.clear();
    answer.read_to_string(&mut response)?;
    let (head, body) = response.split_once("\r\n\r\n").ok_or(io::ErrorKind::UnexpectedEof)?;
    if head.starts_with("HTTP/1.1 200 ") { Ok(body.to_owned()) } else { Err(io::Error::other(head.to_owned())) }
}

#[test]
fn the_host_reads_metrics_and_health_checks_through_vsock() {
    let sandbox = Sandbox::for_test();
    let control_plane = ControlPlane::start(&sandbox);
    let image = guest(&sandbox, WAITING).with_vsock();
    let image = image.parameter("cproxy.metrics-bind-address=vsock://4294967295:10249");
    let image = image.parameter("cproxy.healthz-bind-address=vsock://4294967295:10256");
    let _proxy = control_plane.start_kubectl_proxy(&image.vsock_socket(PORT).display().to_string());
    let entrance = image.vsock_entrance();
    let mut guest = image.start();
    guest.wait_line("workload: the table is complete", PATIENCE);
    assert_eq!(get_from_guest(&entrance, 10256, "/readyz").unwrap(), "ok");
    let metrics = get_from_guest(&entrance, 10249, "/metrics").unwrap();
    assert!(metrics.contains("\ncproxy_ready 1\n"), "{metrics}");
    control_plane.apply(http_service("end", "10.96.0.30", [POD]));
    let console = guest.wait_end(PATIENCE);
    assert!(console.contains("init: ending with 0"), "{console}");
}

#[test]
fn tls_passes_through_a_forwarder_behind_vsock() {
    let sandbox = Sandbox::for_test();
    let control_plane = ControlPlane::start(&sandbox);
    let image = guest(&sandbox, IDLE)
        .with_vsock()
        .parameter(format!("cproxy.tls-server-name={}", control_plane::NAME))
        .file(&format!("{SECRETS}/token"), control_plane.token("cproxy"))
        .file(&format!("{SECRETS}/ca.crt"), control_plane.ca_pem());
    let _forwarder = forwarder(&image.vsock_socket(PORT));
    let console = image.start().wait_end(PATIENCE);
    assert!(console.contains("workload: the table is complete"), "{console}");
    assert!(console.contains("init: ending with 0"), "{console}");
}

#[test]
fn a_vsock_address_that_cannot_be_reached_is_named() {
    let sandbox = Sandbox::for_test();
    let guest = || guest(&sandbox, IDLE);
    for (image, reason) in [(guest(), "no vsock device"), (guest().with_vsock(), "timed out")] {
        let (_, line) = image.start().wait_line(reason, PATIENCE);
        assert!(line.contains("WARN") && line.contains("vsock://2:6443"), "{line}");
    }
}
