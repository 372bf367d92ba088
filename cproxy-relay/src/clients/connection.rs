//! Connection of a client, as its requests see it: who it is, how much it may take, and when it has to move.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use cproxy_relay_auth::{Identity, Lease, Leases, Peer};
use tokio::{sync::watch, time::Instant};

use crate::clients::{
    budget::{Excess, TimeBudget},
    request_limit::RequestLimit,
    slots::ConnectionSlot,
};

/// Tokens that a client may show on one connection: a token file is renewed now and then.
const TOKENS_MAX: usize = 4;

/// Reason for which a watch ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EndReason {
    /// Its time is over, or its client has to move: it resumes where it is.
    Time,
    /// The client may have another view now, and has to list anew.
    View,
}

/// Reason to cut a connection.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Fault {
    /// A token of the client is no longer accepted.
    #[error("{0}")]
    LeaseEnded(String),
    /// The client's certificate is no longer valid.
    #[error("its certificate has expired")]
    CertificateExpired,
    /// The client takes too long.
    #[error(transparent)]
    Excess(#[from] Excess),
}

/// Connection of a client, as its requests see it.
pub(crate) struct Connection {
    peer: Peer,
    slot: ConnectionSlot,
    requests: RequestLimit,
    /// Reason for which the client has to move, once it has to.
    moving: watch::Sender<Option<EndReason>>,
    state: Mutex<State>,
}

struct State {
    budget: TimeBudget,
    /// Tokens that the client has shown: watches of each may be under way.
    leases: Vec<Arc<Lease>>,
}

/// Response under way. Dropped at its end.
pub(crate) struct ResponseGuard {
    connection: Arc<Connection>,
    /// Number of the list that the response begins with.
    list: Option<u64>,
}

impl Connection {
    pub(crate) fn new(peer: Peer, slot: ConnectionSlot) -> Self {
        Self {
            peer,
            slot,
            requests: RequestLimit::new(1),
            moving: watch::Sender::new(None),
            state: Mutex::new(State { budget: TimeBudget::new(Instant::now()), leases: Vec::new() }),
        }
    }

    pub(crate) fn peer(&self) -> &Peer {
        &self.peer
    }

    pub(crate) fn slot(&self) -> &ConnectionSlot {
        &self.slot
    }

    /// Tells the client to move: its watches end.
    pub(crate) fn end_watches(&self, reason: EndReason) {
        self.moving.send_replace(Some(reason));
    }

    /// Waits until the client has to move.
    pub(crate) fn moved(&self) -> impl Future<Output = EndReason> + Send + 'static {
        let mut moving = self.moving.subscribe();
        async move {
            let reason = moving.wait_for(Option::is_some).await.ok().and_then(|reason| *reason);
            reason.unwrap_or(EndReason::Time)
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a request that costs as much as some others. Returns false if there were too many on this connection, or
    /// of its client.
    pub(crate) fn admits_request(&self, cost: u32) -> bool {
        self.requests.admits(cost) && self.slot.admits_request(cost)
    }

    /// Begins a response without a bound on its time.
    pub(crate) fn begin(self: &Arc<Self>) -> ResponseGuard {
        self.state().budget.begin_response();
        ResponseGuard { connection: self.clone(), list: None }
    }

    /// Begins a response with a list, which has to be read in time.
    pub(crate) fn begin_list(self: &Arc<Self>) -> ResponseGuard {
        let mut guard = self.begin();
        guard.list = Some(self.state().budget.begin_list(Instant::now()));
        guard
    }

    /// The client may see objects.
    pub(crate) fn accept_client(&self) {
        self.state().budget.accept_client(Instant::now());
    }

    /// Remembers the token of a client that was accepted with this header as this identity. Returns false if the
    /// connection has shown too many.
    pub(crate) fn remember_token(&self, authorization: &[u8], identity: &Arc<Identity>, leases: &Leases) -> bool {
        let mut state = self.state();
        if state.leases.iter().any(|lease| lease.is_of(authorization)) {
            return true;
        }
        if state.leases.len() >= TOKENS_MAX {
            return false;
        }
        state.leases.extend(leases.get(authorization, identity, self.peer.address()));
        true
    }

    /// Reason to cut the connection, if there is one.
    pub(crate) fn fault(&self, now: Instant) -> Option<Fault> {
        let state = self.state();
        if let Some(end) = state.leases.iter().find_map(|lease| lease.end()) {
            return Some(Fault::LeaseEnded(end.to_owned()));
        }
        if self.peer.has_expired() {
            return Some(Fault::CertificateExpired);
        }
        state.budget.excess(now).map(Fault::from)
    }
}

impl ResponseGuard {
    /// The list has been read. What follows has no bound on its time.
    pub(crate) fn end_list(&mut self) {
        if let Some(number) = self.list.take() {
            self.connection.state().budget.end_list(number);
        }
    }

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
        self.connection.state().budget.end_response(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use cproxy_relay_auth::PeerAddress;

    use super::*;
    use crate::clients::slots::ConnectionSlots;

    #[tokio::test]
    async fn a_response_counts_until_its_guard_is_dropped_and_a_list_until_it_has_been_read() {
        let peer = PeerAddress::Vsock { cid: 3 };
        let slot = ConnectionSlots::new(1).enter(&peer).0.unwrap();
        let connection = Arc::new(Connection::new(Peer::new(peer, None), slot));
        connection.accept_client();
        let late = || connection.fault(Instant::now() + Duration::from_secs(3600));
        assert_eq!(late(), Some(Fault::Excess(Excess::Idle)));
        let (mut list, _watch) = (connection.begin_list(), connection.begin());
        assert_eq!(late(), Some(Fault::Excess(Excess::SlowList)));
        list.end_list();
        assert_eq!(late(), None);
        let dropped = connection.begin_list();
        assert_eq!(late(), Some(Fault::Excess(Excess::SlowList)));
        drop((dropped, list));
        assert_eq!(late(), None);
    }
}
