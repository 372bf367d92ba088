//! Slots of connections. Before a client is known, it has one of a few; the oldest that has shown nothing goes first,
//! unless it came just now. After that, identities share the rest: if all are taken, the identity with most gives up
//! one for an identity with fewer. Requests, and what clients have not read, are bounded by identity, too.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap, hash_map::RandomState},
    hash::BuildHasher as _,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use cproxy_relay_auth::{Identity, Origin, PeerAddress, Source};
use tokio::{task::AbortHandle, time::Instant};

use crate::clients::{
    request_limit::RequestLimit,
    unsent::{Holder, Unsent},
};

/// Connections of one guest: one that comes in by vsock or by a socket of its own, or whose token is bound to a pod.
const GUEST_CONNECTIONS_MAX: usize = 16;

/// Guests that may share an identity: one account with tokens of a node, or of nothing, or one certificate.
const GUESTS_OF_ACCOUNT: u32 = 100;

/// Connections of unknown clients for each of all: one in this many.
const UNKNOWN_SHARE: usize = 8;
/// Fewest and most of them.
const UNKNOWN_MIN: usize = 16;
const UNKNOWN_MAX: usize = 4096;

/// Time that a connection has to show who the client is while others wait for its slot: as long as an agent waits that
/// has another server to turn to. When thousands of clients come at once, they would otherwise end each other's
/// connections for as long as they come faster than they show anything.
const SHOW_TIME: Duration = Duration::from_secs(3);

/// Identities without a connection that are kept, as long as their last requests count.
const KNOWN_KEPT: usize = 1024;

/// Connections of one network whose tokens are under review.
const IN_REVIEW_MAX: usize = 1024;

/// All slots, and the connections that have them.
#[derive(Debug)]
pub(crate) struct ConnectionSlots {
    /// Slots of clients that are known.
    all: usize,
    /// Slots of those that have shown nothing.
    unknown: usize,
    hashes: RandomState,
    unsent: Arc<Unsent>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next_id: u64,
    unknown: Unknown,
    /// Connections of each origin whose tokens are under review.
    in_review: HashMap<Origin, usize>,
    in_review_count: usize,
    /// Each identity with a connection, or whose last requests still count, by its hash.
    known: HashMap<u64, Known>,
    /// Identities with connections, by their number.
    by_count: BTreeSet<(usize, u64)>,
    known_count: usize,
}

/// Identity's connections and requests.
#[derive(Debug)]
struct Known {
    /// Tasks of the connections, by the order in which they came.
    connections: Connections,
    requests: Arc<RequestLimit>,
}

/// Connections of one identity by the order in which they came, with their tasks.
type Connections = BTreeMap<u64, Option<AbortHandle>>;

/// Connection that has shown nothing.
#[derive(Debug)]
struct Newcomer {
    task: Option<AbortHandle>,
    since: Instant,
}

/// Connections of one origin that have shown nothing, by the order in which they came.
type Newcomers = BTreeMap<u64, Newcomer>;

/// Connections that have shown nothing.
#[derive(Debug, Default)]
struct Unknown {
    count: usize,
    by_origin: HashMap<Origin, Newcomers>,
    /// Origins by the number of their connections, and of those with as many by the oldest.
    by_count: BTreeMap<Rank, Origin>,
}

/// Number of an origin's connections, and the oldest of them. The last origin in this order gives up a slot first.
type Rank = (usize, Reverse<u64>);

/// Slot of one connection.
#[derive(Debug)]
pub(crate) struct ConnectionSlot {
    slots: Arc<ConnectionSlots>,
    origin: Origin,
    id: u64,
    stage: Mutex<Stage>,
}

#[derive(Debug)]
enum Stage {
    /// It has shown nothing.
    Unknown,
    /// So many of its requests wait for a review; it has the task of its connection again after them.
    InReview(usize, Option<AbortHandle>),
    /// It is this identity's.
    Known(u64, Arc<RequestLimit>),
}

/// Names a slot.
pub(crate) struct SlotId {
    origin: Origin,
    id: u64,
}

