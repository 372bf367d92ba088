//! Configuration of the API servers and of the agent's identity, as the files have it now.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use http::{
    HeaderMap, HeaderName, HeaderValue, Uri,
    header::{AUTHORIZATION, USER_AGENT},
    uri::{PathAndQuery, Scheme},
};
use kube::{
    Config,
    config::{AuthInfo, Cluster, ExecConfig},
};
use rustls::ClientConfig;
use secrecy::ExposeSecret;

use crate::{
    credentials::{
        exec_plugin::ExecCredentials,
        file::{self, FILE_BYTES_MAX},
        kubeconfig,
        setup_error::{Reason, SetupError},
    },
    transport::{
        address::{AddressError, ServerAddress},
        connector::Proxy,
        tls::{Identity, TlsError, TlsMaterial},
    },
};

/// User-Agent, which audit logs show.
const OWN_NAME: &str = concat!("cproxy/", env!("CARGO_PKG_VERSION"));

/// Longest token. Servers refuse longer headers.
const TOKEN_BYTES_MAX: u64 = 64 << 10;

/// Directory of a pod's ServiceAccount.
const SERVICE_ACCOUNT_DIR: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// The API servers to follow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ApiServer {
    /// A kubeconfig. Without it, the pod's ServiceAccount is used.
    pub kubeconfig: Option<PathBuf>,
    /// Addresses in order of preference, instead of the kubeconfig's or of the ClusterIP.
    pub addresses: Vec<ServerAddress>,
    /// The name expected in their certificates.
    pub tls_server_name: Option<String>,
}

impl std::fmt::Display for ApiServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.kubeconfig {
            Some(path) => write!(f, "API server of kubeconfig {}", path.display())?,
            None if self.addresses.first().is_some_and(ServerAddress::is_local) => write!(f, "API server")?,
            None => write!(f, "API server of the pod's ServiceAccount")?,
        }
        for (index, address) in self.addresses.iter().enumerate() {
            write!(f, "{}{address}", if index == 0 { ", at " } else { ", else " })?;
        }
        match &self.tls_server_name {
            Some(name) => write!(f, ", as {name}"),
            None => Ok(()),
        }
    }
}

/// Error of [`configure`].
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The kubeconfig cannot be used.
    #[error("--kubeconfig {0}: {1}")]
    Kubeconfig(PathBuf, SetupError),
    /// There is neither a kubeconfig nor a ServiceAccount.
    #[error(
        "no API server is known: pass --kubeconfig FILE, --apiserver URL or --manifests PATH, or run in a pod with a \
         ServiceAccount ({0})"
    )]
    NoServiceAccount(SetupError),
    /// There is an address, but there are no credentials.
    #[error(
        "no credentials for {0}: put token and ca.crt into {dir}, or pass --kubeconfig FILE ({1})",
        dir = SERVICE_ACCOUNT_DIR
    )]
    NoCredentials(ServerAddress, SetupError),
    /// The address is not that of a server.
    #[error("{0}: {1}")]
    Url(Uri, AddressError),
    /// The token cannot be read.
    #[error("token file {0}: {1}")]
    Token(PathBuf, io::Error),
    /// TLS or the credentials cannot be used.
    #[error("cannot set up the connection to {0}: {1}")]
    Setup(String, SetupError),
}

/// API servers and identity, as they were read.
#[derive(Clone, Debug)]
pub struct Configuration {
    /// Addresses in order of preference; at least one.
    pub(crate) servers: Vec<ServerAddress>,
    /// Name expected in their certificates, instead of the host of the address.
    pub(crate) server_name: Option<String>,
    pub(crate) material: TlsMaterial,
    pub(crate) proxy: Option<Proxy>,
    /// Value of the Authorization header.
    pub(crate) authorization: Option<HeaderValue>,
    /// Program that has the credentials, if no others are configured.
    pub(crate) exec: Option<ExecConfig>,
    /// Whether a file or program has a new token when this one expires.
    pub(crate) is_renewed: bool,
    /// Further headers of each request: impersonation.
    pub(crate) headers: Vec<(HeaderName, HeaderValue)>,
}

