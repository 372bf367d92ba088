//! Source that an agent follows, as the agent reports it to `cproxy check`.

use std::fmt;

use cproxy_core::printable;
use serde::Serialize;
use serde_json::Value;

use super::fields::{number_of, text_of, texts_of};

/// Longest time between two confirmations: two intervals of bookmarks, and a little more.
const SILENT_SECONDS_MAX: u64 = 130;

/// Source of a running agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SourceReport {
    /// An API server, or what stands for it.
    ApiServer {
        /// Address of the server that was used last.
        server: String,
        /// Its place in the order of preference, from 1 on.
        choice: usize,
        /// Seconds since the server has confirmed the known state; `None` before the first time.
        silent_seconds: Option<u64>,
        /// View that the server shows; `all`: everything.
        view: String,
        /// Last failure of a list or watch that has not succeeded since.
        failure: Option<String>,
    },
    /// Files and directories.
    Manifests(Vec<String>),
}

impl SourceReport {
    /// Report as an agent has sent it; `None` if it has another form.
    #[must_use]
    pub fn read(report: &Value) -> Option<Self> {
        let Some(server) = report.get("api_server") else { return texts_of(report, "manifests").map(Self::Manifests) };
        Some(Self::ApiServer {
            server: text_of(server, "server")?,
            choice: number_of(server, "choice")?,
            silent_seconds: number_of(server, "silent_seconds"),
            view: text_of(server, "view")?,
            failure: text_of(server, "failure"),
        })
    }

    /// Whether the agent follows what it prefers, has lately heard from it, and nothing has failed since.
    #[must_use]
    pub fn is_good(&self) -> bool {
        match self {
            Self::ApiServer { choice, failure, .. } => *choice == 1 && failure.is_none() && !self.is_stale(),
            Self::Manifests(_) => true,
        }
    }

    /// Whether the source has confirmed nothing for too long.
    #[must_use]
    pub fn is_stale(&self) -> bool {
        let Self::ApiServer { silent_seconds, .. } = self else { return false };
        silent_seconds.is_none_or(|seconds| seconds > SILENT_SECONDS_MAX)
    }
}

impl fmt::Display for SourceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ApiServer { server, choice, silent_seconds, view, failure } => {
                let view = printable(view);
                write!(f, "follows {} (its {} choice), ", printable(server), ordinal(*choice))?;
                match silent_seconds {
                    Some(seconds) if self.is_stale() => write!(f, "stale: last confirmed {seconds} s ago, view {view}"),
                    Some(seconds) => write!(f, "last confirmed {seconds} s ago, view {view}"),
                    None => f.write_str("which has confirmed nothing yet"),
                }?;
                failure.iter().try_for_each(|failure| write!(f, "; {}", printable(failure)))
            }
            Self::Manifests(paths) => write!(f, "manifests {}", printable(&paths.join(", "))),
        }
    }
}

fn ordinal(number: usize) -> String {
    let end = match (number % 10, number % 100) {
        (_, 11..=13) => "th",
        (1, _) => "st",
        (2, _) => "nd",
        (3, _) => "rd",
        _ => "th",
    };
    format!("{number}{end}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(choice: usize, silent_seconds: Option<u64>, view: &str) -> SourceReport {
        let server = "https://10.0.0.1:6443/".to_owned();
        SourceReport::ApiServer { server, choice, silent_seconds, view: view.to_owned(), failure: None }
    }

    #[test]
    fn an_answer_does_not_steer_a_terminal() {
        let report = server(1, Some(1), "a\x1b[2J\nb");
        assert!(report.to_string().ends_with("view a\u{fffd}[2J\u{fffd}b"), "{report}");
        let report = SourceReport::Manifests(vec!["a\rb".to_owned()]);
        assert_eq!(report.to_string(), "manifests a\u{fffd}b");
    }

    #[test]
    fn a_failure_is_named() {
        let SourceReport::ApiServer { server, choice, silent_seconds, view, .. } = server(1, None, "all") else {
            return;
        };
        let failure = Some("no route".to_owned());
        let report = SourceReport::ApiServer { server, choice, silent_seconds, view, failure };
        assert!(report.to_string().ends_with("which has confirmed nothing yet; no route"), "{report}");
    }

    #[test]
    fn a_source_is_good_if_it_is_the_first_choice_and_not_stale() {
        let follows = "follows https://10.0.0.1:6443/ (its";
        for (report, is_good, text) in [
            (server(1, Some(12), "all"), true, format!("{follows} 1st choice), last confirmed 12 s ago, view all")),
            (server(1, Some(130), "ab"), true, format!("{follows} 1st choice), last confirmed 130 s ago, view ab")),
            (
                server(1, Some(131), "all"),
                false,
                format!("{follows} 1st choice), stale: last confirmed 131 s ago, view all"),
            ),
            (server(2, Some(0), "all"), false, format!("{follows} 2nd choice), last confirmed 0 s ago, view all")),
            (server(3, None, "all"), false, format!("{follows} 3rd choice), which has confirmed nothing yet")),
            (SourceReport::Manifests(vec!["a".to_owned(), "b".to_owned()]), true, "manifests a, b".to_owned()),
        ] {
            assert_eq!((report.is_good(), report.to_string()), (is_good, text));
            assert_eq!(SourceReport::read(&serde_json::to_value(&report).unwrap()), Some(report));
        }
        assert_eq!([1, 2, 3, 4, 11, 12, 21].map(ordinal), ["1st", "2nd", "3rd", "4th", "11th", "12th", "21st"]);
    }
}
