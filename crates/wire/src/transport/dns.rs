//! DNS client for the API server's name, over sockets that are never translated.
//!
//! The C library's resolver cannot be used. Its sockets cannot be marked, so with a ClusterIP in resolv.conf the agent
//! would depend on its own table. In a static binary it also needs shared libraries, which a small guest lacks.
//!
//! The rules are those of resolv.conf(5) and hosts(5): search list, ndots, attempts, timeout; TCP for long answers.
//! Other than the C library, it asks the next nameserver after a second, and one that did not answer last for a minute.

mod message;

use std::{
    io, iter,
    net::{IpAddr, SocketAddr, SocketAddrV6},
    path::Path,
    pin::pin,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use cproxy_core::printable;
use cproxy_network::SocketSetup;
use simple_dns::TYPE;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, UdpSocket},
    task::JoinSet,
};

use self::message::{DnsAnswer, encode_query, parse_answer};
use crate::transport::{
    hosts::{ROOT, local_addresses, text_of},
    time_limit::within,
};

/// File below a root directory.
const RESOLV_CONF: &str = "etc/resolv.conf";
const DNS_PORT: u16 = 53;

/// Bounds of resolv.conf(5).
const NAMESERVERS_MAX: usize = 3;
const NDOTS_MAX: usize = 15;
const TIMEOUT_S_MAX: u64 = 30;
const ATTEMPTS_MAX: u32 = 5;

/// Longest answer over UDP without EDNS (RFC 1035, 2.3.4).
const UDP_ANSWER_BYTES_MAX: usize = 512;

/// Time after which the next nameserver is asked, too.
const STAGGER: Duration = Duration::from_secs(1);

/// Time for which a nameserver that has not answered comes last.
const SILENT_TIME: Duration = Duration::from_secs(60);

/// Time for the answer of one family, once the other has addresses.
const OTHER_FAMILY_WAIT: Duration = Duration::from_millis(250);

/// Nameservers that have not answered, and when.
static SILENT: Mutex<Vec<(SocketAddr, Instant)>> = Mutex::new(Vec::new());

/// Settings of resolv.conf.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Resolver {
    nameservers: Vec<SocketAddr>,
    search: Vec<String>,
    ndots: usize,
    timeout: Duration,
    attempts: u32,
    /// The first nameserver whose address cannot be read.
    unreadable: Option<String>,
}

/// Addresses of a host, IPv4 first: the local ones, else those of the nameservers. `root` has the resolver's files.
pub(crate) async fn resolve(host: &str, setup: &SocketSetup, root: &Path) -> io::Result<Vec<IpAddr>> {
    let named = |error: io::Error| io::Error::new(error.kind(), format!("cannot resolve {host}: {error}"));
    let addresses = local_addresses(host, root);
    if !addresses.is_empty() {
        return Ok(addresses);
    }
    // Without the file, the nameserver is on this machine (resolv.conf(5)).
    let resolver = Resolver::parse(&text_of(root, RESOLV_CONF));
    resolver.resolve(host, setup).await.map_err(named)
}

/// Name of the cluster's own Service, which each cluster's nameserver has. "No such name" is an answer as well.
const PROBED_NAME: &str = "kubernetes.default.svc.cluster.local";

/// Asks each nameserver of /etc/resolv.conf once, as an application does: over sockets that may be translated. Returns
/// the time until its answer, which need not have an address. `limit` is for all together.
///
/// # Errors
/// Of a nameserver: it does not answer, or answers with an error.
pub async fn probe_nameservers(limit: Duration) -> Vec<(IpAddr, io::Result<Duration>)> {
    let resolver = Resolver::parse(&text_of(Path::new(ROOT), RESOLV_CONF));
    let (start, setup) = (Instant::now(), SocketSetup::none());
    let probes: Vec<_> = resolver
        .nameservers
        .into_iter()
        .map(|server| {
            let setup = setup.clone();
            let probe = async move {
                within(limit, query_server(server, PROBED_NAME, TYPE::A, &setup)).await.map(|_| start.elapsed())
            };
            (server.ip(), tokio::spawn(probe))
        })
        .collect();
    let mut answers = Vec::new();
    for (server, probe) in probes {
        answers.push((server, probe.await.unwrap_or_else(|error| Err(io::Error::other(error)))));
    }
    answers
}

