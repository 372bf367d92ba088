//! Addresses of the VM, at most one of each family: the kernel's source address towards an address that is given, else
//! towards the API server, else that of the default route. An address of the VM itself is its own source address.

use std::{fmt, io, net::IpAddr};

use rustix::io::Errno;

use super::{changes::NetworkChanges, route, socket_setup::SocketSetup};

/// Addresses of the VM, detected now and after each change of the network.
pub struct OwnAddresses<ApiServer> {
    setup: SocketSetup,
    given: Vec<IpAddr>,
    api_server: ApiServer,
    changes: Result<NetworkChanges, Errno>,
    detected: DetectedAddresses,
}

impl<ApiServer: Fn() -> Vec<IpAddr>> OwnAddresses<ApiServer> {
    /// Detects the addresses. Call it inside a tokio runtime.
    ///
    /// `setup` is for the sockets that look for a route, which must not be translated. `given` are addresses of the VM,
    /// or of the machine that translates its address. `api_server` returns the
    /// addresses of the API server that are known without a nameserver.
    #[must_use]
    pub fn detect(setup: SocketSetup, given: Vec<IpAddr>, api_server: ApiServer) -> Self {
        // In the other order, a change between the two would be missed.
        let changes = NetworkChanges::open();
        let detected = detect(&setup, &given, &api_server());
        Self { setup, given, api_server, changes, detected }
    }

    /// Addresses that were detected last.
    #[must_use]
    pub fn detected(&self) -> &DetectedAddresses {
        &self.detected
    }

    /// Waits until the addresses are others than before.
    ///
    /// # Errors
    /// Changes of the network cannot be seen.
    pub async fn changed(&mut self) -> io::Result<&DetectedAddresses> {
        let changes = self.changes.as_ref().map_err(|&error| error)?;
        loop {
            changes.wait().await?;
            let detected = detect(&self.setup, &self.given, &(self.api_server)());
            if detected != self.detected {
                self.detected = detected;
                return Ok(&self.detected);
            }
        }
    }
}

/// Queries the kernel.
fn detect(setup: &SocketSetup, given: &[IpAddr], api_server: &[IpAddr]) -> DetectedAddresses {
    let source_address = |destination| {
        let source = route::source_address(destination, setup);
        tracing::debug!("source address of packets to {destination}: {source:?}");
        source.ok()
    };
    DetectedAddresses::select(given, api_server, source_address)
}

/// Route whose source address is an address of the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    Given,
    ToGiven,
    ApiServer,
    Default,
}

/// Addresses of the VM, each with the route that selects it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DetectedAddresses(Vec<(IpAddr, Route)>);

impl DetectedAddresses {
    /// First usable source address in each family: towards a given address, else towards the API server, else by the
    /// default route.
    fn select(
        given: &[IpAddr],
        api_server: &[IpAddr],
        mut source_address: impl FnMut(IpAddr) -> Option<IpAddr>,
    ) -> Self {
        let mut detected = Vec::new();
        for by_default in route::BEHIND_DEFAULT_ROUTE {
            let given = given.iter().map(|&address| (address, Route::ToGiven));
            let known = given.chain(api_server.iter().map(|&address| (address, Route::ApiServer)));
            let known = known.filter(|(address, _)| address.is_ipv4() == by_default.is_ipv4());
            let destinations = known.chain([(by_default, Route::Default)]);
            let mut usable = destinations.filter_map(|(destination, route)| {
                let source = source_address(destination).filter(route::is_usable)?;
                let is_given = route == Route::ToGiven && source == destination;
                Some((source, if is_given { Route::Given } else { route }))
            });
            detected.extend(usable.next());
        }
        Self(detected)
    }

    /// The addresses, IPv4 first.
    pub fn iter(&self) -> impl Iterator<Item = IpAddr> {
        self.0.iter().map(|&(address, _)| address)
    }
}

impl fmt::Display for DetectedAddresses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (address, route)) in self.0.iter().enumerate() {
            let route = match route {
                Route::Given => "given",
                Route::ToGiven => "route to the given address",
                Route::ApiServer => "route to the API server",
                Route::Default => "default route",
            };
            write!(f, "{}{address} ({route})", if index == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Selection with these source addresses by destination; for all other destinations the default ones.
    fn selected(api_server: &[&str], routes: &[(&str, &str)], default: &[&str]) -> String {
        selected_with(&[], api_server, routes, default)
    }

    fn selected_with(given: &[&str], api_server: &[&str], routes: &[(&str, &str)], default: &[&str]) -> String {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let [given, api_server] =
            [given, api_server].map(|texts| texts.iter().map(|text| ip(text)).collect::<Vec<_>>());
        let source_address = |to: IpAddr| {
            let exact = routes.iter().find(|(destination, _)| ip(destination) == to).map(|(_, source)| ip(source));
            exact.or_else(|| default.iter().map(|text| ip(text)).find(|source| source.is_ipv4() == to.is_ipv4()))
        };
        DetectedAddresses::select(&given, &api_server, source_address).to_string()
    }

    #[test]
    fn the_route_to_the_api_server_comes_before_the_default_route_in_its_family() {
        let default = ["10.0.0.2", "fd00::2"];
        let both = "10.0.0.2 (default route), fd00::2 (default route)";
        assert_eq!(selected(&[], &[], &default), both);
        assert_eq!(
            selected(&["192.0.2.1"], &[("192.0.2.1", "192.0.2.9")], &default),
            "192.0.2.9 (route to the API server), fd00::2 (default route)"
        );
        assert_eq!(
            selected(&["192.0.2.1", "2001:db8::1"], &[("2001:db8::1", "2001:db8::9")], &["10.0.0.2"]),
            "10.0.0.2 (route to the API server), 2001:db8::9 (route to the API server)"
        );
        assert_eq!(selected(&["192.0.2.1"], &[], &[]), "");
    }

    #[test]
    fn a_given_address_is_taken_if_it_is_the_machines_else_that_towards_it() {
        let default = ["10.0.0.2", "fd00::2"];
        let of_v6 = "fd00::2 (default route)";
        let given = |routes| selected_with(&["10.0.0.7"], &["192.0.2.1"], routes, &default);
        assert_eq!(given(&[("10.0.0.7", "10.0.0.7")]), format!("10.0.0.7 (given), {of_v6}"));
        let server = selected(&["192.0.2.1"], &[("192.0.2.1", "192.0.2.1")], &[]);
        assert_eq!(server, "192.0.2.1 (route to the API server)", "it runs here");
        assert_eq!(given(&[("10.0.0.7", "172.16.0.2")]), format!("172.16.0.2 (route to the given address), {of_v6}"));
    }

    #[test]
    fn loopback_unspecified_and_link_local_addresses_are_not_detected() {
        let default = ["10.0.0.2"];
        let by_default = "10.0.0.2 (default route)";
        assert_eq!(selected(&["127.0.0.1"], &[("127.0.0.1", "127.0.0.1")], &default), by_default);
        assert_eq!(selected(&[], &[], &["0.0.0.0", "::1"]), "");
        assert_eq!(selected(&[], &[], &["fe80::1"]), "");
        assert_eq!(selected(&["fe80::9"], &[("fe80::9", "fe80::1")], &["fd00::2"]), "fd00::2 (default route)");
    }
}
