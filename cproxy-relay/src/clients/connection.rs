//! Connection of a client: HTTP/1.1 or HTTP/2, its bounds, and its end.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    pin::pin,
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use crate::{
    clients::{request_limit::RequestLimit, slots::ConnectionSlot, throttle::Throttled},
    jitter::jitter,
    relay::Relay,
    responses::{body::EndReason, handler::respond},
};
use bytes::Bytes;
use cproxy_relay_auth::{Identity, Lease, Leases, Peer};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto::Builder,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::watch,
    time::{Instant, interval, sleep, timeout},
};

/// Time for the first request, and for the head of each.
const HEAD_TIME_MAX: Duration = Duration::from_secs(10);
/// Time without a request under way.
const IDLE_TIME_MAX: Duration = Duration::from_secs(60);
/// Time for a client to read a list.
const LIST_TIME_MAX: Duration = Duration::from_secs(60);
/// Interval at which these times are looked at.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Age at which a connection is moved, possibly to another replica: this and up to as much again.
const AGE: Duration = Duration::from_secs(30 * 60);
/// Time for a client to end its requests after GOAWAY.
const LEAVE_TIME_MAX: Duration = Duration::from_secs(10);
/// The same for a client that is cut.
const CUT_TIME_MAX: Duration = Duration::from_secs(1);

/// Time over which clients are moved when the views have changed, so that they get theirs.
const VIEWS_TIME: Duration = Duration::from_secs(60);

/// Longest head of a request. A bearer token takes one or two KiB.
const HEAD_BYTES_MAX: u32 = 16 << 10;
/// Bytes of one response that wait in a connection.
const SEND_BYTES_MAX: usize = 32 << 10;
/// Requests of one client at once. client-go has all its watches on one connection.
const STREAMS_MAX: u32 = 16;
/// Bytes of request bodies, which are not read.
const RECEIVE_WINDOW_BYTES: u32 = 16 << 10;
const RECEIVE_WINDOW_OF_ALL_BYTES: u32 = 64 << 10;

/// Tokens that a client may show on one connection: a token file is renewed now and then.
const TOKENS_MAX: usize = 4;

/// Client's connection, as its requests see it.
pub(crate) struct Connection {
    peer: Peer,
    slot: ConnectionSlot,
    requests: RequestLimit,
    /// Reason for which the client has to move, once it has to.
    moving: watch::Sender<Option<EndReason>>,
    activity: Mutex<Activity>,
}

/// Responses under way.
struct Activity {
    responses: usize,
    /// Time at which there was last none.
    idle_since: Instant,
    /// The client has asked for objects that it may see.
    has_requested: bool,
    /// Tokens that the client has shown: watches of each may be under way.
    leases: Vec<Arc<Lease>>,
    /// Begin of each list.
    lists: BTreeMap<u64, Instant>,
    lists_begun: u64,
}

/// Response under way. Dropped at its end.
pub(crate) struct ResponseGuard {
    connection: Arc<Connection>,
    list: Option<u64>,
}

impl Connection {
    pub(crate) fn new(peer: Peer, slot: ConnectionSlot) -> Self {
        let activity = Activity {
            responses: 0,
            idle_since: Instant::now(),
            has_requested: false,
            leases: Vec::new(),
            lists: BTreeMap::new(),
            lists_begun: 0,
        };
        Self {
            peer,
            slot,
            requests: RequestLimit::new(1),
            moving: watch::Sender::new(None),
            activity: Mutex::new(activity),
        }
    }

    pub(crate) fn peer(&self) -> &Peer {
        &self.peer
    }

    pub(crate) fn slot(&self) -> &ConnectionSlot {
        &self.slot
    }

