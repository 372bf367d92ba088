//! TLS towards an API server.

use std::{io, sync::Arc};

use rustls::{
    AlertDescription, CertificateError, ClientConfig, DigitallySignedStruct, Error, InconsistentKeys, RootCertStore,
    SignatureScheme,
    client::{
        Resumption, VerifierBuilderError, WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        verify_server_name,
    },
    crypto::{CryptoProvider, ring},
    pki_types::{
        CertificateDer, PrivateKeyDer, ServerName, UnixTime,
        pem::{self, PemObject},
    },
    server::ParsedCertificate,
    sign::{CertifiedKey, SingleCertAndKey},
};
use rustls_platform_verifier::BuilderVerifierExt;
use tokio_rustls::{TlsConnector, client::TlsStream};

use crate::transport::connector::Stream;

/// Protocols in order of preference (RFC 7301).
const PROTOCOLS: [&[u8]; 2] = [HTTP2, b"http/1.1"];
const HTTP2: &[u8] = b"h2";

/// Certificate authorities and client certificate.
#[derive(Clone, Debug, Default, Hash)]
pub(crate) struct TlsMaterial {
    /// Certificates of trusted authorities in DER; `None`: those of the system.
    pub(crate) authorities: Option<Vec<Vec<u8>>>,
    /// The place of these certificates, for messages.
    pub(crate) authorities_from: Option<String>,
    pub(crate) identity: Option<Identity>,
    /// Accept any certificate.
    pub(crate) is_insecure: bool,
}

/// Client certificate with its chain, and its key, in PEM.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Identity {
    pub(crate) certificate: Vec<u8>,
    pub(crate) key: Vec<u8>,
}

/// Part of the material that cannot be used. Of authorities, the first value is their place.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TlsError {
    #[error("{0}")]
    Versions(Error),
    #[error("{0}: it has no certificate in PEM: put the API server's authority there")]
    NoAuthority(String),
    #[error("{0}: no certificate of it can be read: put the API server's authority there")]
    UnreadableAuthorities(String),
    #[error("{0}: {1}")]
    Authorities(String, VerifierBuilderError),
    #[error("the system's authorities: {0}")]
    SystemAuthorities(Error),
    #[error("client certificate: {0}")]
    Certificate(pem::Error),
    #[error("client certificate: it has no certificate in PEM")]
    NoCertificate,
    #[error("client certificate: it is not a certificate")]
    NotACertificate,
    #[error("client key: {0}")]
    Key(pem::Error),
    #[error("client key: it has no private key in PEM")]
    NoKey,
    #[error("client key: {0}; it may be {expected}", expected = NOT_SUPPORTED)]
    KeyKind(Error),
    #[error("client certificate and key: {0}")]
    Mismatch(Error),
}

impl TlsMaterial {
    /// Configuration of a TLS client.
    ///
    /// # Errors
    /// A part of the material cannot be used.
    pub(crate) fn client_config(&self) -> Result<Arc<ClientConfig>, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions();
        let builder = builder.map_err(TlsError::Versions)?;
        let builder = match &self.authorities {
            _ if self.is_insecure => {
                let verifier = Verifier { provider: provider.clone(), trust: Trust::Any };
                builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier))
            }
            Some(certificates) => {
                let place = self.authorities_from.as_deref().unwrap_or("certificate authority");
                let trusted = Trusted::new(certificates, place, provider.clone())?;
                let verifier = Verifier { provider: provider.clone(), trust: Trust::These(trusted) };
                builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier))
            }
            None => builder.with_platform_verifier().map_err(TlsError::SystemAuthorities)?,
        };
        let mut config = match &self.identity {
            Some(identity) => builder.with_client_cert_resolver(Arc::new(identity.resolver(&provider)?)),
            None => builder.with_no_client_auth(),
        };
        config.alpn_protocols = PROTOCOLS.map(Vec::from).into();
        // Connections are few and long.
        config.resumption = Resumption::disabled();
        Ok(Arc::new(config))
    }
}

