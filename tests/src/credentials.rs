//! Secrets of the control plane: a certificate authority, a serving certificate, tokens and kubeconfigs. All are
//! created for each run and are worthless afterwards.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
};
use serde_json::json;

use crate::manifest;

/// Known users with their groups.
const USERS: [(&str, &str); 7] = [
    ("admin", "system:masters"),
    ("cproxy", ""),
    ("cproxy-relay", ""),
    ("system:kube-controller-manager", ""),
    ("system:kube-proxy", ""),
    ("system:kube-scheduler", ""),
    ("nobody", ""),
];

/// Files that clients use, and those that servers beside the API server do.
const FILES: [&str; 7] =
    ["ca.crt", "clients.crt", "clients.key", "server.crt", "server.key", "service-account.key", "service-account.pub"];

/// Name of the authority of client certificates.
const CLIENTS: &str = "cproxy test clients";

/// Message about a test that needs more than the API.
pub(crate) const NOT_SHARED: &str = "this control plane is shared: start one with `ControlPlane::start`";

/// Directory of the credentials, and the authority of client certificates.
pub(crate) struct Credentials {
    directory: PathBuf,
    /// Names of the API server.
    names: Vec<String>,
    clients: Issuer<'static, KeyPair>,
    is_shared: bool,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Credentials").field(&self.directory).finish()
    }
}

/// Time for which a client's certificate is valid.
#[derive(Clone, Copy, Debug)]
pub enum Validity {
    /// Longer than any test.
    Long,
    /// It was valid once.
    Past,
    /// From now on.
    For(Duration),
}

/// Client certificate and key in PEM.
#[derive(Clone, Debug)]
pub struct ClientIdentity {
    /// The certificate.
    pub certificate: String,
    /// Its key.
    pub key: String,
}

impl Credentials {
    /// Creates them in `directory`, for an API server with the given names.
    pub(crate) fn create(directory: PathBuf, names: &[&str]) -> Self {
        fs::create_dir(&directory).expect("cannot create a directory in the sandbox");
        let key = new_key();
        let key_pem = key.serialize_pem();
        let params = authority(CLIENTS).expect("cannot name an authority");
        let certificate = params.self_signed(&key).expect("cannot make a certificate");
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        let credentials = Self { directory, names, clients: Issuer::new(params, key), is_shared: false };
        credentials.write("clients.crt", &certificate.pem());
        credentials.write("clients.key", &key_pem);
        credentials.renew_authority();
        let key = new_key();
        credentials.write("service-account.key", &key.serialize_pem());
        credentials.write("service-account.pub", &key.public_key_pem());
        let tokens = USERS.map(|(user, groups)| format!("{},{user},{user},\"{groups}\"\n", token(user)));
        credentials.write("tokens.csv", &tokens.concat());
        credentials
    }

    /// A copy of those of another control plane, in `directory`.
    pub(crate) fn copy(of: &Path, directory: PathBuf) -> Self {
        fs::create_dir(&directory).expect("cannot create a directory in the sandbox");
        for name in FILES {
            fs::copy(of.join(name), directory.join(name)).expect("cannot copy a file of a shared control plane");
        }
        let key = fs::read_to_string(directory.join("clients.key")).expect("cannot read a file just written");
        let key = KeyPair::from_pem(&key).expect("a shared control plane has no key of an authority");
        let clients = Issuer::new(authority(CLIENTS).expect("cannot name an authority"), key);
        Self { directory, names: Vec::new(), clients, is_shared: true }
    }

    /// The directory of the files.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Path of one of the files.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Writes a kubeconfig for `user` at `server`.
    pub(crate) fn kubeconfig(&self, user: &str, server: &str) -> PathBuf {
        let cluster = json!({"server": server, "certificate-authority": self.file("ca.crt")});
        let config = manifest::kubeconfig(cluster, json!({"token": token(user)}));
        self.write(&format!("{}.kubeconfig", user.replace(':', "-")), &config.to_string())
    }

    /// A certificate for a client of this name, perhaps in a group.
    pub(crate) fn client(&self, user: &str, group: Option<&str>, validity: Validity) -> ClientIdentity {
        let make = || {
            let mut params = named(user, Vec::new())?;
            if let Some(group) = group {
                params.distinguished_name.push(DnType::OrganizationName, group);
            }
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
            match validity {
                Validity::Long => {}
                Validity::Past => {
                    params.not_after = rcgen::date_time_ymd(2001, 1, 1);
                    params.not_before = rcgen::date_time_ymd(2000, 1, 1);
                }
                Validity::For(time) => {
                    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                    params.not_after = rcgen::date_time_ymd(1970, 1, 1) + now + time;
                }
            }
            let key = new_key();
            let certificate = params.signed_by(&key, &self.clients)?;
            Ok(ClientIdentity { certificate: certificate.pem(), key: key.serialize_pem() })
        };
        make().unwrap_or_else(|error: rcgen::Error| panic!("cannot make a certificate: {error}"))
    }

    /// Files of a certificate for a client of this name, and of its key.
    pub(crate) fn client_files(&self, user: &str) -> [PathBuf; 2] {
        let identity = self.client(user, None, Validity::Long);
        [("crt", identity.certificate), ("key", identity.key)]
            .map(|(extension, content)| self.write(&format!("client-{user}.{extension}"), &content))
    }

    /// Replaces the authority of the API server and its certificate. Clients of the harness trust only the new one.
    pub(crate) fn renew_authority(&self) {
        assert!(!self.is_shared, "{NOT_SHARED}");
        let renew = || {
            let authority = new_authority("cproxy test authority")?;
            let mut params = named("kube-apiserver", self.names.clone())?;
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
            let key = new_key();
            let certificate = params.signed_by(&key, &authority)?;
            self.write("ca.crt", &authority.pem());
            self.write("server.crt", &certificate.pem());
            self.write("server.key", &key.serialize_pem());
            Ok(())
        };
        renew().unwrap_or_else(|error: rcgen::Error| panic!("cannot make certificates: {error}"));
    }

    /// In one step: a program that has just been started may be reading the file.
    fn write(&self, name: &str, content: &str) -> PathBuf {
        manifest::write_text(&self.directory, name, content)
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

fn new_authority(name: &str) -> Result<CertifiedIssuer<'static, KeyPair>, rcgen::Error> {
    CertifiedIssuer::self_signed(authority(name)?, new_key())
}

fn authority(name: &str) -> Result<CertificateParams, rcgen::Error> {
    let mut params = named(name, Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    Ok(params)
}

fn named(common_name: &str, names: Vec<String>) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name.push(DnType::CommonName, common_name);
    Ok(params)
}
