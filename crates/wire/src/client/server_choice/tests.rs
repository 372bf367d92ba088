//! Properties of the choice over random histories, against a model that counts the failures of each server.

use std::net::Ipv4Addr;

use proptest::{collection::vec, prelude::*};

use super::*;

/// Something that happens to a client, or that time brings.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// So many seconds pass.
    Pause(u64),
    /// A server can be reached from now on, or no longer.
    Toggle(usize),
    /// A request needs a connection.
    Request,
    /// The same, and it is given up while this server in order is dialed.
    InterruptedRequest(usize),
    /// The present connection is closed, which the next request finds.
    Close,
    /// The present connection breaks in a request.
    Break { is_new: bool },
    /// The present server cannot serve.
    FailOver(Condition),
    /// Another connection is made, for which earlier failures do not count.
    Renew,
    /// Credentials of the connection have changed.
    Reconfigure,
}

fn event() -> impl Strategy<Value = Event> {
    let condition = prop_oneof![Just(Condition::HasAlternative), Just(Condition::HasOther), Just(Condition::Always)];
    prop_oneof![
        3 => prop_oneof![0..90_u64, 0..600_u64, 0..9000_u64].prop_map(Event::Pause),
        3 => (0..4_usize).prop_map(Event::Toggle),
        6 => Just(Event::Request),
        1 => (0..4_usize).prop_map(Event::InterruptedRequest),
        1 => Just(Event::Close),
        1 => any::<bool>().prop_map(|is_new| Event::Break { is_new }),
        2 => condition.prop_map(Event::FailOver),
        1 => Just(Event::Renew),
        1 => Just(Event::Reconfigure),
    ]
}

/// Which of one to four servers can be reached at first, and what happens.
fn history() -> impl Strategy<Value = (Vec<bool>, Vec<Event>)> {
    (vec(any::<bool>(), 1..=4), vec(event(), 0..60))
}

/// Failures of one server as documented: so many in a row, each soon after the one before.
#[derive(Clone, Copy, Default)]
struct Failures {
    count: u32,
    last: Option<Instant>,
}

impl Failures {
    /// A minute after the first failure, and twice as long after each further one, up to an hour.
    fn hold(self) -> Duration {
        Duration::from_secs((60 << self.count.saturating_sub(1).min(10)).min(3600))
    }

    fn record(&mut self, now: Instant, served: Duration) {
        self.count = if served > self.hold() { 1 } else { self.count + 1 };
        self.last = Some(now);
    }

    fn is_on_hold(self, now: Instant) -> bool {
        self.last.is_some_and(|last| now < last + self.hold())
    }
}

/// Connection in use.
#[derive(Clone, Copy)]
struct Used {
    index: usize,
    fingerprint: u64,
    since: Instant,
}

/// A client and its servers, as far as the actions show them.
struct Client {
    choice: ServerChoice,
    now: Instant,
    is_up: Vec<bool>,
    failures: Vec<Failures>,
    fingerprint: u64,
    used: Option<Used>,
    is_open: bool,
    must_renew: bool,
    /// Expected and actual actions after servers that could not serve.
    failovers: Vec<(Action, Action)>,
}

/// A request: the state before it, and what it did.
struct Attempted {
    is_up: Vec<bool>,
    is_on_hold: Vec<bool>,
    /// Server of the connection, if it is open.
    open: Option<usize>,
    /// The open connection is up to date, and no new one is wanted.
    is_good: bool,
    dialed: Vec<usize>,
    end: Action,
    /// Server of the connection afterwards.
    used: Option<usize>,
}

impl Client {
    fn new(is_up: Vec<bool>) -> Self {
        Self {
            choice: ServerChoice::default(),
            now: Instant::now(),
            failures: vec![Failures::default(); is_up.len()],
            is_up,
            fingerprint: 0,
            used: None,
            is_open: false,
            must_renew: false,
            failovers: Vec::new(),
        }
    }

    fn record_failure(&mut self, index: usize) {
        let used = self.used.filter(|used| used.index == index);
        let served = used.map_or(Duration::ZERO, |used| self.now - used.since);
        self.failures[index].record(self.now, served);
    }

    fn are_on_hold(&self) -> Vec<bool> {
        self.failures.iter().map(|failures| failures.is_on_hold(self.now)).collect()
    }

