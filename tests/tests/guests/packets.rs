//! Packets as the guest's own tools see them: with the pod's address, as without a proxy.

use std::path::Path;

use cproxy_tests::{
    outside::{API_SERVER, Outside, pod},
    sandbox::Sandbox,
};

use crate::common::{PATIENCE, values_of};

/// Workload that records the packets of one request and one question to a nameserver, on any interface.
const WORKLOAD: &str = r#"
tcpdump -Z root -i any -n -l -q 'port 80 or port 8080 or port 53' > /run/packets 2> /run/says &
until grep -q 'listening on' /run/says; do [ -d /proc/$! ] || { cat /run/says; exit 1; }; sleep 0.1; done
echo "workload: web is $(wget -qO- http://web.default.svc)"
until grep -q '\.8080' /run/packets; do sleep 0.1; done
kill -INT $!; wait
sed 's/^/packet: /' /run/packets
"#;

#[test]
fn tcpdump_in_the_guest_shows_the_address_of_the_pod() {
    let sandbox = Sandbox::for_test();
    let outside = Outside::start(&sandbox);
    let program = ["/usr/bin/tcpdump", "/usr/sbin/tcpdump"].map(Path::new).into_iter().find(|path| path.is_file());
    let image = outside.guest().parameter(API_SERVER).program_of_host(program.expect("tcpdump is not installed"));
    // tcpdump looks up the user as whom it goes on.
    let image = image.file("etc/passwd", "root:x:0:0:root:/:/bin/sh\n").file("etc/group", "root:x:0:\n");
    let console = pod(image, WORKLOAD).start().wait_end(PATIENCE);
    let packets = values_of(&console, "packet: ");
    assert!(packets.iter().any(|packet| packet.contains("10.244.0.") && packet.contains(".8080")), "{console}");
    assert!(packets.iter().any(|packet| packet.contains("10.244.0.53.53: UDP")), "{console}");
    assert!(packets.iter().all(|packet| !packet.contains("10.96.0.")), "{console}");
}
