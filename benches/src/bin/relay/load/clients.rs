//! Clients that follow Services, EndpointSlices and, some of them, their Node, with the agent's own code.

use std::{
    collections::BTreeMap,
    io,
    net::{Ipv4Addr, SocketAddrV4},
    os::fd::BorrowedFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use cproxy_core::api::{EndpointSlice, Node, Object, Service};
use cproxy_network::SocketSetup;
use cproxy_policy::served::{AddressSlice, PodPolicy};
use cproxy_relay_core::Policies;
use cproxy_tests::control_plane::NODE;
use cproxy_wire::{
    ApiClient, ApiServer, Configuration, ENDPOINT_SLICES, FieldSelector, SERVICES, Selectors, Subscriber, WatchEvent,
    WatchedResource, follow_resource,
};
use tokio::{task::JoinSet, time::sleep};

use super::{
    brief::Brief,
    protocol::{Expected, Start},
    receipts::Receipts,
};
use crate::clock::now_ns;

/// Source addresses of the clients, in turn: one has 28,000 ports, and ports of ended connections are kept a while.
const SOURCES: u32 = 8;

/// State that all clients share.
#[derive(Default)]
pub(crate) struct Shared {
    pub(crate) receipts: Mutex<Receipts>,
    /// Lists that began.
    pub(crate) lists: AtomicU64,
    /// Events of watches, without bookmarks.
    pub(crate) events: AtomicU64,
    /// Progress of each client.
    progress: Mutex<Vec<Progress>>,
    /// Slices as the clients see them that decode all, by client.
    pub(crate) checked: Mutex<BTreeMap<u32, Checked>>,
}

/// Progress of one client.
#[derive(Clone, Copy, Default)]
pub(crate) struct Progress {
    /// Complete lists of Services and of slices.
    lists: [u32; 2],
    /// Versions up to which the client has all Services and slices.
    versions: [u64; 2],
    /// Moment at which both lists were complete for the first time.
    synced_ns: Option<u64>,
}

/// Objects of a client that decodes them.
#[derive(Default)]
pub(crate) struct Checked {
    services: BTreeMap<String, u64>,
    /// Version and first address.
    slices: BTreeMap<String, (u64, String)>,
}

impl Shared {
    fn progress(&self) -> MutexGuard<'_, Vec<Progress>> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn receipts(&self) -> MutexGuard<'_, Receipts> {
        self.receipts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn checked(&self) -> MutexGuard<'_, BTreeMap<u32, Checked>> {
        self.checked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of clients.
    pub(crate) fn clients(&self) -> usize {
        self.progress().len()
    }

    /// Makes room for further clients. Returns the number of those before.
    pub(crate) fn add(&self, count: u32) -> u32 {
        let mut progress = self.progress();
        let first = progress.len();
        progress.resize(first + count as usize, Progress::default());
        first as u32
    }

    /// Number of clients that have both lists, and the moment of the last.
    pub(crate) fn synced(&self) -> (usize, u64) {
        let progress = self.progress();
        let moments = progress.iter().filter_map(|progress| progress.synced_ns);
        (moments.clone().count(), moments.max().unwrap_or_default())
    }

    /// Number of clients that have all Services and slices up to these versions.
    pub(crate) fn settled(&self, versions: [u64; 2]) -> usize {
        let has_all =
            |progress: &&Progress| progress.versions.iter().zip(versions).all(|(has, version)| *has >= version);
        self.progress().iter().filter(has_all).count()
    }

    fn advance(&self, client: u32, kind: usize, version: u64) {
        self.change_progress(client, |progress| {
            if let Some(has) = progress.versions.get_mut(kind) {
                *has = version.max(*has);
            }
        });
    }

    fn change_progress(&self, client: u32, change: impl FnOnce(&mut Progress)) {
        if let Some(progress) = self.progress().get_mut(client as usize) {
            change(progress);
        }
    }

    /// Differences between what the checking clients have and what they should have.
    pub(crate) fn differences(&self, expected: &Expected) -> (usize, Vec<String>) {
        let checked = self.checked();
        let of_client = |(client, checked): (&u32, &Checked)| {
            checked.differences(expected).into_iter().map(|text| format!("client {client}: {text}")).collect::<Vec<_>>()
        };
        (checked.len(), checked.iter().flat_map(of_client).take(10).collect())
    }
}

impl Checked {
    fn differences(&self, expected: &Expected) -> Vec<String> {
        let mut differences = Vec::new();
        for (what, found, expected) in [
            ("Services", self.services.len(), expected.services),
            ("EndpointSlices", self.slices.len(), expected.slices),
        ] {
            if found != expected {
                differences.push(format!("{found} {what} instead of {expected}"));
            }
        }
        for (name, (version, address)) in &expected.changed {
            let found = self.slices.get(name);
            if found.is_none_or(|(found, first)| found != version || first != address) {
                differences.push(format!("{name}: {found:?} instead of {version} {address}"));
            }
        }
        differences
    }
}

/// Starts further clients, the first of which has this number, evenly spread over a time.
pub(crate) async fn start(shared: Arc<Shared>, first: u32, start: Start, configuration: Configuration) {
    let options = options(&start);
    let is_local = start.servers.iter().all(|server| server.contains("//127."));
    let (begin, mut clients) = (tokio::time::Instant::now(), JoinSet::new());
    for index in 0..start.count {
        let id = first + index;
        let setup = if is_local { from_source(id) } else { SocketSetup::none() };
        let client = ApiClient::new(options.clone(), configuration.clone(), setup);
        let is_checked = id < start.checked;
        let has_node = id < start.nodes;
        if start.has_policies {
            clients.spawn(follow_policies(shared.clone(), id, client));
        } else {
            clients.spawn(follow(shared.clone(), id, client, is_checked, has_node));
        }
        let due = Duration::from_millis(start.spread_ms) * (index + 1) / start.count;
        tokio::time::sleep_until(begin + due).await;
    }
    while clients.join_next().await.is_some() {}
}

/// Binds a socket to one of the machine's loopback addresses.
fn from_source(id: u32) -> SocketSetup {
    let address = SocketAddrV4::new(Ipv4Addr::from_bits(Ipv4Addr::new(127, 0, 1, 1).to_bits() + id % SOURCES), 0);
    SocketSetup::new(move |socket: BorrowedFd<'_>| {
        rustix::net::bind(socket, &address).map_err(|error| io::Error::from_raw_os_error(error.raw_os_error()))
    })
}

async fn follow(shared: Arc<Shared>, id: u32, client: ApiClient, is_checked: bool, has_node: bool) {
    let node = async {
        if has_node {
            let own = Selectors { labels: "", fields: FieldSelector::Required(&format!("metadata.name={NODE}")) };
            let mut subscriber = Follower { shared: shared.clone(), id };
            follow_resource::<Brief<Node>, _>(&client, own, &mut subscriber).await;
        }
    };
    if is_checked {
        shared.checked().insert(id, Checked::default());
        let mut services = Checker(Follower { shared: shared.clone(), id });
        let mut slices = Checker(Follower { shared: shared.clone(), id });
        tokio::join!(
            follow_resource::<Service, _>(&client, SERVICES, &mut services),
            follow_resource::<EndpointSlice, _>(&client, ENDPOINT_SLICES, &mut slices),
            node,
        );
    } else {
        let mut services = Follower { shared: shared.clone(), id };
        let mut slices = Follower { shared: shared.clone(), id };
        tokio::join!(
            follow_resource::<Brief<Service>, _>(&client, SERVICES, &mut services),
            follow_resource::<Brief<EndpointSlice>, _>(&client, ENDPOINT_SLICES, &mut slices),
            node,
        );
    }
}

async fn follow_policies(shared: Arc<Shared>, id: u32, client: ApiClient) {
    const ALL: Selectors<'static> = Selectors { labels: "", fields: FieldSelector::Any };
    let [mut policies, mut slices] = [(); 2].map(|()| Follower { shared: shared.clone(), id });
    tokio::join!(
        follow_resource::<Brief<PodPolicy>, _>(&client, ALL, &mut policies),
        follow_resource::<Brief<AddressSlice>, _>(&client, ALL, &mut slices),
    );
}

/// Subscriber that records versions.
struct Follower {
    shared: Arc<Shared>,
    id: u32,
}

impl Follower {
    fn record<K: WatchedResource>(&self, event: &WatchEvent<K>) {
        // A version of policies tells the revision of the API server that it is about.
        let (kind, number): (_, fn(&str) -> u64) = match K::PLURAL {
            "services" => (0, number),
            "endpointslices" => (1, number),
            "podpolicies" => (0, |version| Policies::revision(number(version))),
            "addressslices" => (1, |version| Policies::revision(number(version))),
            _ => return,
        };
        match event {
            WatchEvent::ListStarted => {
                self.shared.lists.fetch_add(1, Ordering::Relaxed);
            }
            WatchEvent::ListDone(version) => self.record_list(kind, number(version)),
            WatchEvent::Applied(object) | WatchEvent::Deleted(object) => {
                self.shared.events.fetch_add(1, Ordering::Relaxed);
                let version = number(&object.meta().resource_version);
                if kind == 1 {
                    self.shared.receipts().push(self.id, version, now_ns());
                }
                self.shared.advance(self.id, kind, version);
            }
            WatchEvent::Bookmark(version) => self.shared.advance(self.id, kind, number(version)),
            WatchEvent::Accepted(_)
            | WatchEvent::Listed(_)
            | WatchEvent::Compared(_)
            | WatchEvent::Unavailable
            | WatchEvent::Failed(_) => {}
        }
    }

    fn record_list(&self, kind: usize, version: u64) {
        self.shared.change_progress(self.id, |progress| {
            if let Some(lists) = progress.lists.get_mut(kind) {
                *lists += 1;
            }
            if let Some(has) = progress.versions.get_mut(kind) {
                *has = version;
            }
            if progress.lists.iter().all(|lists| *lists > 0) {
                progress.synced_ns.get_or_insert_with(now_ns);
            }
        });
    }
}

fn number(version: &str) -> u64 {
    version.parse().unwrap_or_default()
}

impl<K: Object + WatchedResource> Subscriber<Brief<K>> for Follower {
    const SPREADS_LISTS: bool = true;
    const LISTS_AFTER_FAILURE: bool = false;

    async fn publish(&mut self, event: WatchEvent<Brief<K>>) {
        self.record(&event);
    }
}

/// Subscriber that keeps what it gets, too.
struct Checker(Follower);

impl Checker {
    fn change(&self, change: impl FnOnce(&mut Checked)) {
        if let Some(checked) = self.0.shared.checked().get_mut(&self.0.id) {
            change(checked);
        }
    }
}

impl Subscriber<Service> for Checker {
    const SPREADS_LISTS: bool = true;
    const LISTS_AFTER_FAILURE: bool = false;

    async fn publish(&mut self, event: WatchEvent<Service>) {
        self.0.record(&event);
        match event {
            WatchEvent::ListStarted => self.change(|checked| checked.services.clear()),
            WatchEvent::Listed(object) | WatchEvent::Applied(object) => {
                let meta = object.meta();
                self.change(|checked| {
                    checked.services.insert(meta.name.clone(), number(&meta.resource_version));
                });
            }
            WatchEvent::Deleted(object) => self.change(|checked| {
                checked.services.remove(&object.meta().name);
            }),
            _ => {}
        }
    }
}

impl Subscriber<EndpointSlice> for Checker {
    const SPREADS_LISTS: bool = true;
    const LISTS_AFTER_FAILURE: bool = false;

    async fn publish(&mut self, event: WatchEvent<EndpointSlice>) {
        self.0.record(&event);
        match event {
            WatchEvent::ListStarted => self.change(|checked| checked.slices.clear()),
            WatchEvent::Listed(object) | WatchEvent::Applied(object) => {
                let first = match &object {
                    cproxy_wire::Decoded::Object(slice) => slice.endpoints.first(),
                    cproxy_wire::Decoded::Unreadable(..) => None,
                };
                let address = first.and_then(|endpoint| endpoint.addresses.first()).cloned().unwrap_or_default();
                let (name, version) = (object.meta().name.clone(), number(&object.meta().resource_version));
                self.change(|checked| drop(checked.slices.insert(name, (version, address))));
            }
            WatchEvent::Deleted(object) => self.change(|checked| drop(checked.slices.remove(&object.meta().name))),
            _ => {}
        }
    }
}

/// Options of the clients.
pub(crate) fn options(start: &Start) -> ApiServer {
    let addresses = start.servers.iter().filter_map(|server| server.parse().ok()).collect();
    ApiServer { kubeconfig: Some(start.kubeconfig.clone().into()), addresses, tls_server_name: None }
}

/// Waits until a condition holds, or a time is over. Returns whether it holds.
pub(crate) async fn wait_until(time: Duration, condition: impl Fn() -> bool) -> bool {
    let end = tokio::time::Instant::now() + time;
    while !condition() {
        if tokio::time::Instant::now() >= end {
            return false;
        }
        sleep(Duration::from_millis(5)).await;
    }
    true
}
