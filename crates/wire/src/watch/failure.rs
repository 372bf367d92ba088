//! Failures of lists and watches: errors, recovery, messages.

use std::time::Duration;

use cproxy_core::shortened;

use crate::{
    codec::{decompressor::is_zstd_error, error::CodecError, resource::WatchedResource, status::Status},
    error_text::{chain, one_line},
    transport::link::BoxError,
};

/// Status code for a watch from a version that the server no longer has.
const GONE: i32 = 410;

/// Part of a relay's message where its views lack something, with the remedy.
const OF_VIEW: &str = " view";

/// Status code for a version that the server does not have yet.
const TIMEOUT: i32 = 504;

/// Longest Retry-After that is respected.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

/// Longest silence in a list. A live server hardly pauses during a list.
const LIST_SILENCE_MAX: Duration = Duration::from_secs(60);
/// Longest silence in a watch: five intervals of bookmarks.
const WATCH_SILENCE_MAX: Duration = Duration::from_secs(310);

/// Kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// A list from the server's cache.
    List,
    /// A watch from a version on.
    Watch,
}

impl Operation {
    /// Time without an object or bookmark after which the connection counts as dead.
    pub(crate) fn silence_max(self) -> Duration {
        match self {
            Self::List => LIST_SILENCE_MAX,
            Self::Watch => WATCH_SILENCE_MAX,
        }
    }
}

/// Failed list or watch.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) operation: Operation,
    pub(crate) error: ApiError,
}

/// Error of a request to the API server, or of its response.
#[derive(Debug)]
pub(crate) enum ApiError {
    /// The server did not respond.
    Connection(BoxError),
    /// The response broke off with an error.
    Interrupted(BoxError),
    /// The connection was closed in the middle of the response.
    Cut,
    /// The server sent nothing for this long.
    Silent(Duration),
    /// The response has a status other than 200.
    Refused(Box<Status>),
    /// The watch ended with an error event.
    ErrorEvent(Box<Status>),
    /// The response cannot be read.
    Codec(CodecError),
    /// The response has no resourceVersion.
    NoVersion,
    /// The response ended before the list was complete.
    Incomplete,
}

/// Way to recover from a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recovery {
    /// Resume the watch at once, as after a regular end.
    Resume,
    /// Repeat the request at once without the optional field selector.
    DropFieldSelector,
    /// List again: the watch is too old to be resumed, which is not an error.
    Relist,
    /// Do without the resource, and request it again after growing pauses.
    DoWithout,
    /// Retry after a pause.
    Retry(RetryFrom),
}

/// Start of a retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RetryFrom {
    /// The same list or version.
    Here,
    /// The same version; a list if a watch from that version has failed before.
    HereOnce,
    /// A new list.
    List,
}

impl ApiError {
    /// True if the response was in zstd that cannot be read.
    pub(crate) fn is_of_zstd(&self) -> bool {
        let Self::Interrupted(error) = self else { return false };
        error.downcast_ref().is_some_and(is_zstd_error)
    }

    fn refused_code(&self) -> Option<i32> {
        match self {
            Self::Refused(status) => Some(status.code),
            _ => None,
        }
    }

    fn event_code(&self) -> Option<i32> {
        match self {
            Self::ErrorEvent(status) => Some(status.code),
            _ => None,
        }
    }
}

impl Failure {
    /// Chooses how to recover (docs/decisions/021). `has_optional_fields`: the request carried a field selector that
    /// can be dropped. `is_optional`: the agent can do without the resource.
    ///
    /// After unreadable data in a watch, client-go lists at once. Here the watch is resumed first and only the
    /// second error leads to a list, since a proxy may have caused the first.
    pub(crate) fn recovery(&self, has_optional_fields: bool, is_optional: bool) -> Recovery {
        let (refused, event) = (self.error.refused_code(), self.error.event_code());
        let is_refused = matches!(refused.or(event), Some(403 | 404));
        match (self.operation, &self.error) {
            (_, ApiError::Refused(_)) if refused == Some(400) && has_optional_fields => Recovery::DropFieldSelector,
            _ if is_refused && is_optional => Recovery::DoWithout,
            (Operation::Watch, ApiError::Cut) => Recovery::Resume,
            (Operation::Watch, _) if refused.or(event) == Some(GONE) => Recovery::Relist,
            (Operation::Watch, ApiError::NoVersion) => Recovery::Retry(RetryFrom::List),
            (Operation::Watch, ApiError::ErrorEvent(_)) if event == Some(429) => Recovery::Retry(RetryFrom::Here),
            (Operation::Watch, _) if self.is_version_too_large() => Recovery::Retry(RetryFrom::HereOnce),
            (_, ApiError::Codec(CodecError::ContentType(_))) => Recovery::Retry(RetryFrom::Here),
            (Operation::Watch, ApiError::ErrorEvent(_) | ApiError::Codec(_)) => Recovery::Retry(RetryFrom::HereOnce),
            _ => Recovery::Retry(RetryFrom::Here),
        }
    }

    /// True if the server does not have the version yet after some seconds of waiting, or never will.
    pub(crate) fn is_version_too_large(&self) -> bool {
        self.error.refused_code() == Some(TIMEOUT)
    }