/// Address of a nameserver. One that is local to a link has the name or number of its network device behind `%`.
fn nameserver(word: &str) -> Option<SocketAddr> {
    let Some((address, scope)) = word.split_once('%') else {
        return Some(SocketAddr::new(word.parse().ok()?, DNS_PORT));
    };
    let scope = scope.parse().ok().or_else(|| index_of(scope))?;
    Some(SocketAddrV6::new(address.parse().ok()?, DNS_PORT, 0, scope).into())
}

/// Index of a network device that has an IPv6 address, as the nameserver's must (Documentation/filesystems/proc.rst).
fn index_of(device: &str) -> Option<u32> {
    let addresses = std::fs::read_to_string("/proc/net/if_inet6").ok()?;
    let mut lines = addresses.lines().map(|line| line.split_ascii_whitespace().collect::<Vec<_>>());
    lines.find_map(|words| match words.as_slice() {
        [_, index, .., name] if *name == device => u32::from_str_radix(index, 16).ok(),
        _ => None,
    })
}

impl Resolver {
    fn parse(text: &str) -> Self {
        let local = SocketAddr::new(IpAddr::from([127, 0, 0, 1]), DNS_PORT);
        let mut resolver = Self {
            nameservers: Vec::new(),
            search: Vec::new(),
            ndots: 1,
            timeout: Duration::from_secs(5),
            attempts: 2,
            unreadable: None,
        };
        for line in text.lines() {
            let line = line.split(['#', ';']).next().unwrap_or_default();
            let mut words = line.split_ascii_whitespace();
            match words.next() {
                Some("nameserver") => match words.next().map(|word| nameserver(word).ok_or(word)) {
                    Some(Ok(server)) => resolver.nameservers.push(server),
                    Some(Err(word)) => drop(resolver.unreadable.get_or_insert_with(|| printable(word))),
                    None => {}
                },
                Some("search" | "domain") => resolver.search = words.map(str::to_owned).collect(),
                Some("options") => words.for_each(|word| resolver.option(word)),
                _ => {}
            }
        }
        resolver.nameservers.truncate(NAMESERVERS_MAX);
        // One that cannot be read is not this machine.
        if resolver.nameservers.is_empty() && resolver.unreadable.is_none() {
            resolver.nameservers.push(local);
        }
        resolver
    }

    fn option(&mut self, word: &str) {
        match word.split_once(':').map(|(name, value)| (name, value.parse::<u64>())) {
            Some(("ndots", Ok(value))) => self.ndots = (value as usize).min(NDOTS_MAX),
            Some(("timeout", Ok(value))) => self.timeout = Duration::from_secs(value.clamp(1, TIMEOUT_S_MAX)),
            Some(("attempts", Ok(value))) => self.attempts = (value as u32).clamp(1, ATTEMPTS_MAX),
            _ => {}
        }
    }

    /// Full names to query, in order.
    fn candidates(&self, host: &str) -> Vec<String> {
        if let Some(absolute) = host.strip_suffix('.') {
            return vec![absolute.to_owned()];
        }
        let mut names: Vec<_> =
            self.search.iter().map(|domain| format!("{host}.{}", domain.trim_matches('.'))).collect();
        let has_enough_dots = host.matches('.').count() >= self.ndots;
        names.insert(if has_enough_dots { 0 } else { names.len() }, host.to_owned());
        names
    }

