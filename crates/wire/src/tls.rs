//! TLS towards an API server.

use std::{io, sync::Arc};

use rustls::{
    ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
    client::{
        Resumption,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, ring},
    pki_types::{
        CertificateDer, PrivateKeyDer, ServerName, UnixTime,
        pem::{self, PemObject},
    },
};
use rustls_platform_verifier::BuilderVerifierExt;
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::connector::Stream;

/// Protocols in order of preference (RFC 7301).
const PROTOCOLS: [&[u8]; 2] = [HTTP2, b"http/1.1"];
const HTTP2: &[u8] = b"h2";

/// Certificate authorities and client certificate.
#[derive(Clone, Debug, Default, Hash)]
pub(super) struct TlsMaterial {
    /// Certificates of trusted authorities in DER; `None`: those of the system.
    pub(super) authorities: Option<Vec<Vec<u8>>>,
    pub(super) identity: Option<Identity>,
    /// Accept any certificate.
    pub(super) is_insecure: bool,
}

/// Client certificate with its chain, and its key, in PEM.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Identity {
    pub(super) certificate: Vec<u8>,
    pub(super) key: Vec<u8>,
}

impl TlsMaterial {
    /// Configuration of a TLS client.
    ///
    /// # Errors
    /// A message that names what cannot be used.
    pub(super) fn client_config(&self) -> Result<Arc<ClientConfig>, String> {
        let provider = Arc::new(ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions();
        let builder = builder.map_err(|error| error.to_string())?;
        let builder = match &self.authorities {
            _ if self.is_insecure => {
                builder.dangerous().with_custom_certificate_verifier(Arc::new(AnyCertificate(provider)))
            }
            Some(certificates) => builder.with_root_certificates(root_store(certificates)?),
            None => builder.with_platform_verifier().map_err(|error| format!("the system's authorities: {error}"))?,
        };
        let mut config = match &self.identity {
            Some(Identity { certificate, key }) => builder
                .with_client_auth_cert(certificates(certificate, "client certificate")?, private_key(key)?)
                .map_err(|error| format!("client certificate and key: {error}"))?,
            None => builder.with_no_client_auth(),
        };
        config.alpn_protocols = PROTOCOLS.map(Vec::from).into();
        // Connections are few and long.
        config.resumption = Resumption::disabled();
        Ok(Arc::new(config))
    }
}

/// Makes a TLS connection over `stream`. Returns it with whether the server chose HTTP/2.
pub(super) async fn handshake(
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

fn root_store(certificates: &[Vec<u8>]) -> Result<RootCertStore, String> {
    let mut store = RootCertStore::empty();
    for certificate in certificates {
        let added = store.add(CertificateDer::from(certificate.as_slice()));
        added.map_err(|error| format!("certificate authority: {error}"))?;
    }
    if store.is_empty() { Err("certificate authority: it has no certificate in PEM".to_owned()) } else { Ok(store) }
}

fn certificates(pem: &[u8], role: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let certificates: Result<Vec<_>, pem::Error> = CertificateDer::pem_slice_iter(pem).collect();
    let certificates = certificates.map_err(|error| format!("{role}: {error}"))?;
    if certificates.is_empty() { Err(format!("{role}: it has no certificate in PEM")) } else { Ok(certificates) }
}

fn private_key(pem: &[u8]) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_slice(pem).map_err(|error| match error {
        pem::Error::NoItemsFound => "client key: it has no private key in PEM".to_owned(),
        error => format!("client key: {error}"),
    })
}

/// Verifier for `insecure-skip-tls-verify`. Signatures are still checked, so that a broken connection is noticed.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn material_that_cannot_be_used_is_named() {
        let error = |material: TlsMaterial| material.client_config().unwrap_err();
        let authorities = |certificates: &[&[u8]]| TlsMaterial {
            authorities: Some(certificates.iter().map(|der| der.to_vec()).collect()),
            ..TlsMaterial::default()
        };
        assert_eq!(error(authorities(&[])), "certificate authority: it has no certificate in PEM");
        assert!(error(authorities(&[b"x"])).starts_with("certificate authority: "));
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
