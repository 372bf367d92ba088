//! An API server, two relays that follow it each with its own gaps, and their clients. Each client's cache is built
//! from the bytes that it gets. Whatever happens, in the end each has exactly what the server has.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Poll, Wake, Waker},
    time::{Duration, Instant},
};

use cproxy_core::api::Service;
use cproxy_relay_core::{
    Collection, Filter, Format, Kind, List, Meta, Object, Selector, Update, Upstream, Visibility, Watch, WatchOptions,
    WatchStart,
};
use prost::Message;

use crate::relay_client::{Key, Received, Services, key, read_events, read_list, version};

/// Next step and its arguments.
pub type Step = [u8; 4];

const CLIENTS: usize = 5;
const REPLICAS: usize = 2;

/// Copies of the server's data that can be restored.
const BACKUPS_MAX: usize = 4;

/// Timelines, whose versions differ.
const TIMELINES_MAX: u64 = 256;

/// Plays a history to its end.
pub fn play(steps: &[Step]) {
    let mut world = World::new();
    for step in steps {
        world.take(*step);
    }
    world.finish();
}

/// Present objects.
#[derive(Clone, Default)]
struct Data {
    version: u64,
    objects: Services,
    /// Those that a relay cannot read.
    unreadable: BTreeSet<Key>,
}

/// Event of the server's watch.
enum Logged {
    Applied(Service),
    Deleted(Service),
    Unreadable(u64),
    UnreadableDeleted(Key, u64),
}

#[derive(Default)]
struct Server {
    data: Data,
    /// Changes since the data was last restored.
    log: Vec<Logged>,
    backups: Vec<Data>,
    /// Number of times that data was restored.
    timeline: u64,
    /// Objects that were once unreadable. What a client has of them depends on its relay.
    vague: BTreeSet<Key>,
}

impl Server {
    /// Versions differ between timelines: one that has another meaning cannot be told apart.
    fn next_version(&mut self, step: u8) -> u64 {
        let next = self.data.version / TIMELINES_MAX + 1 + u64::from(step % 3);
        self.data.version = next * TIMELINES_MAX + self.timeline;
        self.data.version
    }

    fn write(&mut self, [a, b, c]: [u8; 3]) {
        let version = self.next_version(c);
        let mut service = Service::default();
        let key = object_key(a);
        (service.metadata.namespace, service.metadata.name) = key.clone();
        service.metadata.resource_version = version.to_string();
        if b % 3 > 0 {
            service.metadata.labels.insert("app".to_owned(), ["a", "b"][usize::from(b % 3 - 1)].to_owned());
        }
        service.spec.cluster_ip = format!("10.0.0.{c}");
        if b >= 0xc0 {
            // Longer than a batch, or half of one.
            service.spec.external_ips.push("x".repeat(if b >= 0xe0 { 17 << 10 } else { 9 << 10 }));
        }
        if b == 0x7f {
            self.vague.insert(key.clone());
            self.data.unreadable.insert(key.clone());
            self.log.push(Logged::Unreadable(version));
        } else {
            self.data.unreadable.remove(&key);
            self.log.push(Logged::Applied(service.clone()));
        }
        self.data.objects.insert(key, service);
    }

    /// All objects become readable.
    fn mend(&mut self) {
        for key in std::mem::take(&mut self.data.unreadable) {
            let version = self.next_version(0);
            let Some(service) = self.data.objects.get_mut(&key) else { continue };
            service.metadata.resource_version = version.to_string();
            self.log.push(Logged::Applied(service.clone()));
        }
    }

    fn delete(&mut self, a: u8, c: u8) {
        let key = object_key(a);
        let Some(mut service) = self.data.objects.remove(&key) else { return };
        let version = self.next_version(c);
        service.metadata.resource_version = version.to_string();
        self.log.push(match self.data.unreadable.remove(&key) {
            true => Logged::UnreadableDeleted(key, version),
            false => Logged::Deleted(service),
        });
    }

    fn restore(&mut self, index: u8) {
        let Some(data) = self.backups.get(usize::from(index) % BACKUPS_MAX) else { return };
        if self.timeline + 1 == TIMELINES_MAX {
            return;
        }
        self.data = data.clone();
        // A relay may keep a lost state of what it cannot read.
        if !self.vague.is_empty() {
            self.data.objects.retain(|key, _| !self.vague.contains(key));
            self.data.unreadable.clear();
        }
        self.timeline += 1;
        self.log.clear();
    }
}

