//! TokenReviews of authentication.k8s.io/v1: request and response.

use bytes::Bytes;
use serde::Deserialize;
use serde_json::json;

use crate::{Identity, Source};

/// Answer of the API server about a token.
#[derive(Debug, PartialEq, Eq)]
pub enum Review {
    /// The token belongs to a user.
    Authenticated(Identity),
    /// The token belongs to no user, with the reason; empty if the API server gives none.
    Refused(String),
}

/// Response that is no answer about a token.
#[derive(Debug, thiserror::Error)]
pub enum ReviewError {
    /// The API server refuses the request.
    #[error("the API server answers a review of a token with {status}{}{}", after_colon(.message), remedy(*.status))]
    Status {
        /// HTTP status code.
        status: u16,
        /// The start of its message, if there is one.
        message: Option<String>,
    },
    /// The response has so many bytes.
    #[error("the API server's review of a token has {0} bytes")]
    TooLong(usize),
    /// The response is no TokenReview, in this line. The parser's message may quote the response, and the response the
    /// token.
    #[error("the API server's review is no TokenReview (line {0})")]
    Malformed(usize),
    /// There is no response in time.
    #[error("the API server does not answer the review of a token")]
    Silent,
}

fn after_colon(message: &Option<String>) -> String {
    message.as_ref().map(|message| format!(": {message}")).unwrap_or_default()
}

fn remedy(status: u16) -> &'static str {
    match status {
        401 | 403 => "; let the relay's account create tokenreviews: bind the ClusterRole system:auth-delegator to it",
        _ => "",
    }
}

/// Largest response that is read.
const RESPONSE_BYTES_MAX: usize = 1 << 20;
/// Largest number of characters of a text from the API server in a message.
const TEXT_CHARACTERS_MAX: usize = 200;
/// Status codes of answers: a server may create or only compute one.
const ANSWERED: [u16; 3] = [200, 201, 202];

/// Response, read more leniently than by the type of `k8s-openapi`, which refuses `"extra":{"x":null}` and times in
/// other forms than RFC 3339: a server's answer about a token must not depend on fields that are not used.
#[derive(Deserialize)]
struct TokenReview {
    status: Status,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Status {
    authenticated: bool,
    user: Option<User>,
    audiences: Option<Vec<String>>,
    error: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct User {
    username: String,
    groups: Option<Vec<String>>,
    extra: Option<Extra>,
}

/// Further facts about a token. All other keys are ignored.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Extra {
    #[serde(rename = "authentication.kubernetes.io/node-name")]
    node_name: Vec<String>,
    #[serde(rename = "authentication.kubernetes.io/pod-name")]
    pod_name: Vec<String>,
    #[serde(rename = "authentication.kubernetes.io/pod-uid")]
    pod_uid: Vec<String>,
}

/// Body of the request for a review, as JSON. Without audiences, the token must be for the API server.
#[must_use]
pub fn review_body(token: &str, audiences: &[String]) -> Bytes {
    let mut spec = json!({ "token": token });
    if let (false, Some(spec)) = (audiences.is_empty(), spec.as_object_mut()) {
        spec.insert("audiences".to_owned(), json!(audiences));
    }
    json!({ "apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec }).to_string().into()
}

/// Reads a response.
///
/// # Errors
/// The response is no answer about the token.
pub fn parse_review(status: u16, body: &[u8], audiences: &[String]) -> Result<Review, ReviewError> {
    if !ANSWERED.contains(&status) {
        return Err(ReviewError::Status { status, message: message(body) });
    }
    if body.len() > RESPONSE_BYTES_MAX {
        return Err(ReviewError::TooLong(body.len()));
    }
    let review: TokenReview = serde_json::from_slice(body).map_err(|error| ReviewError::Malformed(error.line()))?;
    Ok(answer(review.status, audiences))
}

fn answer(status: Status, audiences: &[String]) -> Review {
    let Status { authenticated, user, audiences: token_audiences, error } = status;
    let User { username, groups, extra } = user.unwrap_or_default();
    if !authenticated || username.is_empty() {
        return Review::Refused(short(&error.unwrap_or_default()));
    }
    // A server that does not know audiences answers for its own.
    let is_for_relay = |audience| audiences.contains(audience);
    if !audiences.is_empty() && !token_audiences.unwrap_or_default().iter().any(is_for_relay) {
        return Review::Refused(format!("it is not for the audience {}", audiences.join(" or ")));
    }
    let Some(mut identity) = Identity::new(username, groups.unwrap_or_default(), Source::Token) else {
        return Review::Refused("the names of its user and groups have more than 64 KiB".to_owned());
    };
    let Extra { node_name, pod_name, pod_uid } = extra.unwrap_or_default();
    identity.node_name = node_name.into_iter().next().filter(|name| is_short(name)).or(identity.node_name);
    identity.pod_name = pod_name.into_iter().next().filter(|name| is_short(name));
    identity.pod_uid = pod_uid.into_iter().next().filter(|uid| is_short(uid));
    Review::Authenticated(identity)
}

/// Whether a name is not longer than names can be.
fn is_short(name: &str) -> bool {
    !name.is_empty() && name.len() <= 253
}

/// The start of the message of a metav1.Status.
fn message(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct ApiStatus {
        message: String,
    }
    let body = Some(body).filter(|body| body.len() <= RESPONSE_BYTES_MAX)?;
    let status: ApiStatus = serde_json::from_slice(body).ok()?;
    Some(short(&status.message))
}

/// The start of a text, in one line.
pub(crate) fn short(text: &str) -> String {
    let printable = |character: char| if character.is_control() { ' ' } else { character };
    text.chars().take(TEXT_CHARACTERS_MAX).map(printable).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: &str, audiences: &[&str]) -> Result<Review, ReviewError> {
        let audiences: Vec<_> = audiences.iter().map(|&audience| audience.to_owned()).collect();
        parse_review(201, body.as_bytes(), &audiences)
    }

    fn refused(body: &str, audiences: &[&str]) -> String {
        match parse(body, audiences) {
            Ok(Review::Refused(why)) => why,
            other => panic!("{body}: {other:?}"),
        }
    }

    /// As Kubernetes 1.36 answers for the token of a pod.
    const POD: &str = r#"{"kind":"TokenReview","apiVersion":"authentication.k8s.io/v1","metadata":{"creationTimestamp":
        null},"spec":{"token":"x"},"status":{"authenticated":true,"user":{"username":"system:serviceaccount:a:default",
        "uid":"1","groups":["system:serviceaccounts","system:serviceaccounts:a","system:authenticated"],"extra":{
        "authentication.kubernetes.io/credential-id":["JTI=1"],"authentication.kubernetes.io/node-name":["n1"],
        "authentication.kubernetes.io/node-uid":["2"],"authentication.kubernetes.io/pod-name":["web"],
        "authentication.kubernetes.io/pod-uid":["3"]}},"audiences":["https://kubernetes.default.svc"]}}"#;

