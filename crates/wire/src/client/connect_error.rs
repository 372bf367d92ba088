//! Reasons why there is no connection.

use std::{fmt, io};

use crate::{
    credentials::setup_error::Reason,
    error_text::chain,
    transport::{address::ServerAddress, tls::TlsError},
};

/// Reason why a server was not reached.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DialError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Http2(#[from] h2::Error),
    #[error(transparent)]
    Http1(#[from] hyper::Error),
    #[error("HTTP/2 without PING")]
    NoPing,
    #[error("the connection was closed")]
    Closed,
}

impl DialError {
    pub(crate) fn is_timeout(&self) -> bool {
        matches!(self, Self::Io(error) if error.kind() == io::ErrorKind::TimedOut)
    }
}

/// Part of an attempt to connect that has failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum AttemptError {
    #[error(transparent)]
    Tls(TlsError),
    /// The only server.
    #[error("{}", chain(.0))]
    OnlyServer(DialError),
    /// One of several servers.
    #[error("{0}: {text}", text = chain(.1))]
    Server(ServerAddress, DialError),
}

/// All that has failed in an attempt to connect.
#[derive(Debug)]
pub(super) struct AttemptErrors(pub(super) Vec<AttemptError>);

impl fmt::Display for AttemptErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, error) in self.0.iter().enumerate() {
            write!(f, "{}{error}", if index == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}

/// Reason why a request has no connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    /// There are no credentials.
    #[error(transparent)]
    Credentials(#[from] Reason),
    /// No server can be reached.
    #[error("{0}")]
    NotReached(AttemptErrors),
}
