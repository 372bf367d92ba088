//! Failures of lists and watches: causes, remedies, messages.

use std::time::Duration;

use cproxy_core::{api::Metadata, object_name, printable, shortened};
use http::Uri;
use kube::core::Status;

use super::{error_text::chain, resources::WatchedResource, split::SplitError};

/// Status of a watch from a version that the server no longer has.
const GONE: u16 = 410;

/// Longest pause that a server can ask for.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

/// Kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    /// A list as the start of a watch.
    StreamedList,
    /// A list, or a page of one, from the server's cache.
    CachedList,
    /// A watch from a version on.
    Watch,
}

/// Failed request or response.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) operation: Operation,
    pub(super) cause: Cause,
}

/// Cause of a failure.
#[derive(Debug)]
pub(super) enum Cause {
    /// No response.
    Connection(kube::Error),
    /// The response broke off with an error.
    Interrupted(kube::Error),
    /// The connection was closed in the middle of the response.
    Cut,
    /// Nothing was received for this long.
    Silent(Duration),
    /// A response with a status other than 200.
    Refused(Box<Status>),
    /// An error event in a watch.
    ErrorEvent(Box<Status>),
    /// The response cannot be split into objects.
    Split(SplitError),
    /// A part of the response is not JSON, or not of the expected form; with the object's name if it can be read.
    Unreadable(serde_json::Error, Option<String>),
    /// No resourceVersion in the response.
    NoVersion,
    /// A response that ended before the list was complete.
    Incomplete,
    /// The server streams changes, but not lists.
    NotStreamed,
}

/// Next move after a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Remedy {
    /// Resume the watch at once, as after its regular end.
    Resume,
    /// Repeat the request at once without the optional field selector.
    DropFieldSelector,
    /// List from the server's cache, at once.
    ListFromCache,
    /// List again: the watch is too old to be resumed, which is not an error.
    Relist,
    /// Do without the resource, and request it ever more seldom.
    DoWithout,
    /// Retry after a pause.
    Retry(RetryFrom),
}

/// Place where a retry begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RetryFrom {
    /// The same place.
    Here,
    /// The same place; a list if the watch has failed there before.
    HereOnce,
    /// A list.
    List,
}

impl Cause {
    pub(super) fn unreadable<K: WatchedResource>(error: serde_json::Error, names: &Metadata) -> Self {
        let name = object_name(names).map(|name| printable(&format!("{} {name}", K::KIND)));
        Self::Unreadable(error, name)
    }

    pub(super) fn too_long(longest_bytes: usize) -> Self {
        Self::Split(SplitError::TooLong(longest_bytes))
    }

    fn refused_code(&self) -> Option<u16> {
        match self {
            Self::Refused(status) => Some(status.code),
            _ => None,
        }
    }

    fn event_code(&self) -> Option<u16> {
        match self {
            Self::ErrorEvent(status) => Some(status.code),
            _ => None,
        }
    }
}

impl Failure {
    /// The next move (docs/decisions/021). `has_optional_fields`: the request had a field selector that can be dropped;
    /// `is_optional`: the agent can do without the resource.
    ///
    /// As in client-go, a failure that a retry may mend changes nothing else, and a streamed list that fails otherwise
    /// comes from the cache. After a watch with unreadable data client-go lists; here it is listed the second time,
    /// since a proxy may have caused the first.
    pub(super) fn remedy(&self, has_optional_fields: bool, is_optional: bool) -> Remedy {
        let (refused, event) = (self.cause.refused_code(), self.cause.event_code());
        let is_refused = matches!(refused.or(event), Some(403 | 404));
        match (self.operation, &self.cause) {
            (_, Cause::Refused(_)) if refused == Some(400) && has_optional_fields => Remedy::DropFieldSelector,
            (Operation::StreamedList, _) if !self.is_mended_by_retry() => Remedy::ListFromCache,
            _ if is_refused && is_optional => Remedy::DoWithout,
            (Operation::Watch, Cause::Cut) => Remedy::Resume,
            (Operation::Watch, _) if refused.or(event) == Some(GONE) => Remedy::Relist,
            (Operation::Watch, Cause::NoVersion | Cause::Silent(_)) => Remedy::Retry(RetryFrom::List),
            (Operation::Watch, Cause::ErrorEvent(_)) if event == Some(429) => Remedy::Retry(RetryFrom::Here),
            (Operation::Watch, Cause::ErrorEvent(_) | Cause::Split(_) | Cause::Unreadable(..)) => {
                Remedy::Retry(RetryFrom::HereOnce)
            }
            _ => Remedy::Retry(RetryFrom::Here),
        }
    }

