//! Owner of store, planner and maps, and the only writer of maps: events in, map writes out.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use cproxy_core::{
    Address, Capacity, Event, Exclusions, Frontend, KernelTable, Limits, ListReport, ListVerdict, Loss, Op, Reserve,
    Retired, SECOND_LIST_AFTER, Store, TablePlanner,
};
use cproxy_daemon::{log_lines_left_out, memory};
use cproxy_datapath::{
    bpf::{KernelMaps, KernelReader, PinDir, PinLock, TableError},
    canary::Route,
    sockets::TerminateSockets,
};
use tokio::{
    sync::mpsc,
    time::{Instant, timeout_at},
};

use super::{
    canary::Canary,
    doubt::{FirstLists, Judgement},
    error::AgentError,
    explain::{ServerQuery, View},
    health::HealthWatch,
    last_changes::LastChanges,
    readiness::{Readiness, Ready},
    seed::new_seed,
    source::SourceStatus,
    stale_sockets::{RetiredQueue, SocketGauges, SocketTerminator},
    tcp_places::{PlaceSweeper, PlaceWatch},
    timeline::Phase,
};
use crate::{
    canary::{ADDRESSES, CanaryAddresses, service_name},
    config::TableSettings,
    mailbox::{Command, Mailbox, Message, Query},
    problem_log::ProblemLog,
    report,
    state::{CanaryState, Measures, Restored, ResumeReason, ServiceCalls, Status, Untried},
};

/// Longest pause between events that are applied together.
const QUIET: Duration = Duration::from_millis(2);
/// No event waits longer than this for others.
const DELAY_MAX: Duration = Duration::from_millis(10);
/// Least time between attempts to read back and rewrite the table after a failed write.
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// Time after which maps that are mostly empty are replaced by smaller ones.
const SPARSE_PAUSE: Duration = Duration::from_secs(10);
/// Pause before the next attempt to grow a map, after memory ran out.
const NO_MEMORY_PAUSE: Duration = Duration::from_secs(30);

/// Pause before second lists are asked for once more.
const ASK_AGAIN_PAUSE: Duration = Duration::from_secs(30);

/// Lists that settle a doubt, in words.
const SECOND_LIST: &str = "a list of another server, or of this one after 10 s, agrees";

/// Kind of the next write.
#[derive(Clone, Copy, Debug)]
enum SyncState {
    /// Whole table, once the store is complete for the first time.
    FirstSync,
    /// Services that have changed, once the agent is ready.
    Incremental(Ready),
    /// Whole table, after reading back the kernel's content: a write has failed, or growth is allowed again after
    /// memory ran out.
    Resync { at: Instant },
}

/// Task that brings the kernel's table to what the source wants.
pub(super) struct Reconciler {
    store: Store,
    planner: TablePlanner,
    pins: PinDir,
    maps: KernelMaps,
    state: SyncState,
    /// Limits of the maps. After memory ran out they allow no growth until `grows_again_at`.
    limits: Limits,
    grows_again_at: Option<Instant>,
    /// Time at which maps that are mostly empty are replaced.
    compacts_at: Option<Instant>,
    readiness: Readiness,
    /// Whether a list has ended since the last write: the memory that it took can then be released.
    has_applied_list: bool,
    /// Judge of the first lists, until they are written.
    first_lists: Option<FirstLists>,
    /// Number of times that lists were not believed.
    lists_doubted: u64,
    /// Time at which second lists are asked for, and the server that was not believed.
    second_lists: Option<(Instant, Arc<str>)>,
    problem_log: ProblemLog,
    /// Revision of the planner's problems in `problem_log`.
    logged_revision: Option<u64>,
    /// Retired backends, to which sockets may still be connected.
    retired_queue: Arc<RetiredQueue>,
    /// Whether sockets may be connected through the table of an earlier agent.
    has_predecessor: bool,
    socket_gauges: Arc<SocketGauges>,
    place_watch: Arc<PlaceWatch>,
    source: SourceStatus,
    own: Own,
    /// Exclusions in force.
    exclusions: Exclusions,
    last_changes: LastChanges,
    /// Measures for `status_http`, if it serves.
    measures: Option<Box<Measures>>,
}

