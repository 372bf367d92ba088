//! The connection in use, and the attempts to connect, as [`ServerChoice`] decides.

use std::{sync::Arc, time::Instant};

use cproxy_network::SocketSetup;

use crate::{
    client::{
        client_status::ClientStatus,
        configuration_reader::ConfigurationReader,
        connect_error::{AttemptError, AttemptErrors, ConnectError},
        connection::{Connection, Dialer},
        pending_renewal::Renewal,
        server_choice::{Action, Change, Condition, Input, ServerChoice},
    },
    credentials::configuration::{ApiServer, Configuration},
    transport::{address::ServerAddress, connector::Connector},
};

/// Servers, identity, and the present connection.
#[derive(Debug)]
pub(super) struct Session {
    connector: Connector,
    reader: ConfigurationReader,
    choice: ServerChoice,
    current: Option<Arc<Connection>>,
    /// Last connection that was retired. Its watches go on until another one stands.
    retired: Option<Arc<Connection>>,
    /// Reason why the present connection stayed although a new one was wanted, as it was logged last.
    kept_because: Option<String>,
}

impl Session {
    /// A session for `options`, which were read as `configuration`. `setup` is applied to each network socket before it
    /// connects.
    pub(super) fn new(options: ApiServer, configuration: Configuration, setup: SocketSetup) -> Self {
        Self {
            connector: Connector::new(setup),
            reader: ConfigurationReader::new(options, configuration),
            choice: ServerChoice::default(),
            current: None,
            retired: None,
            kept_because: None,
        }
    }

    /// Begins a renewal, for which earlier failures of servers do not count.
    pub(super) fn renew(&mut self, renewal: Renewal) {
        if let Renewal::Options(replacement) = renewal {
            let (options, configuration) = *replacement;
            self.reader.replace(options, configuration);
        }
        self.reader.forget_credentials();
        self.step(Input::Renew);
        self.kept_because = None;
    }

    /// Whether a new connection is wanted, and none was made since.
    pub(super) fn must_renew(&self) -> bool {
        self.choice.must_renew()
    }

    /// The configuration that was read last. The present connection may be of an earlier one.
    pub(super) fn configuration(&self) -> &Configuration {
        self.reader.last()
    }

    /// The present connection.
    pub(super) fn current(&self) -> Option<&Arc<Connection>> {
        self.current.as_ref()
    }

    /// The present connection, if new requests can be sent on it.
    pub(super) async fn open_connection(&self) -> Option<Arc<Connection>> {
        let connection = self.current.as_ref()?;
        connection.is_open().await.then(|| connection.clone())
    }

    /// Makes sure that there is a connection, and that it is the best one. Returns whether it is new.
    ///
    /// # Errors
    /// There are no credentials, or no server can be reached.
    pub(super) async fn connect(&mut self, status: &ClientStatus) -> Result<(Arc<Connection>, bool), ConnectError> {
        self.step(Input::Interrupt);
        let configuration = self.reader.read().await?;
        let kept = self.open_connection().await;
        let (server_count, fingerprint) = (configuration.servers.len(), configuration.fingerprint());
        let mut errors = AttemptErrors(Vec::new());
        let action = match self.step(Input::Connect { server_count, fingerprint, is_open: kept.is_some() }) {
            Action::Dial(index) => match self.dial(&configuration, index, kept.is_none(), status, &mut errors).await {
                Ok(connection) => return Ok((connection, true)),
                Err(action) => action,
            },
            action => action,
        };
        match (action, kept) {
            (Action::Keep { is_unwanted }, Some(connection)) => {
                self.report_kept(&errors, is_unwanted);
                Ok((connection, false))
            }
            _ => Err(ConnectError::NotReached(errors)),
        }
    }

