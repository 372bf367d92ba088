//! Bodies of responses. What a client has not taken is a small chunk, or one that is counted.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use cproxy_relay_core::{List, PolicyWatch, Watch};
use http_body::{Body, Frame, SizeHint};
use tokio::time::sleep;

use crate::{
    clients::connection::{Connection, EndReason, ResponseGuard},
    jitter::jitter,
    metrics::Metrics,
};

/// Time after which a watch ends whose client sets none: this and up to as much again, as at the API server.
const WATCH_TIME: Duration = Duration::from_secs(1800);

/// Longest time of a watch.
const WATCH_TIME_MAX: Duration = Duration::from_secs(24 * 3600);

/// Bytes of a whole response that are given to a connection at once.
const CHUNK_BYTES: usize = 16 << 10;

/// Future that completes when a watch has to end.
pub(crate) type End = Pin<Box<dyn Future<Output = EndReason> + Send>>;

/// Waits until a watch has to end: after the time that its client sets, or when the client has to move.
pub(crate) fn watch_end(connection: &Connection, timeout_seconds: Option<u64>) -> End {
    let time = match timeout_seconds {
        Some(seconds) if seconds > 0 => Duration::from_secs(seconds).min(WATCH_TIME_MAX),
        _ => WATCH_TIME + jitter(WATCH_TIME),
    };
    let moved = connection.moved();
    Box::pin(async move {
        tokio::select! {
            () = sleep(time) => EndReason::Time,
            reason = moved => reason,
        }
    })
}

/// Watch of a client.
pub(crate) enum WatchOf {
    /// Of objects.
    Objects(Watch),
    /// Of the policies of its pods.
    Policies(PolicyWatch),
}

impl WatchOf {
    /// True while it holds the objects that come first.
    pub(crate) fn holds_objects(&self) -> bool {
        match self {
            Self::Objects(watch) => watch.holds_objects(),
            // They are written when they are sent.
            Self::Policies(_) => false,
        }
    }

    fn poll_next(&mut self, waker: &Waker) -> Poll<Option<Bytes>> {
        match self {
            Self::Objects(watch) => watch.poll_next(waker),
            Self::Policies(watch) => watch.poll_next(waker),
        }
    }

    fn can_end(&self) -> bool {
        match self {
            Self::Objects(watch) => watch.can_end(),
            Self::Policies(_) => true,
        }
    }

    fn end(&mut self) -> Option<Bytes> {
        match self {
            Self::Objects(watch) => watch.end(),
            Self::Policies(watch) => watch.end(),
        }
    }

    fn expire(&mut self) -> Option<Bytes> {
        match self {
            Self::Objects(watch) => watch.expire(),
            Self::Policies(watch) => watch.expire(),
        }
    }
}

/// Body of a response.
pub(crate) enum ResponseBody {
    /// Short text.
    Short(Bytes),
    /// Object, or compressed list that several clients share.
    Whole { bytes: Bytes, _guard: Option<ResponseGuard> },
    /// List that is encoded as it is read.
    List { list: Box<List>, has_yielded: bool, guard: ResponseGuard },
    /// Watch.
    Watch(Box<WatchBody>),
}

/// Watch, and the time at which it ends.
pub(crate) struct WatchBody {
    watch: WatchOf,
    end: End,
    /// The watch ends as soon as its client can go on with another one.
    is_due: bool,
    has_ended: bool,
    metrics: Arc<Metrics>,
    guard: ResponseGuard,
}

impl ResponseBody {
    /// Object, or compressed list.
    pub(crate) fn whole(bytes: Bytes, guard: ResponseGuard) -> Self {
        let (bytes, guard) = guard.hold_whole(bytes);
        Self::Whole { bytes, _guard: guard }
    }
}

impl WatchBody {
    pub(crate) fn new(watch: WatchOf, end: End, metrics: Arc<Metrics>, guard: ResponseGuard) -> Self {
        Self { watch, end, is_due: false, has_ended: false, metrics, guard }
    }

    fn poll_chunk(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        if self.has_ended {
            return Poll::Ready(None);
        }
        // First, so that a watch ends which always has something to send.
        if !self.is_due
            && let Poll::Ready(reason) = self.end.as_mut().poll(context)
        {
            self.is_due = reason == EndReason::Time;
            if reason == EndReason::View {
                self.has_ended = true;
                return Poll::Ready(self.watch.expire());
            }
        }
        if self.is_due && self.watch.can_end() {
            self.has_ended = true;
            return Poll::Ready(self.watch.end());
        }
        let chunk = self.watch.poll_next(context.waker());
        if !self.watch.holds_objects() {
            self.guard.end_list();
        }
        if let Poll::Ready(Some(chunk)) = &chunk {
            self.metrics.watch_chunks.add(1);
            self.metrics.watch_bytes.add(chunk.len() as u64);
        }
        chunk.map(|chunk| chunk.map(|chunk| self.guard.hold(chunk)))
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let chunk = match &mut *self {
            Self::Short(bytes) => Poll::Ready(Some(std::mem::take(bytes))),
            Self::Whole { bytes, .. } => Poll::Ready(Some(bytes.split_to(CHUNK_BYTES.min(bytes.len())))),
            // Others come between two chunks: a fast client takes the whole list otherwise.
            Self::List { has_yielded, .. } if !*has_yielded => {
                *has_yielded = true;
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            Self::List { list, has_yielded, guard } => {
                *has_yielded = false;
                match list.next() {
                    Some(chunk) if chunk.is_empty() => {
                        context.waker().wake_by_ref();
                        return Poll::Pending;
                    }
                    None if list.is_cut() => {
                        return Poll::Ready(Some(Err(io::Error::other("too much has changed since the list began"))));
                    }
                    chunk => Poll::Ready(chunk.map(|chunk| guard.hold(chunk))),
                }
            }
            Self::Watch(watch) => {
                return watch.poll_chunk(context).map(|chunk| chunk.map(|chunk| Ok(Frame::data(chunk))));
            }
        };
        chunk.map(|chunk| chunk.filter(|chunk| !chunk.is_empty()).map(|chunk| Ok(Frame::data(chunk))))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Short(bytes) | Self::Whole { bytes, .. } if bytes.is_empty())
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Short(bytes) | Self::Whole { bytes, .. } => SizeHint::with_exact(bytes.len() as u64),
            Self::List { .. } | Self::Watch(_) => SizeHint::default(),
        }
    }
}
