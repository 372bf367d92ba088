//! Stateful API server in memory that misbehaves as a script says, and the invariants of an agent that follows it.
//!
//! A script is pairs of bytes, an action and its argument: objects change, the server forgets old versions, requests
//! fail and responses break off in every way. The server sends protobuf to clients that accept it, and only JSON if the
//! script has an odd length. Time is tokio's paused clock, which only advances while every task waits.

use std::{
    collections::{BTreeMap, VecDeque},
    future::pending,
    io,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use cproxy_core::{Event, NodeContext, ObjectName, Problem, ResourceKind, SECOND_LIST_AFTER, Store, api};
use cproxy_wire::{Body, BoxError, LastContact, Link, Received, Transport, watch};
use http::{HeaderMap, Request, Response, Uri};
use http_body::Frame;
use serde_json::{Value, json};
use tokio::{
    sync::{mpsc, watch as changes},
    time::{Instant, sleep, sleep_until},
};

use crate::{
    encoding::{self, envelope, envelope_start, field, varint},
    responses::{event, status},
};

/// Message of each error.
const MESSAGE: &str = "so the script wants it";
/// Name of this node.
const NODE: &str = "own";
/// Number of objects of a kind, at most; the last Service is headless.
const SLOTS: usize = 4;
/// Actions of a script that are carried out.
const ACTIONS_MAX: usize = 60;
/// Length of an object that is too long.
const TOO_LONG: usize = 9 << 20;
/// Length of an object that counts as endless.
const ENDLESS: usize = 400 << 20;
/// Long objects per script, since each takes time.
const LONG_ONES_MAX: usize = 1;

/// Time to converge in after the last action: the longest silence and the longest pauses.
const PATIENCE: Duration = Duration::from_secs(40 * 60);
/// Time before the end of a watch at which the server sends a bookmark
/// (apiserver/pkg/storage/cacher/cache_watcher.go 1.36).
const LAST_BOOKMARK: Duration = Duration::from_secs(2);
/// Times after which a proxy ends watches. The longest is too short for a comparison without bookmarks, too.
const WATCHES_MAX: [Duration; 3] = [Duration::from_millis(50), Duration::from_millis(950), Duration::from_millis(1500)];

/// Bound on the requests to a server that behaves.
const REST: Duration = Duration::from_secs(600);
const REST_REQUESTS_MAX: usize = 20;

/// Response to a client that accepts protobuf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protobuf {
    /// It is in protobuf.
    Sent,
    /// It is in JSON.
    NotSent,
    /// The request is refused with this status.
    Refused(u16),
}

/// Fault of one request or of its response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// An error instead of the response.
    Refuse(u16),
    /// No connection.
    Unreachable,
    /// No response, for ever.
    Mute,
    /// The response ends regularly.
    End,
    /// The connection is closed in the middle.
    Cut,
    /// The connection is reset.
    Reset,
    /// The response stalls.
    Stall,
    /// An error event.
    ErrorEvent(u16),
    /// A line that is not JSON.
    Garbage,
    /// Half an object.
    Half,
    /// An object of another kind.
    Foreign,
    /// A bookmark without a version.
    Versionless,
    /// A line that is too long, without a name.
    TooLong,
    /// A line without an end.
    Endless,
    /// The rest comes some time later.
    Late,
}

/// Form of an object in a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Good,
    Unreadable,
    TooLong,
}

#[derive(Clone, Debug)]
struct Object {
    version: u64,
    variant: u8,
    form: Form,
}

/// One change, as a watch sends it.
#[derive(Clone, Debug)]
struct Change {
    kind: ResourceKind,
    slot: usize,
    name: &'static str,
    object: Object,
    /// It is always sent in an unreadable form.
    is_poisoned: bool,
}

/// Objects, history and faults of the server.
#[derive(Debug)]
struct State {
    version: u64,
    /// Watches from before this version are too old.
    forgotten: u64,
    history: Vec<Change>,
    objects: BTreeMap<(ResourceKind, usize), Object>,
    faults: BTreeMap<ResourceKind, VecDeque<Fault>>,
    /// Status of every response, and its Retry-After in seconds.
    outage: Option<(u16, Option<u32>)>,
    protobuf: Protobuf,
    sends_bookmarks: bool,
    /// Longest watch, by a proxy that ends others.
    watch_max: Duration,
    backup: Option<Backup>,
    knows_fields: bool,
    long_ones: usize,
    asked: Vec<(Instant, ReceivedRequest)>,
}

/// Version, history and objects at some time.
type Backup = (u64, Vec<Change>, BTreeMap<(ResourceKind, usize), Object>);

/// A request that the server has received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedRequest {
    /// Requested kind.
    pub kind: ResourceKind,
    /// Kind of request.
    pub how: How,
    /// Version that a list must not be older than.
    at_least: u64,
    /// Time after which the server is asked to end the watch.
    pub lasts: Duration,
    /// The client accepts protobuf besides JSON.
    pub accepts_protobuf: bool,
    /// It has the field selector that leaves out headless Services.
    is_sparing: bool,
}

/// Kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// A list from the cache.
    Listed,
    /// Changes after this version.
    Watched(u64),
}

/// Handle to the server.
#[derive(Clone, Debug)]
pub struct Server {
    state: Arc<Mutex<State>>,
    changed: Arc<changes::Sender<()>>,
}

/// Server and an agent that follows it.
pub struct Simulation {
    /// The server.
    pub server: Server,
    /// Last contact of the agent.
    pub last_contact: LastContact,
    /// Times at which comparisons were asked for; the first one has the number 1.
    comparisons: Arc<Mutex<Vec<Instant>>>,
    store: Arc<Mutex<Store>>,
    start: Instant,
}

/// Plays a script; panics if an invariant does not hold. Call it inside a runtime with paused time.
pub async fn play(script: &[u8]) {
    let simulation = Simulation::start();
    if !script.len().is_multiple_of(2) {
        simulation.server.set_protobuf(Protobuf::NotSent);
    }
    let mut actions = 0;
    for pair in script.chunks_exact(2).take(ACTIONS_MAX) {
        let [action, argument] = [pair[0], pair[1]];
        actions += 1;
        match action {
            250..=252 => simulation.begin_comparison(),
            253..=255 => simulation.server.end_watches_after(WATCHES_MAX[usize::from(argument) % WATCHES_MAX.len()]),
            _ => {}
        }
        sleep(simulation.server.act(action, argument)).await;
    }
    // The watches have begun then.
    sleep(Duration::from_millis(1)).await;
    simulation.begin_comparison();
    simulation.server.remove_faults();
    simulation.converge().await;
    simulation.end_comparison().await;
    simulation.server.lock().watch_max = Duration::MAX;
    simulation.check_rest(actions).await;
}

impl Simulation {
    /// Starts a server with a few objects, and an agent.
    pub fn start() -> Self {
        let server = Server::new();
        let own = NodeContext { node_name: Some(NODE.to_owned()), ..NodeContext::default() };
        let (last_contact, store) = (LastContact::default(), Arc::new(Mutex::new(Store::new(own))));
        let (sender, mut events) = mpsc::channel(4);
        let (transport, contact) = (server.clone(), last_contact.clone());
        drop(tokio::spawn(async move { watch(&transport, Some(NODE.to_owned()), contact, sender).await }));
        let comparisons = Arc::<Mutex<Vec<Instant>>>::default();
        let (fed, asked_for, asked) = (store.clone(), comparisons.clone(), server.clone());
        drop(tokio::spawn(async move {
            while let Some(batch) = events.recv().await {
                for event in batch {
                    if let Event::Compared(kind, number) = event {
                        let since = lock(&asked_for)[usize::try_from(number).unwrap() - 1];
                        let is_later = asked.asked().iter().any(|(at, asked)| asked.kind == kind && *at >= since);
                        assert!(is_later, "the response that has completed comparison {number} came from before it");
                    }
                    lock(&fed).apply(event);
                }
            }
            panic!("the watch has ended");
        }));
        // As the agent does while a list is held back.
        let (doubting, contact) = (store.clone(), last_contact.clone());
        drop(tokio::spawn(async move {
            loop {
                sleep(SECOND_LIST_AFTER).await;
                if lock(&doubting).is_in_doubt() {
                    contact.list_anew(true);
                }
            }
        }));
        Self { server, last_contact, comparisons, store, start: Instant::now() }
    }

    /// Waits until the agent knows exactly what the server has.
    pub async fn converge(&self) {
        let (start, expected) = (Instant::now(), self.server.store());
        while let Err(difference) = self.compare(&expected, true) {
            assert!(start.elapsed() < PATIENCE, "{difference}\n{:#?}", self.server.lock());
            sleep(Duration::from_secs(5)).await;
        }
    }

    /// Checks that the agent knows what the server has.
    pub fn assert_converged(&self) {
        assert_eq!(self.compare(&self.server.store(), true), Ok(()));
    }

    /// Expects a comparison, as after a restore of the VM.
    pub fn begin_comparison(&self) {
        lock(&self.comparisons).push(Instant::now());
        lock(&self.store).await_comparison(self.last_contact.compare());
    }