    /// Connects to this server, or to the next ones until one is reached; otherwise says what to do without a new
    /// connection. `is_only`: there is no other connection, so messages name the server that is being tried.
    async fn dial(
        &mut self,
        configuration: &Arc<Configuration>,
        mut index: usize,
        is_only: bool,
        status: &ClientStatus,
        errors: &mut AttemptErrors,
    ) -> Result<Arc<Connection>, Action> {
        let tls = match configuration.tls() {
            Ok(tls) => tls,
            Err(error) => {
                errors.0.push(AttemptError::Tls(error));
                return Err(self.step(Input::CannotDial));
            }
        };
        let has_others = configuration.servers.len() > 1;
        loop {
            let Some(address) = configuration.servers.get(index).cloned() else {
                return Err(self.step(Input::CannotDial));
            };
            if is_only {
                status.set_server(address.to_string(), index);
            }
            let dialer = Dialer {
                connector: self.connector.clone(),
                configuration: configuration.clone(),
                tls: tls.clone(),
                address: address.clone(),
                has_others,
                avoided: self.choice.avoided(),
            };
            match dialer.connect().await {
                Ok(connection) => {
                    status.set_server(address.to_string(), index);
                    return Ok(self.replace(connection, &address));
                }
                Err(error) if has_others => errors.0.push(AttemptError::Server(address, error)),
                Err(error) => errors.0.push(AttemptError::OnlyServer(error)),
            }
            match self.step(Input::NotReached) {
                Action::Dial(next) => index = next,
                action => return Err(action),
            }
        }
    }

    /// Makes a connection to this server the present one.
    fn replace(&mut self, connection: Connection, address: &ServerAddress) -> Arc<Connection> {
        match self.step(Input::Reached(connection.reached())) {
            Action::Replace(Change::Renewed) => {
                tracing::info!(name: "connected", "connected anew to the API server at {address}");
            }
            Action::Replace(Change::Moved) => {
                tracing::info!(name: "connected", "connected to another API server, at {address}");
            }
            _ => {}
        }
        self.kept_because = None;
        let connection = Arc::new(connection);
        let old = self.current.replace(connection.clone());
        old.into_iter().chain(self.retired.take()).for_each(|old| old.supersede());
        connection
    }

    /// Logs why the present connection stays: a warning if it should have been replaced and the reason is new.
    fn report_kept(&mut self, errors: &AttemptErrors, is_unwanted: bool) {
        let reason = errors.to_string();
        if is_unwanted && self.kept_because.as_ref() != Some(&reason) {
            tracing::warn!("the present connection to the API server stays for now: {reason}");
            self.kept_because = Some(reason);
        } else if !reason.is_empty() {
            tracing::debug!("the present connection stays: {reason}");
        }
    }

    /// Whether this is the present connection.
    pub(super) fn is_current(&self, connection: &Arc<Connection>) -> bool {
        self.current.as_ref().is_some_and(|current| Arc::ptr_eq(current, connection))
    }

    /// Retires the present connection if the condition holds. Returns whether another server or address may serve.
    pub(super) fn fail_over(&mut self, condition: Condition) -> bool {
        matches!(self.step(Input::FailOver(condition)), Action::Retire { has_alternative: true })
    }

    /// Retires a connection for new requests, if it is the present one. Responses on it go on. `has_failed`: its server
    /// is to blame.
    pub(super) fn retire_connection(&mut self, connection: &Arc<Connection>, has_failed: bool) {
        if self.is_current(connection) {
            self.step(Input::Retire { has_failed });
        }
    }

    /// Retires a connection whose credentials the server does not accept. A program that has them is asked again.
    pub(super) fn renew_credentials(&mut self, connection: &Arc<Connection>) {
        self.reader.forget_credentials();
        self.retire_connection(connection, true);
    }

    fn step(&mut self, input: Input) -> Action {
        let action = self.choice.step(input, now());
        if let Action::Retire { .. } = action {
            self.retired = self.current.take();
        }
        action
    }
}

/// The time, which stands still in tests that say so.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}
