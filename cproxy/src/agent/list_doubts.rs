//! Lists of the source that would take most away: they are held back until second ones agree.

use std::{sync::Arc, time::Duration};

use cproxy_core::{ListReport, ListSource, ListVerdict, Loss, ResourceKind, SECOND_LIST_AFTER, Store};
use tokio::time::Instant;

use super::{
    first_lists::{FirstLists, Judgement},
    source::SourceStatus,
};

/// Pause before second lists are asked for once more.
const ASK_AGAIN_PAUSE: Duration = Duration::from_secs(30);

/// Lists that settle a doubt, in words.
const SECOND_LIST: &str = "a list of another server, or of this one after 10 s, agrees";

/// Doubts about lists, and second lists that are to settle them.
pub(super) struct ListDoubts {
    /// Judge of the first lists, until they are written.
    first_lists: Option<FirstLists>,
    /// Number of times that lists were not believed.
    count: u64,
    /// Time at which second lists are asked for, and the server that was not believed.
    second_lists: Option<(Instant, Arc<str>)>,
}

impl ListDoubts {
    /// Doubts of an agent with this judge of its first lists.
    pub(super) fn new(first_lists: Option<FirstLists>) -> Self {
        Self { first_lists, count: 0, second_lists: None }
    }

    /// Takes note of a complete list.
    pub(super) fn record_list(&mut self, kind: ResourceKind, list: &ListSource) {
        if let Some(first) = &mut self.first_lists {
            first.record_list(kind, list);
        }
    }

    /// Number of times that lists were not believed.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Whether the first lists are held back.
    pub(super) fn holds_first_lists(&self) -> bool {
        self.first_lists.as_ref().is_some_and(FirstLists::is_in_doubt)
    }

    /// Whether lists are held back.
    pub(super) fn is_in_doubt(&self, store: &Store) -> bool {
        store.is_in_doubt() || self.holds_first_lists()
    }

    /// Time at which second lists are asked for.
    pub(super) fn next_wakeup(&self) -> Option<Instant> {
        self.second_lists.as_ref().map(|(at, _)| *at)
    }

    /// Whether the first lists may be written. If they would take most of the predecessor's table away, it stays until
    /// second ones agree.
    pub(super) fn believes_first_lists(&mut self, store: &Store, source: &SourceStatus, now: Instant) -> bool {
        let Some(first) = &mut self.first_lists else { return true };
        match first.judge(|serving| Loss::of(serving, store), now.into_std()) {
            Judgement::Wait => return false,
            Judgement::Doubt(server, Loss { serving, lost }) => {
                tracing::warn!(
                    name: "list_doubted",
                    "the first lists of {server} would leave {lost} of {serving} addresses of the last agent's table \
                     without backends: it stays until {SECOND_LIST}"
                );
                self.doubt(server, true, source, now);
                return false;
            }
            Judgement::Write => {}
            Judgement::Agreed(server, Loss { serving, lost }) => tracing::warn!(
                name: "list_agreed",
                "second lists of {server} agree: {lost} of {serving} addresses lose their backends"
            ),
            Judgement::Disagreed(server) => {
                tracing::info!(name: "list_disagreed", "the lists of {server} have most addresses again");
            }
        }
        self.first_lists = None;
        true
    }

    /// Logs the store's decisions about lists, and asks for second ones.
    pub(super) fn follow_reports(&mut self, reports: Vec<ListReport>, source: &SourceStatus) {
        for ListReport { kind, server, missing, known, verdict, is_same_view } in reports {
            let kind = kind.singular();
            match verdict {
                ListVerdict::Doubted => {
                    tracing::warn!(
                        name: "list_doubted",
                        "the list of {server} lacks {missing} of {known} {kind}s: they stay until {SECOND_LIST}"
                    );
                    self.doubt(server, is_same_view, source, Instant::now());
                }
                ListVerdict::Agreed => tracing::warn!(
                    name: "list_agreed",
                    "a second list, of {server}, agrees: {missing} of {known} {kind}s are gone"
                ),
                ListVerdict::Disagreed => {
                    tracing::info!(name: "list_disagreed", "{server} has most {kind}s again");
                }
            }
        }
    }

    /// Asks for second lists: another server's at once, if it shows the same view, and later from any.
    fn doubt(&mut self, server: Arc<str>, is_same_view: bool, source: &SourceStatus, now: Instant) {
        self.count += 1;
        if self.second_lists.is_none() && is_same_view {
            source.ask_another();
        }
        self.second_lists.get_or_insert((now + SECOND_LIST_AFTER, server));
    }

    /// Asks for second lists once they count, whatever the server does that was asked first.
    pub(super) fn ask_again(&mut self, store: &Store, source: &SourceStatus, now: Instant) {
        if !self.is_in_doubt(store) {
            self.second_lists = None;
        }
        // The time stays as a mark that they were asked for.
        if let Some((at, server)) = self.second_lists.as_mut().filter(|(at, _)| *at <= now) {
            source.ask_again(server.clone());
            *at = now + ASK_AGAIN_PAUSE;
        }
    }
}
