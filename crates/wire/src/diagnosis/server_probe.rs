//! Attempt to reach one API server, step by step: name, connection, TLS, HTTP.

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{Request, Response, header::CONTENT_LENGTH};
use rustls::{CertificateError, ClientConfig};
use tokio::time::timeout;

use crate::{
    client::{
        call::read_all,
        connect_error::DialError,
        connection::{Connection, Dialer},
    },
    credentials::configuration::Configuration,
    diagnosis::{clock, expiry::Validity},
    error_text::chain,
    transport::{
        address::ServerAddress,
        connector::Connector,
        time_limit::within,
        tls::{self, TlsError, TlsMaterial},
    },
};

/// Limit on each of: connecting to one address, the handshake, and a response.
const STEP_MAX: Duration = Duration::from_secs(5);
/// Limit on the lookup of a name and the attempts to connect to its addresses.
const CONNECT_MAX: Duration = Duration::from_secs(10);

/// Attempts to reach the servers of a configuration.
pub(super) struct ServerProbe {
    configuration: Arc<Configuration>,
    tls: Option<Arc<ClientConfig>>,
    connector: Connector,
}

/// Server that was reached.
pub(super) struct ReachedServer {
    pub(super) address: ServerAddress,
    /// Time until the connection stood.
    pub(super) time: Duration,
    /// Times of its certificate, where it has one that can be read.
    pub(super) certificate: Option<Validity>,
    connection: Connection,
}

/// Reason why a server was not reached.
pub(super) struct Failure {
    pub(super) text: String,
    /// Times of its certificate, if it does not count at this time.
    pub(super) invalid: Option<Validity>,
}

impl From<DialError> for Failure {
    fn from(error: DialError) -> Self {
        Self { text: chain(&error), invalid: None }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        let invalid = certificate_error(&error).and_then(invalid_times);
        Self { text: error.to_string(), invalid }
    }
}

impl ServerProbe {
    /// Attempts with the credentials of the configuration.
    ///
    /// # Errors
    /// They cannot be used.
    pub(super) fn new(configuration: Arc<Configuration>, connector: Connector) -> Result<Self, TlsError> {
        let tls = configuration.tls()?;
        Ok(Self { configuration, tls, connector })
    }

    pub(super) fn configuration(&self) -> &Configuration {
        &self.configuration
    }

    /// Goes to this server, one step after the other.
    pub(super) async fn reach(&self, address: &ServerAddress) -> Result<ReachedServer, Failure> {
        let start = Instant::now();
        let proxy = self.configuration.proxy.as_ref();
        let connecting = self.connector.connect(address, proxy, &[], STEP_MAX);
        // The limit on a single address is shorter.
        let elapsed = |_| {
            let text =
                format!("no connection within {CONNECT_MAX:?}: nameservers, a proxy or all addresses are silent");
            io::Error::new(io::ErrorKind::TimedOut, text)
        };
        let (stream, reached) = timeout(CONNECT_MAX, connecting).await.map_err(elapsed)??;
        let dialer = self.dialer(address, self.configuration.clone(), self.tls.clone());
        let (certificate, connection);
        if let Some((name, config)) = self.configuration.tls_name(address).zip(self.tls.clone()) {
            let handshake = within(STEP_MAX, tls::handshake(config, name, stream)).await;
            let (stream, is_http2) = handshake.map_err(|error| {
                let text = format!("TLS as {name:?}: {}", tls::explain(&error, &self.configuration.material));
                Failure { text, ..Failure::from(error) }
            })?;
            let certificates = stream.get_ref().1.peer_certificates();
            certificate = certificates.and_then(<[_]>::first).and_then(|first| Validity::of_der(first));
            connection = dialer.speak(Box::new(stream), reached, is_http2).await?;
        } else {
            // The version of HTTP is tried on connections of its own.
            drop(stream);
            certificate = None;
            connection = dialer.connect().await?;
        }
        Ok(ReachedServer { address: address.clone(), time: start.elapsed(), certificate, connection })
    }

    fn dialer(
        &self,
        address: &ServerAddress,
        configuration: Arc<Configuration>,
        tls: Option<Arc<ClientConfig>>,
    ) -> Dialer {
        let connector = self.connector.clone();
        // As with others to turn to: the limits are short then.
        Dialer { connector, configuration, tls, address: address.clone(), has_others: true, avoided: Vec::new() }
    }

    /// Time of a server whose certificate does not count now. It gets no credentials, since anybody could be there.
    pub(super) async fn date_of_unverified(&self, address: &ServerAddress) -> Option<i64> {
        let plain = Configuration {
            material: TlsMaterial { is_insecure: true, ..TlsMaterial::default() },
            authorization: None,
            exec: None,
            headers: Vec::new(),
            ..(*self.configuration).clone()
        };
        let tls = plain.tls().ok()?;
        let plain = Arc::new(plain);
        let connection = self.dialer(address, plain.clone(), tls).connect().await.ok()?;
        let mut request = Request::new(Bytes::new());
        *request.uri_mut() = http::Uri::from_static("/version");
        let response = call(&connection, &plain, request).await.ok()?;
        clock::date(response.headers())
    }
}

impl ReachedServer {
    /// Sends a request with the credentials.
    ///
    /// # Errors
    /// There is no complete response in time.
    pub(super) async fn call(
        &self,
        configuration: &Configuration,
        request: Request<Bytes>,
    ) -> io::Result<Response<Bytes>> {
        call(&self.connection, configuration, request).await
    }
}

async fn call(
    connection: &Connection,
    configuration: &Configuration,
    mut request: Request<Bytes>,
) -> io::Result<Response<Bytes>> {
    configuration.add_headers(request.headers_mut());
    if !request.body().is_empty() {
        let length = request.body().len().into();
        request.headers_mut().insert(CONTENT_LENGTH, length);
    }
    within(STEP_MAX, async {
        let sent = connection.send(request).await.map_err(io::Error::other)?;
        let (parts, body) = sent.response.into_parts();
        Ok(Response::from_parts(parts, read_all(body).await.map_err(io::Error::other)?))
    })
    .await
}

fn certificate_error(error: &io::Error) -> Option<&CertificateError> {
    match error.get_ref()?.downcast_ref()? {
        rustls::Error::InvalidCertificate(error) => Some(error),
        _ => None,
    }
}

/// Times of a certificate that does not count yet, or no longer; one of the two is known.
fn invalid_times(error: &CertificateError) -> Option<Validity> {
    let seconds = |time: &rustls::pki_types::UnixTime| i64::try_from(time.as_secs()).ok();
    match error {
        CertificateError::ExpiredContext { not_after, .. } => {
            Some(Validity { not_before: i64::MIN, not_after: seconds(not_after)? })
        }
        CertificateError::NotValidYetContext { not_before, .. } => {
            Some(Validity { not_before: seconds(not_before)?, not_after: i64::MAX })
        }
        _ => None,
    }
}
