//! Connections and datagrams to the addresses of load balancers: from the objects into maps and routes. One task owns
//! both.
//!
//! A port that is no longer wanted stays as long as a socket has it and its address. Leftovers of an earlier agent stay
//! until the objects are known.

use std::{
    collections::BTreeSet,
    io,
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use cproxy_core::{
    Address, Backend, Family, Frontend, ReceiveOp, ReceiveTable, ReceivedPort, ReceivedPorts, sorted_set,
};
use cproxy_datapath::{
    bpf::{self, ListeningAt, PinDir, PolicyError, PolicyPins, ReceiveMaps, ReceivePins, TableError},
    sockets,
};
use cproxy_network::{LocalAddresses, LocalRoutes, NetworkChanges};
use tokio::{
    sync::{Notify, mpsc, oneshot, watch},
    task::spawn_blocking,
    time::{Instant, sleep_until},
};

use super::policy::OWN_NETNS;
use crate::report::{Listener, ReceivedRow};

/// Time between two looks for sockets at addresses and ports that are no longer wanted.
const LEAVING_INTERVAL: Duration = Duration::from_secs(10);
/// Time from a step that failed to the next attempt.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// Questions for a report that wait, at most.
const REPORTS_WAITING_MAX: usize = 4;

/// All addresses of IPv4, and all.
const ANY: [Address; 2] =
    [Address::from_octets([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 0, 0]), Address::from_octets([0; 16])];

/// Failure to begin to receive.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveStartError {
    /// A map cannot be used.
    #[error("--receive: {0}")]
    Maps(#[from] TableError),
    /// The kernel does not show or change routes.
    #[error("--receive: local routes cannot be changed: {0}")]
    Routes(io::Error),
    /// Network namespaces cannot be told apart.
    #[error("--receive: the kernel does not tell network namespaces apart (Linux 5.14 does): {0}")]
    Netns(io::Error),
    /// Leftovers of an earlier agent cannot be removed.
    #[error("addresses that an earlier cproxy has received: {0}")]
    Leftover(#[from] PolicyError),
}

/// Channel for a report.
type ReportSender = oneshot::Sender<Option<Vec<ReceivedRow>>>;

/// Task that owns maps and routes.
pub(super) struct ReceiveTask {
    pins: ReceivePins,
    maps: ReceiveMaps,
    routes: LocalRoutes,
    /// Cookie of the VM's network namespace, for reports.
    netns_cookie: u64,
    /// Content of both.
    table: ReceiveTable,
    /// Addresses of the VM's devices, which are never received.
    of_devices: Vec<Address>,
    /// Ports that the objects want; `None` until these are known.
    wanted: (watch::Sender<Option<ReceivedPorts>>, watch::Receiver<Option<ReceivedPorts>>),
    /// Ports that are no longer wanted, and have sockets.
    in_use: BTreeSet<Frontend>,
    reports: (mpsc::Sender<ReportSender>, mpsc::Receiver<ReportSender>),
    /// Last failure, for the log.
    failure: Option<String>,
    state: Arc<ReceiveState>,
}

/// Numbers of what is received, and the order to use other maps.
#[derive(Debug, Default)]
pub(super) struct ReceiveState {
    ports: AtomicU64,
    leaving: AtomicU64,
    failures: AtomicU64,
    reopened: Notify,
    /// Addresses of the VM. Programs look for sockets at the first one of each family.
    own: Mutex<Vec<Address>>,
}

/// Way to the task.
pub(super) struct ReceiveHandle {
    wanted: watch::Sender<Option<ReceivedPorts>>,
    reports: mpsc::Sender<ReportSender>,
    state: Arc<ReceiveState>,
}

impl ReceiveState {
    /// Has the task use the maps that are pinned now.
    pub(super) fn reopen(&self) {
        self.reopened.notify_one();
    }
}

impl ReceiveHandle {
    /// Has the task receive this, and nothing else.
    pub(super) fn want(&self, received: ReceivedPorts) {
        self.wanted.send_replace(Some(received));
    }

    /// Takes over other addresses of the VM.
    pub(super) fn set_own(&self, addresses: &[Address]) {
        addresses.clone_into(&mut self.state.own.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Has the task send a report. Without room for the question, its sender is dropped.
    pub(super) fn report(&self, sender: ReportSender) {
        self.reports.try_send(sender).ok();
    }

    /// Names and values, as `cproxy get counters` prints them.
    pub(super) fn gauges(&self) -> [(&'static str, u64); 3] {
        let ReceiveState { ports, leaving, failures, .. } = &*self.state;
        let read = |gauge: &AtomicU64| gauge.load(Ordering::Relaxed);
        [
            ("received_ports", read(ports)),
            ("received_ports_leaving", read(leaving)),
            ("received_failures", read(failures)),
        ]
    }
}

impl ReceiveTask {
    /// Takes over maps and routes.
    pub(super) fn open(pins: &PinDir) -> Result<Self, ReceiveStartError> {
        let pins = ReceivePins::new(pins);
        let maps = ReceiveMaps::open(&pins, true)?;
        let table = maps.read()?;
        let routes = LocalRoutes::open().map_err(ReceiveStartError::Routes)?;
        let mut task = Self {
            pins,
            maps,
            routes,
            netns_cookie: bpf::netns_cookie().map_err(ReceiveStartError::Netns)?,
            table,
            of_devices: Vec::new(),
            wanted: watch::channel(None),
            in_use: BTreeSet::new(),
            reports: mpsc::channel(REPORTS_WAITING_MAX),
            failure: None,
            state: Arc::default(),
        };
        task.look_at_routes().map_err(ReceiveStartError::Routes)?;
        Ok(task)
    }

    /// Way to the task.
    pub(super) fn handle(&self) -> ReceiveHandle {
        let (wanted, reports) = (self.wanted.0.clone(), self.reports.0.clone());
        ReceiveHandle { wanted, reports, state: self.state.clone() }
    }

    /// State that is shared with the task that checks programs and pins.
    pub(super) fn state(&self) -> Arc<ReceiveState> {
        self.state.clone()
    }

    /// Runs for ever.
    pub(super) async fn run(mut self) {
        let changes = NetworkChanges::open();
        let changes = changes.inspect_err(|error| tracing::warn!("changes of routes cannot be seen: {error}")).ok();
        let mut next = None;
        loop {
            tokio::select! {
                changed = self.wanted.1.changed() => {
                    // The task itself has a sender.
                    changed.ok();
                }
                () = network_changed(changes.as_ref()) => match self.look_at_routes() {
                    Ok(false) => continue,
                    Ok(true) => {}
                    Err(error) => self.record_failure(format!("routes cannot be read: {error}")),
                },
                Some(sender) = self.reports.1.recv() => {
                    sender.send(Some(self.report().await)).ok();
                    continue;
                }
                () = self.state.reopened.notified() => if let Err(error) = self.reopen() {
                    self.record_failure(error.to_string());
                },
                () = at(next) => {}
            }
            next = self.bring_about().await;
        }
    }

    /// Takes over the machine's addresses and our routes as they are. Returns whether any has changed.
    fn look_at_routes(&mut self) -> io::Result<bool> {
        let LocalAddresses { ours, of_devices } = self.routes.list()?;
        let (routes, of_devices) =
            (sorted_set(ours.into_iter().map(Address::from)), of_devices.into_iter().map(Address::from).collect());
        let has_changed = routes != self.table.routes || of_devices != self.of_devices;
        (self.table.routes, self.of_devices) = (routes, of_devices);
        Ok(has_changed)
    }

    /// Takes the steps to what is wanted. Returns when to look again, if something is to be waited for.
    async fn bring_about(&mut self) -> Option<Instant> {
        let mut wanted = self.wanted.1.borrow_and_update().clone()?;
        wanted.remove_addresses(&self.of_devices);
        let is_left = |port: &&ReceivedPort| wanted.get(&port.frontend).is_none();
        let leaving: Vec<_> = self.table.ports.iter().filter(is_left).map(|port| port.frontend).collect();
        let mut next = None;
        self.in_use.clear();
        if !leaving.is_empty() {
            self.in_use = self.look_for_sockets(leaving).await;
            next = (!self.in_use.is_empty()).then(|| Instant::now() + LEAVING_INTERVAL);
        }
        let (mut failure, mut failed) = (None, Vec::new());
        for op in self.table.plan(&wanted, |frontend| self.in_use.contains(frontend)) {
            if op.needs().is_some_and(|needed| failed.contains(&needed)) {
                continue;
            }
            match self.take_step(op) {
                Ok(()) => self.table.record(op),
                Err(error) => {
                    failed.push(op);
                    failure = Some(error);
                }
            }
        }
        self.state.ports.store(self.table.ports.len() as u64, Ordering::Relaxed);
        self.state.leaving.store(self.in_use.len() as u64, Ordering::Relaxed);
        let Some(failure) = failure else {
            self.failure = None;
            return next;
        };
        self.record_failure(failure);
        Some(Instant::now() + RETRY_INTERVAL)
    }

    /// Those that sockets still have. If the kernel does not tell, all count as in use.
    async fn look_for_sockets(&mut self, leaving: Vec<Frontend>) -> BTreeSet<Frontend> {
        match look_at_sockets(leaving.clone()).await {
            Ok((in_use, _)) => in_use,
            Err(error) => {
                self.record_failure(format!("sockets cannot be listed: {error}"));
                sorted_set(leaving)
            }
        }
    }

    fn take_step(&mut self, op: ReceiveOp) -> Result<(), String> {
        let route_failed = |address: Address| move |error| format!("the local route of {address}: {error}");
        match op {
            ReceiveOp::AddRoute(address) => self.routes.add(address.into()).map_err(route_failed(address)),
            ReceiveOp::RemoveRoute(address) => self.routes.remove(address.into()).map_err(route_failed(address)),
            of_map => self.maps.apply(of_map).map_err(|error| error.to_string()),
        }
    }

    fn record_failure(&mut self, failure: String) {
        self.state.failures.fetch_add(1, Ordering::Relaxed);
        if self.failure.as_ref() != Some(&failure) {
            tracing::error!(name: "receive_failed", "{failure}; tried again in {RETRY_INTERVAL:?}");
            self.failure = Some(failure);
        }
    }

    /// Uses the maps that are pinned now.
    fn reopen(&mut self) -> Result<(), TableError> {
        self.maps = ReceiveMaps::open(&self.pins, true)?;
        self.table = ReceiveTable { routes: self.table.routes.clone(), ..self.maps.read()? };
        Ok(())
    }

    async fn report(&self) -> Vec<ReceivedRow> {
        let listening = look_at_sockets(Vec::new()).await.ok().map(|(_, listening)| listening);
        let chosen = self.maps.listening().unwrap_or_default();
        let wanted = self.wanted.1.borrow();
        let row = |frontend: &Frontend| {
            let port = self.table.ports.iter().find(|port| port.frontend == *frontend)?.port;
            let received = wanted.as_ref().and_then(|wanted| wanted.get(frontend));
            let listener = listening.as_ref().map(|all| self.listener(frontend, port, all, &chosen));
            Some(ReceivedRow::new(frontend, port, received, listener))
        };
        let frontends = sorted_set(self.table.ports.iter().map(|port| port.frontend));
        frontends.iter().filter_map(row).collect()
    }

    /// Socket that listens for a port of the pod.
    fn listener(&self, of: &Frontend, port: u16, all: &[Backend], chosen: &[ListeningAt]) -> Listener {
        let family = of.address.family();
        // Of each family, programs look for sockets at one address.
        let own = self.state.own.lock().unwrap_or_else(PoisonError::into_inner);
        let own = own.iter().find(|own| own.family() == family).copied();
        let is_own = |address: Address| Some(address) == own;
        // An IPv6 socket on all addresses may take IPv4, too.
        let is_any = |address: Address| address == ANY[1] || family == Family::V4 && address == ANY[0];
        let at_port: Vec<_> = all.iter().filter(|end| end.port == port).map(|end| end.address).collect();
        let is_chosen = |one: &ListeningAt| {
            let fits = is_own(one.address) || is_any(one.address) || family == Family::V6 && one.is_v6_only();
            one.netns_cookie == self.netns_cookie && one.port == port && fits
        };
        let is_there = |address: &Address| is_any(*address) || *address == of.address;
        // One that was shut down stays known for as long as its descriptor is open.
        if !at_port.is_empty() && chosen.iter().any(is_chosen) || of.port == port && at_port.iter().any(is_there) {
            return Listener::Yes;
        }
        match at_port.as_slice() {
            [] => Listener::No,
            addresses if addresses.iter().any(|address| is_own(*address) || is_any(*address)) => Listener::TooOld,
            addresses if addresses.iter().all(|address| address.is_special()) => Listener::Loopback,
            _ => Listener::Elsewhere,
        }
    }
}

/// Missing part of the programs for received addresses, as words; `None`: none is missing.
pub(super) fn detached(pins: &PinDir) -> Option<String> {
    match bpf::is_receiving(pins) {
        Ok(true) => None,
        Ok(false) => Some("a program for received addresses was detached, or its pin removed".to_owned()),
        Err(error) => Some(format!("the programs for received addresses: {error}")),
    }
}

/// Looks at sockets beside the loop: which of these own ends they have, or, without any, where they listen.
async fn look_at_sockets(ends: Vec<Frontend>) -> Result<(BTreeSet<Frontend>, Vec<Backend>), String> {
    let look = move || match ends.as_slice() {
        [] => sockets::listening().map(|listening| (BTreeSet::new(), listening)),
        ends => sockets::local_ends_in_use(ends).map(|in_use| (in_use, Vec::new())),
    };
    let found = spawn_blocking(look).await.map_err(|error| error.to_string())?;
    found.map_err(|error| error.to_string())
}

/// Removes what an earlier agent has left that has received.
///
/// # Errors
/// A pin, a link or a route cannot be removed.
pub(super) fn forget(pins: &PinDir, cgroup: &Path, has_policy: bool) -> Result<(), ReceiveStartError> {
    let has_pins = ReceivePins::new(pins).exist();
    match remove_routes() {
        Err(error) if has_pins => return Err(ReceiveStartError::Routes(error)),
        // There may be routes without pins, and kernels without routes.
        _ => {}
    }
    // Without a policy, the program that looks sockets up is theirs, too.
    let has_lookup = !has_policy && PolicyPins::new(pins).exist();
    if !has_lookup && !has_pins {
        return Ok(());
    }
    Ok(bpf::forget_receive(pins, cgroup, Path::new(OWN_NETNS), has_policy)?)
}

/// Removes the routes of all received addresses.
///
/// # Errors
/// The kernel refuses.
pub fn remove_routes() -> io::Result<()> {
    let mut routes = LocalRoutes::open()?;
    routes.list()?.ours.into_iter().try_for_each(|address| routes.remove(address))
}

async fn network_changed(changes: Option<&NetworkChanges>) {
    match changes {
        Some(changes) if changes.wait().await.is_ok() => {}
        _ => std::future::pending().await,
    }
}

async fn at(next: Option<Instant>) {
    match next {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}
