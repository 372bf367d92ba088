//! Single writer of the table: events in, map writes out.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use cproxy_core::{
    Balance, Capacity, Event, Exclusions, KernelTable, Limits, Op, Problem, Reserve, Retired, Store, TablePlanner,
};
use cproxy_datapath::{
    bpf::{KernelMaps, KernelReader, PinDir, PinLock, TableError},
    sockets::Mode,
};
use cproxy_wire::LastHeard;
use tokio::{
    sync::mpsc,
    time::{Instant, timeout_at},
};

use super::{
    AgentError, notify,
    run_dir::RunDir,
    stale::{Gauges, Handover, SocketTerminator},
    timeline::{Phase, Timeline},
};
use crate::{admin::Question, memory, report};

/// Events that follow one another faster than this are applied together.
const QUIET: Duration = Duration::from_millis(2);
/// No event waits longer than this for others.
const DELAY_MAX: Duration = Duration::from_millis(10);
/// Least time between attempts to read back and rewrite the table after a failed write.
const RETRY: Duration = Duration::from_secs(1);
/// Time after which maps that are mostly empty are replaced by smaller ones.
const SPARSE_MAX: Duration = Duration::from_secs(10);
/// Pause before the next attempt to grow a map, after memory ran out.
const NO_MEMORY_PAUSE: Duration = Duration::from_secs(30);

/// Kind of the next write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// First complete sync.
    FirstSync,
    /// Update of the Services that have changed.
    Following,
    /// Sync after a failed write: the kernel's content is in doubt until it has been read back.
    InDoubt { retry_at: Instant },
}

/// Owner of store, table and maps.
pub(super) struct Follower {
    store: Store,
    table: TablePlanner,
    pins: PinDir,
    maps: KernelMaps,
    run_dir: RunDir,
    state: State,
    /// Limits of the maps. They allow no growth for a while after memory ran out.
    limits: Limits,
    grows_again_at: Option<Instant>,
    compacts_at: Option<Instant>,
    is_ready: bool,
    timeline: Timeline,
    /// Whether a list was applied, whose staged rows are free again.
    has_list: bool,
    reported: BTreeSet<Problem>,
    /// Revision of the planner's problems in `reported`.
    reported_revision: Option<u64>,
    /// Retired backends, to which sockets may still be connected.
    handover: Arc<Handover>,
    /// Whether an earlier agent's pins may have connected sockets.
    has_predecessor: bool,
    gauges: Arc<Gauges>,
    heard: LastHeard,
}

impl Follower {
    /// Takes over the table in the kernel.
    pub(super) fn open(
        lock: &PinLock,
        store: Store,
        run_dir: RunDir,
        timeline: Timeline,
        heard: LastHeard,
        mode: Mode,
    ) -> Result<Self, AgentError> {
        let pins = lock.pins().clone();
        let kernel = KernelTable { is_new: lock.is_empty(), ..KernelReader::read_table(&pins)? };
        let maps = KernelMaps::open(lock)?;
        let table = TablePlanner::new(KernelMaps::LIMITS, kernel);
        Ok(Self {
            store,
            table,
            pins,
            maps,
            run_dir,
            state: State::FirstSync,
            limits: KernelMaps::LIMITS,
            grows_again_at: None,
            compacts_at: None,
            is_ready: false,
            timeline,
            has_list: false,
            reported: BTreeSet::new(),
            reported_revision: None,
            handover: Arc::new(Handover::new(mode)),
            has_predecessor: !lock.is_empty(),
            gauges: Arc::default(),
            heard,
        })
    }

    /// Writes the exclusions, before anything else, and the balance.
    pub(super) fn configure(&mut self, exclusions: Exclusions, balance: Balance) -> Result<(), AgentError> {
        self.maps.apply(&[Op::SetExclusions(exclusions), Op::SetBalance(balance)])?;
        Ok(self.reseed()?)
    }

