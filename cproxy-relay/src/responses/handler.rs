//! Responses to requests.

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    sync::Arc,
    task::Poll,
};

use bytes::Bytes;
use cproxy_relay_auth::{ClientView, Identity, PolicyClient, Refusal, Source, identify};
use cproxy_relay_core::{
    Filter, Format, Kind, List, ListParameters, Meta, ObjectRequest, Operation, Status, Target, VersionWish,
    Visibility, Watch, WatchOptions, WatchParameters, WatchStart, discovery, envelope, object_json, parse,
};
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode,
    header::{
        ACCEPT, ACCEPT_ENCODING, AUTHORIZATION, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_TYPE, RETRY_AFTER, VARY,
    },
};

use crate::{
    cache::not_synced,
    clients::{connection::Connection, slots::NoSlot},
    policies::PolicyService,
    relay::{Relay, ReviewClient},
    responses::{
        body::{ResponseBody, WatchBody, WatchOf, watch_end},
        lists::{Compression, Key},
        policy_objects::{PolicyExchange, object_not_found},
    },
};

/// Header with the token of a client's view, if it does not see everything.
const VIEW: HeaderName = HeaderName::from_static("cproxy-view");

const JSON: HeaderValue = HeaderValue::from_static("application/json");
const PROTOBUF: HeaderValue = HeaderValue::from_static("application/vnd.kubernetes.protobuf");
const PROTOBUF_STREAM: HeaderValue = HeaderValue::from_static("application/vnd.kubernetes.protobuf;stream=watch");

/// A client's view as the filter of its objects.
struct VisibleTo(Arc<ClientView>);

impl Visibility for VisibleTo {
    fn allows(&self, kind: Kind, meta: &Meta) -> bool {
        let Some(kind) = kind.resource() else { return false };
        self.0.sees(kind, &meta.namespace, &meta.name, meta.label("kubernetes.io/service-name"))
    }
}

/// Objects or events that may be looked at for a selector for the cost of a small request.
const SELECTED_OBJECTS: usize = 500;

/// Cost of a request for the policies of a node's pods, or of a pod by its UID: all pods are looked at.
const MANY_PODS_COST: u32 = 10;

/// Bytes of an object for the cost of a small request.
const OBJECT_BYTES: usize = 32 << 10;

/// Response to a request on a connection.
pub(crate) async fn respond<B>(
    relay: Arc<Relay>,
    connection: Arc<Connection>,
    request: Request<B>,
) -> Response<ResponseBody> {
    let (head, _) = request.into_parts();
    let accept = head.headers.get(ACCEPT).and_then(|header| header.to_str().ok());
    let format = Format::accepted(accept.unwrap_or_default());
    let has_policies = relay.policies.is_some();
    let (labels, response) = match parse(head.uri.path(), head.uri.query().unwrap_or_default(), has_policies) {
        Err(status) => {
            let status = if connection.admits_request(1) { status } else { too_many_requests() };
            (("other", verb(&head.method)), Err(status))
        }
        Ok(target) => {
            let labels = labels(&target, &head.method);
            let exchange = Exchange {
                relay: &relay,
                connection: &connection,
                headers: &head.headers,
                method: &head.method,
                format,
            };
            (labels, exchange.respond(target).await)
        }
    };
    let response = response.unwrap_or_else(|status| refused(&status, format));
    relay.metrics.count_request((labels.0, labels.1, response.status().as_u16()));
    response
}

/// Values of the labels of a counted request.
fn labels(target: &Target, method: &Method) -> (&'static str, &'static str) {
    match target {
        Target::Objects(request) => {
            let verb = match request.operation {
                Operation::Get(_) => "get",
                Operation::List(_) => "list",
                Operation::Watch(_) => "watch",
            };
            (request.kind.plural(), verb)
        }
        Target::Discovery(_) | Target::Version => ("discovery", verb(method)),
        Target::Health(_) => ("health", verb(method)),
    }
}

fn verb(method: &Method) -> &'static str {
    if *method == Method::GET { "get" } else { "other" }
}

/// One request.
struct Exchange<'a> {
    relay: &'a Arc<Relay>,
    connection: &'a Arc<Connection>,
    headers: &'a HeaderMap,
    method: &'a Method,
    /// The best format that the client accepts.
    format: Option<Format>,
}

