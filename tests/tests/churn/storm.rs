//! Threads that call without a pause, and the record that all share.

use std::{
    collections::BTreeMap,
    fmt, io,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use cproxy_tests::{
    Done,
    random::Random,
    sandbox::Sandbox,
    world::{Form, SocketKind},
};

use crate::{
    connects,
    flows::{Flows, Step},
    history::{History, Outcome},
    world::SERVICES,
};

/// Number of threads, half of them with flows. The agent needs time, too.
const THREADS: u64 = 8;

/// Number of rounds of a socket with flows before it is replaced. Every other thread keeps its socket.
const ROUNDS_OF_SOCKET: usize = 40;

/// Least number of each event in each form.
const EVENTS_LEAST: u64 = 50;

/// State shared by the threads.
#[derive(Debug, Default)]
pub(crate) struct Storm {
    pub(crate) history: History,
    /// Number of agents so far. Those with odd numbers close the sockets of backends that have left.
    agents: AtomicUsize,
    has_begun: AtomicBool,
    is_over: AtomicBool,
    failure: Mutex<Option<String>>,
    /// Numbers of events, for each form of addresses.
    counts: Mutex<BTreeMap<Event, [u64; Form::ALL.len()]>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Connect(SocketKind),
    /// A connect without a Service.
    NoService,
    /// A connected UDP socket was closed, as a backend has left.
    Closed,
    Flow(Step),
}

impl Storm {
    /// Runs the threads for as long as `work` takes. They wait for [`Storm::begin`].
    pub(crate) fn run<R>(&self, sandbox: &Sandbox, seed: u64, work: impl FnOnce() -> R) -> R {
        thread::scope(|scope| {
            let _done = Done(&self.is_over);
            for thread in 1..=THREADS {
                scope.spawn(move || {
                    sandbox.enter();
                    while !self.has_begun.load(Ordering::Relaxed) && !self.is_over() {
                        thread::sleep(Duration::from_millis(1));
                    }
                    if let Err(reason) = self.call_until_over(thread, Random::new(seed.wrapping_add(thread))) {
                        self.failure.lock().unwrap().get_or_insert(reason);
                    }
                });
            }
            work()
        })
    }

    /// Lets the threads start, once the Services are in force.
    pub(crate) fn begin(&self) {
        self.has_begun.store(true, Ordering::Relaxed);
    }

    /// Counts an agent that is about to start; its predecessor has ended. Returns whether it is to close sockets.
    pub(crate) fn next_agent_closes(&self) -> bool {
        self.agents.fetch_add(1, Ordering::SeqCst).is_multiple_of(2)
    }

    pub(crate) fn connects(&self) -> u64 {
        let counts = self.counts.lock().unwrap();
        SocketKind::ALL.iter().filter_map(|kind| counts.get(&Event::Connect(*kind))).flatten().sum()
    }

    /// Whether all events that prove something have happened often enough.
    pub(crate) fn has_seen_everything(&self) -> bool {
        let counts = self.counts.lock().unwrap();
        let mut events = SocketKind::ALL.map(Event::Connect).into_iter().chain(Step::ANSWERED.map(Event::Flow));
        events.all(|event| counts.get(&event).is_some_and(|counts| counts.iter().all(|count| *count >= EVENTS_LEAST)))
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failure.lock().unwrap().is_some()
    }

    pub(crate) fn failure(&self) -> String {
        self.failure.lock().unwrap().clone().unwrap_or_default()
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed) || self.has_failed()
    }

    fn count(&self, event: Event, form: Form) {
        self.counts.lock().unwrap().entry(event).or_default()[form as usize] += 1;
    }

    fn call_until_over(&self, thread: u64, mut random: Random) -> Result<(), String> {
        let forms: &[Form] = match thread % 4 {
            0 => &[Form::V4],
            1 => &[Form::V6, Form::Mapped],
            _ => return self.connect_until_over(&mut random),
        };
        let rounds = if thread % 8 < 4 { usize::MAX } else { ROUNDS_OF_SOCKET };
        while !self.is_over() {
            let mut flows = Flows::open(forms, &mut random).map_err(|error| error.to_string())?;
            let mut round = 0;
            while round < rounds && !self.is_over() {
                flows.ask_all(&self.history, |step, form| self.count(Event::Flow(step), form))?;
                round += 1;
            }
        }
        Ok(())
    }

    fn connect_until_over(&self, random: &mut Random) -> Result<(), String> {
        for question in 0.. {
            if self.is_over() {
                break;
            }
            let (kind, form, service) =
                (random.pick(&SocketKind::ALL), random.pick(&Form::ALL), random.below(SERVICES));
            let event = self.connect(kind, form, service, question);
            self.count(event.map_err(|reason| format!("{kind:?} {form:?} to Service {service}: {reason}"))?, form);
        }
        Ok(())
    }

    fn connect(&self, kind: SocketKind, form: Form, service: usize, question: u64) -> Result<Event, String> {
        let agent = self.agents.load(Ordering::SeqCst);
        let (outcome, period) = connects::call(kind, form, service, question).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => "no answer".to_owned(),
            _ => error.to_string(),
        })?;
        self.history.check_new(service, period, outcome)?;
        match outcome {
            Outcome::Reached(_) => Ok(Event::Connect(kind)),
            Outcome::NoService => Ok(Event::NoService),
            Outcome::Closed if agent.is_multiple_of(2) && agent == self.agents.load(Ordering::SeqCst) => {
                Err("closed, though the agent closes no sockets".to_owned())
            }
            Outcome::Closed => Ok(Event::Closed),
        }
    }
}

impl fmt::Display for Storm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} connects", self.connects())?;
        for (event, counts) in &*self.counts.lock().unwrap() {
            write!(f, ", {event:?} {counts:?}")?;
        }
        write!(f, " as {:?}; {} sets", Form::ALL, self.history.sets())
    }
}
