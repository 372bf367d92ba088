//! Loop of the one task that owns the table: events in, map writes out. It answers queries and carries out commands in
//! between.

use std::{ops::ControlFlow, sync::Arc, time::Duration};

use cproxy_core::{Address, AddressRange, Event, Store};
use cproxy_daemon::{Tasks, memory};
use cproxy_datapath::{
    bpf::{PinLock, TableError},
    sockets::TerminateSockets,
};
use tokio::{
    sync::mpsc,
    time::{Instant, timeout_at},
};

use super::{
    canary::Canary,
    error::AgentError,
    first_lists::FirstLists,
    last_changes::LastChanges,
    list_doubts::ListDoubts,
    policy::{PolicyHandle, PolicyOrder, PolicyState},
    problem_times::ProblemTimes,
    queries::Queries,
    readiness::Readiness,
    receive::ReceiveHandle,
    source::SourceStatus,
    table::{Table, Written},
    tasks::{
        health::ProgramHealth,
        stale_sockets::{RetiredQueue, SocketGauges},
        tcp_places::TcpPlaceWatch,
    },
    timeline::Phase,
};
use crate::{
    canary::{ADDRESSES, CanaryAddresses},
    config::LoopSettings,
    mailbox::{Command, Message},
    problem_log::ProblemLog,
    state::{Measures, RestoreSign, ResumeReason},
};

/// Longest pause between events that are applied together.
const QUIET: Duration = Duration::from_millis(2);
/// No event waits longer than this for others.
const DELAY_MAX: Duration = Duration::from_millis(10);

/// Task that brings the kernel's table to what the source wants.
pub(super) struct Reconciler {
    table: Table,
    doubts: ListDoubts,
    source: SourceStatus,
    readiness: Readiness,
    shared: Shared,
    last_changes: LastChanges,
    /// Whether a list has ended since the last write: the memory that it took can then be released.
    has_applied_list: bool,
    problem_log: ProblemLog,
    source_problem_log: ProblemLog,
    problem_times: ProblemTimes,
    /// Revision of the planner's problems in `problem_log`.
    logged_revision: Option<(u64, u64)>,
    /// Measures for `status_http`, if it serves.
    measures: Option<Box<Measures>>,
    /// State of the pod's policy, if it is enforced.
    policy: Option<PolicyHandle>,
    /// Way to the task that receives for load balancers, if it runs.
    receive: Option<ReceiveHandle>,
    tasks: Tasks,
}

/// Parts that background tasks share with this one.
pub(super) struct Shared {
    /// Retired backends, to which sockets may still be connected.
    pub(super) retired_queue: Arc<RetiredQueue>,
    pub(super) socket_gauges: Arc<SocketGauges>,
    pub(super) place_watch: Arc<TcpPlaceWatch>,
    pub(super) health: Arc<ProgramHealth>,
}

impl Shared {
    pub(super) fn new(terminate_sockets: TerminateSockets, health: Arc<ProgramHealth>) -> Self {
        let retired_queue = Arc::new(RetiredQueue::new(terminate_sockets));
        Self { retired_queue, socket_gauges: Arc::default(), place_watch: Arc::default(), health }
    }
}

impl Reconciler {
    /// Takes over the table in the kernel.
    pub(super) fn open(
        lock: &PinLock,
        (store, canary): (Store, Canary),
        source: SourceStatus,
        readiness: Readiness,
        shared: Shared,
        tasks: Tasks,
    ) -> Result<Self, TableError> {
        let table = Table::open(lock, store, canary)?;
        let mut serving = table.serving_addresses();
        for address in default_canary() {
            serving.remove(&address);
        }
        let first_lists = source.server().is_some().then(|| FirstLists::new(serving));
        Ok(Self {
            table,
            doubts: ListDoubts::new(first_lists),
            source,
            readiness,
            shared,
            last_changes: LastChanges::default(),
            has_applied_list: false,
            problem_log: ProblemLog::default(),
            source_problem_log: ProblemLog::default(),
            problem_times: ProblemTimes::default(),
            logged_revision: None,
            measures: None,
            policy: None,
            receive: None,
            tasks,
        })
    }

    /// Waits with the announcement for the pod's policy.
    pub(super) fn follow_policy(&mut self, policy: PolicyHandle) -> Result<(), AgentError> {
        self.readiness.set_policy(policy.state.borrow().clone())?;
        self.policy = Some(policy);
        Ok(())
    }

