//! Configuration of the API server, and a client for it.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use cproxy_network::SocketSetup;
use http::{HeaderValue, Request, Uri, header::AUTHORIZATION};
use hyper_util::{client::legacy, rt::TokioExecutor};
use kube::{
    Client, Config,
    client::ConfigExt,
    config::{AuthInfo, Cluster},
};
use tower::ServiceBuilder;

use super::{
    connector::Connector,
    error_text::{chain, first_line},
    kubeconfig,
    rate_limit::RateLimited,
};

/// Directory of a pod's ServiceAccount.
const SERVICE_ACCOUNT_DIR: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Bytes read from a connection at once; also the longest head of a response.
const READ_BYTES_MAX: usize = 64 << 10;

/// The API server to follow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ApiServer {
    /// A kubeconfig. Without it, the pod's ServiceAccount is used.
    pub kubeconfig: Option<PathBuf>,
    /// Its address, instead of the kubeconfig's or of the ClusterIP.
    pub url: Option<Uri>,
    /// The name expected in its certificate.
    pub tls_server_name: Option<String>,
}

impl std::fmt::Display for ApiServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.kubeconfig {
            Some(path) => write!(f, "API server of kubeconfig {}", path.display())?,
            None => write!(f, "API server of the pod's ServiceAccount")?,
        }
        if let Some(url) = &self.url {
            write!(f, ", at {url}")?;
        }
        match &self.tls_server_name {
            Some(name) => write!(f, ", as {name}"),
            None => Ok(()),
        }
    }
}

/// Error of [`configure`] and [`client`].
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The kubeconfig cannot be used.
    #[error("--kubeconfig {0}: {1}")]
    Kubeconfig(PathBuf, String),
    /// There is neither a kubeconfig nor a ServiceAccount.
    #[error(
        "no API server is known: pass --kubeconfig FILE, --apiserver URL or --manifests PATH, or run in a pod with a \
         ServiceAccount ({0})"
    )]
    NoServiceAccount(String),
    /// There is an address, but there are no credentials.
    #[error(
        "no credentials for {0}: put token and ca.crt into {dir}, or pass --kubeconfig FILE ({1})",
        dir = SERVICE_ACCOUNT_DIR
    )]
    NoCredentials(Uri, String),
    /// The address is not that of a server.
    #[error("{0}: expected the API server's URL like https://10.0.0.1:6443")]
    Url(Uri),
    /// The token cannot be read.
    #[error("token file {0}: {1}")]
    Token(PathBuf, std::io::Error),
    /// TLS or the credentials could not be set up.
    #[error("cannot set up the connection to {0}: {1}")]
    Setup(Uri, String),
}

/// Reads the configuration; connects to nothing.
///
/// # Errors
/// The configuration is incomplete or invalid.
pub async fn configure(server: &ApiServer) -> Result<Config, ClientError> {
    let mut config = match &server.kubeconfig {
        Some(path) => kubeconfig::read(path).await.map_err(|message| ClientError::Kubeconfig(path.clone(), message))?,
        None => in_cluster(server.url.as_ref()).await?,
    };
    if let Some(url) = &server.url {
        config.cluster_url = url.clone();
    }
    if !is_api_server_url(&config.cluster_url) {
        return Err(ClientError::Url(config.cluster_url));
    }
    config.tls_server_name = server.tls_server_name.clone().or(config.tls_server_name);
    if let Some(path) = &config.auth_info.token_file {
        std::fs::read_to_string(path).map_err(|error| ClientError::Token(path.into(), error))?;
    }
    Ok(config)
}

/// Whether a connection to this URL is possible: kube expects that and panics without a scheme.
#[must_use]
pub fn is_api_server_url(url: &Uri) -> bool {
    let is_port = |port: &str| port.is_empty() || port.parse::<u16>().is_ok_and(|port| port > 0);
    // `Uri` has no port if the number is too large.
    let port =
        url.authority().and_then(|authority| authority.as_str().rsplit_once(authority.host())?.1.strip_prefix(':'));
    matches!(url.scheme_str(), Some("https" | "http")) && url.host().is_some() && port.is_none_or(is_port)
}

