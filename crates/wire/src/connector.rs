//! TCP connections to the API server.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use cproxy_network::SocketSetup;
use http::Uri;
use hyper_util::rt::TokioIo;
use rustix::net::sockopt;
use tokio::net::{TcpSocket, TcpStream};
use tower::Service;

use super::dns;

/// A peer that has vanished without a FIN or RST is noticed after idle + interval x probes: 30 s.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 3;

/// Connector to the host of a URI. Applies `setup` to each socket before it connects.
#[derive(Clone, Debug)]
pub(super) struct Connector {
    pub(super) setup: SocketSetup,
    timeout: Option<Duration>,
}

impl Connector {
    pub(super) fn new(setup: SocketSetup, timeout: Option<Duration>) -> Self {
        Self { setup, timeout }
    }

    async fn connect_to_host(self, uri: Uri) -> io::Result<TcpStream> {
        let mut last = io::Error::new(io::ErrorKind::NotFound, format!("{uri}: the host name has no address"));
        for address in self.resolve(&uri).await? {
            match self.connect(address).await {
                Ok(stream) => return Ok(stream),
                Err(error) => last = io::Error::new(error.kind(), format!("{address}: {error}")),
            }
        }
        Err(last)
    }

    async fn resolve(&self, uri: &Uri) -> io::Result<Vec<SocketAddr>> {
        let port = uri.port_u16().unwrap_or(if uri.scheme_str() == Some("http") { 80 } else { 443 });
        let addresses = dns::resolve(host(uri), &self.setup).await?;
        Ok(addresses.into_iter().map(|address| SocketAddr::new(address, port)).collect())
    }

    async fn connect(&self, address: SocketAddr) -> io::Result<TcpStream> {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        self.setup.apply(&socket)?;
        socket.set_nodelay(true)?;
        keep_alive(&socket)?;
        let connecting = socket.connect(address);
        match self.timeout {
            Some(timeout) => tokio::time::timeout(timeout, connecting).await?,
            None => connecting.await,
        }
    }
}

/// Addresses of a URI's host that are known without a nameserver.
#[must_use]
pub fn known_addresses(uri: &Uri) -> Vec<IpAddr> {
    dns::local_addresses(host(uri))
}

fn host(uri: &Uri) -> &str {
    uri.host().unwrap_or_default().trim_matches(['[', ']'])
}

fn keep_alive(socket: &TcpSocket) -> io::Result<()> {
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(socket, KEEPALIVE_INTERVAL)?;
    Ok(sockopt::set_tcp_keepcnt(socket, KEEPALIVE_PROBES)?)
}

impl Service<Uri> for Connector {
    type Response = TokioIo<TcpStream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connector = self.clone();
        Box::pin(async move { connector.connect_to_host(uri).await.map(TokioIo::new) })
    }
}