impl Exchange<'_> {
    async fn respond(&self, target: Target) -> Result<Response<ResponseBody>, Status> {
        if let Target::Health(path) = target {
            return Ok(health(self.relay, path));
        }
        if !self.connection.admits_request(self.cost(&target)) {
            return Err(too_many_requests());
        }
        if *self.method != Method::GET {
            return Err(method_not_allowed());
        }
        match target {
            Target::Discovery(path) => {
                let document =
                    discovery(&path, self.relay.policies.is_some()).ok_or_else(cproxy_relay_core::not_found)?;
                Ok(json_response(document.to_string()))
            }
            Target::Version => Ok(json_response(self.relay.server_version())),
            Target::Health(path) => Ok(health(self.relay, path)),
            Target::Objects(request) => self.objects(request).await,
        }
    }

    /// Cost of a request, compared with a small one: all objects, or all events since a version, are looked at for a
    /// selector or a namespace.
    fn cost(&self, target: &Target) -> u32 {
        let Target::Objects(ObjectRequest { kind, namespace, operation }) = target else { return 1 };
        let (selector, version) = match operation {
            Operation::Get(_) => return 1,
            Operation::List(parameters) => (&parameters.selector, None),
            Operation::Watch(parameters) => {
                (&parameters.selector, parameters.version.filter(|_| !parameters.sends_initial_events))
            }
        };
        if namespace.is_none() && selector.is_everything() {
            return 1;
        }
        let looked_at = match version {
            Some(version) => self.relay.cache.collection(*kind).events_after(version),
            None => self.relay.cache.summary(*kind).map_or(0, |summary| summary.objects),
        };
        1 + u32::try_from(looked_at / SELECTED_OBJECTS).unwrap_or(u32::MAX - 1)
    }

    async fn objects(&self, request: ObjectRequest) -> Result<Response<ResponseBody>, Status> {
        let (identity, view) = self.authorize().await?;
        self.connection.accept_client();
        let Some(format) = self.format else { return Err(not_acceptable()) };
        if let Some(service) = self.relay.policies.as_deref().filter(|_| request.kind.resource().is_none()) {
            return self.policies(service, &identity, request, format).await;
        }
        let token = view.token().map(str::to_owned);
        let visibility = token.is_some().then(|| Arc::new(VisibleTo(view)) as Arc<dyn Visibility>);
        let filter = Filter { visibility, namespace: request.namespace.clone(), ..Filter::default() };
        let mut response = match request.operation {
            Operation::Get(name) => self.get(request.kind, filter, &name, format)?,
            Operation::List(parameters) => self.list(request.kind, filter, token.clone(), parameters, format).await?,
            Operation::Watch(parameters) => self.watch(request.kind, filter, parameters, format).await?,
        };
        if let Some(token) = token.and_then(|token| HeaderValue::try_from(token).ok()) {
            response.headers_mut().insert(VIEW, token);
        }
        tracing::debug!("{} {}: {}", identity.username, request.kind.plural(), response.status());
        Ok(response)
    }

    /// Response about the policies of the client's pods.
    async fn policies(
        &self,
        service: &PolicyService,
        identity: &Identity,
        request: ObjectRequest,
        format: Format,
    ) -> Result<Response<ResponseBody>, Status> {
        let client = self.relay.views().policy(self.connection.peer().address(), identity);
        let client = client.map_err(|refusal| self.refusal(&refusal))?;
        let is_by_name = matches!(client, PolicyClient::Pod { .. });
        if !is_by_name && !self.connection.admits_request(MANY_PODS_COST) {
            return Err(too_many_requests());
        }
        let exchange = PolicyExchange::new(service, self.connection, client, format).await?;
        let (kind, token) = (request.kind, exchange.token(request.kind));
        let is_watch = matches!(request.operation, Operation::Watch(_));
        let slices = self.relay.cache.collection(Kind::AddressSlices);
        let mut response = response(format, exchange.respond(request, slices, &self.relay.metrics).await?);
        let headers = response.headers_mut();
        if is_watch && format == Format::Protobuf {
            headers.insert(CONTENT_TYPE, PROTOBUF_STREAM);
        }
        if let Ok(token) = HeaderValue::try_from(token) {
            headers.insert(VIEW, token);
        }
        tracing::debug!("{} {}: {}", identity.username, kind.plural(), response.status());
        Ok(response)
    }

    /// Identity and view of the client.
    async fn authorize(&self) -> Result<(Arc<Identity>, Arc<ClientView>), Status> {
        let slot = self.connection.slot();
        let mut identifying = pin!(self.identify());
        let identity = match poll_once(identifying.as_mut()).await {
            Some(identity) => identity,
            None => {
                let _asking = slot.await_review().ok_or_else(|| self.no_slot(NoSlot::Full))?;
                identifying.await
            }
        };
        let identity = identity.map_err(|refusal| self.refusal(&refusal))?;
        let view = self.relay.views().select(self.connection.peer().address(), &identity);
        let view = view.map_err(|refusal| self.refusal(&refusal))?;
        let has_ended = slot.admit(&identity).map_err(|reason| self.no_slot(reason))?;
        self.relay.metrics.connections_displaced.add(has_ended.into());
        if let (Source::Token, Some(authorization)) = (identity.source, self.headers.get(AUTHORIZATION)) {
            let is_remembered = self.connection.remember_token(authorization.as_bytes(), &identity, &self.relay.leases);
            if !is_remembered {
                return Err(too_many_tokens());
            }
        }
        Ok((identity, view))
    }

    async fn identify(&self) -> Result<Arc<Identity>, Refusal> {
        let authorization = self.headers.get(AUTHORIZATION).map(HeaderValue::as_bytes);
        let reviewer = self.relay.reviewer.as_deref();
        match (reviewer, authorization) {
            // Without authentication, a token that the client sends anyway is not looked at.
            (None, _) if !self.relay.authenticates => identify_plainly(self.connection.peer()).await,
            _ => identify(self.connection.peer(), authorization, reviewer).await,
        }
    }

    fn no_slot(&self, reason: NoSlot) -> Status {
        self.relay.metrics.connections_refused.add(1);
        too_many_connections(reason)
    }

    fn refusal(&self, refusal: &Refusal) -> Status {
        self.relay.metrics.refusals.count(refusal);
        let reason = match refusal.status() {
            401 => "Unauthorized",
            403 => "Forbidden",
            429 => "TooManyRequests",
            _ => "ServiceUnavailable",
        };
        let retry_after = refusal.retry_after_seconds().unwrap_or(0);
        self.relay.refusal_log.log(self.connection.peer().address(), refusal);
        Status {
            retry_after_seconds: retry_after.try_into().unwrap_or(u32::MAX),
            ..Status::new(refusal.status(), reason, refusal.message())
        }
    }

    fn get(&self, kind: Kind, filter: Filter, name: &str, format: Format) -> Result<Response<ResponseBody>, Status> {
        let collection = self.relay.cache.collection(kind);
        if collection.summary().is_none() {
            return Err(not_synced(kind));
        }
        let namespace = filter.namespace.as_deref().unwrap_or_default();
        let object = collection.get(namespace, name).filter(|object| filter.has(object));
        let object = object.ok_or_else(|| object_not_found(kind, name))?;
        let cost = u32::try_from(object.protobuf.len() / OBJECT_BYTES).unwrap_or(u32::MAX);
        if cost > 0 && !self.connection.admits_request(cost) {
            return Err(too_many_requests());
        }
        let bytes = match format {
            Format::Protobuf => envelope(kind, &object.protobuf),
            Format::Json => object_json(&object, true).ok_or_else(|| unreadable(kind, name))?,
        };
        Ok(response(format, ResponseBody::whole(bytes.into(), self.connection.begin_list())))
    }

    async fn list(
        &self,
        kind: Kind,
        mut filter: Filter,
        view: Option<String>,
        parameters: ListParameters,
        format: Format,
    ) -> Result<Response<ResponseBody>, Status> {
        let collection = self.relay.cache.collection(kind);
        let least = match parameters.version {
            VersionWish::NotOlderThan(version) | VersionWish::Exact(version) => version,
            VersionWish::Latest | VersionWish::Any => 0,
        };
        self.relay.cache.wait_for(kind, least).await?;
        filter.selector = parameters.selector;
        let header = self.headers.get(ACCEPT_ENCODING).and_then(|header| header.to_str().ok()).unwrap_or_default();
        let is_exact = matches!(parameters.version, VersionWish::Exact(_));
        // Of a list that several clients ask for: there are as many selectors as clients like.
        let is_common = filter.selector.is_everything() && filter.namespace.is_none() && !is_exact;
        let compression = Compression::accepted(header).filter(|_| is_common);
        let key = compression.map(|compression| Key { kind, view, format, compression });
        let compressed = match key {
            Some(key) => self.relay.lists.get(key, collection, &filter, parameters.version).await,
            None => None,
        };
        let guard = self.connection.begin_list();
        if let Some((bytes, compression)) = compressed.zip(compression) {
            let mut response = response(format, ResponseBody::whole(bytes, guard));
            let headers = response.headers_mut();
            headers.insert(CONTENT_ENCODING, HeaderValue::from_static(compression.as_str()));
            headers.insert(VARY, HeaderValue::from_static("Accept-Encoding"));
            return Ok(response);
        }
        let snapshot = collection.snapshot().ok_or_else(|| not_synced(kind))?;
        if is_exact && snapshot.version != least {
            let message = format!("The provided resource version is too old: {least}");
            return Err(Status::new(410, "Expired", message));
        }
        let list = List::new(snapshot, filter, format);
        Ok(response(format, ResponseBody::List { list: Box::new(list), has_yielded: false, guard }))
    }

    async fn watch(
        &self,
        kind: Kind,
        mut filter: Filter,
        parameters: WatchParameters,
        format: Format,
    ) -> Result<Response<ResponseBody>, Status> {
        let cache = &self.relay.cache;
        cache.wait_for(kind, parameters.version.unwrap_or(0)).await?;
        let collection = cache.collection(kind).clone();
        let start = match parameters.version {
            Some(version) if !parameters.sends_initial_events => WatchStart::After(version),
            _ => {
                let snapshot = collection.snapshot().ok_or_else(|| not_synced(kind))?;
                WatchStart::Initial { snapshot, sends_end: parameters.marks_end }
            }
        };
        filter.selector = parameters.selector;
        let options = WatchOptions { filter, wants_bookmarks: parameters.wants_bookmarks };
        let end = watch_end(self.connection, parameters.timeout_seconds);
        let watch = Watch::new(collection, options, format, start);
        // The objects that come first have to be read in time, like a list.
        let guard = if watch.holds_objects() { self.connection.begin_list() } else { self.connection.begin() };
        let body = WatchBody::new(WatchOf::Objects(watch), end, self.relay.metrics.clone(), guard);
        let mut response = response(format, ResponseBody::Watch(Box::new(body)));
        if format == Format::Protobuf {
            response.headers_mut().insert(CONTENT_TYPE, PROTOBUF_STREAM);
        }
        Ok(response)
    }
}