/// Makes a client; connects to nothing yet. `setup` is applied to each socket before it connects.
///
/// # Errors
/// TLS or the credentials cannot be set up.
pub fn client(config: &Config, setup: SocketSetup) -> Result<Client, ClientError> {
    build(config, setup).map_err(|error| ClientError::Setup(config.cluster_url.clone(), chain(&error)))
}

/// Configuration with the pod's ServiceAccount. With a URL it does not need KUBERNETES_SERVICE_HOST, a ClusterIP that
/// only cproxy serves.
async fn in_cluster(url: Option<&Uri>) -> Result<Config, ClientError> {
    let Some(url) = url else {
        let config = Config::incluster_env().map_err(|error| ClientError::NoServiceAccount(first_line(&error)))?;
        tracing::warn!(
            "KUBERNETES_SERVICE_HOST is usually a ClusterIP, and cproxy does not use its own table: \
             if it cannot be reached, pass --apiserver with the API server's real address"
        );
        return Ok(config);
    };
    let file = |name: &str| format!("{SERVICE_ACCOUNT_DIR}/{name}");
    let cluster =
        Cluster { server: Some(url.to_string()), certificate_authority: Some(file("ca.crt")), ..Cluster::default() };
    let user = AuthInfo { token_file: Some(file("token")), ..AuthInfo::default() };
    kubeconfig::build(cluster, user).await.map_err(|error| ClientError::NoCredentials(url.clone(), error))
}

fn build(config: &Config, setup: SocketSetup) -> kube::Result<Client> {
    let mut config = config.clone();
    let token = config.auth_info.token_file.take().map(TokenFile::new);
    let https = config.rustls_https_connector_with_connector(Connector::new(setup, config.connect_timeout))?;
    let service = ServiceBuilder::new()
        .layer_fn(RateLimited::new)
        .layer(config.base_uri_layer())
        .layer(config.extra_headers_layer()?)
        .option_layer(config.auth_layer()?)
        .map_request(move |request| authorize(token.as_ref(), request))
        .map_err(tower::BoxError::from)
        .service(legacy::Client::builder(TokioExecutor::new()).http1_max_buf_size(READ_BYTES_MAX).build(https));
    Ok(Client::new(service, config.default_namespace))
}

/// Token that is read again for each request, of which there are few. kube keeps the file's text for a minute and
/// treats a line feed as a part of the token.
#[derive(Clone)]
struct TokenFile {
    path: PathBuf,
    last: Arc<Mutex<Option<HeaderValue>>>,
}

impl TokenFile {
    fn new(path: String) -> Self {
        Self { path: path.into(), last: Arc::default() }
    }

    /// The present header. If the file is gone, the last token is used, as in client-go.
    fn header(&self) -> Option<HeaderValue> {
        let text = std::fs::read_to_string(&self.path).ok();
        let now = text.and_then(|text| HeaderValue::try_from(format!("Bearer {}", text.trim())).ok());
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if now.is_some() {
            *last = now;
        }
        last.clone()
    }
}

fn authorize<Body>(token: Option<&TokenFile>, mut request: Request<Body>) -> Request<Body> {
    if let Some(mut header) = token.and_then(TokenFile::header) {
        header.set_sensitive(true);
        request.headers_mut().insert(AUTHORIZATION, header);
    }
    request
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_api_server_url_has_a_scheme_a_host_and_a_possible_port() {
        let is_url = |text: &str| is_api_server_url(&text.parse().unwrap());
        for url in ["https://1.2.3.4", "http://[::1]:8080/a:b", "https://api:6443/", "https://u:1@api"] {
            assert!(is_url(url), "{url}");
        }
        for url in ["1.2.3.4", "1.2.3.4:6443", "/a", "ftp://1.2.3.4", "https://1.2.3.4:65536", "https://[::1]:0"] {
            assert!(!is_url(url), "{url}");
        }
    }
}
