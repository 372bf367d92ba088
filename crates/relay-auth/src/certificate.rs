//! Client certificates.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use x509_parser::{
    oid_registry::{OID_X509_COMMON_NAME, OID_X509_ORGANIZATION_NAME},
    prelude::{FromDer as _, X509Certificate},
};

use crate::{Identity, Reason, Refusal};

/// Verified certificate of a client.
#[derive(Clone, Debug)]
pub(crate) struct Certificate {
    pub(crate) identity: Arc<Identity>,
    not_after: SystemTime,
}

impl Certificate {
    pub(crate) fn has_expired(&self) -> bool {
        self.not_after < SystemTime::now()
    }
}

/// Refusal of a certificate that has expired since it was verified.
pub(crate) fn expired() -> Refusal {
    Refusal::new(Reason::Certificate, "the client certificate has expired; use the renewed one")
}

/// Identity of a verified certificate as the API server reads it: the common name is the user, each organization a
/// group.
pub(crate) fn read(der: &[u8]) -> Result<Certificate, Refusal> {
    let refusal = |why: &str| {
        let message = format!("the client certificate {why}; use one with the user's name as its common name (CN)");
        Refusal::new(Reason::Certificate, message)
    };
    let (_, certificate) = X509Certificate::from_der(der).map_err(|_| refusal("cannot be read"))?;
    let (mut username, mut groups) = (String::new(), Vec::new());
    for attribute in certificate.subject().iter_attributes() {
        let Ok(value) = attribute.as_str() else { continue };
        // Of several common names the last counts, as in Go.
        if *attribute.attr_type() == OID_X509_COMMON_NAME {
            value.clone_into(&mut username);
        } else if *attribute.attr_type() == OID_X509_ORGANIZATION_NAME {
            groups.push(value.to_owned());
        }
    }
    if username.is_empty() {
        return Err(refusal("names no user"));
    }
    let identity = Identity::of_certificate(username, groups);
    let identity = identity.ok_or_else(|| refusal("has names of more than 64 KiB"))?.into();
    let seconds = u64::try_from(certificate.validity().not_after.timestamp()).unwrap_or(0);
    let not_after = UNIX_EPOCH.checked_add(Duration::from_secs(seconds)).unwrap_or(UNIX_EPOCH);
    Ok(Certificate { identity, not_after })
}

#[cfg(test)]
pub(crate) mod tests {
    use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};

    use super::*;

    fn certificate(names: &[(DnType, &str)]) -> Vec<u8> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        for (kind, value) in names {
            params.distinguished_name.push(kind.clone(), *value);
        }
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().to_vec()
    }

    /// Certificate of a user, or of none.
    pub(crate) fn of(user: Option<&str>) -> Vec<u8> {
        certificate(user.map(|user| (DnType::CommonName, user)).as_slice())
    }

    #[test]
    fn the_subject_names_user_and_groups() {
        let der = certificate(&[(DnType::OrganizationName, "system:nodes"), (DnType::CommonName, "system:node:n1")]);
        let identity = read(&der).unwrap().identity;
        assert_eq!(identity.username, "system:node:n1");
        assert_eq!(identity.groups, ["system:nodes", "system:authenticated"]);
        assert_eq!(identity.node_name.as_deref(), Some("n1"));
    }

    #[test]
    fn a_certificate_without_a_user_is_refused() {
        let nameless = certificate(&[(DnType::OrganizationName, "system:nodes")]);
        let empty = certificate(&[(DnType::CommonName, "")]);
        for (der, why) in [(&nameless[..], "names no user"), (&empty, "names no user"), (b"x", "cannot be read")] {
            let refusal = read(der).unwrap_err();
            assert_eq!((refusal.status(), refusal.reason()), (401, Reason::Certificate));
            assert!(refusal.message().contains(why), "{refusal}");
        }
    }
}
