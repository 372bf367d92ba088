//! One socket with several users: its state belongs to the socket, whichever descriptor or process uses it.

use std::{
    io,
    mem::MaybeUninit,
    net::SocketAddr,
    os::fd::{AsFd, OwnedFd},
};

use cproxy_tests::{
    Server,
    witness::{Witness, parse_answer},
};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType,
};

use crate::{
    play::fresh_token,
    socket::Socket,
    world::{Case, Form, MatrixSandbox, POD_PORT, PORT, patience, pod, ready, vip},
};

struct Hands {
    _world: MatrixSandbox,
    witness: Witness,
    _servers: Vec<Server>,
}

/// Two Services with three pods each.
fn hands() -> Hands {
    let world = MatrixSandbox::start(1..=6, [ready("a", 1, &[1, 2, 3]), ready("b", 2, &[4, 5, 6])].concat());
    let witness = Witness::default();
    let mut servers = Vec::new();
    for number in 1..=6 {
        for address in pod(number).addresses() {
            let (address, name) = ((address, POD_PORT).into(), format!("pod-{number}"));
            servers.push(witness.udp(&world.sandbox, address, &name));
            servers.push(witness.tcp(&world.sandbox, address, &name));
        }
    }
    Hands { _world: world, witness, _servers: servers }
}

impl Hands {
    /// Sends a message from `socket` to `to` or to its peer, reads the answer, and returns the server's name.
    fn server(&self, socket: &Socket, to: Option<SocketAddr>) -> String {
        let token = fresh_token();
        socket.send_one(&token, to).unwrap();
        let answer = socket.receive_one().unwrap();
        assert_eq!(parse_answer(answer.bytes()).unwrap().0, token);
        let [receipt] = &self.witness.wait(token, patience())[..] else { panic!("one server gets it") };
        receipt.server.clone()
    }
}

/// A socket, its name, and its messages' destination if it is not connected.
type Subject = (&'static str, Socket, Option<SocketAddr>);

fn subjects(form: Form) -> Vec<Subject> {
    let to = form.address(vip(1), PORT);
    let connected = |socket: Socket| {
        socket.connect(to).unwrap();
        socket
    };
    let mut subjects = vec![("connected UDP", connected(form.udp()), None), ("unconnected UDP", form.udp(), Some(to))];
    if form != Form::V4OnV6 {
        subjects.push(("TCP", connected(form.tcp()), None));
    }
    subjects
}

/// Passes each kind of socket in each form to `test`, with its former server.
fn each_subject(test: impl Fn(&Hands, Form, Socket, Option<SocketAddr>, String)) {
    let hands = hands();
    for form in Form::ALL {
        for (what, socket, to) in subjects(form) {
            let _case = Case::new(format!("{what} {form}"));
            let server = hands.server(&socket, to);
            test(&hands, form, socket, to, server);
        }
    }
}

#[test]
fn a_duplicate_is_the_same_socket() {
    each_subject(|hands, form, socket, to, server| {
        let duplicate = socket.duplicate().unwrap();
        assert_eq!(hands.server(&duplicate, to), server);
        assert_eq!(duplicate.peer().ok(), socket.peer().ok());
        // A call on one descriptor affects the other.
        duplicate.disconnect().unwrap();
        duplicate.connect(form.address(vip(2), PORT)).unwrap();
        assert_eq!(socket.peer().unwrap(), form.shown(vip(2), PORT));
        drop(duplicate);
        assert!(["pod-4", "pod-5", "pod-6"].contains(&&*hands.server(&socket, None)));
    });
}

#[test]
fn a_child_process_inherits_the_flows_of_a_socket() {
    each_subject(|hands, form, socket, to, server| {
        let token = fresh_token();
        in_child(|| use_in_child(&socket, form, to, token));
        assert_eq!(hands.witness.wait(token, patience())[0].server, server);
        assert_eq!(hands.server(&socket, to), server, "the parent's");
    });
}

#[test]
fn a_descriptor_sent_to_another_process_keeps_the_flows() {
    each_subject(|hands, form, socket, to, server| {
        let token = fresh_token();
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        send_descriptor(&ours, &socket);
        drop(socket);
        in_child(|| use_in_child(&Socket::from(receive_descriptor(&theirs)?), form, to, token));
        assert_eq!(hands.witness.wait(token, patience())[0].server, server);
    });
}

/// Runs in the child. It must not allocate, since the child is a copy of one thread of many.
fn use_in_child(socket: &Socket, form: Form, to: Option<SocketAddr>, token: [u8; 8]) -> Result<(), Step> {
    let shown = form.shown(vip(1), PORT);
    let peer = socket.peer().ok();
    check(Step::Peer, peer == Some(shown).filter(|_| to.is_none()))?;
    socket.send_one(&token, to).map_err(|_| Step::Send)?;
    let answer = socket.receive_one().map_err(|_| Step::Receive)?;
    check(Step::Answer, answer.bytes().starts_with(&token))?;
    check(Step::Source, answer.name().is_none_or(|source| source == shown))
}

/// Step that failed in a child: its exit code.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    Descriptor = 1,
    Peer,
    Send,
    Receive,
    Answer,
    Source,
}

pub(crate) fn check(step: Step, is_right: bool) -> Result<(), Step> {
    if is_right { Ok(()) } else { Err(step) }
}

/// Runs `work`, which may only make system calls, in a child process.
pub(crate) fn in_child(work: impl FnOnce() -> Result<(), Step>) {
    // SAFETY: the child only makes system calls, and ends without running anything of its parent's.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let code = work().map_or_else(|step| step as libc::c_int, |()| 0);
        // SAFETY: it does not return.
        unsafe { libc::_exit(code) };
    }
    assert!(pid > 0, "cannot fork: {}", io::Error::last_os_error());
    let mut status = 0;
    // SAFETY: a child of ours and a live integer.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!(waited, pid);
    let steps = [Step::Descriptor, Step::Peer, Step::Send, Step::Receive, Step::Answer, Step::Source];
    let failed = steps.into_iter().find(|step| libc::WEXITSTATUS(status) == *step as libc::c_int);
    assert_eq!(status, 0, "the child has failed: {failed:?}");
}

pub(crate) fn send_descriptor(channel: &OwnedFd, socket: &Socket) {
    let descriptors = [socket.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    rustix::net::sendmsg(channel, &[io::IoSlice::new(b"x")], &mut control, SendFlags::empty()).unwrap();
}

pub(crate) fn receive_descriptor(channel: &OwnedFd) -> Result<OwnedFd, Step> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    rustix::net::recvmsg(channel, &mut [io::IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)
        .map_err(|_| Step::Descriptor)?;
    let mut messages = control.drain();
    let Some(RecvAncillaryMessage::ScmRights(mut descriptors)) = messages.next() else { return Err(Step::Descriptor) };
    descriptors.next().ok_or(Step::Descriptor)
}