    /// Waits until the client has to move.
    pub(crate) fn moved(&self) -> impl Future<Output = EndReason> + Send + 'static {
        let mut moving = self.moving.subscribe();
        async move {
            let reason = moving.wait_for(Option::is_some).await.ok().and_then(|reason| *reason);
            reason.unwrap_or(EndReason::Time)
        }
    }

    fn activity(&self) -> MutexGuard<'_, Activity> {
        self.activity.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a request that costs as much as some others. Returns false if there were too many on this connection, or
    /// of its client.
    pub(crate) fn admits_request(&self, cost: u32) -> bool {
        self.requests.admits(cost) && self.slot.admits_request(cost)
    }

    /// Begins a response without a bound on its time. By itself it does not keep the connection: anybody may ask for
    /// the health.
    pub(crate) fn begin(self: &Arc<Self>) -> ResponseGuard {
        self.activity().responses += 1;
        ResponseGuard { connection: self.clone(), list: None }
    }

    /// The client may see objects.
    pub(crate) fn accept_client(&self) {
        let mut activity = self.activity();
        activity.has_requested = true;
        activity.idle_since = Instant::now();
    }

    /// Remembers the token of a client that was accepted with this header as this identity. Returns false if the
    /// connection has shown too many.
    pub(crate) fn remember_token(&self, authorization: &[u8], identity: &Arc<Identity>, leases: &Leases) -> bool {
        let mut activity = self.activity();
        if activity.leases.iter().any(|lease| lease.is_of(authorization)) {
            return true;
        }
        if activity.leases.len() >= TOKENS_MAX {
            return false;
        }
        activity.leases.extend(leases.get(authorization, identity, self.peer.address()));
        true
    }

    /// Begins a list, which has to be read in time.
    pub(crate) fn begin_list(self: &Arc<Self>) -> ResponseGuard {
        let mut guard = self.begin();
        let mut activity = self.activity();
        activity.lists_begun += 1;
        let id = activity.lists_begun;
        activity.lists.insert(id, Instant::now());
        guard.list = Some(id);
        guard
    }

    /// Reason to cut the connection, if there is one.
    fn fault(&self, now: Instant) -> Option<String> {
        let activity = self.activity();
        if let Some(end) = activity.leases.iter().find_map(|lease| lease.end()) {
            return Some(end.to_owned());
        }
        if self.peer.has_expired() {
            return Some("its certificate has expired".to_owned());
        }
        let is_slow = |begin: &Instant| now.saturating_duration_since(*begin) > LIST_TIME_MAX;
        if activity.lists.values().any(is_slow) {
            return Some("it reads a list too slowly".to_owned());
        }
        let (bound, fault) = match activity.has_requested {
            true => (IDLE_TIME_MAX, "it is idle"),
            false => (HEAD_TIME_MAX, "it asks for no objects"),
        };
        let is_idle = activity.responses == 0 && now.saturating_duration_since(activity.idle_since) > bound;
        is_idle.then(|| fault.to_owned())
    }
}

impl ResponseGuard {
    /// The list has been read. What follows has no bound on its time.
    pub(crate) fn end_list(&mut self) {
        if let Some(id) = self.list.take() {
            self.connection.activity().lists.remove(&id);
        }
    }
}

impl ResponseGuard {
    /// The piece of the response, counted until the client has taken it, if it is a large one.
    pub(crate) fn hold(&self, piece: Bytes) -> Bytes {
        self.connection.slot.hold(piece, ()).0
    }

    /// The same for a whole response, which ends with the piece. Gives the guard back if it is not counted.
    pub(crate) fn hold_whole(self, piece: Bytes) -> (Bytes, Option<Self>) {
        let connection = self.connection.clone();
        connection.slot.hold(piece, self)
    }
}

impl Drop for ResponseGuard {
    fn drop(&mut self) {
        self.end_list();
        let mut activity = self.connection.activity();
        activity.responses = activity.responses.saturating_sub(1);
        if activity.has_requested {
            activity.idle_since = Instant::now();
        }
    }
}

/// Settings of HTTP.
static HTTP: LazyLock<Builder<TokioExecutor>> = LazyLock::new(|| {
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME_MAX)
        .max_buf_size(HEAD_BYTES_MAX as usize)
        .keep_alive(true);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(HEAD_BYTES_MAX)
        .max_send_buf_size(SEND_BYTES_MAX)
        .max_concurrent_streams(STREAMS_MAX)
        .initial_stream_window_size(RECEIVE_WINDOW_BYTES)
        .initial_connection_window_size(RECEIVE_WINDOW_OF_ALL_BYTES);
    builder
});

