//! The signature of a release: minisign signs the checksums, which name all other files.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};

use super::version;
use crate::{image::stamp, publisher::Publisher, run, setup};

/// The program that signs and verifies.
const PROGRAM: &str = "minisign";

/// End of a signature's name.
const SUFFIX: &str = "minisig";

/// A secret key, and the public key that verifies its signatures.
pub(super) struct Signer {
    secret: PathBuf,
    public: String,
}

impl Signer {
    /// The signer with this secret key, whose public key the publisher names.
    pub(super) fn new(secret: &Path, publisher: &Publisher) -> Result<Self> {
        ensure!(secret.is_file(), "--key {}: there is no such file", secret.display());
        let public = publisher.key()?.to_owned();
        setup::for_signing()?;
        Ok(Self { secret: secret.to_owned(), public })
    }

    /// Signs a file, and verifies the signature as readers do. minisign asks for the password of a key that has one.
    pub(super) fn sign(&self, file: &Path) -> Result<()> {
        // Words instead of the time, so that signing again gives the same bytes.
        let comment = format!("cproxy {}, commit {}", version(), stamp::revision().unwrap_or_default());
        let mut sign = Command::new(PROGRAM);
        sign.arg("-S").arg("-s").arg(&self.secret).args(["-t", &comment]).arg("-m").arg(file);
        let signed = run::run(run::to_stderr(&mut sign)?);
        signed.with_context(|| format!("signing with {}", self.secret.display()))?;
        let verified = self.verify(file);
        verified.with_context(|| format!("publisher.toml names another key than that of {}", self.secret.display()))
    }

    fn verify(&self, file: &Path) -> Result<()> {
        let mut verify = Command::new(PROGRAM);
        verify.args(["-V", "-q", "-P", &self.public]).arg("-m").arg(file);
        run::run(run::to_stderr(&mut verify)?)
    }
}

/// Name of the signature of a file.
pub(super) fn name(file: &str) -> String {
    format!("{file}.{SUFFIX}")
}
