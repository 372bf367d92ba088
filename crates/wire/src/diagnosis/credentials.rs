//! Credentials of the agent: when they expire, and whom the API server takes them for.

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::json;

use crate::{
    credentials::configuration::Configuration,
    diagnosis::{
        access_review::{post, refusal},
        expiry,
        finding::{Finding, Grade},
    },
    located::read_json,
};

const PATH: &str = "/apis/authentication.k8s.io/v1/selfsubjectreviews";

/// Group of requests without credentials.
const UNAUTHENTICATED: &str = "system:unauthenticated";

/// Lines about the client certificate and the token, if there are any. `expires`: as the exec plugin has it.
pub(super) fn expiries(configuration: &Configuration, expires: Option<Timestamp>, now: i64) -> Vec<Finding> {
    let certificate = configuration.material.identity.as_ref();
    let certificate = certificate.map(|identity| expiry::of_client(&identity.certificate, now));
    let token = bearer_token(configuration).map(|token| {
        let expires = expires.map(|time| time.as_second()).or_else(|| expiry::of_jwt(token));
        expiry::of_token(expires, now, configuration.is_renewed)
    });
    certificate.into_iter().chain(token).collect()
}

fn bearer_token(configuration: &Configuration) -> Option<&str> {
    configuration.authorization.as_ref()?.to_str().ok()?.strip_prefix("Bearer ")
}

/// Request for the own user (SelfSubjectReview).
pub(super) fn who_am_i() -> Request<Bytes> {
    post(PATH, &json!({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}))
}

#[derive(Deserialize)]
struct Review {
    status: ReviewStatus,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ReviewStatus {
    user_info: UserInfo,
}

#[derive(Deserialize)]
#[serde(default)]
#[derive(Default)]
struct UserInfo {
    username: String,
    groups: Vec<String>,
}

/// Line about the answer to [`who_am_i`].
pub(super) fn line(configuration: &Configuration, response: &Response<Bytes>) -> Finding {
    let code = response.status();
    if code == StatusCode::UNAUTHORIZED {
        let detail = "the API server does not accept them (401): check the token or certificate of the kubeconfig or \
                      ServiceAccount";
        return Finding::required("credentials", Grade::Missing, detail);
    }
    let review = read_json::<Review>(response.body()).ok().filter(|_| code.is_success());
    let Some(Review { status: ReviewStatus { user_info: UserInfo { username, groups } } }) = review else {
        // A server without such reviews, or an identity that may not ask for them.
        let detail = format!("the server does not say whom it takes them for ({})", refusal(response));
        return Finding::required("credentials", Grade::Ok, detail);
    };
    if configuration.has_credentials() && groups.iter().any(|group| group == UNAUTHENTICATED) {
        let detail = format!("the API server ignores them: to it, they are those of {username}");
        return Finding::required("credentials", Grade::Degraded, detail);
    }
    Finding::required("credentials", Grade::Ok, format!("accepted as those of {username}"))
}
