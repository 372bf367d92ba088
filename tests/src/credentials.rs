//! Secrets of the control plane: a certificate authority, a serving certificate, tokens and kubeconfigs. All are
//! created for each run and are worthless afterwards.

use std::{
    fs,
    path::{Path, PathBuf},
};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use serde_json::json;

/// Known users with their groups.
const USERS: [(&str, &str); 4] =
    [("admin", "system:masters"), ("cproxy", ""), ("system:kube-proxy", ""), ("nobody", "")];

/// Directory of the credentials.
#[derive(Debug)]
pub(crate) struct Credentials {
    directory: PathBuf,
}

impl Credentials {
    /// Creates them in `directory`, for an API server with the given names.
    pub(crate) fn create(directory: PathBuf, names: &[&str]) -> Self {
        fs::create_dir(&directory).expect("cannot create a directory in the sandbox");
        let credentials = Self { directory };
        credentials.make_certificates(names).expect("cannot make certificates");
        let key = new_key();
        credentials.write("service-account.key", &key.serialize_pem());
        credentials.write("service-account.pub", &key.public_key_pem());
        let tokens = USERS.map(|(user, groups)| format!("{},{user},{user},\"{groups}\"\n", token(user)));
        credentials.write("tokens.csv", &tokens.concat());
        credentials
    }

    /// Path of one of the files.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Writes a kubeconfig for `user` at `server`.
    pub(crate) fn kubeconfig(&self, user: &str, server: &str) -> PathBuf {
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": server, "certificate-authority": self.file("ca.crt")}}],
            "users": [{"name": user, "user": {"token": token(user)}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
        });
        self.write(&format!("{}.kubeconfig", user.replace(':', "-")), &config.to_string())
    }

    fn make_certificates(&self, names: &[&str]) -> Result<(), rcgen::Error> {
        let mut params = named("cproxy test authority", &[])?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, new_key())?;
        let mut params = named("kube-apiserver", names)?;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let key = new_key();
        let certificate = params.signed_by(&key, &authority)?;
        self.write("ca.crt", &authority.pem());
        self.write("server.crt", &certificate.pem());
        self.write("server.key", &key.serialize_pem());
        Ok(())
    }

    fn write(&self, name: &str, content: &str) -> PathBuf {
        let path = self.file(name);
        write_file(&path, content);
        path
    }
}

/// The bearer token of `user`.
///
/// # Panics
/// When there is no such user.
pub(crate) fn token(user: &str) -> String {
    assert!(
        USERS.iter().any(|(known, _)| *known == user),
        "the test control plane has no user {user:?}, only {:?}",
        USERS.map(|(known, _)| known)
    );
    format!("token-of-{}", user.replace(':', "-"))
}

fn new_key() -> KeyPair {
    KeyPair::generate().expect("cannot generate a key pair")
}

fn named(common_name: &str, names: &[&str]) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>())?;
    params.distinguished_name.push(DnType::CommonName, common_name);
    Ok(params)
}

fn write_file(path: &Path, content: &str) {
    fs::write(path, content).unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()));
}
