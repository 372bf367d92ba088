//! Client of one or several API servers, in order of preference. There is one connection at a time.
//!
//! Files and programs with credentials are read again for each request, of which there are few. If what a connection is
//! made of has changed, a new connection is made before the old one is given up. A server that fails is passed over;
//! the client goes back to a preferred one after growing times, when it sends a request anyway.

use std::{
    future::{pending, poll_fn},
    mem,
    net::IpAddr,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use cproxy_network::{NetworkChanges, SocketSetup};
use http::{Request, Response, StatusCode, header::CONTENT_LENGTH};
use http_body::Body as _;
use tokio::{
    sync::{Mutex as AsyncMutex, Notify},
    time::{Instant, sleep, timeout},
};

use crate::{
    backoff::jitter,
    client::{
        connection::{Connection, Dialer},
        rate_limit::RateLimit,
    },
    credentials::{
        configuration::{ApiServer, Configuration, configure},
        exec_plugin::{self, ExecCredentials},
    },
    error_text::chain,
    transport::{
        connector::Connector,
        link::{Body, BoxError, HasAlternative, Received, Transport},
    },
};

/// Time after a failure before the client goes back to a preferred server. It doubles if that server fails again soon.
const HOLD: Duration = Duration::from_secs(60);
const HOLD_MAX: Duration = Duration::from_secs(3600);

/// Time for which a new connection has to last before others use it that wait since a failure, at most.
const SERVED_TIME: Duration = Duration::from_secs(1);

/// Longest response of [`ApiClient::call`], and the time for it.
const CALL_BYTES_MAX: usize = 1 << 20;
const CALL_TIME_MAX: Duration = Duration::from_secs(30);

/// Shortest and longest time for one attempt of [`ApiClient::renew`]. It is short at first, so that the next one finds
/// a network that has come back. A server that many clients ask at once needs longer.
const ATTEMPT_MIN: Duration = Duration::from_secs(2);
const ATTEMPT_MAX: Duration = Duration::from_secs(30);
/// Shortest and longest pause between two attempts, without jitter.
const RENEWAL_PAUSE_MIN: Duration = Duration::from_millis(250);
const RENEWAL_PAUSE_MAX: Duration = Duration::from_secs(15);
/// Shortest attempt or pause that a change of the network ends.
const UNDISTURBED: Duration = Duration::from_secs(1);

/// Time within which the server answers a PING, or another connection is made beside the present one.
const ALIVE_TIMEOUT: Duration = Duration::from_secs(1);

/// Client of API servers.
#[derive(Debug)]
pub struct ApiClient {
    connector: Connector,
    rate_limit: RateLimit,
    /// Locked while a connection is made, so that requests share it.
    session: AsyncMutex<Session>,
    /// Address of the server that was used last, and its index.
    server: Mutex<(Arc<str>, usize)>,
    /// Reason for a new connection that the session does not know yet.
    renewal: Mutex<Option<Renewal>>,
    /// Notified when attempts to connect end and begin anew.
    interrupted: Notify,
    /// Notified when a request may succeed at once.
    replaced: Notify,
    /// Notified when a new connection has served its first request.
    served: Notify,
    /// Locked by the one task that tries to connect anew.
    renewer: AsyncMutex<()>,
}

/// Reason for a new connection.
#[derive(Debug)]
enum Renewal {
    /// Options that replace those of the session, and what was read for them.
    Options(Box<(ApiServer, Configuration)>),
    /// The present connection and credentials may be worth nothing.
    Restored,
}

/// Servers, identity, and the present connection.
#[derive(Debug)]
struct Session {
    options: ApiServer,
    /// Read and not used yet.
    next: Option<Configuration>,
    /// Last configuration that could be read.
    configuration: Arc<Configuration>,
    exec: Option<(String, ExecCredentials)>,
    /// A new connection is wanted, and none was made since.
    must_renew: bool,
    /// Reason why the present connection stayed although a new one was wanted, as it was logged last.
    kept_because: Option<String>,
    /// A warning about the configuration was logged, and it still holds.
    has_warned: bool,
    health: Vec<Health>,
    /// Addresses of names that could not serve, and when. The other addresses of the name are tried first.
    avoided: Vec<(IpAddr, Instant)>,
    current: Option<Current>,
    /// Index of the server to which an attempt to connect is under way, or was when it was interrupted.
    dialed: Option<usize>,
    /// Index of the server of the last connection, present or not.
    last_index: Option<usize>,
    /// Last connection that was given up for new requests. Its watches go on until another one stands.
    given_up: Option<Arc<Connection>>,
}

#[derive(Debug)]
struct Current {
    connection: Arc<Connection>,
    /// Index of the server.
    index: usize,
    fingerprint: u64,
    since: Instant,
}

/// Failures of one server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Health {
    failed_at: Option<Instant>,
    hold: Duration,
}

impl Health {
    /// Records a failure of a server that has served for this long.
    fn record_failure(&mut self, now: Instant, served: Duration) {
        let is_fresh = self.hold.is_zero() || served > self.hold;
        self.hold = if is_fresh { HOLD } else { (self.hold * 2).min(HOLD_MAX) };
        self.failed_at = Some(now);
    }

    /// Whether the server may be preferred.
    fn is_good(&self, now: Instant) -> bool {
        self.failed_at.is_none_or(|at| now.saturating_duration_since(at) >= self.hold)
    }
}