    fn reseed(&mut self) -> Result<(), TableError> {
        let mut seed = [0; size_of::<u64>()];
        rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::INSECURE)
            .map_err(|error| TableError::Seed(error.into()))?;
        self.maps.apply(&[Op::SetSeed(u64::from_ne_bytes(seed))])
    }

    /// Records that the source is about to be read.
    pub(super) fn opened(&mut self) {
        self.timeline.end(Phase::Open);
    }

    /// Serves frontends of the bootstrap that the kernel does not have yet, until the first complete sync.
    pub(super) fn bootstrap(&mut self, bootstrap: &Store) -> Result<(), AgentError> {
        let ops = self.table.bootstrap(bootstrap);
        self.maps.apply(&ops)?;
        tracing::info!(
            "serving {} frontends of --bootstrap until the first complete sync",
            self.table.frontend_count()
        );
        Ok(())
    }

    /// Background task that closes sockets to retired backends.
    pub(super) fn terminator(&self) -> SocketTerminator {
        SocketTerminator { pins: self.pins.clone(), handover: self.handover.clone(), gauges: self.gauges.clone() }
    }

    /// Gauges of the agent: sockets, current problems of objects, and the age of the table.
    fn gauges(&self) -> Vec<(&'static str, u64)> {
        let mut gauges = Vec::from(self.gauges.read());
        gauges.push(("object_problems", self.store.problems().count() as u64 + self.table.problems().len() as u64));
        let (used, capacity) = (self.table.used(), self.maps.capacity());
        gauges.extend([
            ("frontends", used.frontends.into()),
            ("frontends_room", capacity.frontends.into()),
            ("backends", used.slots.into()),
            ("backends_room", capacity.slots.into()),
            ("services_without_room", self.table.without_capacity() as u64),
        ]);
        gauges.extend(self.heard.silent_seconds().map(|seconds| ("api_server_silent_seconds", seconds)));
        gauges
    }

    /// Follows events and answers requests for ever.
    pub(super) async fn follow(
        &mut self,
        mut events: mpsc::Receiver<Vec<Event>>,
        mut questions: mpsc::Receiver<Question>,
    ) -> Result<(), AgentError> {
        loop {
            let wake = self.wake();
            tokio::select! {
                batch = events.recv() => {
                    let Some(batch) = batch else { return self.source_ended(questions).await };
                    self.take(batch);
                    gather(&mut events, |batch| self.take(batch)).await;
                    self.write()?;
                }
                Some(question) = questions.recv() => self.answer(question),
                () = until(wake) => self.write()?,
            }
        }
    }

    /// Leaves the table as it is without a source, and still answers commands.
    async fn source_ended(&mut self, mut questions: mpsc::Receiver<Question>) -> Result<(), AgentError> {
        tracing::error!("the source of events has ended; the table stays as it is");
        while let Some(question) = questions.recv().await {
            self.answer(question);
        }
        Err(AgentError::SourceEnded("nothing more to do".to_owned()))
    }

    fn answer(&mut self, question: Question) {
        // The client may have gone.
        match question {
            Question::Services(sender) => {
                drop(sender.send(report::names_json(self.table.each_name())));
            }
            Question::Gauges(sender) => drop(sender.send(self.gauges())),
            Question::Reseed(sender) => drop(sender.send(self.reseed().map_err(|error| error.to_string()))),
        }
    }

    fn take(&mut self, batch: Vec<Event>) {
        for event in batch {
            self.has_list |= matches!(event, Event::ListDone(_));
            for problem in self.store.apply(event) {
                tracing::warn!("{problem}");
            }
        }
    }

    /// Writes the store's changes to the kernel once the store is complete.
    fn write(&mut self) -> Result<(), AgentError> {
        let now = Instant::now();
        if self.grows_again_at.is_some_and(|at| at <= now) {
            (self.limits, self.grows_again_at) = (KernelMaps::LIMITS, None);
            self.state = State::InDoubt { retry_at: now };
        }
        let is_waiting = matches!(self.state, State::InDoubt { retry_at } if now < retry_at);
        if !self.store.is_complete() || is_waiting {
            return Ok(());
        }
        match self.write_now().and_then(|()| self.compact(now)) {
            Ok(()) => self.written(),
            Err(error @ TableError::NoMemory { .. }) => {
                tracing::error!(
                    "{error}; what does not fit is not served, or keeps its last backends; tried again in {NO_MEMORY_PAUSE:?}"
                );
                let Capacity { frontends, sets, slots } = self.maps.capacity();
                // The maps cannot grow, so a reserve would take room that is in use.
                let (sets, reserved) = (sets.saturating_sub(1), Reserve::default());
                self.limits = Limits { frontends, sets, slots, reserved, may_replace: false, ..self.limits };
                self.grows_again_at = Some(now + NO_MEMORY_PAUSE);
                self.state = State::InDoubt { retry_at: now };
                Ok(())
            }
            Err(error) => {
                tracing::error!("{error}; the table is read back and written anew in {RETRY:?}");
                self.state = State::InDoubt { retry_at: now + RETRY };
                Ok(())
            }
        }
    }

    /// Frees the memory of maps that have been mostly empty for a while.
    fn compact(&mut self, now: Instant) -> Result<(), TableError> {
        match self.compacts_at {
            Some(at) if at > now => {}
            Some(_) => {
                self.compacts_at = None;
                self.maps.apply(&self.table.compact())?;
            }
            None => self.compacts_at = self.table.is_sparse().then(|| now + SPARSE_MAX),
        }
        Ok(())
    }

    /// Time of the next action without an event.
    fn wake(&self) -> Option<Instant> {
        let retry_at = match self.state {
            State::InDoubt { retry_at } => Some(retry_at),
            State::FirstSync | State::Following => None,
        };
        [retry_at, self.grows_again_at, self.compacts_at].into_iter().flatten().min()
    }

    fn write_now(&mut self) -> Result<(), TableError> {
        let dirty = self.store.take_dirty();
        if let State::InDoubt { .. } = self.state {
            self.table = TablePlanner::new(self.limits, KernelReader::read_table(&self.pins)?);
            self.reported_revision = None;
        }
        self.timeline.end(Phase::List);
        match self.state {
            State::Following => {
                let ops = self.table.update(&self.store, dirty);
                tracing::debug!("writing {} operations", ops.len());
                self.maps.apply(&ops)?;
            }
            State::FirstSync | State::InDoubt { .. } => self.sync()?,
        }
        self.timeline.end(Phase::Write);
        if self.state != State::Following {
            // An earlier agent may have ended before it raised the epoch.
            self.maps.apply(&[Op::RaiseEpoch])?;
        }
        Ok(())
    }

    /// Writes the whole table. After an error nothing more is written, and the table is read back.
    fn sync(&mut self) -> Result<(), TableError> {
        let (maps, mut outcome) = (&mut self.maps, Ok(()));
        self.table.sync_by(&self.store, &mut |ops| {
            if outcome.is_ok() {
                outcome = maps.apply(&ops);
            }
        });
        outcome
    }

    fn written(&mut self) -> Result<(), AgentError> {
        let retired = self.table.take_retired();
        // Nothing is known of the backends before the table was read back.
        let is_unknown = match self.state {
            State::FirstSync => self.has_predecessor,
            State::Following => false,
            State::InDoubt { .. } => true,
        };
        self.handover.add(if is_unknown { Retired::any() } else { retired });
        self.state = State::Following;
        self.report();
        if !self.is_ready {
            self.is_ready = true;
            self.run_dir.set_ready()?;
            notify::ready();
            self.timeline.log_ready(self.store.service_names().len(), self.table.frontend_count());
        }
        if std::mem::take(&mut self.has_list) {
            memory::give_back();
        }
        Ok(())
    }

    /// Logs the table's problems that are new.
    fn report(&mut self) {
        let revision = self.table.problems_revision();
        if self.reported_revision.replace(revision) == Some(revision) {
            return;
        }
        let problems = BTreeSet::from_iter(self.table.problems());
        for problem in problems.iter().filter(|problem| !self.reported.contains(problem)) {
            tracing::warn!("{problem}");
        }
        self.reported = problems;
    }
}

