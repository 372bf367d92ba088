//! Bearer tokens.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use ring::digest::{SHA256, SHA256_OUTPUT_LEN, digest};
use serde::Deserialize;

use crate::{Reason, Refusal};

/// Longest token.
pub(crate) const TOKEN_BYTES_MAX: usize = 16 << 10;

/// A text that may be a token. It has no `Debug`, so that no message shows it.
#[derive(Clone, Copy)]
pub(crate) struct Token<'a>(&'a str);

/// Hash of a token. Tokens themselves are not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct TokenKey([u8; SHA256_OUTPUT_LEN]);

impl<'a> Token<'a> {
    pub(crate) fn new(text: &'a str) -> Result<Self, Refusal> {
        let refusal = |why: &str| {
            let message = format!("the token {why}; send the ServiceAccount's token as it is in its file");
            Err(Refusal::new(Reason::MalformedToken, message))
        };
        match text {
            "" => refusal("is empty"),
            _ if text.len() > TOKEN_BYTES_MAX => refusal("is longer than 16 KiB"),
            _ if !text.bytes().all(|byte| byte.is_ascii_graphic()) => refusal("has spaces or special characters"),
            _ => Ok(Self(text)),
        }
    }

    pub(crate) fn text(self) -> &'a str {
        self.0
    }

    pub(crate) fn key(self) -> TokenKey {
        let mut key = [0; SHA256_OUTPUT_LEN];
        // Both have the hash's length.
        key.iter_mut().zip(digest(&SHA256, self.0.as_bytes()).as_ref()).for_each(|(to, from)| *to = *from);
        TokenKey(key)
    }

    /// Time until the token says that it expires; `None` if it does not say so. Nothing proves what it says.
    pub(crate) fn remaining(self) -> Option<Duration> {
        let expires = UNIX_EPOCH.checked_add(expiry(self.0)?)?;
        Some(expires.duration_since(SystemTime::now()).unwrap_or_default())
    }
}

/// The claim `exp` of a JSON Web Token, since the epoch.
fn expiry(token: &str) -> Option<Duration> {
    #[derive(Deserialize)]
    struct Claims {
        exp: f64,
    }
    let mut parts = token.split('.');
    let (_, payload, _, None) = (parts.next()?, parts.next()?, parts.next()?, parts.next()) else { return None };
    let claims: Claims = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(payload).ok()?).ok()?;
    Duration::try_from_secs_f64(claims.exp).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn web_token(payload: &str) -> String {
        format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode(payload))
    }

    #[test]
    fn texts_that_cannot_be_tokens_are_refused() {
        let long = "a".repeat(TOKEN_BYTES_MAX + 1);
        for text in ["", " ", "a b", "a\n", "a\0", "ä", "\u{7f}", &long] {
            let refusal = Token::new(text).err().unwrap();
            assert_eq!((refusal.status(), refusal.reason()), (401, Reason::MalformedToken), "{text:?}");
        }
        assert!(Token::new(&"a".repeat(TOKEN_BYTES_MAX)).is_ok());
    }

    #[test]
    fn the_expiry_is_read_from_web_tokens_only() {
        for (payload, expected) in [
            (r#"{"exp":1700000000,"iss":"x"}"#, Some(1_700_000_000)),
            (r#"{"exp":17.9e8}"#, Some(1_790_000_000)),
            (r#"{"exp":-1}"#, None),
            (r#"{"exp":1e300}"#, None),
            (r#"{"exp":"1"}"#, None),
            ("{}", None),
            ("", None),
            ("[", None),
        ] {
            assert_eq!(expiry(&web_token(payload)).map(|time| time.as_secs()), expected, "{payload}");
        }
        for token in ["a", "..", "a.b.c", "a.b.c.d"] {
            assert_eq!(expiry(token), None, "{token}");
        }
        assert_eq!(Token::new(&web_token(r#"{"exp":1}"#)).ok().unwrap().remaining(), Some(Duration::ZERO));
    }
}