    /// The same request may succeed the next time: there was no response, or its status says nothing about streaming.
    fn is_mended_by_retry(&self) -> bool {
        match &self.cause {
            Cause::Connection(_) => true,
            // Not 501, which like 400 and 422 can mean that the server does not stream lists.
            Cause::Refused(status) => {
                matches!(status.code, 401 | 403 | 404 | 408 | 429 | 500 | 502..600)
            }
            _ => false,
        }
    }

    /// The server does not stream lists. A server that does not know `sendInitialEvents` calls the request invalid or
    /// forbids the parameter; one that ignores it never sends the bookmark that ends a list.
    pub(super) fn is_of_streaming(&self) -> bool {
        self.operation == Operation::StreamedList
            && matches!(self.cause, Cause::Refused(_) | Cause::NotStreamed | Cause::Silent(_))
    }

    /// The connection failed, before or during the response.
    pub(super) fn is_of_connection(&self) -> bool {
        matches!(self.cause, Cause::Connection(_) | Cause::Interrupted(_))
    }

    /// The pause that the server asks for, bounded.
    pub(super) fn retry_after(&self) -> Duration {
        match &self.cause {
            Cause::Refused(status) | Cause::ErrorEvent(status) => {
                let seconds = status.details.as_ref().map_or(0, |details| details.retry_after_seconds);
                Duration::from_secs(seconds.into()).min(RETRY_AFTER_MAX)
            }
            _ => Duration::ZERO,
        }
    }

    /// Message of one line that names the resource and, for a missing permission, the verb.
    pub(super) fn describe<K: WatchedResource>(&self, url: &Uri) -> String {
        // The message of a server, or of a proxy before it, may be long.
        shortened(self.describe_in_full::<K>(url))
    }

    fn describe_in_full<K: WatchedResource>(&self, url: &Uri) -> String {
        let (resource, group) = (K::PLURAL, K::GROUP);
        let verb = match self.operation {
            Operation::CachedList => "list",
            Operation::StreamedList | Operation::Watch => "watch",
        };
        let cause = match &self.cause {
            Cause::Refused(status) if status.code == 403 => {
                return format!(
                    "not permitted to {verb} {resource}: grant the verbs list and watch on resource {resource:?} of \
                     apiGroup {group:?} to cproxy's identity ({})",
                    status.message
                );
            }
            Cause::Refused(status) if status.code == 401 => {
                return format!(
                    "cannot {verb} {resource}: the API server at {url} does not accept the credentials (401); check the \
                     token or certificate of the kubeconfig or ServiceAccount"
                );
            }
            Cause::ErrorEvent(status) => return format!("{verb} of {resource} ended: {}", status.message),
            Cause::NoVersion => return format!("the API server sent {resource} without resourceVersion"),
            Cause::Silent(silence) => return format!("no data about {resource} from {url} for {silence:?}"),
            Cause::Refused(status) => format!("{} ({})", status.message, status.code),
            Cause::Connection(kube::Error::Service(error)) | Cause::Interrupted(kube::Error::Service(error)) => {
                chain(&**error)
            }
            Cause::Connection(error) | Cause::Interrupted(error) => chain(error),
            Cause::Cut => "the connection was closed in the middle of the answer".to_owned(),
            Cause::Split(error) => chain(error),
            Cause::Unreadable(error, None) => format!("the answer cannot be read: {}", chain(error)),
            Cause::Unreadable(error, Some(name)) => format!("the answer cannot be read at {name}: {}", chain(error)),
            Cause::Incomplete => "the answer ended before the list was complete".to_owned(),
            Cause::NotStreamed => "lists are not streamed".to_owned(),
        };
        format!("cannot {verb} {resource} at {url}: {cause}")
    }
}

