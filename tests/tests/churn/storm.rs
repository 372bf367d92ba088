//! Threads that connect without a pause and judge each connect.

use std::{
    fmt,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use cproxy_tests::{Done, random::Random, sandbox::Sandbox};

use crate::{
    client::{Attempt, Client, FORMS, Form, KINDS, Kind},
    history::{History, Meeting},
    world::SERVICES,
};

/// Number of connecting threads.
const THREADS: u64 = 6;

/// State shared by the threads.
#[derive(Debug, Default)]
pub(crate) struct Storm {
    pub(crate) history: History,
    has_begun: AtomicBool,
    is_over: AtomicBool,
    failure: Mutex<Option<String>>,
    counts: [[AtomicU64; FORMS.len()]; KINDS.len()],
    /// Calls that failed because there was no Service at that moment.
    turned: AtomicU64,
}

impl Storm {
    /// Runs the threads for as long as `work` takes. They wait for [`Storm::begin`].
    pub(crate) fn rage<R>(&self, sandbox: &Sandbox, seed: u64, work: impl FnOnce() -> R) -> R {
        thread::scope(|scope| {
            let _done = Done(&self.is_over);
            for thread in 1..=THREADS {
                scope.spawn(move || {
                    sandbox.enter();
                    self.connect_until_over(Random::new(seed.wrapping_add(thread)));
                });
            }
            work()
        })
    }

    /// Lets the threads start, once the Services are in force.
    pub(crate) fn begin(&self) {
        self.has_begun.store(true, Ordering::Relaxed);
    }

    pub(crate) fn connects(&self) -> u64 {
        self.counts.iter().flatten().map(|count| count.load(Ordering::Relaxed)).sum()
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failure.lock().unwrap().is_some()
    }

    pub(crate) fn failure(&self) -> String {
        self.failure.lock().unwrap().clone().unwrap_or_default()
    }

    fn connect_until_over(&self, mut random: Random) {
        let mut client = Client::new();
        while !self.is_over.load(Ordering::Relaxed) && !self.has_failed() {
            if !self.has_begun.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(1));
                continue;
            }
            let (kind, form, service) = (random.pick(&KINDS), random.pick(&FORMS), random.below(SERVICES));
            let attempt = client.attempt(kind, form, service);
            match self.judge(&mut client, kind, form, service, &attempt) {
                Ok(Meeting::Reached(_)) => &self.counts[kind as usize][form as usize],
                Ok(Meeting::Turned) => &self.turned,
                Err(reason) => {
                    let text = format!("{kind:?} {form:?} to Service {service}: {reason}");
                    self.failure.lock().unwrap().get_or_insert(text);
                    return;
                }
            }
            .fetch_add(1, Ordering::Relaxed);
        }
    }

    fn judge(
        &self,
        client: &mut Client,
        kind: Kind,
        form: Form,
        service: usize,
        attempt: &Attempt,
    ) -> Result<Meeting, String> {
        let meeting = attempt.meeting.clone()?;
        self.history.judge(service, attempt.from, attempt.to, meeting)?;
        if kind != Kind::UdpLasting {
            return Ok(meeting);
        }
        let Some((before, since)) = client.succeed(form, service, attempt) else { return Ok(meeting) };
        let is_kept = meeting == Meeting::Reached(before);
        if is_kept || !self.history.always_has(service, since, attempt.to, before) {
            return Ok(meeting);
        }
        Err(format!("{meeting:?}, though the socket had {before:?}, which has served all the time"))
    }
}

impl fmt::Display for Storm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} connects", self.connects())?;
        for (kind, counts) in KINDS.iter().zip(&self.counts) {
            let counts = counts.iter().map(|count| count.load(Ordering::Relaxed)).collect::<Vec<_>>();
            write!(f, ", {kind:?} {counts:?}")?;
        }
        let (sets, met) = self.history.sets();
        let turned = self.turned.load(Ordering::Relaxed);
        write!(f, " as {FORMS:?}; {turned} calls without a Service; {sets} sets, {met} of them met")
    }
}
