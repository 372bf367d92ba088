//! A sandbox that serves every possible pod address, with an agent on the manifests.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    time::Duration,
};

use cproxy::report::FrontendRow;
use cproxy_tests::{
    echo,
    manifest::{self, http_service},
    process::{cproxy, eventually},
    sandbox::Sandbox,
    world::{World, counters},
};
use serde_json::Value;

/// Limit on every wait, longer than any takes on a slow machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// Port of the pods, for any port of the Service.
pub(crate) const POD_PORT: u16 = 8080;

/// Service that must always work, and its number of pods.
pub(crate) const WEB: &str = "10.96.0.10";
pub(crate) const WEB_PODS: usize = 2;

pub(crate) struct Fixture {
    pub(crate) world: World,
}

/// The kernel's table.
pub(crate) type Table = HashMap<(IpAddr, u16), Vec<IpAddr>>;

impl Fixture {
    /// Starts with one small Service.
    pub(crate) fn start() -> Self {
        let serve = |sandbox: &Sandbox| {
            sandbox.ip("route add local 10.240.0.0/12 dev lo\nroute add prohibit 10.96.0.0/12\n");
            [echo::tcp(sandbox, (Ipv4Addr::UNSPECIFIED, POD_PORT), "pod")]
        };
        let fixture = Self { world: World::builder().prepare(serve).objects(small("web", WEB)).start() };
        fixture.assert_web();
        fixture
    }

    /// Replaces the content of one file.
    pub(crate) fn put(&self, file: &str, objects: impl IntoIterator<Item = Value>) {
        manifest::write(&self.world.sandbox.manifest_dir(), file, objects);
    }

    pub(crate) fn remove(&self, file: &str) {
        std::fs::remove_file(self.world.sandbox.manifest_dir().join(file)).unwrap();
    }

    /// Waits until the table is as wanted.
    pub(crate) fn wait(&mut self, what: &str, wanted: impl Fn(&Table) -> Result<(), String>) {
        let World { agent, sandbox, .. } = &mut self.world;
        agent.wait_until(PATIENCE, what, |_| wanted(&table(sandbox)));
    }

    /// The number of the agent's problems with objects, once it answers, which it does between its writes.
    pub(crate) fn problems(&self) -> u64 {
        eventually(PATIENCE, "the agent answers", || {
            counters(&self.world.sandbox)["object_problems"].as_u64().ok_or("it does not")
        })
    }

    /// Checks that the small Service works.
    pub(crate) fn assert_web(&self) {
        let row = &table(&self.world.sandbox)[&(WEB.parse().unwrap(), 80)];
        assert_eq!(row.len(), WEB_PODS);
        connect(WEB, 80).unwrap();
    }
}

fn table(sandbox: &Sandbox) -> Table {
    let json = cproxy(sandbox, &["get", "services", "-o", "json"]).success().json();
    let rows: Vec<_> = json.as_array().unwrap().iter().map(|row| FrontendRow::read(row).unwrap()).collect();
    let backends = |row: &FrontendRow| row.backends.iter().map(|backend| backend.address).collect();
    rows.iter().map(|row| ((row.address, row.port), backends(row))).collect()
}

/// Connects to a pod by this address.
pub(crate) fn connect(address: &str, port: u16) -> io::Result<()> {
    let address = SocketAddr::new(address.parse().unwrap(), port);
    let name = echo::ask_tcp(address)?.name;
    if name == "pod" { Ok(()) } else { Err(io::Error::other(name)) }
}

pub(crate) fn is_refused(address: &str, port: u16) -> bool {
    let address = SocketAddr::new(address.parse().unwrap(), port);
    echo::is_refused(TcpStream::connect(address))
}

/// A condition that a frontend has `count` backends.
pub(crate) fn serves(address: &str, port: u16, count: usize) -> impl Fn(&Table) -> Result<(), String> {
    let key = (address.parse().unwrap(), port);
    move |table| {
        let now = table.get(&key).map(Vec::len);
        if now == Some(count) { Ok(()) } else { Err(format!("{now:?} backends instead of {count}")) }
    }
}

/// A small Service.
pub(crate) fn small(name: &str, vip: &str) -> [Value; 2] {
    http_service(name, vip, pods(0, WEB_PODS))
}

/// Addresses of pods, of 10.240.0.0/12.
pub(crate) fn pods(first: usize, count: usize) -> impl Iterator<Item = Ipv4Addr> {
    let base = Ipv4Addr::new(10, 240, 0, 0).to_bits();
    (first..first + count).map(move |number| Ipv4Addr::from_bits(base + 1 + u32::try_from(number).unwrap()))
}