    /// Waits until the agent has compared its objects, and checks that it knows what the server has. It does not wait
    /// for the Node.
    pub async fn end_comparison(&self) {
        let start = Instant::now();
        while !lock(&self.store).is_compared() || lock(&self.store).is_in_doubt() {
            assert!(start.elapsed() < PATIENCE, "nothing was compared: {:#?}", self.server.lock());
            sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(self.compare(&self.server.store(), false), Ok(()));
    }

    /// Checks that the agent stays in sync and sends few requests.
    async fn check_rest(&self, actions: usize) {
        let asked = self.server.asked().len();
        let seconds = usize::try_from(self.start.elapsed().as_secs()).unwrap_or(usize::MAX);
        assert!(asked <= 60 + 12 * actions + 3 * seconds, "{asked} requests after {actions} actions in {seconds} s");
        sleep(REST).await;
        let more = self.server.asked().split_off(asked);
        assert!(more.len() <= REST_REQUESTS_MAX, "a server that behaves is asked for {more:?}");
        assert_eq!(self.compare(&self.server.store(), true), Ok(()));
        let silent = self.last_contact.silent_seconds();
        assert!(silent.is_some_and(|seconds| seconds <= 310), "silent for {silent:?}");
    }

    /// Differences between the agent's store and the server's. `of_node`: also those of the Node.
    fn compare(&self, expected: &Store, of_node: bool) -> Result<(), String> {
        let store = lock(&self.store);
        let problems: Vec<String> = store.problems().map(Problem::to_string).collect();
        let differs = |what: String, known: &dyn std::fmt::Debug, there: &dyn std::fmt::Debug| {
            Err(format!("{what}: {known:?} is known, there is {there:?}; problems: {problems:?}"))
        };
        if !store.is_complete() {
            return differs("lists".to_owned(), &"not all", &"all");
        }
        for slot in 0..SLOTS {
            let [service, slice] =
                [ResourceKind::Services, ResourceKind::EndpointSlices].map(|kind| object_name(kind, slot));
            let (known, there) = (store.service_row(&service), expected.service_row(&service));
            if known != there {
                return differs(service.to_string(), &known, &there);
            }
            let (known, there) = (store.slice(&slice), expected.slice(&slice));
            if known != there {
                return differs(slice.to_string(), &known, &there);
            }
        }
        if store.zone() != expected.zone() && of_node || !problems.is_empty() {
            return differs("the Node".to_owned(), &store.zone(), &expected.zone());
        }
        Ok(())
    }
}

impl Server {
    fn new() -> Self {
        let state = State {
            version: 10,
            forgotten: 10,
            history: Vec::new(),
            objects: BTreeMap::new(),
            faults: BTreeMap::new(),
            outage: None,
            protobuf: Protobuf::Sent,
            sends_bookmarks: true,
            watch_max: Duration::MAX,
            backup: None,
            knows_fields: true,
            long_ones: 0,
            asked: Vec::new(),
        };
        let server = Self { state: Arc::new(Mutex::new(state)), changed: Arc::new(changes::Sender::new(())) };
        for kind in [ResourceKind::Services, ResourceKind::EndpointSlices] {
            (0..SLOTS).for_each(|slot| server.lock().put(kind, slot, 1, Form::Good));
        }
        server.lock().put(ResourceKind::Nodes, 0, 1, Form::Good);
        server
    }

    /// Requests so far, with their times.
    pub fn asked(&self) -> Vec<(Instant, ReceivedRequest)> {
        self.lock().asked.clone()
    }

    /// Forgets the requests so far.
    pub fn forget_requests(&self) {
        self.lock().asked.clear();
    }

    /// Sets the response to clients that accept protobuf.
    pub fn set_protobuf(&self, protobuf: Protobuf) {
        self.lock().protobuf = protobuf;
    }

    /// Sets the status of every response, with its Retry-After in seconds. Ends all watches.
    pub fn set_outage(&self, outage: Option<(u16, Option<u32>)>) {
        self.lock().outage = outage;
        self.end_watches();
    }

    /// Drops the history and ends all watches.
    pub fn forget(&self) {
        let mut state = self.lock();
        state.version += 1;
        state.forgotten = state.version;
        drop(state);
        self.end_watches();
    }

    /// Makes every watch too old from now on.
    pub fn set_forgetful(&self) {
        self.lock().forgotten = u64::MAX;
        self.end_watches();
    }

    /// Sends no bookmarks from now on, like a server whose etcd reports no progress.
    pub fn omit_bookmarks(&self) {
        self.lock().sends_bookmarks = false;
    }

    /// Ends each watch after this time, like a proxy.
    pub fn end_watches_after(&self, watch_max: Duration) {
        self.lock().watch_max = watch_max;
        self.end_watches();
    }

    /// Changes an object of each kind.
    pub fn change_all(&self, variant: u8) {
        for kind in [ResourceKind::Services, ResourceKind::EndpointSlices, ResourceKind::Nodes] {
            self.lock().put(kind, 0, variant, Form::Good);
        }
        self.changed.send_replace(());
    }

    /// Keeps a copy of all objects and of the version.
    pub fn back_up(&self) {
        let mut state = self.lock();
        state.backup = Some((state.version, state.history.clone(), state.objects.clone()));
    }

    /// Goes back to the copy, and ends all watches. Watches from later versions are accepted.
    pub fn restore(&self) {
        let mut state = self.lock();
        let (version, history, objects) = state.backup.clone().expect("there is no backup");
        (state.version, state.history, state.objects) = (version, history, objects);
        state.forgotten = version;
        drop(state);
        self.end_watches();
    }

    /// Stalls the present watches.
    pub fn stall(&self) {
        for kind in [ResourceKind::Services, ResourceKind::EndpointSlices, ResourceKind::Nodes] {
            self.lock().fault(kind, Fault::Stall);
        }
        self.changed.send_replace(());
    }

