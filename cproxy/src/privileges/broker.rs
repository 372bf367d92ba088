//! Broker of the agent: a process that makes the few system calls in the agent's place that would otherwise give it
//! power over all files and processes (docs/decisions/042).
//!
//! The agent's filter stops a thread at such a call, and the kernel tells the broker (seccomp_unotify(2)). The broker
//! looks at the arguments: a name must be in one of the agent's own directories, a descriptor of another process must be
//! an internet socket. Then it makes the call itself and answers with the outcome. So the agent's code is the same with
//! a broker and without.

mod calls;
mod notification;
mod places;
mod server;

use std::{
    ffi::OsString,
    io::{self, IoSlice, IoSliceMut, Read},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, OwnedFd},
        unix::{net::UnixStream, process::CommandExt},
    },
    path::Path,
    process::{Child, Command, Stdio},
};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
pub use server::serve;

/// What the broker says when it is ready. Anything else is the reason why it is not.
const READY: &[u8] = b"ready";

/// Longest such reason.
const ANSWER_BYTES_MAX: usize = 512;

/// Broker that has been started. It ends when this is dropped, as with the process.
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
        let (socket, other) = UnixStream::pair()?;
        let mut command = Command::new("/proc/self/exe");
        command.arg0("cproxy").args([OsString::from("broker"), run_dir.into(), pin_dir.into()]).args(files);
        command.stdin(OwnedFd::from(other)).stdout(Stdio::null()).env_clear();
        Ok(Self { child: command.spawn()?, socket })
    }

    /// Waits until it is ready, and gives it those calls of all threads and their children that it is for, for ever.
    ///
    /// # Errors
    /// The reason why it does not make them.
    pub fn take_calls(&self) -> Result<(), String> {
        self.wait()?;
        let calls = calls::calls().map_err(|error| error.to_string())?;
        let listener = notification::install(calls)?;
        self.give(listener).map_err(|error| format!("the broker does not take the system calls: {error}"))
    }

    /// Fails if it cannot do its work here.
    fn wait(&self) -> Result<(), String> {
        let mut answer = [0; ANSWER_BYTES_MAX];
        let length = (&self.socket).read(&mut answer).map_err(|error| error.to_string())?;
        match answer.get(..length).unwrap_or_default() {
            READY => Ok(()),
            [] => Err("it has ended".to_owned()),
            reason => Err(String::from_utf8_lossy(reason).into_owned()),
        }
    }

    fn give(&self, listener: impl AsFd) -> io::Result<()> {
        let descriptors = [listener.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        sendmsg(&self.socket, &[IoSlice::new(READY)], &mut ancillary, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// Waits until it has ended, which it does before the agent only if somebody has killed it.
    pub async fn ended(&mut self) -> String {
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
        self.child
            .try_wait()
            .ok()
            .flatten()
            .map_or_else(|| "it has closed its socket".to_owned(), |end| end.to_string())
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        drop(self.socket.shutdown(std::net::Shutdown::Both));
        self.child.wait().ok();
    }
}

/// Receives the descriptor that [`Broker::give`] sends; `None` at the end of the connection.
fn receive(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut bytes = [0; READY.len()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    Ok(ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    }))
}