fn object_key(a: u8) -> Key {
    (["x", "y"][usize::from(a & 1)].to_owned(), ["n0", "n1", "n2"][usize::from(a >> 1) % 3].to_owned())
}

fn object(service: &Service) -> Object {
    let (metadata, protobuf) = Upstream::<Service>::decode(&*service.encode_to_vec()).expect("protobuf").into_parts();
    Object::new(Kind::Services, metadata, protobuf.into()).expect("a Service has a name and a version")
}

/// Events of a relay as they should be.
struct Replica {
    collection: Arc<Collection>,
    /// Events of the server's log that it has seen.
    seen: usize,
    /// Timeline and version that it knows.
    timeline: u64,
    version: u64,
    is_listed: bool,
    /// Objects of the list that it could not read and does not know.
    unread: BTreeSet<Key>,
    shown: Services,
    oldest: u64,
    /// Changes between these versions are known as a whole only.
    gaps: Vec<(u64, u64)>,
    /// First version that includes each event of the history.
    history: VecDeque<u64>,
    forgotten: u64,
    /// Clients may get additions and deletions twice.
    has_compacted: bool,
    epoch: u64,
    now: Instant,
}

impl Replica {
    fn new() -> Self {
        Self {
            collection: Arc::new(Collection::new(Kind::Services)),
            seen: 0,
            timeline: 0,
            version: 0,
            is_listed: false,
            unread: BTreeSet::new(),
            shown: Services::new(),
            oldest: 0,
            gaps: Vec::new(),
            history: VecDeque::new(),
            forgotten: 0,
            has_compacted: false,
            epoch: 0,
            now: Instant::now(),
        }
    }

    fn is_synced(&self) -> bool {
        self.is_listed && self.unread.is_empty()
    }

    fn pushed(&self) -> u64 {
        self.forgotten + self.history.len() as u64
    }

    fn apply(&mut self, update: Update) -> bool {
        self.now += Duration::from_secs(1);
        let outcome = self.collection.apply(update, self.now);
        self.collection.wake_due();
        self.history.extend(std::iter::repeat_n(self.version, outcome.events));
        outcome.is_reset
    }

    /// Takes the next event of the server's watch. Returns the name of the object, unless all clients may be woken.
    fn follow(&mut self, server: &Server) -> Option<String> {
        let logged = server.log.get(self.seen).filter(|_| self.is_listed)?;
        self.seen += 1;
        let (update, name) = match logged {
            Logged::Applied(service) => {
                self.version = version(service);
                self.unread.remove(&key(service));
                self.shown.insert(key(service), service.clone());
                (Update::Applied(object(service)), Some(service.metadata.name.clone()))
            }
            Logged::Deleted(service) => {
                self.version = version(service);
                self.unread.remove(&key(service));
                self.shown.remove(&key(service));
                (Update::Deleted(object(service)), Some(service.metadata.name.clone()))
            }
            Logged::Unreadable(version) => {
                self.version = *version;
                (Update::Bookmark(*version), None)
            }
            Logged::UnreadableDeleted(key, version) => {
                self.version = *version;
                self.unread.remove(key);
                self.shown.remove(key);
                (Update::DeletedUnreadable((*key.0).into(), (*key.1).into(), *version), None)
            }
        };
        assert!(!self.apply(update), "the server's data has not gone back");
        name
    }

    fn bookmark(&mut self, server: &Server) {
        if self.is_listed && self.seen == server.log.len() {
            self.version = server.data.version;
            self.apply(Update::Bookmark(self.version));
        }
    }

    /// Lists the server's objects, after a list that was cut.
    fn list(&mut self, server: &Server, cut: u8) {
        let before = self.collection.summary();
        for end in [usize::from(cut), usize::MAX] {
            self.apply(Update::ListStarted);
            for (key, service) in server.data.objects.iter().take(end) {
                self.apply(match server.data.unreadable.contains(key) {
                    true => Update::ListedUnreadable((*key.0).into(), (*key.1).into()),
                    false => Update::Listed(object(service)),
                });
            }
        }
        assert_eq!(self.collection.summary(), before, "a list that is not complete changes nothing");
        let known = std::mem::replace(&mut self.version, server.data.version);
        let is_reset = self.apply(Update::ListDone(self.version));
        assert!(!is_reset || self.timeline != server.timeline, "the server's data has not gone back");
        if is_reset || !self.is_synced() {
            let unread = server.data.unreadable.iter().filter(|key| !self.shown.contains_key(*key));
            self.unread = unread.cloned().collect();
            self.forgotten = self.pushed();
            self.history.clear();
            self.gaps.clear();
            self.oldest = self.version;
            self.epoch += 1;
        } else {
            self.gaps.push((known, self.version));
        }
        (self.seen, self.timeline, self.is_listed) = (server.log.len(), server.timeline, true);
        let state = |(key, service): (&Key, &Service)| {
            if !server.data.unreadable.contains(key) {
                return Some((key.clone(), service.clone()));
            }
            let mut kept = self.shown.get(key)?.clone();
            // A state of lost data may be newer than all that is left.
            kept.metadata.resource_version = version(&kept).min(server.data.version).to_string();
            Some((key.clone(), kept))
        };
        self.shown = server.data.objects.iter().filter_map(state).collect();
    }