    /// Ends all watches in an orderly way.
    pub fn end_watches(&self) {
        for kind in [ResourceKind::Services, ResourceKind::EndpointSlices, ResourceKind::Nodes] {
            self.lock().fault(kind, Fault::End);
        }
        self.changed.send_replace(());
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Carries out an action. Returns the time until the next one.
    fn act(&self, action: u8, argument: u8) -> Duration {
        const PAUSES: [u64; 8] = [0, 5, 30, 300, 1_000, 4_000, 30_000, 400_000];
        let pause = Duration::from_millis(PAUSES[usize::from(argument >> 5)]);
        let kind =
            [ResourceKind::Services, ResourceKind::EndpointSlices, ResourceKind::Nodes][usize::from(argument % 3)];
        let slot = if kind == ResourceKind::Nodes { 0 } else { usize::from(argument >> 2) % SLOTS };
        let code =
            [400, 401, 403, 404, 406, 410, 415, 422, 429, 500, 501, 503, 504, 302][usize::from(argument >> 1) % 14];
        let mut state = self.lock();
        match action % 26 {
            0..=3 => state.put(kind, slot, action ^ argument, Form::Good),
            4 | 5 => state.remove(kind, slot),
            6 => state.put(kind, slot, argument, Form::Unreadable),
            7 if argument.is_multiple_of(4) => state.put_long(kind, slot, argument),
            8 => state.add_unreadable_object(),
            9 => state.forgotten = state.version,
            10 => {
                state.protobuf =
                    [Protobuf::Sent, Protobuf::NotSent, Protobuf::Refused(406), Protobuf::Refused(415)][slot];
            }
            11 => state.knows_fields = argument.is_multiple_of(2),
            12 => state.outage = Some((code, (argument.is_multiple_of(5)).then_some(u32::from(argument)))),
            13 => state.outage = None,
            14 => state.fault(kind, Fault::Refuse(code)),
            15 => state.fault(kind, Fault::ErrorEvent(code)),
            16 => state.fault(kind, if argument.is_multiple_of(2) { Fault::Unreachable } else { Fault::Mute }),
            17 => state.fault(kind, Fault::End),
            18 => state.fault(kind, Fault::Cut),
            19 => state.fault(kind, Fault::Reset),
            20 => state.fault(kind, Fault::Stall),
            21 => state.fault(kind, Fault::Garbage),
            22 => state.fault(kind, if argument.is_multiple_of(2) { Fault::Half } else { Fault::Foreign }),
            23 => state.fault(kind, Fault::Versionless),
            24 if argument.is_multiple_of(4) => {
                state.fault_long(kind, if argument & 8 == 0 { Fault::TooLong } else { Fault::Endless });
            }
            _ => state.fault(kind, Fault::Late),
        }
        drop(state);
        self.changed.send_replace(());
        pause
    }

    /// Ends all faults. Unreadable objects stay unreadable, and features that the server lacks stay missing.
    fn remove_faults(&self) {
        let mut state = self.lock();
        state.faults.clear();
        state.outage = None;
        state.forgotten = state.forgotten.min(state.version);
        let bad: Vec<_> = state.objects.iter().filter(|(_, object)| object.form != Form::Good).collect();
        let bad: Vec<_> = bad.into_iter().map(|(&(kind, slot), object)| (kind, slot, object.variant)).collect();
        bad.into_iter().for_each(|(kind, slot, variant)| state.put(kind, slot, variant, Form::Good));
        drop(state);
        self.changed.send_replace(());
    }

    /// The store of an agent that has seen everything.
    fn store(&self) -> Store {
        let mut store = Store::new(NodeContext { node_name: Some(NODE.to_owned()), ..NodeContext::default() });
        let state = self.lock();
        for kind in [ResourceKind::Services, ResourceKind::EndpointSlices, ResourceKind::Nodes] {
            store.apply(Event::ListStarted(kind));
            for (&(_, slot), object) in state.objects.range((kind, 0)..=(kind, SLOTS)) {
                store.apply(store_event(kind, value(kind, slot, object)));
            }
            store.apply(Event::ListDone(kind));
        }
        store
    }

    async fn respond(self, uri: &Uri, headers: &HeaderMap) -> Result<Response<Body>, BoxError> {
        // Each request takes time, so that time advances in a loop of requests.
        sleep(Duration::from_millis(10)).await;
        let asked = ReceivedRequest::read(uri, headers);
        let is_protobuf = asked.accepts_protobuf && self.lock().protobuf == Protobuf::Sent;
        let refusal = self.lock().refusal(asked);
        let (refusal, retry_after) = match refusal {
            Ok(refusal) => refusal,
            Err(Fault::Mute) => pending().await,
            Err(_) => return Err("connection refused".into()),
        };
        let (sender, coming) = mpsc::channel(1);
        let mut response = Response::new(Body::new(ResponseBody(coming)));
        let mut writer = ResponseWriter { server: self, kind: asked.kind, is_protobuf, sender };
        drop(tokio::spawn(async move {
            match refusal {
                Some(code) if is_protobuf => {
                    writer.bytes(&envelope("Status", &encoding::object(&status(code, MESSAGE)))).await
                }
                Some(code) => writer.text(&status(code, MESSAGE).to_string()).await,
                None => writer.respond(asked).await,
            }
        }));
        if let Some(code) = refusal {
            *response.status_mut() = code.try_into()?;
        }
        let content_type = match (is_protobuf, refusal.is_none() && asked.how != How::Listed) {
            (true, true) => "application/vnd.kubernetes.protobuf;stream=watch",
            (true, false) => "application/vnd.kubernetes.protobuf",
            (false, _) => "application/json",
        };
        response.headers_mut().insert("content-type", content_type.parse()?);
        if let Some(seconds) = retry_after {
            response.headers_mut().insert("retry-after", seconds.into());
        }
        Ok(response)
    }
}

impl Transport for Server {
    async fn send(&self, request: Request<()>) -> Result<Received, BoxError> {
        let response = self.clone().respond(request.uri(), request.headers()).await?;
        Ok(Received { response, link: Link::plain() })
    }