/// Reads the configuration; connects to nothing.
///
/// # Errors
/// The configuration is incomplete or invalid.
pub async fn configure(server: &ApiServer) -> Result<Configuration, ClientError> {
    let kubeconfig::ParsedKubeconfig { config, authorities_from } = match &server.kubeconfig {
        Some(path) => {
            let read = kubeconfig::read(path).await;
            read.map_err(|error| ClientError::Kubeconfig(path.clone(), error.into()))?
        }
        None => kubeconfig::ParsedKubeconfig {
            config: in_cluster(server.addresses.first()).await?,
            authorities_from: Some(format!("{SERVICE_ACCOUNT_DIR}/ca.crt")),
        },
    };
    let servers = if server.addresses.is_empty() {
        let url = config.cluster_url.clone();
        vec![ServerAddress::try_from(url.clone()).map_err(|error| match &server.kubeconfig {
            Some(path) => ClientError::Kubeconfig(path.clone(), Reason::Server(url, error).into()),
            None => ClientError::Url(url, error),
        })?]
    } else {
        server.addresses.clone()
    };
    let fail = |reason: Reason| match &server.kubeconfig {
        Some(path) => ClientError::Kubeconfig(path.clone(), reason.into()),
        None => ClientError::Setup(servers.first().map(ToString::to_string).unwrap_or_default(), reason.into()),
    };
    let user = &config.auth_info;
    let authorization = authorization(user)?.map(|value| secret_header(&value).map_err(fail)).transpose()?;
    let configuration = Configuration {
        server_name: server.tls_server_name.clone().or(config.tls_server_name),
        material: TlsMaterial {
            authorities: config.root_cert,
            authorities_from,
            identity: identity(user).map_err(fail)?,
            is_insecure: config.accept_invalid_certs,
        },
        proxy: config.proxy_url.map(proxy).transpose().map_err(fail)?,
        exec: user.exec.clone().filter(|_| authorization.is_none()),
        authorization,
        is_renewed: user.token_file.is_some() || user.exec.is_some(),
        headers: impersonation(user).map_err(fail)?,
        servers: servers.clone(),
    };
    configuration.tls().map_err(Reason::Tls).map_err(fail)?;
    Ok(configuration)
}

impl Configuration {
    /// Whether credentials come from a program.
    #[must_use]
    pub fn has_exec_plugin(&self) -> bool {
        self.exec.is_some()
    }

    /// IP addresses of the servers that are known without a nameserver.
    #[must_use]
    pub fn known_addresses(&self) -> Vec<std::net::IpAddr> {
        self.servers.iter().flat_map(ServerAddress::known_addresses).collect()
    }

    /// Adds what a program has returned.
    ///
    /// # Errors
    /// The token is no header.
    pub(crate) fn add(&mut self, credentials: ExecCredentials) -> Result<(), Reason> {
        if let Some(token) = credentials.token {
            self.authorization = Some(secret_header(&format!("Bearer {token}"))?);
        }
        self.material.identity = credentials.identity.or(self.material.identity.take());
        Ok(())
    }

    /// Adds what each request carries.
    pub(crate) fn add_headers(&self, headers: &mut HeaderMap) {
        headers.insert(USER_AGENT, HeaderValue::from_static(OWN_NAME));
        headers.extend(self.authorization.clone().map(|value| (AUTHORIZATION, value)));
        for (name, value) in &self.headers {
            headers.append(name, value.clone());
        }
    }

