//! Comparisons: what completes them, and that each is completed in the end.

use proptest::prelude::*;
use tokio::time::advance;

use super::*;
use crate::watch::state::comparison::{BOOKMARK_WATCH_TIME, COMPARISON_MIN};

fn deleted(version: &str) -> Input<Service> {
    Input::Received(Message::Deleted(versioned(version)))
}

fn want(machine: &mut Machine, number: u64) {
    assert_eq!(machine.step::<Service>(Input::Wanted(Wanted::Comparison(number))).next, Next::Request);
}

/// Ends a watch in an orderly way.
fn end_watch(machine: &mut Machine) -> Stepped<Service> {
    machine.step(Input::Ended(ListMetadata::default()))
}

#[tokio::test(start_paused = true)]
async fn only_a_bookmark_of_a_watch_that_was_accepted_later_is_a_comparison() {
    let mut machine = Machine::watching("5", true);
    machine.step::<Service>(accepted());
    want(&mut machine, 1);
    machine.step::<Service>(bookmark("5"));
    assert_eq!(machine.compared, [0; 0], "it was on its way already");
    machine.step::<Service>(accepted());
    machine.step::<Service>(deleted("6"));
    // The watch ends without a bookmark.
    end_watch(&mut machine);
    machine.step::<Service>(bookmark("7"));
    assert_eq!(machine.compared, [0; 0]);
    machine.step::<Service>(accepted());
    machine.step::<Service>(bookmark("7"));
    assert_eq!(machine.compared, [1]);
    machine.step::<Service>(bookmark("8"));
    want(&mut machine, 2);
    machine.step::<Service>(Input::Wanted(Wanted::List));
    machine.step::<Service>(accepted());
    machine.step::<Service>(end("6"));
    assert_eq!(machine.compared, [1, 2], "a list is a comparison, too");
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_ends_in_time_is_a_comparison_if_it_has_shown_the_last_version_alone() {
    for (time, versions, is_comparison) in [
        (BOOKMARK_WATCH_TIME, &["5"][..], true),
        (COMPARISON_MIN, &["5"], true),
        (Duration::from_secs(1), &["5"], false),
        (BOOKMARK_WATCH_TIME, &["6"], false),
        (BOOKMARK_WATCH_TIME, &["6", "7"], false),
        (BOOKMARK_WATCH_TIME, &["6", "6"], false),
    ] {
        let mut machine = Machine::watching("5", true);
        want(&mut machine, 1);
        machine.step::<Service>(accepted());
        for version in versions {
            machine.step::<Service>(deleted(version));
        }
        advance(time).await;
        assert_eq!(end_watch(&mut machine).next, Next::Request);
        assert_eq!(machine.compared.len(), usize::from(is_comparison), "{versions:?} in {time:?}");
        let is_short = machine.target().contains("timeoutSeconds=3&");
        assert_eq!(is_short, !is_comparison, "the next watch is opened for it");
    }
}

#[tokio::test(start_paused = true)]
async fn a_comparison_that_is_asked_for_meanwhile_is_another_one() {
    let mut machine = Machine::watching("5", true);
    want(&mut machine, 1);
    machine.step::<Service>(accepted());
    // The server may have accepted this watch before the second comparison was asked for.
    want(&mut machine, 2);
    machine.step::<Service>(bookmark("6"));
    assert_eq!(machine.compared, [0; 0]);
    machine.step::<Service>(accepted());
    machine.step::<Service>(bookmark("7"));
    assert_eq!(machine.compared, [2]);
}

#[tokio::test(start_paused = true)]
async fn after_a_watch_that_shows_nothing_a_list_is_the_comparison() {
    let mut machine = Machine::watching("5", true);
    want(&mut machine, 1);
    machine.step::<Service>(accepted());
    advance(BOOKMARK_WATCH_TIME).await;
    let Stepped { log: Some(Log::Info(message)), next: Next::RequestAfter(_), .. } = end_watch(&mut machine) else {
        panic!("no list")
    };
    let expected = "https://api:6443/ has not confirmed the services since their watch was resumed: listing anew";
    assert_eq!((&*message, machine.state()), (expected, &relisting("5")));
    // The first list breaks off.
    machine.step::<Service>(accepted());
    machine.fail(ApiError::Cut);
    machine.step::<Service>(accepted());
    assert_eq!(machine.compared, [0; 0]);
    machine.step::<Service>(end("4"));
    assert_eq!(machine.compared, [1]);
    assert!(!machine.target().contains("timeoutSeconds=3&"));
}

#[tokio::test(start_paused = true)]
async fn a_comparison_that_is_asked_for_during_a_list_needs_another_response() {
    let mut machine = Machine::new();
    machine.step::<Service>(accepted());
    assert_eq!(machine.step::<Service>(Input::Wanted(Wanted::Comparison(1))).next, Next::Read);
    machine.step::<Service>(end("5"));
    assert_eq!(machine.compared, [0; 0]);
    machine.step::<Service>(accepted());
    machine.step::<Service>(bookmark("5"));
    assert_eq!(machine.compared, [1]);
}

#[tokio::test(start_paused = true)]
async fn after_three_watches_without_a_result_a_list_is_the_comparison() {
    let early: fn(&mut Machine) -> Stepped<Service> = |machine| {
        machine.step::<Service>(deleted("5"));
        end_watch(machine)
    };
    let cut: fn(&mut Machine) -> Stepped<Service> = |machine| machine.fail(ApiError::Cut);
    let reset: fn(&mut Machine) -> Stepped<Service> = |machine| machine.fail(ApiError::Interrupted("reset".into()));
    for ends in [[early; 3], [cut; 3], [reset; 3], [early, reset, cut], [cut, early, reset], [reset, cut, early]] {
        let mut machine = Machine::watching("5", true);
        want(&mut machine, 1);
        for (round, end) in ends.into_iter().enumerate() {
            assert!(machine.target().contains("timeoutSeconds=3&"), "{}", machine.target());
            // A better connection, and a request that fails, say nothing about watches.
            machine.step::<Service>(accepted());
            machine.step::<Service>(Input::Superseded);
            machine.fail(ApiError::Refused(status(503)));
            machine.step::<Service>(accepted());
            assert_eq!(machine.state().operation(), Operation::Watch, "{round}");
            let output = end(&mut machine);
            assert!(round < 2 || matches!(output.next, Next::RequestAfter(_)), "{output:?}");
        }
        assert_eq!(machine.state(), &relisting("5"));
        machine.step::<Service>(accepted());
        machine.step::<Service>(end("6"));
        assert_eq!(machine.compared, [1]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_without_bookmarks_that_has_changes_all_the_time_is_compared_by_a_list() {
    let mut machine = Machine::watching("5", true);
    want(&mut machine, 1);
    let mut last = None;
    for version in ["6", "7", "8"] {
        machine.step::<Service>(accepted());
        machine.step::<Service>(deleted(version));
        advance(BOOKMARK_WATCH_TIME).await;
        last = end_watch(&mut machine).log;
    }
    let expected = "3 watches of services at https://api:6443/ have not completed a comparison: listing anew";
    assert_eq!(last, Some(Log::Info(expected.to_owned())));
    assert_eq!(machine.state(), &relisting("8"));
}

/// Step of a random history.
#[derive(Clone, Copy, Debug)]
enum Act {
    Accept,
    Refuse,
    /// A change this much later than the last version.
    Change(u64),
    /// A bookmark this much later than the version before the last one.
    Bookmark(u64),
    End,
    Cut,
    Supersede,
    Unconfirmed,
    Compare,
    List,
    WaitMillis(u64),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        6 => Just(Act::Accept),
        1 => Just(Act::Refuse),
        5 => (0..3_u64).prop_map(Act::Change),
        1 => (0..3_u64).prop_map(Act::Bookmark),
        4 => Just(Act::End),
        1 => Just(Act::Cut),
        1 => Just(Act::Supersede),
        1 => Just(Act::Unconfirmed),
        3 => Just(Act::Compare),
        1 => Just(Act::List),
        4 => prop_oneof![Just(1999), 2000..4000_u64].prop_map(Act::WaitMillis),
    ]
}

/// Server that behaves in one way.
#[derive(Clone, Copy, Debug)]
enum Behaviour {
    SendsBookmarks,
    ShowsLastVersion,
    ShowsNothing,
    ShowsChanges,
    EndsEarly,
    Cuts,
    HasForgotten,
}

/// Response that the server has accepted.
struct OpenResponse {
    /// Comparison that was wanted before.
    number: Option<u64>,
    since: Instant,
    /// Last version before the response.
    known: u64,
    shown: Vec<u64>,
}

/// The machine, and what must be true of its comparisons.
struct Model {
    machine: Machine,
    version: u64,
    response: Option<OpenResponse>,
    /// Number of comparisons so far.
    count: u64,
    /// The last one is not complete.
    is_wanted: bool,
}

impl Model {
    fn new() -> Self {
        Self { machine: Machine::watching("100", true), version: 100, response: None, count: 0, is_wanted: false }
    }

    fn operation(&self) -> Operation {
        self.machine.state().operation()
    }

    /// Input of an act, if it can happen now.
    fn input(&mut self, act: Act) -> Option<Input<Service>> {
        let is_watch = self.operation() == Operation::Watch;
        Some(match (act, &mut self.response) {
            (Act::Accept, None) => accepted(),
            (Act::Refuse, None) => Input::Failed(ApiError::Refused(status(503))),
            (Act::Change(later), Some(response)) if is_watch => {
                self.version += later;
                response.shown.push(self.version);
                deleted(&self.version.to_string())
            }
            (Act::Bookmark(later), Some(_)) if is_watch => {
                let version = self.version - 1 + later;
                self.version = self.version.max(version);
                bookmark(&version.to_string())
            }
            (Act::End, Some(_)) if is_watch => Input::Ended(ListMetadata::default()),
            (Act::End, Some(_)) => end(&self.version.to_string()),
            (Act::Cut, Some(_)) => Input::Failed(ApiError::Cut),
            (Act::Supersede, Some(_)) if is_watch => Input::Superseded,
            (Act::Unconfirmed, Some(_)) if is_watch => Input::Unconfirmed,
            (Act::Compare, Some(_)) => {
                (self.count, self.is_wanted) = (self.count + 1, true);
                Input::Wanted(Wanted::Comparison(self.count))
            }
            (Act::List, Some(_)) => Input::Wanted(Wanted::List),
            _ => return None,
        })
    }

    /// Whether an act completes the comparison: its response was accepted after the comparison was asked for, and shows
    /// all that the server has.
    fn completes(&self, act: Act) -> bool {
        let Some(response) = &self.response else { return false };
        let shows_all = match (act, self.operation()) {
            (Act::End, Operation::List) => true,
            (Act::Bookmark(later), Operation::Watch) => later > 0,
            (Act::End, Operation::Watch) => {
                let has_last = response.shown.last() == Some(&response.known);
                has_last && response.since.elapsed() >= COMPARISON_MIN
            }
            _ => false,
        };
        self.is_wanted && response.number == Some(self.count) && shows_all
    }

    async fn play(&mut self, act: Act) {
        if let Act::WaitMillis(millis) = act {
            return advance(Duration::from_millis(millis)).await;
        }
        let Some(input) = self.input(act) else { return };
        let is_complete = self.completes(act);
        if let (Act::Accept, Operation::Watch) = (act, self.operation()) {
            let target = self.machine.target();
            let before = format!("timeoutSeconds=3&allowWatchBookmarks=true&resourceVersion={}", self.version - 1);
            assert_eq!(target.ends_with(&before), self.is_wanted, "{target}");
        }
        let output = self.machine.step(input);
        let completed: Vec<_> = self.machine.compared.drain(..).collect();
        let expected: Vec<_> = is_complete.then_some(self.count).into_iter().collect();
        assert_eq!(completed, expected, "{act:?}");
        self.is_wanted &= !is_complete;
        if let (Act::Accept, Next::Read) = (act, &output.next) {
            let number = self.is_wanted.then_some(self.count);
            let (since, known) = (Instant::now(), self.version);
            self.response = Some(OpenResponse { number, since, known, shown: Vec::new() });
        }
        self.response.take_if(|_| output.next != Next::Read);
    }

    /// A request to a server that behaves in this way, and its response.
    async fn respond(&mut self, behaviour: Behaviour) {
        if let (Behaviour::HasForgotten, Operation::Watch) = (behaviour, self.operation()) {
            self.machine.fail(ApiError::Refused(status(410)));
            return;
        }
        self.play(Act::Accept).await;
        let whole = Act::WaitMillis(3000);
        let acts: &[Act] = match (self.operation(), behaviour) {
            (Operation::List, _) => &[Act::End],
            (_, Behaviour::SendsBookmarks | Behaviour::HasForgotten) => &[Act::Bookmark(1)],
            (_, Behaviour::ShowsLastVersion) => &[Act::Change(0), whole, Act::End],
            (_, Behaviour::ShowsNothing) => &[whole, Act::End],
            (_, Behaviour::ShowsChanges) => &[Act::Change(1), whole, Act::End],
            (_, Behaviour::EndsEarly) => &[Act::Change(0), Act::End],
            (_, Behaviour::Cuts) => &[Act::Change(0), Act::Cut],
        };
        for act in acts {
            self.play(*act).await;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn nothing_from_before_a_comparison_completes_it_and_each_one_is_completed_in_the_end(
        acts in prop::collection::vec(act(), 0..60),
        behaviour in prop::sample::select(vec![
            Behaviour::SendsBookmarks,
            Behaviour::ShowsLastVersion,
            Behaviour::ShowsNothing,
            Behaviour::ShowsChanges,
            Behaviour::EndsEarly,
            Behaviour::Cuts,
            Behaviour::HasForgotten,
        ]),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let mut model = Model::new();
            for act in acts {
                model.play(act).await;
            }
            // The response that is under way ends.
            model.play(Act::Cut).await;
            for _ in 0..=WATCHES_MAX {
                if model.is_wanted {
                    model.respond(behaviour).await;
                }
            }
            assert!(!model.is_wanted, "{behaviour:?}");
        });
    }
}
