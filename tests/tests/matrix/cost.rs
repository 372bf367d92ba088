//! Cost of calls to a ClusterIP, beside calls to the pod without any programs. An emulated processor that counts
//! instructions gives it in instructions; on others it is a time that nothing depends on.

use std::{
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    time::{Duration, Instant},
};

use cproxy_tests::process::cproxy;
use rustix::net::sockopt;

use crate::world::{Form, MatrixSandbox, POD_PORT, PORT, pod, ready, vip};

/// Number of calls whose median counts.
const CALLS: usize = 1_000;

/// One call, timed.
type Call<'a> = &'a dyn Fn() -> Duration;

fn median_ns(call: Call<'_>) -> u128 {
    let mut times: Vec<_> = (0..CALLS).map(|_| call().as_nanos()).collect();
    times.sort_unstable();
    times[CALLS / 2]
}

fn connect(to: SocketAddr, listener: &TcpListener) -> Duration {
    let start = Instant::now();
    let stream = TcpStream::connect(to).unwrap();
    let time = start.elapsed();
    let accepted = listener.accept().unwrap();
    // Ends by RST: sockets in TIME_WAIT would make the next calls slower.
    sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
    drop(stream);
    drop(accepted);
    time
}

fn send(to: SocketAddr, client: &UdpSocket, server: &UdpSocket) -> Duration {
    let start = Instant::now();
    client.send_to(b"a", to).unwrap();
    let time = start.elapsed();
    server.recv(&mut [0; 8]).unwrap();
    time
}

#[test]
fn calls_are_timed_with_and_without_programs() {
    let mut world = MatrixSandbox::start([1], ready("web", 1, &[1]));
    let served: Vec<_> = [Form::V4, Form::V6]
        .into_iter()
        .map(|form| {
            let address = form.address(pod(1), POD_PORT);
            let (listener, server) = (TcpListener::bind(address).unwrap(), UdpSocket::bind(address).unwrap());
            let client = UdpSocket::bind((address.ip(), 0)).unwrap();
            (form, listener, server, client)
        })
        .collect();
    let measure = |host, port| {
        let of = |(form, listener, server, client): &(Form, TcpListener, UdpSocket, UdpSocket)| {
            let to = form.address(host, port);
            [median_ns(&|| connect(to, listener)), median_ns(&|| send(to, client, server))]
        };
        served.iter().map(of).collect::<Vec<_>>()
    };
    let with = measure(vip(1), PORT);
    world.kill_agent();
    cproxy(&world.sandbox, &["cleanup"]).success();
    let without = measure(pod(1), POD_PORT);
    // The name of the test stands on this line.
    println!();
    for ((form, ..), (with, without)) in served.iter().zip(with.iter().zip(&without)) {
        for (call, (with, without)) in ["connect()", "sendto()"].into_iter().zip(with.iter().zip(without)) {
            println!("cost of {call}, {form}: {with} and {without}");
        }
    }
}
