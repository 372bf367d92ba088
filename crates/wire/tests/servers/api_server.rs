//! Lists and watches of a misbehaving API server in memory, in simulated time: in the end the agent knows exactly what
//! the server has, at a bounded cost.

#![expect(clippy::unwrap_used, reason = "a failed assertion is a failed test")]

use std::time::Duration;

use cproxy_core::ResourceKind;
use cproxy_testing::simulated::{How, Protobuf, ReceivedRequest, Server, Simulation, play};
use tokio::time::{Instant, sleep};

/// The longest object of each of the three kinds, three times: as much as is allocated while a buffer doubles.
const PEAK_BYTES_MAX: u64 = 3 * 3 * (8 << 20);

const SCRIPTS: u64 = 200;
const SCRIPT_BYTES_MAX: u64 = 120;

/// xorshift64*
struct Random(u64);

impl Random {
    fn next(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) % below
    }
}

fn simulate<T>(simulation: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    runtime.block_on(simulation)
}

fn hours(count: u64) -> Duration {
    Duration::from_secs(count * 3600)
}

/// Times of list requests.
fn lists(simulation: &Simulation, kind: ResourceKind) -> Vec<Instant> {
    let asked = simulation.server.asked().into_iter().filter(|(_, asked)| asked.kind == kind);
    asked.filter(|(_, asked)| asked.how == How::Listed).map(|(at, _)| at).collect()
}

#[test]
fn the_agent_knows_the_servers_objects_in_the_end_whatever_the_server_does() {
    let only = std::env::var("CPROXY_SEED").ok().map(|seed| seed.parse::<u64>().unwrap());
    for seed in only.map_or(1..=SCRIPTS, |seed| seed..=seed) {
        println!("CPROXY_SEED={seed}");
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let length = random.next(SCRIPT_BYTES_MAX);
        let script: Vec<_> = (0..length).map(|_| u8::try_from(random.next(256)).unwrap()).collect();
        let peak = allocation_counter::measure(|| simulate(play(&script))).bytes_max;
        assert!(peak < PEAK_BYTES_MAX, "{peak} bytes at most");
    }
}

#[test]
fn a_refusal_does_not_count_as_contact() {
    simulate(async {
        let simulation = Simulation::start();
        simulation.converge().await;
        simulation.server.set_outage(Some((401, None)));
        sleep(hours(1)).await;
        let silent = simulation.last_contact.silent_seconds().unwrap();
        assert!(silent >= 3600 - 60, "refused for an hour, and silent for {silent} s");
        let asked = simulation.server.asked().len();
        assert!((100..600).contains(&asked), "{asked} requests, every 30 s to a minute for each kind");
        simulation.server.set_outage(None);
        sleep(Duration::from_secs(130)).await;
        let silent = simulation.last_contact.silent_seconds().unwrap();
        assert!(silent <= 60, "a bookmark each minute, and silent for {silent} s");
    });
}

#[test]
fn a_server_or_proxy_that_refuses_protobuf_is_asked_for_json_from_then_on() {
    for code in [406, 415] {
        simulate(async {
            let simulation = Simulation::start();
            simulation.server.set_protobuf(Protobuf::Refused(code));
            simulation.converge().await;
            simulation.server.forget();
            sleep(hours(1)).await;
            let asked = simulation.server.asked();
            let with_protobuf = asked.iter().filter(|(_, asked)| asked.accepts_protobuf).count();
            assert!((1..=2).contains(&with_protobuf), "once for each kind that is asked for first: {asked:?}");
        });
    }
}

#[test]
fn a_list_in_protobuf_takes_the_memory_of_its_longest_object() {
    let peak = |long: bool| {
        let script: &[u8] = if long { &[10, 4, 7, 24, 9, 160, 17, 160] } else { &[10, 4, 9, 160, 17, 160] };
        allocation_counter::measure(|| simulate(play(script))).bytes_max
    };
    let (short, long) = (peak(false), peak(true));
    assert!(short < 1 << 20, "{short} bytes for short objects");
    let bounds = (8 << 20)..3 * (8 << 20);
    assert!(bounds.contains(&long), "{long} bytes with one of 9 MiB, of which 8 MiB are kept");
}

