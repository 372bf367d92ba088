//! What can go wrong with a list or a watch, what follows from it, and how it is said.

use std::time::Duration;

use http::Uri;
use kube::core::Status;

use super::{client::chain, kinds::Watched, split::SplitError};

/// The status of a watch that starts before what the server still remembers: no failure, so no back-off.
const GONE: u16 = 410;

/// What is asked of the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    List,
    Watch,
}

/// Why a list or watch has ended.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) verb: Verb,
    pub(super) cause: Cause,
}

/// What has ended it.
#[derive(Debug)]
pub(super) enum Cause {
    /// There was no answer, or it broke off with an error.
    Connection(kube::Error),
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
    /// A part of the answer is not JSON, or not what it should be.
    Unreadable(serde_json::Error),
    /// What was sent says not of when it is.
    NoVersion,
    /// A streamed list has ended before it was complete.
    Incomplete,
    /// The server streams changes, but not lists.
    NotStreamed,
}

impl Failure {
    /// The server does not stream lists. One that does not know `sendInitialEvents` calls the request invalid (400, 422)
    /// or forbids the parameter by these codes; what a retry can mend (401, 403, 410, 429, 5xx) says nothing about it.
    /// One that ignores it sends bookmarks, but never the one that ends a list, or nothing more.
    pub(super) fn refuses_streaming(&self) -> bool {
        self.verb == Verb::Watch
            && match &self.cause {
                Cause::Answer(status) => matches!(status.code, 400 | 405 | 422),
                Cause::NotStreamed | Cause::Silent(_) => true,
                _ => false,
            }
    }

    /// 410, as an event or as the answer to a watch. A list, whose pages can expire, starts anew after any failure.
    pub(super) fn is_gone(&self) -> bool {
        match &self.cause {
            Cause::Event(status) => status.code == GONE,
            Cause::Answer(status) => self.verb == Verb::Watch && status.code == GONE,
            _ => false,
        }
    }

    /// The server is there and has made up its mind: the kind may not be read (403), or the API does not have it (404).
    pub(super) fn is_refused(&self) -> bool {
        matches!(&self.cause, Cause::Answer(status) | Cause::Event(status) if matches!(status.code, 403 | 404))
    }

    /// One line that names the resource and, where it is a matter of rights, the verb.
    pub(super) fn describe<K: Watched>(&self, url: &Uri) -> String {
        let (resource, group) = (K::plural(&()), K::group(&()));
        let verb = match self.verb {
            Verb::List => "list",
            Verb::Watch => "watch",
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
            Cause::Connection(kube::Error::Service(error)) => chain(&**error),
            Cause::Connection(error) => chain(error),
            Cause::Cut => "the connection was closed in the middle of the answer".to_owned(),
            Cause::Split(error) => chain(error),
            Cause::Unreadable(error) => format!("the answer cannot be read: {}", chain(error)),
            Cause::Incomplete => "the answer ended before the list was complete".to_owned(),
            Cause::NotStreamed => "lists are not streamed".to_owned(),
        };
        format!("cannot {verb} {resource} at {url}: {cause}")
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::k8s::objects::EndpointSlice;

    pub(in crate::k8s) fn status(code: u16) -> Box<Status> {
        serde_json::from_value(serde_json::json!({"code": code, "message": "m", "reason": "r", "status": "Failure"}))
            .unwrap()
    }

    fn answer(verb: Verb, code: u16) -> Failure {
        Failure { verb, cause: Cause::Answer(status(code)) }
    }

    fn event(code: u16) -> Failure {
        Failure { verb: Verb::Watch, cause: Cause::Event(status(code)) }
    }

    #[test]
    fn gone_is_understood_as_an_event_and_as_an_answer() {
        assert!(event(410).is_gone());
        assert!(answer(Verb::Watch, 410).is_gone());
        assert!(!event(500).is_gone());
        assert!(!answer(Verb::List, 410).is_gone(), "a list starts anew all the same, and not at once");
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
            assert_eq!(answer(Verb::Watch, code).refuses_streaming(), ends, "{code}");
        }
        assert!(!answer(Verb::List, 400).refuses_streaming());
        for (cause, ends) in
            [(Cause::NotStreamed, true), (Cause::Silent(Duration::from_secs(60)), true), (Cause::Cut, false)]
        {
            assert_eq!(Failure { verb: Verb::Watch, cause }.refuses_streaming(), ends);
        }
    }

    #[test]
    fn what_is_not_permitted_is_named_with_what_to_grant() {
        let url = Uri::from_static("https://api:6443");
        let list = answer(Verb::List, 403).describe::<EndpointSlice>(&url);
        assert!(list.starts_with("not permitted to list endpointslices: grant the verbs list and watch"), "{list}");
        assert!(list.contains("\"discovery.k8s.io\"") && !list.contains('\n'), "{list}");
    }

    #[test]
    fn what_is_too_long_is_named_with_kind_server_and_size() {
        let url = Uri::from_static("https://api:6443");
        let failure = Failure { verb: Verb::Watch, cause: Cause::Split(SplitError::TooLong(8 << 20)) };
        let line = failure.describe::<EndpointSlice>(&url);
        assert_eq!(line, "cannot watch endpointslices at https://api:6443/: one object is longer than 8388608 bytes");
    }

    #[test]
    fn only_what_the_server_has_decided_is_done_without() {
        for (code, is) in [(403, true), (404, true), (401, false), (410, false), (429, false), (500, false)] {
            for failure in [answer(Verb::List, code), answer(Verb::Watch, code), event(code)] {
                assert_eq!(failure.is_refused(), is, "{code}");
            }
        }
        assert!(!Failure { verb: Verb::List, cause: Cause::NoVersion }.is_refused());
    }
}