    fn server(&self) -> Arc<str> {
        "https://simulated:6443/".into()
    }

    async fn report_failure(&self) {}
}

impl ReceivedRequest {
    /// Parses a request; panics if it is not one that an API server answers from its cache.
    fn read(uri: &Uri, headers: &HeaderMap) -> Self {
        let query = uri.query().unwrap_or_default();
        let value = |name: &str| query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
        let kind = match uri.path() {
            "/api/v1/services" => ResourceKind::Services,
            "/apis/discovery.k8s.io/v1/endpointslices" => ResourceKind::EndpointSlices,
            "/api/v1/nodes" => ResourceKind::Nodes,
            path => panic!("a request for {path}, which no client sends"),
        };
        let version = value("resourceVersion").expect("a quorum read");
        let how = match value("watch") {
            None => How::Listed,
            Some(_) => How::Watched(version.parse().expect("a version that the server has not sent")),
        };
        assert_eq!((value("limit"), value("sendInitialEvents")), (None, None), "{uri}");
        let is_bounded = value("resourceVersionMatch") == Some("NotOlderThan");
        assert!(matches!(how, How::Watched(1..)) || is_bounded != (version == "0"), "{uri}");
        let fields = value("fieldSelector");
        assert!(kind != ResourceKind::Nodes || fields == Some("metadata.name%3Down"), "all Nodes: {uri}");
        let at_least = if is_bounded { version.parse().expect("a version that the server has not sent") } else { 0 };
        let lasts = Duration::from_secs(value("timeoutSeconds").map_or(0, |seconds| seconds.parse().unwrap()));
        let accepts_protobuf = match headers["accept"].to_str() {
            Ok("application/vnd.kubernetes.protobuf, application/json") => true,
            Ok("application/json") => false,
            other => panic!("{other:?} is accepted"),
        };
        let is_sparing = kind == ResourceKind::Services && fields.is_some();
        Self { kind, how, at_least, lasts, accepts_protobuf, is_sparing }
    }
}

impl State {
    fn put(&mut self, kind: ResourceKind, slot: usize, variant: u8, form: Form) {
        self.version += 1;
        let object = Object { version: self.version, variant, form };
        let name = if self.objects.insert((kind, slot), object.clone()).is_some() { "MODIFIED" } else { "ADDED" };
        self.history.push(Change { kind, slot, name, object, is_poisoned: false });
    }

    fn put_long(&mut self, kind: ResourceKind, slot: usize, variant: u8) {
        self.long_ones += 1;
        let form = if self.long_ones <= LONG_ONES_MAX { Form::TooLong } else { Form::Good };
        self.put(kind, slot, variant, form);
    }

    fn remove(&mut self, kind: ResourceKind, slot: usize) {
        if let Some(object) = self.objects.remove(&(kind, slot)) {
            self.version += 1;
            let object = Object { version: self.version, ..object };
            self.history.push(Change { kind, slot, name: "DELETED", object, is_poisoned: false });
        }
    }

    fn add_unreadable_object(&mut self) {
        if let Some(last) = self.history.last_mut() {
            last.is_poisoned = true;
        }
    }

    fn fault(&mut self, kind: ResourceKind, fault: Fault) {
        self.faults.entry(kind).or_default().push_back(fault);
    }

    fn fault_long(&mut self, kind: ResourceKind, fault: Fault) {
        self.long_ones += 1;
        if self.long_ones <= LONG_ONES_MAX {
            self.fault(kind, fault);
        }
    }

