//! Byte streams to an API server: TCP, directly or through an HTTP proxy, unix sockets and vsock.
//!
//! A name may have several addresses, such as those of relays behind a headless Service. Each connection tries them in
//! a random order, so that many agents spread over them.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    path::Path,
    sync::Arc,
    time::Duration,
};

use cproxy_network::SocketSetup;
use http::Uri;
use rustix::net::sockopt;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpSocket, TcpStream, UnixStream},
    time::Instant,
};
use tokio_vsock::{VsockAddr, VsockStream};

use crate::transport::{address::ServerAddress, dns, hosts, time_limit::within};

/// A peer that has vanished without a FIN or RST is noticed after idle + interval x probes: 30 s.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 3;

/// Longest head of a proxy's response.
const PROXY_HEAD_BYTES_MAX: usize = 8 << 10;

const HTTPS_PORT: u16 = 443;
const HTTP_PORT: u16 = 80;

/// Byte stream to a server.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// Limit on connecting to one of several addresses of a name, and on all of them. A name may have thousands.
const ADDRESS_TIMEOUT: Duration = Duration::from_secs(3);
const ADDRESSES_TIMEOUT: Duration = Duration::from_secs(30);

/// Address that a connection has reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReachedAddress {
    /// `None` where it does not matter: a local socket, or behind a proxy.
    pub(crate) ip: Option<IpAddr>,
    /// Number of other addresses that the name has.
    pub(crate) other_count: usize,
}

/// Connector to addresses of API servers. Applies `setup` to each network socket before it connects.
#[derive(Clone, Debug)]
pub(crate) struct Connector {
    setup: SocketSetup,
    /// Root directory with the resolver's files.
    root: Arc<Path>,
}

impl Connector {
    pub(crate) fn new(setup: SocketSetup) -> Self {
        Self { setup, root: Path::new(hosts::ROOT).into() }
    }

    /// Resolves names by the files below this root directory.
    pub(crate) fn with_root(self, root: &Path) -> Self {
        Self { root: root.into(), ..self }
    }

    /// Connects to an address, through the proxy unless the address is a local socket. `limit` is for each step. A
    /// name's addresses in `avoided` come last.
    pub(crate) async fn connect(
        &self,
        address: &ServerAddress,
        proxy: Option<&Proxy>,
        avoided: &[IpAddr],
        limit: Duration,
    ) -> io::Result<(Box<dyn Stream>, ReachedAddress)> {
        let stream: Box<dyn Stream> = match (address, proxy) {
            (ServerAddress::Url(url), Some(proxy)) => Box::new(self.connect_through(proxy, url, limit).await?),
            (ServerAddress::Url(url), None) => {
                let (stream, reached) = self.connect_to_host(url, avoided, limit).await?;
                return Ok((Box::new(stream), reached));
            }
            (ServerAddress::Unix(path), _) => {
                let stream = within(limit, UnixStream::connect(path)).await;
                Box::new(stream.map_err(|error| describe_unix(path, &error))?)
            }
            (&ServerAddress::Vsock { cid, port }, _) => {
                let stream = within(limit, VsockStream::connect(VsockAddr::new(cid, port))).await;
                Box::new(stream.map_err(describe_vsock)?)
            }
        };
        Ok((stream, ReachedAddress::default()))
    }

    async fn connect_to_host(
        &self,
        url: &Uri,
        avoided: &[IpAddr],
        limit: Duration,
    ) -> io::Result<(TcpStream, ReachedAddress)> {
        let host = url.host().unwrap_or_default().trim_matches(['[', ']']);
        let mut last = io::Error::new(io::ErrorKind::NotFound, format!("{host} has no address"));
        let addresses = attempt_order(dns::resolve(host, &self.setup, &self.root).await?, avoided, random_below);
        let other_count = addresses.len().saturating_sub(1);
        let limit = if other_count == 0 { limit } else { limit.min(ADDRESS_TIMEOUT) };
        let start = Instant::now();
        for ip in addresses {
            if start.elapsed() > ADDRESSES_TIMEOUT {
                break;
            }
            let address = SocketAddr::new(ip, port(url));
            match self.connect_to(address, limit).await {
                Ok(stream) => return Ok((stream, ReachedAddress { ip: Some(ip), other_count })),
                Err(error) => last = io::Error::new(error.kind(), format!("{address}: {error}")),
            }
        }
        Err(last)
    }

