//! Addresses of the VM, at most one of each family: the kernel's source address towards the API server, else that of
//! the default route. They are compared with `loadBalancerSourceRanges`.

mod route;

use std::{fmt, net::IpAddr};

use cproxy_core::{Address, Event};
use cproxy_datapath::bpf::SocketMark;
use cproxy_wire as wire;
use cproxy_wire::NetworkChanges;
use http::Uri;
use rustix::io::Errno;
use tokio::sync::mpsc;

/// Addresses of the VM, found and followed.
#[derive(Debug)]
pub struct OwnAddresses {
    finder: Finder,
    changes: Result<NetworkChanges, Errno>,
    found: Found,
}

impl OwnAddresses {
    /// Finds the addresses and follows their changes. Call it inside a tokio runtime. The mark is for the sockets that
    /// look for a route: they must not be translated.
    #[must_use]
    pub fn find(mark: SocketMark, api_server: Option<Uri>) -> Self {
        // The other way round, a change between the two would be missed.
        let changes = NetworkChanges::open();
        let mut finder = Finder { mark, api_server };
        let found = finder.find();
        tracing::info!("own addresses: {found}");
        Self { finder, changes, found }
    }

    /// Current addresses.
    #[must_use]
    pub fn addresses(&self) -> Vec<Address> {
        self.found.addresses()
    }

    /// Sends the addresses whenever they have changed; ends when the receiver is closed, or when changes cannot be
    /// seen.
    pub async fn follow(self, events: mpsc::WeakSender<Vec<Event>>) {
        let Self { mut finder, changes, mut found } = self;
        let end = async {
            let changes = changes?;
            loop {
                changes.wait().await?;
                let now = finder.find();
                if now == found {
                    continue;
                }
                tracing::info!("own addresses now: {now}");
                found = now;
                let Some(events) = events.upgrade() else { return Ok(()) };
                if events.send(vec![Event::PodIps(found.addresses())]).await.is_err() {
                    return Ok(());
                }
            }
        };
        let end: Result<(), Errno> = end.await;
        if let Err(error) = end {
            tracing::warn!(
                "netlink: {error}; changes of the own addresses are not seen: restart the agent after one, or pass --pod-ip"
            );
        }
    }
}

/// Queries the kernel.
#[derive(Debug)]
struct Finder {
    mark: SocketMark,
    api_server: Option<Uri>,
}

impl Finder {
    fn find(&mut self) -> Found {
        let api_server = self.api_server.as_ref().map(wire::known_addresses).unwrap_or_default();
        let source = |to| {
            let source = route::source(to, &mut self.mark);
            tracing::debug!("source of what is sent to {to}: {source:?}");
            source.ok()
        };
        Found::new(&api_server, source)
    }
}

/// Destination that selects an address of the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    ApiServer,
    DefaultRoute,
}

/// Addresses of the VM, each with the destination that selected it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Found(Vec<(IpAddr, Way)>);

impl Found {
    /// Queries `source` for the source address towards each destination. In each family the first usable answer counts.
    fn new(api_server: &[IpAddr], mut source: impl FnMut(IpAddr) -> Option<IpAddr>) -> Self {
        let mut found = Vec::new();
        for elsewhere in route::ELSEWHERE {
            let known = api_server.iter().filter(|address| address.is_ipv4() == elsewhere.is_ipv4());
            let to = known.map(|&address| (address, Way::ApiServer)).chain([(elsewhere, Way::DefaultRoute)]);
            let mut usable = to.filter_map(|(to, way)| Some((source(to).filter(route::is_usable)?, way)));
            found.extend(usable.next());
        }
        Self(found)
    }

    fn addresses(&self) -> Vec<Address> {
        self.0.iter().map(|&(address, _)| address.into()).collect()
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("none found");
        }
        for (index, (address, way)) in self.0.iter().enumerate() {
            let way = match way {
                Way::ApiServer => "route to the API server",
                Way::DefaultRoute => "default route",
            };
            write!(f, "{}{address} ({way})", if index == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel's answers, by destination; to everywhere else the last one.
    fn find(api_server: &[&str], routes: &[(&str, &str)], default: &[&str]) -> String {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let api_server: Vec<_> = api_server.iter().map(|text| ip(text)).collect();
        let source = |to: IpAddr| {
            let exact = routes.iter().find(|(destination, _)| ip(destination) == to).map(|(_, source)| ip(source));
            exact.or_else(|| default.iter().map(|text| ip(text)).find(|source| source.is_ipv4() == to.is_ipv4()))
        };
        Found::new(&api_server, source).to_string()
    }

    #[test]
    fn the_route_to_the_api_server_comes_before_the_default_route_in_its_family() {
        let default = ["10.0.0.2", "fd00::2"];
        let both = "10.0.0.2 (default route), fd00::2 (default route)";
        assert_eq!(find(&[], &[], &default), both);
        assert_eq!(
            find(&["192.0.2.1"], &[("192.0.2.1", "192.0.2.9")], &default),
            "192.0.2.9 (route to the API server), fd00::2 (default route)"
        );
        assert_eq!(
            find(&["192.0.2.1", "2001:db8::1"], &[("2001:db8::1", "2001:db8::9")], &["10.0.0.2"]),
            "10.0.0.2 (route to the API server), 2001:db8::9 (route to the API server)"
        );
        assert_eq!(find(&["192.0.2.1"], &[], &[]), "none found");
    }

    #[test]
    fn what_only_this_host_or_link_knows_is_no_own_address() {
        let default = ["10.0.0.2"];
        let by_default = "10.0.0.2 (default route)";
        assert_eq!(find(&["127.0.0.1"], &[("127.0.0.1", "127.0.0.1")], &default), by_default);
        assert_eq!(find(&[], &[], &["0.0.0.0", "::1"]), "none found");
        assert_eq!(find(&[], &[], &["fe80::1"]), "none found");
        assert_eq!(find(&["fe80::9"], &[("fe80::9", "fe80::1")], &["fd00::2"]), "fd00::2 (default route)");
    }
}
