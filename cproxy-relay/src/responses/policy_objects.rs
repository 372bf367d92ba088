//! Bodies of responses with the policies of a client's pods, and the slices of the sets that these name.

use std::sync::Arc;

use cproxy_core::ObjectName;
use cproxy_relay_auth::PolicyClient;
use cproxy_relay_core::{
    Filter, Format, Interest, InterestWatch, Kind, List, ListParameters, Object, ObjectRequest, Operation, Policies,
    PolicyScope, PolicyStart, PolicyWatch, Selector, Status, VersionWish, Watch, WatchOptions, WatchParameters,
    WatchStart, envelope, object_json,
};
use tokio::select;

use crate::{
    clients::connection::{Connection, EndReason},
    policies::{PolicyService, not_synced},
    responses::body::{End, ResponseBody, WatchBody, WatchOf, watch_end},
};

/// Pods whose policies a client gets, and where to take them from.
pub(crate) struct PolicyExchange<'a> {
    service: &'a PolicyService,
    connection: &'a Arc<Connection>,
    scope: PolicyScope,
    interest: Interest,
    format: Format,
}

impl<'a> PolicyExchange<'a> {
    /// Waits until the first lists are complete, and looks up whose policies the client gets.
    ///
    /// # Errors
    /// They are not after some seconds, or the relay does not know the client's pod yet.
    pub(crate) async fn new(
        service: &'a PolicyService,
        connection: &'a Arc<Connection>,
        client: PolicyClient,
        format: Format,
    ) -> Result<Self, Status> {
        service.wait_for(0).await?;
        let scope = match client {
            PolicyClient::Pod { namespace, name, uid } => {
                PolicyScope::Pod { name: ObjectName::new(&namespace, name), uid: uid.map(Into::into) }
            }
            PolicyClient::Node(node_name) => PolicyScope::Node(node_name.into()),
            PolicyClient::Uid(uid) => {
                let name = service.policies.find_pod(&uid).ok_or_else(|| unknown_pod(&uid))?;
                PolicyScope::Pod { name, uid: Some(uid.into()) }
            }
        };
        let interest = service.policies.interest(&scope);
        Ok(Self { service, connection, scope, interest, format })
    }

    fn policies(&self) -> &Arc<Policies> {
        &self.service.policies
    }

    /// Token of what the client sees.
    pub(crate) fn token(&self, kind: Kind) -> String {
        self.policies().token(kind, &self.scope, &self.interest)
    }

    /// Body of the response to a request.
    ///
    /// # Errors
    /// There is no such object, or the version that the client wants.
    pub(crate) async fn respond(
        &self,
        request: ObjectRequest,
        slices: &Arc<cproxy_relay_core::Collection>,
        metrics: &Arc<crate::metrics::Metrics>,
    ) -> Result<ResponseBody, Status> {
        let ObjectRequest { kind, namespace, operation } = request;
        match operation {
            Operation::Get(name) => {
                let object = match kind {
                    Kind::PodPolicies => {
                        let name = ObjectName::new(namespace.as_deref().unwrap_or_default(), &*name);
                        self.policies().get(&self.scope, &name).map(Arc::new)
                    }
                    _ => slices.get("", &name).filter(|slice| self.filter(None, Selector::default()).has(slice)),
                };
                let object = object.ok_or_else(|| object_not_found(kind, &name))?;
                let bytes = self.encode(&object).ok_or_else(|| object_not_found(kind, &name))?;
                Ok(ResponseBody::whole(bytes.into(), self.connection.begin_list()))
            }
            Operation::List(parameters) => self.list(kind, namespace, parameters, slices).await,
            Operation::Watch(parameters) => {
                let (watch, end) = self.watch(kind, namespace, parameters, slices).await?;
                let holds_objects = watch.holds_objects();
                let guard = if holds_objects { self.connection.begin_list() } else { self.connection.begin() };
                Ok(ResponseBody::Watch(Box::new(WatchBody::new(watch, end, metrics.clone(), guard))))
            }
        }
    }

    fn encode(&self, object: &Object) -> Option<Vec<u8>> {
        match self.format {
            Format::Protobuf => Some(envelope(object.kind, &object.protobuf)),
            Format::Json => object_json(object, true),
        }
    }

