//! An API server's response to a TokenReview. The first byte of the input chooses the status code and whether the
//! token must be for an audience; the rest is the response.

#![no_main]

use cproxy_relay_auth::{Review, parse_review};
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, from_slice};

fuzz_target!(|input: &[u8]| {
    let Some((first, body)) = input.split_first() else { return };
    let status = match first & 0x70 {
        0x10 => 403,
        0x20 => 500,
        _ => 201,
    };
    let audiences = if first & 1 == 0 { vec![] } else { vec!["a".to_owned()] };
    match parse_review(status, body, &audiences) {
        Ok(Review::Authenticated(identity)) => {
            assert_eq!(status, 201);
            assert!(!identity.username.is_empty());
            for name in [&identity.namespace, &identity.node_name, &identity.pod_name].into_iter().flatten() {
                assert!(!name.is_empty() && name.len() <= 253, "{name:?}");
            }
            if let Ok(review @ Value::Object(_)) = from_slice::<Value>(body) {
                check(&review["status"], &identity.username, &audiences);
            }
        }
        Ok(Review::Refused(why)) => {
            assert_eq!(status, 201);
            assert!(!why.contains('\n'), "{why:?} is not one line");
        }
        Err(error) => {
            let error = error.to_string();
            assert!(!error.is_empty() && !error.contains('\n'), "{error:?} is not one line");
        }
    }
});

/// Compares with a general reader of JSON.
fn check(status: &Value, username: &str, audiences: &[String]) {
    let Value::Object(_) = status else { return };
    assert_eq!(status["authenticated"], true);
    if let Value::Object(_) = &status["user"] {
        assert_eq!(status["user"]["username"], username);
    }
    for audience in audiences {
        let of_token = status["audiences"].as_array().expect("a token for an audience has some");
        assert!(of_token.iter().any(|value| value == audience.as_str()), "{of_token:?}");
    }
}