    /// Hash of all that a connection is made of. The token is not part of it: each request carries the present one.
    pub(crate) fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&self.servers, &self.server_name, &self.material).hash(&mut hasher);
        self.proxy.as_ref().map(|proxy| (&proxy.url, &proxy.authorization)).hash(&mut hasher);
        hasher.finish()
    }

    /// Whether it presents anything by which a server could know the agent.
    pub(crate) fn has_credentials(&self) -> bool {
        self.authorization.is_some() || self.material.identity.is_some()
    }

    /// Configuration of TLS; `None` if no server speaks it, so that a VM behind a local socket needs no authorities.
    ///
    /// # Errors
    /// Certificates or keys cannot be used.
    pub(crate) fn tls(&self) -> Result<Option<Arc<ClientConfig>>, TlsError> {
        let has_tls = self.servers.iter().any(|address| self.tls_name(address).is_some());
        has_tls.then(|| self.material.client_config()).transpose()
    }

    /// Name for TLS with this server; `None`: no TLS. Over a local socket there is TLS only if a name is given.
    pub(crate) fn tls_name<'a>(&'a self, address: &'a ServerAddress) -> Option<&'a str> {
        if address.is_https() {
            self.server_name.as_deref().or_else(|| address.host())
        } else {
            self.server_name.as_deref().filter(|_| address.is_local())
        }
    }
}

impl std::fmt::Display for Configuration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, address) in self.servers.iter().enumerate() {
            write!(f, "{}{address}", if index == 0 { "" } else { ", else " })?;
        }
        Ok(())
    }
}

/// Configuration with the pod's ServiceAccount. With an address it does not need KUBERNETES_SERVICE_HOST, a ClusterIP
/// that only cproxy serves. Behind a local socket, a proxy or relay may have credentials of its own.
async fn in_cluster(address: Option<&ServerAddress>) -> Result<Config, ClientError> {
    let Some(address) = address else {
        return Config::incluster_env().map_err(|error| {
            let needed = ["KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"];
            let unset = needed.into_iter().find(|name| std::env::var_os(name).is_none());
            ClientError::NoServiceAccount(unset.map_or_else(|| Reason::InCluster(error), Reason::NotSet).into())
        });
    };
    let file = |name: &str| format!("{SERVICE_ACCOUNT_DIR}/{name}");
    let is_needed = |path: &String| !address.is_local() || Path::new(path).exists();
    let (authority, token) = (Some(file("ca.crt")).filter(is_needed), Some(file("token")).filter(is_needed));
    let server = Some(if address.is_local() { LOCAL_SERVER.to_owned() } else { address.to_string() });
    let cluster = Cluster { server, certificate_authority: authority, ..Cluster::default() };
    let user = AuthInfo { token_file: token, ..AuthInfo::default() };
    kubeconfig::build(cluster, user).await.map_err(|error| ClientError::NoCredentials(address.clone(), error.into()))
}

/// URL that stands for a local socket in a kubeconfig.
const LOCAL_SERVER: &str = "http://localhost";

/// Value of the Authorization header, in client-go's order. As there, a token's file comes before the token beside it.
fn authorization(user: &AuthInfo) -> Result<Option<String>, ClientError> {
    if let Some(path) = &user.token_file {
        let token = read_token(Path::new(path)).map_err(|error| ClientError::Token(path.into(), error))?;
        return Ok(Some(format!("Bearer {token}")));
    }
    if let Some(token) = &user.token {
        return Ok(Some(format!("Bearer {}", token.expose_secret())));
    }
    let (Some(name), Some(password)) = (&user.username, &user.password) else { return Ok(None) };
    Ok(Some(basic(name, password.expose_secret())))
}

/// Token in a file. An empty one is about to be written.
fn read_token(path: &Path) -> io::Result<String> {
    let bytes = file::read(path, TOKEN_BYTES_MAX)?;
    match str::from_utf8(&bytes).map(str::trim) {
        Ok("") => Err(io::Error::other("it is empty")),
        Ok(token) => Ok(token.to_owned()),
        Err(_) => Err(io::Error::other("it is not UTF-8")),
    }
}

fn basic(name: &str, password: &str) -> String {
    cproxy_secrets::remember(password);
    let encoded = BASE64_STANDARD.encode(format!("{name}:{password}"));
    cproxy_secrets::remember(&encoded);
    format!("Basic {encoded}")
}