/// Makes a TLS connection over `stream`. Returns it with whether the server chose HTTP/2.
pub(crate) async fn handshake(
    config: Arc<ClientConfig>,
    name: &str,
    stream: Box<dyn Stream>,
) -> io::Result<(TlsStream<Box<dyn Stream>>, bool)> {
    let name = ServerName::try_from(name.to_owned())
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, format!("{name:?} is not the name of a server")))?;
    let stream = TlsConnector::from(config).connect(name, stream).await?;
    let is_http2 = stream.get_ref().1.alpn_protocol() == Some(HTTP2);
    Ok((stream, is_http2))
}

/// The failure of a handshake, with its cause and a remedy where rustls names neither.
pub(crate) fn explain(error: &io::Error, material: &TlsMaterial) -> String {
    let Some(cause) = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) else { return error.to_string() };
    let authorities = material.authorities_from.as_deref().unwrap_or("the system's certificate authorities");
    match cause {
        // A new authority often has the name of the old one.
        Error::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::BadSignature) => {
            format!("the server's certificate is signed by no certificate of {authorities}: put its authority there")
        }
        Error::InvalidCertificate(invalid) if is_authority(invalid) => format!(
            "the server's certificate is one of a certificate authority (CA:TRUE): give the server another one, or put \
             this one into {authorities}"
        ),
        Error::InvalidCertificate(
            CertificateError::UnsupportedSignatureAlgorithmContext { .. }
            | CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext { .. },
        ) => format!("the server's certificate or one of {authorities} has a key {NOT_SUPPORTED}"),
        Error::AlertReceived(AlertDescription::HandshakeFailure) => {
            format!("{error}: no algorithm in common; perhaps the server's certificate has a key {NOT_SUPPORTED}")
        }
        _ => error.to_string(),
    }
}

/// Keys that ring has no code for, and those that it has.
const NOT_SUPPORTED: &str = "of P-521 or another kind that cproxy does not support: use ECDSA with P-256 or P-384, \
                             RSA or Ed25519";

impl Identity {
    /// The client's certificate and key, as rustls asks for them. The certificate is the server's to judge: it may have
    /// any version, which webpki refuses.
    fn resolver(&self, provider: &CryptoProvider) -> Result<SingleCertAndKey, TlsError> {
        let chain = certificates(&self.certificate)?;
        let key = provider.key_provider.load_private_key(private_key(&self.key)?);
        let key = key.map_err(TlsError::KeyKind)?;
        let certified = CertifiedKey::new(chain, key);
        match certified.keys_match() {
            Err(error @ Error::InconsistentKeys(InconsistentKeys::KeyMismatch)) => Err(TlsError::Mismatch(error)),
            Err(Error::InvalidCertificate(CertificateError::BadEncoding)) => Err(TlsError::NotACertificate),
            _ => Ok(certified.into()),
        }
    }
}

/// Verifier of the server's certificate and of its signatures.
#[derive(Debug)]
struct Verifier {
    provider: Arc<CryptoProvider>,
    trust: Trust,
}

#[derive(Debug)]
enum Trust {
    /// Every certificate (`insecure-skip-tls-verify`). Signatures are still checked, so that a broken connection is
    /// noticed.
    Any,
    These(Trusted),
}

/// Authorities of the cluster. As in Go, a server's certificate that is itself one of them needs no other signature.
#[derive(Debug)]
struct Trusted {
    by_authorities: Arc<WebPkiServerVerifier>,
    certificates: Vec<CertificateDer<'static>>,
    /// Whether one of them may sign others.
    has_authority: bool,
}

impl Trusted {
    /// As client-go, it leaves out authorities that cannot be read, if there are others. `place`: of the certificates.
    fn new(certificates: &[Vec<u8>], place: &str, provider: Arc<CryptoProvider>) -> Result<Self, TlsError> {
        let mut store = RootCertStore::empty();
        let trusted: Vec<_> = certificates.iter().map(|der| CertificateDer::from(der.clone())).collect();
        // A certificate of a server may not sign others. Without any that may, the verifier needs one all the same.
        let signers = trusted.iter().filter(|certificate| may_sign(certificate)).cloned();
        let (signers, _) = store.add_parsable_certificates(signers);
        if signers == 0 {
            store.add_parsable_certificates(trusted.iter().cloned());
        }
        if store.is_empty() {
            let place = place.to_owned();
            let is_empty = trusted.is_empty();
            return Err(if is_empty { TlsError::NoAuthority(place) } else { TlsError::UnreadableAuthorities(place) });
        }
        let by_authorities = WebPkiServerVerifier::builder_with_provider(Arc::new(store), provider).build();
        let by_authorities = by_authorities.map_err(|error| TlsError::Authorities(place.to_owned(), error))?;
        Ok(Self { by_authorities, certificates: trusted, has_authority: signers != 0 })
    }

