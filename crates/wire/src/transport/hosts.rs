//! Addresses that are known without a nameserver: those of this machine, and those in /etc/hosts.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::Path,
};

/// Root directory of this process.
pub(crate) const ROOT: &str = "/";
/// File below a root directory.
const HOSTS: &str = "etc/hosts";

/// Whether the host is this machine by its name (RFC 6761, 6.3).
pub(crate) fn is_localhost(host: &str) -> bool {
    host.eq_ignore_ascii_case("localhost")
}

/// Addresses of a host without a query: the host itself if it is an address, else those in /etc/hosts. No nameserver is
/// asked where this machine is.
pub(crate) fn local_addresses(host: &str, root: &Path) -> Vec<IpAddr> {
    match host.parse() {
        Ok(address) => vec![address],
        Err(_) if is_localhost(host) => vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()],
        Err(_) => hosts_addresses(&text_of(root, HOSTS), host),
    }
}

/// Text of a file; a missing one is empty.
pub(super) fn text_of(root: &Path, file: &str) -> String {
    std::fs::read_to_string(root.join(file)).unwrap_or_default()
}

fn hosts_addresses(hosts: &str, host: &str) -> Vec<IpAddr> {
    let lines = hosts.lines().map(|line| line.split('#').next().unwrap_or_default());
    let matching = lines.filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let address = words.next()?.parse().ok()?;
        words.any(|name| name.eq_ignore_ascii_case(host.trim_end_matches('.'))).then_some(address)
    });
    matching.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_hosts_line_matches_by_any_of_its_names() {
        let hosts = "127.0.0.1 localhost\n# 10.0.0.9 api\n10.0.0.1 api.example API # the first\nfd00::1 api\nbroken\n";
        assert_eq!(hosts_addresses(hosts, "api"), [ip("10.0.0.1"), ip("fd00::1")]);
        assert_eq!(hosts_addresses(hosts, "Api.Example."), [ip("10.0.0.1")]);
        assert!(hosts_addresses(hosts, "api.other").is_empty());
    }

    #[test]
    fn names_are_looked_up_below_the_root_directory() {
        let root = std::env::temp_dir().join(format!("cproxy-resolver-{}", std::process::id()));
        std::fs::create_dir_all(root.join("etc")).unwrap();
        std::fs::write(root.join(HOSTS), "192.0.2.7 api.test\n").unwrap();
        assert_eq!(local_addresses("api.test", &root), [ip("192.0.2.7")]);
        assert!(local_addresses("api.test", Path::new(ROOT)).is_empty());
        std::fs::remove_dir_all(root).unwrap();
    }
}
