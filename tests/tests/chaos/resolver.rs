//! Resolvers that ask a DNS Service, in the ways of glibc (one connected socket for both questions) and of musl (one
//! unconnected socket, which checks who answers).

use std::{
    io,
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use cproxy_tests::{sandbox::Sandbox, storm::Storm};

use crate::{cluster::NAMESERVER_VIP, tally::Counts};

/// The name that is asked for, in labels.
const NAME: &[u8] = b"\x03web\x07default\x03svc\x07cluster\x05local\0";

/// Types of questions: IPv4 and IPv6 addresses.
const TYPES: [u8; 2] = [1, 28];

/// The one address of every name.
pub(crate) const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 80);

/// Limit on the wait for an answer, longer than any on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(20);

const PAUSE: Duration = Duration::from_millis(5);

/// Asks until it is over. There may be no Service while it is out.
pub(crate) fn run(storm: &Storm, sandbox: &Sandbox, [is_over, is_out]: [&AtomicBool; 2], counts: &Counts) {
    sandbox.enter();
    for id in (0..u16::MAX - 1).cycle().step_by(2) {
        if is_over.load(Ordering::Relaxed) || storm.has_failed() {
            break;
        }
        let (is_connected, was_out) = (id % 4 == 0, is_out.load(Ordering::SeqCst));
        match resolve(is_connected, id) {
            Ok(()) => counts.names.fetch_add(1, Ordering::Relaxed),
            // The route of ClusterIPs says so.
            Err(error)
                if error.kind() == io::ErrorKind::PermissionDenied && (was_out || is_out.load(Ordering::SeqCst)) =>
            {
                0
            }
            Err(error) if storm.is_lost(&error) => 0,
            Err(error) => {
                let way = if is_connected { "connected" } else { "unconnected" };
                return storm.fail(format!("resolver with a socket that is {way}: {error}"));
            }
        };
        thread::sleep(PAUSE);
    }
}

/// Asks for addresses of both families at once.
fn resolve(is_connected: bool, id: u16) -> io::Result<()> {
    let vip = SocketAddr::new(NAMESERVER_VIP.into(), 53);
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.set_read_timeout(Some(TIMEOUT))?;
    if is_connected {
        socket.connect(vip)?;
        require(socket.peer_addr()? == vip, || format!("getpeername shows {:?}", socket.peer_addr()))?;
    }
    for (index, kind) in TYPES.into_iter().enumerate() {
        let query = query(id + index as u16, kind);
        if is_connected {
            socket.send(&query)?
        } else {
            socket.send_to(&query, vip)?
        };
    }
    let mut answered = [false; 2];
    while answered != [true; 2] {
        let mut buffer = [0; 512];
        let (length, from) = socket.recv_from(&mut buffer)?;
        require(from == vip, || format!("{from} answers instead of {vip}"))?;
        let response = &buffer[..length];
        let of = usize::from(u16::from_be_bytes([buffer[0], buffer[1]]).wrapping_sub(id));
        let asked = TYPES.get(of).map(|kind| query(id + of as u16, *kind));
        require(asked.is_some_and(|asked| response.get(12..asked.len()) == asked.get(12..)), || {
            format!("an answer to another question: {response:?}")
        })?;
        let end = if of == 0 { &ADDRESS.octets()[..] } else { &[0, TYPES[1], 0, 1] };
        require(!answered[of] && response.ends_with(end), || format!("another answer: {response:?}"))?;
        answered[of] = true;
    }
    Ok(())
}

/// A query with one question (RFC 1035, 4.1).
fn query(id: u16, kind: u8) -> Vec<u8> {
    [&id.to_be_bytes()[..], &[1, 0, 0, 1, 0, 0, 0, 0, 0, 0], NAME, &[0, kind, 0, 1]].concat()
}

fn require(is_so: bool, complaint: impl FnOnce() -> String) -> io::Result<()> {
    if is_so { Ok(()) } else { Err(io::Error::other(complaint())) }
}