    fn verify(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let is_trusted = self.certificates.iter().any(|trusted| trusted == certificate);
        if !is_trusted && !self.has_authority {
            return Err(CertificateError::UnknownIssuer.into());
        }
        let verified = self.by_authorities.verify_server_cert(certificate, intermediates, name, ocsp_response, now);
        match verified {
            // webpki has looked at its times before.
            Err(Error::InvalidCertificate(error))
                if is_trusted && (error == CertificateError::UnknownIssuer || is_authority(&error)) =>
            {
                verify_server_name(&ParsedCertificate::try_from(certificate)?, name)?;
                Ok(ServerCertVerified::assertion())
            }
            verified => verified,
        }
    }
}

/// Whether a certificate may sign others, as in Go: it is one of an authority (CA:TRUE), or of a version of X.509 in
/// which none says so.
fn may_sign(der: &CertificateDer<'_>) -> bool {
    let certificate = match webpki::EndEntityCert::try_from(der) {
        Ok(certificate) => certificate,
        Err(error) => return error == webpki::Error::UnsupportedCertVersion,
    };
    // webpki has no access to the extension, but refuses such a certificate as a server's once its times count.
    let refusal =
        |time| certificate.verify_for_usage(&[], &[], &[], time, webpki::KeyUsage::server_auth(), None, None).err();
    let refused = match refusal(UnixTime::now()) {
        Some(webpki::Error::CertExpired { not_after, .. }) => refusal(not_after),
        Some(webpki::Error::CertNotValidYet { not_before, .. }) => refusal(not_before),
        refused => refused,
    };
    refused == Some(webpki::Error::CaUsedAsEndEntity)
}

/// Whether a certificate was refused for being that of an authority.
fn is_authority(error: &CertificateError) -> bool {
    let CertificateError::Other(other) = error else { return false };
    other.0.downcast_ref() == Some(&webpki::Error::CaUsedAsEndEntity)
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        match &self.trust {
            Trust::Any => Ok(ServerCertVerified::assertion()),
            Trust::These(trusted) => trusted.verify(certificate, intermediates, name, ocsp_response, now),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let certificates: Result<Vec<_>, pem::Error> = CertificateDer::pem_slice_iter(pem).collect();
    let certificates = certificates.map_err(TlsError::Certificate)?;
    if certificates.is_empty() { Err(TlsError::NoCertificate) } else { Ok(certificates) }
}

fn private_key(pem: &[u8]) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_slice(pem).map_err(|error| match error {
        pem::Error::NoItemsFound => TlsError::NoKey,
        error => TlsError::Key(error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn material_that_cannot_be_used_is_named() {
        let error = |material: TlsMaterial| material.client_config().unwrap_err().to_string();
        let authorities = |certificates: &[&[u8]]| TlsMaterial {
            authorities: Some(certificates.iter().map(|der| der.to_vec()).collect()),
            ..TlsMaterial::default()
        };
        let remedy = "put the API server's authority there";
        let of_none = format!("certificate authority: it has no certificate in PEM: {remedy}");
        assert_eq!(error(authorities(&[])), of_none);
        let of_broken = format!("certificate authority: no certificate of it can be read: {remedy}");
        assert_eq!(error(authorities(&[b"x"])), of_broken);
        let broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        let identity = |certificate: &str, key: &str| TlsMaterial {
            identity: Some(Identity { certificate: certificate.into(), key: key.into() }),
            is_insecure: true,
            ..TlsMaterial::default()
        };
        assert_eq!(error(identity("", "")), "client certificate: it has no certificate in PEM");
        assert_eq!(error(identity(broken, "")), "client key: it has no private key in PEM");
    }
}