    /// Status of a refusal, if the request is refused, and its Retry-After in seconds.
    fn refusal(&mut self, asked: ReceivedRequest) -> Result<(Option<u16>, Option<u32>), Fault> {
        self.asked.push((Instant::now(), asked));
        if let Some((code, retry_after)) = self.outage {
            return Ok((Some(code), retry_after));
        }
        let faults = self.faults.entry(asked.kind).or_default();
        if let Some(&fault @ (Fault::Refuse(_) | Fault::Unreachable | Fault::Mute)) = faults.front() {
            faults.pop_front();
            let Fault::Refuse(code) = fault else { return Err(fault) };
            return Ok((Some(code), None));
        }
        if let (true, Protobuf::Refused(code)) = (asked.accepts_protobuf, self.protobuf) {
            return Ok((Some(code), None));
        }
        let code = match asked.how {
            _ if asked.is_sparing && !self.knows_fields => Some(400),
            How::Watched(version) if version < self.forgotten && version % 2 == 0 => Some(410),
            How::Listed if asked.at_least > self.version => Some(504),
            _ => None,
        };
        Ok((code, None))
    }

    /// Removes the next fault of a response that has begun.
    fn next_fault(&mut self, kind: ResourceKind) -> Option<Fault> {
        let faults = self.faults.entry(kind).or_default();
        match faults.front()? {
            Fault::Refuse(_) | Fault::Unreachable | Fault::Mute => None,
            _ => faults.pop_front(),
        }
    }

    /// Whether a watch from this version gets bookmarks: none before the server has the version.
    fn has_bookmark(&self, version: u64) -> bool {
        self.sends_bookmarks && version <= self.version
    }

    fn list(&self, kind: ResourceKind, is_sparing: bool) -> Vec<(usize, Object)> {
        let all = self.objects.range((kind, 0)..=(kind, SLOTS));
        let is_there = |slot: usize| !(is_sparing && slot == SLOTS - 1);
        all.filter(|((_, slot), _)| is_there(*slot)).map(|(&(_, slot), object)| (slot, object.clone())).collect()
    }

    fn change_after(&self, version: u64, kind: ResourceKind, is_sparing: bool) -> Option<Change> {
        let is_asked_for = |change: &&Change| change.kind == kind && !(is_sparing && change.slot == SLOTS - 1);
        self.history.iter().find(|change| change.object.version > version && is_asked_for(change)).cloned()
    }
}

/// Response that is being sent.
struct ResponseWriter {
    server: Server,
    kind: ResourceKind,
    is_protobuf: bool,
    sender: mpsc::Sender<io::Result<Bytes>>,
}

/// The receiver has gone, or the response was broken off.
struct ResponseEnded;
type SendResult = Result<(), ResponseEnded>;

impl ResponseWriter {
    async fn respond(&mut self, asked: ReceivedRequest) -> SendResult {
        let ReceivedRequest { how, is_sparing, .. } = asked;
        let version = match how {
            How::Listed => return self.list(is_sparing).await,
            How::Watched(version) if version < self.server.lock().forgotten => {
                return self.line("ERROR", &status(410, MESSAGE)).await;
            }
            How::Watched(version) => version,
        };
        self.watch(version, is_sparing, asked.lasts).await
    }