    fn forget(&mut self, number: u8, by_age: bool) {
        for _ in 0..if self.is_synced() { number } else { 0 } {
            let (oldest, now) = (self.collection.oldest_event(), self.now);
            match oldest.filter(|_| by_age) {
                Some(at) => self.collection.forget_older_than((now - at).saturating_sub(Duration::from_nanos(1)), now),
                None => self.collection.forget_oldest(),
            }
            let left = self.collection.summary().map_or(0, |summary| summary.events);
            while self.history.len() > left {
                self.oldest = self.oldest.max(self.history.pop_front().unwrap_or_default());
                self.forgotten += 1;
            }
        }
    }

    /// Whether a watch cannot begin after the changes up to a version.
    fn refuses(&self, version: u64) -> bool {
        let is_between = |(from, to): &(u64, u64)| *from < version && version < *to;
        version < self.oldest || version > self.version || self.gaps.iter().any(is_between)
    }
}

/// Waker that counts.
#[derive(Default)]
struct Wakes(AtomicUsize);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Allows all objects but those of the app b.
struct NotB;

impl Visibility for NotB {
    fn allows(&self, _: Kind, meta: &Meta) -> bool {
        meta.label("app") != Some("b")
    }
}

/// Objects that a client wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Everything,
    Namespace,
    AppA,
    Named,
    NamedInNamespace,
    View,
}

const WANTED: [Wanted; 6] =
    [Wanted::Everything, Wanted::Namespace, Wanted::AppA, Wanted::Named, Wanted::NamedInNamespace, Wanted::View];

impl Wanted {
    fn filter(self) -> Filter {
        let selector = |labels, fields| Selector::parse(Kind::Services, labels, fields).expect("a selector");
        let namespace = Some("x".to_owned());
        match self {
            Self::Everything => Filter::default(),
            Self::Namespace => Filter { namespace, ..Filter::default() },
            Self::AppA => Filter { selector: selector("app in (a)", ""), ..Filter::default() },
            Self::Named => Filter { selector: selector("", "metadata.name=n0"), ..Filter::default() },
            Self::NamedInNamespace => {
                Filter { namespace, selector: selector("app!=b", "metadata.name=n1"), ..Filter::default() }
            }
            Self::View => Filter { visibility: Some(Arc::new(NotB)), ..Filter::default() },
        }
    }

    fn name(self) -> Option<&'static str> {
        match self {
            Self::Named => Some("n0"),
            Self::NamedInNamespace => Some("n1"),
            _ => None,
        }
    }

    fn has(self, service: &Service) -> bool {
        let (meta, app) = (&service.metadata, service.metadata.labels.get("app").map(String::as_str));
        match self {
            Self::Everything => true,
            Self::Namespace => meta.namespace == "x",
            Self::AppA => app == Some("a"),
            Self::Named => meta.name == "n0",
            Self::NamedInNamespace => meta.namespace == "x" && meta.name == "n1" && app != Some("b"),
            Self::View => app != Some("b"),
        }
    }

    fn of(self, services: &Services) -> Services {
        let wanted = services.iter().filter(|(_, service)| self.has(service));
        wanted.map(|(key, service)| (key.clone(), service.clone())).collect()
    }
}

/// Watch of a client that is under way.
struct Active {
    watch: Watch,
    replica: usize,
    wakes: Arc<Wakes>,
    /// Number of wakes when it had nothing more to say; `None`: it may have more.
    pending: Option<usize>,
    epoch: u64,
    /// Number of events of the relay that the client has had, at least.
    place: u64,
    is_refused: bool,
    /// Objects that come first.
    initial: Option<Services>,
    is_resumed: bool,
}