    /// Resolves a host. A failure for one name or family does not hide the addresses of another. If no nameserver
    /// answers the first queries in time, no others are sent, so that the failure is logged soon.
    async fn resolve(&self, host: &str, setup: &SocketSetup) -> io::Result<Vec<IpAddr>> {
        if let (Some(word), true) = (&self.unreadable, self.nameservers.is_empty()) {
            let message = format!("/{RESOLV_CONF} has no nameserver but {word}, which is no address: correct it");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let mut last = io::Error::new(io::ErrorKind::NotFound, "no nameserver has an address for it");
        let mut has_answer = false;
        for name in self.candidates(host) {
            let found = self.query_both(&name, setup).await;
            has_answer |= found.iter().any(Result::is_ok);
            let mut addresses = Vec::new();
            for found in found {
                match found {
                    Ok(found) => addresses.extend(found),
                    Err(error) if !has_answer && error.kind() == io::ErrorKind::TimedOut => return Err(error),
                    Err(error) => last = error,
                }
            }
            if !addresses.is_empty() {
                return Ok(addresses);
            }
        }
        Err(last)
    }

    /// Answers for both families, which are asked for together. One that has addresses waits for the other only a
    /// moment: some nameservers never answer for IPv6.
    async fn query_both(&self, name: &str, setup: &SocketSetup) -> Vec<io::Result<Vec<IpAddr>>> {
        let mut first = pin!(self.query_all(name, TYPE::A, setup));
        let mut second = pin!(self.query_all(name, TYPE::AAAA, setup));
        let has_some = |answer: &io::Result<Vec<IpAddr>>| answer.as_ref().is_ok_and(|found| !found.is_empty());
        tokio::select! {
            v4 = &mut first => {
                let wait = if has_some(&v4) { OTHER_FAMILY_WAIT } else { Duration::MAX };
                let v6 = tokio::time::timeout(wait, second).await.ok();
                iter::once(v4).chain(v6).collect()
            }
            v6 = &mut second => {
                let wait = if has_some(&v6) { OTHER_FAMILY_WAIT } else { Duration::MAX };
                let v4 = tokio::time::timeout(wait, first).await.ok();
                v4.into_iter().chain(iter::once(v6)).collect()
            }
        }
    }

    /// Nameservers in the order in which they are asked: those that did not answer a moment ago come last.
    fn order(&self) -> Vec<SocketAddr> {
        let (silent, now) = (SILENT.lock().unwrap_or_else(PoisonError::into_inner), Instant::now());
        let is_silent = |server: &SocketAddr| {
            silent.iter().any(|(other, at)| other == server && now.saturating_duration_since(*at) < SILENT_TIME)
        };
        let (silent, others): (Vec<_>, Vec<_>) = self.nameservers.iter().partition(|server| is_silent(server));
        [others, silent].concat()
    }

    /// Queries the nameservers until one answers: each a second after the one before, or as soon as that has failed.
    /// "No such name" is an answer without addresses.
    async fn query_all(&self, name: &str, kind: TYPE, setup: &SocketSetup) -> io::Result<Vec<IpAddr>> {
        let mut last = io::Error::other("no nameserver");
        for _ in 0..self.attempts {
            let (order, mut queries) = (self.order(), JoinSet::new());
            let end = Instant::now() + self.timeout;
            // Servers that were asked, in this order, and whether each has answered.
            let mut asked = Vec::new();
            let mut servers = order.into_iter();
            loop {
                let next = servers.next();
                if let Some(server) = next {
                    let (name, setup, index) = (name.to_owned(), setup.clone(), asked.len());
                    queries.spawn(async move { (index, query_server(server, &name, kind, &setup).await) });
                    asked.push((server, false));
                }
                let until = if next.is_some() { (Instant::now() + STAGGER).min(end) } else { end };
                match tokio::time::timeout_at(until.into(), queries.join_next()).await {
                    Ok(Some(Ok((index, Ok(addresses))))) => {
                        record_silence(asked.iter().take(index));
                        return Ok(addresses);
                    }
                    Ok(Some(Ok((index, Err(error))))) => {
                        let Some((server, has_answered)) = asked.get_mut(index) else { continue };
                        *has_answered = true;
                        last = io::Error::new(error.kind(), format!("nameserver {}: {error}", server.ip()));
                    }
                    Ok(Some(Err(error))) => last = io::Error::other(error),
                    // All have failed.
                    Ok(None) => break,
                    Err(_) if Instant::now() >= end => {
                        if let Some((server, _)) = asked.iter().find(|(_, has_answered)| !has_answered) {
                            let message = format!("nameserver {}: no answer in time", server.ip());
                            last = io::Error::new(io::ErrorKind::TimedOut, message);
                        }
                        record_silence(&asked);
                        break;
                    }
                    Err(_) => {}
                }
            }
        }
        Err(last)
    }
}

/// Remembers those of some nameservers that have not answered.
fn record_silence<'a>(asked: impl IntoIterator<Item = &'a (SocketAddr, bool)>) {
    let (mut silent, now) = (SILENT.lock().unwrap_or_else(PoisonError::into_inner), Instant::now());
    for (server, _) in asked.into_iter().filter(|(_, has_answered)| !has_answered) {
        silent.retain(|(other, at)| other != server && now.saturating_duration_since(*at) < SILENT_TIME);
        silent.push((*server, now));
    }
}