/// Order in which servers are tried: good ones by preference, then the others, the one that failed first to begin with.
fn order(health: &[Health], now: Instant) -> Vec<usize> {
    let mut order: Vec<usize> = (0..health.len()).collect();
    order.sort_unstable_by_key(|&index| {
        (health.get(index).filter(|health| !health.is_good(now)).and_then(|health| health.failed_at), index)
    });
    order
}

impl ApiClient {
    /// A client for `options`, which were read as `configuration`; connects to nothing yet. `setup` is applied to each
    /// network socket before it connects.
    #[must_use]
    pub fn new(options: ApiServer, configuration: Configuration, setup: SocketSetup) -> Self {
        let server = configuration.servers.first().map(ToString::to_string).unwrap_or_default();
        let session = Session {
            options,
            configuration: Arc::new(configuration.clone()),
            next: Some(configuration),
            exec: None,
            must_renew: false,
            kept_because: None,
            has_warned: false,
            health: Vec::new(),
            avoided: Vec::new(),
            current: None,
            dialed: None,
            last_index: None,
            given_up: None,
        };
        Self {
            connector: Connector::new(setup),
            rate_limit: RateLimit::new(),
            session: AsyncMutex::new(session),
            server: Mutex::new((server.into(), 0)),
            renewal: Mutex::new(None),
            interrupted: Notify::new(),
            replaced: Notify::new(),
            served: Notify::new(),
            renewer: AsyncMutex::new(()),
        }
    }

    /// Replaces the options, which were read as `configuration`, and connects anew. The old connection serves until
    /// the new one stands. Attempts to connect as before end, and so do pauses before another attempt.
    pub async fn reconfigure(&self, options: ApiServer, configuration: Configuration) {
        *self.renewal() = Some(Renewal::Options(Box::new((options, configuration))));
        self.interrupted.notify_waiters();
        self.replaced.notify_waiters();
        let mut session = self.session.lock().await;
        // An earlier caller, who has waited, may have connected with the last replacement.
        let is_pending = self.renewal().is_some();
        if is_pending && let Err(error) = self.connect(&mut session).await {
            tracing::warn!("the new configuration of the API server cannot be used yet: {error}");
        }
    }

    /// Reads the credentials again and connects anew, until that succeeds: for a machine that was restored from a
    /// snapshot, whose network may come later. The old connection serves until the new one stands, if it still can.
    /// Many clients that are restored together begin after different delays.
    pub async fn renew(&self, delay: Duration) {
        let Ok(_only) = self.renewer.try_lock() else {
            // The other one begins anew.
            self.renewal().get_or_insert(Renewal::Restored);
            self.interrupted.notify_waiters();
            return;
        };
        sleep(delay).await;
        self.renewal().get_or_insert(Renewal::Restored);
        let start = Instant::now();
        loop {
            let changes = NetworkChanges::open();
            let elapsed = start.elapsed();
            let attempt = async {
                if self.try_to_renew((elapsed / 2).clamp(ATTEMPT_MIN, ATTEMPT_MAX)).await {
                    return true;
                }
                let pause = (elapsed / 4).clamp(RENEWAL_PAUSE_MIN, RENEWAL_PAUSE_MAX);
                sleep(pause + jitter(pause)).await;
                false
            };
            tokio::select! {
                is_renewed = attempt => if is_renewed && self.renewal().is_none() { return },
                () = changed_after(UNDISTURBED, changes.as_ref().ok()) => {}
            }
        }
    }

    /// Connects anew within this time, if no request has done so. Returns whether there is a new connection.
    async fn try_to_renew(&self, limit: Duration) -> bool {
        // A request that tries to connect, perhaps without a network, tries anew.
        self.interrupted.notify_waiters();
        let connected = timeout(limit, async {
            let mut session = self.session.lock().await;
            let is_pending = session.must_renew || self.renewal().is_some();
            !is_pending || matches!(self.connect(&mut session).await, Ok((_, true)))
        });
        let is_renewed = matches!(connected.await, Ok(true));
        if is_renewed {
            self.replaced.notify_waiters();
        }
        is_renewed
    }

    /// Whether the present connection is alive: the server answers a PING within a second. True without a connection
    /// that could be asked.
    pub async fn is_alive(&self) -> bool {
        // While a connection is made, there is none.
        let Ok(session) = self.session.try_lock() else { return true };
        let Some(connection) = session.current.as_ref().map(|current| current.connection.clone()) else { return true };
        drop(session);
        timeout(ALIVE_TIMEOUT, connection.ping()).await.unwrap_or(false)
    }

    /// Turns to another server, or another address of the present one, if there is one that has not failed. Returns
    /// whether there is.
    pub async fn turn(&self) -> bool {
        let mut session = self.session.lock().await;
        let Some(current) = &session.current else { return false };
        let (connection, index, now) = (current.connection.clone(), current.index, Instant::now());
        let has_other = session.has_good_other(&connection, index, now);
        if has_other {
            session.fail(&connection, now);
        }
        has_other
    }

    /// Gives up the present server and connects anew, to another one if one can be reached. Requests that wait for the
    /// present one move.
    pub async fn give_up_server(&self) {
        let mut session = self.session.lock().await;
        if let Some(connection) = session.current.as_ref().map(|current| current.connection.clone()) {
            session.fail(&connection, Instant::now());
        }
        if let Err(error) = self.connect(&mut session).await {
            tracing::debug!("{error}");
        }
    }