#[test]
fn retry_after_is_respected() {
    simulate(async {
        let simulation = Simulation::start();
        simulation.server.set_outage(Some((429, Some(20))));
        sleep(hours(1)).await;
        let lists = lists(&simulation, ResourceKind::Services);
        assert!(lists.len() > 50, "{lists:?}");
        assert!(lists.array_windows().all(|[a, b]| *b - *a >= Duration::from_secs(20)), "{lists:?}");
    });
}

#[test]
fn a_server_that_always_forgets_is_listed_ever_more_seldom() {
    simulate(async {
        let simulation = Simulation::start();
        simulation.converge().await;
        simulation.server.forget();
        let start = Instant::now();
        sleep(Duration::from_secs(60)).await;
        let [_, second] = lists(&simulation, ResourceKind::Services)[..] else { panic!("once is listed once") };
        assert!(second - start < Duration::from_secs(1), "at once, after a short pause");
        simulation.server.set_forgetful();
        sleep(hours(1)).await;
        let lists = lists(&simulation, ResourceKind::Services).len();
        assert!((60..150).contains(&lists), "{lists} lists in an hour, one in 30 s to a minute");
    });
}

/// A server that has just gone back to versions from before what the client has.
async fn gone_back() -> Simulation {
    let simulation = Simulation::start();
    simulation.converge().await;
    simulation.server.back_up();
    simulation.server.change_all(7);
    simulation.converge().await;
    simulation.server.restore();
    simulation
}

#[test]
fn versions_that_go_back_are_noticed_by_watches_that_show_nothing() {
    simulate(async {
        let simulation = gone_back().await;
        sleep(Duration::from_secs(90)).await;
        simulation.assert_converged();
        // A change that the watch from the later version would not show.
        simulation.server.change_all(8);
        sleep(Duration::from_secs(1)).await;
        simulation.assert_converged();
        let lists = lists(&simulation, ResourceKind::Services);
        assert_eq!(lists.len(), 3, "the first, one not older than the last version, and one of any version: {lists:?}");
    });
}

/// Number of lists of both kinds that count, and time that a comparison has taken.
async fn compare(simulation: &Simulation) -> ([usize; 2], Duration) {
    let count = || [ResourceKind::Services, ResourceKind::EndpointSlices].map(|kind| lists(simulation, kind).len());
    let (before, start) = (count(), Instant::now());
    simulation.begin_comparison();
    simulation.end_comparison().await;
    let [services, slices] = count();
    ([services - before[0], slices - before[1]], start.elapsed())
}

/// Objects from before the restore are not what the server has, and no watch from a later version shows that.
#[test]
fn a_comparison_with_a_server_whose_versions_went_back_ends_with_a_list() {
    simulate(async {
        let simulation = gone_back().await;
        sleep(Duration::from_secs(1)).await;
        let (lists, took) = compare(&simulation).await;
        assert!(lists.iter().all(|count| *count > 0) && took < Duration::from_secs(15), "{lists:?} after {took:?}");
    });
}

#[test]
fn a_comparison_with_a_server_that_has_the_last_version_needs_no_list() {
    simulate(async {
        let simulation = Simulation::start();
        simulation.converge().await;
        let check = async |what: &str, at_most: u64| {
            let (lists, took) = compare(&simulation).await;
            assert_eq!(lists, [0, 0], "{what}");
            assert!(took < Duration::from_secs(at_most), "{what}: {took:?}");
        };
        check("after a list", 2).await;
        check("after a bookmark", 2).await;
        simulation.server.change_all(7);
        check("with a change", 4).await;
        check("after a change", 4).await;
        // The last change is shown again, and nothing else.
        simulation.server.omit_bookmarks();
        simulation.server.change_all(8);
        check("with a change, without bookmarks", 8).await;
        check("after a change, without bookmarks", 4).await;
    });
}

#[test]
fn a_comparison_with_a_server_that_shows_nothing_takes_one_list() {
    for forget in [Server::omit_bookmarks, Server::forget] {
        simulate(async {
            let simulation = Simulation::start();
            simulation.converge().await;
            forget(&simulation.server);
            sleep(Duration::from_secs(10)).await;
            for _ in 0..3 {
                let (lists, took) = compare(&simulation).await;
                assert_eq!(lists, [1, 1]);
                assert!(took < Duration::from_secs(8), "{took:?}");
            }
        });
    }
}

