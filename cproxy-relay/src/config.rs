//! Validated configuration; no I/O.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use cproxy_daemon::ListenAddress as OwnAddress;

use crate::listen::{address::ListenAddress, tls::TlsFiles};

/// Way to know who a client is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Authentication {
    /// A token that the API server reviews, a client certificate, or the place of a local peer
    TokenReview,
    /// Nothing; on loopback, unix sockets and vsock only
    None,
}

/// Origin of the policies of pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum PolicySource {
    /// The API server's NetworkPolicies, Pods and Namespaces
    Resolve,
    /// Another relay, which the kubeconfig names, and which resolves them
    Follow,
}

/// Configuration of the relay.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// A kubeconfig; `None`: the pod's ServiceAccount.
    pub(crate) kubeconfig: Option<PathBuf>,
    pub(crate) listen: Vec<ListenAddress>,
    pub(crate) tls: Option<TlsFiles>,
    pub(crate) authentication: Authentication,
    /// Audiences of tokens; empty: those of the API server.
    pub(crate) token_audiences: Vec<String>,
    pub(crate) views: Option<PathBuf>,
    /// Origin of the policies of pods; `None`: none are served.
    pub(crate) policies: Option<PolicySource>,
    pub(crate) history_bytes: usize,
    pub(crate) connections_max: usize,
    pub(crate) metrics_address: Option<SocketAddr>,
    pub(crate) drain_time: Duration,
}

/// Contradiction between settings.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    /// Only one of the files of a certificate is given.
    #[error("--tls-cert-file and --tls-private-key-file belong together: pass both or none")]
    HalfTls,
    /// Certificates of clients need TLS.
    #[error("--client-ca-file needs --tls-cert-file and --tls-private-key-file")]
    ClientAuthorityWithoutTls,
    /// Plain HTTP would leave the machine.
    #[error(
        "--listen {0}: plain HTTP is for loopback, unix and vsock only: pass --tls-cert-file and --tls-private-key-file"
    )]
    PlainHttp(ListenAddress),
    /// Everybody could connect.
    #[error("--listen {0}: --authentication none is for loopback, unix and vsock only")]
    Open(ListenAddress),
    /// No token is reviewed.
    #[error("--token-audiences is for --authentication token-review")]
    AudiencesWithoutReviews,
    /// An audience is empty.
    #[error("--token-audiences has an empty audience: leave it out")]
    EmptyAudience,
    /// Two listeners have one address.
    #[error("--listen {0}: the address is there twice: leave one out")]
    Twice(ListenAddress),
    /// Metrics and a listener have one address.
    #[error("--metrics-bind-address {0}: --listen has the same address: choose another port")]
    MetricsAndListener(SocketAddr),
}

/// Files of TLS from their flags.
///
/// # Errors
/// One is missing.
pub(crate) fn tls_files(
    certificate: Option<&Path>,
    key: Option<&Path>,
    client_authority: Option<&Path>,
) -> Result<Option<TlsFiles>, ConfigError> {
    match (certificate, key) {
        (Some(certificate), Some(key)) => Ok(Some(TlsFiles {
            certificate: certificate.to_owned(),
            key: key.to_owned(),
            client_authority: client_authority.map(Path::to_owned),
        })),
        (None, None) if client_authority.is_some() => Err(ConfigError::ClientAuthorityWithoutTls),
        (None, None) => Ok(None),
        _ => Err(ConfigError::HalfTls),
    }
}

impl Config {
    /// Checks that each listener has an address of its own, and that none gives away more than it should.
    ///
    /// # Errors
    /// One has not, or does.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let mut others = self.listen.iter().filter(|address| !address.has_any_port());
        while let Some(address) = others.next() {
            if others.clone().any(|other| other == address) {
                return Err(ConfigError::Twice(address.clone()));
            }
            if let (ListenAddress::Own(OwnAddress::Tcp(address)), Some(metrics)) = (address, self.metrics_address)
                && *address == metrics
            {
                return Err(ConfigError::MetricsAndListener(metrics));
            }
        }
        if self.authentication == Authentication::None && !self.token_audiences.is_empty() {
            return Err(ConfigError::AudiencesWithoutReviews);
        }
        if self.token_audiences.iter().any(String::is_empty) {
            return Err(ConfigError::EmptyAudience);
        }
        for address in self.listen.iter().filter(|address| !address.is_local()) {
            if self.tls.is_none() {
                return Err(ConfigError::PlainHttp(address.clone()));
            }
            if self.authentication == Authentication::None {
                return Err(ConfigError::Open(address.clone()));
            }
        }
        Ok(())
    }
}
