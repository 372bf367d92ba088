//! Two watches as one stream of events.
//!
//! Lists are streamed where the server can; where it refuses, they come from its cache, whole: paging would make it a
//! quorum read from etcd.

use std::{fmt::Debug, time::Duration};

use futures_util::StreamExt;
use http::Uri;
use kube::{
    Api, Client, Resource,
    runtime::{
        WatchStreamExt,
        watcher::{self, Config, Error},
    },
};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;

use super::{
    client::chain,
    objects::{EndpointSlice, Service},
};
use crate::model::{Event, Kind, ObjectName};

/// The status of a watch that starts before what the server still remembers: no failure, so no back-off.
const GONE: u16 = 410;
const RELIST_JITTER_MAX: Duration = Duration::from_millis(500);

const LIST_SILENCE_MAX: Duration = Duration::from_secs(60);
/// kube's own pauses between attempts, jitter included, are shorter.
const BACKOFF_MAX: Duration = Duration::from_secs(60);
const WATCH_SILENCE_MAX: Duration = Duration::from_secs(310);

/// A kind that is watched.
trait Watched: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static {
    const KIND: Kind;

    /// The selectors of kube-proxy 1.36 (cmd/kube-proxy/app/server.go).
    fn select(config: Config) -> Config;
    fn applied(self) -> Event;
    fn deleted(name: ObjectName) -> Event;
}

impl Watched for Service {
    const KIND: Kind = Kind::Services;

    fn select(config: Config) -> Config {
        config.labels("!service.kubernetes.io/service-proxy-name").fields("spec.clusterIP!=None")
    }
    fn applied(self) -> Event {
        Event::Service(Box::new(self))
    }
    fn deleted(name: ObjectName) -> Event {
        Event::ServiceDeleted(name)
    }
}

impl Watched for EndpointSlice {
    const KIND: Kind = Kind::EndpointSlices;

    fn select(config: Config) -> Config {
        config.labels("!service.kubernetes.io/headless")
    }
    fn applied(self) -> Event {
        Event::EndpointSlice(Box::new(self))
    }
    fn deleted(name: ObjectName) -> Event {
        Event::EndpointSliceDeleted(name)
    }
}

/// Follows the API server for ever, with back-off; ends when nobody listens any more.
pub async fn watch(client: Client, url: Uri, events: mpsc::Sender<Vec<Event>>) {
    tokio::join!(
        follow::<Service>(client.clone(), &url, events.clone()),
        follow::<EndpointSlice>(client, &url, events),
    );
}

async fn follow<K: Watched>(client: Client, url: &Uri, events: mpsc::Sender<Vec<Event>>) {
    let mut can_stream = true;
    loop {
        let api = Api::<K>::all(client.clone());
        let mut stream = std::pin::pin!(watcher::watcher(api, config::<K>(can_stream)).default_backoff());
        let mut patience = LIST_SILENCE_MAX;
        loop {
            let Ok(item) = tokio::time::timeout(patience, stream.next()).await else {
                tracing::warn!("no word about {} from {url} for {patience:?}; trying again", K::plural(&()));
                break;
            };
            match item {
                None => break,
                Some(Ok(event)) => {
                    patience = silence_max(&event);
                    let Some(event) = translate(event) else { continue };
                    if events.send(vec![event]).await.is_err() {
                        return;
                    }
                }
                Some(Err(error)) if can_stream && refuses_streaming(&error) => {
                    tracing::info!(
                        "the API server does not stream lists of {}: listing from its cache",
                        K::plural(&())
                    );
                    can_stream = false;
                    break;
                }
                Some(Err(error)) if is_gone(&error) => {
                    tracing::info!("the watch of {} is too old to be resumed: listing anew", K::plural(&()));
                    tokio::time::sleep(jitter()).await;
                    break;
                }
                Some(Err(error)) => {
                    tracing::warn!("{}; trying again", describe::<K>(&error, url));
                    patience = patience.max(LIST_SILENCE_MAX + BACKOFF_MAX);
                }
            }
        }
    }
}

/// How long a server that is alive may say nothing: hardly at all in the middle of a list; after that the server itself
/// ends each watch within the timeout that kube asks for (290 s).
fn silence_max<K>(event: &watcher::Event<K>) -> Duration {
    match event {
        watcher::Event::Init | watcher::Event::InitApply(_) => LIST_SILENCE_MAX,
        watcher::Event::InitDone | watcher::Event::Apply(_) | watcher::Event::Delete(_) => WATCH_SILENCE_MAX,
    }
}

/// After an outage all agents of a cluster list at once: this spreads them without making any wait for long.
fn jitter() -> Duration {
    let mut bytes = [0; 2];
    // Without randomness (early in a boot) there is no jitter.
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::NONBLOCK).ok();
    RELIST_JITTER_MAX * u32::from(u16::from_ne_bytes(bytes)) / (1 << 16)
}

