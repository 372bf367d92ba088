//! Agent's side of the socket.

use std::{io, sync::Arc, time::Duration};

use cproxy_core::sorted_map;
use cproxy_daemon::unix_socket::SocketFile;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, UnixStream},
    sync::Semaphore,
};
use tracing::Level;

use super::protocol::{
    REQUEST_CONFIG, REQUEST_EXPLAIN, REQUEST_GAUGES, REQUEST_HEALTH, REQUEST_HOLD, REQUEST_LOG, REQUEST_LOG_LEVEL,
    REQUEST_POLICY, REQUEST_PROBLEMS, REQUEST_RECEIVE, REQUEST_RESEED, REQUEST_SERVICES, REQUEST_SOURCE,
    RESPONSE_TIMEOUT, SOCKET,
};
use crate::{
    controls::Controls,
    mailbox::{Command, Mailbox, Query},
};

/// Longest request: one with the name of an object.
const REQUEST_BYTES_MAX: u64 = 512;
/// Time for a look at the programs, less than clients wait. After it, the last one counts.
const HEALTH_TIMEOUT: Duration = Duration::from_millis(1_500);
/// Maximum number of simultaneous responses; other clients wait. Each response holds a copy of the table.
const CONNECTIONS_MAX: usize = 4;

/// Serves clients for ever, also after somebody has removed the socket's file.
pub async fn serve(mut listener: UnixListener, file: Arc<SocketFile>, mailbox: Mailbox, controls: Controls) {
    loop {
        tokio::select! {
            () = accept(&listener, &mailbox, &controls) => return,
            again = file.clone().listen_again() => listener = again,
        }
    }
}

async fn accept(listener: &UnixListener, mailbox: &Mailbox, controls: &Controls) {
    let connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        // The semaphore is never closed.
        let permit = connections.clone().acquire_owned().await.ok();
        match listener.accept().await {
            // The socket's mode keeps others out, but somebody may have passed a descriptor on.
            Ok((stream, _)) if !is_trusted(&stream) => tracing::warn!("{SOCKET}: a request of another user is refused"),
            Ok((stream, _)) => {
                let (mailbox, controls) = (mailbox.clone(), controls.clone());
                drop(tokio::spawn(async move {
                    // A client that is too slow or hangs up gets no response, which affects no other client.
                    drop(tokio::time::timeout(RESPONSE_TIMEOUT, respond(stream, mailbox, &controls)).await);
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
pub async fn respond(mut stream: UnixStream, mailbox: Mailbox, controls: &Controls) -> io::Result<()> {
    let mut request = String::new();
    let (reader, mut writer) = stream.split();
    BufReader::new(reader.take(REQUEST_BYTES_MAX)).read_line(&mut request).await?;
    if let Some(target) = request.strip_prefix(REQUEST_EXPLAIN) {
        let response = match target.parse() {
            Ok(target) => serde_json::to_vec(&mailbox.ask(|sender| Query::Explain(target, sender)).await?)?,
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
        REQUEST_SERVICES => mailbox.ask(Query::Services).await?,
        REQUEST_GAUGES => {
            let gauges = sorted_map(mailbox.ask(Query::Gauges).await?);
            serde_json::to_vec(&gauges)?
        }
        REQUEST_SOURCE => serde_json::to_vec(&mailbox.ask(Query::Source).await?)?,
        REQUEST_PROBLEMS => serde_json::to_vec(&mailbox.ask(Query::Problems).await?)?,
        REQUEST_POLICY => serde_json::to_vec(&mailbox.ask(Query::Policy).await?)?,
        REQUEST_RECEIVE => serde_json::to_vec(&mailbox.ask(Query::Receive).await?)?,
        // Calls that get no answer take the check longer than clients wait.
        REQUEST_HEALTH => match tokio::time::timeout(HEALTH_TIMEOUT, mailbox.ask(Query::Health)).await {
            Ok(Ok(report)) => serde_json::to_vec(&report)?,
            Ok(Err(_)) | Err(_) => serde_json::to_vec(&mailbox.ask(Query::LastHealth).await?)?,
        },
        request @ (REQUEST_RESEED | REQUEST_HOLD) => match mailbox.order(reseed(request)).await? {
            Ok(()) => b"ok\n".to_vec(),
            Err(error) => format!("error: {error}\n").into_bytes(),
        },
        _ => b"error: the requests are: services, gauges, source, problems, policy, receive, health, explain TARGET, \
               config, log, log-level LEVEL, reseed, reseed before-snapshot\n"
            .to_vec(),
    };
    writer.write_all(&response).await
}

/// Order of a request.
fn reseed(request: &str) -> impl FnOnce(tokio::sync::oneshot::Sender<Result<(), String>>) -> Command {
    let holds = request == REQUEST_HOLD;
    move |sender| Command::Reseed { holds, sender }
}

fn parse_level(text: &str) -> Option<Level> {
    [Level::ERROR, Level::WARN, Level::INFO, Level::DEBUG]
        .into_iter()
        .find(|level| level.as_str().eq_ignore_ascii_case(text))
}