impl Active {
    fn is_woken(&self) -> bool {
        self.pending.is_none_or(|wakes| wakes != self.wakes.0.load(Ordering::Relaxed))
    }
}

struct Client {
    wanted: Wanted,
    is_json: bool,
    wants_bookmarks: bool,
    cache: Services,
    /// Version to resume from; `None`: it lists anew.
    version: Option<u64>,
    /// Latest version of each object that it has seen.
    seen: BTreeMap<Key, u64>,
    /// Version of the relay that sent its last event. If it was cut off before it had got there, it may lack changes
    /// that a later one follows, and have lost objects early. A relay that is not there yet cannot tell it.
    whole_from: u64,
    timeline: u64,
    /// Relays from which the cache comes.
    replicas: BTreeSet<usize>,
    active: Option<Active>,
}

impl Client {
    fn new() -> Self {
        Self {
            wanted: Wanted::Everything,
            is_json: false,
            wants_bookmarks: true,
            cache: Services::new(),
            version: None,
            seen: BTreeMap::new(),
            whole_from: 0,
            timeline: 0,
            replicas: BTreeSet::new(),
            active: None,
        }
    }

    fn format(&self) -> Format {
        if self.is_json { Format::Json } else { Format::Protobuf }
    }

    /// Begins anew, possibly as another client.
    fn renew(&mut self, who: u8) {
        *self = Self {
            wanted: WANTED[usize::from(who) % WANTED.len()],
            is_json: who & 0x40 != 0,
            wants_bookmarks: who & 0x80 == 0,
            ..Self::new()
        };
    }

    /// Starts a watch, where the client was if possible.
    fn connect(&mut self, replicas: &[Replica], index: usize, who: u8, timeline: u64) {
        let replica = &replicas[index];
        if self.active.is_some() || !replica.is_synced() {
            return;
        }
        if self.timeline != timeline {
            // Versions of lost data can mean something else now. Neither the relay nor an API server could tell.
            self.version = None;
        }
        let (start, place, initial) = match self.version {
            Some(version) => {
                // A request waits for a version that the relay does not have yet.
                if version > replica.version && who & 1 == 0 {
                    return;
                }
                let had = replica.history.iter().take_while(|known| **known <= version).count();
                (WatchStart::After(version), replica.forgotten + had as u64, None)
            }
            None => {
                self.renew(who);
                self.timeline = timeline;
                let initial = self.wanted.of(&replica.shown);
                let snapshot = replica.collection.snapshot().expect("the relay has a list");
                if who & 0x20 != 0 && self.wants_bookmarks {
                    (WatchStart::Initial { snapshot, sends_end: true }, replica.pushed(), Some(initial))
                } else {
                    let list = List::new(snapshot, self.wanted.filter(), self.format());
                    let body: Vec<u8> = list.flatten().collect();
                    let (cache, version) = read_list(&body, self.is_json);
                    assert_eq!((&cache, version), (&initial, replica.version), "a list has what is there");
                    self.cache = cache;
                    self.version = Some(version);
                    self.note_list();
                    (WatchStart::After(version), replica.pushed(), None)
                }
            }
        };
        let is_resumed = self.replicas.contains(&index);
        self.replicas.insert(index);
        let is_refused = matches!(start, WatchStart::After(version) if replica.refuses(version));
        let options = WatchOptions { filter: self.wanted.filter(), wants_bookmarks: self.wants_bookmarks };
        let watch = Watch::new(replica.collection.clone(), options, self.format(), start);
        let (wakes, epoch) = (Arc::default(), replica.epoch);
        let active =
            Active { watch, replica: index, wakes, pending: None, epoch, place, is_refused, initial, is_resumed };
        self.active = Some(active);
    }

    fn note_list(&mut self) {
        self.seen = self.cache.iter().map(|(key, service)| (key.clone(), version(service))).collect();
    }

    /// Reads the next part of its watch if it was told that there is one, and takes this many events of it.
    fn poll(&mut self, replicas: &[Replica], events_max: usize, vague: &BTreeSet<Key>) {
        let Some(active) = self.active.as_mut().filter(|active| active.is_woken()) else { return };
        let replica = &replicas[active.replica];
        let wakes = active.wakes.0.load(Ordering::Relaxed);
        match active.watch.poll_next(&Waker::from(active.wakes.clone())) {
            // It lets others go first.
            Poll::Pending if active.wakes.0.load(Ordering::Relaxed) != wakes => active.pending = None,
            Poll::Pending => {
                assert!(!active.is_refused && active.initial.is_none());
                assert_eq!(active.epoch, replica.epoch, "a client is told that the data went back");
                active.pending = Some(active.wakes.0.load(Ordering::Relaxed));
                active.place = replica.pushed();
                self.timeline = replica.timeline;
                self.check(&replica.shown, replica.version, vague);
            }
            Poll::Ready(None) => self.active = None,
            Poll::Ready(Some(part)) => {
                active.pending = None;
                for event in read_events(&part, self.is_json).into_iter().take(events_max) {
                    self.whole_from = self.whole_from.max(replica.version);
                    self.receive(event, replica, vague);
                }
            }
        }
    }

