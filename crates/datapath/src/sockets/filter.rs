//! Filters that the kernel applies to its list of sockets: the programs of `INET_DIAG_REQ_BYTECODE`.

use std::collections::BTreeSet;

use cproxy_core::{Address, Backend, Family};

use cproxy_ebpf::REFUSED_PORT;

use super::diag_message::{INET, INET6};

/// Instructions (include/uapi/linux/inet_diag.h). Each says how many bytes further the next one is, if what it asks is
/// so and if it is not. A socket passes that gets exactly to the end.
const INET_DIAG_BC_JMP: u8 = 1;
const INET_DIAG_BC_D_COND: u8 = 8;
const INSTRUCTION_BYTES: usize = 4;

const _: () = assert!(Backend::NOBODY.port == REFUSED_PORT);

/// Sockets of a family whose peer is one of these, the IPv4-mapped ones of IPv6 among them. `None` if there can be
/// none.
pub(super) fn connected_to(backends: &BTreeSet<Backend>, family: u8) -> Option<Vec<u8>> {
    let can_be =
        |backend: &&Backend| family == INET6 || *backend == &Backend::NOBODY || backend.address.family() == Family::V4;
    let conditions: Vec<_> = backends.iter().filter(can_be).map(condition).collect();
    // From the end: what is true goes over all that comes after it.
    let mut program = Vec::new();
    for condition in conditions.iter().rev() {
        let to_the_end = (!program.is_empty()).then(|| jump(program.len()));
        // The last one goes too far if it is not true.
        let size = INSTRUCTION_BYTES + condition.len();
        let mut longer = instruction(INET_DIAG_BC_D_COND, size, size + INSTRUCTION_BYTES);
        longer.extend(condition);
        longer.extend(to_the_end.into_iter().flatten());
        longer.append(&mut program);
        program = longer;
    }
    (!program.is_empty()).then_some(program)
}

/// Jumps over so many bytes, by the branch of a condition that is false.
fn jump(over: usize) -> Vec<u8> {
    instruction(INET_DIAG_BC_JMP, INSTRUCTION_BYTES, INSTRUCTION_BYTES + over)
}

fn instruction(code: u8, yes: usize, no: usize) -> Vec<u8> {
    let [no, no_high] = (no as u16).to_ne_bytes();
    vec![code, yes as u8, no, no_high]
}

/// `struct inet_diag_hostcond`. That of nobody has any address.
fn condition(backend: &Backend) -> Vec<u8> {
    let Backend { address, port } = *backend;
    let (family, address) = match address.family() {
        _ if *backend == Backend::NOBODY => (0, Vec::new()),
        Family::V4 => (INET, v4_octets(address)),
        Family::V6 => (INET6, address.octets().to_vec()),
    };
    let bits = 8 * address.len() as u8;
    [&[family, bits, 0, 0][..], &i32::from(port).to_ne_bytes(), &address].concat()
}

fn v4_octets(address: Address) -> Vec<u8> {
    address.octets().into_iter().skip(12).collect()
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use cproxy_core::{Protocol, parse_address};
    use rustix::net::sockopt::socket_cookie;

    use super::*;
    use crate::sockets::{
        diag::Diag,
        diag_message::{CONNECTED, DumpQuery, SocketFamily},
    };

    fn backend(address: &str, port: u16) -> Backend {
        Backend { address: parse_address(address).unwrap(), port }
    }

    fn connected(address: &str, port: u16) -> UdpSocket {
        let any = if address.contains(':') { "[::]:0" } else { "0.0.0.0:0" };
        let socket = UdpSocket::bind(any).unwrap();
        socket.connect((address, port)).unwrap();
        socket
    }

    /// Result of the kernel.
    #[test]
    fn exactly_those_connected_to_one_of_them_pass() {
        let others = [("127.0.0.9", 4_701), ("127.0.0.8", 4_700), ("::ffff:127.0.0.9", 4_701), ("::1", 4_701)];
        let mut backends: BTreeSet<_> = [backend("127.0.0.9", 4_700), backend("::1", 4_700)].into();
        let ours = [("127.0.0.9", 4_700), ("::ffff:127.0.0.9", 4_700), ("::1", 4_700)];
        let sockets = [&ours[..], &others].concat().into_iter().map(|(address, port)| connected(address, port));
        let sockets: Vec<_> = sockets.collect();
        for more in 0..=300 {
            // Before, between and after them.
            backends.insert(backend(&format!("127.0.{}.1", more % 150), 5_000 + more));
            backends.insert(backend(&format!("fd00::{more}"), 5_000));
            if more % 60 != 0 {
                continue;
            }
            let mut passed = BTreeSet::new();
            for family in [INET, INET6] {
                let filter = connected_to(&backends, family).unwrap();
                let kind = SocketFamily { family, protocol: Protocol::Udp };
                let query = DumpQuery { kind, states: CONNECTED, filter: Some(&filter), storage: None };
                Diag::open().unwrap().dump(&query, &mut |socket| passed.extend([socket.id.cookie()])).unwrap();
            }
            let is_passed: Vec<_> =
                sockets.iter().map(|socket| passed.contains(&socket_cookie(socket).unwrap())).collect();
            assert_eq!(is_passed, [true, true, true, false, false, false, false], "{}", backends.len());
            assert_eq!(passed.len(), ours.len());
        }
    }

    /// Result of the kernel.
    #[test]
    fn nobody_is_any_address_with_its_port() {
        let sockets = [("127.0.0.9", 1), ("::1", 1), ("::ffff:127.0.0.9", 1), ("127.0.0.9", 4_702), ("::1", 4_702)];
        let sockets = sockets.map(|(address, port)| connected(address, port));
        for backends in [vec![Backend::NOBODY], vec![Backend::NOBODY, backend("127.0.0.9", 4_703)]] {
            let mut passed = BTreeSet::new();
            for family in [INET, INET6] {
                let filter = connected_to(&backends.iter().copied().collect(), family).unwrap();
                let kind = SocketFamily { family, protocol: Protocol::Udp };
                let query = DumpQuery { kind, states: CONNECTED, filter: Some(&filter), storage: None };
                Diag::open().unwrap().dump(&query, &mut |socket| passed.extend([socket.id.cookie()])).unwrap();
            }
            let is_passed = sockets.each_ref().map(|socket| passed.contains(&socket_cookie(socket).unwrap()));
            assert_eq!(is_passed, [true, true, true, false, false]);
        }
    }

    #[test]
    fn an_ipv4_socket_is_connected_to_no_ipv6_address() {
        assert_eq!(connected_to(&[backend("fd00::1", 80)].into(), INET), None);
        assert!(connected_to(&[backend("10.0.0.1", 80)].into(), INET6).is_some());
        assert_eq!(connected_to(&BTreeSet::new(), INET6), None);
    }
}
