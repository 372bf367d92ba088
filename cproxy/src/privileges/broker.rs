//! Broker of the agent: a process that does the few things in the agent's place that would otherwise give it power over
//! all files and processes (docs/decisions/042).
//!
//! It starts the agent's children, which load programs and walk the canary: the agent itself may do neither. And it
//! makes some system calls. The agent's filter stops a thread at such a call, and the kernel tells the broker
//! (seccomp_unotify(2)). The broker looks at the arguments: a name must be in one of the agent's own directories, a
//! descriptor of another process must be an internet socket. Then it makes the call itself and answers with the
//! outcome. So the agent's code is the same with a broker and without.

mod allowed_paths;
mod calls;
mod notification;
mod server;

use std::{
    ffi::OsString,
    io::{self, IoSlice, IoSliceMut, Read},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{
            ffi::{OsStrExt as _, OsStringExt as _},
            net::UnixStream,
            process::{CommandExt as _, ExitStatusExt as _},
        },
    },
    path::Path,
    process::{Child, Command, ExitStatus, Output, Stdio},
    thread,
    time::Duration,
};

use cproxy_datapath::sockets::BROKER_NAME;
use rustix::{
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
    },
    process::{Pid, WaitId, WaitIdOptions, waitid},
};
pub use server::serve;

/// Message with the listener of the agent's filter.
const CALLS: &str = "calls";

/// Longest message: the arguments of a child, among them a path.
const MESSAGE_BYTES_MAX: usize = 8 << 10;

/// Most descriptors of a message: a child's input, output and errors, and where its end is told.
const DESCRIPTORS_MAX: usize = 4;

/// Answer of a broker that is ready. Any other is the reason why it is not.
const READY: &[u8] = b"ready";

/// Time for the answer.
const START_TIME_MAX: Duration = Duration::from_secs(10);

/// Longest answer.
const ANSWER_BYTES_MAX: usize = 512;

/// Broker that has been started. It sees the end of the agent, and then ends itself.
#[derive(Debug)]
pub struct Broker {
    child: Child,
    socket: UnixStream,
}

impl Broker {
    /// Starts a broker for these directories and for the files of other sockets. It gets ready meanwhile.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start<'p>(run_dir: &Path, pin_dir: &Path, files: impl Iterator<Item = &'p Path>) -> io::Result<Self> {
        // Each message is a packet, and the end of the other side is seen.
        let (socket, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let mut command = Command::new("/proc/self/exe");
        command.arg0(BROKER_NAME).args([OsString::from("broker"), run_dir.into(), pin_dir.into()]).args(files);
        command.stdin(other).stdout(Stdio::null()).env_clear();
        Ok(Self { child: command.spawn()?, socket: socket.into() })
    }

    /// Waits until it is ready, and gives it those calls of all threads and their children that it is for, for ever.
    ///
    /// # Errors
    /// The reason why it does not make them. It has ended then.
    pub fn take_calls(mut self) -> Result<Self, String> {
        let taken = self.wait().and_then(|()| self.try_to_take_calls());
        if taken.is_err() {
            self.child.kill().ok();
            self.child.wait().ok();
        }
        taken.map(|()| self)
    }

    fn try_to_take_calls(&self) -> Result<(), String> {
        let calls = calls::calls().map_err(|error| error.to_string())?;
        let listener = notification::install(calls)?;
        self.send(&[CALLS.into()], &[listener.as_fd()])
            .map_err(|error| format!("the broker does not take the system calls: {error}"))
    }

    /// Fails if it cannot do its work here.
    fn wait(&self) -> Result<(), String> {
        let mut answer = [0; ANSWER_BYTES_MAX];
        self.socket.set_read_timeout(Some(START_TIME_MAX)).map_err(|error| error.to_string())?;
        let length = (&self.socket).read(&mut answer).map_err(|error| error.to_string())?;
        match answer.get(..length).unwrap_or_default() {
            READY => Ok(()),
            [] => Err("it has ended".to_owned()),
            reason => Err(String::from_utf8_lossy(reason).into_owned()),
        }
    }

    /// Starts a child and waits for its end.
    fn run(&self, words: &[OsString], stdin: &OwnedFd) -> io::Result<Output> {
        let ((mut stdout, their_stdout), (mut stderr, their_stderr)) = (io::pipe()?, io::pipe()?);
        let (mut end, their_end) = io::pipe()?;
        self.send(words, &[stdin.as_fd(), their_stdout.as_fd(), their_stderr.as_fd(), their_end.as_fd()])?;
        drop((their_stdout, their_stderr, their_end));
        let (mut output, mut errors, mut status) = (Vec::new(), Vec::new(), [0; size_of::<i32>()]);
        // A child that writes much to one must not wait for the other.
        thread::scope(|scope| {
            scope.spawn(|| stderr.read_to_end(&mut errors));
            stdout.read_to_end(&mut output)
        })?;
        let started = end.read_exact(&mut status);
        started.map_err(|error| io::Error::other(format!("the broker has not started it: {error}")))?;
        Ok(Output { status: ExitStatus::from_raw(i32::from_ne_bytes(status)), stdout: output, stderr: errors })
    }

    fn send(&self, words: &[OsString], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let message = words.iter().map(|word| word.as_bytes()).collect::<Vec<_>>().join(&0);
        if message.len() > MESSAGE_BYTES_MAX || !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        sendmsg(&self.socket, &[IoSlice::new(&message)], &mut ancillary, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// Waits until it has ended, which it does before the agent only if somebody has killed it.
    pub async fn ended(&self) -> String {
        let watched = self.socket.try_clone().and_then(|socket| {
            socket.set_nonblocking(true)?;
            tokio::net::UnixStream::from_std(socket)
        });
        // It says nothing any more, so there is nothing to read but the end.
        match watched {
            Ok(socket) => drop(socket.readable().await),
            Err(error) => {
                tracing::debug!("the end of the broker cannot be seen: {error}");
                std::future::pending::<()>().await;
            }
        }
        let ended = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let status = waitid(WaitId::Pid(Pid::from_child(&self.child)), ended).ok().flatten();
        match status.and_then(|status| status.terminating_signal()) {
            Some(signal) => format!("signal {signal}"),
            None => "it has closed its socket".to_owned(),
        }
    }
}

/// Runs a child, `install` or `canary` with arguments of their own, to its end. A broker starts it where the agent may
/// not.
///
/// # Errors
/// It cannot be started, or the broker has ended.
pub fn run_child(broker: Option<&Broker>, pin_dir: &Path, words: &[OsString], stdin: OwnedFd) -> io::Result<Output> {
    match broker {
        Some(broker) => broker.run(words, &stdin),
        None => server::child_command(words, pin_dir).ok_or(io::ErrorKind::InvalidInput)?.stdin(stdin).output(),
    }
}

/// Receives the words and descriptors of a message; no words at the end of the agent.
fn receive(socket: &UnixStream) -> io::Result<(Vec<OsString>, Vec<OwnedFd>)> {
    let mut bytes = [0; MESSAGE_BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let message = bytes.get(..received.bytes).unwrap_or_default();
    let words = message.split(|byte| *byte == 0).map(|word| OsString::from_vec(word.to_owned()));
    let words = if message.is_empty() { Vec::new() } else { words.collect() };
    let descriptors = ancillary.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => descriptors.collect::<Vec<_>>(),
        _ => Vec::new(),
    });
    Ok((words, descriptors.collect()))
}
