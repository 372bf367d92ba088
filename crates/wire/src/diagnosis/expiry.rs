//! Expiry of certificates and tokens.

use std::time::Duration;

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use jiff::Timestamp;
use rustls::pki_types::{CertificateDer, UnixTime, pem::PemObject};
use serde::Deserialize;
use webpki::{EndEntityCert, Error, KeyUsage};

use crate::{
    diagnosis::finding::{Finding, Grade},
    located::read_json,
};

/// Time before the end of a certificate from which it is reported.
const CERTIFICATE_SECONDS_MIN: i64 = 3600;
/// The same of a token that nothing is known to renew.
const TOKEN_SECONDS_MIN: i64 = 600;

/// First and last second at which something counts, since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Validity {
    pub(super) not_before: i64,
    pub(super) not_after: i64,
}

impl Validity {
    /// Times of a certificate in DER; `None` if it cannot be read.
    pub(super) fn of_der(der: &[u8]) -> Option<Self> {
        let der = CertificateDer::from(der);
        let certificate = EndEntityCert::try_from(&der).ok()?;
        // webpki, which is in the binary anyway, has no access to the times. But it looks at them before all else, and
        // names those that a moment is outside of.
        let refusal = |seconds| {
            let time = UnixTime::since_unix_epoch(Duration::from_secs(seconds));
            certificate.verify_for_usage(&[], &[], &[], time, KeyUsage::server_auth(), None, None).err()
        };
        let seconds = |time: UnixTime| i64::try_from(time.as_secs()).ok();
        let not_before = match refusal(0) {
            Some(Error::CertNotValidYet { not_before, .. }) => seconds(not_before)?,
            _ => i64::MIN,
        };
        let Some(Error::CertExpired { not_after, .. }) = refusal(u64::MAX) else { return None };
        Some(Self { not_before, not_after: seconds(not_after)? })
    }

    /// Times of the first certificate in PEM; `None` if it cannot be read.
    pub(super) fn of_pem(pem: &[u8]) -> Option<Self> {
        Self::of_der(&CertificateDer::from_pem_slice(pem).ok()?)
    }
}

/// Line about the API server's certificate.
pub(super) fn of_server(times: Validity, now: i64) -> Finding {
    line("server_certificate", Some(times), now, CERTIFICATE_SECONDS_MIN, "renew it on the API server")
}

/// Line about the client certificate, in PEM.
pub(super) fn of_client(pem: &[u8], now: i64) -> Finding {
    line("client_certificate", Validity::of_pem(pem), now, CERTIFICATE_SECONDS_MIN, "put a new one in its place")
}

/// Line about a bearer token that counts until `expires`. `is_renewed`: its file or program has a new one in time.
pub(super) fn of_token(expires: Option<i64>, now: i64, is_renewed: bool) -> Finding {
    let times = expires.map(|not_after| Validity { not_before: i64::MIN, not_after });
    let shortest = if is_renewed { 0 } else { TOKEN_SECONDS_MIN };
    line("token", times, now, shortest, "put a new one in its place")
}

fn line(name: &str, times: Option<Validity>, now: i64, shortest: i64, remedy: &str) -> Finding {
    let Some(Validity { not_before, not_after }) = times else {
        return Finding::optional(name, Grade::Ok, "its expiry cannot be read from it");
    };
    let left = not_after.saturating_sub(now);
    let until = moment(not_after);
    if not_before > now {
        let detail = format!("it counts from {} on, and it is {} here: set the clock", moment(not_before), moment(now));
        return Finding::required(name, Grade::Missing, detail);
    }
    match left {
        ..0 => Finding::required(name, Grade::Missing, format!("it has expired on {until}: {remedy}")),
        left if left <= shortest => {
            Finding::optional(name, Grade::Degraded, format!("it expires in {}, on {until}: {remedy}", duration(left)))
        }
        left => Finding::optional(name, Grade::Ok, format!("it expires in {}, on {until}", duration(left))),
    }
}

#[derive(Deserialize)]
struct Claims {
    exp: Option<f64>,
}

/// Expiry of a JSON Web Token (RFC 7519, 4.1.4), which is not verified; `None` if it is no such token or has no expiry.
pub(super) fn of_jwt(token: &str) -> Option<i64> {
    let mut parts = token.split('.');
    let (_, claims, _) = (parts.next()?, parts.next()?, parts.next()?);
    let claims: Claims = read_json(&BASE64_URL_SAFE_NO_PAD.decode(claims).ok()?).ok()?;
    claims.exp.map(|seconds| seconds as i64)
}

/// Time in UTC, to the second.
pub(super) fn moment(seconds: i64) -> String {
    Timestamp::from_second(seconds).map_or_else(|_| "an impossible time".to_owned(), |time| time.to_string())
}

/// Length of time in its largest unit of which there are at least two.
pub(super) fn duration(seconds: i64) -> String {
    for (unit, length) in [("days", 86_400), ("h", 3600), ("min", 60)] {
        if seconds >= 2 * length {
            return format!("{} {unit}", seconds / length);
        }
    }
    format!("{seconds} s")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grade_depends_on_the_time_that_is_left() {
        let certificate = |not_before, not_after| of_server(Validity { not_before, not_after }, 10_000);
        for (line, grade, text) in [
            (certificate(0, 10_000 + 3601), Grade::Ok, "it expires in 60 min, on 1970-01-01T03:46:41Z"),
            (certificate(0, 10_000 + 3600), Grade::Degraded, "it expires in 60 min, on 1970-01-01T03:46:40Z: renew"),
            (certificate(0, 9_999), Grade::Missing, "it has expired on 1970-01-01T02:46:39Z: renew"),
            (certificate(10_001, 20_000), Grade::Missing, "it counts from 1970-01-01T02:46:41Z on, and it is 1970"),
            (of_token(Some(10_000 + 600), 10_000, false), Grade::Degraded, "it expires in 10 min"),
            (of_token(Some(10_000 + 599), 10_000, true), Grade::Ok, "it expires in 9 min"),
            (of_token(Some(9_999), 10_000, true), Grade::Missing, "it has expired"),
            (of_token(None, 10_000, false), Grade::Ok, "its expiry cannot be read"),
        ] {
            assert!(line.grade == grade && line.detail.starts_with(text), "{line:?}, not {grade:?} {text}");
            assert_eq!(line.is_required, grade == Grade::Missing, "{line:?}");
        }
    }

    #[test]
    fn the_expiry_of_a_token_is_read_without_its_key() {
        let token = |claims: &str| format!("e30.{}.c2ln", BASE64_URL_SAFE_NO_PAD.encode(claims));
        assert_eq!(of_jwt(&token(r#"{"exp":1700000000,"iat":1}"#)), Some(1_700_000_000));
        assert_eq!(of_jwt(&token(r#"{"exp":1.9e9}"#)), Some(1_900_000_000));
        for token in [token("{}"), token("x"), "abcdef.0123456789".to_owned(), "a.!.b".to_owned(), String::new()] {
            assert_eq!(of_jwt(&token), None, "{token}");
        }
    }

    #[test]
    fn lengths_of_time_are_in_readable_units() {
        let texts = [0, 119, 120, 7_199, 7_200, 172_799, 172_800].map(duration);
        assert_eq!(texts, ["0 s", "119 s", "2 min", "119 min", "2 h", "47 h", "2 days"]);
        assert_eq!(moment(i64::MAX), "an impossible time");
    }

    #[test]
    fn bytes_that_are_no_certificate_have_no_times() {
        assert_eq!(Validity::of_der(&[0x30, 0x82, 0xff]), None);
        assert_eq!(Validity::of_pem(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"), None);
    }
}