    #[test]
    fn the_token_of_a_pod_has_namespace_node_and_pod() {
        let Review::Authenticated(identity) = parse(POD, &[]).unwrap() else { panic!() };
        assert_eq!(identity.username, "system:serviceaccount:a:default");
        assert_eq!(identity.groups.len(), 3);
        assert_eq!(identity.namespace.as_deref(), Some("a"));
        assert_eq!(identity.node_name.as_deref(), Some("n1"));
        assert_eq!(identity.pod_name.as_deref(), Some("web"));
        assert_eq!(identity.source, Source::Token);
    }

    #[test]
    fn fields_that_are_not_used_may_have_any_form() {
        for (metadata, extra) in [("{}", r#"{"x":null}"#), (r#"{"creationTimestamp":"2026-01-01 00:00:00"}"#, "{}")] {
            let status = format!(r#"{{"authenticated":true,"user":{{"username":"a","extra":{extra}}}}}"#);
            let body = format!(r#"{{"metadata":{metadata},"spec":{{}},"status":{status}}}"#);
            assert!(matches!(parse(&body, &[]), Ok(Review::Authenticated(_))), "{body}");
            let strict = serde_json::from_str::<k8s_openapi::api::authentication::v1::TokenReview>(&body);
            assert!(strict.is_err(), "{body}");
        }
    }

    #[test]
    fn a_token_for_another_audience_is_refused() {
        assert!(matches!(parse(POD, &["x", "https://kubernetes.default.svc"]), Ok(Review::Authenticated(_))));
        assert_eq!(refused(POD, &["x", "y"]), "it is not for the audience x or y");
        let unaware = r#"{"status":{"authenticated":true,"user":{"username":"a"}}}"#;
        assert_eq!(refused(unaware, &["x"]), "it is not for the audience x");
        assert!(matches!(parse(unaware, &[]), Ok(Review::Authenticated(_))));
    }

    #[test]
    fn a_token_of_nobody_is_refused_with_the_servers_reason() {
        for (body, why) in [
            (r#"{"status":{"error":"[invalid bearer token,\nexpired]"}}"#, "[invalid bearer token, expired]"),
            (r#"{"status":{"authenticated":false,"user":{"username":"a"}}}"#, ""),
            (r#"{"status":{"authenticated":true}}"#, ""),
            (r#"{"status":{"authenticated":true,"user":{"username":""}}}"#, ""),
            (r#"{"status":{}}"#, ""),
        ] {
            assert_eq!(refused(body, &[]), why, "{body}");
        }
        let many = format!(r#"{{"status":{{"authenticated":true,"user":{{"username":"{}"}}}}}}"#, "a".repeat(70_000));
        assert_eq!(refused(&many, &[]), "the names of its user and groups have more than 64 KiB");
    }

    #[test]
    fn a_response_without_an_answer_is_an_error_that_shows_no_token() {
        for body in ["", "[]", "{}", "{\"status\":5}", "{\"status\":{\"authenticated\":\"secret\"}}", "secret"] {
            let error = parse(body, &[]).unwrap_err().to_string();
            assert!(error.contains("no TokenReview") && !error.contains("secret"), "{body}: {error}");
        }
        let error = parse_review(403, br#"{"kind":"Status","message":"tokenreviews is forbidden"}"#, &[]);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("403: tokenreviews is forbidden; ") && error.contains("system:auth-delegator"));
        let error = parse_review(500, b"<html>", &[]).unwrap_err().to_string();
        assert_eq!(error, "the API server answers a review of a token with 500");
        assert!(parse_review(201, &vec![b' '; RESPONSE_BYTES_MAX + 1], &[]).is_err());
    }

    #[test]
    fn a_request_has_the_token_and_the_audiences() {
        let body = |audiences: &[String]| String::from_utf8(review_body("a\"b", audiences).into()).unwrap();
        assert_eq!(
            body(&[]),
            r#"{"apiVersion":"authentication.k8s.io/v1","kind":"TokenReview","spec":{"token":"a\"b"}}"#
        );
        assert!(body(&["relay".to_owned()]).contains(r#""audiences":["relay"]"#));
    }
}
