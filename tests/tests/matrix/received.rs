//! Traffic to the address of a load balancer, on kernels of guests: another port for TCP, replies of UDP from the
//! address, and nothing else.
//!
//! The client is in the pod's own network namespace, where there may be no links to others. Its calls go to the address
//! itself, as the port is excluded from translation.

use std::{
    io,
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
};

use cproxy_tests::{
    manifest::{Service, Slice},
    process::eventually,
    world::{Host, SYNC},
};

use crate::world::{MatrixSandbox, POD_PORT, PORT, patience, pod};

const WEB: u8 = 9;
/// A port at which the pod listens that is no Service's.
const OTHER: u16 = 8999;
const BALANCER: Host = Host::new([203, 0, 113, 10], [0x2001, 0xdb8, 0x113, 0, 0, 0, 0, 10]);
const DATAGRAMS: u16 = 5353;

#[test]
fn connections_and_datagrams_are_received_at_the_balancers_address() {
    let mut world = MatrixSandbox::new([pod(WEB)]);
    let service = Service::new("web").cluster_ips(["10.96.0.10", "fd00:10:96::a"]).tcp("http", PORT, POD_PORT);
    let service = service.udp("dns", DATAGRAMS, DATAGRAMS);
    let service = BALANCER.addresses().into_iter().fold(service, Service::load_balancer_ip);
    let ports = |slice: Slice| slice.tcp("http", POD_PORT).udp("dns", DATAGRAMS);
    let slices = [Slice::v4("web").ready([pod(WEB).v4.to_string()]), Slice::v6("web").ready([pod(WEB).v6.to_string()])];
    world.write([service.into()].into_iter().chain(slices.map(|slice| ports(slice).into())));
    let own = pod(WEB).addresses().map(|address| address.to_string()).join(",");
    let excluded = [PORT, DATAGRAMS, OTHER].map(|port| port.to_string()).join(",");
    let ranges = "203.0.113.0/24,2001:db8:113::/64";
    world.start_agent_with(&["--receive", ranges, "--pod-ip", &own, "--exclude-port", &excluded]);
    for (any, balancer) in
        [("0.0.0.0", IpAddr::from(BALANCER.v4)), ("::", BALANCER.v6.into()), ("::", BALANCER.v4.into())]
    {
        let listener = TcpListener::bind((any, POD_PORT)).unwrap();
        let _other = TcpListener::bind((any, OTHER)).unwrap();
        let call = |port| TcpStream::connect_timeout(&SocketAddr::new(balancer, port), patience());
        let stream = eventually(SYNC, "the address is received", || call(PORT));
        let accepted = listener.accept().unwrap().0.local_addr().unwrap();
        assert_eq!((accepted.ip().to_canonical(), accepted.port()), (balancer, PORT));
        assert_eq!(stream.peer_addr().unwrap(), SocketAddr::new(balancer, PORT));
        assert_eq!(call(OTHER).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);

        let server = UdpSocket::bind((any, DATAGRAMS)).unwrap();
        let client = UdpSocket::bind((pod(WEB).addresses()[usize::from(balancer.is_ipv6())], 0)).unwrap();
        for socket in [&server, &client] {
            socket.set_read_timeout(Some(patience())).unwrap();
        }
        client.send_to(b"?", (balancer, DATAGRAMS)).unwrap();
        let mut buffer = [0; 8];
        let (length, peer) = server.recv_from(&mut buffer).unwrap();
        server.send_to(&buffer[..length], peer).unwrap();
        assert_eq!(client.recv_from(&mut buffer).unwrap(), (1, SocketAddr::new(balancer, DATAGRAMS)));
    }
}
