//! Agent's side of the socket.

use std::{collections::BTreeMap, fmt, io, sync::Arc};

use cproxy_core::{Address, TcpPlace};
use cproxy_daemon::unix_socket::SocketFile;
use cproxy_datapath::bpf::ServiceCounters;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, UnixStream},
    sync::{Semaphore, mpsc, oneshot},
};
use tracing::Level;

use super::protocol::{
    REQUEST_CONFIG, REQUEST_EXPLAIN, REQUEST_GAUGES, REQUEST_HEALTH, REQUEST_LOG, REQUEST_LOG_LEVEL, REQUEST_RESEED,
    REQUEST_SERVICES, REQUEST_SOURCE, RESPONSE_TIMEOUT, SOCKET,
};
use crate::{
    agent::{CanaryState, Status},
    config::TableSettings,
    controls::Controls,
    endpoints::ServiceCalls,
    report::{AgentReport, HealthReport, SourceReport},
    target::Target,
};

/// Longest request: one with the name of an object.
const REQUEST_BYTES_MAX: u64 = 512;
/// Maximum number of simultaneous responses; other clients wait. Each response holds a copy of the table.
const CONNECTIONS_MAX: usize = 4;

/// Request to the one task that owns the table, with the channel for its response.
#[derive(Debug)]
pub enum Request {
    /// Frontends of the table as JSON text, of which there is one copy.
    Services(oneshot::Sender<Vec<u8>>),
    /// Gauges of the agent.
    Gauges(oneshot::Sender<Vec<(&'static str, u64)>>),
    /// State for the endpoints, from the agent itself.
    Status(oneshot::Sender<Status>),
    /// Sums of these counters by Service, from the agent itself.
    ServiceCalls(ServiceCounters, oneshot::Sender<Vec<ServiceCalls>>),
    /// Source that the agent follows.
    Source(oneshot::Sender<SourceReport>),
    /// View of a destination.
    Explain(Target, oneshot::Sender<AgentReport>),
    /// Health of the programs, after a look at them.
    Health(oneshot::Sender<HealthReport>),
    /// Notice that the VM was restored from a snapshot; the error's text if there is no new seed.
    Reseed(oneshot::Sender<Result<(), String>>),
    /// A sign of that, from the agent itself.
    Restored(Restored),
    /// Other settings, from the agent itself; the error's text if they cannot be written.
    Configure(TableSettings, oneshot::Sender<Result<(), String>>),
    /// Addresses of the VM to which datagram sockets are connected that are to be refused, from the agent itself.
    OwnAddresses(Vec<Address>),
    /// Places of TCP sockets that have gone, from the agent itself; the error's text if they cannot be freed.
    FreeTcpPlaces(Vec<TcpPlace>, oneshot::Sender<Result<(), String>>),
    /// Pins of maps that were removed, from the agent itself. The response has the names of the maps that were pinned
    /// again, or the error's text.
    RestorePins(oneshot::Sender<Result<Vec<&'static str>, String>>),
    /// State of the canary, from the agent itself.
    Canary(oneshot::Sender<CanaryState>),
    /// Other ports for the canary, from the agent itself.
    MoveCanary,
    /// The whole table, read back and written anew, from the agent itself.
    Rewrite(oneshot::Sender<()>),
}

/// Sign that the VM was restored from a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restored {
    /// The VM has another generation id.
    NewGeneration,
    /// The wall clock was set, for which there are other reasons.
    ClockStep,
    /// The network has changed, and the API server does not answer on the present connection.
    ConnectionLost,
}

impl fmt::Display for Restored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NewGeneration => "the VM was restored from a snapshot",
            Self::ClockStep => "the clock was set, perhaps after a restore of the VM",
            Self::ConnectionLost => "the network has changed, perhaps after a restore of the VM",
        })
    }
}

/// Serves clients for ever, also after somebody has removed the socket's file.
pub async fn serve(
    mut listener: UnixListener,
    file: Arc<SocketFile>,
    requests: mpsc::Sender<Request>,
    controls: Controls,
) {
    loop {
        tokio::select! {
            () = accept(&listener, &requests, &controls) => return,
            again = file.clone().listen_again() => listener = again,
        }
    }
}