fn secret_header(value: &str) -> Result<HeaderValue, Reason> {
    cproxy_secrets::remember(value.split_once(' ').map_or(value, |(_, secret)| secret));
    let mut header = HeaderValue::try_from(value).map_err(|_| Reason::TokenCharacter)?;
    header.set_sensitive(true);
    Ok(header)
}

/// Client certificate and key in PEM.
fn identity(user: &AuthInfo) -> Result<Option<Identity>, Reason> {
    if let Some(provider) = &user.auth_provider {
        return Err(Reason::AuthProvider(provider.name.clone()));
    }
    let key_data = user.client_key_data.as_ref().map(ExposeSecret::expose_secret);
    let certificate =
        load(user.client_certificate_data.as_deref(), user.client_certificate.as_deref(), "client-certificate")?;
    let key = load(key_data, user.client_key.as_deref(), "client-key")?;
    match (certificate, key) {
        (Some(certificate), Some(key)) => Ok(Some(Identity { certificate, key })),
        (None, None) => Ok(None),
        (Some(_), None) => Err(Reason::NoClientKey),
        (None, Some(_)) => Err(Reason::NoClientCertificate),
    }
}

/// Inline data in base64, or the content of a file.
fn load(data: Option<&str>, path: Option<&str>, name: &'static str) -> Result<Option<Vec<u8>>, Reason> {
    match (data.filter(|data| !data.is_empty()), path) {
        (Some(data), _) => kubeconfig::decode_base64(data, &format!("{name}-data of its user")).map(Some),
        (None, Some(path)) => file::read(Path::new(path), FILE_BYTES_MAX)
            .map(Some)
            .map_err(|error| Reason::UserFile(name, path.to_owned(), error)),
        (None, None) => Ok(None),
    }
}

fn proxy(url: Uri) -> Result<Proxy, Reason> {
    let shown = url.host().unwrap_or_default();
    if url.scheme() != Some(&Scheme::HTTP) || shown.is_empty() {
        return Err(Reason::ProxyScheme(url.scheme_str().unwrap_or("no scheme").to_owned()));
    }
    let authority = url.authority().map(|authority| authority.as_str().to_owned()).unwrap_or_default();
    let Some((user, host)) = authority.rsplit_once('@') else { return Ok(Proxy { url, authorization: None }) };
    let (name, password) = user.split_once(':').unwrap_or((user, ""));
    let url = Uri::builder().scheme(Scheme::HTTP).authority(host).path_and_query(PathAndQuery::from_static("/"));
    let url = url.build().map_err(Reason::ProxyUrl)?;
    Ok(Proxy { url, authorization: Some(basic(name, password)) })
}