    /// Waits until a new connection has served a request and lasts. One that does not last a moment shows nothing:
    /// pauses keep growing where each one breaks at once.
    async fn served(&self) {
        loop {
            self.served.notified().await;
            sleep(SERVED_TIME / 2 + jitter(SERVED_TIME / 2)).await;
            if self.session.lock().await.open_connection().await.is_some() {
                return;
            }
        }
    }

    /// Makes sure that there is a connection, and that it is the best one. Returns whether it is new.
    async fn connect(&self, session: &mut Session) -> Result<(Arc<Connection>, bool), BoxError> {
        loop {
            let interrupted = self.interrupted.notified();
            if let Some(renewal) = self.renewal().take() {
                session.begin(renewal);
            }
            tokio::select! {
                connected = self.connect_as_configured(session) => return connected,
                () = interrupted => {}
            }
        }
    }

    async fn connect_as_configured(&self, session: &mut Session) -> Result<(Arc<Connection>, bool), BoxError> {
        if let Some(index) = session.dialed.take() {
            session.record_failure(index, Instant::now());
        }
        let configuration = session.read().await?;
        let fingerprint = configuration.fingerprint();
        let kept = session.open_connection().await;
        let candidates = session.candidates(&configuration, kept.is_some(), fingerprint);
        match (self.dial(session, &configuration, &candidates, kept.is_none()).await, kept) {
            (Ok((connection, index)), _) => {
                let has_moved = session.last_index.replace(index).is_some_and(|last| last != index);
                session.kept_because = None;
                if mem::take(&mut session.must_renew) {
                    tracing::info!(name: "connected", "connected anew to the API server at {}", self.server());
                } else if has_moved {
                    tracing::info!(name: "connected", "connected to another API server, at {}", self.server());
                }
                Ok((session.replace(Arc::new(connection), index, fingerprint), true))
            }
            (Err(errors), Some(connection)) => {
                session.report_kept(&errors, fingerprint);
                Ok((connection, false))
            }
            (Err(errors), None) => Err(errors.join("; ").into()),
        }
    }

    /// Connects to the first of these servers that can be reached. Returns its index, too. `is_only`: there is no other
    /// connection, so messages name the server that is being tried.
    async fn dial(
        &self,
        session: &mut Session,
        configuration: &Arc<Configuration>,
        candidates: &[usize],
        is_only: bool,
    ) -> Result<(Connection, usize), Vec<String>> {
        let has_others = configuration.servers.len() > 1;
        let tls = configuration.tls().map_err(|error| vec![error.to_string()])?;
        let mut errors = Vec::new();
        for &index in candidates {
            let Some(address) = configuration.servers.get(index) else { continue };
            let dialer = Dialer {
                connector: self.connector.clone(),
                configuration: configuration.clone(),
                tls: tls.clone(),
                address: address.clone(),
                has_others,
                avoided: session.avoided.iter().map(|(ip, _)| *ip).collect(),
            };
            if is_only {
                self.set_server(address.to_string(), index);
            }
            session.dialed = Some(index);
            let connected = dialer.connect().await;
            session.dialed = None;
            match connected {
                Ok(connection) => {
                    self.set_server(address.to_string(), index);
                    return Ok((connection, index));
                }
                Err(error) => {
                    session.record_failure(index, Instant::now());
                    let error = chain(&*error);
                    errors.push(if has_others { format!("{address}: {error}") } else { error });
                }
            }
        }
        Err(errors)
    }

    fn renewal(&self) -> MutexGuard<'_, Option<Renewal>> {
        self.renewal.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_server(&self, address: String, index: usize) {
        *self.server.lock().unwrap_or_else(PoisonError::into_inner) = (address.into(), index);
    }

    /// Address of the server that was used last, and its place in the order of preference, from 1 on.
    #[must_use]
    pub fn choice(&self) -> (Arc<str>, usize) {
        let (server, index) = &*self.server.lock().unwrap_or_else(PoisonError::into_inner);
        (server.clone(), index + 1)
    }

    /// Sends a request once. Returns the connection that was used, too, and with an error whether another may serve.
    async fn send_once(&self, mut request: Request<Bytes>) -> Result<(Received, Arc<Connection>), (BoxError, bool)> {
        let mut session = self.session.lock().await;
        let (connection, is_new) = self.connect(&mut session).await.map_err(|error| (error, false))?;
        session.configuration.add_headers(request.headers_mut());
        drop(session);
        let mut link = connection.link();
        let sent = tokio::select! {
            biased;
            sent = connection.send(request) => sent,
            // A server that has not responded yet may never do so.
            () = link.superseded() => return Err(("there is a better connection".into(), true)),
        };
        match sent {
            Ok(received) => Ok((received, connection)),
            Err(error) => {
                self.session.lock().await.give_up(&connection, is_new);
                Err((error, !is_new))
            }
        }
    }

    /// Sends a request and, if the status says that another connection may do better, gives up this one.
    async fn send_and_judge(&self, request: Request<Bytes>) -> Result<Received, BoxError> {
        let sent = match self.send_once(request.clone()).await {
            // The server may have closed an old connection just now.
            Err((_, true)) => self.send_once(request).await,
            sent => sent,
        };
        let (mut received, connection) = sent.map_err(|(error, _)| error)?;
        let code = received.response.status();
        if code.is_success() && connection.record_service() {
            self.served.notify_waiters();
        }
        let mut session = self.session.lock().await;
        if code == StatusCode::UNAUTHORIZED {
            session.exec = None;
            session.give_up(&connection, true);
        } else if may_turn(code) && session.turn_from(&connection, code, Instant::now()) {
            received.response.extensions_mut().insert(HasAlternative);
        }
        drop(session);
        Ok(received)
    }