    fn receive(&mut self, event: Received, replica: &Replica, vague: &BTreeSet<Key>) {
        let active = self.active.as_mut().expect("a client that receives watches");
        let is_alone = self.replicas.len() == 1 && !replica.has_compacted;
        assert!(!active.is_refused || matches!(event, Received::Error(_)), "{:?}: {event:?}", self.version);
        match event {
            Received::Added(service) => {
                assert!(!is_alone || !self.cache.contains_key(&key(&service)), "it is new: {service:?}");
                self.store(service);
            }
            Received::Modified(service) => {
                assert!(!is_alone || self.cache.contains_key(&key(&service)), "it is known: {service:?}");
                assert!(active.initial.is_none());
                self.store(service);
            }
            Received::Deleted(service) => {
                let (key, version) = (key(&service), version(&service));
                let is_known = self.cache.remove(&key).is_some();
                assert!(!is_alone || active.is_resumed || is_known, "it was there: {service:?}");
                assert!(active.initial.is_none());
                assert!(self.seen.insert(key, version).is_none_or(|seen| seen <= version), "older: {service:?}");
                self.advance(version);
            }
            Received::Bookmark(version, ends_initial_events) => {
                assert!(self.wants_bookmarks);
                if ends_initial_events {
                    assert_eq!(Some(&self.cache), active.initial.take().as_ref(), "all have been sent");
                    self.version = Some(version);
                } else {
                    assert_eq!(version, replica.version);
                    self.advance(version);
                    self.check(&replica.shown, replica.version, vague);
                }
            }
            Received::Error(code) => {
                let is_lost = active.epoch != replica.epoch || replica.forgotten > active.place;
                assert!(code == 410 && (is_lost || active.is_refused), "a client loses its place for no reason");
                (self.active, self.version) = (None, None);
            }
        }
    }

    fn store(&mut self, service: Service) {
        let (key, version) = (key(&service), version(&service));
        assert!(self.wanted.has(&service), "{:?} does not see {service:?}", self.wanted);
        assert!(self.seen.insert(key.clone(), version).is_none_or(|seen| seen < version), "older: {service:?}");
        self.cache.insert(key, service);
        if self.active.as_ref().is_some_and(|active| active.initial.is_none()) {
            self.advance(version);
        }
    }

    fn advance(&mut self, version: u64) {
        assert!(self.version.is_some_and(|before| before <= version), "{version} after {:?}", self.version);
        self.version = Some(version);
    }

    /// The cache is that of its relay at a version.
    fn check(&self, shown: &Services, version: u64, vague: &BTreeSet<Key>) {
        if version < self.whole_from && self.replicas.len() > 1 {
            return;
        }
        let (mut cache, mut expected) = (self.cache.clone(), self.wanted.of(shown));
        if self.replicas.len() > 1 {
            cache.retain(|key, _| !vague.contains(key));
            expected.retain(|key, _| !vague.contains(key));
        }
        assert_eq!(cache, expected, "{:?}", self.wanted);
    }
}

struct World {
    server: Server,
    replicas: [Replica; REPLICAS],
    clients: [Client; CLIENTS],
}

impl World {
    fn new() -> Self {
        let mut world = Self {
            server: Server::default(),
            replicas: std::array::from_fn(|_| Replica::new()),
            clients: std::array::from_fn(|_| Client::new()),
        };
        world.server.next_version(0);
        world
    }