/// Request that waits for a review. The slot counts as that of an unknown client again after it.
pub(crate) struct ReviewWait<'a>(&'a ConnectionSlot);

/// Reason for which a client gets no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoSlot {
    /// All are taken.
    Full,
    /// The identity has its share, which is this many.
    Share(usize),
}

impl ConnectionSlots {
    pub(crate) fn new(connections_max: usize) -> Arc<Self> {
        Arc::new(Self {
            all: connections_max,
            unknown: (connections_max / UNKNOWN_SHARE).clamp(UNKNOWN_MIN, UNKNOWN_MAX),
            hashes: RandomState::new(),
            unsent: Arc::default(),
            state: Mutex::default(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Slot for a new connection. If there is none left, one of those that have shown nothing ends: of the origin with
    /// most of them the oldest, or the newest if the oldest has not had [`SHOW_TIME`] yet. The newest may be the new
    /// one itself, which gets no slot then. Returns whether one has ended, too.
    pub(crate) fn enter(self: &Arc<Self>, peer: &PeerAddress) -> (Option<ConnectionSlot>, bool) {
        let (origin, now) = (Origin::from(peer), Instant::now());
        let mut state = self.state();
        state.next_id += 1;
        let id = state.next_id;
        state.unknown.insert(&origin, id, Newcomer { task: None, since: now });
        let must_end = state.unknown.count > self.unknown;
        let ended = if must_end { state.unknown.remove_one(&origin, now) } else { None };
        drop(state);
        let has_slot = ended.as_ref().is_none_or(|(ended, _)| *ended != id);
        // Outside the lock: the task gives back its slot.
        ended.and_then(|(_, task)| task).inspect(AbortHandle::abort);
        let slot = ConnectionSlot { slots: self.clone(), origin, id, stage: Mutex::new(Stage::Unknown) };
        (has_slot.then_some(slot), must_end)
    }

    /// Task that serves a connection. It ends when its slot is needed.
    pub(crate) fn set_task(&self, SlotId { origin, id }: SlotId, task: AbortHandle) {
        let mut state = self.state();
        if let Some(newcomer) = state.unknown.by_origin.get_mut(&origin).and_then(|newcomers| newcomers.get_mut(&id)) {
            newcomer.task = Some(task);
        }
    }

    /// Bytes of large pieces that clients have not taken, and connections that have ended for such pieces.
    pub(crate) fn unsent_counts(&self) -> (usize, u64) {
        self.unsent.counts()
    }

    /// Most connections of an identity, and the guests for whose requests it has room.
    fn share(&self, identity: &Identity) -> (usize, u32) {
        match identity.source {
            Source::Local => (GUEST_CONNECTIONS_MAX, 1),
            Source::Token if identity.pod_name.is_some() => (GUEST_CONNECTIONS_MAX, 1),
            Source::Token | Source::Certificate => (self.all.div_ceil(2), GUESTS_OF_ACCOUNT),
            // All clients of a relay that does not ask who they are.
            Source::Anonymous => (self.all, u32::MAX),
        }
    }

    /// Hash of a client: of its user, and of the pod or else the node that its token is bound to. Many guests may have
    /// one account.
    fn hash(&self, identity: &Identity) -> u64 {
        let bound_to = identity.pod_name.as_ref().or(identity.node_name.as_ref());
        let source = match identity.source {
            Source::Token => 0_u8,
            Source::Certificate => 1,
            Source::Local => 2,
            Source::Anonymous => 3,
        };
        self.hashes.hash_one((source, &identity.username, identity.pod_name.is_some(), bound_to))
    }
}

impl State {
    /// Gives an identity another connection. Returns the task of one that ends for it.
    fn admit(
        &mut self,
        slots: &ConnectionSlots,
        hash: u64,
        (share, guests): (usize, u32),
        (id, task): (u64, Option<AbortHandle>),
    ) -> Result<(Arc<RequestLimit>, Option<AbortHandle>), NoSlot> {
        let own = self.known.get(&hash).map_or(0, |known| known.connections.len());
        if own >= share {
            return Err(NoSlot::Share(share));
        }
        let mut ended = None;
        if self.known_count >= slots.all {
            // The newest one of the identity with most, which has two more than this one at least.
            let most = self.by_count.last().copied().filter(|(count, _)| *count > own + 1);
            let (_, most) = most.ok_or(NoSlot::Full)?;
            let newest = self.known.get(&most).and_then(|known| known.connections.last_key_value());
            let newest = newest.map(|(id, _)| *id).ok_or(NoSlot::Full)?;
            ended = self.change_known(most, |connections| connections.remove(&newest)).flatten().flatten();
        }
        if self.known.len() >= 2 * self.known_count.max(KNOWN_KEPT) {
            let now = Instant::now();
            self.known.retain(|_, known| !known.connections.is_empty() || !known.requests.is_whole(now));
        }
        let known = self.known.entry(hash).or_insert_with(|| Known {
            connections: Connections::new(),
            requests: Arc::new(RequestLimit::new(guests)),
        });
        let requests = known.requests.clone();
        self.change_known(hash, |connections| connections.insert(id, task));
        Ok((requests, ended))
    }

    /// Changes the connections of an identity, if it is there.
    fn change_known<R>(&mut self, hash: u64, change: impl FnOnce(&mut Connections) -> R) -> Option<R> {
        let known = self.known.get_mut(&hash)?;
        let before = known.connections.len();
        let result = change(&mut known.connections);
        let after = known.connections.len();
        self.by_count.remove(&(before, hash));
        if after > 0 {
            self.by_count.insert((after, hash));
        }
        self.known_count = (self.known_count + after).saturating_sub(before);
        Some(result)
    }

    fn end_review(&mut self, origin: &Origin) {
        self.in_review_count -= 1;
        take_one(&mut self.in_review, origin);
    }
}

impl Unknown {
    fn insert(&mut self, origin: &Origin, id: u64, newcomer: Newcomer) {
        self.change(origin, |connections| connections.insert(id, newcomer));
    }

    /// Removes a connection; `None` if it is not there.
    fn remove(&mut self, origin: &Origin, id: u64) -> Option<Newcomer> {
        self.change(origin, |connections| connections.remove(&id))
    }

    /// Changes the connections of an origin.
    fn change<R>(&mut self, origin: &Origin, change: impl FnOnce(&mut Newcomers) -> R) -> R {
        let mut connections = self.by_origin.remove(origin).unwrap_or_default();
        if let Some(rank) = rank(&connections) {
            self.by_count.remove(&rank);
        }
        self.count -= connections.len();
        let result = change(&mut connections);
        self.count += connections.len();
        if let Some(rank) = rank(&connections) {
            self.by_count.insert(rank, origin.clone());
            self.by_origin.insert(origin.clone(), connections);
        }
        result
    }

    fn task(&self, origin: &Origin, id: u64) -> Option<AbortHandle> {
        self.by_origin.get(origin)?.get(&id)?.task.clone()
    }

    /// Removes the oldest connection of the origin with most if it has had its time; otherwise the newest of that
    /// origin, or of the origin of the connection that came last if it has as many. Returns its number and task.
    fn remove_one(&mut self, last: &Origin, now: Instant) -> Option<(u64, Option<AbortHandle>)> {
        let ((most, Reverse(oldest)), origin) = self.by_count.last_key_value()?;
        let since = self.by_origin.get(origin)?.get(oldest)?.since;
        let (origin, id) = if now.saturating_duration_since(since) >= SHOW_TIME {
            (origin, oldest)
        } else {
            let of_last = self.by_origin.get(last).map_or(0, Newcomers::len);
            let origin = if of_last == *most { last } else { origin };
            (origin, self.by_origin.get(origin)?.last_key_value()?.0)
        };
        let (origin, id) = (origin.clone(), *id);
        Some((id, self.remove(&origin, id)?.task))
    }
}

fn rank(connections: &Newcomers) -> Option<Rank> {
    connections.first_key_value().map(|(oldest, _)| (connections.len(), Reverse(*oldest)))
}

impl ConnectionSlot {
    fn stage(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn id(&self) -> SlotId {
        SlotId { origin: self.origin.clone(), id: self.id }
    }

    /// Lets a request wait for a review; `None` if too many of the origin do.
    pub(crate) fn await_review(&self) -> Option<ReviewWait<'_>> {
        let mut stage = self.stage();
        match &mut *stage {
            Stage::Known(..) => {}
            Stage::InReview(requests, _) => *requests += 1,
            Stage::Unknown => {
                let mut state = self.slots.state();
                let in_review = state.in_review.get(&self.origin).copied().unwrap_or(0);
                if in_review >= IN_REVIEW_MAX || state.in_review_count >= self.slots.all {
                    return None;
                }
                let task = state.unknown.remove(&self.origin, self.id).and_then(|newcomer| newcomer.task);
                state.in_review.insert(self.origin.clone(), in_review + 1);
                state.in_review_count += 1;
                *stage = Stage::InReview(1, task);
            }
        }
        Some(ReviewWait(self))
    }

    /// Makes the slot that of an identity, if it is not one's yet. Returns whether another connection ends for it.
    pub(crate) fn admit(&self, identity: &Identity) -> Result<bool, NoSlot> {
        let mut stage = self.stage();
        if let Stage::Known(..) = &*stage {
            return Ok(false);
        }
        let (hash, share) = (self.slots.hash(identity), self.slots.share(identity));
        let mut state = self.slots.state();
        let task = match &*stage {
            Stage::InReview(_, task) => task.clone(),
            Stage::Unknown | Stage::Known(..) => state.unknown.task(&self.origin, self.id),
        };
        let (requests, ended) = state.admit(&self.slots, hash, share, (self.id, task))?;
        match &*stage {
            Stage::InReview(..) => state.end_review(&self.origin),
            Stage::Unknown | Stage::Known(..) => drop(state.unknown.remove(&self.origin, self.id)),
        }
        *stage = Stage::Known(hash, requests);
        drop(state);
        drop(stage);
        let has_ended = ended.is_some();
        // Outside the locks: the task gives back its slot.
        ended.into_iter().for_each(|task| task.abort());
        Ok(has_ended)
    }

    /// Counts a request that costs as much as some others, once its client is known. Returns false if the client sends
    /// too many, on all its connections together.
    pub(crate) fn admits_request(&self, cost: u32) -> bool {
        match &*self.stage() {
            Stage::Known(_, requests) => requests.admits(cost),
            Stage::Unknown | Stage::InReview(..) => true,
        }
    }
}

impl ConnectionSlot {
    /// The piece of a response, counted until the client has taken it, if it is a large one. `companion` lives as long.
    /// Gives it back if the piece is not counted.
    pub(crate) fn hold<T: Send + 'static>(&self, piece: Bytes, companion: T) -> (Bytes, Option<T>) {
        let holder = if Unsent::counts_piece(&piece) { self.holder() } else { None };
        match holder {
            Some(holder) => (self.slots.unsent.hold(piece, holder, companion), None),
            None => (piece, Some(companion)),
        }
    }

    fn holder(&self) -> Option<Holder> {
        let stage = self.stage();
        let Stage::Known(identity, requests) = &*stage else { return None };
        let state = self.slots.state();
        let task = state.known.get(identity)?.connections.get(&self.id)?.clone()?;
        Some(Holder { identity: *identity, guests: requests.guests(), task })
    }
}

impl Drop for ReviewWait<'_> {
    fn drop(&mut self) {
        let ConnectionSlot { slots, origin, id, .. } = self.0;
        let mut stage = self.0.stage();
        let Stage::InReview(requests, task) = &mut *stage else { return };
        *requests -= 1;
        if *requests == 0 {
            let mut state = slots.state();
            state.end_review(origin);
            state.unknown.insert(origin, *id, Newcomer { task: task.take(), since: Instant::now() });
            *stage = Stage::Unknown;
        }
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut state = self.slots.state();
        match self.stage.get_mut().unwrap_or_else(PoisonError::into_inner) {
            Stage::Unknown => drop(state.unknown.remove(&self.origin, self.id)),
            Stage::InReview(..) => state.end_review(&self.origin),
            Stage::Known(hash, requests) => {
                // It is gone already if it has ended for another one.
                let left = state.change_known(*hash, |connections| {
                    connections.remove(&self.id);
                    connections.len()
                });
                // Requests of an identity without connections count until their time is over.
                if left == Some(0) && requests.is_whole(Instant::now()) {
                    state.known.remove(hash);
                }
            }
        }
    }
}

/// Counts one down, and removes a count of 0.
fn take_one<Key: Eq + std::hash::Hash>(counts: &mut HashMap<Key, usize>, key: &Key) {
    match counts.get_mut(key) {
        Some(count) if *count > 1 => *count -= 1,
        _ => drop(counts.remove(key)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clients::request_limit::{REQUEST_INTERVAL, REQUESTS_BURST};

    fn tcp(text: &str) -> PeerAddress {
        PeerAddress::Tcp(text.parse().unwrap())
    }

    fn identity(username: &str, source: Source, node: Option<&str>) -> Identity {
        let node_name = node.map(str::to_owned);
        Identity { username: username.to_owned(), node_name, source, ..Identity::anonymous() }
    }

    fn enter(slots: &Arc<ConnectionSlots>, from: &str) -> ConnectionSlot {
        slots.enter(&tcp(from)).0.unwrap()
    }

    /// Connection of a client that is known at once.
    fn known(slots: &Arc<ConnectionSlots>, from: &str, username: &str) -> Result<ConnectionSlot, NoSlot> {
        let slot = enter(slots, from);
        slot.admit(&identity(username, Source::Token, None)).map(|_| slot)
    }

    fn counts(slots: &ConnectionSlots) -> (usize, usize, usize) {
        let state = slots.state();
        (state.unknown.count, state.in_review_count, state.known_count)
    }

    #[tokio::test(start_paused = true)]
    async fn the_oldest_connection_of_the_origin_with_most_goes_first() {
        let slots = ConnectionSlots::new(40);
        let mut tasks = Vec::new();
        let mut held = Vec::new();
        let mut enter = |from: &str| {
            let (slot, has_ended) = slots.enter(&tcp(from));
            let task = tokio::spawn(std::future::pending::<()>());
            slots.set_task(slot.as_ref().unwrap().id(), task.abort_handle());
            tasks.push(task);
            held.push(slot);
            has_ended
        };
        for port in 1..=8 {
            assert!(!enter(&format!("192.0.2.1:{port}")));
            // A host has all addresses of its network.
            assert!(!enter(&format!("[2001:db8::{port}]:1")));
        }
        assert_eq!(counts(&slots), (UNKNOWN_MIN, 0, 0));
        tokio::time::advance(SHOW_TIME).await;
        // Others take the slots of the first ones, and the network that has most with a new one gives up its own.
        assert!(enter("198.51.100.1:1") && enter("198.51.100.1:2") && enter("[2001:db8::9]:1"));
        tokio::task::yield_now().await;
        let ended: Vec<_> = (0..tasks.len()).filter(|index| tasks[*index].is_finished()).collect();
        assert_eq!(ended, [0, 1, 3]);
        assert_eq!(counts(&slots), (UNKNOWN_MIN, 0, 0));
        drop(held);
        assert_eq!(counts(&slots), (0, 0, 0));
        let state = slots.state();
        assert!(state.unknown.by_origin.is_empty() && state.unknown.by_count.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_has_time_to_show_something_when_many_come_at_once() {
        let slots = ConnectionSlots::new(40);
        let has_slot = |from: &str, held: &mut Vec<_>| {
            let (slot, has_ended) = slots.enter(&tcp(from));
            let has_slot = slot.is_some();
            held.extend(slot);
            (has_slot, has_ended)
        };
        // Of a storm of clients, those that come first go on.
        let mut held = Vec::new();
        for host in 1..=100 {
            let (has_slot, has_ended) = has_slot(&format!("192.0.2.{host}:1"), &mut held);
            assert_eq!((has_slot, has_ended), (host <= UNKNOWN_MIN, host > UNKNOWN_MIN), "{host}");
        }
        held.drain(..8).for_each(|slot| assert_eq!(slot.admit(&Identity::anonymous()), Ok(false)));
        assert_eq!(counts(&slots), (8, 0, 0));
        // One that floods takes what is left, and gives it back to others at once.
        let mut flood = Vec::new();
        let own = (1..=100).filter(|port| has_slot(&format!("198.51.100.1:{port}"), &mut flood).0).count();
        assert_eq!((own, counts(&slots)), (8, (UNKNOWN_MIN, 0, 0)));
        assert_eq!(has_slot("198.51.100.2:1", &mut held), (true, true));
        let left = |from: &str| slots.state().unknown.by_origin.get(&Origin::from(&tcp(from))).map(BTreeMap::len);
        assert_eq!((left("198.51.100.1:1"), left("198.51.100.2:1"), left("192.0.2.16:1")), (Some(7), Some(1), Some(1)));
        // Those that have shown nothing in their time go first.
        tokio::time::advance(SHOW_TIME).await;
        assert_eq!(has_slot("198.51.100.1:101", &mut flood), (true, true));
        assert_eq!(left("198.51.100.1:1"), Some(7));
        drop((held, flood));
        assert_eq!(counts(&slots), (0, 0, 0));
    }

    #[test]
    fn an_identity_has_a_share_and_the_one_with_most_gives_up_connections_for_others() {
        let slots = ConnectionSlots::new(40);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let task = || runtime.spawn(std::future::pending::<()>());
        let mut tasks = Vec::new();
        let mut come = |name: &str| {
            let slot = enter(&slots, "192.0.2.1:1");
            tasks.push(task());
            slots.set_task(slot.id(), tasks.last().unwrap().abort_handle());
            slot.admit(&identity(name, Source::Token, None)).map(|has_ended| (slot, has_ended))
        };
        let mut held: Vec<_> = (0..20).map(|_| come("a").unwrap()).collect();
        assert_eq!(come("a").unwrap_err(), NoSlot::Share(20));
        held.extend((0..20).map(|_| come("b").unwrap()));
        assert!(held.iter().all(|(_, has_ended)| !has_ended));
        assert_eq!(come("b").unwrap_err(), NoSlot::Share(20));
        // Eighteen others get in, at the cost of those two alone.
        for round in 0..18 {
            let (slot, has_ended) = come(&format!("c{round}")).unwrap();
            assert!(has_ended);
            held.push((slot, has_ended));
        }
        let counts_of = |slots: &ConnectionSlots| {
            let mut counts: Vec<_> = slots.state().known.values().map(|known| known.connections.len()).collect();
            counts.sort_unstable();
            counts
        };
        assert_eq!(counts_of(&slots), [vec![1; 18], vec![11; 2]].concat());
        runtime.block_on(tokio::task::yield_now());
        // The newest ones of both ended.
        let ended: Vec<_> = (0..tasks.len()).filter(|index| tasks[*index].is_finished()).collect();
        assert_eq!(ended, (11..20).chain(32..41).collect::<Vec<_>>());
        assert_eq!(counts(&slots), (0, 0, 40));
        drop(held);
        assert_eq!((counts(&slots), slots.state().known.len()), ((0, 0, 0), 0));
        assert!(slots.state().by_count.is_empty());
        // Where all have one, none gives way.
        let held: Vec<_> = (0..40).map(|number| known(&slots, "192.0.2.1:1", &format!("d{number}")).unwrap()).collect();
        assert_eq!(known(&slots, "192.0.2.1:1", "e").unwrap_err(), NoSlot::Full);
        drop(held);
    }

    #[tokio::test(start_paused = true)]
    async fn requests_of_a_client_count_together_also_if_it_comes_back() {
        let slots = ConnectionSlots::new(40);
        let guest = identity("a", Source::Local, None);
        let mut admitted = 0;
        for _ in 0..3 {
            let held: Vec<_> = (0..2).map(|_| enter(&slots, "192.0.2.1:1")).collect();
            held.iter().for_each(|slot| assert!(!slot.admit(&guest).unwrap()));
            admitted += held.iter().flat_map(|slot| (0..150).map(|_| slot.admits_request(1))).filter(|is| *is).count();
        }
        assert_eq!(admitted, REQUESTS_BURST as usize);
        assert_eq!(slots.state().known.len(), 1);
        tokio::time::advance(REQUEST_INTERVAL * REQUESTS_BURST).await;
        let other = known(&slots, "192.0.2.1:1", "b").unwrap();
        let account = identity("c", Source::Token, Some("node-1"));
        let of_account = enter(&slots, "192.0.2.1:1");
        assert_eq!(of_account.admit(&account), Ok(false));
        let admitted = (0..30_000).filter(|_| of_account.admits_request(1)).count();
        assert_eq!(admitted, (REQUESTS_BURST * GUESTS_OF_ACCOUNT) as usize);
        drop((other, of_account));
    }

    #[test]
    fn many_guests_with_one_account_have_shares_of_their_nodes() {
        let slots = ConnectionSlots::new(40);
        let admit = |identity: &Identity| {
            let slot = enter(&slots, "192.0.2.1:1");
            slot.admit(identity).map(|_| slot)
        };
        let guest = |node| identity("system:serviceaccount:guests:agent", Source::Token, Some(node));
        let held: Vec<_> = (0..20).map(|_| admit(&guest("node-1")).unwrap()).collect();
        assert_eq!(admit(&guest("node-1")).unwrap_err(), NoSlot::Share(20));
        let others: Vec<_> = (0..20).map(|_| admit(&guest("node-2")).unwrap()).collect();
        drop((held, others));
        let local = identity("vsock 3", Source::Local, None);
        let held: Vec<_> = (0..GUEST_CONNECTIONS_MAX).map(|_| admit(&local).unwrap()).collect();
        assert_eq!(admit(&local).unwrap_err(), NoSlot::Share(GUEST_CONNECTIONS_MAX));
        drop(held);
        let held: Vec<_> = (0..40).map(|_| admit(&Identity::anonymous()).unwrap()).collect();
        assert_eq!(admit(&Identity::anonymous()).unwrap_err(), NoSlot::Share(40));
        drop(held);
    }

    #[test]
    fn a_connection_whose_token_is_under_review_stays_and_each_origin_has_a_bound_of_them() {
        let slots = ConnectionSlots::new(10_000);
        let waiting = enter(&slots, "192.0.2.1:1");
        let (first, second) = (waiting.await_review().unwrap(), waiting.await_review().unwrap());
        assert_eq!(counts(&slots), (0, 1, 0));
        drop(first);
        assert_eq!(counts(&slots), (0, 1, 0));
        drop(second);
        assert_eq!(counts(&slots), (1, 0, 0));
        let in_review = waiting.await_review().unwrap();
        assert_eq!(waiting.admit(&Identity::anonymous()), Ok(false));
        drop(in_review);
        assert_eq!(counts(&slots), (0, 0, 1));
        assert!(waiting.await_review().is_some());
        let others: Vec<_> = (0..=IN_REVIEW_MAX).map(|_| enter(&slots, "192.0.2.1:1")).collect();
        let in_review: Vec<_> = others.iter().map(ConnectionSlot::await_review).collect();
        assert_eq!(in_review.iter().filter(|in_review| in_review.is_none()).count(), 1);
        assert!(enter(&slots, "192.0.2.2:1").await_review().is_some());
        drop(in_review);
        drop((others, waiting));
        assert_eq!((counts(&slots), slots.state().in_review.len()), ((0, 0, 0), 0));
    }
}