    /// Sends a request of any method, with a body if it is not empty, and reads the whole response: for single short
    /// requests, such as reviews. It counts for no rate limit, and must be harmless if the server gets it twice.
    ///
    /// # Errors
    /// No server can be reached, the response is longer than a MiB, or it takes longer than 30 s.
    pub async fn call(&self, mut request: Request<Bytes>) -> Result<Response<Bytes>, BoxError> {
        if !request.body().is_empty() {
            let length = request.body().len().into();
            request.headers_mut().insert(CONTENT_LENGTH, length);
        }
        let called = timeout(CALL_TIME_MAX, async {
            let (parts, body) = self.send_and_judge(request).await?.response.into_parts();
            Ok(Response::from_parts(parts, read_all(body).await?))
        });
        match called.await {
            Ok(response) => response,
            Err(_) => {
                self.report_failure().await;
                Err(format!("{} has not responded within {CALL_TIME_MAX:?}", self.server()).into())
            }
        }
    }
}

/// Waits for a change of the network, of which those in this first time count at its end.
async fn changed_after(time: Duration, changes: Option<&NetworkChanges>) {
    sleep(time).await;
    match changes {
        Some(changes) if changes.wait().await.is_ok() => {}
        _ => pending().await,
    }
}

/// Reads a body to its end.
pub(crate) async fn read_all(mut body: Body) -> Result<Bytes, BoxError> {
    let mut bytes = BytesMut::new();
    while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
        // Trailers are ignored.
        let Ok(chunk) = frame?.into_data() else { continue };
        if bytes.len() + chunk.len() > CALL_BYTES_MAX {
            return Err(format!("the response is longer than {CALL_BYTES_MAX} bytes").into());
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes.freeze())
}

impl Transport for ApiClient {
    async fn send(&self, request: Request<()>) -> Result<Received, BoxError> {
        self.rate_limit.pause().await;
        self.send_and_judge(request.map(|()| Bytes::new())).await
    }

    fn server(&self) -> Arc<str> {
        self.choice().0
    }

    async fn report_failure(&self) {
        let mut session = self.session.lock().await;
        if let Some(connection) = session.current.as_ref().map(|current| current.connection.clone()) {
            session.fail(&connection, Instant::now());
        }
    }

    async fn usable(&self) {
        tokio::select! {
            () = self.replaced.notified() => {}
            () = self.served() => {}
        }
    }
}

/// Whether an address that could not serve is still avoided.
fn is_recent((_, at): &(IpAddr, Instant), now: Instant) -> bool {
    now.saturating_duration_since(*at) < HOLD
}

/// Whether another server may do better. A version that the server does not have (504) has to be waited for.
fn may_turn(code: StatusCode) -> bool {
    matches!(code.as_u16(), 429 | 500 | 502 | 503)
}

impl Session {
    /// Begins a renewal, for which earlier failures of servers do not count.
    fn begin(&mut self, renewal: Renewal) {
        if let Renewal::Options(replacement) = renewal {
            let (options, next) = *replacement;
            (self.options, self.next) = (options, Some(next));
        }
        (self.exec, self.health, self.must_renew) = (None, Vec::new(), true);
        (self.avoided, self.dialed) = (Vec::new(), None);
        self.kept_because = None;
    }

    /// Reads files and programs again. If that fails, the last configuration is used.
    async fn read(&mut self) -> Result<Arc<Configuration>, BoxError> {
        let configuration = match self.next.take() {
            Some(configuration) => Ok(configuration),
            None => configure(&self.options).await,
        };
        match configuration {
            Ok(configuration) => {
                self.has_warned = false;
                self.configuration = Arc::new(self.with_exec(configuration).await?);
            }
            // client-go keeps the last token, too.
            Err(error) if !mem::replace(&mut self.has_warned, true) => {
                tracing::warn!("{error}; what was read last stays in use");
            }
            Err(_) => {}
        }
        Ok(self.configuration.clone())
    }

    /// Adds the credentials of the user's program, which runs if there are none or if they are about to expire.
    async fn with_exec(&mut self, mut configuration: Configuration) -> Result<Configuration, String> {
        let Some(exec) = &configuration.exec else { return Ok(configuration) };
        let key = format!("{exec:?}");
        let known = self.exec.as_ref().filter(|(of, _)| *of == key).map(|(_, credentials)| credentials.clone());
        let credentials = match known {
            Some(known) if known.are_fresh() => known,
            known => match (exec_plugin::run(exec).await, known) {
                (Ok(new), _) => new,
                (Err(error), Some(known)) if known.are_valid() => {
                    tracing::warn!("{error}; its last credentials stay in use until they expire");
                    known
                }
                (Err(error), _) => return Err(error.to_string()),
            },
        };
        self.exec = Some((key, credentials.clone()));
        configuration.add(credentials).map_err(|error| error.to_string())?;
        Ok(configuration)
    }

    /// The present connection, if new requests can be sent on it.
    async fn open_connection(&self) -> Option<Arc<Connection>> {
        let connection = &self.current.as_ref()?.connection;
        connection.is_open().await.then(|| connection.clone())
    }

    /// Servers to connect to, in order. With a connection that is up to date, only better servers are tried.
    fn candidates(&mut self, configuration: &Configuration, has_connection: bool, fingerprint: u64) -> Vec<usize> {
        let now = Instant::now();
        self.health.resize(configuration.servers.len(), Health::default());
        let mut candidates = order(&self.health, now);
        let current = self.current.as_ref().filter(|_| has_connection && !self.must_renew);
        if let Some(current) = current.filter(|current| current.fingerprint == fingerprint) {
            let is_good = |index: usize| self.health.get(index).is_some_and(|health| health.is_good(now));
            candidates.retain(|&index| index < current.index && is_good(index));
        }
        candidates
    }