    /// Sends a request, which is given up at the dial with this number.
    fn request(&mut self, interrupted_at: Option<usize>) -> Option<Attempted> {
        let open = self.used.filter(|_| self.is_open);
        let is_good = !self.must_renew && open.is_some_and(|used| used.fingerprint == self.fingerprint);
        let (is_up, is_on_hold, open) = (self.is_up.clone(), self.are_on_hold(), open.map(|used| used.index));
        let mut dialed = Vec::new();
        self.choice.step(Input::Interrupt, self.now);
        let (server_count, fingerprint) = (is_up.len(), self.fingerprint);
        let connect = Input::Connect { server_count, fingerprint, is_open: open.is_some() };
        let mut action = self.choice.step(connect, self.now);
        while let Action::Dial(index) = action {
            if interrupted_at == Some(dialed.len()) {
                self.record_failure(index);
                self.choice.step(Input::Interrupt, self.now);
                return None;
            }
            dialed.push(index);
            let is_reached = self.is_up[index];
            if !is_reached {
                self.record_failure(index);
            }
            let input = if is_reached { Input::Reached(ReachedAddress::default()) } else { Input::NotReached };
            action = self.choice.step(input, self.now);
            if is_reached {
                self.used = Some(Used { index, fingerprint, since: self.now });
                (self.is_open, self.must_renew) = (true, false);
            }
        }
        let used = self.used.filter(|_| self.is_open).map(|used| used.index);
        Some(Attempted { is_up, is_on_hold, open, is_good, dialed, end: action, used })
    }

    /// Retires the connection. `has_failed`: its server.
    fn retire(&mut self, has_failed: bool) {
        if let Some(used) = self.used
            && has_failed
        {
            self.record_failure(used.index);
        }
        self.used = None;
    }

    /// Has an event happen. Returns what a request did.
    fn play(&mut self, event: Event) -> Option<Attempted> {
        match event {
            Event::Pause(seconds) => self.now += Duration::from_secs(seconds),
            Event::Toggle(server) => {
                let server = server % self.is_up.len();
                self.is_up[server] = !self.is_up[server];
            }
            Event::Request => return self.request(None),
            Event::InterruptedRequest(number) => return self.request(Some(number)),
            Event::Close => self.is_open = false,
            Event::Break { is_new } => {
                self.choice.step(Input::Retire { has_failed: is_new }, self.now);
                self.retire(is_new);
            }
            Event::FailOver(condition) => self.fail_over(condition),
            Event::Renew => {
                self.choice.step(Input::Renew, self.now);
                self.failures.fill(Failures::default());
                self.must_renew = true;
                return self.request(None);
            }
            Event::Reconfigure => self.fingerprint += 1,
        }
        None
    }

    /// Fails over. The present server should be left if and only if the condition holds.
    fn fail_over(&mut self, condition: Condition) {
        let action = self.choice.step(Input::FailOver(condition), self.now);
        let Some(used) = self.used else { return self.failovers.push((Action::Nothing, action)) };
        let is_on_hold = self.are_on_hold();
        let has_alternative = (0..is_on_hold.len()).any(|other| other != used.index && !is_on_hold[other]);
        let must_leave = match condition {
            Condition::HasAlternative => has_alternative,
            Condition::HasOther => self.is_up.len() > 1,
            Condition::Always => true,
        };
        let expected = if must_leave { Action::Retire { has_alternative } } else { Action::Nothing };
        self.failovers.push((expected, action));
        if let Action::Retire { .. } = action {
            self.retire(true);
        }
    }
}