    /// True if the server sent nothing for too long.
    pub(crate) fn is_silence(&self) -> bool {
        matches!(self.error, ApiError::Silent(_))
    }

    /// True if the connection failed, before or during the response.
    pub(crate) fn is_connection_failure(&self) -> bool {
        matches!(self.error, ApiError::Connection(_) | ApiError::Interrupted(_))
    }

    /// Pause that the server asks for, at most [`RETRY_AFTER_MAX`]; zero if it asks for none.
    pub(crate) fn retry_after(&self) -> Duration {
        match &self.error {
            ApiError::Refused(status) | ApiError::ErrorEvent(status) => {
                let seconds = status.details.as_ref().map_or(0, |details| details.retry_after_seconds);
                Duration::from_secs(seconds.try_into().unwrap_or(0)).min(RETRY_AFTER_MAX)
            }
            _ => Duration::ZERO,
        }
    }

    /// Message of one line that names the resource, the server and, if a permission is missing, the verbs to grant.
    pub(crate) fn describe<K: WatchedResource>(&self, server: &str) -> String {
        // The message of a server, or of a proxy in front of it, may be long.
        shortened(one_line(&self.describe_in_full::<K>(server)))
    }

    fn describe_in_full<K: WatchedResource>(&self, server: &str) -> String {
        let (resource, group) = (K::PLURAL, K::GROUP);
        let verb = match self.operation {
            Operation::List => "list",
            Operation::Watch => "watch",
        };
        let error = match &self.error {
            ApiError::Refused(status) if status.code == 403 && status.message.contains(OF_VIEW) => {
                return format!("not permitted to {verb} {resource}: {}", status.message);
            }
            ApiError::Refused(status) if status.code == 403 => {
                return format!(
                    "not permitted to {verb} {resource}: grant the verbs list and watch on resource {resource:?} of \
                     apiGroup {group:?} to cproxy's identity ({})",
                    status.message
                );
            }
            ApiError::Refused(status) if status.code == 401 => {
                return format!(
                    "cannot {verb} {resource}: the API server at {server} does not accept the credentials (401); check \
                     the token or certificate of the kubeconfig or ServiceAccount"
                );
            }
            ApiError::ErrorEvent(status) => return format!("{verb} of {resource} ended: {}", status.message),
            ApiError::NoVersion => return format!("the API server sent {resource} without resourceVersion"),
            ApiError::Silent(silence) => return format!("no data about {resource} from {server} for {silence:?}"),
            ApiError::Refused(status) => format!("{} ({})", status.message, status.code),
            ApiError::Connection(error) | ApiError::Interrupted(error) => chain(&**error),
            ApiError::Cut => "the connection was closed in the middle of the response".to_owned(),
            ApiError::Codec(error) => chain(error),
            ApiError::Incomplete => "the response ended before the list was complete".to_owned(),
        };
        format!("cannot {verb} {resource} at {server}: {error}")
    }
}

impl From<CodecError> for ApiError {
    fn from(error: CodecError) -> Self {
        Self::Codec(error)
    }
}

#[cfg(test)]
mod tests {
    use cproxy_core::api::{EndpointSlice, Metadata};

    use super::*;
    use crate::codec::{content_type::ContentTypeError, error::DecodeError};

    fn status(code: i32) -> Box<Status> {
        serde_json::from_value(serde_json::json!({"code": code, "message": "m", "reason": "r", "status": "Failure"}))
            .unwrap()
    }

    fn refused(operation: Operation, code: i32) -> Failure {
        Failure { operation, error: ApiError::Refused(status(code)) }
    }

    fn event(operation: Operation, code: i32) -> Failure {
        Failure { operation, error: ApiError::ErrorEvent(status(code)) }
    }

    fn recovery(failure: &Failure) -> Recovery {
        failure.recovery(false, false)
    }

    fn connection() -> BoxError {
        "no route".into()
    }

    fn unreadable() -> ApiError {
        CodecError::Unreadable { name: None, error: DecodeError::NoMagic }.into()
    }

    const RETRY: Recovery = Recovery::Retry(RetryFrom::Here);

    #[test]
    fn a_list_is_only_ever_retried() {
        for code in [400, 401, 403, 404, 410, 422, 429, 500] {
            assert_eq!(recovery(&refused(Operation::List, code)), RETRY, "{code}");
        }
        for error in [ApiError::Connection(connection()), ApiError::Cut, unreadable(), ApiError::NoVersion] {
            assert_eq!(recovery(&Failure { operation: Operation::List, error }), RETRY);
        }
    }