    /// Logs why the present connection stays: a warning if it should have been replaced and the reason is new.
    fn report_kept(&mut self, errors: &[String], fingerprint: u64) {
        let is_outdated = self.current.as_ref().is_some_and(|current| current.fingerprint != fingerprint);
        let reason = errors.join("; ");
        if (self.must_renew || is_outdated) && self.kept_because.as_ref() != Some(&reason) {
            tracing::warn!("the present connection to the API server stays for now: {reason}");
            self.kept_because = Some(reason);
        } else if !errors.is_empty() {
            tracing::debug!("the present connection stays: {reason}");
        }
    }

    /// Makes `connection` the present one.
    fn replace(&mut self, connection: Arc<Connection>, index: usize, fingerprint: u64) -> Arc<Connection> {
        let current = Current { connection: connection.clone(), index, fingerprint, since: Instant::now() };
        let old = self.current.replace(current).map(|old| old.connection);
        old.into_iter().chain(self.given_up.take()).for_each(|old| old.supersede());
        connection
    }

    /// Gives up a connection after a response with this code, if another address or server may do better. Returns
    /// whether one may. A server that is only busy (429) is waited for if all others have failed, too.
    fn turn_from(&mut self, connection: &Arc<Connection>, code: StatusCode, now: Instant) -> bool {
        let Some(index) = self.index_of(connection) else { return true };
        let has_good = self.has_good_other(connection, index, now);
        if has_good || code != StatusCode::TOO_MANY_REQUESTS && self.health.len() > 1 {
            self.fail(connection, now);
        }
        has_good
    }

    /// Whether another server than the one with this index, or another address of the connection's, may serve.
    fn has_good_other(&self, connection: &Connection, index: usize, now: Instant) -> bool {
        let is_good = |(other, health): (usize, &Health)| other != index && health.is_good(now);
        self.health.iter().enumerate().any(is_good) || self.has_other_address(connection, now)
    }

    /// Gives up a connection whose server cannot serve. The server counts as failed once its name has no other address
    /// to try.
    fn fail(&mut self, connection: &Arc<Connection>, now: Instant) {
        if self.index_of(connection).is_none() {
            return;
        }
        self.avoided.retain(|avoided| is_recent(avoided, now));
        let has_other = self.has_other_address(connection, now);
        self.avoided.extend(connection.reached().ip.map(|ip| (ip, now)));
        self.give_up(connection, !has_other);
    }

    /// Whether the server's name has an address that may serve in place of the connection's.
    fn has_other_address(&self, connection: &Connection, now: Instant) -> bool {
        let reached = connection.reached();
        let is_other = |avoided: &&(IpAddr, Instant)| is_recent(avoided, now) && Some(avoided.0) != reached.ip;
        reached.other_count > self.avoided.iter().filter(is_other).count()
    }

    /// Index of the connection's server, if the connection is the present one.
    fn index_of(&self, connection: &Arc<Connection>) -> Option<usize> {
        let current = self.current.as_ref().filter(|current| Arc::ptr_eq(&current.connection, connection));
        current.map(|current| current.index)
    }

    /// Gives up the present connection for new requests, if it is still this one. Responses on it go on.
    fn give_up(&mut self, connection: &Arc<Connection>, has_failed: bool) {
        let Some(index) = self.index_of(connection) else { return };
        if has_failed {
            self.record_failure(index, Instant::now());
        }
        self.given_up = self.current.take().map(|current| current.connection);
    }

    /// Records that a server failed. How long it has served counts if it is the present one.
    fn record_failure(&mut self, index: usize, now: Instant) {
        let of_current = self.current.as_ref().filter(|current| current.index == index);
        let served = of_current.map_or(Duration::ZERO, |current| now.saturating_duration_since(current.since));
        if let Some(health) = self.health.get_mut(index) {
            health.record_failure(now, served);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        path::{Path, PathBuf},
    };

    use http::header::RETRY_AFTER;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::{TcpListener, UnixListener, UnixStream},
        sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    };

    use super::*;
    use crate::transport::address::ServerAddress;

    const PATIENCE: Duration = Duration::from_secs(60);

    /// Behaviour of a server after a connection.
    #[derive(Clone, Copy, Debug)]
    enum Server {
        /// Sends nothing.
        Silent,
        /// Speaks HTTP/2 and responds to no request.
        Mute,
        Serving,
        /// Responds with this status, and asks for a pause.
        Refusing(u16),
        /// Serves one request and closes the connection.
        Leaving,
    }

    /// Accepts connections at a socket, and sends a message for each request, or for each connection of a silent
    /// server.
    async fn serve(socket: UnixListener, server: Server, requests: UnboundedSender<()>) {
        let mut streams = Vec::<UnixStream>::new();
        loop {
            let stream = socket.accept().await.unwrap().0;
            if let Server::Silent = server {
                streams.push(stream);
                requests.send(()).unwrap();
                continue;
            }
            let requests = requests.clone();
            drop(tokio::spawn(async move {
                let mut connection = h2::server::handshake(stream).await.unwrap();
                let mut held = Vec::new();
                while let Some(Ok((_, mut respond))) = connection.accept().await {
                    let response = Response::builder().header(RETRY_AFTER, 30);
                    match server {
                        Server::Serving => drop(respond.send_response(Response::new(()), true).unwrap()),
                        Server::Refusing(code) => {
                            drop(respond.send_response(response.status(code).body(()).unwrap(), true).unwrap());
                        }
                        Server::Leaving => {
                            respond.send_response(Response::new(()), true).unwrap();
                            connection.graceful_shutdown();
                        }
                        Server::Silent | Server::Mute => {}
                    }
                    held.push(respond);
                    requests.send(()).ok();
                }
            }));
        }
    }