    /// Tells what the pod is to receive, in ranges of addresses.
    pub(super) fn follow_receive(&mut self, receive: ReceiveHandle, ranges: Vec<AddressRange>) {
        self.table.receive(ranges);
        self.receive = Some(receive);
    }

    /// Takes a new state of the pod's policy, for which the announcement may have waited.
    fn take_policy(&mut self, state: PolicyState) -> Result<(), AgentError> {
        self.readiness.set_policy(state)?;
        self.require_policy_source()?;
        if self.readiness.is_withdrawn() {
            let Table { store, planner, .. } = &self.table;
            let count = || (store.service_names().len(), planner.frontend_count());
            self.readiness.publish(count, store.is_compared())?;
        }
        Ok(())
    }

    /// Applies settings, before anything else and whenever they change.
    pub(super) fn configure(&mut self, settings: &LoopSettings) -> Result<(), TableError> {
        self.table.configure(settings)?;
        self.shared.retired_queue.set_mode(settings.terminate_sockets);
        Ok(())
    }

    /// Writes the VM's addresses, to which datagram sockets are connected that are to be refused.
    pub(super) fn set_own_addresses(&mut self, addresses: Vec<Address>) -> Result<(), TableError> {
        if let Some(policy) = &self.policy {
            policy.order(PolicyOrder::SetOwn(addresses.clone()));
        }
        if let Some(receive) = &self.receive {
            receive.set_own(&addresses);
        }
        self.table.set_own_addresses(addresses)
    }

    /// Writes a new seed.
    pub(super) fn reseed(&mut self) -> Result<(), TableError> {
        self.table.reseed()
    }

    /// Goes on in a VM that was restored from a snapshot: with a new seed and a new connection. The table stays in
    /// force. If the restore is certain, the agent is not ready until the objects have been compared with the source.
    fn resume(&mut self, reason: ResumeReason) -> Result<(), TableError> {
        if let Some(measures) = &mut self.measures {
            measures.resume(reason);
        }
        let is_certain = matches!(reason, ResumeReason::Reseed | ResumeReason::Sign(RestoreSign::NewGeneration));
        let result = self.reseed();
        if self.source.renew() && is_certain {
            self.readiness.withdraw();
            self.table.store.await_comparison(self.source.last_contact.compare());
        }
        result
    }

    /// Goes on with these measures, for `status_http`.
    pub(super) fn measure(&mut self, measures: Option<Box<Measures>>) {
        self.measures = measures;
    }

    /// Parts for the background tasks.
    pub(super) fn shared(&self) -> &Shared {
        &self.shared
    }

    /// Ends a phase of the start.
    pub(super) fn end_phase(&mut self, phase: Phase) {
        self.readiness.end_phase(phase);
    }

    /// Serves frontends of the bootstrap that the kernel does not have yet, until the first complete sync.
    pub(super) fn bootstrap(&mut self, bootstrap: &Store) -> Result<(), TableError> {
        self.table.bootstrap(bootstrap)?;
        let count = self.table.planner.frontend_count();
        tracing::info!("serving {count} frontends of --bootstrap until the first complete sync");
        Ok(())
    }

    /// Applies events, `early` ones first, and receives messages for ever.
    pub(super) async fn run(
        &mut self,
        early: Vec<Event>,
        events: &mut mpsc::Receiver<Vec<Event>>,
        messages: &mut mpsc::Receiver<Message>,
    ) -> Result<(), AgentError> {
        self.follow(early, events).await?;
        loop {
            self.shared.place_watch.check(self.table.tcp_places().0);
            let wakeup = self.next_wakeup();
            tokio::select! {
                batch = events.recv() => {
                    let Some(batch) = batch else { return self.serve_without_source(messages).await };
                    self.follow(batch, events).await?;
                }
                Some(message) = messages.recv() => self.receive_message(message)?,
                state = changed(&mut self.policy) => self.take_policy(state)?,
                () = sleep_until(wakeup) => self.reconcile()?,
            }
        }
    }

    /// Applies events and those that follow soon.
    async fn follow(&mut self, batch: Vec<Event>, events: &mut mpsc::Receiver<Vec<Event>>) -> Result<(), AgentError> {
        self.receive(batch);
        self.gather(events).await;
        self.reconcile()
    }