    async fn list(&mut self, is_sparing: bool) -> SendResult {
        let (objects, version) = {
            let state = self.server.lock();
            (state.list(self.kind, is_sparing), state.version)
        };
        if self.is_protobuf {
            return self.protobuf_list(&objects, version).await;
        }
        self.text(r#"{"kind":"List","items":["#).await?;
        for (index, (slot, object)) in objects.iter().enumerate() {
            self.break_off(version).await?;
            self.text(if index == 0 { "" } else { "," }).await?;
            self.object(*slot, object).await?;
        }
        let fault = self.server.lock().next_fault(self.kind);
        let version = if fault == Some(Fault::Versionless) { String::new() } else { version.to_string() };
        self.text(&format!(r#"],"metadata":{{"resourceVersion":"{version}"}}}}"#)).await
    }

    async fn protobuf_list(&mut self, objects: &[(usize, Object)], version: u64) -> SendResult {
        let fault = self.server.lock().next_fault(self.kind);
        let version_text = if fault == Some(Fault::Versionless) { String::new() } else { version.to_string() };
        let metadata = field(1, &field(2, version_text.as_bytes()));
        let items: Vec<_> =
            objects.iter().map(|(slot, object)| Message::object(self.kind, *slot, object).wrap(2, &[])).collect();
        let length = metadata.len() + items.iter().map(Message::length).sum::<usize>();
        let start = envelope_start(&format!("{}List", self.kind.singular()));
        self.bytes(&[start, varint(2 << 3 | 2), varint(length as u64), metadata].concat()).await?;
        for item in items {
            self.break_off(version).await?;
            self.message(item).await?;
        }
        self.bytes(&[field(3, b""), field(4, b"")].concat()).await
    }

    async fn watch(&mut self, mut version: u64, is_sparing: bool, lasts: Duration) -> SendResult {
        let mut changed = self.server.changed.subscribe();
        let start = Instant::now();
        let end = start + lasts;
        let cut = start + lasts.min(self.server.lock().watch_max);
        let (mut is_near_end, mut is_bookmark_due) = (false, false);
        loop {
            let (change, now, has_bookmark) = {
                let state = self.server.lock();
                (state.change_after(version, self.kind, is_sparing), state.version, state.has_bookmark(version))
            };
            if let Some(change) = change {
                self.change(&change).await?;
                version = change.object.version;
                continue;
            }
            // The server leaves out a bookmark of what the client has.
            if std::mem::take(&mut is_bookmark_due) && has_bookmark && now > version {
                version = now;
                self.bookmark(version).await?;
            }
            self.break_off(version).await?;
            tokio::select! {
                _ = changed.changed() => {}
                () = self.sender.closed() => return Err(ResponseEnded),
                () = sleep_until(cut) => return Ok(()),
                () = sleep_until(end - LAST_BOOKMARK), if !is_near_end => {
                    (is_near_end, is_bookmark_due) = (true, true);
                }
                () = sleep(Duration::from_secs(60)) => {
                    if !self.server.lock().has_bookmark(version) {
                        continue;
                    }
                    self.bookmark(version).await?;
                }
            }
        }
    }

    async fn bookmark(&mut self, version: u64) -> SendResult {
        self.line("BOOKMARK", &json!({"metadata": {"resourceVersion": version.to_string()}})).await
    }

    async fn change(&mut self, change: &Change) -> SendResult {
        if change.is_poisoned && self.is_protobuf {
            return self.frame(Message::of(vec![0, 1])).await;
        }
        if change.is_poisoned {
            return self.text("{\"type\":\"MODIFIED\",\"object\":{\"metadata\":{\"name\":\"x\"}\n").await;
        }
        self.event(change.name, change.slot, &change.object).await
    }

    /// Applies the fault of this response, if it has one.
    async fn break_off(&mut self, version: u64) -> SendResult {
        let Some(fault) = self.server.lock().next_fault(self.kind) else { return Ok(()) };
        let other = json!({"kind": "Pod", "metadata": {"name": "x", "resourceVersion": (version + 1).to_string()}});
        match fault {
            Fault::ErrorEvent(code) => self.line("ERROR", &status(code, MESSAGE)).await,
            Fault::Garbage if self.is_protobuf => self.frame(Message::of(b"\0{<".to_vec())).await,
            Fault::Garbage => self.text("\0{<\n").await,
            Fault::Half if self.is_protobuf => {
                self.bytes(&[0, 0, 1, 0, 0x0a]).await?;
                Err(ResponseEnded)
            }
            Fault::Half => {
                self.text(r#"{"type":"MODIFIED","object":{"metadata":{"#).await?;
                Err(ResponseEnded)
            }
            Fault::Foreign => self.line("ADDED", &other).await,
            Fault::Versionless => self.line("BOOKMARK", &json!({"metadata": {}})).await,
            Fault::TooLong if self.is_protobuf => self.frame(Message { start: Vec::new(), filler: TOO_LONG }).await,
            Fault::Endless if self.is_protobuf => self.frame(Message { start: Vec::new(), filler: ENDLESS }).await,
            Fault::TooLong => self.filler(TOO_LONG).await,
            Fault::Endless => self.filler(ENDLESS).await,
            Fault::Late => {
                sleep(Duration::from_secs(20)).await;
                Ok(())
            }
            ends => self.end_by(ends).await,
        }
    }

    async fn end_by(&mut self, fault: Fault) -> SendResult {
        match fault {
            Fault::Cut => drop(self.sender.send(Err(io::ErrorKind::UnexpectedEof.into())).await),
            Fault::Reset => drop(self.sender.send(Err(io::ErrorKind::ConnectionReset.into())).await),
            Fault::Stall => self.sender.closed().await,
            _ => {}
        }
        Err(ResponseEnded)
    }

    async fn event(&mut self, name: &str, slot: usize, object: &Object) -> SendResult {
        if self.is_protobuf {
            let object = Message::object(self.kind, slot, object);
            return self.frame(object.event(name, self.kind.singular())).await;
        }
        self.text(&format!(r#"{{"type":"{name}","object":"#)).await?;
        self.object(slot, object).await?;
        self.text("}\n").await
    }

    async fn object(&mut self, slot: usize, object: &Object) -> SendResult {
        let text = value(self.kind, slot, object).to_string();
        if object.form != Form::TooLong {
            return self.text(&text).await;
        }
        // Like the API server, metadata comes first.
        let (metadata, rest) = (value(self.kind, slot, object)["metadata"].to_string(), text);
        self.text(&format!(r#"{{"metadata":{metadata},"status":""#)).await?;
        self.filler(TOO_LONG).await?;
        self.text(&format!(r#"","spec":{rest}}}"#)).await
    }

    async fn line(&mut self, name: &str, object: &Value) -> SendResult {
        if self.is_protobuf {
            let kind = object["kind"].as_str().unwrap_or(self.kind.singular());
            return self.frame(Message::of(encoding::object(object)).event(name, kind)).await;
        }
        self.bytes(&event(name, object)).await
    }

    async fn filler(&mut self, bytes: usize) -> SendResult {
        static FILLER: [u8; 64 << 10] = [b'x'; 64 << 10];
        for _ in 0..bytes.div_ceil(FILLER.len()) {
            self.send(Bytes::from_static(&FILLER)).await?;
        }
        Ok(())
    }

    /// Sends a frame of a watch.
    async fn frame(&mut self, event: Message) -> SendResult {
        let length = u32::try_from(event.length()).expect("a frame of 4 GiB").to_be_bytes();
        self.bytes(&length).await?;
        self.message(event).await
    }

    async fn message(&mut self, message: Message) -> SendResult {
        self.bytes(&message.start).await?;
        self.filler(message.filler).await
    }

    async fn text(&mut self, text: &str) -> SendResult {
        self.bytes(text.as_bytes()).await
    }

    /// Sends bytes in chunks that end anywhere.
    async fn bytes(&mut self, bytes: &[u8]) -> SendResult {
        for chunk in bytes.chunks(97) {
            self.send(Bytes::copy_from_slice(chunk)).await?;
        }
        Ok(())
    }

    async fn send(&mut self, bytes: Bytes) -> SendResult {
        self.sender.send(Ok(bytes)).await.map_err(|_| ResponseEnded)
    }
}

/// Message in protobuf: its first bytes, and a number of others.
struct Message {
    start: Vec<u8>,
    filler: usize,
}

impl Message {
    fn of(start: Vec<u8>) -> Self {
        Self { start, filler: 0 }
    }

    fn object(kind: ResourceKind, slot: usize, object: &Object) -> Self {
        let value = value(kind, slot, &Object { form: Form::Good, ..object.clone() });
        let start = encoding::object(&value);
        match object.form {
            Form::Good => Self::of(start),
            // A name that is not UTF-8, after the right one.
            Form::Unreadable => Self::of([start, field(1, &field(1, &[0xff]))].concat()),
            Form::TooLong => {
                let field = [varint(99 << 3 | 2), varint(TOO_LONG as u64)].concat();
                Self { start: [start, field].concat(), filler: TOO_LONG }
            }
        }
    }

    /// metav1.WatchEvent with this object.
    fn event(self, name: &str, kind: &str) -> Self {
        let envelope = self.wrap(2, &envelope_start(kind));
        envelope.wrap(1, &[]).wrap(2, &field(1, name.as_bytes()))
    }

    /// This message as a field of another one that begins with `start`.
    fn wrap(self, number: u32, start: &[u8]) -> Self {
        let key = [varint(u64::from(number << 3 | 2)), varint(self.length() as u64)].concat();
        Self { start: [start, &key, &self.start].concat(), filler: self.filler }
    }

    fn length(&self) -> usize {
        self.start.len() + self.filler
    }
}

/// Body of a response.
pub struct ResponseBody(mpsc::Receiver<io::Result<Bytes>>);

impl http_body::Body for ResponseBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        self.0.poll_recv(context).map(|bytes| bytes.map(|bytes| bytes.map(Frame::data).map_err(Into::into)))
    }
}

fn object_name(kind: ResourceKind, slot: usize) -> ObjectName {
    let prefix = if kind == ResourceKind::Services { "service" } else { "slice" };
    ObjectName::new("default", format!("{prefix}-{slot}"))
}

fn value(kind: ResourceKind, slot: usize, object: &Object) -> Value {
    let &Object { version, variant, form } = object;
    let name = object_name(kind, slot).name.to_string();
    let mut metadata = json!({"name": name, "namespace": "default", "resourceVersion": version.to_string()});
    match kind {
        ResourceKind::Services => {
            let address = if slot == SLOTS - 1 { "None".to_owned() } else { format!("10.96.0.{}", slot + 1) };
            let ports = if form == Form::Unreadable { json!(5) } else { json!([{"port": 80 + u16::from(variant)}]) };
            json!({"kind": "Service", "metadata": metadata, "spec": {"clusterIP": address, "ports": ports}})
        }
        ResourceKind::EndpointSlices => {
            metadata["labels"] = json!({"kubernetes.io/service-name": format!("service-{slot}")});
            let endpoints = json!([{"addresses": [format!("10.244.0.{variant}")]}]);
            let endpoints = if form == Form::Unreadable { json!("none") } else { endpoints };
            json!({"kind": "EndpointSlice", "metadata": metadata, "addressType": "IPv4", "endpoints": endpoints,
                   "ports": [{"name": "", "port": 8080}]})
        }
        ResourceKind::Nodes => {
            let labels = json!({"topology.kubernetes.io/zone": format!("zone-{variant}")});
            let metadata = json!({"name": NODE, "resourceVersion": version.to_string(), "labels": labels});
            let addresses = if form == Form::Unreadable { json!("none") } else { json!([]) };
            json!({"kind": "Node", "metadata": metadata, "status": {"addresses": addresses}})
        }
    }
}

fn store_event(kind: ResourceKind, value: Value) -> Event {
    fn read<T: serde::de::DeserializeOwned>(value: Value) -> Box<T> {
        serde_json::from_value(value).expect("an object that cannot be read")
    }
    match kind {
        ResourceKind::Services => Event::Service(read::<api::Service>(value)),
        ResourceKind::EndpointSlices => Event::EndpointSlice(read::<api::EndpointSlice>(value)),
        ResourceKind::Nodes => Event::Node(read::<api::Node>(value)),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
