//! A storm: many threads connect and send while a test changes everything, and each answer must come from a backend
//! that was in force at some moment of the call ([`history`]). By every kind of socket and form of address,
//!
//! - each call on a new socket reaches such a backend (`connects`),
//! - each flow of an unconnected socket stays with its backend while that serves, and then goes to one that new clients
//!   get (`flows`).
//!
//! Nothing depends on how fast the machine is: a set is in force from just before it is written to the source until the
//! next one has been seen in the kernel, however long that takes.

#![expect(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "a storm that finds something else than it expects fails the test"
)]

mod calls;
mod connects;
mod flows;
mod losses;

pub mod addresses;
pub mod client;
pub mod history;
pub mod kernel;
pub mod servers;
pub mod sets;

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

use self::{
    addresses::SERVICES,
    flows::{Answers, Flows, Step},
    history::{History, Outcome},
    losses::{Losses, may_be_lost},
};
use crate::{
    Done,
    random::Random,
    sandbox::Sandbox,
    world::{Form, SocketKind},
};

/// Number of threads, half of them with flows. The agent needs time, too.
const THREADS: u64 = 8;

/// Number of rounds of a socket with flows before it is replaced. Every other thread keeps its socket.
const ROUNDS_OF_SOCKET: usize = 40;

/// Sockets that the agents close in turn when their backends have left: values of `--terminate-sockets`.
const CLOSES: [&str; 3] = ["udp", "none", "all"];

/// Least number of each event in each form.
const EVENTS_LEAST: u64 = 50;

/// State shared by the threads.
#[derive(Debug, Default)]
pub struct Storm {
    /// Sets of all Services.
    pub history: History,
    /// Number of agents so far.
    agents: AtomicUsize,
    /// Pause of each thread after each call.
    pause: Duration,
    has_begun: AtomicBool,
    is_over: AtomicBool,
    failure: Mutex<Option<String>>,
    losses: Losses,
    /// Numbers of events, for each form of addresses.
    counts: Mutex<BTreeMap<Event, [u64; Form::ALL.len()]>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Connect(SocketKind),
    /// A connect without a Service.
    NoService,
    /// A socket was closed, as a backend has left.
    Closed,
    /// The kernel has lost a datagram, so that the call says nothing.
    Lost,
    Flow(Step),
}

impl Storm {
    /// A storm that leaves the machine some time.
    #[must_use]
    pub fn with_pauses(pause: Duration) -> Self {
        Self { pause, ..Self::default() }
    }

    /// Runs the threads for as long as `work` takes. They wait for [`Storm::begin`].
    pub fn run<R>(&self, sandbox: &Sandbox, seed: u64, work: impl FnOnce() -> R) -> R {
        thread::scope(|scope| {
            let _done = Done(&self.is_over);
            for thread in 1..=THREADS {
                scope.spawn(move || {
                    sandbox.enter();
                    while !self.has_begun.load(Ordering::Relaxed) && !self.is_over() {
                        thread::sleep(Duration::from_millis(1));
                    }
                    if let Err(reason) = self.call_until_over(thread, Random::new(seed.wrapping_add(thread))) {
                        self.fail(reason);
                    }
                });
            }
            work()
        })
    }

    /// Lets the threads start, once the Services are in force.
    pub fn begin(&self) {
        self.has_begun.store(true, Ordering::Relaxed);
    }

    /// Counts an agent that is about to start; its predecessor has ended. Returns its `--terminate-sockets`.
    pub fn next_agent_closes(&self) -> &'static str {
        CLOSES[self.agents.fetch_add(1, Ordering::SeqCst) % CLOSES.len()]
    }

    /// The number of calls on new sockets that were answered.
    pub fn connects(&self) -> u64 {
        let counts = self.counts.lock().unwrap();
        SocketKind::ALL.iter().filter_map(|kind| counts.get(&Event::Connect(*kind))).flatten().sum()
    }

    /// The number of answers in flows.
    pub fn flow_answers(&self) -> u64 {
        let counts = self.counts.lock().unwrap();
        Step::ANSWERED.iter().filter_map(|step| counts.get(&Event::Flow(*step))).flatten().sum()
    }

    /// Whether all events that prove something have happened often enough.
    pub fn has_seen_everything(&self) -> bool {
        let counts = self.counts.lock().unwrap();
        let mut events = SocketKind::ALL.map(Event::Connect).into_iter().chain(Step::ANSWERED.map(Event::Flow));
        events.all(|event| counts.get(&event).is_some_and(|counts| counts.iter().all(|count| *count >= EVENTS_LEAST)))
    }

    /// Whether a call was not answered as it should.
    pub fn has_failed(&self) -> bool {
        self.failure.lock().unwrap().is_some()
    }

    /// Records a failure. The first one counts.
    pub fn fail(&self, reason: String) {
        self.failure.lock().unwrap().get_or_insert(reason);
    }

    /// The first failure.
    pub fn failure(&self) -> String {
        self.failure.lock().unwrap().clone().unwrap_or_default()
    }

    /// Whether a question by UDP failed as the kernel has lost a datagram.
    pub fn is_lost(&self, error: &io::Error) -> bool {
        may_be_lost(error) && self.losses.excuse()
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
                match flows.ask_all(&self.history, |step, form| self.count(Event::Flow(step), form))? {
                    Answers::All => {}
                    // Whether the lost question has moved its flow is not known.
                    Answers::OneMissing(_, error) if self.is_lost(&error) => {
                        self.count(Event::Lost, forms[0]);
                        break;
                    }
                    Answers::OneMissing(asked, error) => return Err(format!("no answer of {asked}: {error}")),
                }
                thread::sleep(self.pause);
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
            thread::sleep(self.pause);
            self.count(event.map_err(|reason| format!("{kind:?} {form:?} to Service {service}: {reason}"))?, form);
        }
        Ok(())
    }

    fn connect(&self, kind: SocketKind, form: Form, service: usize, question: u64) -> Result<Event, String> {
        let agent = self.agents.load(Ordering::SeqCst);
        let (outcome, period) = match connects::call(kind, form, service, question) {
            Ok(called) => called,
            Err(error) if kind != SocketKind::Tcp && self.is_lost(&error) => return Ok(Event::Lost),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err("no answer".to_owned()),
            Err(error) => return Err(error.to_string()),
        };
        self.history.check_new(service, period, outcome)?;
        match outcome {
            Outcome::Reached(_) => Ok(Event::Connect(kind)),
            Outcome::NoService => Ok(Event::NoService),
            // The one agent of that time has closed it.
            Outcome::Closed if agent == self.agents.load(Ordering::SeqCst) => {
                let closes = CLOSES[(agent + CLOSES.len() - 1) % CLOSES.len()];
                match (closes, kind) {
                    ("all", _) | ("udp", SocketKind::UdpConnected) => Ok(Event::Closed),
                    _ => Err(format!("closed by an agent with --terminate-sockets {closes}")),
                }
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
