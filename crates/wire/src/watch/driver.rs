//! Loop of one resource's list and watch: sends the requests, reads the responses and publishes the events on which
//! [`WatchState::step`] decides.

use std::{future::pending, time::Duration};

use cproxy_network::NetworkChanges;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::{
    codec::resource::WatchedResource,
    transport::link::Transport,
    watch::{
        event::ResponseOrigin,
        failure::{ApiError, Operation},
        io::{Collection, Input, Log, Next, Pause, Request},
        message_reader::MessageReader,
        requester::Requester,
        selectors::Selectors,
        state::{History, ListPolicy, WatchState},
        subscriber::Subscriber,
    },
};

/// Shortest pause while the network keeps changing.
const PAUSE_MIN: Duration = Duration::from_millis(200);

/// Follows a resource for ever.
pub async fn follow_resource<K: WatchedResource, S: Subscriber<K>>(
    transport: &impl Transport,
    selectors: Selectors<'_>,
    subscriber: &mut S,
) {
    follow(&Requester::new(transport), selectors, subscriber).await;
}

/// Follows a resource for ever, on a way to the API servers that other resources may share.
pub(crate) async fn follow<K: WatchedResource, S: Subscriber<K>>(
    requester: &Requester<'_, impl Transport>,
    selectors: Selectors<'_>,
    subscriber: &mut S,
) {
    let policy = ListPolicy {
        spreads: S::SPREADS_LISTS,
        after_failure: S::LISTS_AFTER_FAILURE,
        expires_often: S::EXPIRES_OFTEN,
    };
    let (mut state, mut history) = (WatchState::new(), History::new(policy));
    let mut exchange = Exchange { requester, reader: None, changes: None };
    let mut next = Next::Request;
    loop {
        if let Next::RequestAfter(pause) = next {
            exchange.pause(pause).await;
        }
        let input = match next {
            Next::Read => exchange.receive(state.operation(), state.due(&history), subscriber).await,
            Next::Request | Next::RequestAfter(_) => {
                exchange.request(state.request::<K>(selectors, &history)).await.map(Input::Accepted)
            }
        };
        let server = requester.transport.server();
        let collection = Collection { server: &server, selectors };
        let (new, output) = state.step(input.unwrap_or_else(Input::Failed), collection, &mut history);
        state = new;
        if let Some(log) = output.log {
            write(&log);
        }
        for event in output.events {
            subscriber.publish(event).await;
        }
        next = output.next;
    }
}

/// Last request for a resource, and its response.
struct Exchange<'a, T> {
    requester: &'a Requester<'a, T>,
    /// Reader of the last response.
    reader: Option<MessageReader>,
    /// Changes of the network since the first attempt that failed: one that comes during an attempt counts, too.
    changes: Option<NetworkChanges>,
}

impl<T: Transport> Exchange<'_, T> {
    /// Sends a request and waits until the server has accepted it. [`Self::receive`] reads the response.
    async fn request(&mut self, request: Request) -> Result<ResponseOrigin, ApiError> {
        // An unfinished response is dropped first, which ends it.
        self.reader = None;
        let requested = Instant::now();
        let response = self.requester.send(&request).await;
        let response = self.requester.report_silence(response).await?;
        let (view, server) = (response.view().clone(), response.link().server().clone());
        self.reader = Some(MessageReader::new(request.operation, response)?);
        Ok(ResponseOrigin { server, view, requested })
    }

    /// Reads the next part of the response, unless something comes before it: something that the subscriber wants, a
    /// better connection for a watch, or the time until which a watch has to be confirmed. It fails if the response
    /// lacks an object for too long ([`Operation::silence_max`]).
    async fn receive<K: WatchedResource>(
        &mut self,
        operation: Operation,
        due: Option<Instant>,
        subscriber: &mut impl Subscriber<K>,
    ) -> Result<Input<K>, ApiError> {
        let Some(reader) = &mut self.reader else { return Err(ApiError::Incomplete) };
        let mut link = reader.link().clone();
        let is_watch = operation == Operation::Watch;
        let is_due = async {
            match due {
                Some(due) => sleep_until(due).await,
                None => pending().await,
            }
        };
        let input = tokio::select! {
            biased;
            input = reader.next(operation.silence_max()) => input,
            wanted = subscriber.wanted(is_watch) => Ok(Input::Wanted(wanted)),
            // A list that is under way ends where it is.
            () = link.superseded(), if is_watch => Ok(Input::Superseded),
            () = is_due => Ok(Input::Unconfirmed),
        };
        // Nothing that comes meanwhile drops the report of a silent server.
        let input = self.requester.report_silence(input).await;
        self.requester.disable_zstd_on_error(&input);
        if input.is_ok() {
            self.changes = None;
        }
        input
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
            sleep(pause.duration).await;
        }
    }
}

fn write(log: &Log) {
    match log {
        Log::Debug(message) => tracing::debug!("{message}"),
        Log::Info(message) => tracing::info!("{message}"),
        Log::Warn(message) => tracing::warn!(name: "source_failed", "{message}"),
    }
}

async fn pause_unless_network_changes(pause: Duration, changes: Option<&NetworkChanges>) {
    let least = pause.min(PAUSE_MIN);
    sleep(least).await;
    let changed = async {
        match changes {
            Some(changes) if changes.wait().await.is_ok() => {}
            // If changes cannot be followed, the pause takes its full time.
            _ => pending().await,
        }
    };
    timeout(pause.saturating_sub(least), changed).await.ok();
}

#[cfg(test)]
mod tests;
