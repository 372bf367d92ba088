//! Connection of a client: HTTP/1.1 or HTTP/2, its bounds, and its end.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    pin::pin,
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use crate::{body::EndReason, handler::respond, jitter::jitter, relay::Relay, throttle::Throttled};
use cproxy_access::Peer;
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
/// Requests of one client that pass at once, and the time after which one more does.
const REQUESTS_BURST: u32 = 200;
const REQUEST_INTERVAL: Duration = Duration::from_millis(50);
/// Bytes of request bodies, which are not read.
const RECEIVE_WINDOW_BYTES: u32 = 16 << 10;
const RECEIVE_WINDOW_OF_ALL_BYTES: u32 = 64 << 10;

/// Client's connection, as its requests see it.
pub(crate) struct Connection {
    peer: Peer,
    /// There are too many connections: each request is answered with 429.
    is_surplus: bool,
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
    /// Time at which the next request would be due if there were no burst.
    request_due: Instant,
    /// Begin of each list.
    lists: BTreeMap<u64, Instant>,
    lists_begun: u64,
}

/// Response under way. Dropped at its end.
pub(crate) struct Guard {
    connection: Arc<Connection>,
    list: Option<u64>,
}

impl Connection {
    fn new(peer: Peer, is_surplus: bool) -> Self {
        let activity = Activity {
            responses: 0,
            idle_since: Instant::now(),
            has_requested: false,
            request_due: Instant::now(),
            lists: BTreeMap::new(),
            lists_begun: 0,
        };
        Self { peer, is_surplus, moving: watch::Sender::new(None), activity: Mutex::new(activity) }
    }

    pub(crate) fn peer(&self) -> &Peer {
        &self.peer
    }

    pub(crate) fn is_surplus(&self) -> bool {
        self.is_surplus
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

    /// Counts a request that costs as much as some others. Returns false if there were too many.
    pub(crate) fn admits_request(&self, cost: u32) -> bool {
        let (mut activity, now) = (self.activity(), Instant::now());
        let due = activity.request_due.max(now);
        let is_admitted = due.saturating_duration_since(now) < REQUEST_INTERVAL * REQUESTS_BURST;
        if is_admitted {
            activity.request_due = due + REQUEST_INTERVAL * cost;
        }
        is_admitted
    }

    /// Begins a response without a bound on its time. By itself it does not keep the connection: anybody may ask for
    /// the health.
    pub(crate) fn begin(self: &Arc<Self>) -> Guard {
        self.activity().responses += 1;
        Guard { connection: self.clone(), list: None }
    }

    /// The client may see objects.
    pub(crate) fn accept_client(&self) {
        let mut activity = self.activity();
        activity.has_requested = true;
        activity.idle_since = Instant::now();
    }

    /// Begins a list, which has to be read in time.
    pub(crate) fn begin_list(self: &Arc<Self>) -> Guard {
        let mut guard = self.begin();
        let mut activity = self.activity();
        activity.lists_begun += 1;
        let id = activity.lists_begun;
        activity.lists.insert(id, Instant::now());
        guard.list = Some(id);
        guard
    }

    /// Reason to cut the connection, if there is one.
    fn fault(&self, now: Instant) -> Option<&'static str> {
        let activity = self.activity();
        let is_slow = |begin: &Instant| now.saturating_duration_since(*begin) > LIST_TIME_MAX;
        if activity.lists.values().any(is_slow) {
            return Some("it reads a list too slowly");
        }
        let (bound, fault) = match activity.has_requested {
            true => (IDLE_TIME_MAX, "it is idle"),
            false => (HEAD_TIME_MAX, "it asks for no objects"),
        };
        let is_idle = activity.responses == 0 && now.saturating_duration_since(activity.idle_since) > bound;
        is_idle.then_some(fault)
    }
}

impl Guard {
    /// The list has been read. What follows has no bound on its time.
    pub(crate) fn end_list(&mut self) {
        if let Some(id) = self.list.take() {
            self.connection.activity().lists.remove(&id);
        }
    }
}

impl Drop for Guard {
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
    is_surplus: bool,
) -> impl Future<Output = ()> + Send {
    let connection = Arc::new(Connection::new(peer, is_surplus));
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
        let mut must_move = pin!(must_move(&relay, is_surplus));
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
async fn must_move(relay: &Relay, is_surplus: bool) -> EndReason {
    if is_surplus {
        // Long enough for an answer.
        sleep(HEAD_TIME_MAX).await;
        return EndReason::Time;
    }
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
    use cproxy_access::PeerAddress;

    use super::*;

    fn connection() -> Arc<Connection> {
        let peer = PeerAddress::Vsock { cid: 3 };
        Arc::new(Connection::new(Peer::new(peer, None), false))
    }

    #[tokio::test(start_paused = true)]
    async fn requests_pass_up_to_a_burst_and_then_at_a_rate_by_their_cost() {
        let connection = connection();
        let admitted = |cost| (0..1_000).take_while(|_| connection.admits_request(cost)).count();
        assert_eq!(admitted(1), REQUESTS_BURST as usize);
        tokio::time::advance(REQUEST_INTERVAL * 20).await;
        assert_eq!(admitted(10), 2);
        // A request that costs more than the whole burst passes, too, and all others wait for it.
        tokio::time::advance(REQUEST_INTERVAL * REQUESTS_BURST).await;
        assert_eq!(admitted(2 * REQUESTS_BURST), 1);
        tokio::time::advance(REQUEST_INTERVAL * REQUESTS_BURST).await;
        assert_eq!(admitted(1), 0);
        tokio::time::advance(REQUEST_INTERVAL).await;
        assert_eq!(admitted(1), 1);
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
        assert_eq!(fault_after(HEAD_TIME_MAX / 2 + moment), Some("it asks for no objects"));
        connection.accept_client();
        let watch = connection.begin();
        assert_eq!(fault_after(IDLE_TIME_MAX * 100), None);
        drop(watch);
        assert_eq!(fault_after(IDLE_TIME_MAX), None);
        assert_eq!(fault_after(IDLE_TIME_MAX + moment), Some("it is idle"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_list_has_to_be_read_in_time_and_what_follows_it_has_not() {
        let connection = connection();
        connection.accept_client();
        let mut list = connection.begin_list();
        let late = || connection.fault(Instant::now() + LIST_TIME_MAX + Duration::from_millis(1));
        assert_eq!(late(), Some("it reads a list too slowly"));
        list.end_list();
        assert_eq!(late(), None);
    }
}