/// The agent's means to test its own programs.
pub(super) struct Own {
    pub(super) canary: Canary,
    pub(super) health_watch: Arc<HealthWatch>,
}

impl Reconciler {
    /// Takes over the table in the kernel.
    pub(super) fn open(
        lock: &PinLock,
        store: Store,
        readiness: Readiness,
        source: SourceStatus,
        mode: TerminateSockets,
        own: Own,
    ) -> Result<Self, AgentError> {
        let pins = lock.pins().clone();
        let kernel = KernelTable { is_new: lock.is_empty(), ..KernelReader::read_table(&pins)? };
        let maps = KernelMaps::open(lock)?;
        let mut planner = TablePlanner::new(KernelMaps::LIMITS, kernel);
        planner.set_internal(own.canary.store());
        let mut serving = planner.serving_addresses();
        let canaries =
            default_canary().into_iter().chain(own.canary.routes().into_iter().map(|route| frontend(&route).address));
        for address in canaries {
            serving.remove(&address);
        }
        let first_lists = source.server().is_some().then(|| FirstLists::new(serving));
        Ok(Self {
            store,
            planner,
            pins,
            maps,
            state: SyncState::FirstSync,
            limits: KernelMaps::LIMITS,
            grows_again_at: None,
            compacts_at: None,
            readiness,
            has_applied_list: false,
            first_lists,
            lists_doubted: 0,
            second_lists: None,
            problem_log: ProblemLog::default(),
            logged_revision: None,
            retired_queue: Arc::new(RetiredQueue::new(mode)),
            has_predecessor: !lock.is_empty(),
            socket_gauges: Arc::default(),
            place_watch: Arc::default(),
            source,
            own,
            exclusions: Exclusions::default(),
            last_changes: LastChanges::default(),
            measures: None,
        })
    }

    /// Applies settings, before anything else and whenever they change.
    pub(super) fn configure(&mut self, settings: TableSettings) -> Result<(), TableError> {
        let TableSettings { exclusions, balance, terminate_sockets } = settings;
        self.maps.apply(&[Op::SetExclusions(exclusions.clone()), Op::SetBalance(balance)])?;
        self.exclusions = exclusions;
        self.retired_queue.set_mode(terminate_sockets);
        Ok(())
    }

    /// Writes the VM's addresses, to which datagram sockets are connected that are to be refused.
    pub(super) fn set_own_addresses(&mut self, addresses: Vec<Address>) -> Result<(), TableError> {
        self.maps.apply(&[Op::SetOwnAddresses(addresses)])
    }

    /// Writes a new seed.
    pub(super) fn reseed(&mut self) -> Result<(), TableError> {
        let seed = new_seed().map_err(|error| TableError::Seed(error.into()))?;
        self.maps.apply(&[Op::SetSeed(seed)])
    }

    /// Goes on in a VM that was restored from a snapshot: with a new seed and a new connection. The table stays in
    /// force. If the restore is certain, the agent is not ready until the objects have been compared with the source.
    fn resume(&mut self, reason: ResumeReason) -> Result<(), TableError> {
        if let Some(measures) = &mut self.measures {
            measures.resume(reason);
        }
        let is_certain = matches!(reason, ResumeReason::Reseed | ResumeReason::Sign(Restored::NewGeneration));
        let result = self.reseed();
        if self.source.renew() && is_certain {
            self.readiness.withdraw();
            self.store.await_comparison(self.source.last_contact.compare());
        }
        result
    }

    /// Measures from now on, for `status_http`.
    pub(super) fn measure(&mut self) {
        self.measures = Some(Box::default());
    }

    /// Ends a phase of the start.
    pub(super) fn end_phase(&mut self, phase: Phase) {
        self.readiness.end_phase(phase);
    }

