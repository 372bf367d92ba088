//! Status of a client, which others see while it connects: the last server, and signs that requests may succeed again.

use std::sync::Arc;

use tokio::sync::watch;

/// Status of a client, for the tasks that wait or ask.
#[derive(Debug)]
pub(super) struct ClientStatus(watch::Sender<Status>);

#[derive(Debug)]
struct Status {
    /// Address of the server that was used last, and its index.
    server: (Arc<str>, usize),
    /// Number of times that a request may succeed at once, because other servers or credentials are in use.
    renewals: u64,
    /// Number of new connections that have served their first request.
    services: u64,
}

impl ClientStatus {
    pub(super) fn new(server: Arc<str>) -> Self {
        Self(watch::Sender::new(Status { server: (server, 0), renewals: 0, services: 0 }))
    }

    /// Address of the server that was used last, and its index.
    pub(super) fn server(&self) -> (Arc<str>, usize) {
        self.0.borrow().server.clone()
    }

    pub(super) fn set_server(&self, address: String, index: usize) {
        self.0.send_modify(|status| status.server = (address.into(), index));
    }

    /// Says that a request may succeed at once.
    pub(super) fn report_renewal(&self) {
        self.0.send_modify(|status| status.renewals += 1);
    }

    /// Says that a new connection has served its first request.
    pub(super) fn report_service(&self) {
        self.0.send_modify(|status| status.services += 1);
    }

    /// Waits for the next renewal.
    pub(super) fn renewed(&self) -> impl Future<Output = ()> + Send + use<> {
        self.increased(|status| status.renewals)
    }

    /// Waits for the next service of a new connection.
    pub(super) fn served(&self) -> impl Future<Output = ()> + Send + use<> {
        self.increased(|status| status.services)
    }

    /// Waits until a number is another one than it is now.
    fn increased(&self, number: fn(&Status) -> u64) -> impl Future<Output = ()> + Send + use<> {
        let mut receiver = self.0.subscribe();
        let now = number(&receiver.borrow());
        async move { receiver.wait_for(|status| number(status) != now).await.map(drop).unwrap_or_default() }
    }
}
