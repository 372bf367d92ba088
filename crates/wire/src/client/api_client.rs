//! Client of one or several API servers, in order of preference. There is one connection at a time.
//!
//! Files and programs with credentials are read again for each request, of which there are few. If what a connection is
//! made of has changed, a new connection is made before the old one is retired. A server that fails is passed over;
//! the client goes back to a preferred one after growing times, when it sends a request anyway.

#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use cproxy_network::SocketSetup;
use http::{Request, StatusCode};
use tokio::{
    sync::Mutex as AsyncMutex,
    time::{sleep, timeout},
};

use crate::{
    backoff::jitter,
    client::{
        client_status::ClientStatus, connect_error::ConnectError, connection::Connection,
        pending_renewal::PendingRenewal, rate_limit::RateLimit, server_choice::Condition, session::Session,
    },
    credentials::configuration::{ApiServer, Configuration},
    transport::link::{BoxError, HasAlternative, Received, Transport},
};

/// Time for which a new connection has to last before others use it that wait since a failure, at most.
const SERVED_TIME: Duration = Duration::from_secs(1);

/// Time within which the server answers a PING, or another connection is made beside the present one.
const ALIVE_TIMEOUT: Duration = Duration::from_secs(1);

/// Client of API servers.
#[derive(Debug)]
pub struct ApiClient {
    rate_limit: RateLimit,
    /// Locked while a connection is made, so that requests share it.
    pub(super) session: AsyncMutex<Session>,
    pub(super) renewal: PendingRenewal,
    pub(super) status: ClientStatus,
}

impl ApiClient {
    /// A client for `options`, which were read as `configuration`; connects to nothing yet. `setup` is applied to each
    /// network socket before it connects.
    #[must_use]
    pub fn new(options: ApiServer, configuration: Configuration, setup: SocketSetup) -> Self {
        let server = configuration.servers.first().map(ToString::to_string).unwrap_or_default();
        Self {
            rate_limit: RateLimit::new(),
            session: AsyncMutex::new(Session::new(options, configuration, setup)),
            renewal: PendingRenewal::new(),
            status: ClientStatus::new(server.into()),
        }
    }

    /// Whether the present connection is alive: the server answers a PING within a second. True without a connection
    /// that could be asked.
    pub async fn is_alive(&self) -> bool {
        // While a connection is made, there is none.
        let Ok(session) = self.session.try_lock() else { return true };
        let Some(connection) = session.current().cloned() else { return true };
        drop(session);
        timeout(ALIVE_TIMEOUT, connection.ping()).await.unwrap_or(false)
    }

    /// Has the next request go to another server, or another address of the present one, if there is one that has not
    /// failed. Returns whether there is.
    pub async fn try_fail_over(&self) -> bool {
        self.session.lock().await.fail_over(Condition::HasAlternative)
    }

    /// Retires the present connection and connects anew, to another server if one can be reached. Requests that wait
    /// for the present one move.
    pub async fn force_fail_over(&self) {
        let mut session = self.session.lock().await;
        session.fail_over(Condition::Always);
        if let Err(error) = self.connect(&mut session).await {
            tracing::debug!("{error}");
        }
    }

    /// Address of the server that was used last, and its place in the order of preference, from 1 on.
    #[must_use]
    pub fn choice(&self) -> (Arc<str>, usize) {
        let (server, index) = self.status.server();
        (server, index + 1)
    }

    /// Makes sure that there is a connection, and that it is the best one. Returns whether it is new.
    pub(super) async fn connect(&self, session: &mut Session) -> Result<(Arc<Connection>, bool), ConnectError> {
        loop {
            let interrupted = self.renewal.interrupted();
            if let Some(renewal) = self.renewal.take() {
                session.renew(renewal);
            }
            tokio::select! {
                connected = session.connect(&self.status) => return connected,
                () = interrupted => {}
            }
        }
    }

    /// Waits until a new connection has served a request and lasts. One that does not last a moment shows nothing:
    /// pauses keep growing where each one breaks at once.
    async fn lasting_service(&self) {
        loop {
            self.status.served().await;
            sleep(SERVED_TIME / 2 + jitter(SERVED_TIME / 2)).await;
            if self.session.lock().await.open_connection().await.is_some() {
                return;
            }
        }
    }

    /// Sends a request once. Returns the connection that was used, too, and with an error whether another may serve.
    async fn send_once(&self, mut request: Request<Bytes>) -> Result<(Received, Arc<Connection>), (BoxError, bool)> {
        let mut session = self.session.lock().await;
        let (connection, is_new) = self.connect(&mut session).await.map_err(|error| (error.into(), false))?;
        session.configuration().add_headers(request.headers_mut());
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
                self.session.lock().await.retire_connection(&connection, is_new);
                Err((error, !is_new))
            }
        }
    }

    /// Sends a request and, if the status says that another connection may do better, retires this one.
    pub(super) async fn send_with_failover(&self, request: Request<Bytes>) -> Result<Received, BoxError> {
        let sent = match self.send_once(request.clone()).await {
            // The server may have closed an old connection just now.
            Err((_, true)) => self.send_once(request).await,
            sent => sent,
        };
        let (mut received, connection) = sent.map_err(|(error, _)| error)?;
        let code = received.response.status();
        if code.is_success() && connection.record_service() {
            self.status.report_service();
        }
        if code == StatusCode::UNAUTHORIZED {
            self.session.lock().await.renew_credentials(&connection);
        } else if let Some(condition) = failover_condition(code) {
            let mut session = self.session.lock().await;
            if !session.is_current(&connection) || session.fail_over(condition) {
                received.response.extensions_mut().insert(HasAlternative);
            }
        }
        Ok(received)
    }
}

/// Condition under which a server that answers with this status is left; `None` if no other may do better. A server
/// that is only busy (429) is waited for if all others have failed, too. A version that it does not have yet (504) is
/// always waited for.
fn failover_condition(code: StatusCode) -> Option<Condition> {
    match code.as_u16() {
        429 => Some(Condition::HasAlternative),
        500 | 502 | 503 => Some(Condition::HasOther),
        _ => None,
    }
}

impl Transport for ApiClient {
    async fn send(&self, request: Request<()>) -> Result<Received, BoxError> {
        self.rate_limit.pause().await;
        self.send_with_failover(request.map(|()| Bytes::new())).await
    }

    fn server(&self) -> Arc<str> {
        self.choice().0
    }

    async fn report_failure(&self) {
        self.session.lock().await.fail_over(Condition::Always);
    }

    async fn usable(&self) {
        tokio::select! {
            () = self.status.renewed() => {}
            () = self.lasting_service() => {}
        }
    }
}