async fn accept(listener: &UnixListener, requests: &mpsc::Sender<Request>, controls: &Controls) {
    let connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        // The semaphore is never closed.
        let permit = connections.clone().acquire_owned().await.ok();
        match listener.accept().await {
            // The socket's mode keeps others out, but somebody may have passed a descriptor on.
            Ok((stream, _)) if !is_trusted(&stream) => tracing::warn!("{SOCKET}: a request of another user is refused"),
            Ok((stream, _)) => {
                let (requests, controls) = (requests.clone(), controls.clone());
                drop(tokio::spawn(async move {
                    // A client that is too slow or hangs up gets no response, which affects no other client.
                    drop(tokio::time::timeout(RESPONSE_TIMEOUT, respond(stream, requests, &controls)).await);
                    drop(permit);
                }));
            }
            Err(error) => {
                tracing::warn!("{SOCKET}: {error}");
                tokio::time::sleep(RESPONSE_TIMEOUT).await;
            }
        }
    }
}

/// Whether the process that has connected was root's or the agent's user's then (unix(7), SO_PEERCRED).
fn is_trusted(stream: &UnixStream) -> bool {
    let own = rustix::process::geteuid().as_raw();
    stream.peer_cred().is_ok_and(|peer| [0, own].contains(&peer.uid()))
}

/// Responds to the request of one client.
///
/// # Errors
/// The client has gone, its request is no text, or the task that owns the table has ended.
pub async fn respond(mut stream: UnixStream, requests: mpsc::Sender<Request>, controls: &Controls) -> io::Result<()> {
    let mut request = String::new();
    let (reader, mut writer) = stream.split();
    BufReader::new(reader.take(REQUEST_BYTES_MAX)).read_line(&mut request).await?;
    if let Some(target) = request.strip_prefix(REQUEST_EXPLAIN) {
        let response = match target.parse() {
            Ok(target) => serde_json::to_vec(&send(&requests, |sender| Request::Explain(target, sender)).await?)?,
            Err(error) => format!("error: {error}\n").into_bytes(),
        };
        return writer.write_all(&response).await;
    }
    if let Some(level) = request.strip_prefix(REQUEST_LOG_LEVEL) {
        let response = match parse_level(level.trim_end()) {
            Some(level) => {
                controls.set_log_level(level);
                &b"ok\n"[..]
            }
            None => b"error: the levels are error, warn, info and debug\n",
        };
        return writer.write_all(response).await;
    }
    let response = match request.as_str() {
        REQUEST_CONFIG => serde_json::to_vec(&controls.settings())?,
        REQUEST_LOG => controls.recent_log().into_bytes(),
        REQUEST_SERVICES => send(&requests, Request::Services).await?,
        REQUEST_GAUGES => {
            let gauges: BTreeMap<_, _> = send(&requests, Request::Gauges).await?.into_iter().collect();
            serde_json::to_vec(&gauges)?
        }
        REQUEST_SOURCE => serde_json::to_vec(&send(&requests, Request::Source).await?)?,
        REQUEST_HEALTH => serde_json::to_vec(&send(&requests, Request::Health).await?)?,
        REQUEST_RESEED => match send(&requests, Request::Reseed).await? {
            Ok(()) => b"ok\n".to_vec(),
            Err(error) => format!("error: {error}\n").into_bytes(),
        },
        _ => b"error: the requests are: services, gauges, source, health, explain TARGET, config, \
               log, log-level LEVEL, reseed\n"
            .to_vec(),
    };
    writer.write_all(&response).await
}

fn parse_level(text: &str) -> Option<Level> {
    [Level::ERROR, Level::WARN, Level::INFO, Level::DEBUG]
        .into_iter()
        .find(|level| level.as_str().eq_ignore_ascii_case(text))
}

/// Sends a request to the task that owns the table, and waits for its response.
///
/// # Errors
/// That task has ended.
pub async fn send<T>(
    requests: &mpsc::Sender<Request>,
    request: impl FnOnce(oneshot::Sender<T>) -> Request,
) -> io::Result<T> {
    let (sender, receiver) = oneshot::channel();
    requests.send(request(sender)).await.map_err(io::Error::other)?;
    receiver.await.map_err(io::Error::other)
}