/// Gathers the events that arrive within a few milliseconds of the one before, up to a bound from the first.
async fn gather(events: &mut mpsc::Receiver<Vec<Event>>, mut take: impl FnMut(Vec<Event>)) {
    let deadline = Instant::now() + DELAY_MAX;
    while let Ok(Some(batch)) = timeout_at((Instant::now() + QUIET).min(deadline), events.recv()).await {
        take(batch);
    }
}

async fn until(wake: Option<Instant>) {
    match wake {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Time that events are gathered, and their number, when `count` events arrive with this `pause`.
    fn gathered(pause: Duration, count: usize) -> (Duration, usize) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let (sender, mut events) = mpsc::channel(1);
            let source = tokio::spawn(async move {
                for _ in 0..count {
                    tokio::time::sleep(pause).await;
                    sender.send(Vec::new()).await.ok();
                }
                std::future::pending::<()>().await;
            });
            let (start, mut seen) = (Instant::now(), 0);
            gather(&mut events, |_| seen += 1).await;
            source.abort();
            (start.elapsed(), seen)
        })
    }

    #[test]
    fn no_event_waits_longer_than_the_bound_for_others() {
        assert_eq!(gathered(Duration::from_millis(1), 1000).0, DELAY_MAX, "a storm is cut off");
        assert_eq!(
            gathered(Duration::from_millis(1), 3),
            (Duration::from_millis(3) + QUIET, 3),
            "a burst is one write"
        );
        assert_eq!(gathered(Duration::from_secs(1), 1), (QUIET, 0), "a single event waits for nobody");
    }
}