    fn at(path: &Path) -> ApiServer {
        ApiServer { addresses: vec![ServerAddress::Unix(path.to_owned())], ..ApiServer::default() }
    }

    #[tokio::test]
    async fn other_servers_are_used_at_once_whatever_the_present_one_does() {
        let dir = directory("moved");
        for server in [Server::Silent, Server::Mute, Server::Serving] {
            let [first, second] = ["first", "second"].map(|name| dir.join(format!("{server:?}-{name}")));
            let (sender, mut requests) = unbounded_channel();
            drop(tokio::spawn(serve(UnixListener::bind(&first).unwrap(), server, sender.clone())));
            let options = at(&first);
            let configuration = configure(&options).await.unwrap();
            let client = Arc::new(ApiClient::new(options, configuration, SocketSetup::none()));
            let sending = client.clone();
            let sent = tokio::spawn(async move { sending.send(Request::new(())).await.map(|_| ()) });
            requests.recv().await.unwrap();
            drop(tokio::spawn(serve(UnixListener::bind(&second).unwrap(), Server::Serving, sender)));
            let options = at(&second);
            let configuration = configure(&options).await.unwrap();
            let moved = timeout(Duration::from_secs(5), client.reconfigure(options.clone(), configuration.clone()));
            assert!(moved.await.is_ok(), "{server:?}");
            assert!(matches!(timeout(Duration::from_secs(5), sent).await, Ok(Ok(Ok(())))), "{server:?}");
            assert_eq!(*client.server(), *format!("unix://{}", second.display()));
            // The same again is a new connection, to which watches move.
            let mut received = client.send(Request::new(())).await.unwrap();
            client.reconfigure(options, configuration).await;
            assert!(timeout(Duration::from_secs(5), received.link.superseded()).await.is_ok(), "{server:?}");
        }
        fs::remove_dir_all(&dir).unwrap();
    }

