//! Rights of the own identity: SelfSubjectAccessReview (authorization.k8s.io/v1).

use bytes::Bytes;
use http::{
    Request, Response, StatusCode,
    header::{ACCEPT, CONTENT_TYPE},
};
use serde::Deserialize;
use serde_json::json;

use crate::{
    codec::{content_type::JSON, status::Status},
    error_text::one_line,
    located::read_json,
};

const PATH: &str = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";

/// Right that the agent needs (images/kubernetes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Right {
    /// Verb of the API.
    pub verb: &'static str,
    /// API group; empty for the core group.
    pub group: &'static str,
    /// Plural name of the resource.
    pub resource: &'static str,
    /// Whether the agent gets no Services without it.
    pub is_required: bool,
}

/// Rights of the agent; those on Nodes are for the Node of its name.
pub(crate) const RIGHTS: [Right; 6] = [
    Right::new("list", "", "services"),
    Right::new("watch", "", "services"),
    Right::new("list", "discovery.k8s.io", "endpointslices"),
    Right::new("watch", "discovery.k8s.io", "endpointslices"),
    Right { is_required: false, ..Right::new("list", "", "nodes") },
    Right { is_required: false, ..Right::new("watch", "", "nodes") },
];

impl Right {
    /// A right that is required.
    #[must_use]
    pub const fn new(verb: &'static str, group: &'static str, resource: &'static str) -> Self {
        Self { verb, group, resource, is_required: true }
    }

    /// Request for its review; with a name, for the object of that name alone.
    #[must_use]
    pub fn request(&self, name: Option<&str>) -> Request<Bytes> {
        let Self { verb, group, resource, .. } = self;
        let mut attributes = json!({"verb": verb, "group": group, "resource": resource});
        if let (Some(name), Some(fields)) = (name, attributes.as_object_mut()) {
            fields.insert("name".to_owned(), name.into());
        }
        let kind = "SelfSubjectAccessReview";
        post(
            PATH,
            &json!({"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": {
                "resourceAttributes": attributes,
            }}),
        )
    }

    /// Remedy if it is missing.
    #[must_use]
    pub fn remedy(&self) -> String {
        let Self { verb, group, resource, .. } = self;
        format!("not permitted: grant the verb {verb} on resource {resource:?} of apiGroup {group:?}")
    }
}

/// Answer to the request for a review.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AccessReview {
    /// The identity has the right.
    Allowed,
    /// It does not.
    Denied,
    /// The server has no such reviews, for this reason.
    NotReviewed(String),
    /// The review has failed, for this reason.
    Failed(String),
}

#[derive(Deserialize)]
struct Review {
    status: ReviewStatus,
}

#[derive(Deserialize)]
struct ReviewStatus {
    allowed: bool,
}

impl AccessReview {
    /// Reads the response to [`Right::request`].
    #[must_use]
    pub fn read(response: &Response<Bytes>) -> Self {
        match response.status() {
            StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED => Self::NotReviewed(refusal(response)),
            code if !code.is_success() => Self::Failed(refusal(response)),
            _ => match read_json::<Review>(response.body()) {
                Ok(review) if review.status.allowed => Self::Allowed,
                Ok(_) => Self::Denied,
                Err(error) => Self::Failed(format!("its answer cannot be read: {error}")),
            },
        }
    }
}

/// Request that creates a review.
pub(crate) fn post(path: &'static str, review: &serde_json::Value) -> Request<Bytes> {
    let mut request = Request::new(Bytes::from(review.to_string()));
    *request.method_mut() = http::Method::POST;
    *request.uri_mut() = http::Uri::from_static(path);
    for name in [ACCEPT, CONTENT_TYPE] {
        request.headers_mut().insert(name, http::HeaderValue::from_static(JSON));
    }
    request
}

/// Code and message of a response without success, in one line.
pub(crate) fn refusal(response: &Response<Bytes>) -> String {
    let message = cproxy_core::shortened(one_line(&Status::read(response.body(), None).message));
    format!("{}: {message}", response.status().as_u16())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response(code: u16, body: &str) -> Response<Bytes> {
        Response::builder().status(code).body(Bytes::from(body.to_owned())).unwrap()
    }

    #[test]
    fn a_review_names_the_right_and_perhaps_one_object() {
        let right = Right::new("list", "discovery.k8s.io", "endpointslices");
        let attributes = |name| {
            let request = right.request(name);
            let review: serde_json::Value = serde_json::from_slice(request.body()).unwrap();
            review.pointer("/spec/resourceAttributes").cloned().unwrap()
        };
        let plain = json!({"verb": "list", "group": "discovery.k8s.io", "resource": "endpointslices"});
        assert_eq!(attributes(None), plain);
        assert_eq!(attributes(Some("n")).get("name"), Some(&json!("n")));
    }

    #[test]
    fn answers_are_told_apart() {
        let read = |code, body| AccessReview::read(&response(code, body));
        assert_eq!(read(201, r#"{"status":{"allowed":true}}"#), AccessReview::Allowed);
        assert_eq!(read(201, r#"{"status":{"allowed":false,"denied":true}}"#), AccessReview::Denied);
        let status = r#"{"kind":"Status","message":"read\n\u001bonly","code":405}"#;
        assert_eq!(read(405, status), AccessReview::NotReviewed("405: read \u{fffd}only".to_owned()));
        assert_eq!(read(403, "no"), AccessReview::Failed("403: no".to_owned()));
        assert!(matches!(read(200, "{}"), AccessReview::Failed(_)));
    }
}
