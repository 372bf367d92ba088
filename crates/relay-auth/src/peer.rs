//! Peers of connections, with their certificates.

use std::sync::Arc;

use crate::{
    Identity, PeerAddress, Refusal,
    certificate::{self, Certificate},
};

/// Other end of a connection: where it is, and the identity of its client certificate.
#[derive(Clone, Debug)]
pub struct Peer {
    address: PeerAddress,
    certificate: Option<Result<Certificate, Refusal>>,
}

impl Peer {
    /// Peer of a new connection. `certificate` is the client's own certificate in DER, whose chain has been verified.
    #[must_use]
    pub fn new(address: PeerAddress, certificate: Option<&[u8]>) -> Self {
        Self { address, certificate: certificate.map(certificate::read) }
    }

    /// Its address.
    #[must_use]
    pub fn address(&self) -> &PeerAddress {
        &self.address
    }

    /// Identity of the client certificate, if there is one, or the reason why it gives none now.
    pub(crate) fn certificate(&self) -> Option<Result<Arc<Identity>, Refusal>> {
        Some(match self.certificate.as_ref()? {
            Ok(certificate) if certificate.has_expired() => Err(certificate::expired()),
            Ok(certificate) => Ok(certificate.identity.clone()),
            Err(refusal) => Err(refusal.clone()),
        })
    }

    /// Whether the client certificate has expired since the connection began.
    #[must_use]
    pub fn has_expired(&self) -> bool {
        matches!(&self.certificate, Some(Ok(certificate)) if certificate.has_expired())
    }
}
