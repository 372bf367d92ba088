//! Background task that checks whether the programs are still attached and effective, and repairs them: a canary walks
//! through each hook.
//!
//! Nothing wakes the agent for it. It checks when the network or the cgroup has changed, when the source has spoken and
//! the last check was a minute ago, and when `cproxy check` asks.

mod walk;

use std::{
    future::pending,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use cproxy_core::Exclusions;
use cproxy_daemon::{FileChanges, Tasks};
use cproxy_datapath::{
    bpf::{
        Attachments, Environment, Mount, PinDir, PinLock, ProcessCgroup, ROOT_CGROUP_ID, cgroup_id, hook_programs,
        restore_lock,
    },
    canary::Route,
};
use cproxy_wire::LastContact;
use rustix::fs::inotify::WatchFlags;
use tokio::{
    sync::{Notify, mpsc, oneshot, watch},
    time::Instant,
};

pub use self::walk::walk_canary;
use self::walk::{Walked, walk_all, walk_in};
use crate::{
    agent::{
        install::{install_in_child, load_policy_in_child},
        policy::{self, PolicyOrder},
        receive::{self, ReceiveState},
    },
    canary,
    config::ServiceCounting,
    mailbox::{Command, Mailbox, Query},
    privileges::Broker,
    report::{CanaryReport, HealthReport},
    state::{CanaryState, Untried},
};

/// Least time between two checks without a change.
const CONFIRMATION_INTERVAL: Duration = Duration::from_secs(60);
/// Least time between two checks after changes. In between, changes count as one.
const CHANGE_INTERVAL: Duration = Duration::from_secs(2);
/// Number of `cproxy check` that wait for a report.
const CHECK_REQUESTS_MAX: usize = 4;

/// Way to the task, and its gauges.
#[derive(Debug)]
pub(in crate::agent) struct ProgramHealth {
    /// Notified after a change.
    changed: Notify,
    requests: mpsc::Sender<oneshot::Sender<HealthReport>>,
    checks: AtomicU64,
    repairs: AtomicU64,
    canary_failures: AtomicU64,
    /// Report of the last check; `None` before the first.
    last: Mutex<Option<HealthReport>>,
}

/// Requests of `cproxy check`.
pub(in crate::agent) type CheckRequests = mpsc::Receiver<oneshot::Sender<HealthReport>>;

impl ProgramHealth {
    pub(in crate::agent) fn new() -> (Arc<Self>, CheckRequests) {
        let (requests, received) = mpsc::channel(CHECK_REQUESTS_MAX);
        let (checks, repairs, canary_failures, last) = Default::default();
        (Arc::new(Self { changed: Notify::new(), requests, checks, repairs, canary_failures, last }), received)
    }

    /// Has the task check, now or a few seconds after its last check.
    pub(in crate::agent) fn change(&self) {
        self.changed.notify_one();
    }

    /// Has the task check now and report. The report is lost if too many wait for one.
    pub(in crate::agent) fn request_check(&self, sender: oneshot::Sender<HealthReport>) {
        self.requests.try_send(sender).ok();
    }

    /// Report of the last check, for one that takes too long.
    pub(in crate::agent) fn last(&self) -> HealthReport {
        self.lock_last().clone().unwrap_or_else(|| HealthReport {
            differences: Vec::new(),
            canary: CanaryReport::NotWalked("the first check is under way".to_owned()),
            repairs: 0,
            ended_tasks: Vec::new(),
        })
    }

    /// Problems that the last check has shown.
    pub(in crate::agent) fn problems(&self) -> Vec<String> {
        self.lock_last().iter().flat_map(HealthReport::problems).collect()
    }

    fn lock_last(&self) -> MutexGuard<'_, Option<HealthReport>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Names and values, as `cproxy get counters` prints them.
    pub(in crate::agent) fn gauges(&self) -> [(&'static str, u64); 3] {
        let read = |gauge: &AtomicU64| gauge.load(Ordering::Relaxed);
        [
            ("hook_checks", read(&self.checks)),
            ("hook_repairs", read(&self.repairs)),
            ("canary_failures", read(&self.canary_failures)),
        ]
    }
}

/// Background task.
pub(in crate::agent) struct HealthChecker {
    pub(in crate::agent) health: Arc<ProgramHealth>,
    pub(in crate::agent) requests: CheckRequests,
    pub(in crate::agent) last_contact: LastContact,
    /// Way to the task that owns the table.
    pub(in crate::agent) mailbox: Mailbox,
    pub(in crate::agent) environment: Environment,
    /// The programs of the start, recorded before anyone is told that the agent is ready.
    pub(in crate::agent) attachments: Option<Attachments>,
    /// The cgroup that the configuration names.
    pub(in crate::agent) cgroup: Option<PathBuf>,
    /// Whether the programs count by Service.
    pub(in crate::agent) service_counters: ServiceCounting,
    /// Way to the task that enforces the pod's network policy, if the agent does.
    pub(in crate::agent) policy: Option<mpsc::Sender<PolicyOrder>>,
    /// State of the task that receives for load balancers, if it runs.
    pub(in crate::agent) receive: Option<Arc<ReceiveState>>,
    pub(in crate::agent) run_dir: PathBuf,
    /// Lock of the pin directory, until the agent ends.
    pub(in crate::agent) lock: PinLock,
    /// Broker that starts children, if system calls are filtered.
    pub(in crate::agent) broker: Option<Arc<Broker>>,
    /// Changes of the cgroup, if they can be seen.
    pub(in crate::agent) cgroup_changes: Option<FileChanges>,
    /// All background tasks of the agent, which it reports on.
    pub(in crate::agent) tasks: Tasks,
}

/// Changes of cgroups, if they can be seen. Call it inside a tokio runtime.
pub(in crate::agent) fn cgroup_changes() -> Option<FileChanges> {
    FileChanges::open().inspect_err(|error| tracing::debug!("changes of the cgroup cannot be seen: {error}")).ok()
}

/// Programs that are attached to `cgroup` now, if their links can be read.
pub(in crate::agent) fn record(pins: &PinDir, cgroup: &Path) -> Option<Attachments> {
    let recorded = Attachments::record(pins, cgroup);
    recorded.inspect_err(|error| tracing::debug!("the links cannot be read: {error}")).ok()
}

/// State of the task between two checks.
struct Progress {
    attachments: Option<Attachments>,
    last_check: Option<Instant>,
}

impl HealthChecker {
    /// Runs for ever.
    pub(in crate::agent) async fn run(mut self) {
        let cgroup_changes = self.cgroup_changes.take();
        let mut contacts = self.last_contact.contacts();
        let mut progress = Progress { attachments: self.attachments.take(), last_check: None };
        loop {
            if let Some(changes) = &cgroup_changes
                && let Err(error) = watch(changes, &self.environment.cgroup)
            {
                tracing::debug!("{}: changes cannot be seen: {error}", self.environment.cgroup.display());
            }
            let changed = async {
                tokio::select! {
                    () = self.health.changed.notified() => {}
                    () = cgroup_changed(cgroup_changes.as_ref()) => {}
                }
                if let Some(last_check) = progress.last_check {
                    tokio::time::sleep_until(last_check + CHANGE_INTERVAL).await;
                }
            };
            let mut request = tokio::select! {
                request = self.requests.recv() => request,
                () = changed => None,
                () = confirmed(&mut contacts, progress.last_check) => None,
            };
            let report = self.check(&mut progress).await;
            progress.last_check = Some(Instant::now());
            while let Some(sender) = request {
                drop(sender.send(report.clone()));
                request = self.requests.try_recv().ok();
            }
        }
    }

    /// Checks once, repairs what it can, and logs what is new.
    async fn check(&mut self, progress: &mut Progress) -> HealthReport {
        self.health.checks.fetch_add(1, Ordering::Relaxed);
        // Those that were logged and may still hold.
        let known = self.health.problems();
        let mut differences = self.differences(progress).await;
        if !differences.is_empty() {
            if differences.iter().any(|difference| !known.contains(difference)) {
                tracing::warn!(name: "programs_repaired", "{}; attaching the programs again", differences.join("; "));
            }
            match self.repair().await {
                Ok(()) => {
                    self.health.repairs.fetch_add(1, Ordering::Relaxed);
                    progress.attachments = record(self.lock.pins(), &self.environment.cgroup);
                    differences = self.differences(progress).await;
                }
                Err(error) => differences.push(format!("the programs cannot be attached again: {error}")),
            }
        }
        let canary = self.walk().await;
        let report = HealthReport {
            differences,
            canary,
            repairs: self.health.repairs.load(Ordering::Relaxed),
            ended_tasks: self.tasks.ended().iter().map(ToString::to_string).collect(),
        };
        let problems: Vec<_> = report.problems().collect();
        for problem in problems.iter().filter(|problem| !known.contains(problem)) {
            tracing::error!(name: "programs_ineffective", "{problem}");
        }
        if problems.is_empty() && !known.is_empty() {
            tracing::info!(name: "programs_effective", "the programs have their effect again");
        }
        *self.health.lock_last() = Some(report.clone());
        report
    }

    /// Differences between the programs, their cgroup and pins as they are and as they should be. Pins of maps are
    /// restored at once.
    async fn differences(&mut self, progress: &Progress) -> Vec<String> {
        let mut differences = Vec::new();
        match restore_lock(&mut self.lock) {
            Ok(false) => {}
            Ok(true) => differences.push(format!("{} was removed", self.lock.pins().versioned().display())),
            Err(error) => differences.push(error.to_string()),
        }
        match self.mailbox.order(Command::RestorePins).await {
            Ok(Ok(restored)) if restored.is_empty() => {}
            Ok(Ok(restored)) => {
                tracing::warn!(name: "pins_restored", "{}: the pins were removed; pinned again", restored.join(", "));
            }
            Ok(Err(error)) => differences.push(error),
            Err(error) => differences.push(error.to_string()),
        }
        let Some(attachments) = &progress.attachments else {
            differences.push("the links could not be read".to_owned());
            return differences;
        };
        let of_links = attachments.differences();
        if of_links.is_empty() {
            // A tracer that was killed before it put its programs in force leaves nothing but pins.
            attachments.remove_trace_leftover();
        }
        differences.extend(of_links.iter().map(ToString::to_string));
        differences.extend(policy::detached(self.lock.pins(), &self.environment.cgroup, self.policy.is_some()));
        differences.extend(self.receive.as_ref().and_then(|_| receive::detached(self.lock.pins())));
        if let Some(better) = self.better_cgroup(attachments) {
            differences.push(format!(
                "{} is not the cgroup of the workload any more, which is {}",
                self.environment.cgroup.display(),
                better.display()
            ));
        }
        differences
    }

    /// The cgroup that an agent would attach to if it started now, if that is another one: `--cgroup` was made again,
    /// or the hierarchy's root can be seen by now.
    fn better_cgroup(&self, attachments: &Attachments) -> Option<PathBuf> {
        let (mount, _) = Environment::cgroup2(self.cgroup.as_deref(), &self.run_dir).ok()?;
        let Mount::Present(dir) = mount else { return None };
        let id = cgroup_id(&dir).ok()?;
        (id != attachments.cgroup_id()).then_some(dir)
    }

    /// Attaches the programs as at a start. The table stays as it is.
    async fn repair(&mut self) -> Result<(), String> {
        let pins = self.environment.pin_dir.clone();
        let prepared = Environment::prepare(self.cgroup.as_deref(), &pins, &self.run_dir);
        self.environment = prepared.map_err(|error| error.to_string())?;
        let broker = self.broker.clone();
        let installed = install_in_child(&self.environment, &self.lock, self.service_counters, broker.clone()).await;
        installed.map_err(|error| error.to_string())?;
        let lost_policy = self.policy.as_ref().filter(|_| !policy::is_pinned(self.lock.pins()));
        let lost_receive = self.receive.as_ref().filter(|_| receive::detached(self.lock.pins()).is_some());
        if lost_policy.is_some() || lost_receive.is_some() {
            let loaded = load_policy_in_child(&self.environment, &self.lock, broker.clone(), self.receive.is_some());
            loaded.await.map_err(|error| error.to_string())?;
            lost_receive.inspect(|state| state.reopen());
        }
        if let Some(orders) = lost_policy {
            return policy::reopen(orders).await;
        }
        let attached = policy::repair(self.lock.pins(), &self.environment.cgroup, broker).await;
        attached.map_err(|error| error.to_string())
    }

    /// Walks the canary. After a failure the table is written anew, and the canary walks once more.
    async fn walk(&self) -> CanaryReport {
        let state = self.mailbox.ask(Query::Canary).await;
        let Ok(CanaryState { routes, untried, exclusions }) = state else {
            return CanaryReport::NotWalked("the agent ends".to_owned());
        };
        let Some(routes) = routes else {
            return CanaryReport::NotWalked("there is no complete table yet".to_owned());
        };
        if let Some(reason) = obstacle(&routes, &untried, &exclusions) {
            return CanaryReport::NotWalked(reason);
        }
        let report = self.walk_routes(routes, &exclusions).await;
        if !matches!(report, CanaryReport::Failed(_)) {
            return without(report, untried);
        }
        if let Err(error) = self.mailbox.order(Command::Rewrite).await {
            return CanaryReport::Failed(error.to_string());
        }
        let state = self.mailbox.ask(Query::Canary).await.unwrap_or_default();
        match self.walk_routes(state.routes.unwrap_or_default(), &exclusions).await {
            CanaryReport::Failed(symptom) => {
                self.health.canary_failures.fetch_add(1, Ordering::Relaxed);
                CanaryReport::Failed(symptom + &self.others())
            }
            report => without(report, state.untried),
        }
    }

    async fn walk_routes(&self, routes: Vec<Route>, exclusions: &Exclusions) -> CanaryReport {
        let (pins, cgroup) = (self.lock.pins().clone(), self.environment.cgroup.clone());
        let broker = self.broker.clone();
        let excluded: Vec<_> = exclusions.cgroups.iter().map(|cgroup| cgroup.id).collect();
        let walked = tokio::task::spawn_blocking(move || {
            if is_served(&cgroup, &excluded) {
                walk_all(&routes, &pins)
            } else {
                walk_in(&cgroup, &pins, &routes, broker.as_deref())
            }
        });
        let walked = walked.await.unwrap_or_else(|error| Walked::not(&error));
        if walked.needs_ports {
            self.mailbox.tell(Command::MoveCanary).await.ok();
        }
        walked.report
    }

    /// Programs of others at the same hooks, as text behind a symptom.
    fn others(&self) -> String {
        let others = hook_programs(self.lock.pins(), &self.environment.cgroup, 1).others;
        let others: Vec<_> = others.iter().map(ToString::to_string).collect();
        if others.is_empty() { String::new() } else { format!("; others there: {}", others.join("; ")) }
    }
}

/// Reason why no process can walk the canary.
fn obstacle(routes: &[Route], untried: &[Untried], exclusions: &Exclusions) -> Option<String> {
    if routes.is_empty() {
        let reasons: Vec<_> = untried.iter().map(|untried| &*untried.reason).collect();
        let none = "it has no addresses (--canary-address)".to_owned();
        return Some(if reasons.is_empty() { none } else { reasons.join("; ") });
    }
    if exclusions.ports.contains(&canary::PORT) {
        return Some(format!("port {} is excluded (--exclude-port)", canary::PORT));
    }
    let is_own = exclusions.uids.contains(&rustix::process::geteuid().as_raw());
    is_own.then(|| "the agent's user is excluded (--exclude-uid)".to_owned())
}

/// The report of a walk that left out some addresses.
fn without(report: CanaryReport, mut untried: Vec<Untried>) -> CanaryReport {
    match report {
        CanaryReport::Reached => {}
        CanaryReport::Partly { reason, is_absent } => untried.push(Untried { reason, is_absent }),
        CanaryReport::NotWalked(_) | CanaryReport::Failed(_) => return report,
    }
    if untried.is_empty() {
        return CanaryReport::Reached;
    }
    let is_absent = untried.iter().all(|untried| untried.is_absent);
    let reasons: Vec<_> = untried.into_iter().map(|untried| untried.reason).collect();
    CanaryReport::Partly { reason: reasons.join("; "), is_absent }
}

/// Whether the hooks run for the agent itself, as far as that can be seen.
fn is_served(cgroup: &Path, excluded: &[u64]) -> bool {
    let Ok(attached) = cgroup_id(cgroup) else { return false };
    if attached == ROOT_CGROUP_ID && excluded.is_empty() {
        return true;
    }
    let Ok(ProcessCgroup { ids: own, .. }) = ProcessCgroup::of(None) else { return false };
    own.contains(&attached) && !own.iter().any(|id| excluded.contains(id))
}

/// Watches a cgroup for containers that are made in it, and the one above it, in which it may be made again.
fn watch(changes: &FileChanges, cgroup: &Path) -> io::Result<()> {
    let flags = WatchFlags::CREATE | WatchFlags::DELETE_SELF;
    let mut directories = [Some(cgroup), cgroup.parent()].into_iter().flatten().filter(|dir| dir.is_dir());
    directories.try_for_each(|dir| changes.watch(dir, flags))
}

/// Waits for a change of the cgroup; for ever if changes cannot be seen.
async fn cgroup_changed(changes: Option<&FileChanges>) {
    if let Some(changes) = changes
        && changes.changed().await.is_ok()
    {
        return;
    }
    pending::<()>().await;
}

/// Waits until the source has confirmed something, at least [`CONFIRMATION_INTERVAL`] after the last check.
async fn confirmed(contacts: &mut watch::Receiver<()>, last_check: Option<Instant>) {
    while contacts.changed().await.is_ok() {
        if last_check.is_some_and(|last_check| last_check.elapsed() >= CONFIRMATION_INTERVAL) {
            return;
        }
    }
    pending::<()>().await;
}