    fn take(&mut self, [step, a, b, c]: Step) {
        let replica = usize::from(a) % REPLICAS;
        let client = usize::from(a) % CLIENTS;
        match step % 24 {
            0..=4 => self.server.write([a, b, c]),
            5 | 6 => self.server.delete(a, c),
            7..=10 => (0..b % 8).for_each(|_| self.follow(replica)),
            11 => self.replicas[replica].bookmark(&self.server),
            12 => self.replicas[replica].list(&self.server, b),
            13 if c % 4 == 3 => {
                self.replicas[replica].has_compacted = true;
                self.replicas[replica].collection.compact(["x", "y"][usize::from(b) % 2]);
            }
            13 => self.replicas[replica].forget(b % 4, c & 1 == 0),
            14 => drop(self.server.next_version(b)),
            15 if self.server.backups.len() < BACKUPS_MAX => self.server.backups.push(self.server.data.clone()),
            15 => self.restore(a, b, c),
            16 | 17 => self.clients[client].connect(&self.replicas, usize::from(c) % REPLICAS, b, self.server.timeline),
            18..=21 => (0..b % 8).for_each(|_| self.poll(client, usize::MAX)),
            22 => self.cut(client, b, c),
            _ => self.clients[client].active = None,
        }
    }

    /// The server gets back earlier data, goes on from there, and then the relays come back.
    fn restore(&mut self, a: u8, b: u8, c: u8) {
        self.server.restore(a);
        for index in 0..b % 16 {
            match (b ^ index) % 4 {
                0 => self.server.delete(a.wrapping_add(index), c),
                _ => self.server.write([a.wrapping_add(index), b, c.wrapping_add(index)]),
            }
        }
        self.replicas.iter_mut().filter(|replica| replica.is_listed).for_each(|replica| replica.list(&self.server, 0));
    }

    fn poll(&mut self, client: usize, events_max: usize) {
        self.clients[client].poll(&self.replicas, events_max, &self.server.vague);
    }

    /// The connection is cut in the middle of a part, or the watch ends in an orderly way.
    fn cut(&mut self, client: usize, events: u8, how: u8) {
        if how & 1 == 0 {
            self.poll(client, usize::from(events % 4));
        } else {
            while self.clients[client].active.as_ref().is_some_and(Active::is_woken) {
                self.poll(client, usize::MAX);
            }
            let client = &mut self.clients[client];
            let end = client.active.as_mut().and_then(|active| active.watch.end());
            let version = end.map(|part| match read_events(&part, client.is_json).as_slice() {
                [Received::Bookmark(version, false)] => *version,
                other => panic!("{other:?}"),
            });
            version.into_iter().for_each(|version| client.advance(version));
        }
        let client = &mut self.clients[client];
        if client.active.take().is_some_and(|active| active.initial.is_some()) {
            // It had not got to the end of the list.
            client.version = None;
        }
    }

    /// A relay takes the next event. Clients that watch another object by its name sleep on.
    fn follow(&mut self, replica: usize) {
        let wakes = |client: &Client| {
            let active = client.active.as_ref().filter(|active| active.replica == replica);
            active.map(|active| active.wakes.0.load(Ordering::Relaxed))
        };
        let before = self.clients.each_ref().map(wakes);
        let Some(name) = self.replicas[replica].follow(&self.server) else { return };
        for (client, before) in self.clients.iter().zip(before) {
            let is_other = client.wanted.name().is_some_and(|wanted| wanted != name);
            assert!(!is_other || wakes(client) == before, "{name} wakes {:?}", client.wanted);
        }
    }

    /// All catch up.
    fn finish(&mut self) {
        self.server.mend();
        for (index, replica) in self.replicas.iter_mut().enumerate() {
            if !replica.is_listed || index == 0 && self.server.data.version.is_multiple_of(3) {
                replica.list(&self.server, 0);
            }
        }
        for replica in 0..REPLICAS {
            while self.replicas[replica].seen < self.server.log.len() {
                self.follow(replica);
            }
            self.replicas[replica].bookmark(&self.server);
        }
        // A client that loses its place lists anew, and then has it.
        for _ in 0..3 {
            for client in 0..CLIENTS {
                self.clients[client].connect(&self.replicas, client % REPLICAS, 0x24, self.server.timeline);
                while self.clients[client].active.as_ref().is_some_and(Active::is_woken) {
                    self.poll(client, usize::MAX);
                }
            }
        }
        for client in &mut self.clients {
            let active = client.active.as_mut().expect("all watch in the end");
            client.timeline = self.server.timeline;
            let more = active.watch.poll_next(Waker::noop());
            assert!(more.is_pending(), "a client was not woken: {more:?}");
            let (replica, version) = (&self.replicas[active.replica], self.server.data.version);
            assert_eq!(replica.version, version);
            client.check(&replica.shown, version, &self.server.vague);
            client.replicas = (0..REPLICAS).collect();
            client.check(&self.server.data.objects, version, &self.server.vague);
        }
    }
}
