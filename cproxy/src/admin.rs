//! Socket of the agent: facts that only the agent has, for commands that read the rest from the kernel.
//!
//! One request line, one answer, then the connection ends.
//!
//! - `services`: the table in the form of the JSON contract, with names, without backends, which the kernel has.
//! - `gauges`: the gauges of the agent, as a JSON object.
//! - `reseed`: `ok`, once choices are made from a new seed. For a VM that was restored from a snapshot: without it all
//!   copies of the snapshot choose the same backends, since the kernel's random numbers in BPF are the same in each.

use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
    os::unix::net::UnixStream as BlockingStream,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    sync::{Semaphore, mpsc, oneshot},
};

use crate::report::ReportRow;

/// Name of the socket in the run directory.
pub const SOCKET: &str = "cproxy.sock";

const REQUEST_SERVICES: &str = "services\n";
const REQUEST_GAUGES: &str = "gauges\n";
const REQUEST_RESEED: &str = "reseed\n";
const REQUEST_BYTES_MAX: u64 = 64;
/// Longest time for an answer.
pub const TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of simultaneous answers; other clients wait. Each answer holds a copy of the table.
const CONNECTIONS_MAX: usize = 4;

/// Request to the one task that owns the table, with the channel for its answer.
#[derive(Debug)]
pub enum Question {
    /// Frontends of the table as JSON text, of which there is one copy.
    Services(oneshot::Sender<Vec<u8>>),
    /// Gauges of the agent.
    Gauges(oneshot::Sender<Vec<(&'static str, u64)>>),
    /// Choice of a new seed; the error's text if that failed.
    Reseed(oneshot::Sender<Result<(), String>>),
}

/// Serves requests for ever.
pub async fn serve(listener: UnixListener, questions: mpsc::Sender<Question>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        // The semaphore is never closed.
        let place = places.clone().acquire_owned().await.ok();
        match listener.accept().await {
            Ok((stream, _)) => {
                let answer = answer_in_time(stream, questions.clone());
                drop(tokio::spawn(async move {
                    answer.await;
                    drop(place);
                }));
            }
            Err(error) => {
                tracing::warn!("{SOCKET}: {error}");
                tokio::time::sleep(TIMEOUT).await;
            }
        }
    }
}

async fn answer_in_time(stream: UnixStream, questions: mpsc::Sender<Question>) {
    // A client that is too slow or hangs up gets no answer, which affects no other client.
    drop(tokio::time::timeout(TIMEOUT, answer(stream, questions)).await);
}

async fn answer(mut stream: UnixStream, questions: mpsc::Sender<Question>) -> io::Result<()> {
    let mut request = String::new();
    let (reader, mut writer) = stream.split();
    let mut reader = tokio::io::BufReader::new(reader.take(REQUEST_BYTES_MAX));
    tokio::io::AsyncBufReadExt::read_line(&mut reader, &mut request).await?;
    let answer = match request.as_str() {
        REQUEST_SERVICES => ask(&questions, Question::Services).await?,
        REQUEST_GAUGES => {
            let gauges: BTreeMap<_, _> = ask(&questions, Question::Gauges).await?.into_iter().collect();
            serde_json::to_vec(&gauges)?
        }
        REQUEST_RESEED => match ask(&questions, Question::Reseed).await? {
            Ok(()) => b"ok\n".to_vec(),
            Err(error) => format!("error: {error}\n").into_bytes(),
        },
        _ => b"error: the requests are: services, gauges, reseed\n".to_vec(),
    };
    writer.write_all(&answer).await
}

async fn ask<T>(
    questions: &mpsc::Sender<Question>,
    question: impl FnOnce(oneshot::Sender<T>) -> Question,
) -> io::Result<T> {
    let (sender, receiver) = oneshot::channel();
    questions.send(question(sender)).await.map_err(io::Error::other)?;
    receiver.await.map_err(io::Error::other)
}

/// Whether an agent listens in the run directory.
#[must_use]
pub fn is_answered(run_dir: &Path) -> bool {
    connect(&socket_path(run_dir)).is_ok()
}

/// Frontends of a running agent, without backends.
///
/// # Errors
/// No agent is running there, or it does not answer within `timeout`, which is not zero.
pub fn ask_services(run_dir: &Path, timeout: Duration) -> io::Result<Vec<ReportRow>> {
    ask_agent(run_dir, REQUEST_SERVICES, timeout)
}

/// Gauges of a running agent, by name.
///
/// # Errors
/// As [`ask_services`].
pub fn ask_gauges(run_dir: &Path, timeout: Duration) -> io::Result<BTreeMap<String, u64>> {
    ask_agent(run_dir, REQUEST_GAUGES, timeout)
}

/// Answer of a running agent to `reseed`: `ok`, or `error: ` and the reason.
///
/// # Errors
/// No agent is running there, or it does not answer in time.
pub fn ask_to_reseed(run_dir: &Path) -> io::Result<String> {
    String::from_utf8(request(run_dir, REQUEST_RESEED, TIMEOUT)?).map_err(io::Error::other)
}

fn ask_agent<T: serde::de::DeserializeOwned>(run_dir: &Path, question: &str, timeout: Duration) -> io::Result<T> {
    Ok(serde_json::from_slice(&request(run_dir, question, timeout)?)?)
}

fn request(run_dir: &Path, request: &str, timeout: Duration) -> io::Result<Vec<u8>> {
    let mut stream = connect(&socket_path(run_dir))?;
    stream.set_read_timeout(Some(timeout))?;
    stream.write_all(request.as_bytes())?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).map_err(|error| match error.kind() {
        // The system's own text for a timeout does not help the user.
        io::ErrorKind::WouldBlock => io::Error::new(io::ErrorKind::TimedOut, "no answer in time"),
        _ => error,
    })?;
    Ok(answer)
}

/// Connects without waiting: a blocking call would never return if an agent has stopped and its queue is full.
fn connect(path: &Path) -> io::Result<BlockingStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let stream = BlockingStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

fn socket_path(run_dir: &Path) -> PathBuf {
    run_dir.join(SOCKET)
}