async fn query_server(server: SocketAddr, name: &str, kind: TYPE, setup: &SocketSetup) -> io::Result<Vec<IpAddr>> {
    let id = random_id()?;
    let query = encode_query(id, name, kind)?;
    match parse_answer(&query_over_udp(server, &query, setup).await?, &query)? {
        DnsAnswer::Addresses(addresses) => Ok(addresses),
        DnsAnswer::Truncated => match parse_answer(&query_over_tcp(server, &query, setup).await?, &query)? {
            DnsAnswer::Addresses(addresses) => Ok(addresses),
            DnsAnswer::Truncated => Err(io::Error::other("the answer is truncated even over TCP")),
        },
    }
}

fn random_id() -> io::Result<u16> {
    let mut id = [0; 2];
    rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())?;
    Ok(u16::from_ne_bytes(id))
}

/// Sends a query over UDP and returns its answer. The connected socket receives from the server only. Datagrams with
/// another number or question are ignored.
async fn query_over_udp(server: SocketAddr, query: &[u8], setup: &SocketSetup) -> io::Result<Vec<u8>> {
    let any = if server.is_ipv4() { IpAddr::from([0; 4]) } else { IpAddr::from([0; 16]) };
    let socket = UdpSocket::bind((any, 0)).await?;
    setup.apply(&socket)?;
    socket.connect(server).await?;
    socket.send(query).await?;
    loop {
        let mut answer = vec![0; UDP_ANSWER_BYTES_MAX];
        let length = socket.recv(&mut answer).await?;
        answer.truncate(length);
        // That to another query is ignored.
        let is_other = |error: &io::Error| error.kind() == io::ErrorKind::InvalidData;
        if !parse_answer(&answer, query).as_ref().is_err_and(is_other) {
            return Ok(answer);
        }
    }
}