    /// Serves frontends of the bootstrap that the kernel does not have yet, until the first complete sync.
    pub(super) fn bootstrap(&mut self, bootstrap: &Store) -> Result<(), AgentError> {
        let ops = self.planner.bootstrap(bootstrap);
        self.maps.apply(&ops)?;
        tracing::info!(
            "serving {} frontends of --bootstrap until the first complete sync",
            self.planner.frontend_count()
        );
        Ok(())
    }

    /// Background task that closes sockets to retired backends.
    pub(super) fn socket_terminator(&self) -> SocketTerminator {
        SocketTerminator {
            pins: self.pins.clone(),
            retired_queue: self.retired_queue.clone(),
            gauges: self.socket_gauges.clone(),
        }
    }

    /// Background task that has places of TCP sockets that have gone freed, by this mailbox.
    pub(super) fn place_sweeper(&self, mailbox: Mailbox) -> PlaceSweeper {
        PlaceSweeper { pins: self.pins.clone(), watch: self.place_watch.clone(), mailbox }
    }

    /// Gauges of the agent: sockets, current problems of objects, and the age of the table.
    fn gauges(&self) -> Vec<(&'static str, u64)> {
        let mut gauges = Vec::from(self.socket_gauges.read());
        gauges.push(("tcp_places_freed", self.maps.tcp_places_freed()));
        gauges.extend(self.place_watch.gauges());
        gauges.extend(self.own.health_watch.gauges());
        gauges.push(("object_problems", self.store.problems().count() as u64 + self.planner.problems().len() as u64));
        let (used, capacity) = (self.planner.used(), self.maps.capacity());
        gauges.extend([
            ("frontends", used.frontends.into()),
            ("frontends_room", capacity.frontends.into()),
            ("backends", used.slots.into()),
            ("backends_room", capacity.slots.into()),
            ("services_without_room", self.planner.without_capacity() as u64),
            ("lists_doubted", self.lists_doubted),
            ("lists_in_doubt", self.is_in_doubt().into()),
            ("log_lines_left_out", log_lines_left_out()),
        ]);
        gauges.extend(self.source.last_contact.silent_seconds().map(|seconds| ("api_server_silent_seconds", seconds)));
        gauges
    }

    /// State for `status_http`.
    fn status(&self) -> Status {
        let lists =
            self.store.pending_lists().map(|kind| format!("there is no complete list of {}s yet", kind.singular()));
        let write = match self.state {
            SyncState::FirstSync if self.is_in_doubt() => {
                Some("the lists would take most of the last agent's table away: second ones have to agree")
            }
            SyncState::FirstSync => Some("the table is not written yet"),
            SyncState::Resync { .. } => Some("the table could not be written, and is written again soon"),
            SyncState::Incremental(_) if self.readiness.is_withdrawn() => {
                Some("the table has not been compared with the API server since the VM was restored")
            }
            SyncState::Incremental(_) => None,
        };
        let hooks = self.own.health_watch.problems();
        let has_hook_problem = !hooks.is_empty();
        Status {
            gauges: self.gauges(),
            limits: vec![
                ("services", self.store.service_names().len() as u64),
                ("frontends_max", self.limits.frontends.into()),
                ("backends_max", self.limits.slots.into()),
            ],
            measures: self.measures.as_deref().cloned().unwrap_or_default(),
            pending: lists.chain(write.map(str::to_owned)).chain(hooks).collect(),
            has_hook_problem,
            has_node: self.store.has_node(),
        }
    }

    /// Routes of the canary that the kernel's table has.
    fn canary_routes(&self) -> Vec<Route> {
        canary_routes(&self.own.canary, &self.planner)
    }

    /// Applies events and receives messages for ever.
    pub(super) async fn run(
        &mut self,
        mut events: mpsc::Receiver<Vec<Event>>,
        mut messages: mpsc::Receiver<Message>,
    ) -> Result<(), AgentError> {
        loop {
            self.place_watch.check(self.maps.tcp_places());
            let wakeup = self.next_wakeup();
            tokio::select! {
                batch = events.recv() => {
                    let Some(batch) = batch else { return self.serve_without_source(messages).await };
                    self.receive(batch);
                    gather(&mut events, |batch| self.receive(batch)).await;
                    self.reconcile()?;
                }
                Some(message) = messages.recv() => self.receive_message(message)?,
                () = sleep_until(wakeup) => self.reconcile()?,
            }
        }
    }

