//! Servers at unix sockets, and clients of them, for tests.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use cproxy_network::SocketSetup;
use http::{Response, header::RETRY_AFTER};
use tokio::{
    net::{UnixListener, UnixStream},
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
};

use crate::{
    client::api_client::ApiClient,
    credentials::configuration::{ApiServer, configure},
    transport::address::ServerAddress,
};

/// Time after which a test fails that waits for something.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// Behaviour of a server after a connection.
#[derive(Clone, Copy, Debug)]
pub(super) enum Server {
    /// Sends nothing.
    Silent,
    /// Speaks HTTP/2 and responds to no request.
    Mute,
    Serving,
    /// Responds with this status, and asks for a pause.
    Refusing(u16),
    /// Serves one request and closes the connection.
    Leaving,
}

/// Accepts connections at a socket, and sends a message for each request, or for each connection of a silent
/// server.
pub(super) async fn serve(socket: UnixListener, server: Server, requests: UnboundedSender<()>) {
    let mut streams = Vec::<UnixStream>::new();
    loop {
        let stream = socket.accept().await.unwrap().0;
        if let Server::Silent = server {
            streams.push(stream);
            requests.send(()).unwrap();
            continue;
        }
        let requests = requests.clone();
        drop(tokio::spawn(async move {
            let mut connection = h2::server::handshake(stream).await.unwrap();
            let mut held = Vec::new();
            while let Some(Ok((_, mut respond))) = connection.accept().await {
                let response = Response::builder().header(RETRY_AFTER, 30);
                match server {
                    Server::Serving => drop(respond.send_response(Response::new(()), true).unwrap()),
                    Server::Refusing(code) => {
                        drop(respond.send_response(response.status(code).body(()).unwrap(), true).unwrap());
                    }
                    Server::Leaving => {
                        respond.send_response(Response::new(()), true).unwrap();
                        connection.graceful_shutdown();
                    }
                    Server::Silent | Server::Mute => {}
                }
                held.push(respond);
                requests.send(()).ok();
            }
        }));
    }
}

/// Options with the server at this socket alone.
pub(super) fn at(path: &Path) -> ApiServer {
    ApiServer { addresses: vec![ServerAddress::Unix(path.to_owned())], ..ApiServer::default() }
}

/// An empty directory.
pub(super) fn directory(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("cproxy-client-{name}-{}", std::process::id()));
    fs::remove_dir_all(&dir).ok();
    fs::create_dir(&dir).unwrap();
    dir
}

/// Client of these servers, and a message for each of their connections or requests.
pub(super) async fn client_of(dir: &Path, servers: &[Server]) -> (Arc<ApiClient>, ApiServer, UnboundedReceiver<()>) {
    let (sender, requests) = unbounded_channel();
    let addresses = servers.iter().enumerate().map(|(index, server)| {
        let path = dir.join(index.to_string());
        drop(tokio::spawn(serve(UnixListener::bind(&path).unwrap(), *server, sender.clone())));
        ServerAddress::Unix(path)
    });
    let options = ApiServer { addresses: addresses.collect(), ..ApiServer::default() };
    let configuration = configure(&options).await.unwrap();
    let client = Arc::new(ApiClient::new(options.clone(), configuration, SocketSetup::none()));
    (client, options, requests)
}
