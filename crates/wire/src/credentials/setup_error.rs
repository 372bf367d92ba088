//! Reasons why servers and credentials, as they are configured, cannot be used.

use std::{fmt, io, process::ExitStatus, str::Utf8Error};

use http::Uri;
use kube::config::{InClusterError, KubeconfigError};

use crate::{
    error_text::{chain, first_line},
    transport::{
        address::{AddressError, has_credentials},
        tls::TlsError,
    },
};

/// Reason why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct SetupError(Box<Reason>);

impl From<Reason> for SetupError {
    fn from(reason: Reason) -> Self {
        Self(Box::new(reason))
    }
}

/// The reason itself. Its messages follow the name of the kubeconfig or of the server.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Reason {
    #[error("{0}")]
    File(io::Error),
    #[error("not YAML: {0}")]
    Yaml(String),
    #[error("it is not UTF-8: {0}")]
    Utf8(Utf8Error),
    #[error("it is not UTF-16")]
    Utf16,
    #[error("it has no current-context")]
    NoCurrentContext,
    #[error("it has no context {0}, which is its current-context")]
    NoContext(String),
    #[error("its context {0} names no cluster")]
    NoClusterName(String),
    #[error("it has no cluster {0}, which its current context names")]
    NoCluster(String),
    /// A field of another type, by its path.
    #[error("{0}: {1}")]
    Field(String, String),
    /// The same of a user, whose values are secret.
    #[error("{0}: a field has a value of another type than it should")]
    UserField(String),
    #[error("{}", chain(.0))]
    Kubeconfig(KubeconfigError),
    #[error("its cluster's server{shown}: {1}", shown = Shown(.0))]
    Server(Uri, AddressError),
    #[error("certificate-authority {0} of its cluster: {1}")]
    Authority(String, io::Error),
    #[error("its cluster has insecure-skip-tls-verify beside a certificate-authority: remove one of them")]
    InsecureWithAuthority,
    #[error("its cluster's proxy-url has {0}; cproxy uses HTTP proxies (http://HOST:PORT)")]
    ProxyScheme(String),
    #[error("its cluster's proxy-url: {0}")]
    ProxyUrl(http::Error),
    /// A field that should be in base64.
    #[error("{0} is not base64: {1} (`base64 -w0 FILE` makes it)")]
    Base64(String, base64::DecodeError),
    /// A file of the user: field, path.
    #[error("{0} {1} of its user: {2}")]
    UserFile(&'static str, String, io::Error),
    #[error("its user has the auth-provider {0:?}, which Kubernetes has removed: use exec")]
    AuthProvider(String),
    #[error("its user has a client-certificate without a client-key")]
    NoClientKey,
    #[error("its user has a client-key without a client-certificate")]
    NoClientCertificate,
    #[error("the token has a line feed or another control character")]
    TokenCharacter,
    #[error("its user cannot act as another one: {0}: {1:?} is no header")]
    Impersonation(String, String),
    #[error("its user's exec has no command")]
    NoCommand,
    #[error("exec plugin {0}: {1}")]
    Exec(String, ExecError),
    #[error(transparent)]
    Tls(TlsError),
    /// A variable of the environment that a pod has.
    #[error("{0} is not set")]
    NotSet(&'static str),
    #[error("{}", first_line(.0))]
    InCluster(InClusterError),
}

/// Reason why a program has returned no credentials.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExecError {
    #[error("no program can be run since system calls are filtered; start the agent again")]
    Refused,
    #[error("{0}")]
    Run(io::Error),
    #[error("{0}")]
    Information(serde_json::Error),
    /// It has failed, with its own message or none.
    #[error("{0}{separator}{1}", separator = if .1.is_empty() { "" } else { ": " })]
    Status(ExitStatus, String),
    /// The parser's message may quote a value.
    #[error("its output is no ExecCredential (line {}, column {})", .0.line(), .0.column())]
    Output(serde_json::Error),
    #[error("its ExecCredential has no status")]
    NoStatus,
    #[error("its ExecCredential needs both clientCertificateData and clientKeyData")]
    HalfIdentity,
    #[error("the token of its ExecCredential has a line feed or another control character")]
    TokenCharacter,
    #[error("its ExecCredential has neither a token nor a client certificate")]
    Nothing,
    #[error("expirationTimestamp of its ExecCredential: {0}")]
    Expiration(jiff::Error),
}

/// URL of a server behind a space; nothing if it has credentials, which it should not have.
struct Shown<'a>(&'a Uri);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if has_credentials(self.0) { Ok(()) } else { write!(f, " {}", self.0) }
    }
}