/// Headers of a user who acts as another one.
fn impersonation(user: &AuthInfo) -> Result<Vec<(HeaderName, HeaderValue)>, Reason> {
    let groups = user.impersonate_groups.iter().flatten().map(|group| ("impersonate-group".to_owned(), group));
    let extra = user.impersonate_user_extra.iter().flatten().flat_map(|(name, values)| {
        let name = format!("impersonate-extra-{}", name.to_lowercase());
        values.iter().map(move |value| (name.clone(), value))
    });
    let one = |name: &str, value: &'_ Option<String>| value.as_ref().map(|_| name.to_owned());
    let user_name = one("impersonate-user", &user.impersonate).zip(user.impersonate.as_ref());
    let uid = one("impersonate-uid", &user.impersonate_uid).zip(user.impersonate_uid.as_ref());
    let headers = user_name.into_iter().chain(uid).chain(groups).chain(extra);
    let header = |(name, value): (String, &String)| {
        let header = HeaderName::try_from(&name).ok().zip(HeaderValue::try_from(value).ok());
        header.ok_or_else(|| Reason::Impersonation(name, value.clone()))
    };
    headers.map(header).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_speaks_http_and_may_need_a_password() {
        let of = |url: &'static str| proxy(Uri::from_static(url));
        let plain = of("http://proxy:3128").unwrap();
        assert_eq!((plain.url.to_string().as_str(), plain.authorization), ("http://proxy:3128/", None));
        let named = of("http://u:p@proxy:3128/").unwrap();
        assert_eq!(named.url.to_string(), "http://proxy:3128/");
        assert_eq!(named.authorization.as_deref(), Some("Basic dTpw"));
        for url in ["https://proxy", "socks5://proxy:1080", "proxy:3128"] {
            assert!(of(url).unwrap_err().to_string().contains("HTTP proxies"), "{url}");
        }
    }

    #[tokio::test]
    async fn a_kubeconfig_with_http_names_a_server_on_this_machine() {
        let path = std::env::temp_dir().join(format!("cproxy-http-{}", std::process::id()));
        let configured = async |server: &str| {
            let text = format!(
                "current-context: c\ncontexts: [{{name: c, context: {{cluster: k}}}}]\n\
                 clusters: [{{name: k, cluster: {{server: '{server}'}}}}]\n"
            );
            std::fs::write(&path, text).unwrap();
            let server = ApiServer { kubeconfig: Some(path.clone()), ..ApiServer::default() };
            configure(&server).await.map(|_| ()).map_err(|error| error.to_string())
        };
        assert_eq!(configured("http://127.0.0.1:8080").await, Ok(()));
        let error = configured("http://10.0.0.1:8080").await.unwrap_err();
        let named = format!("--kubeconfig {}: its cluster's server http://10.0.0.1:8080/: over http", path.display());
        assert!(error.starts_with(&named) && error.contains("use https"), "{error}");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_user_may_act_as_another_one() {
        let user = AuthInfo {
            impersonate: Some("jane".to_owned()),
            impersonate_groups: Some(vec!["a".to_owned(), "b".to_owned()]),
            impersonate_user_extra: Some([("Scopes".to_owned(), vec!["x".to_owned()])].into()),
            ..AuthInfo::default()
        };
        let headers = impersonation(&user).unwrap();
        let texts: Vec<_> =
            headers.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect();
        assert_eq!(
            texts,
            ["impersonate-user: jane", "impersonate-group: a", "impersonate-group: b", "impersonate-extra-scopes: x"]
        );
        let broken = AuthInfo { impersonate: Some("a\nb".to_owned()), ..AuthInfo::default() };
        assert!(impersonation(&broken).is_err());
    }

    #[test]
    fn credentials_that_cannot_be_used_are_named() {
        let error = |user: AuthInfo| identity(&user).unwrap_err().to_string();
        let key = || Some("k".to_owned());
        assert!(error(AuthInfo { client_key: key(), ..AuthInfo::default() }).starts_with("client-key k of its user: "));
        let data = AuthInfo { client_certificate_data: Some("?".to_owned()), ..AuthInfo::default() };
        assert!(error(data).starts_with("client-certificate-data of its user is not base64: "));
        let half = AuthInfo { client_certificate_data: Some("YQ==".to_owned()), ..AuthInfo::default() };
        assert_eq!(error(half), "its user has a client-certificate without a client-key");
        assert!(secret_header("Bearer a\nb").unwrap_err().to_string().contains("line feed"));
    }

    #[test]
    fn a_token_that_is_about_to_be_written_is_not_used() {
        let path = std::env::temp_dir().join(format!("cproxy-token-{}", std::process::id()));
        let read = |content: &[u8]| {
            std::fs::write(&path, content).unwrap();
            read_token(&path).map_err(|error| error.to_string())
        };
        assert_eq!(read(b" a\n"), Ok("a".to_owned()));
        assert_eq!(read(b"").unwrap_err(), "it is empty");
        assert_eq!(read(b"\n").unwrap_err(), "it is empty");
        assert_eq!(read(b"\xff").unwrap_err(), "it is not UTF-8");
        assert_eq!(read(&[b'x'; 1 << 20]).unwrap_err(), "longer than 65536 bytes");
        std::fs::remove_file(path).unwrap();
    }
}
