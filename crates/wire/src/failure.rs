//! Failures of lists and watches: causes, remedies, messages.

use std::time::Duration;

use cproxy_core::{api::Metadata, object_name, printable, shortened};
use http::Uri;
use kube::core::Status;

use super::{error_text::chain, resources::WatchedResource, split::SplitError};

/// The status of a watch that starts before what the server still remembers.
const GONE: u16 = 410;

/// A server that asks for patience is given so much of it.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

/// What is asked of the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// A list as the start of a watch.
    Stream,
    /// A list from the server's cache.
    List,
    /// A watch from the version of a list.
    Watch,
}

/// Why a list or watch has ended.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) step: Step,
    pub(super) cause: Cause,
}

/// What has ended it.
#[derive(Debug)]
pub(super) enum Cause {
    /// There was no answer.
    Connection(kube::Error),
    /// The answer broke off with an error.
    Broken(kube::Error),
    /// The connection was closed in the middle of the answer.
    Cut,
    /// No word for so long.
    Silent(Duration),
    /// The answer is not what was asked for.
    Answer(Box<Status>),
    /// An event of the watch that ends it.
    Event(Box<Status>),
    /// The answer cannot be cut into objects.
    Split(SplitError),
    /// A part of the answer is not JSON, or not what it should be; what it is called, if that can be read.
    Unreadable(serde_json::Error, Option<String>),
    /// What was sent says not of when it is.
    NoVersion,
    /// A streamed list has ended before it was complete.
    Incomplete,
    /// The server streams changes, but not lists.
    NotStreamed,
}

/// Next move after a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Remedy {
    /// The watch goes on at once, as if the server had ended it in good order.
    Resume,
    /// The same is asked for at once, whatever its fields.
    AskForAllFields,
    /// The list comes from the server's cache, at once.
    ListCached,
    /// The watch is too old to be resumed, which is no failure: it is listed anew.
    Expire,
    /// The agent does without, and asks ever more seldom.
    DoWithout,
    /// After a pause.
    Retry(Again),
}

/// Where the next attempt begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Again {
    /// At the same place.
    Here,
    /// At the same place; the second time with a list.
    HereOnce,
    /// With a list.
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

    fn answer_code(&self) -> Option<u16> {
        match self {
            Self::Answer(status) => Some(status.code),
            _ => None,
        }
    }

    fn event_code(&self) -> Option<u16> {
        match self {
            Self::Event(status) => Some(status.code),
            _ => None,
        }
    }
}

impl Failure {
    /// The next move. `is_sparing`: the request had a field selector that can be dropped; `is_dispensable`: the agent can do
    /// without the kind.
    ///
    /// As in client-go, what a retry can mend leaves everything as it is, and a streamed list that fails otherwise comes
    /// from the cache. There, too, a watch that ends in nonsense is listed anew: here the second time, since it may be a
    /// proxy's.
    pub(super) fn remedy(&self, is_sparing: bool, is_dispensable: bool) -> Remedy {
        let (answer, event) = (self.cause.answer_code(), self.cause.event_code());
        let is_refused = matches!(answer.or(event), Some(403 | 404));
        match (self.step, &self.cause) {
            (_, Cause::Answer(_)) if answer == Some(400) && is_sparing => Remedy::AskForAllFields,
            (Step::Stream, _) if !self.is_mended_by_retry() => Remedy::ListCached,
            _ if is_refused && is_dispensable => Remedy::DoWithout,
            (Step::Watch, Cause::Cut) => Remedy::Resume,
            (Step::Watch, _) if answer.or(event) == Some(GONE) => Remedy::Expire,
            (Step::Watch, Cause::NoVersion | Cause::Silent(_)) => Remedy::Retry(Again::List),
            (Step::Watch, Cause::Event(_)) if event == Some(429) => Remedy::Retry(Again::Here),
            (Step::Watch, Cause::Event(_) | Cause::Split(_) | Cause::Unreadable(..)) => Remedy::Retry(Again::HereOnce),
            _ => Remedy::Retry(Again::Here),
        }
    }

    /// The request itself may succeed the next time: nobody has answered, or the answer says nothing of what was asked for.
    fn is_mended_by_retry(&self) -> bool {
        match &self.cause {
            Cause::Connection(_) => true,
            // Not 501, which says of streaming what 400 and 422 do.
            Cause::Answer(status) => {
                matches!(status.code, 401 | 403 | 404 | 408 | 429 | 500 | 502..600)
            }
            _ => false,
        }
    }