    fn filter(&self, namespace: Option<String>, selector: Selector) -> Filter {
        Filter { visibility: Some(Arc::new(self.interest.clone())), namespace, selector }
    }

    async fn list(
        &self,
        kind: Kind,
        namespace: Option<String>,
        parameters: ListParameters,
        slices: &Arc<cproxy_relay_core::Collection>,
    ) -> Result<ResponseBody, Status> {
        let ListParameters { selector, version } = parameters;
        match version {
            VersionWish::NotOlderThan(version) => self.service.wait_for(version).await?,
            VersionWish::Exact(version) => return Err(too_old(version)),
            VersionWish::Latest | VersionWish::Any => {}
        }
        let guard = self.connection.begin_list();
        if kind == Kind::PodPolicies {
            let filter = Filter { visibility: None, namespace, selector };
            let bytes = self.policies().list(&self.scope, |meta| filter.has_meta(kind, meta), self.format);
            return Ok(ResponseBody::whole(bytes, guard));
        }
        let snapshot = slices.snapshot().ok_or_else(not_synced)?;
        let list = List::new(snapshot, self.filter(namespace, selector), self.format);
        Ok(ResponseBody::List { list: Box::new(list), has_yielded: false, guard })
    }

    async fn watch(
        &self,
        kind: Kind,
        namespace: Option<String>,
        parameters: WatchParameters,
        slices: &Arc<cproxy_relay_core::Collection>,
    ) -> Result<(WatchOf, End), Status> {
        let WatchParameters { selector, version, sends_initial_events, marks_end, wants_bookmarks, timeout_seconds } =
            parameters;
        let resumed = version.filter(|_| !sends_initial_events);
        if let Some(version) = version {
            self.service.wait_for(version).await?;
        }
        let end = watch_end(self.connection, timeout_seconds);
        if kind == Kind::PodPolicies {
            let start = match resumed {
                Some(version) => PolicyStart::After(version),
                None => PolicyStart::Initial { sends_end: marks_end },
            };
            let filter = Filter { visibility: None, namespace, selector };
            let policies = self.policies().clone();
            let watch = PolicyWatch::new(policies, self.scope.clone(), filter, wants_bookmarks, self.format, start);
            return Ok((WatchOf::Policies(watch), end));
        }
        let start = match resumed.filter(|version| self.policies().has_published(*version)) {
            Some(version) => WatchStart::After(version),
            None if resumed.is_some() => return Err(too_old(resumed.unwrap_or_default())),
            None => WatchStart::Initial { snapshot: slices.snapshot().ok_or_else(not_synced)?, sends_end: marks_end },
        };
        let options = WatchOptions { filter: self.filter(namespace, selector), wants_bookmarks };
        let watch = Watch::new(slices.clone(), options, self.format, start);
        // A policy that names other sets: the client lists them.
        let others = InterestWatch::new(self.policies().clone(), self.scope.clone(), self.interest.clone());
        let end = Box::pin(async move {
            select! {
                reason = end => reason,
                () = others => EndReason::View,
            }
        });
        Ok((WatchOf::Objects(watch), end))
    }
}

fn too_old(version: u64) -> Status {
    Status::new(410, "Expired", format!("The provided resource version is too old: {version}"))
}

/// Error of a guest that is there before its Pod's object.
fn unknown_pod(uid: &str) -> Status {
    let message = format!("the relay knows no pod with the UID {:?} yet", cproxy_core::printable(uid));
    Status { retry_after_seconds: 1, ..Status::new(503, "ServiceUnavailable", message) }
}

/// Error of an object that is not there, or not the client's: it cannot tell.
pub(crate) fn object_not_found(kind: Kind, name: &str) -> Status {
    let resource = match kind.group() {
        "" => kind.plural().to_owned(),
        group => format!("{}.{group}", kind.plural()),
    };
    Status {
        object: Some(Box::new((name.to_owned(), kind.group(), kind.plural()))),
        ..Status::new(404, "NotFound", format!("{resource} {name:?} not found"))
    }
}