    async fn connect_to(&self, address: SocketAddr, limit: Duration) -> io::Result<TcpStream> {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        self.setup.apply(&socket)?;
        socket.set_nodelay(true)?;
        keep_alive(&socket)?;
        within(limit, socket.connect(address)).await
    }

    /// Opens a tunnel by CONNECT (RFC 9110, 9.3.6).
    async fn connect_through(&self, proxy: &Proxy, url: &Uri, limit: Duration) -> io::Result<TcpStream> {
        let named = |error: io::Error| io::Error::new(error.kind(), format!("proxy {}: {error}", proxy.url));
        let (mut stream, _) = self.connect_to_host(&proxy.url, &[], limit).await.map_err(named)?;
        let target = format!("{}:{}", url.host().unwrap_or_default(), port(url));
        let tunnel = open_tunnel(&mut stream, &target, proxy.authorization.as_deref());
        within(limit, tunnel).await.map_err(named)?;
        Ok(stream)
    }
}

/// Addresses in the order in which they are tried: IPv4 first, each family in a random order, those to avoid last.
/// `random_below` chooses a number below its argument.
fn attempt_order(mut addresses: Vec<IpAddr>, avoided: &[IpAddr], random_below: impl Fn(usize) -> usize) -> Vec<IpAddr> {
    for end in (2..=addresses.len()).rev() {
        addresses.swap(end - 1, random_below(end).min(end - 1));
    }
    let kinds = [(false, false), (false, true), (true, false), (true, true)];
    let is_of = |kind| move |address: &&IpAddr| (avoided.contains(address), address.is_ipv6()) == kind;
    kinds.into_iter().flat_map(|kind| addresses.iter().filter(is_of(kind)).copied()).collect()
}

/// Random number below `end`, independent of any before: copies of a snapshot differ.
fn random_below(end: usize) -> usize {
    let mut bytes = [0; 8];
    // Early in a boot the numbers may be poor, but do not block.
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::INSECURE).ok();
    let scaled = u128::from(u64::from_ne_bytes(bytes)) * end as u128;
    (scaled >> u64::BITS) as usize
}

/// HTTP proxy.
#[derive(Clone, Debug)]
pub(crate) struct Proxy {
    /// Its address, without user information.
    pub(crate) url: Uri,
    /// Value of Proxy-Authorization.
    pub(crate) authorization: Option<String>,
}

async fn open_tunnel(stream: &mut TcpStream, target: &str, authorization: Option<&str>) -> io::Result<()> {
    let authorization = authorization.map(|value| format!("Proxy-Authorization: {value}\r\n")).unwrap_or_default();
    let request = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{authorization}\r\n");
    stream.write_all(request.as_bytes()).await?;
    // One byte at a time, since what follows the head belongs to the tunnel. Heads are short and read once.
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() == PROXY_HEAD_BYTES_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the head of its response is too long"));
        }
        head.push(stream.read_u8().await?);
    }
    let line = String::from_utf8_lossy(&head);
    let line = line.lines().next().unwrap_or_default();
    match line.split(' ').nth(1).and_then(|code| code.parse::<u16>().ok()) {
        Some(200..300) => Ok(()),
        _ => Err(io::Error::other(format!("it refuses to connect to {target}: {line}"))),
    }
}

fn port(url: &Uri) -> u16 {
    url.port_u16().unwrap_or(if url.scheme_str() == Some("http") { HTTP_PORT } else { HTTPS_PORT })
}

fn keep_alive(socket: &TcpSocket) -> io::Result<()> {
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(socket, KEEPALIVE_INTERVAL)?;
    Ok(sockopt::set_tcp_keepcnt(socket, KEEPALIVE_PROBES)?)
}