/// Identity of a client that needs no credentials.
async fn identify_plainly(peer: &cproxy_relay_auth::Peer) -> Result<Arc<Identity>, Refusal> {
    match identify::<ReviewClient>(peer, None, None).await {
        Ok(identity) => Ok(identity),
        Err(_) => Ok(Arc::new(Identity::anonymous())),
    }
}

fn response(format: Format, body: ResponseBody) -> Response<ResponseBody> {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, if format == Format::Json { JSON } else { PROTOBUF });
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache, private"));
    response
}

/// Response to a health check.
fn health(relay: &Relay, path: &str) -> Response<ResponseBody> {
    let (code, text) = relay.health_text(path);
    let mut response = Response::new(ResponseBody::Short(text.into()));
    *response.status_mut() = code;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}

/// Response with a document in JSON.
fn json_response(document: impl Into<Bytes>) -> Response<ResponseBody> {
    response(Format::Json, ResponseBody::Short(document.into()))
}

fn refused(status: &Status, format: Option<Format>) -> Response<ResponseBody> {
    let format = format.unwrap_or(Format::Json);
    let mut response = response(format, ResponseBody::Short(status.body(format)));
    *response.status_mut() = StatusCode::from_u16(status.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    if status.retry_after_seconds > 0 {
        response.headers_mut().insert(RETRY_AFTER, status.retry_after_seconds.into());
    }
    response
}

fn too_many_connections(reason: NoSlot) -> Status {
    let message = match reason {
        NoSlot::Full => "the relay has as many connections as --max-connections allows: try another replica".to_owned(),
        NoSlot::Share(share) => format!("this client has {share} connections, as many as one may have: close some"),
    };
    Status { retry_after_seconds: 5, ..Status::new(429, "TooManyRequests", message) }
}

fn too_many_tokens() -> Status {
    let message = "this connection has shown too many tokens: open another one";
    Status { retry_after_seconds: 1, ..Status::new(429, "TooManyRequests", message) }
}

/// Output of a future that waits for nothing.
async fn poll_once<F: Future>(mut future: Pin<&mut F>) -> Option<F::Output> {
    poll_fn(|context| {
        Poll::Ready(match future.as_mut().poll(context) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        })
    })
    .await
}