impl From<SplitError> for Cause {
    fn from(error: SplitError) -> Self {
        Self::Split(error)
    }
}

#[cfg(test)]
mod tests {
    use cproxy_core::api::EndpointSlice;

    use super::*;

    fn status(code: u16) -> Box<Status> {
        serde_json::from_value(serde_json::json!({"code": code, "message": "m", "reason": "r", "status": "Failure"}))
            .unwrap()
    }

    fn refused(operation: Operation, code: u16) -> Failure {
        Failure { operation, cause: Cause::Refused(status(code)) }
    }

    fn event(operation: Operation, code: u16) -> Failure {
        Failure { operation, cause: Cause::ErrorEvent(status(code)) }
    }

    fn remedy(failure: &Failure) -> Remedy {
        failure.remedy(false, false)
    }

    fn connection() -> kube::Error {
        kube::Error::Service("no route".into())
    }

    fn unreadable() -> Cause {
        Cause::Unreadable(serde_json::from_str::<u8>("x").unwrap_err(), None)
    }

    const RETRY: Remedy = Remedy::Retry(RetryFrom::Here);

    #[test]
    fn a_stream_comes_from_the_cache_unless_a_retry_may_mend_it() {
        for code in [401, 403, 404, 408, 429, 500, 502, 503, 504] {
            assert_eq!(remedy(&refused(Operation::StreamedList, code)), RETRY, "{code}");
        }
        for code in [204, 302, 400, 405, 406, 410, 422, 501] {
            assert_eq!(remedy(&refused(Operation::StreamedList, code)), Remedy::ListFromCache, "{code}");
            assert!(refused(Operation::StreamedList, code).is_of_streaming());
        }
        for code in [0, 403, 410, 429, 500] {
            assert_eq!(
                remedy(&event(Operation::StreamedList, code)),
                Remedy::ListFromCache,
                "{code}, when it had begun"
            );
        }
        for cause in [
            Cause::Interrupted(connection()),
            Cause::Cut,
            Cause::Silent(Duration::from_secs(60)),
            Cause::Split(SplitError::TooLong(7)),
            unreadable(),
            Cause::NoVersion,
            Cause::Incomplete,
            Cause::NotStreamed,
        ] {
            assert_eq!(remedy(&Failure { operation: Operation::StreamedList, cause }), Remedy::ListFromCache);
        }
        assert_eq!(
            remedy(&Failure { operation: Operation::StreamedList, cause: Cause::Connection(connection()) }),
            RETRY
        );
    }

    #[test]
    fn a_list_from_the_cache_is_only_ever_retried() {
        for code in [400, 401, 403, 404, 410, 422, 429, 500] {
            assert_eq!(remedy(&refused(Operation::CachedList, code)), RETRY, "{code}");
        }
        for cause in [Cause::Connection(connection()), Cause::Cut, unreadable(), Cause::NoVersion] {
            assert_eq!(remedy(&Failure { operation: Operation::CachedList, cause }), RETRY);
        }
    }