    #[test]
    fn a_watch_is_resumed_unless_its_version_is_in_doubt() {
        let of = |error| recovery(&Failure { operation: Operation::Watch, error });
        assert_eq!(of(ApiError::Cut), Recovery::Resume);
        for failure in [refused(Operation::Watch, 410), event(Operation::Watch, 410)] {
            assert_eq!(recovery(&failure), Recovery::Relist);
        }
        for code in [400, 401, 403, 404, 422, 429, 500, 503] {
            assert_eq!(recovery(&refused(Operation::Watch, code)), RETRY, "{code}");
        }
        assert_eq!(of(ApiError::ErrorEvent(status(429))), RETRY);
        let silent = ApiError::Silent(WATCH_SILENCE_MAX);
        for error in [ApiError::Connection(connection()), ApiError::Interrupted(connection()), silent] {
            assert_eq!(of(error), RETRY);
        }
        for error in [ApiError::ErrorEvent(status(500)), unreadable(), CodecError::too_long(7).into()] {
            assert_eq!(of(error), Recovery::Retry(RetryFrom::HereOnce));
        }
        assert_eq!(of(ApiError::NoVersion), Recovery::Retry(RetryFrom::List));
        assert_eq!(recovery(&refused(Operation::Watch, 504)), Recovery::Retry(RetryFrom::HereOnce));
    }

    #[test]
    fn only_an_invalid_request_loses_its_optional_selector() {
        for operation in [Operation::List, Operation::Watch] {
            assert_eq!(refused(operation, 400).recovery(true, false), Recovery::DropFieldSelector);
            assert_ne!(refused(operation, 422).recovery(true, false), Recovery::DropFieldSelector);
            assert_ne!(event(operation, 400).recovery(true, false), Recovery::DropFieldSelector);
        }
    }

    #[test]
    fn an_optional_resource_is_given_up_only_after_403_or_404() {
        for (code, is_given_up) in [(403, true), (404, true), (401, false), (410, false), (429, false), (500, false)] {
            for failure in [refused(Operation::List, code), refused(Operation::Watch, code)] {
                assert_eq!(failure.recovery(false, true) == Recovery::DoWithout, is_given_up, "{code}");
                assert_ne!(failure.recovery(false, false), Recovery::DoWithout, "{code}");
            }
            assert_eq!(
                event(Operation::Watch, code).recovery(false, true) == Recovery::DoWithout,
                is_given_up,
                "{code}"
            );
        }
        assert_eq!(Failure { operation: Operation::List, error: ApiError::NoVersion }.recovery(false, true), RETRY);
    }

    #[test]
    fn the_pause_that_a_server_asks_for_is_bounded() {
        let asks = |seconds: i32| {
            let mut status = status(429);
            status.details = serde_json::from_value(serde_json::json!({"retryAfterSeconds": seconds})).unwrap();
            Failure { operation: Operation::List, error: ApiError::Refused(status) }.retry_after()
        };
        assert_eq!([-1, 0, 7, i32::MAX].map(asks), [0, 0, 7, 60].map(Duration::from_secs));
    }

    #[test]
    fn a_missing_permission_is_named_with_the_verbs_to_grant() {
        let list = refused(Operation::List, 403).describe::<EndpointSlice>("https://api:6443/");
        assert!(list.starts_with("not permitted to list endpointslices: grant the verbs list and watch"), "{list}");
        let mut of_relay = status(403);
        of_relay.message = "you get no network policy; write `policy: own` in the view \"vms\"".to_owned();
        let of_relay = Failure { operation: Operation::List, error: ApiError::Refused(of_relay) };
        let of_relay = of_relay.describe::<EndpointSlice>("https://relay/");
        assert_eq!(
            of_relay,
            "not permitted to list endpointslices: you get no network policy; write `policy: own` in the view \"vms\""
        );
        assert!(list.contains("\"discovery.k8s.io\"") && !list.contains('\n'), "{list}");
    }

    #[test]
    fn a_message_of_the_server_is_one_line() {
        let error =
            || ApiError::ErrorEvent(Box::new(Status { message: "a\n2026 WARN \u{1b}b".to_owned(), ..*status(500) }));
        let line = Failure { operation: Operation::Watch, error: error() }.describe::<EndpointSlice>("https://api/");
        assert_eq!(line, "watch of endpointslices ended: a 2026 WARN \u{fffd}b");
    }

    #[test]
    fn unreadable_data_is_named_with_resource_server_and_object() {
        let line =
            |error| Failure { operation: Operation::Watch, error }.describe::<EndpointSlice>("https://api:6443/");
        let start = "cannot watch endpointslices at https://api:6443/: ";
        assert_eq!(
            line(CodecError::too_long(8 << 20).into()),
            format!("{start}one object is longer than 8388608 bytes")
        );
        let names = Metadata { name: "web\n".to_owned(), ..Metadata::default() };
        let error = serde_json::from_str::<u8>("x").unwrap_err();
        let content_type = ContentTypeError("text/html".to_owned());
        let asked_for = "the Content-Type of the response is \"text/html\", which was not asked for";
        assert_eq!(line(CodecError::from(content_type).into()), format!("{start}{asked_for}"));
        let nameless = line(CodecError::Unreadable { name: None, error: DecodeError::NoMagic }.into());
        assert_eq!(nameless, format!("{start}the response cannot be read: not protobuf of Kubernetes"));
        let unreadable = line(CodecError::unreadable::<EndpointSlice>(error.into(), &names).into());
        let named = "the response cannot be read at EndpointSlice default/web\u{fffd}: expected value";
        assert!(unreadable.starts_with(&format!("{start}{named}")), "{unreadable}");
    }
}