    /// Receives the events that follow soon, but for a first table that is complete: nothing it waits for is missing.
    async fn gather(&mut self, events: &mut mpsc::Receiver<Vec<Event>>) {
        if self.table.is_first_complete() {
            return;
        }
        let receive = |batch| {
            self.receive(batch);
            if self.table.is_first_complete() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        gather(events, receive).await;
    }

    /// Receives messages and leaves the table as it is, after the end of the source.
    async fn serve_without_source(&mut self, messages: &mut mpsc::Receiver<Message>) -> Result<(), AgentError> {
        tracing::error!(name: "source_ended", "the source of events has ended; the table stays as it is");
        while let Some(message) = messages.recv().await {
            self.receive_message(message)?;
        }
        Err(AgentError::SourceEnded)
    }

    fn receive_message(&mut self, message: Message) -> Result<(), AgentError> {
        match message {
            Message::Query(query) => self.queries().answer(query),
            Message::Command(command) => self.carry_out(command)?,
        }
        Ok(())
    }

    fn queries(&self) -> Queries<'_> {
        Queries {
            table: &self.table,
            doubts: &self.doubts,
            source: &self.source,
            readiness: &self.readiness,
            policy: self.policy.as_ref(),
            receive: self.receive.as_ref(),
            last_changes: &self.last_changes,
            problem_times: &self.problem_times,
            measures: self.measures.as_deref(),
            sockets: &self.shared.socket_gauges,
            places: &self.shared.place_watch,
            health: &self.shared.health,
            tasks: &self.tasks,
        }
    }

    /// Carries out a command. A failed send means that its sender has gone.
    fn carry_out(&mut self, command: Command) -> Result<(), AgentError> {
        let text = |error: TableError| error.to_string();
        match command {
            Command::Reseed { holds, sender } => {
                let resumed = self.resume(ResumeReason::Reseed).map_err(text);
                if resumed.is_ok() {
                    tracing::info!(name: "restored", "cproxy reseed: choosing from a new seed");
                }
                match (resumed, &self.policy) {
                    // The pod is closed by the time that the command ends.
                    (Ok(()), Some(policy)) => {
                        let order =
                            if holds { PolicyOrder::Hold(sender) } else { PolicyOrder::CloseAnew(Some(sender)) };
                        policy.order(order);
                    }
                    (result, _) => drop(sender.send(result)),
                }
            }
            Command::Resume(sign) => {
                tracing::info!(name: "restored", "{sign}: choosing from a new seed, and connecting anew");
                match (&self.policy, sign) {
                    (Some(policy), RestoreSign::NewGeneration) => policy.order(PolicyOrder::CloseAnew(None)),
                    (Some(policy), RestoreSign::ClockStep) => policy.order(PolicyOrder::EndHold),
                    _ => {}
                }
                if let Err(error) = self.resume(ResumeReason::Sign(sign)) {
                    tracing::error!("{error}");
                }
            }
            Command::Configure(settings, sender) => drop(sender.send(self.configure(&settings).map_err(text))),
            Command::SetOwnAddresses(addresses) => {
                if let Err(error) = self.set_own_addresses(addresses) {
                    tracing::error!("{error}");
                }
            }
            Command::FreeTcpPlaces(places, sender) => {
                drop(sender.send(self.table.free_tcp_places(places).map_err(text)));
            }
            // The loop looks at them in any case.
            Command::LookAtTcpPlaces => {}
            Command::ResizeTcpPlaces(demand, sender) => {
                drop(sender.send(self.table.resize_tcp_places(demand).map_err(text)));
            }
            Command::RestorePins(sender) => {
                self.readiness.restore();
                drop(sender.send(self.table.restore_pins().map_err(text)));
            }
            Command::MoveCanary => {
                self.table.move_canary();
                self.reconcile()?;
            }
            Command::Rewrite(sender) => {
                if self.table.rewrite() {
                    self.reconcile()?;
                }
                sender.send(()).ok();
            }
        }
        Ok(())
    }

    /// Applies events of the source.
    fn receive(&mut self, batch: Vec<Event>) {
        if let Some(measures) = &mut self.measures {
            measures.queue(&batch);
        }
        for event in batch {
            self.has_applied_list |= matches!(event, Event::ListDone(_));
            if let Event::ListFrom(kind, list) = &event {
                self.doubts.record_list(*kind, list);
            }
            let is_of_source = matches!(event, Event::SourceProblems { .. });
            let mut new = self.table.store.apply(event);
            for problem in &new {
                tracing::warn!(name: "problem", "{problem}");
            }
            if is_of_source {
                // The source has logged them.
                new = self.source_problem_log.update(self.table.store.source_problems().cloned());
            }
            self.problem_times.record(&new, &self.table);
        }
        self.doubts.follow_reports(self.table.store.take_list_reports(), &self.source);
    }

