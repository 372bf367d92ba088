//! API server as the source of one resource, for any subscriber.

use std::{
    future::{pending, ready},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use cproxy_network::NetworkChanges;
use tokio::time::Instant;

use crate::{
    codec::resource::WatchedResource,
    transport::link::Transport,
    watch::{
        driver::{ApiSource, follow},
        event::WatchEvent,
        failure::{ApiError, Operation},
        io::{Input, Log, Pause, Request},
        message_reader::MessageReader,
        response::{Accepted, Response},
        selectors::Selectors,
        state::watch_time,
        view_token::ViewToken,
    },
};

/// Shortest pause while the network keeps changing.
const PAUSE_MIN: Duration = Duration::from_millis(200);

/// Time of a watch that is opened for its bookmark, which the server sends two seconds before the end
/// (apiserver/pkg/storage/cacher/cache_watcher.go 1.36).
pub(crate) const BOOKMARK_WATCH_TIME: Duration = Duration::from_secs(3);

/// Receiver of a resource's events.
pub trait Subscriber<K>: Send {
    /// Many clients like this one may list at once.
    const SPREADS_LISTS: bool;
    /// A watch that broke is not resumed: the objects are listed anew. The server's data may come from a backup
    /// meanwhile, with other changes at the same versions, and only a list shows that.
    const LISTS_AFTER_FAILURE: bool;

    /// Takes an event. The response waits meanwhile.
    fn publish(&mut self, event: WatchEvent<K>) -> impl Future<Output = ()> + Send;

    /// Takes note of a list or watch that a server has accepted: the server, with the address that was reached, the
    /// token of the view that it shows (`None`: everything), and the time of the request.
    fn see_response(&mut self, _server: &Arc<str>, _view: Option<&str>, _requested: Instant) {}

    /// Takes the message of a failure, before the pause after it.
    fn see_failure(&mut self, _message: &str) {}

    /// Whether the next watch shows the last version again: the change, or a bookmark. It costs less than a list.
    fn repeats_last_version(&self) -> bool {
        false
    }

    /// Takes note that the server has ended a watch in an orderly way. Returns whether that leaves the last version in
    /// doubt: then the objects are listed anew.
    fn end_watch(&mut self) -> impl Future<Output = bool> + Send {
        ready(false)
    }

    /// Waits until something is wanted of the server soon; while a list is under way, only another list that is wanted
    /// at once. Dropped and called again at will.
    fn wanted(&mut self, _is_watch: bool) -> impl Future<Output = Wanted> + Send {
        pending()
    }
}

/// Response that a subscriber wants soon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// A bookmark.
    Bookmark,
    /// A list.
    List,
}

/// Follows a resource for ever.
pub async fn follow_resource<K: WatchedResource>(
    transport: &impl Transport,
    selectors: Selectors<'_>,
    subscriber: &mut impl Subscriber<K>,
) {
    let requester = Requester::new(transport);
    requester.follow(selectors, subscriber).await;
}

/// Way to the API servers, shared by the watches of several resources.
pub(crate) struct Requester<'a, T> {
    transport: &'a T,
    /// The server has not yet refused protobuf.
    accepts_protobuf: AtomicBool,
    /// All zstd so far could be read.
    accepts_zstd: AtomicBool,
}

impl<'a, T: Transport> Requester<'a, T> {
    pub(crate) fn new(transport: &'a T) -> Self {
        Self { transport, accepts_protobuf: AtomicBool::new(true), accepts_zstd: AtomicBool::new(true) }
    }

    /// Follows a resource for ever.
    pub(crate) async fn follow<K: WatchedResource, S: Subscriber<K>>(
        &self,
        selectors: Selectors<'_>,
        subscriber: &mut S,
    ) {
        let mut source = HttpSource {
            requester: self,
            subscriber,
            reader: None,
            is_broken: false,
            changes: None,
            wants_bookmark: false,
        };
        follow::<K>(&mut source, selectors, S::SPREADS_LISTS).await;
    }

    /// Asks for gzip alone from now on, if a response was in zstd that cannot be read. A proxy in front of the server
    /// may choose a larger window.
    fn disable_zstd_on_error<R>(&self, result: &Result<R, ApiError>) {
        if let Err(error) = result
            && error.is_of_zstd()
            && self.accepts_zstd.swap(false, Ordering::Relaxed)
        {
            let server = self.transport.server();
            tracing::info!("the zstd of the API server at {server} cannot be read: asking for gzip");
        }
    }

    /// Reports a server that accepts requests or connections, but sends nothing.
    async fn report_silence<R>(&self, result: Result<R, ApiError>) -> Result<R, ApiError> {
        if matches!(result, Err(ApiError::Silent(_))) {
            self.transport.report_failure().await;
        }
        result
    }