/// Error of apiserver/pkg/endpoints/responsewriter and util/flowcontrol 1.36.
fn too_many_requests() -> Status {
    let message = "Too many requests, please try again later.";
    Status { retry_after_seconds: 1, ..Status::new(429, "TooManyRequests", message) }
}

fn method_not_allowed() -> Status {
    Status::new(405, "MethodNotAllowed", "the relay is read-only: it allows GET")
}

/// Error of apiserver/pkg/endpoints/handlers/negotiation/errors.go 1.36.
fn not_acceptable() -> Status {
    let message = "only the following media types are accepted: application/json, application/vnd.kubernetes.protobuf";
    Status::new(406, "NotAcceptable", message)
}

fn unreadable(kind: Kind, name: &str) -> Status {
    let message = format!("the API server's {} {name:?} ({}) is broken protobuf", kind.singular(), kind.api_version());
    Status::new(500, "InternalError", message)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use cproxy_relay_auth::{Peer, PeerAddress, Views};
    use cproxy_relay_core::{Object, Update};

    use super::*;
    use crate::{cache::Cache, clients::request_limit::REQUESTS_BURST};

    const SERVICES: &str = "/api/v1/services";

    fn service(name: &str, version: u64, bytes: usize) -> Object {
        let meta = Meta { namespace: "x".into(), name: name.into(), version, ..Meta::default() };
        Object { kind: Kind::Services, meta, protobuf: vec![0; bytes].into() }
    }

    /// Relay with a large Service, and with events since version 1.
    fn relay(events: u64) -> Arc<Relay> {
        let cache = Arc::new(Cache::new(64 << 20));
        let listed = [Update::ListStarted, Update::Listed(service("large", 1, 1 << 20)), Update::ListDone(1)];
        let applied = (0..events).map(|number| Update::Applied(service(&format!("s{number}"), number + 2, 10)));
        for update in listed.into_iter().chain(applied) {
            cache.apply(Kind::Services, update);
        }
        Arc::new(Relay::new(cache, None, None, Views::everything(), 10, Duration::ZERO))
    }

    /// Number of the same requests that a new connection may send at once.
    async fn admitted(relay: &Arc<Relay>, target: &str) -> u32 {
        let peer = PeerAddress::Vsock { cid: 3 };
        let slot = relay.slots.enter(&peer).0.unwrap();
        let connection = Arc::new(Connection::new(Peer::new(peer, None), slot));
        let mut count = 0;
        loop {
            let request = Request::get(target).header(ACCEPT, PROTOBUF).body(()).unwrap();
            match respond(relay.clone(), connection.clone(), request).await.status() {
                StatusCode::OK => count += 1,
                StatusCode::TOO_MANY_REQUESTS => return count,
                status => panic!("{target}: {status}"),
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn requests_cost_the_objects_events_and_bytes_that_they_are_about() {
        let relay = relay(5_000);
        let watch = format!("{SERVICES}?watch=true&resourceVersion");
        for (target, cost) in [
            (format!("{SERVICES}?resourceVersion=0"), 1),
            (format!("{SERVICES}?labelSelector=a"), 1 + 10),
            ("/api/v1/namespaces/x/services".to_owned(), 1 + 10),
            (format!("{watch}=1"), 1),
            (format!("{watch}=1&labelSelector=a"), 1 + 10),
            (format!("{watch}=1&fieldSelector=metadata.name%3Da"), 1 + 10),
            (format!("{watch}=4001&labelSelector=a"), 1 + 2),
            ("/api/v1/namespaces/x/services/s1".to_owned(), 1),
            ("/api/v1/namespaces/x/services/large".to_owned(), 1 + 32),
        ] {
            assert_eq!(admitted(&relay, &target).await, REQUESTS_BURST.div_ceil(cost), "{target}");
            // The client's bound is over.
            tokio::time::advance(Duration::from_secs(60)).await;
        }
    }
}