    /// The server does not stream lists. One that does not know `sendInitialEvents` calls the request invalid or forbids
    /// the parameter; one that ignores it sends bookmarks, but never the one that ends a list, or nothing more.
    pub(super) fn is_of_streaming(&self) -> bool {
        self.step == Step::Stream && matches!(self.cause, Cause::Answer(_) | Cause::NotStreamed | Cause::Silent(_))
    }

    /// There is no connection, or none any more.
    pub(super) fn is_of_connection(&self) -> bool {
        matches!(self.cause, Cause::Connection(_) | Cause::Broken(_))
    }

    /// How long the server asks to be left alone.
    pub(super) fn retry_after(&self) -> Duration {
        match &self.cause {
            Cause::Answer(status) | Cause::Event(status) => {
                let seconds = status.details.as_ref().map_or(0, |details| details.retry_after_seconds);
                Duration::from_secs(seconds.into()).min(RETRY_AFTER_MAX)
            }
            _ => Duration::ZERO,
        }
    }

    /// One line that names the resource and, where it is a matter of rights, the verb.
    pub(super) fn describe<K: WatchedResource>(&self, url: &Uri) -> String {
        // A server, or a proxy before it, may say very much.
        shortened(self.describe_in_full::<K>(url))
    }

    fn describe_in_full<K: WatchedResource>(&self, url: &Uri) -> String {
        let (resource, group) = (K::PLURAL, K::GROUP);
        let verb = match self.step {
            Step::List => "list",
            Step::Stream | Step::Watch => "watch",
        };
        let cause = match &self.cause {
            Cause::Answer(status) if status.code == 403 => {
                return format!(
                    "not permitted to {verb} {resource}: grant the verbs list and watch on resource {resource:?} of \
                     apiGroup {group:?} to cproxy's identity ({})",
                    status.message
                );
            }
            Cause::Answer(status) if status.code == 401 => {
                return format!(
                    "cannot {verb} {resource}: the API server at {url} does not accept the credentials (401); check the \
                     token or certificate of the kubeconfig or ServiceAccount"
                );
            }
            Cause::Event(status) => return format!("{verb} of {resource} ended: {}", status.message),
            Cause::NoVersion => return format!("the API server sent {resource} without resourceVersion"),
            Cause::Silent(silence) => return format!("no word about {resource} from {url} for {silence:?}"),
            Cause::Answer(status) => format!("{} ({})", status.message, status.code),
            Cause::Connection(kube::Error::Service(error)) | Cause::Broken(kube::Error::Service(error)) => {
                chain(&**error)
            }
            Cause::Connection(error) | Cause::Broken(error) => chain(error),
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

    fn answer(step: Step, code: u16) -> Failure {
        Failure { step, cause: Cause::Answer(status(code)) }
    }

    fn event(step: Step, code: u16) -> Failure {
        Failure { step, cause: Cause::Event(status(code)) }
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

    const RETRY: Remedy = Remedy::Retry(Again::Here);

    #[test]
    fn a_stream_comes_from_the_cache_unless_a_retry_may_mend_it() {
        for code in [401, 403, 404, 408, 429, 500, 502, 503, 504] {
            assert_eq!(remedy(&answer(Step::Stream, code)), RETRY, "{code}");
        }
        for code in [204, 302, 400, 405, 406, 410, 422, 501] {
            assert_eq!(remedy(&answer(Step::Stream, code)), Remedy::ListCached, "{code}");
            assert!(answer(Step::Stream, code).is_of_streaming());
        }
        for code in [0, 403, 410, 429, 500] {
            assert_eq!(remedy(&event(Step::Stream, code)), Remedy::ListCached, "{code}, when it had begun");
        }
        for cause in [
            Cause::Broken(connection()),
            Cause::Cut,
            Cause::Silent(Duration::from_secs(60)),
            Cause::Split(SplitError::TooLong(7)),
            unreadable(),
            Cause::NoVersion,
            Cause::Incomplete,
            Cause::NotStreamed,
        ] {
            assert_eq!(remedy(&Failure { step: Step::Stream, cause }), Remedy::ListCached);
        }
        assert_eq!(remedy(&Failure { step: Step::Stream, cause: Cause::Connection(connection()) }), RETRY);
    }

    #[test]
    fn a_list_from_the_cache_is_only_ever_retried() {
        for code in [400, 401, 403, 404, 410, 422, 429, 500] {
            assert_eq!(remedy(&answer(Step::List, code)), RETRY, "{code}");
        }
        for cause in [Cause::Connection(connection()), Cause::Cut, unreadable(), Cause::NoVersion] {
            assert_eq!(remedy(&Failure { step: Step::List, cause }), RETRY);
        }
    }

    #[test]
    fn a_watch_goes_on_where_it_was_as_long_as_that_makes_sense() {
        let of = |cause| remedy(&Failure { step: Step::Watch, cause });
        assert_eq!(of(Cause::Cut), Remedy::Resume);
        for failure in [answer(Step::Watch, 410), event(Step::Watch, 410)] {
            assert_eq!(remedy(&failure), Remedy::Expire);
        }
        for code in [400, 401, 403, 404, 422, 429, 500, 503] {
            assert_eq!(remedy(&answer(Step::Watch, code)), RETRY, "{code}");
        }
        assert_eq!(of(Cause::Event(status(429))), RETRY);
        for cause in [Cause::Connection(connection()), Cause::Broken(connection())] {
            assert_eq!(of(cause), RETRY);
        }
        for cause in [Cause::Event(status(500)), unreadable(), Cause::Split(SplitError::TooLong(7))] {
            assert_eq!(of(cause), Remedy::Retry(Again::HereOnce));
        }
        for cause in [Cause::NoVersion, Cause::Silent(Duration::from_secs(310))] {
            assert_eq!(of(cause), Remedy::Retry(Again::List));
        }
    }

    #[test]
    fn only_a_sparing_request_that_is_invalid_is_widened() {
        for step in [Step::Stream, Step::List, Step::Watch] {
            assert_eq!(answer(step, 400).remedy(true, false), Remedy::AskForAllFields);
            assert_ne!(answer(step, 422).remedy(true, false), Remedy::AskForAllFields);
            assert_ne!(event(step, 400).remedy(true, false), Remedy::AskForAllFields);
        }
    }

    #[test]
    fn only_what_the_server_has_decided_is_done_without() {
        for (code, is) in [(403, true), (404, true), (401, false), (410, false), (429, false), (500, false)] {
            for failure in [answer(Step::Stream, code), answer(Step::List, code), answer(Step::Watch, code)] {
                assert_eq!(failure.remedy(false, true) == Remedy::DoWithout, is, "{code}");
                assert_ne!(failure.remedy(false, false), Remedy::DoWithout, "{code}");
            }
            assert_eq!(event(Step::Watch, code).remedy(false, true) == Remedy::DoWithout, is, "{code}");
        }
        assert_eq!(Failure { step: Step::List, cause: Cause::NoVersion }.remedy(false, true), RETRY);
    }

    #[test]
    fn patience_is_bounded() {
        let asks = |seconds: u32| {
            let mut status = status(429);
            status.details = serde_json::from_value(serde_json::json!({"retryAfterSeconds": seconds})).unwrap();
            Failure { step: Step::List, cause: Cause::Answer(status) }.retry_after()
        };
        assert_eq!([0, 7, u32::MAX].map(asks), [0, 7, 60].map(Duration::from_secs));
    }

    #[test]
    fn what_is_not_permitted_is_named_with_what_to_grant() {
        let url = Uri::from_static("https://api:6443");
        let list = answer(Step::List, 403).describe::<EndpointSlice>(&url);
        assert!(list.starts_with("not permitted to list endpointslices: grant the verbs list and watch"), "{list}");
        assert!(list.contains("\"discovery.k8s.io\"") && !list.contains('\n'), "{list}");
    }

    #[test]
    fn what_makes_no_sense_is_named_with_kind_server_and_object() {
        let url = Uri::from_static("https://api:6443");
        let line = |cause| Failure { step: Step::Watch, cause }.describe::<EndpointSlice>(&url);
        let start = "cannot watch endpointslices at https://api:6443/: ";
        assert_eq!(line(Cause::too_long(8 << 20)), format!("{start}one object is longer than 8388608 bytes"));
        let names = Metadata { name: Some("web\n".to_owned()), ..Metadata::default() };
        let error = serde_json::from_str::<u8>("x").unwrap_err();
        let unreadable = line(Cause::unreadable::<EndpointSlice>(error, &names));
        let named = "the answer cannot be read at EndpointSlice default/web\u{fffd}: expected value";
        assert!(unreadable.starts_with(&format!("{start}{named}")), "{unreadable}");
    }
}