/// The bookmark comes a second after the begin. Watches of less than a second that show nothing have pauses between
/// them, in which nothing is asked for.
#[test]
fn a_comparison_whose_watches_always_end_too_early_becomes_a_list() {
    for (watch_max, at_most) in [(10, 80), (900, 80), (1500, 10)].map(|(millis, s)| (Duration::from_millis(millis), s))
    {
        simulate(async {
            let simulation = Simulation::start();
            simulation.converge().await;
            simulation.server.omit_bookmarks();
            simulation.server.end_watches_after(watch_max);
            for variant in 7..9 {
                sleep(Duration::from_secs(10)).await;
                simulation.server.change_all(variant);
                simulation.converge().await;
                simulation.server.forget_requests();
                let (lists, took) = compare(&simulation).await;
                assert_eq!(lists, [1, 1], "after {watch_max:?}");
                assert!(took < Duration::from_secs(at_most), "{took:?}");
                let is_short = |asked: &ReceivedRequest| asked.lasts == Duration::from_secs(3);
                let short = |kind| {
                    let asked = simulation.server.asked();
                    asked.iter().filter(|(_, asked)| asked.kind == kind && is_short(asked)).count()
                };
                assert_eq!([ResourceKind::Services, ResourceKind::EndpointSlices].map(short), [3, 3]);
            }
        });
    }
}

#[test]
fn a_server_whose_watches_end_early_is_listed_once() {
    simulate(async {
        let simulation = Simulation::start();
        simulation.converge().await;
        for _ in 0..200 {
            sleep(Duration::from_secs(70)).await;
            simulation.server.end_watches();
        }
        assert_eq!(lists(&simulation, ResourceKind::Services).len(), 1, "a bookmark comes each minute");
    });
}

/// The server has no bookmarks if etcd tells it about no progress, and a proxy may end watches before they come.
#[test]
fn a_server_without_bookmarks_is_listed_once_an_hour() {
    for pause in [Duration::from_secs(50), Duration::from_secs(1000)] {
        simulate(async {
            let simulation = Simulation::start();
            simulation.converge().await;
            simulation.server.omit_bookmarks();
            let start = Instant::now();
            while start.elapsed() < hours(24) {
                sleep(pause).await;
                simulation.server.end_watches();
            }
            let count = lists(&simulation, ResourceKind::Services).len();
            assert!((20..=32).contains(&count), "{count} lists in a day");
        });
    }
}

#[test]
fn a_watch_that_silently_dies_is_resumed_without_a_list() {
    simulate(async {
        let simulation = Simulation::start();
        simulation.converge().await;
        simulation.server.stall();
        sleep(Duration::from_secs(1)).await;
        simulation.server.change_all(7);
        sleep(Duration::from_secs(320)).await;
        simulation.assert_converged();
        assert_eq!(lists(&simulation, ResourceKind::Services).len(), 1);
    });
}

/// Each status for an hour: the agent keeps what it knows, and goes on without a list.
#[test]
fn a_server_that_refuses_everything_for_long_is_asked_seldom_and_resumed() {
    for code in [401, 403, 429, 500, 502, 503] {
        simulate(async {
            let simulation = Simulation::start();
            simulation.converge().await;
            simulation.server.set_outage(Some((code, None)));
            let asked = simulation.server.asked().len();
            sleep(hours(1)).await;
            simulation.assert_converged();
            let silent = simulation.last_contact.silent_seconds().unwrap();
            assert!(silent >= 3600 - 60, "refused with {code} for an hour, and silent for {silent} s");
            let asked = simulation.server.asked().len() - asked;
            assert!((30..600).contains(&asked), "{asked} requests in an hour of {code}");
            simulation.server.change_all(7);
            simulation.server.set_outage(None);
            sleep(Duration::from_secs(6 * 60)).await;
            simulation.assert_converged();
            for kind in [ResourceKind::Services, ResourceKind::EndpointSlices] {
                assert_eq!(lists(&simulation, kind).len(), 1, "{code}");
            }
        });
    }
}
