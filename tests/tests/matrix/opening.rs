//! Ways to open a TCP connection other than a plain `connect()`.

use std::{
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    os::fd::AsRawFd,
};

use crate::{
    message::Buffer,
    socket::{SendCall, Socket, poll},
    world::{Case, Form, MatrixSandbox, POD_PORT, PORT, patience, pod, ready, service, vip},
};

/// Forms for TCP: a socket of AF_INET6 cannot connect to an address of AF_INET.
pub(crate) const FORMS: [Form; 3] = [Form::V4, Form::V6, Form::Mapped];

const MESSAGE: &[u8] = b"in the first segment";

/// Service 1 with pod 1, and Service 2 without pods.
fn world() -> MatrixSandbox {
    MatrixSandbox::start([1], [ready("web", 1, &[1]), vec![service("empty", 2).into()]].concat())
}

/// Listeners of the pod in both families, which accept data with the first segment.
fn listeners() -> [TcpListener; 2] {
    pod(1).addresses().map(|address| {
        let listener = TcpListener::bind((address, POD_PORT)).unwrap();
        set_tcp_option(&listener, libc::TCP_FASTOPEN, 16);
        listener
    })
}

fn listener(listeners: &[TcpListener; 2], form: Form) -> &TcpListener {
    &listeners[usize::from(form == Form::V6)]
}

pub(crate) fn set_tcp_option(socket: &impl AsRawFd, option: libc::c_int, value: libc::c_int) {
    let length = size_of_val(&value) as libc::socklen_t;
    // SAFETY: the pointer and the length are those of a live integer.
    let result =
        unsafe { libc::setsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, option, (&raw const value).cast(), length) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// Checks that the server accepts the connection and reads the message, and that the application sees the VIP.
fn is_connected(form: Form, socket: &Socket, listener: &TcpListener) {
    let (mut stream, _) = accept(listener);
    let mut message = [0; MESSAGE.len()];
    stream.read_exact(&mut message).unwrap();
    assert_eq!(message, MESSAGE);
    stream.write_all(b"answer").unwrap();
    assert_eq!(socket.receive_one().unwrap().bytes(), b"answer");
    assert_eq!(socket.peer().unwrap(), form.shown(vip(1), PORT));
}

fn accept(listener: &TcpListener) -> (TcpStream, std::net::SocketAddr) {
    assert!(poll(&[listener], libc::POLLIN, patience()).unwrap().is_some(), "no client connects");
    let accepted = listener.accept().unwrap();
    accepted.0.set_read_timeout(Some(patience())).unwrap();
    accepted
}

fn is_refused<T: std::fmt::Debug>(result: std::io::Result<T>) {
    assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::ECONNREFUSED));
}

/// Connects by `sendto()` or `sendmsg()`.
fn fast_open(socket: &Socket, form: Form, number: u8, by_sendmsg: bool) -> std::io::Result<()> {
    let call = if by_sendmsg { SendCall::Sendmsg } else { SendCall::Sendto };
    let mut message = Buffer::sending(MESSAGE, Some(form.address(vip(number), PORT)));
    socket.fast_open(call, &mut message).map(drop)
}

/// The server returns a cookie at first; from then on data goes with the first segment.
#[test]
fn fast_open_is_translated_with_and_without_a_cookie() {
    let _world = world();
    fs::write("/proc/sys/net/ipv4/tcp_fastopen", "3").unwrap();
    let listeners = listeners();
    for form in FORMS {
        for (time, by_sendmsg) in [false, true, false, true].into_iter().enumerate() {
            let _case = Case::new(format!("{form}, time {time}, sendmsg: {by_sendmsg}"));
            let socket = form.tcp();
            fast_open(&socket, form, 1, by_sendmsg).unwrap();
            is_connected(form, &socket, listener(&listeners, form));
            is_refused(fast_open(&form.tcp(), form, 2, by_sendmsg));
        }
    }
}

#[test]
fn a_connect_that_waits_for_data_is_translated() {
    let _world = world();
    fs::write("/proc/sys/net/ipv4/tcp_fastopen", "3").unwrap();
    let listeners = listeners();
    for form in FORMS {
        for time in 0..3 {
            let _case = Case::new(format!("{form}, time {time}"));
            let socket = form.tcp();
            set_tcp_option(&socket, libc::TCP_FASTOPEN_CONNECT, 1);
            socket.connect(form.address(vip(1), PORT)).unwrap();
            socket.send_bytes(MESSAGE).unwrap();
            is_connected(form, &socket, listener(&listeners, form));
            let socket = form.tcp();
            set_tcp_option(&socket, libc::TCP_FASTOPEN_CONNECT, 1);
            is_refused(socket.connect(form.address(vip(2), PORT)));
        }
    }
}

#[test]
fn a_connect_that_does_not_wait_is_translated() {
    let _world = world();
    let listeners = listeners();
    for form in FORMS {
        let _case = Case::new(form);
        let socket = Socket::new(form.family(), libc::SOCK_STREAM | libc::SOCK_NONBLOCK).unwrap();
        match socket.connect(form.address(vip(1), PORT)) {
            Ok(()) => {}
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EINPROGRESS)),
        }
        assert!(poll(&[&socket], libc::POLLOUT, patience()).unwrap().is_some());
        assert_eq!(rustix::net::sockopt::socket_error(&socket).unwrap(), Ok(()));
        socket.send_bytes(MESSAGE).unwrap();
        let accepted = accept(listener(&listeners, form));
        assert_eq!(socket.peer().unwrap(), form.shown(vip(1), PORT));
        drop(accepted);
        let socket = Socket::new(form.family(), libc::SOCK_STREAM | libc::SOCK_NONBLOCK).unwrap();
        is_refused(socket.connect(form.address(vip(2), PORT)));
    }
}
