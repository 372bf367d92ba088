//! Audit log of kube-apiserver: each request with its user, when its response begins and ends.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::{manifest, sandbox::Sandbox};

/// Start of the agent's User-Agent.
const AGENT: &str = "cproxy/";

/// Audit log of one API server.
#[derive(Debug)]
pub struct AuditLog {
    policy: PathBuf,
    log: PathBuf,
}

/// Request of the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditedRequest {
    /// Name of its user.
    pub user: String,
    /// Path and query.
    pub uri: String,
    /// Status code.
    pub code: u64,
    /// The response is complete.
    pub is_done: bool,
}

impl AuditLog {
    /// Prepares a log of this name.
    pub fn create(sandbox: &Sandbox, name: &str) -> Self {
        let policy = json!({
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "omitStages": ["RequestReceived"],
            "rules": [{"level": "Metadata"}],
        });
        let policy = manifest::write_text(sandbox.dir(), &format!("{name}.policy"), &policy.to_string());
        Self { policy, log: sandbox.dir().join(format!("{name}.audit")) }
    }

    /// Flags of kube-apiserver.
    pub fn flags(&self) -> [String; 2] {
        [format!("--audit-policy-file={}", self.policy.display()), format!("--audit-log-path={}", self.log.display())]
    }

    /// The agent's requests so far, in order.
    pub fn requests(&self) -> Vec<AuditedRequest> {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let mut requests = Vec::<(String, AuditedRequest)>::new();
        // The last line may be incomplete.
        for event in log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
            let text = |path| event.pointer(path).and_then(Value::as_str).unwrap_or_default().to_owned();
            if !text("/userAgent").starts_with(AGENT) {
                continue;
            }
            let (id, is_done) = (text("/auditID"), text("/stage") == "ResponseComplete");
            let code = event.pointer("/responseStatus/code").and_then(Value::as_u64).unwrap_or_default();
            match requests.iter_mut().find(|(other, _)| *other == id) {
                Some((_, request)) => (request.is_done, request.code) = (is_done, code),
                None => {
                    let (user, uri) = (text("/user/username"), text("/requestURI"));
                    requests.push((id, AuditedRequest { user, uri, code, is_done }));
                }
            }
        }
        requests.into_iter().map(|(_, request)| request).collect()
    }

    /// The agent's lists of this resource so far: all requests but watches that go on from a version.
    pub fn lists(&self, resource: &str) -> Vec<AuditedRequest> {
        let of_resource = |request: &AuditedRequest| request.uri.contains(&format!("/{resource}?"));
        self.requests().into_iter().filter(|request| of_resource(request) && !request.is_resumed()).collect()
    }

    /// Checks that the agent has got one list of Services and one of EndpointSlices: later watches go on from there.
    ///
    /// # Panics
    /// With the lists, if there are more.
    #[track_caller]
    pub fn assert_one_list_each(&self) {
        for resource in ["services", "endpointslices"] {
            let lists = self.lists(resource);
            assert_eq!(lists.iter().filter(|list| list.code == 200).count(), 1, "{lists:#?}");
        }
    }
}

impl AuditedRequest {
    /// Whether it is a watch that goes on from a version.
    pub fn is_resumed(&self) -> bool {
        let has = |parameter: &str| self.uri.split(['?', '&']).any(|one| one.starts_with(parameter));
        has("watch=true") && has("resourceVersion=") && !has("sendInitialEvents=") && !self.uri.ends_with("Version=0")
    }
}
