//! Answers to queries: all that the agent tells of itself. They change nothing.

use cproxy_daemon::{Tasks, log_lines_left_out};

use super::{
    last_changes::LastChanges,
    list_doubts::ListDoubts,
    policy::PolicyHandle,
    problem_times::ProblemTimes,
    readiness::Readiness,
    receive::ReceiveHandle,
    service_report::{ExplainContext, ServerQuery},
    source::SourceStatus,
    table::{SyncState, Table},
    tasks::{health::ProgramHealth, stale_sockets::SocketGauges, tcp_places::TcpPlaceWatch},
};
use crate::{
    mailbox::Query,
    report::frontend_names_json,
    state::{Measures, ServiceCalls, Status},
};

/// State that the answers are made from.
pub(super) struct Queries<'a> {
    pub(super) table: &'a Table,
    pub(super) doubts: &'a ListDoubts,
    pub(super) source: &'a SourceStatus,
    pub(super) readiness: &'a Readiness,
    pub(super) policy: Option<&'a PolicyHandle>,
    pub(super) receive: Option<&'a ReceiveHandle>,
    pub(super) last_changes: &'a LastChanges,
    pub(super) problem_times: &'a ProblemTimes,
    pub(super) measures: Option<&'a Measures>,
    pub(super) sockets: &'a SocketGauges,
    pub(super) places: &'a TcpPlaceWatch,
    pub(super) health: &'a ProgramHealth,
    pub(super) tasks: &'a Tasks,
}

impl Queries<'_> {
    /// Answers a query. A failed send means that the client has gone.
    pub(super) fn answer(&self, query: Query) {
        match query {
            Query::Services(sender) => {
                let planner = &self.table.planner;
                let names = planner.each_name().chain(planner.each_internal_name());
                drop(sender.send(frontend_names_json(names)));
            }
            Query::Gauges(sender) => drop(sender.send(self.gauges())),
            Query::Status(sender) => drop(sender.send(self.status())),
            Query::ServiceCalls(counters, sender) => {
                drop(sender.send(ServiceCalls::of(counters, self.table.planner.each_name())));
            }
            Query::Source(sender) => drop(sender.send(self.source.report())),
            Query::Explain(target, sender) => {
                let Table { store, planner, .. } = self.table;
                let problems = self.table.problems();
                let context =
                    ExplainContext { store, planner, problems, changes: self.last_changes, source: self.source };
                let mut report = context.report(&target);
                if report.services.is_empty() && report.unserved.is_none() {
                    let query = ServerQuery::to(self.source);
                    drop(tokio::spawn(async move {
                        report.unserved = query.unserved(&target).await;
                        sender.send(report).ok();
                    }));
                } else {
                    sender.send(report).ok();
                }
            }
            Query::Problems(sender) => drop(sender.send(self.problem_times.rows(self.table))),
            Query::Policy(sender) => match self.policy {
                Some(policy) => policy.report(sender),
                None => drop(sender.send(None)),
            },
            Query::Receive(sender) => match self.receive {
                Some(receive) => receive.report(sender),
                None => drop(sender.send(None)),
            },
            Query::Health(sender) => self.health.request_check(sender),
            Query::LastHealth(sender) => drop(sender.send(self.health.last())),
            Query::Canary(sender) => drop(sender.send(self.table.canary_state())),
        }
    }

    /// Gauges of the agent: sockets, current problems of objects, and the age of the table.
    fn gauges(&self) -> Vec<(&'static str, u64)> {
        let Table { store, planner, .. } = self.table;
        let mut gauges = Vec::from(self.sockets.read());
        gauges.push(("tcp_places_freed", self.table.tcp_places().1));
        gauges.extend(self.places.gauges());
        gauges.extend(self.health.gauges());
        gauges.extend(self.policy.into_iter().flat_map(PolicyHandle::gauges));
        gauges.extend(self.receive.into_iter().flat_map(ReceiveHandle::gauges));
        gauges.push(("object_problems", self.table.problems().len() as u64));
        let (used, capacity, limits) = (planner.used(), self.table.capacity(), self.table.limits());
        gauges.extend([
            ("frontends", used.frontends.into()),
            ("frontends_room", capacity.frontends.into()),
            ("frontends_max", limits.frontends.into()),
            ("backends", used.slots.into()),
            ("backends_room", capacity.slots.into()),
            ("backends_max", limits.slots.into()),
            ("services_without_room", planner.without_capacity() as u64),
            ("lists_doubted", self.doubts.count()),
            ("lists_in_doubt", self.doubts.is_in_doubt(store).into()),
            ("log_lines_left_out", log_lines_left_out()),
            ("tasks_ended", self.tasks.ended().len() as u64),
            ("services", store.service_names().len() as u64),
        ]);
        gauges.extend(self.last_changes.last_seconds().map(|seconds| ("last_change_seconds", seconds)));
        gauges.extend(self.source.last_contact.silent_seconds().map(|seconds| ("api_server_silent_seconds", seconds)));
        gauges
    }

    /// State for `status_http`.
    fn status(&self) -> Status {
        let store = &self.table.store;
        let lists = store.pending_lists().map(|kind| format!("there is no complete list of {}s yet", kind.singular()));
        let write = match self.table.sync_state() {
            SyncState::FirstSync if self.doubts.is_in_doubt(store) => {
                Some("the lists would take most of the last agent's table away: second ones have to agree")
            }
            SyncState::FirstSync => Some("the table is not written yet"),
            SyncState::Resync { .. } => Some("the table could not be written, and is written again soon"),
            SyncState::Incremental(_) if self.readiness.is_withdrawn() => {
                Some("the table has not been compared with the API server since the VM was restored")
            }
            SyncState::Incremental(_) => None,
        };
        let (hooks, ended_tasks) = (self.health.problems(), self.tasks.ended());
        let has_hook_problem = !hooks.is_empty();
        let policy =
            self.readiness.missing_policy().map(|reason| format!("the pod's policy is not in force: {reason}"));
        let ended = ended_tasks.iter().map(|name| format!("the task \"{name}\" has ended: start the agent again"));
        Status {
            gauges: self.gauges(),
            measures: self.measures.cloned().unwrap_or_default(),
            pending: lists.chain(write.map(str::to_owned)).chain(policy).chain(hooks).chain(ended).collect(),
            has_hook_problem,
            has_ended_task: !ended_tasks.is_empty(),
            has_node: store.has_node(),
        }
    }
}
