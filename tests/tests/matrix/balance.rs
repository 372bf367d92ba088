//! Evenness of the choice of backends.

use std::{net::IpAddr, thread};

use cproxy_tests::process::cproxy;

use crate::{
    choice::backend,
    world::{Case, Form, MatrixSandbox, PORT, pod, ready, vip},
};

/// Number of threads that connect at the same time.
const THREADS: u32 = 2;

/// Numbers of backends, each with the chi-square that an even choice exceeds once in 1,000 times, with one degree of
/// freedom less (NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.4).
const CASES: [(u8, f64); 4] = [(2, 10.828), (3, 13.816), (7, 22.458), (100, 148.230)];

/// Number of attempts; an even choice fails all of them once in 10^9 times.
const TRIES: u32 = 3;

/// Services with VIPs 1 to 4.
fn world() -> MatrixSandbox {
    let numbered = || (1..).zip(CASES);
    let objects = numbered().flat_map(|(number, (count, _))| {
        let pods: Vec<_> = (1..=count).collect();
        ready(&format!("web-{number}"), number, &pods)
    });
    MatrixSandbox::start(1..=100, objects)
}

#[test]
fn the_choice_is_even() {
    let _world = world();
    every_choice_is_even(100_000);
}

#[test]
fn the_choice_is_even_after_a_new_seed() {
    let world = world();
    cproxy(&world.sandbox, &["reseed"]).success();
    every_choice_is_even(20_000);
}

/// This holds also when threads take turns, for both families, whose sets have separate counters, and for an agent that
/// finds programs with the other mode.
#[test]
fn round_robin_gives_each_its_turn() {
    let mut world = world();
    world.kill_agent();
    world.start_agent_with(&["--balance", "round-robin"]);
    for (number, (count, _)) in (1..).zip(CASES) {
        let _case = Case::new(format!("{count} backends"));
        for form in [Form::V4, Form::V6] {
            let each = 2 * u32::from(count) + 1;
            let hits = count_connects_of_threads(number, count, each, &[form]);
            let fair = each * THREADS / u32::from(count);
            assert!(hits.iter().all(|&hits| hits == fair || hits == fair + 1), "{form}: {hits:?}");
        }
    }
    world.kill_agent();
    world.start_agent();
    every_choice_is_even(20_000);
}

fn every_choice_is_even(connects: u32) {
    for (number, (count, critical)) in (1..).zip(CASES) {
        let _case = Case::new(format!("{count} backends"));
        let is_even = |_| {
            let chi_square = chi_square(number, count, connects);
            println!("{count} backends, {connects} connects: chi-square {chi_square:.1}, of {critical}");
            chi_square < critical
        };
        assert!((0..TRIES).any(is_even), "uneven {TRIES} times in a row");
    }
}

/// Chi-square of connections to a VIP in both families.
fn chi_square(number: u8, count: u8, connects: u32) -> f64 {
    let hits = count_connects_of_threads(number, count, connects / THREADS, &[Form::V4, Form::V6]);
    let expected = f64::from(connects) / f64::from(count);
    hits.into_iter().map(|hits| (f64::from(hits) - expected).powi(2)).sum::<f64>() / expected
}

/// Number of choices of each pod by all threads together, each with `connects` connections.
fn count_connects_of_threads(number: u8, count: u8, connects: u32, forms: &[Form]) -> Vec<u32> {
    let mut all = vec![0; count.into()];
    thread::scope(|scope| {
        let threads: Vec<_> =
            (0..THREADS).map(|_| scope.spawn(|| count_connects(number, count, connects, forms))).collect();
        for thread in threads {
            all.iter_mut().zip(thread.join().unwrap()).for_each(|(all, hits)| *all += hits);
        }
    });
    all
}

/// Number of choices of each pod.
fn count_connects(number: u8, count: u8, connects: u32, forms: &[Form]) -> Vec<u32> {
    let mut hits = vec![0; count.into()];
    for form in forms.iter().cycle().take(connects as usize) {
        let address = form.address(vip(number), PORT);
        hits[usize::from(pod_number(backend(address))) - 1] += 1;
    }
    hits
}

/// Number of the pod, the last byte of its address.
fn pod_number(address: IpAddr) -> u8 {
    let number = match address {
        IpAddr::V4(address) => address.octets()[3],
        IpAddr::V6(address) => address.octets()[15],
    };
    debug_assert!(pod(number).is_at(address));
    number
}