/// Plays a history, and checks each request that was not given up.
fn check((is_up, events): (Vec<bool>, Vec<Event>), property: impl Fn(&Attempted)) {
    let mut client = Client::new(is_up);
    for event in events {
        if let Some(attempted) = client.play(event) {
            property(&attempted);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn a_request_reaches_a_server_if_one_can_be_reached_and_dials_none_twice(history in history()) {
        check(history, |attempted| {
            let mut distinct = attempted.dialed.clone();
            distinct.sort_unstable();
            distinct.dedup();
            assert_eq!(distinct.len(), attempted.dialed.len(), "{:?}", attempted.dialed);
            let can_be_reached = attempted.is_up.contains(&true);
            match attempted.end {
                Action::Replace(_) => assert!(can_be_reached),
                Action::Keep { .. } => assert!(attempted.open.is_some() && (attempted.is_good || !can_be_reached)),
                Action::Fail => assert!(attempted.open.is_none() && !can_be_reached),
                other => panic!("{other:?}"),
            }
        });
    }

    #[test]
    fn a_server_on_hold_is_dialed_only_where_no_other_serves(history in history()) {
        check(history, |attempted| {
            let on_hold = attempted.dialed.iter().map(|&index| attempted.is_on_hold[index]);
            if attempted.is_good {
                assert!(!on_hold.clone().any(|is_on_hold| is_on_hold), "beside a good connection");
            }
            assert!(on_hold.is_sorted(), "after all others: {:?}", attempted.dialed);
        });
    }

    #[test]
    fn no_preferred_server_is_passed_over_once_its_hold_has_ended(history in history()) {
        check(history, |attempted| {
            let mut indices = 0..attempted.is_up.len();
            let best = indices.find(|&index| attempted.is_up[index] && !attempted.is_on_hold[index]);
            if let Some(best) = best {
                assert!(attempted.used.is_some_and(|used| used <= best), "{:?} instead of {best}", attempted.used);
            }
        });
    }

    #[test]
    fn a_server_is_left_for_the_others_that_the_condition_names((is_up, events) in history()) {
        let mut client = Client::new(is_up);
        events.into_iter().for_each(|event| drop(client.play(event)));
        for (expected, action) in client.failovers {
            assert_eq!(action, expected);
        }
    }

    #[test]
    fn a_good_connection_is_kept_unless_a_better_server_is_reached(history in history()) {
        check(history, |attempted| {
            if let (true, Some(open)) = (attempted.is_good, attempted.open) {
                assert!(attempted.dialed.iter().all(|&index| index < open), "{:?}", attempted.dialed);
                let is_better = attempted.dialed.iter().any(|&index| attempted.is_up[index]);
                assert_eq!(attempted.end == Action::Keep { is_unwanted: false }, !is_better);
            }
        });
    }
}

#[test]
fn a_server_fails_with_the_last_address_of_its_name() {
    let start = Instant::now();
    for other_count in 0..4_u8 {
        let mut choice = ServerChoice::default();
        for last in 0..=other_count {
            let connect = Input::Connect { server_count: 2, fingerprint: 0, is_open: false };
            assert_eq!(choice.step(connect, start), Action::Dial(0), "address {last} of {other_count}");
            let ip = Some(Ipv4Addr::new(192, 0, 2, last).into());
            choice.step(Input::Reached(ReachedAddress { ip, other_count: other_count.into() }), start);
            // With the last one, only the other server may serve.
            let retired = choice.step(Input::FailOver(Condition::HasAlternative), start);
            assert_eq!(retired, Action::Retire { has_alternative: true });
            assert_eq!(choice.avoided().len(), usize::from(last) + 1);
        }
        let connect = Input::Connect { server_count: 2, fingerprint: 0, is_open: false };
        assert_eq!(choice.step(connect, start), Action::Dial(1));
    }
}

#[test]
fn a_connection_says_how_it_differs_from_the_one_before() {
    let (mut choice, now) = (ServerChoice::default(), Instant::now());
    let connect = |choice: &mut ServerChoice, dead: usize| {
        let mut action = choice.step(Input::Connect { server_count: 2, fingerprint: 0, is_open: false }, now);
        for _ in 0..dead {
            action = choice.step(Input::NotReached, now);
        }
        assert!(matches!(action, Action::Dial(_)), "{action:?}");
        choice.step(Input::Reached(ReachedAddress::default()), now)
    };
    assert_eq!(connect(&mut choice, 0), Action::Replace(Change::Repeated));
    assert_eq!(connect(&mut choice, 1), Action::Replace(Change::Moved));
    choice.step(Input::Renew, now);
    assert!(choice.must_renew());
    assert_eq!(connect(&mut choice, 0), Action::Replace(Change::Renewed));
    assert!(!choice.must_renew());
    assert_eq!(connect(&mut choice, 0), Action::Replace(Change::Repeated));
}
