//! TLS towards clients. Files are read again, so that renewed certificates take effect without a restart.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock},
};

use cproxy_wire::file::{self, FILE_BYTES_MAX};
use rustls::{
    RootCertStore, ServerConfig,
    crypto::ring,
    pki_types::{
        CertificateDer, PrivateKeyDer,
        pem::{self, PemObject},
    },
    server::{NoServerSessionStorage, WebPkiClientVerifier},
};

/// Files of TLS.
#[derive(Clone, Debug)]
pub(crate) struct TlsFiles {
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
    /// Authorities of client certificates.
    pub(crate) client_authority: Option<PathBuf>,
}

/// Configuration of TLS, as the files were last read.
#[derive(Debug)]
pub(crate) struct ServerTls {
    files: TlsFiles,
    config: RwLock<Arc<ServerConfig>>,
}

impl ServerTls {
    /// Reads the files.
    ///
    /// # Errors
    /// A message that names the flag and the file that cannot be used.
    pub(crate) fn read(files: TlsFiles) -> Result<Self, String> {
        let config = RwLock::new(files.config()?);
        Ok(Self { files, config })
    }

    /// The present configuration.
    pub(crate) fn config(&self) -> Arc<ServerConfig> {
        self.config.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads the files again. If they cannot be used, the last configuration stays.
    pub(crate) fn reread(&self) {
        match self.files.config() {
            Ok(config) => *self.config.write().unwrap_or_else(PoisonError::into_inner) = config,
            Err(error) => tracing::warn!("{error}; the certificate that was read last stays in use"),
        }
    }
}

impl TlsFiles {
    fn config(&self) -> Result<Arc<ServerConfig>, String> {
        let provider = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions();
        let builder = builder.map_err(|error| error.to_string())?;
        let builder = match &self.client_authority {
            Some(path) => {
                let mut roots = RootCertStore::empty();
                for certificate in certificates(path, "--client-ca-file")? {
                    roots.add(certificate).map_err(|error| named("--client-ca-file", path, error))?;
                }
                // Clients without a certificate may have a token.
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                let verifier = verifier.allow_unauthenticated().build();
                builder.with_client_cert_verifier(verifier.map_err(|error| named("--client-ca-file", path, error))?)
            }
            None => builder.with_no_client_auth(),
        };
        let chain = certificates(&self.certificate, "--tls-cert-file")?;
        let key = read(&self.key, "--tls-private-key-file")?;
        let key = PrivateKeyDer::from_pem_slice(&key).map_err(|error| match error {
            pem::Error::NoItemsFound => named("--tls-private-key-file", &self.key, "it has no private key in PEM"),
            error => named("--tls-private-key-file", &self.key, error),
        })?;
        let config = builder.with_single_cert(chain, key);
        let mut config = config.map_err(|error| named("--tls-cert-file", &self.certificate, error))?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        // Connections are long, so that resuming them saves little and its state costs memory.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }
}

fn named(flag: &str, path: &Path, error: impl std::fmt::Display) -> String {
    format!("{flag} {}: {error}", path.display())
}

fn read(path: &Path, flag: &str) -> Result<Vec<u8>, String> {
    file::read(path, FILE_BYTES_MAX).map_err(|error| named(flag, path, error))
}

fn certificates(path: &Path, flag: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let pem = read(path, flag)?;
    let certificates: Result<Vec<_>, pem::Error> = CertificateDer::pem_slice_iter(&pem).collect();
    let certificates = certificates.map_err(|error| named(flag, path, error))?;
    if certificates.is_empty() { Err(named(flag, path, "it has no certificate in PEM")) } else { Ok(certificates) }
}