    /// Receives messages and leaves the table as it is, after the end of the source.
    async fn serve_without_source(&mut self, mut messages: mpsc::Receiver<Message>) -> Result<(), AgentError> {
        tracing::error!(name: "source_ended", "the source of events has ended; the table stays as it is");
        while let Some(message) = messages.recv().await {
            self.receive_message(message)?;
        }
        Err(AgentError::SourceEnded)
    }

    fn receive_message(&mut self, message: Message) -> Result<(), AgentError> {
        match message {
            Message::Query(query) => self.answer(query),
            Message::Command(command) => self.carry_out(command)?,
        }
        Ok(())
    }

    /// Answers a query. A failed send means that the client has gone.
    fn answer(&mut self, query: Query) {
        match query {
            Query::Services(sender) => {
                let names = self.planner.each_name().chain(self.planner.each_internal_name());
                drop(sender.send(report::frontend_names_json(names)));
            }
            Query::Gauges(sender) => drop(sender.send(self.gauges())),
            Query::Status(sender) => drop(sender.send(self.status())),
            Query::ServiceCalls(counters, sender) => {
                drop(sender.send(ServiceCalls::of(counters, self.planner.each_name())));
            }
            Query::Source(sender) => drop(sender.send(self.source.report())),
            Query::Explain(target, sender) => {
                let (store, planner, changes) = (&self.store, &self.planner, &self.last_changes);
                let mut report = View { store, planner, changes, source: &self.source }.report(&target);
                if report.services.is_empty() {
                    let query = ServerQuery::to(&self.source);
                    drop(tokio::spawn(async move {
                        report.unserved = query.unserved(&target).await;
                        sender.send(report).ok();
                    }));
                } else {
                    sender.send(report).ok();
                }
            }
            Query::Health(sender) => self.own.health_watch.demand(sender),
            Query::Canary(sender) => drop(sender.send(self.canary_state())),
        }
    }

    /// Carries out a command.
    fn carry_out(&mut self, command: Command) -> Result<(), AgentError> {
        match command {
            Command::Reseed(sender) => {
                drop(sender.send(self.resume(ResumeReason::Reseed).map_err(|error| error.to_string())));
            }
            Command::Resume(sign) => {
                tracing::info!(name: "restored", "{sign}: choosing from a new seed, and connecting anew");
                if let Err(error) = self.resume(ResumeReason::Sign(sign)) {
                    tracing::error!("{error}");
                }
            }
            Command::Configure(settings, sender) => {
                drop(sender.send(self.configure(settings).map_err(|error| error.to_string())));
            }
            Command::SetOwnAddresses(addresses) => {
                if let Err(error) = self.set_own_addresses(addresses) {
                    tracing::error!("{error}");
                }
            }
            Command::FreeTcpPlaces(places, sender) => {
                let freed = self.maps.apply(&[Op::FreeTcpPlaces(places)]);
                drop(sender.send(freed.map_err(|error| error.to_string())));
            }
            Command::RestorePins(sender) => {
                drop(sender.send(self.maps.restore_pins(&self.pins).map_err(|error| error.to_string())));
            }
            Command::MoveCanary => {
                self.own.canary.choose_ports();
                self.planner.set_internal(self.own.canary.store());
                self.reconcile()?;
            }
            Command::Rewrite(sender) => {
                if let SyncState::Incremental(_) = self.state {
                    self.state = SyncState::Resync { at: Instant::now() };
                    self.reconcile()?;
                }
                sender.send(()).ok();
            }
        }
        Ok(())
    }

    /// State of the canary, as the task that walks it needs it.
    fn canary_state(&self) -> CanaryState {
        let has_table = !matches!(self.state, SyncState::FirstSync);
        CanaryState {
            routes: has_table.then(|| self.canary_routes()),
            untried: untried(&self.own.canary, &self.planner),
            exclusions: self.exclusions.clone(),
        }
    }