    /// Sends a request. If the server, or a proxy in front of it, refuses protobuf, JSON alone is asked for from then
    /// on.
    async fn send(&self, request: &Request) -> Result<Response, ApiError> {
        let zstd = self.accepts_zstd.load(Ordering::Relaxed);
        let get = |protobuf| Response::get(self.transport, request, Accepted { protobuf, zstd });
        let accepts_protobuf = self.accepts_protobuf.load(Ordering::Relaxed);
        match get(accepts_protobuf).await {
            Err(ApiError::Refused(status)) if accepts_protobuf && matches!(status.code, 406 | 415) => {
                if self.accepts_protobuf.swap(false, Ordering::Relaxed) {
                    let server = self.transport.server();
                    tracing::info!("the API server at {server} does not send protobuf: asking for JSON");
                }
                get(false).await
            }
            response => response,
        }
    }
}

/// API server as the source of one resource.
struct HttpSource<'a, T, S> {
    requester: &'a Requester<'a, T>,
    subscriber: &'a mut S,
    /// Reader of the last response.
    reader: Option<MessageReader>,
    /// The last request or response failed.
    is_broken: bool,
    /// Changes of the network since the first attempt that failed: one that comes during an attempt counts, too.
    changes: Option<NetworkChanges>,
    /// The next response, if it is a watch, is opened for its bookmark.
    wants_bookmark: bool,
}

impl<K: WatchedResource, T: Transport, S: Subscriber<K>> ApiSource<K> for HttpSource<'_, T, S> {
    async fn request(&mut self, request: Request) -> Result<ViewToken, ApiError> {
        // An unfinished response is dropped first, which ends it.
        self.reader = None;
        let requested = Instant::now();
        let response = self.requester.send(&request).await;
        let response = self.requester.report_silence(response).await;
        self.is_broken |= response.is_err();
        let response = response?;
        let (view, server) = (response.view().clone(), response.link().server().clone());
        self.reader = Some(MessageReader::new(request.operation, response)?);
        self.wants_bookmark = false;
        self.subscriber.see_response(&server, view.token(), requested);
        Ok(view)
    }

    async fn receive(&mut self, operation: Operation) -> Result<Input<K>, ApiError> {
        let Some(reader) = &mut self.reader else { return Err(ApiError::Incomplete) };
        let mut link = reader.link().clone();
        let is_watch = operation == Operation::Watch;
        let mut has_ended = false;
        let mut input = tokio::select! {
            biased;
            input = reader.next(operation.silence_max()) => {
                has_ended = is_watch && matches!(input, Ok(Input::Ended(_)));
                self.requester.report_silence(input).await
            }
            wanted = self.subscriber.wanted(is_watch) => match wanted {
                Wanted::Bookmark => {
                    self.wants_bookmark = true;
                    Ok(Input::Moved)
                }
                Wanted::List => Ok(Input::ListWanted),
            },
            // A watch moves to a better connection. A list that is under way ends where it is.
            () = link.superseded(), if is_watch => Ok(Input::Moved),
        };
        if has_ended && self.subscriber.end_watch().await {
            input = Ok(Input::Unconfirmed);
        }
        self.requester.disable_zstd_on_error(&input);
        self.is_broken = input.is_err();
        if !self.is_broken {
            self.changes = None;
        }
        input
    }

    /// Ignores a closed receiver, which ends [`watch`](super::watch()).
    async fn publish(&mut self, event: WatchEvent<K>) {
        self.subscriber.publish(event).await;
    }

    async fn pause(&mut self, pause: Pause) {
        // An unfinished response does not go on during the pause.
        self.reader = None;
        if pause.ends_on_network_change {
            if self.changes.is_none() {
                self.changes = NetworkChanges::open().ok();
            }
            tokio::select! {
                () = pause_unless_network_changes(pause.duration, self.changes.as_ref()) => {}
                () = self.requester.transport.usable() => {}
            }
        } else {
            tokio::time::sleep(pause.duration).await;
        }
    }

    fn watch_time(&mut self) -> Duration {
        if self.wants_bookmark { BOOKMARK_WATCH_TIME } else { watch_time() }
    }

    fn repeats_last_version(&self) -> bool {
        self.subscriber.repeats_last_version()
    }

    fn must_list(&self) -> bool {
        S::LISTS_AFTER_FAILURE && self.is_broken
    }

    fn log(&mut self, log: Log) {
        match log {
            Log::Debug(message) => tracing::debug!("{message}"),
            Log::Info(message) => tracing::info!("{message}"),
            Log::Warn(message) => {
                tracing::warn!(name: "source_failed", "{message}");
                self.subscriber.see_failure(&message);
            }
        }
    }

    fn server(&self) -> Arc<str> {
        self.requester.transport.server()
    }
}

async fn pause_unless_network_changes(pause: Duration, changes: Option<&NetworkChanges>) {
    let least = pause.min(PAUSE_MIN);
    tokio::time::sleep(least).await;
    let changed = async {
        match changes {
            Some(changes) if changes.wait().await.is_ok() => {}
            // If changes cannot be followed, the pause takes its full time.
            _ => pending().await,
        }
    };
    tokio::time::timeout(pause.saturating_sub(least), changed).await.ok();
}
