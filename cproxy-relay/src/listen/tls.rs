//! TLS towards clients. Files are read again, so that renewed certificates take effect without a restart.

use std::{
    io,
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
    server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier},
};

/// Files of TLS.
#[derive(Clone, Debug)]
pub(crate) struct TlsFiles {
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
    /// Authorities of client certificates.
    pub(crate) client_authority: Option<PathBuf>,
}

/// Reason why TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TlsError {
    /// A file cannot be used.
    #[error("{flag} {}: {fault}", path.display())]
    File {
        /// Flag that names the file.
        flag: &'static str,
        path: PathBuf,
        fault: FileFault,
    },
    /// The library refuses its own settings.
    #[error("{0}")]
    Settings(rustls::Error),
}

/// Fault of a file.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FileFault {
    #[error("{0}")]
    Unreadable(io::Error),
    #[error("{0}")]
    Pem(pem::Error),
    #[error("it has no private key in PEM")]
    NoKey,
    #[error("it has no certificate in PEM")]
    NoCertificate,
    #[error("{0}")]
    Certificate(rustls::Error),
    #[error("{0}")]
    Authority(VerifierBuilderError),
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
    /// A file cannot be used.
    pub(crate) fn read(files: TlsFiles) -> Result<Self, TlsError> {
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
    fn config(&self) -> Result<Arc<ServerConfig>, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions();
        let builder = builder.map_err(TlsError::Settings)?;
        let builder = match &self.client_authority {
            Some(path) => {
                let authority = |fault| of_file("--client-ca-file", path, fault);
                let mut roots = RootCertStore::empty();
                for certificate in certificates(path, "--client-ca-file")? {
                    roots.add(certificate).map_err(|error| authority(FileFault::Certificate(error)))?;
                }
                // Clients without a certificate may have a token.
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                let verifier = verifier.allow_unauthenticated().build();
                builder.with_client_cert_verifier(verifier.map_err(|error| authority(FileFault::Authority(error)))?)
            }
            None => builder.with_no_client_auth(),
        };
        let chain = certificates(&self.certificate, "--tls-cert-file")?;
        let key = read(&self.key, "--tls-private-key-file")?;
        let key = PrivateKeyDer::from_pem_slice(&key).map_err(|error| {
            let fault =
                if matches!(error, pem::Error::NoItemsFound) { FileFault::NoKey } else { FileFault::Pem(error) };
            of_file("--tls-private-key-file", &self.key, fault)
        })?;
        let config = builder.with_single_cert(chain, key).map_err(FileFault::Certificate);
        let mut config = config.map_err(|fault| of_file("--tls-cert-file", &self.certificate, fault))?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        // Connections are long, so that resuming them saves little and its state costs memory.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }
}

fn of_file(flag: &'static str, path: &Path, fault: FileFault) -> TlsError {
    TlsError::File { flag, path: path.to_owned(), fault }
}

fn read(path: &Path, flag: &'static str) -> Result<Vec<u8>, TlsError> {
    file::read(path, FILE_BYTES_MAX).map_err(|error| of_file(flag, path, FileFault::Unreadable(error)))
}

fn certificates(path: &Path, flag: &'static str) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let pem = read(path, flag)?;
    let certificates: Result<Vec<_>, pem::Error> = CertificateDer::pem_slice_iter(&pem).collect();
    let certificates = certificates.map_err(|error| of_file(flag, path, FileFault::Pem(error)))?;
    if certificates.is_empty() {
        return Err(of_file(flag, path, FileFault::NoCertificate));
    }
    Ok(certificates)
}