    /// Applies events of the source.
    fn receive(&mut self, batch: Vec<Event>) {
        if let Some(measures) = &mut self.measures {
            measures.queue(&batch);
        }
        self.apply(batch);
    }

    fn apply(&mut self, batch: Vec<Event>) {
        for event in batch {
            self.has_applied_list |= matches!(event, Event::ListDone(_));
            if let (Event::ListFrom(kind, source), Some(first)) = (&event, &mut self.first_lists) {
                first.record_list(*kind, source);
            }
            for problem in self.store.apply(event) {
                tracing::warn!(name: "problem", "{problem}");
            }
        }
        self.follow_list_reports();
    }

    /// Writes what is due to the kernel, once the store is complete.
    fn reconcile(&mut self) -> Result<(), AgentError> {
        let now = Instant::now();
        if self.grows_again_at.is_some_and(|at| at <= now) {
            // A full write also places what had no room.
            (self.limits, self.grows_again_at) = (KernelMaps::LIMITS, None);
            self.state = SyncState::Resync { at: now };
        }
        self.ask_again(now);
        let is_waiting = matches!(self.state, SyncState::Resync { at } if now < at);
        if !self.store.is_complete() || is_waiting || !self.believes_first_lists(now) {
            return Ok(());
        }
        let written = self.write_table().and_then(|()| self.compact(now));
        if let (Err(_), Some(measures)) = (&written, &mut self.measures) {
            measures.write_failures += 1;
        }
        match written {
            Ok(()) => {
                if let Some(measures) = &mut self.measures {
                    measures.end_sync(now.elapsed(), !matches!(self.state, SyncState::Incremental(_)));
                }
                self.finish_write()
            }
            Err(error @ TableError::NoMemory { .. }) => {
                tracing::error!(
                    name: "no_memory",
                    "{error}; what does not fit is not served, or keeps its last backends; the maps grow again in \
                     {NO_MEMORY_PAUSE:?} at the earliest"
                );
                let Capacity { frontends, sets, slots } = self.maps.capacity();
                // Limits do not count the set for unknown ports. The maps cannot grow, so a reserve would take room
                // that is in use.
                let (sets, reserved) = (sets.saturating_sub(1), Reserve::default());
                self.limits = Limits { frontends, sets, slots, reserved, may_replace: false, ..self.limits };
                self.grows_again_at = Some(now + NO_MEMORY_PAUSE);
                self.state = SyncState::Resync { at: now };
                Ok(())
            }
            Err(error) => {
                tracing::error!(
                    name: "table_failed",
                    "{error}; the table is read back and written anew in {RETRY_PAUSE:?}"
                );
                self.state = SyncState::Resync { at: now + RETRY_PAUSE };
                Ok(())
            }
        }
    }

    /// Whether the first lists may be written. If they would take most of the predecessor's table away, it stays until
    /// second ones agree.
    fn believes_first_lists(&mut self, now: Instant) -> bool {
        let Some(first) = &mut self.first_lists else { return true };
        let is_believed = match first.judge(|serving| Loss::of(serving, &self.store), now.into_std()) {
            Judgement::Wait => return false,
            Judgement::Doubt(server, Loss { serving, lost }) => {
                tracing::warn!(
                    name: "list_doubted",
                    "the first lists of {server} would leave {lost} of {serving} addresses of the last agent's table \
                     without backends: it stays until {SECOND_LIST}"
                );
                self.doubt(server, true, now);
                return false;
            }
            Judgement::Write => true,
            Judgement::Agreed(server, Loss { serving, lost }) => {
                tracing::warn!(
                    name: "list_agreed",
                    "second lists of {server} agree: {lost} of {serving} addresses lose their backends"
                );
                true
            }
            Judgement::Disagreed(server) => {
                tracing::info!(name: "list_disagreed", "the lists of {server} have most addresses again");
                true
            }
        };
        self.first_lists = None;
        is_believed
    }

