//! Comparisons: what completes them, and that each is completed in the end.

use tokio::time::advance;

use super::*;
use crate::watch::state::{comparison::COMPARISON_MIN, history::BOOKMARK_WATCH_TIME};

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