fn config<K: Watched>(can_stream: bool) -> Config {
    let config = K::select(Config::default());
    if can_stream { config.streaming_lists() } else { Config { page_size: None, ..config.any_semantic() } }
}

fn translate<K: Watched>(event: watcher::Event<K>) -> Option<Event> {
    Some(match event {
        watcher::Event::Init => Event::ListStarted(K::KIND),
        watcher::Event::InitApply(object) | watcher::Event::Apply(object) => object.applied(),
        watcher::Event::InitDone => Event::ListDone(K::KIND),
        watcher::Event::Delete(object) => {
            let meta = object.meta();
            K::deleted(ObjectName::new(meta.namespace.as_deref()?, meta.name.as_deref()?))
        }
    })
}

/// A server that does not know `sendInitialEvents` calls the request invalid (400, 422) or forbids the parameter by
/// these codes; what a retry can mend (401, 403, 410, 429, 5xx) says nothing about it.
fn refuses_streaming(error: &Error) -> bool {
    matches!(error, Error::WatchStartFailed(kube::Error::Api(status)) if matches!(status.code, 400 | 405 | 422))
}

/// 410, as an event or as the answer to the request.
fn is_gone(error: &Error) -> bool {
    match error {
        Error::WatchError(status) => status.code == GONE,
        Error::WatchStartFailed(kube::Error::Api(status)) => status.code == GONE,
        _ => false,
    }
}

/// One line that names the resource and, where it is a matter of rights, the verb.
fn describe<K: Watched>(error: &Error, url: &Uri) -> String {
    let (verb, cause) = match error {
        Error::InitialListFailed(cause) => ("list", cause),
        Error::WatchStartFailed(cause) | Error::WatchFailed(cause) => ("watch", cause),
        Error::WatchError(status) => return format!("watch of {} ended: {}", K::plural(&()), status.message),
        Error::NoResourceVersion => return format!("the API server sent {} without resourceVersion", K::plural(&())),
    };
    let (resource, group) = (K::plural(&()), K::group(&()));
    match cause {
        kube::Error::Api(status) if status.code == 403 => format!(
            "not permitted to {verb} {resource}: grant the verbs list and watch on resource {resource:?} of apiGroup \
             {group:?} to cproxy's identity ({})",
            status.message
        ),
        kube::Error::Api(status) if status.code == 401 => format!(
            "cannot {verb} {resource}: the API server at {url} does not accept the credentials (401); check the token or \
             certificate of the kubeconfig or ServiceAccount"
        ),
        kube::Error::Api(status) => format!("cannot {verb} {resource} at {url}: {} ({})", status.message, status.code),
        kube::Error::Service(cause) => format!("cannot {verb} {resource} at {url}: {}", chain(&**cause)),
        cause => format!("cannot {verb} {resource} at {url}: {}", chain(cause)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(code: u16) -> Box<kube::core::Status> {
        serde_json::from_value(serde_json::json!({"code": code, "message": "m", "reason": "r", "status": "Failure"}))
            .unwrap()
    }

    #[test]
    fn gone_is_understood_as_an_event_and_as_an_answer() {
        assert!(is_gone(&Error::WatchError(status(410))));
        assert!(is_gone(&Error::WatchStartFailed(kube::Error::Api(status(410)))));
        assert!(!is_gone(&Error::WatchError(status(500))));
        assert!(!is_gone(&Error::InitialListFailed(kube::Error::Api(status(410)))), "a list has nothing to be too old");
    }

    #[test]
    fn only_a_refusal_of_the_parameter_ends_streaming() {
        for (code, ends) in [
            (400, true),
            (405, true),
            (422, true),
            (401, false),
            (403, false),
            (410, false),
            (429, false),
            (503, false),
        ] {
            assert_eq!(refuses_streaming(&Error::WatchStartFailed(kube::Error::Api(status(code)))), ends, "{code}");
        }
    }

    #[test]
    fn what_is_not_permitted_is_named_with_what_to_grant() {
        let url = Uri::from_static("https://api:6443");
        let list = describe::<EndpointSlice>(&Error::InitialListFailed(kube::Error::Api(status(403))), &url);
        assert!(list.starts_with("not permitted to list endpointslices: grant the verbs list and watch"), "{list}");
        assert!(list.contains("\"discovery.k8s.io\"") && !list.contains('\n'), "{list}");
    }

    #[test]
    fn a_list_may_be_silent_for_less_time_than_a_watch() {
        assert_eq!(silence_max::<Service>(&watcher::Event::Init), LIST_SILENCE_MAX);
        assert_eq!(silence_max::<Service>(&watcher::Event::InitDone), WATCH_SILENCE_MAX);
    }
}