/// Sends a query over TCP and returns its answer. Each message follows its length (RFC 1035, 4.2.2).
async fn query_over_tcp(server: SocketAddr, query: &[u8], setup: &SocketSetup) -> io::Result<Vec<u8>> {
    let socket = if server.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    setup.apply(&socket)?;
    let mut stream = socket.connect(server).await?;
    let length = u16::try_from(query.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes(), query].concat()).await?;
    let mut answer = vec![0; stream.read_u16().await?.into()];
    stream.read_exact(&mut answer).await?;
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn resolv_conf_is_parsed_by_the_rules_of_its_manual() {
        let resolver = Resolver::parse(
            "; comment\nnameserver 10.96.0.10\nnameserver fd00::a # second\nnameserver nonsense\nnameserver 1.1.1.1\n\
             nameserver 2.2.2.2\ndomain old\nsearch ns.svc.cluster.local svc.cluster.local.\n\
             options ndots:5 timeout:0 rotate attempts:9\n",
        );
        let servers: Vec<_> = resolver.nameservers.iter().map(SocketAddr::ip).collect();
        assert_eq!(servers, [ip("10.96.0.10"), ip("fd00::a"), ip("1.1.1.1")]);
        assert_eq!((resolver.ndots, resolver.timeout.as_secs(), resolver.attempts), (5, 1, 5));
        assert_eq!(resolver.candidates("api"), ["api.ns.svc.cluster.local", "api.svc.cluster.local", "api"]);
        assert_eq!(resolver.candidates("a.b.c.d.e.f")[0], "a.b.c.d.e.f");
        assert_eq!(resolver.candidates("api.example."), ["api.example"]);
        assert_eq!(Resolver::parse("").nameservers, ["127.0.0.1:53".parse().unwrap()]);
    }

    #[test]
    fn a_silent_nameserver_is_queried_for_one_name_only() {
        let nameserver = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        nameserver.set_nonblocking(true).unwrap();
        let resolver = Resolver {
            nameservers: vec![nameserver.local_addr().unwrap()],
            search: vec!["svc".to_owned(), "local".to_owned()],
            ndots: 5,
            timeout: Duration::from_millis(20),
            attempts: 2,
            unreadable: None,
        };
        let setup = SocketSetup::none();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let error = runtime.block_on(resolver.resolve("api", &setup)).unwrap_err();
        assert_eq!(error.to_string(), "nameserver 127.0.0.1: no answer in time");
        let questions = iter::from_fn(|| nameserver.recv(&mut [0; 512]).ok());
        assert_eq!(questions.count(), 4, "as many of each family as there are attempts");
    }

    /// Answers questions as the closure says, until the test ends.
    fn serve(mut answer: impl FnMut(u8) -> Option<u8> + Send + 'static) -> SocketAddr {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        std::thread::spawn(move || {
            let mut query = [0; 512];
            while let Ok((length, client)) = socket.recv_from(&mut query) {
                // The type of the question is its last word but one.
                let Some(last) = answer(query[length - 3]) else { continue };
                let mut response = query[..length].to_vec();
                response[2] |= 0x80;
                if query[length - 3] == 1 {
                    response[7] = 1;
                    response.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 9, 0, 4, 192, 0, 2, last]);
                }
                drop(socket.send_to(&response, client));
            }
        });
        address
    }

    fn resolver(nameservers: Vec<SocketAddr>) -> Resolver {
        Resolver { nameservers, timeout: Duration::from_secs(5), ..Resolver::parse("") }
    }

    async fn timed(resolver: &Resolver) -> (Vec<IpAddr>, u128) {
        let start = Instant::now();
        let found = resolver.resolve("api.example", &SocketSetup::none()).await.unwrap();
        (found, start.elapsed().as_millis())
    }

    #[tokio::test]
    async fn a_dead_nameserver_costs_a_second_once_and_one_that_drops_aaaa_a_moment() {
        let (dead, good) = (serve(|_| None), serve(|_| Some(7)));
        let both = resolver(vec![dead, good]);
        let (found, millis) = timed(&both).await;
        assert!(found == [ip("192.0.2.7")] && (900..3_000).contains(&millis), "{found:?} after {millis} ms");
        let (found, millis) = timed(&both).await;
        assert!(found == [ip("192.0.2.7")] && millis < 500, "{found:?} after {millis} ms");
        let deaf = serve(|kind| (kind == 1).then_some(8));
        let (found, millis) = timed(&resolver(vec![deaf])).await;
        assert!(found == [ip("192.0.2.8")] && millis < 2_000, "{found:?} after {millis} ms");
    }

    #[test]
    fn a_nameserver_of_a_link_keeps_its_device_and_one_that_cannot_be_read_is_not_this_machine() {
        let resolver = Resolver::parse("nameserver fe80::1%lo\nnameserver fe80::2%7\nnameserver fe80::3%none\n");
        let index = index_of("lo").unwrap();
        assert_eq!(
            resolver.nameservers,
            [(1, index), (2, 7)].map(|(host, scope)| {
                SocketAddr::from(SocketAddrV6::new(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, host), 53, 0, scope))
            })
        );
        let resolver = Resolver::parse("nameserver fe80::3%none\n");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let error = runtime.block_on(resolver.resolve("api", &SocketSetup::none())).unwrap_err();
        let expected = "/etc/resolv.conf has no nameserver but fe80::3%none, which is no address: correct it";
        assert_eq!(error.to_string(), expected);
    }
}