    /// Writes what is due to the kernel, once the store is complete.
    fn reconcile(&mut self) -> Result<(), AgentError> {
        let now = Instant::now();
        let is_due = self.table.is_due(now);
        self.doubts.ask_again(&self.table.store, &self.source, now);
        if !is_due || !self.doubts.believes_first_lists(&self.table.store, &self.source, now) {
            return Ok(());
        }
        self.readiness.end_phase(Phase::List);
        let written = self.table.write(now);
        if let Some(measures) = &mut self.measures {
            match &written {
                Ok(written) => measures.end_sync(now.elapsed(), written.is_whole),
                Err(_) => measures.write_failures += 1,
            }
        }
        // The table has logged an error, and decided when it is written again.
        written.map_or(Ok(()), |written| self.finish_write(written))
    }

    /// Time of the next action without an event.
    fn next_wakeup(&self) -> Option<Instant> {
        let second_lists_at = self.doubts.next_wakeup();
        if self.doubts.holds_first_lists() {
            return second_lists_at;
        }
        [self.table.next_wakeup(), second_lists_at].into_iter().flatten().min()
    }

    /// Completes a write: queues retired backends for the task that closes their sockets, logs problems and announces
    /// that the agent is ready.
    fn finish_write(&mut self, written: Written) -> Result<(), AgentError> {
        let Written { retired, changes, received, is_first, is_whole } = written;
        if let (Some(receive), Some(received)) = (&self.receive, received) {
            receive.want(received);
        }
        self.readiness.end_phase(Phase::Write);
        self.last_changes.record(Instant::now(), changes);
        self.shared.retired_queue.add(retired);
        if self.policy.is_some() {
            // A Service may have got a backend that the policy allows.
            self.shared.retired_queue.add_refused();
        }
        if is_whole {
            // The planner may be another one.
            self.logged_revision = None;
        }
        self.log_problems();
        let Table { store, planner, .. } = &self.table;
        let count = || (store.service_names().len(), planner.frontend_count());
        let ready = self.readiness.publish(count, store.is_compared())?;
        self.table.follow(ready);
        self.require_policy_source()?;
        if is_first {
            self.shared.health.change();
        }
        if std::mem::take(&mut self.has_applied_list) {
            memory::release_free_pages();
        }
        Ok(())
    }

    /// Ends the start with a source that has served all lists but those of policies, as an API server does.
    fn require_policy_source(&self) -> Result<(), AgentError> {
        match &self.policy {
            Some(policy) if self.readiness.is_held_by_policy() => Ok(policy.require_source()?),
            _ => Ok(()),
        }
    }

    /// Logs the planner's problems that are new.
    fn log_problems(&mut self) {
        let revision = self.table.problems_revision();
        if self.logged_revision.replace(revision) != Some(revision) {
            let new = self.problem_log.update(self.table.plan_problems());
            for problem in &new {
                tracing::warn!(name: "problem", "{problem}");
            }
            self.problem_times.record(&new, &self.table);
        }
    }
}

/// Addresses that the canary of an earlier agent had, unless others were set.
fn default_canary() -> Vec<Address> {
    ADDRESSES.parse::<CanaryAddresses>().map(|addresses| addresses.iter().collect()).unwrap_or_default()
}

/// Gathers the events that arrive within a few milliseconds of the one before, up to a bound from the first, until
/// `apply` breaks.
async fn gather(events: &mut mpsc::Receiver<Vec<Event>>, mut apply: impl FnMut(Vec<Event>) -> ControlFlow<()>) {
    let deadline = Instant::now() + DELAY_MAX;
    while let Ok(Some(batch)) = timeout_at((Instant::now() + QUIET).min(deadline), events.recv()).await {
        if apply(batch).is_break() {
            return;
        }
    }
}

/// Waits for a new state of the policy.
async fn changed(policy: &mut Option<PolicyHandle>) -> PolicyState {
    if let Some(policy) = policy
        && policy.state.changed().await.is_ok()
    {
        return policy.state.borrow_and_update().clone();
    }
    std::future::pending().await
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
        gathered_until(pause, count, usize::MAX)
    }

    /// As [`gathered`], until `last` events have been applied.
    fn gathered_until(pause: Duration, count: usize, last: usize) -> (Duration, usize) {
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
            let see = |_| {
                seen += 1;
                if seen < last { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            };
            gather(&mut events, see).await;
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

    #[test]
    fn events_after_the_one_that_completes_the_first_table_are_not_waited_for() {
        let pause = Duration::from_millis(1);
        assert_eq!(gathered_until(pause, 3, 2), (pause * 2, 2));
    }
}