    #[test]
    fn a_watch_is_resumed_unless_its_version_is_in_doubt() {
        let of = |cause| remedy(&Failure { operation: Operation::Watch, cause });
        assert_eq!(of(Cause::Cut), Remedy::Resume);
        for failure in [refused(Operation::Watch, 410), event(Operation::Watch, 410)] {
            assert_eq!(remedy(&failure), Remedy::Relist);
        }
        for code in [400, 401, 403, 404, 422, 429, 500, 503] {
            assert_eq!(remedy(&refused(Operation::Watch, code)), RETRY, "{code}");
        }
        assert_eq!(of(Cause::ErrorEvent(status(429))), RETRY);
        for cause in [Cause::Connection(connection()), Cause::Interrupted(connection())] {
            assert_eq!(of(cause), RETRY);
        }
        for cause in [Cause::ErrorEvent(status(500)), unreadable(), Cause::Split(SplitError::TooLong(7))] {
            assert_eq!(of(cause), Remedy::Retry(RetryFrom::HereOnce));
        }
        for cause in [Cause::NoVersion, Cause::Silent(Duration::from_secs(310))] {
            assert_eq!(of(cause), Remedy::Retry(RetryFrom::List));
        }
    }

    #[test]
    fn only_an_invalid_request_loses_its_optional_selector() {
        for operation in [Operation::StreamedList, Operation::CachedList, Operation::Watch] {
            assert_eq!(refused(operation, 400).remedy(true, false), Remedy::DropFieldSelector);
            assert_ne!(refused(operation, 422).remedy(true, false), Remedy::DropFieldSelector);
            assert_ne!(event(operation, 400).remedy(true, false), Remedy::DropFieldSelector);
        }
    }

    #[test]
    fn the_agent_does_without_only_after_403_or_404() {
        for (code, is) in [(403, true), (404, true), (401, false), (410, false), (429, false), (500, false)] {
            for failure in [
                refused(Operation::StreamedList, code),
                refused(Operation::CachedList, code),
                refused(Operation::Watch, code),
            ] {
                assert_eq!(failure.remedy(false, true) == Remedy::DoWithout, is, "{code}");
                assert_ne!(failure.remedy(false, false), Remedy::DoWithout, "{code}");
            }
            assert_eq!(event(Operation::Watch, code).remedy(false, true) == Remedy::DoWithout, is, "{code}");
        }
        assert_eq!(Failure { operation: Operation::CachedList, cause: Cause::NoVersion }.remedy(false, true), RETRY);
    }

    #[test]
    fn the_pause_that_a_server_asks_for_is_bounded() {
        let asks = |seconds: u32| {
            let mut status = status(429);
            status.details = serde_json::from_value(serde_json::json!({"retryAfterSeconds": seconds})).unwrap();
            Failure { operation: Operation::CachedList, cause: Cause::Refused(status) }.retry_after()
        };
        assert_eq!([0, 7, u32::MAX].map(asks), [0, 7, 60].map(Duration::from_secs));
    }

    #[test]
    fn a_missing_permission_is_named_with_the_verbs_to_grant() {
        let url = Uri::from_static("https://api:6443");
        let list = refused(Operation::CachedList, 403).describe::<EndpointSlice>(&url);
        assert!(list.starts_with("not permitted to list endpointslices: grant the verbs list and watch"), "{list}");
        assert!(list.contains("\"discovery.k8s.io\"") && !list.contains('\n'), "{list}");
    }

    #[test]
    fn unreadable_data_is_named_with_resource_server_and_object() {
        let url = Uri::from_static("https://api:6443");
        let line = |cause| Failure { operation: Operation::Watch, cause }.describe::<EndpointSlice>(&url);
        let start = "cannot watch endpointslices at https://api:6443/: ";
        assert_eq!(line(Cause::too_long(8 << 20)), format!("{start}one object is longer than 8388608 bytes"));
        let names = Metadata { name: Some("web\n".to_owned()), ..Metadata::default() };
        let error = serde_json::from_str::<u8>("x").unwrap_err();
        let unreadable = line(Cause::unreadable::<EndpointSlice>(error, &names));
        let named = "the answer cannot be read at EndpointSlice default/web\u{fffd}: expected value";
        assert!(unreadable.starts_with(&format!("{start}{named}")), "{unreadable}");
    }
}