    /// An empty directory.
    fn directory(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("cproxy-client-{name}-{}", std::process::id()));
        fs::remove_dir_all(&dir).ok();
        fs::create_dir(&dir).unwrap();
        dir
    }

    /// Client of these servers, and a message for each of their connections or requests.
    async fn client_of(dir: &Path, servers: &[Server]) -> (Arc<ApiClient>, ApiServer, UnboundedReceiver<()>) {
        let (sender, requests) = unbounded_channel();
        let addresses = servers.iter().enumerate().map(|(index, server)| {
            let path = dir.join(index.to_string());
            drop(tokio::spawn(serve(UnixListener::bind(&path).unwrap(), *server, sender.clone())));
            ServerAddress::Unix(path)
        });
        let options = ApiServer { addresses: addresses.collect(), ..ApiServer::default() };
        let configuration = configure(&options).await.unwrap();
        let client = Arc::new(ApiClient::new(options.clone(), configuration, SocketSetup::none()));
        (client, options, requests)
    }

    #[tokio::test]
    async fn a_renewal_tries_until_there_is_a_new_connection_and_the_old_one_serves_meanwhile() {
        let dir = directory("renewed");
        let (client, _, _requests) = client_of(&dir, &[Server::Serving]).await;
        assert!(client.is_alive().await, "there is nothing to ask");
        let mut received = client.send(Request::new(())).await.unwrap();
        assert!(client.is_alive().await);
        let [path, away] = ["0", "away"].map(|name| dir.join(name));
        fs::rename(&path, &away).unwrap();
        let renewing = client.clone();
        let mut renewing = tokio::spawn(async move { renewing.renew(Duration::ZERO).await });
        // A second one ends at once and leaves it to the first.
        let other = async {
            while client.renewer.try_lock().is_ok() {
                tokio::task::yield_now().await;
            }
            client.renew(Duration::ZERO).await;
        };
        timeout(PATIENCE, other).await.unwrap();
        client.send(Request::new(())).await.unwrap();
        assert!(timeout(Duration::from_millis(300), received.link.superseded()).await.is_err());
        assert!(!renewing.is_finished());
        let replaced = client.replaced.notified();
        fs::rename(&away, &path).unwrap();
        timeout(PATIENCE, received.link.superseded()).await.unwrap();
        timeout(PATIENCE, &mut renewing).await.unwrap().unwrap();
        assert!(timeout(Duration::ZERO, replaced).await.is_ok(), "pauses end");

        let mut received = client.send(Request::new(())).await.unwrap();
        timeout(PATIENCE, client.renew(Duration::ZERO)).await.unwrap();
        timeout(PATIENCE, received.link.superseded()).await.unwrap();
        fs::remove_dir_all(&dir).unwrap();
    }

    #[tokio::test]
    async fn a_renewal_begins_anew_when_an_attempt_hangs() {
        let dir = directory("hanging");
        let (client, _, mut connections) = client_of(&dir, &[Server::Silent]).await;
        let sending = client.clone();
        let sent = tokio::spawn(async move { sending.send(Request::new(())).await.map(|_| ()) });
        connections.recv().await.unwrap();
        // The server is another one now.
        fs::remove_file(dir.join("0")).unwrap();
        let (sender, _requests) = unbounded_channel();
        drop(tokio::spawn(serve(UnixListener::bind(dir.join("0")).unwrap(), Server::Serving, sender)));
        assert!(
            timeout(Duration::from_secs(5), client.renew(Duration::ZERO)).await.is_ok(),
            "it waits for the old server"
        );
        assert!(matches!(timeout(Duration::from_secs(5), sent).await, Ok(Ok(Ok(())))));
        fs::remove_dir_all(&dir).unwrap();
    }

    #[tokio::test]
    async fn a_server_that_accepts_and_is_silent_is_passed_over() {
        let dir = directory("silent");
        let (client, _, _requests) = client_of(&dir, &[Server::Silent, Server::Silent, Server::Serving]).await;
        let sent = timeout(Duration::from_secs(20), client.send(Request::new(()))).await;
        assert!(matches!(sent, Ok(Ok(_))), "it stays with a silent server");
        fs::remove_dir_all(dir).unwrap();
    }

    /// Status of the response to a request, and whether its pause does not count.
    async fn outcome(client: &ApiClient) -> (u16, bool) {
        let response = client.send(Request::new(())).await.unwrap().response;
        (response.status().as_u16(), response.extensions().get::<HasAlternative>().is_some())
    }

    #[tokio::test]
    async fn a_server_that_is_busy_or_broken_is_left_for_the_next_one() {
        for code in [429, 503] {
            let dir = directory(&format!("busy-{code}"));
            let (client, _, _requests) = client_of(&dir, &[Server::Refusing(code), Server::Serving]).await;
            assert_eq!(outcome(&client).await, (code, true));
            assert_eq!(outcome(&client).await, (200, false));
            assert_eq!(*client.server(), *format!("unix://{}", dir.join("1").display()));
            assert_eq!(outcome(&client).await, (200, false), "the first one is on hold");
            fs::remove_dir_all(dir).unwrap();
        }
    }

    #[tokio::test]
    async fn servers_that_are_all_busy_are_waited_for() {
        let dir = directory("all-busy");
        let (client, _, _requests) = client_of(&dir, &[Server::Refusing(429), Server::Refusing(429)]).await;
        let outcomes = [outcome(&client).await, outcome(&client).await, outcome(&client).await];
        assert_eq!(outcomes, [(429, true), (429, false), (429, false)]);
        assert_eq!(*client.server(), *format!("unix://{}", dir.join("1").display()), "it stays with the last one");
        fs::remove_dir_all(&dir).unwrap();
        let dir = directory("one-busy");
        let (client, _, _requests) = client_of(&dir, &[Server::Refusing(429)]).await;
        assert_eq!([outcome(&client).await, outcome(&client).await], [(429, false); 2]);
        assert!(client.session.lock().await.current.is_some(), "over the same connection");
        fs::remove_dir_all(dir).unwrap();
    }

    #[tokio::test]
    async fn the_other_address_of_a_name_is_tried_before_another_server() {
        let first = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = first.local_addr().unwrap().port();
        let second = TcpListener::bind(("::1", port)).await.unwrap();
        for (listener, code) in [(first, 503), (second, 429)] {
            drop(tokio::spawn(async move {
                loop {
                    let mut connection = h2::server::handshake(listener.accept().await.unwrap().0).await.unwrap();
                    drop(tokio::spawn(async move {
                        while let Some(Ok((_, mut respond))) = connection.accept().await {
                            respond.send_response(Response::builder().status(code).body(()).unwrap(), true).unwrap();
                        }
                    }));
                }
            }));
        }
        let dir = directory("addresses");
        let (_, mut options, _requests) = client_of(&dir, &[Server::Serving]).await;
        options.addresses.insert(0, format!("http://localhost:{port}").parse().unwrap());
        let configuration = configuration_of(&options).await;
        let client = ApiClient::new(options, configuration, SocketSetup::none());
        let outcomes = [outcome(&client).await, outcome(&client).await, outcome(&client).await];
        assert_eq!(outcomes, [(503, true), (429, true), (200, false)]);
        fs::remove_dir_all(dir).unwrap();
    }

    /// Configuration without credentials.
    async fn configuration_of(options: &ApiServer) -> Configuration {
        let local =
            ApiServer { addresses: options.addresses.iter().skip(1).cloned().collect(), ..ApiServer::default() };
        Configuration { servers: options.addresses.clone(), ..configure(&local).await.unwrap() }
    }

    #[tokio::test(start_paused = true)]
    async fn options_that_were_replaced_many_times_are_connected_with_once() {
        let dir = directory("replaced");
        let (client, options, mut requests) = client_of(&dir, &[Server::Silent, Server::Silent]).await;
        let configuration = configure(&options).await.unwrap();
        let replaced: Vec<_> = (0..20)
            .map(|_| {
                let (client, options, configuration) = (client.clone(), options.clone(), configuration.clone());
                tokio::spawn(async move { client.reconfigure(options, configuration).await })
            })
            .collect();
        for task in replaced {
            timeout(PATIENCE, task).await.unwrap().unwrap();
        }
        let connections = std::iter::from_fn(|| requests.try_recv().ok()).count();
        // The first one is given up for the last options, which fail with both servers.
        assert!(connections <= 3, "{connections} connections");
        fs::remove_dir_all(dir).unwrap();
    }

    /// Response of a server of HTTP/2 that echoes the request's body this many times, with this status.
    async fn echo(code: u16, times: usize) -> (Result<Response<Bytes>, BoxError>, Arc<ApiClient>) {
        let dir = directory(&format!("echo-{code}-{times}"));
        let path = dir.join("socket");
        let socket = UnixListener::bind(&path).unwrap();
        drop(tokio::spawn(async move {
            let mut connection = h2::server::handshake(socket.accept().await.unwrap().0).await.unwrap();
            while let Some(Ok((request, mut respond))) = connection.accept().await {
                assert!(request.method() == "POST" && request.headers()[CONTENT_LENGTH] == "4");
                let mut body = request.into_body();
                drop(tokio::spawn(async move {
                    let content = body.data().await.unwrap().unwrap().repeat(times);
                    let response = Response::builder().status(code).body(()).unwrap();
                    respond.send_response(response, false).unwrap().send_data(content.into(), true).unwrap();
                }));
            }
        }));
        let options = at(&path);
        let configuration = configure(&options).await.unwrap();
        let client = Arc::new(ApiClient::new(options, configuration, SocketSetup::none()));
        let response = client.call(review()).await;
        fs::remove_dir_all(dir).unwrap();
        (response, client)
    }

    fn review() -> Request<Bytes> {
        Request::post("/review").body(Bytes::from_static(b"body")).unwrap()
    }

    #[tokio::test]
    async fn a_call_has_a_body_and_a_response_of_bounded_length() {
        let response = echo(201, 1000).await.0.unwrap();
        assert_eq!((response.status().as_u16(), response.body().len()), (201, 4000));
        let error = echo(200, CALL_BYTES_MAX / 4 + 1).await.0.unwrap_err();
        assert!(error.to_string().contains("longer than"), "{error}");
        assert_eq!(echo(200, CALL_BYTES_MAX / 4).await.0.unwrap().body().len(), CALL_BYTES_MAX);
    }

    #[tokio::test]
    async fn a_call_whose_credentials_are_not_accepted_gives_up_the_connection() {
        let (response, client) = echo(401, 1).await;
        assert_eq!(response.unwrap().status(), StatusCode::UNAUTHORIZED);
        assert!(client.session.lock().await.current.is_none());
        assert!(echo(403, 1).await.1.session.lock().await.current.is_some());
    }

    #[tokio::test]
    async fn a_call_works_over_an_older_http_too() {
        let dir = directory("old");
        let path = dir.join("socket");
        let socket = UnixListener::bind(&path).unwrap();
        let served = tokio::spawn(async move {
            // The first connection asks for HTTP/2.
            drop(socket.accept().await.unwrap());
            let (mut stream, _) = socket.accept().await.unwrap();
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\nbody") {
                request.push(stream.read_u8().await.unwrap());
            }
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
            String::from_utf8(request).unwrap()
        });
        let options = at(&path);
        let configuration = configure(&options).await.unwrap();
        let client = ApiClient::new(options, configuration, SocketSetup::none());
        assert_eq!(client.call(review()).await.unwrap().body(), "ok");
        let request = served.await.unwrap();
        assert!(request.starts_with("POST /review HTTP/1.1\r\n") && request.contains("content-length: 4"), "{request}");
        fs::remove_dir_all(dir).unwrap();
    }

    #[tokio::test]
    async fn one_request_that_is_served_ends_the_waits_of_others_if_its_connection_lasts() {
        let dir = directory("served");
        for (server, lasts) in [(Server::Serving, true), (Server::Leaving, false)] {
            let path = dir.join(format!("{server:?}"));
            let (sender, _requests) = unbounded_channel();
            drop(tokio::spawn(serve(UnixListener::bind(&path).unwrap(), server, sender)));
            let options = at(&path);
            let configuration = configure(&options).await.unwrap();
            let client = ApiClient::new(options, configuration, SocketSetup::none());
            let mut served = std::pin::pin!(client.served());
            assert!(timeout(Duration::ZERO, served.as_mut()).await.is_err());
            client.send(Request::new(())).await.unwrap();
            assert_eq!(timeout(SERVED_TIME * 3, served.as_mut()).await.is_ok(), lasts, "{server:?}");
        }
        fs::remove_dir_all(&dir).unwrap();
    }

    fn seconds(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    #[test]
    fn servers_that_failed_are_tried_last_and_preferred_again_after_a_while() {
        let start = Instant::now();
        let mut health = [Health::default(); 3];
        assert_eq!(order(&health, start), [0, 1, 2]);
        health[0].record_failure(start, seconds(0));
        health[1].record_failure(start + seconds(1), seconds(0));
        assert_eq!(order(&health, start + seconds(2)), [2, 0, 1], "the first failure is the oldest");
        assert_eq!(order(&health, start + HOLD), [0, 2, 1]);
        assert_eq!(order(&health, start + HOLD + seconds(1)), [0, 1, 2]);
    }

    #[test]
    fn a_server_that_fails_again_soon_is_left_alone_for_longer() {
        let (start, mut health) = (Instant::now(), Health::default());
        health.record_failure(start, seconds(10_000));
        assert_eq!(health.hold, HOLD);
        health.record_failure(start, seconds(30));
        assert_eq!(health.hold, HOLD * 2);
        (0..20).for_each(|_| health.record_failure(start, seconds(30)));
        assert_eq!(health.hold, HOLD_MAX);
        health.record_failure(start, HOLD_MAX + seconds(1));
        assert_eq!(health.hold, HOLD);
    }
}