fn describe_unix(path: &Path, error: &io::Error) -> io::Error {
    let hint = match error.kind() {
        io::ErrorKind::NotFound => "; there is no such socket",
        io::ErrorKind::ConnectionRefused => "; nothing listens on it",
        _ => "",
    };
    io::Error::new(error.kind(), format!("{}: {error}{hint}", path.display()))
}

fn describe_vsock(error: io::Error) -> io::Error {
    // Without the module there is no address family; with the module and without a device there is no host.
    let hint = match error.raw_os_error() {
        Some(libc::EAFNOSUPPORT) => "this kernel has no vsock (CONFIG_VSOCKETS)",
        Some(libc::ENODEV | libc::ENETUNREACH | libc::EADDRNOTAVAIL) => {
            "this VM has no vsock device for that context id"
        }
        Some(libc::ECONNRESET | libc::ECONNREFUSED | libc::ETIMEDOUT) => "nothing listens on that port",
        _ => return error,
    };
    io::Error::new(error.kind(), format!("{error}; {hint}"))
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    /// Outcome of a tunnel through a proxy that sends this response, and the request that it got.
    async fn tunnel(response: &str, authorization: Option<&str>) -> (io::Result<()>, String) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut proxy, _) = listener.accept().await.unwrap();
        proxy.write_all(response.as_bytes()).await.unwrap();
        proxy.shutdown().await.unwrap();
        let result = open_tunnel(&mut stream, "api:6443", authorization).await;
        stream.shutdown().await.unwrap();
        let mut request = String::new();
        proxy.read_to_string(&mut request).await.unwrap();
        (result, request)
    }

    #[test]
    fn addresses_are_tried_in_a_random_order_of_each_family() {
        let ips = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<IpAddr>>();
        let all = ips(&["fd00::1", "10.0.0.1", "10.0.0.2", "fd00::2", "10.0.0.3"]);
        let last = |end: usize| end - 1;
        assert_eq!(
            attempt_order(all.clone(), &[], last),
            ips(&["10.0.0.1", "10.0.0.2", "10.0.0.3", "fd00::1", "fd00::2"]),
            "no swaps"
        );
        let avoided = ips(&["10.0.0.1", "fd00::9"]);
        assert_eq!(
            attempt_order(all.clone(), &avoided, last),
            ips(&["10.0.0.2", "10.0.0.3", "fd00::1", "fd00::2", "10.0.0.1"])
        );
        assert!(attempt_order(Vec::new(), &[], last).is_empty());
        let mut counts = std::collections::BTreeMap::<_, u32>::new();
        for _ in 0..6000 {
            *counts.entry(attempt_order(all.clone(), &[], random_below)[..3].to_vec()).or_default() += 1;
        }
        // 1000 of each order are expected, with a standard deviation of 29.
        assert_eq!(counts.len(), 6);
        assert!(counts.values().all(|count| (800..1200).contains(count)), "{counts:?}");
    }

    #[tokio::test]
    async fn a_tunnel_is_opened_by_connect() {
        let (result, request) = tunnel("HTTP/1.1 200 Connection established\r\nVia: x\r\n\r\n", None).await;
        result.unwrap();
        assert_eq!(request, "CONNECT api:6443 HTTP/1.1\r\nHost: api:6443\r\n\r\n");
        let (_, request) = tunnel("HTTP/1.1 200 OK\r\n\r\n", Some("Basic dTpw")).await;
        assert!(request.contains("\r\nProxy-Authorization: Basic dTpw\r\n"), "{request}");
    }

    #[tokio::test]
    async fn a_refused_tunnel_is_an_error_with_the_status_line() {
        let (result, _) = tunnel("HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", None).await;
        let error = result.unwrap_err().to_string();
        assert_eq!(error, "it refuses to connect to api:6443: HTTP/1.1 407 Proxy Authentication Required");
        assert!(tunnel("HTTP/1.1 200 OK\r\n", None).await.0.is_err(), "cut off");
        let long = format!("HTTP/1.1 200 OK\r\nx: {}\r\n\r\n", "x".repeat(PROXY_HEAD_BYTES_MAX));
        assert!(tunnel(&long, None).await.0.is_err(), "too long");
    }
}