    /// Asks for second lists: another server's at once, if it shows the same view, and later from any.
    fn doubt(&mut self, server: Arc<str>, is_same_view: bool, now: Instant) {
        self.lists_doubted += 1;
        if self.second_lists.is_none() && is_same_view {
            self.source.ask_another();
        }
        self.second_lists.get_or_insert((now + SECOND_LIST_AFTER, server));
    }

    /// Logs the store's decisions about lists, and asks for second ones.
    fn follow_list_reports(&mut self) {
        for ListReport { kind, server, missing, known, verdict, is_same_view } in self.store.take_list_reports() {
            let kind = kind.singular();
            match verdict {
                ListVerdict::Doubted => {
                    tracing::warn!(
                        name: "list_doubted",
                        "the list of {server} lacks {missing} of {known} {kind}s: they stay until {SECOND_LIST}"
                    );
                    self.doubt(server, is_same_view, Instant::now());
                }
                ListVerdict::Agreed => tracing::warn!(
                    name: "list_agreed",
                    "a second list, of {server}, agrees: {missing} of {known} {kind}s are gone"
                ),
                ListVerdict::Disagreed => {
                    tracing::info!(name: "list_disagreed", "{server} has most {kind}s again");
                }
            }
        }
    }

    /// Asks for second lists once they count, whatever the server does that was asked first.
    fn ask_again(&mut self, now: Instant) {
        if !self.is_in_doubt() {
            self.second_lists = None;
        }
        // The time stays as a mark that they were asked for.
        if let Some((at, server)) = self.second_lists.as_mut().filter(|(at, _)| *at <= now) {
            self.source.ask_again(server.clone());
            *at = now + ASK_AGAIN_PAUSE;
        }
    }

    /// Whether lists are held back.
    fn is_in_doubt(&self) -> bool {
        self.store.is_in_doubt() || self.first_lists.as_ref().is_some_and(FirstLists::is_in_doubt)
    }

    /// Replaces maps that are mostly empty by smaller ones, after [`SPARSE_PAUSE`]. The planner decides again then, as
    /// they may have filled up meanwhile.
    fn compact(&mut self, now: Instant) -> Result<(), TableError> {
        match self.compacts_at {
            Some(at) if at > now => {}
            Some(_) => {
                self.compacts_at = None;
                self.maps.apply(&self.planner.compact())?;
            }
            None => self.compacts_at = self.planner.is_sparse().then(|| now + SPARSE_PAUSE),
        }
        Ok(())
    }

    /// Time of the next action without an event.
    fn next_wakeup(&self) -> Option<Instant> {
        let second_lists_at = self.second_lists.as_ref().map(|(at, _)| *at);
        if self.first_lists.as_ref().is_some_and(FirstLists::is_in_doubt) {
            return second_lists_at;
        }
        let resync_at = match self.state {
            SyncState::Resync { at } => Some(at),
            SyncState::FirstSync | SyncState::Incremental(_) => None,
        };
        [resync_at, self.grows_again_at, self.compacts_at, second_lists_at].into_iter().flatten().min()
    }

    fn write_table(&mut self) -> Result<(), TableError> {
        let dirty = self.store.take_dirty();
        if let SyncState::Resync { .. } = self.state {
            self.planner = TablePlanner::new(self.limits, KernelReader::read_table(&self.pins)?);
            self.planner.set_internal(self.own.canary.store());
            self.logged_revision = None;
        }
        self.readiness.end_phase(Phase::List);
        // After an error nothing more is written; the next write reads the table back first.
        let (maps, mut outcome) = (&mut self.maps, Ok(()));
        let mut write = |ops: Vec<Op>| {
            tracing::debug!("writing {} operations", ops.len());
            if outcome.is_ok() {
                outcome = maps.apply(&ops);
            }
        };
        match self.state {
            SyncState::Incremental(_) => self.planner.update_by(&self.store, dirty, &mut write),
            SyncState::FirstSync | SyncState::Resync { .. } => self.planner.sync_by(&self.store, &mut write),
        }
        outcome?;
        self.readiness.end_phase(Phase::Write);
        if !matches!(self.state, SyncState::Incremental(_)) {
            // The agent, or an earlier one, may have failed to raise the epoch after its last write.
            self.maps.apply(&[Op::RaiseEpoch])?;
        }
        Ok(())
    }

