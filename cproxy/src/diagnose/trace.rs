//! Trace: each call that the programs translate, refuse or drop, as it happens.

mod printer;
mod request;

use std::{
    future::pending,
    io::{self, IsTerminal as _},
    iter,
    time::Duration,
};

use cproxy_datapath::bpf::{PinDir, Tracing};
use tokio::{
    io::{Interest, unix::AsyncFd},
    signal::unix::{Signal, SignalKind, signal},
    time::{MissedTickBehavior, interval, sleep, timeout},
};

use self::printer::{Printing, Work};
pub(crate) use self::request::TraceRequest;

/// Interval of looks at links, losses and counters.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// Number of events that are taken at once. Signals, links and losses get their turn in between.
const BATCH: usize = 512;
/// Number of events that are printed at the end: as many as the ring buffer has room for, and more.
const LAST_EVENTS_MAX: usize = 4_096;
/// Limit on the time for printing the last events, after which a reader that does not read is left.
const LAST_MAX: Duration = Duration::from_secs(2);

/// Prints until a signal, a limit or the end of stdout.
pub(crate) async fn trace(pins: &PinDir, request: &TraceRequest) -> anyhow::Result<()> {
    // Before the programs are switched: no signal may end the process without switching them back.
    let mut signals = Signals::new()?;
    let tracing = Tracing::start(pins, request.features, &request.filter)?;
    // SAFETY: its descriptor is always the same and stays open as long as it lives.
    let tracing = unsafe { AsyncFd::register_with_interest(tracing, Interest::READABLE) };
    let mut tracing = tracing.map_err(io::Error::from)?;
    if io::stderr().is_terminal() && !request.is_summary {
        (request.warn)(&"tracing calls; Ctrl-C ends it");
    }
    let mut printing = Printing::new(request);
    let traced = follow(request, &mut tracing, &mut printing, &mut signals).await;
    let tracing = tracing.get_mut();
    let switched = tracing.switch_out();
    if traced.is_ok() {
        let events = iter::from_fn(|| tracing.next_event()).take(LAST_EVENTS_MAX).collect();
        let counters = request.is_summary.then(|| tracing.counters()).transpose()?;
        let last = printing.finish(Work { events, counters, lost: tracing.lost() });
        match timeout(LAST_MAX, last).await {
            Ok(printed) => printed?,
            Err(_) => (request.warn)(&"the last events are not printed: the reader of stdout does not read"),
        }
    }
    traced?;
    Ok(switched?)
}

async fn follow(
    request: &TraceRequest,
    tracing: &mut AsyncFd<Tracing>,
    printing: &mut Printing,
    signals: &mut Signals,
) -> anyhow::Result<()> {
    let mut looks = interval(LOOK_INTERVAL);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let end = end_of(request.duration);
    tokio::pin!(end);
    loop {
        tokio::select! {
            () = signals.recv() => return Ok(()),
            () = &mut end => return Ok(()),
            _ = looks.tick() => {
                tracing.get_mut().switch_in()?;
                if printing.is_idle() {
                    let tracing = tracing.get_mut();
                    let counters = request.is_summary.then(|| tracing.counters()).transpose()?;
                    printing.start(Work { events: Vec::new(), counters, lost: tracing.lost() });
                }
            }
            ready = tracing.readable_mut(), if printing.is_idle() => {
                let mut ready = ready?;
                let tracing = ready.get_inner_mut();
                let events: Vec<_> = iter::from_fn(|| tracing.next_event()).take(BATCH).collect();
                let work = Work { lost: tracing.lost(), counters: None, events };
                if work.events.len() < BATCH {
                    ready.clear_ready();
                }
                printing.start(work);
            }
            is_open = printing.done(), if !printing.is_idle() => {
                if !is_open? {
                    return Ok(());
                }
            }
        }
    }
}

async fn end_of(duration: Option<Duration>) {
    match duration {
        Some(duration) => sleep(duration).await,
        None => pending().await,
    }
}

/// Signals that end the command.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    async fn recv(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
            _ = self.hangup.recv() => {}
        }
    }
}