/// Serves a connection to its end. The future is a small one: a large one would be in each client's memory twice, as
/// argument of the task and as its state.
pub(crate) fn serve(
    relay: Arc<Relay>,
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    peer: Peer,
    slot: ConnectionSlot,
) -> impl Future<Output = ()> + Send {
    let connection = Arc::new(Connection::new(peer, slot));
    let service = {
        let (relay, connection) = (relay.clone(), connection.clone());
        service_fn(move |request: http::Request<Incoming>| {
            let (relay, connection) = (relay.clone(), connection.clone());
            // In a box, which is freed before the body begins: a watch would keep the room of its request otherwise.
            Box::pin(async move {
                let _guard = connection.begin();
                Ok::<_, Infallible>(respond(&relay, &connection, request).await)
            })
        })
    };
    let mut http = Box::pin(HTTP.serve_connection(TokioIo::new(Throttled::new(stream)), service));
    async move {
        let mut checks = interval(CHECK_INTERVAL);
        let mut must_move = pin!(must_move(&relay));
        let reason = loop {
            tokio::select! {
                end = http.as_mut() => {
                    if let Err(error) = end {
                        tracing::debug!("{}: {error}", connection.peer.address());
                    }
                    return;
                }
                _ = checks.tick() => {
                    if let Some(fault) = connection.fault(Instant::now()) {
                        relay.metrics.connections_cut.add(1);
                        tracing::debug!("{} is cut: {fault}", connection.peer.address());
                        http.as_mut().graceful_shutdown();
                        connection.moving.send_replace(Some(EndReason::Time));
                        timeout(CUT_TIME_MAX, http).await.ok();
                        return;
                    }
                }
                reason = must_move.as_mut() => break reason,
            }
        };
        relay.metrics.connections_moved.add(1);
        http.as_mut().graceful_shutdown();
        connection.moving.send_replace(Some(reason));
        timeout(LEAVE_TIME_MAX, http).await.ok();
    }
}

/// Waits until the client of a connection has to move: because of its age, because the views have changed, or because
/// the relay stops.
async fn must_move(relay: &Relay) -> EndReason {
    tokio::select! {
        () = sleep(AGE + jitter(AGE)) => EndReason::Time,
        () = relay.views_changed.notified() => {
            sleep(jitter(VIEWS_TIME)).await;
            EndReason::View
        }
        () = relay.draining.cancelled() => {
            sleep(jitter(relay.drain_time)).await;
            EndReason::Time
        }
    }
}

#[cfg(test)]
mod tests {
    use cproxy_relay_auth::PeerAddress;

    use super::*;
    use crate::clients::slots::ConnectionSlots;

    fn connection() -> Arc<Connection> {
        let peer = PeerAddress::Vsock { cid: 3 };
        let (slot, _) = ConnectionSlots::new(1).enter(&peer);
        Arc::new(Connection::new(Peer::new(peer, None), slot))
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_without_requests_for_objects_is_cut_sooner_than_an_idle_one() {
        let connection = connection();
        let fault_after = |time| connection.fault(Instant::now() + time);
        let moment = Duration::from_millis(1);
        drop(connection.begin());
        assert_eq!(fault_after(HEAD_TIME_MAX), None);
        // A request for the health does not prolong it.
        tokio::time::advance(HEAD_TIME_MAX / 2).await;
        drop(connection.begin());
        assert_eq!(fault_after(HEAD_TIME_MAX / 2 + moment), Some("it asks for no objects".to_owned()));
        connection.accept_client();
        let watch = connection.begin();
        assert_eq!(fault_after(IDLE_TIME_MAX * 100), None);
        drop(watch);
        assert_eq!(fault_after(IDLE_TIME_MAX), None);
        assert_eq!(fault_after(IDLE_TIME_MAX + moment), Some("it is idle".to_owned()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_list_has_to_be_read_in_time_and_what_follows_it_has_not() {
        let connection = connection();
        connection.accept_client();
        let mut list = connection.begin_list();
        let late = || connection.fault(Instant::now() + LIST_TIME_MAX + Duration::from_millis(1));
        assert_eq!(late().as_deref(), Some("it reads a list too slowly"));
        list.end_list();
        assert_eq!(late(), None);
    }
}
