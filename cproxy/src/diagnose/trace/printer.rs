//! Printer of events and counters, on a thread of its own: it waits for the reader of stdout and for the agent, while
//! the command still obeys signals.

use std::{
    fmt::Display,
    future::pending,
    io::{self, IsTerminal, stdout},
    mem,
    path::PathBuf,
    time::{Duration, Instant},
};

use cproxy_datapath::bpf::{ServiceCounters, TraceEvent};
use rustix::time::{ClockId, clock_gettime};
use tokio::task::{JoinHandle, spawn_blocking};

use crate::{
    diagnose::trace::request::TraceRequest,
    report::{Layout, Names, PodPolicyReport, TraceRow, summary_rows, summary_text, trace_header},
    run_dir::{RESPONSE_TIMEOUT, fetch_policy, fetch_services},
};

/// Least time between two questions to the agent for names that are unknown.
const NAMES_INTERVAL: Duration = Duration::from_secs(2);
/// Moves the cursor of a terminal to its first line, and clears it.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// Output of one turn.
pub(super) struct Work {
    pub(super) events: Vec<TraceEvent>,
    pub(super) counters: Option<ServiceCounters>,
    /// Number of lost events so far.
    pub(super) lost: u64,
}

/// The printer: at rest, or at work on its thread.
pub(super) enum Printing {
    Idle(Box<Printer>),
    Busy(JoinHandle<(Box<Printer>, anyhow::Result<bool>)>),
    /// After a panic of the thread.
    Broken,
}

impl Printing {
    pub(super) fn new(request: &TraceRequest) -> Self {
        Self::Idle(Box::new(Printer::new(request)))
    }

    pub(super) fn is_idle(&self) -> bool {
        matches!(self, Self::Idle(_))
    }

    /// Starts printing, if the printer is at rest.
    pub(super) fn start(&mut self, work: Work) {
        *self = match mem::replace(self, Self::Broken) {
            Self::Idle(mut printer) => Self::Busy(spawn_blocking(move || {
                let printed = printer.print(&work);
                (printer, printed)
            })),
            other => other,
        };
    }

    /// Waits until the printer is at rest; for ever if it is. Returns false if no more output is wanted.
    pub(super) async fn done(&mut self) -> anyhow::Result<bool> {
        let Self::Busy(busy) = self else { return pending().await };
        let joined = busy.await;
        *self = Self::Broken;
        let (printer, printed) = joined?;
        *self = Self::Idle(printer);
        printed
    }

    /// Prints this after the work that has begun.
    pub(super) async fn finish(&mut self, work: Work) -> anyhow::Result<()> {
        if matches!(self, Self::Busy(_)) {
            self.done().await?;
        }
        self.start(work);
        self.done().await.map(drop)
    }
}

/// State of the output.
pub(super) struct Printer {
    is_json: bool,
    layout: Layout,
    print: fn(&str) -> anyhow::Result<bool>,
    warn: fn(&dyn Display),
    run_dir: PathBuf,
    /// Whether the calls are left out by which the agent tests its programs: no destination names them.
    hides_canary: bool,
    names: Names,
    /// Policy that the agent enforces, for the names of rules.
    policy: Option<PodPolicyReport>,
    /// Times of the last questions to the agent for names, and for the policy.
    asked: Option<Instant>,
    asked_policy: Option<Instant>,
    /// Header of the events, until it is printed.
    header: String,
    /// Number of events that are still wanted.
    wanted: u64,
    /// Lost events that were reported.
    lost: u64,
    /// `CLOCK_REALTIME` at the start of `CLOCK_MONOTONIC`, in nanoseconds.
    clock_offset_ns: i128,
}

impl Printer {
    fn new(request: &TraceRequest) -> Self {
        let now = |clock| {
            let now = clock_gettime(clock);
            i128::from(now.tv_sec) * 1_000_000_000 + i128::from(now.tv_nsec)
        };
        let has_header = !request.is_json && !request.is_summary;
        Self {
            is_json: request.is_json,
            layout: request.layout,
            print: request.print,
            warn: request.warn,
            run_dir: request.run_dir.clone(),
            hides_canary: request.filter.destinations.is_empty(),
            names: Names::default(),
            policy: None,
            asked: None,
            asked_policy: None,
            header: if has_header { trace_header(request.layout) } else { String::new() },
            wanted: request.count.unwrap_or(u64::MAX),
            lost: 0,
            clock_offset_ns: now(ClockId::Realtime) - now(ClockId::Monotonic),
        }
    }

    /// Returns false if no more output is wanted.
    fn print(&mut self, work: &Work) -> anyhow::Result<bool> {
        let mut text = mem::take(&mut self.header);
        for event in &work.events {
            if self.wanted == 0 {
                break;
            }
            if event.denial.is_some() {
                self.ask_policy();
            } else if event.denial.is_none() && self.names.service(&event.frontend).is_none() {
                self.ask_names();
            }
            if self.hides_canary && self.names.is_canary(&event.frontend) {
                continue;
            }
            self.wanted -= 1;
            text.push_str(&self.line(event)?);
            text.push('\n');
        }
        if let Some(counters) = &work.counters {
            text.push_str(&self.summary(counters)?);
        }
        self.report_losses(work.lost);
        let is_open = match text.strip_prefix(CLEAR) {
            Some(text) => clear() && (self.print)(text)?,
            None => text.is_empty() || (self.print)(&text)?,
        };
        Ok(is_open && self.wanted > 0)
    }

    fn line(&self, event: &TraceEvent) -> serde_json::Result<String> {
        let row = TraceRow::new(event, &self.names, self.policy.as_ref(), self.clock_offset_ns);
        if self.is_json { serde_json::to_string(&row) } else { Ok(row.text(self.layout)) }
    }

    fn summary(&mut self, counters: &ServiceCounters) -> serde_json::Result<String> {
        self.ask_names();
        let rows = summary_rows(counters, &self.names);
        Ok(match () {
            () if self.is_json => serde_json::to_string(&rows)? + "\n",
            () if stdout().is_terminal() => format!("{CLEAR}{}", summary_text(&rows)),
            () => summary_text(&rows) + "\n",
        })
    }

    /// Asks the agent for names, not too often. Without an agent there are none, which is no error.
    fn ask_names(&mut self) {
        if self.asked.is_some_and(|asked| asked.elapsed() < NAMES_INTERVAL) {
            return;
        }
        let rows = fetch_services(&self.run_dir, RESPONSE_TIMEOUT).unwrap_or_default();
        self.names = rows.into_iter().collect();
        self.asked = Some(Instant::now());
    }

    /// Asks the agent for the policy, which may have changed, not too often.
    fn ask_policy(&mut self) {
        if self.asked_policy.is_none_or(|asked| asked.elapsed() >= NAMES_INTERVAL) {
            self.policy = fetch_policy(&self.run_dir).ok().flatten();
            self.asked_policy = Some(Instant::now());
        }
    }

    fn report_losses(&mut self, lost: u64) {
        if lost > self.lost {
            let message = "events were lost: they came faster than they were printed";
            (self.warn)(&format_args!("{} {message}", lost - self.lost));
            self.lost = lost;
        }
    }
}

/// Clears the terminal. Returns false if it is gone.
fn clear() -> bool {
    use io::Write;
    stdout().write_all(CLEAR.as_bytes()).is_ok()
}