    /// Completes a write: queues retired backends for the task that closes their sockets, logs problems and announces
    /// that the agent is ready.
    fn finish_write(&mut self) -> Result<(), AgentError> {
        let retired = self.planner.take_retired();
        self.last_changes.record(Instant::now(), self.planner.take_changes());
        // After taking over or reading back a table it is unknown which backends have retired: all sockets are checked.
        let is_unknown = match self.state {
            SyncState::FirstSync => self.has_predecessor,
            SyncState::Incremental(_) => false,
            SyncState::Resync { .. } => true,
        };
        self.retired_queue.add(if is_unknown { Retired::any() } else { retired });
        self.log_problems();
        let is_first = matches!(self.state, SyncState::FirstSync);
        let count = || (self.store.service_names().len(), self.planner.frontend_count());
        self.state = SyncState::Incremental(self.readiness.publish(count, self.store.is_compared())?);
        if is_first {
            self.own.health_watch.change();
        }
        if std::mem::take(&mut self.has_applied_list) {
            memory::release_free_pages();
        }
        Ok(())
    }

    /// Logs the planner's problems that are new.
    fn log_problems(&mut self) {
        let revision = self.planner.problems_revision();
        if self.logged_revision.replace(revision) != Some(revision) {
            for problem in self.problem_log.update(self.planner.problems()) {
                tracing::warn!(name: "problem", "{problem}");
            }
        }
    }
}

/// Addresses that the canary of an earlier agent had, unless others were set.
fn default_canary() -> Vec<Address> {
    ADDRESSES.parse::<CanaryAddresses>().map(|addresses| addresses.iter().collect()).unwrap_or_default()
}

/// Routes of the canary that the kernel's table has.
fn canary_routes(canary: &Canary, planner: &TablePlanner) -> Vec<Route> {
    let name = service_name();
    canary.routes().into_iter().filter(|route| planner.service_of(frontend(route)) == Some(&name)).collect()
}

fn frontend(route: &Route) -> Frontend {
    Frontend { address: route.frontend.ip().into(), port: route.frontend.port(), protocol: route.protocol }
}

/// Addresses of the canary without routes: those of families that the machine does not have, and those that are not in
/// force.
fn untried(canary: &Canary, planner: &TablePlanner) -> Vec<Untried> {
    let absent = canary.absent().iter().map(|address| Untried {
        reason: format!("{}: the loopback device has no such address", address.family()),
        is_absent: true,
    });
    let (name, mut lost) = (service_name(), BTreeMap::new());
    for route in canary.routes() {
        let frontend = frontend(&route);
        let address = frontend.address;
        let why = match planner.service_of(frontend) {
            Some(owner) if *owner == name => continue,
            Some(owner) => format!("{frontend} belongs to Service {owner}; choose another by --canary-address"),
            None => format!("there is no room for {frontend}"),
        };
        lost.entry(address).or_insert(Untried { reason: format!("{}: {why}", address.family()), is_absent: false });
    }
    absent.chain(lost.into_values()).collect()
}

/// Gathers the events that arrive within a few milliseconds of the one before, up to a bound from the first.
async fn gather(events: &mut mpsc::Receiver<Vec<Event>>, mut apply: impl FnMut(Vec<Event>)) {
    let deadline = Instant::now() + DELAY_MAX;
    while let Ok(Some(batch)) = timeout_at((Instant::now() + QUIET).min(deadline), events.recv()).await {
        apply(batch);
    }
}

async fn sleep_until(wakeup: Option<Instant>) {
    match wakeup {
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
        assert_eq!(gathered(Duration::from_secs(1), 1), (QUIET, 0), "a single event waits for no other");
    }
}
