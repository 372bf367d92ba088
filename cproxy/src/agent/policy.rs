//! Network policy of the pod: from the source into the kernel. One task owns the maps.
//!
//! Until the policy and all of its sets have come, all is denied but traffic within the VM; the last policy stays when
//! the source, the agent or a part of a newer policy is gone.

mod contact;
mod existing;
mod follow;
mod of_relay;
mod replica;

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use cproxy_core::{Address, ExcludedCgroup, ObjectName};
use cproxy_datapath::bpf::{
    self, CgroupError, LinkedError, PinDir, PolicyError, PolicyHooks, PolicyMaps, PolicyPins, PolicyReader,
    PolicySettings, excluded_cgroup, is_in_cgroup, netns_cookie,
};
use cproxy_policy::{Compiled, Directions, Operation, PodPolicy, PolicyTable, SetName, compile};
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::spawn_blocking,
    time::{Instant, sleep, sleep_until},
};

pub(super) use self::follow::{Feed, FeedSender, follow_relay, send_files};
use self::{contact::SourceContact, existing::ExistingSockets, replica::Replica};
use super::tasks::stale_sockets::RetiredQueue;
use crate::{
    config::{Config, ExistingConnections, PolicyMode},
    privileges::{Broker, run_child},
    report::{Enforced, PodPolicyReport},
};

/// Time from an attempt to write the policy that failed to the next one.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Orders that wait, at most.
const ORDERS_WAITING_MAX: usize = 4;

/// Questions for a report that wait, at most.
const REPORTS_WAITING_MAX: usize = 4;

/// Network namespace of the agent, which is the pod's.
pub(super) const OWN_NETNS: &str = "/proc/self/ns/net";

/// Failure to begin with policy.
#[derive(Debug, thiserror::Error)]
pub enum PolicyStartError {
    /// The kernel or a pin cannot be used.
    #[error("--policy: {0}")]
    Kernel(#[from] PolicyError),
    /// An exempt cgroup does not exist.
    #[error("--policy-exempt-cgroup {0}")]
    Exempt(#[from] CgroupError),
    /// An exempt cgroup holds all others.
    #[error(
        "--policy-exempt-cgroup {}: it holds {}, to which the programs are attached, so that no call would be looked \
         at: name the cgroups of the guest's daemons", .0.display(), .1.display()
    )]
    ExemptsAll(PathBuf, PathBuf),
    /// Network namespaces cannot be told apart.
    #[error("--policy: the kernel does not tell network namespaces apart (Linux 5.14 does): {0}")]
    Netns(io::Error),
    /// The source has no policies.
    #[error(
        "--policy: {0}; what was in force stays, or the pod is closed: name a cproxy-relay that runs \
         with --policies as the server, or run `cproxy cleanup --policy-too` and start without --policy"
    )]
    NoRelay(String),
    /// Manifests have many pods.
    #[error("--policy: manifests need --policy-pod NAMESPACE/NAME, the pod that this VM is")]
    NoPod,
}

/// Whether the pod's policy is in force; the reason why not.
pub(super) type PolicyState = Result<(), String>;

/// Enforcement of the pod's policy.
pub(super) struct PolicyTask {
    maps: PolicyMaps,
    table: PolicyTable,
    replica: Replica,
    pod: Option<ObjectName>,
    /// Addresses of the VM, with which it may always talk.
    own: Vec<Address>,
    /// Addresses of the node that no object names, with which it may always talk, too.
    node: Vec<Address>,
    hooks: Hooks,
    /// Where sockets are closed that a policy has refused and a later one allows.
    retired_queue: Arc<RetiredQueue>,
    /// Connections that a later policy may no longer allow, if they are closed.
    existing: Option<Arc<ExistingSockets>>,
    state: watch::Sender<PolicyState>,
    orders: (mpsc::Sender<PolicyOrder>, mpsc::Receiver<PolicyOrder>),
    reports: (mpsc::Sender<ReportSender>, mpsc::Receiver<ReportSender>),
    enforced: Option<EnforcedPolicy>,
    /// Part of a later policy that is missing.
    missing: Option<String>,
    /// Whether this process has not had a policy of the source yet.
    is_new: bool,
    /// Time of another attempt after one that failed.
    retry: Option<Instant>,
    /// Whether this process has closed the pod, and no policy has come since.
    is_closed: bool,
    /// Whether the pod stays closed, for a snapshot, whatever the source says.
    is_held: bool,
    settings: PolicySettings,
    exempt: Vec<PathBuf>,
    gauges: Arc<PolicyGauges>,
}

/// Policy that this agent has put in force, for reports.
struct EnforcedPolicy {
    policy: PodPolicy,
    set_sizes: BTreeMap<SetName, u64>,
    since: Instant,
}

/// Numbers of the policy in force.
#[derive(Debug, Default)]
pub(super) struct PolicyGauges {
    rules: AtomicU64,
    addresses: AtomicU64,
    changes: AtomicU64,
    /// Whether the source cannot have a policy, and has not had one since the agent's start.
    has_no_source: AtomicBool,
}

/// Channel for a report.
pub(super) type ReportSender = oneshot::Sender<Option<PodPolicyReport>>;

/// Channel for the outcome of an order.
type Outcome = oneshot::Sender<Result<(), String>>;

/// Order to the task.
#[derive(Debug)]
pub(super) enum PolicyOrder {
    /// Close the pod until its policy has come anew: this VM is a clone.
    CloseAnew(Option<Outcome>),
    /// Close the pod until the VM is restored from the snapshot that is about to be taken.
    Hold(Outcome),
    /// As `CloseAnew`, if the pod is held closed.
    EndHold,
    /// Take these as the addresses of the VM.
    SetOwn(Vec<Address>),
    /// Use the maps and programs that are pinned now, those before having been removed.
    Reopen(Outcome),
}

/// Way to the task.
pub(super) struct PolicyHandle {
    pub(super) state: watch::Receiver<PolicyState>,
    orders: mpsc::Sender<PolicyOrder>,
    reports: mpsc::Sender<ReportSender>,
    gauges: Arc<PolicyGauges>,
    existing: Option<Arc<ExistingSockets>>,
    contact: SourceContact,
}

impl PolicyHandle {
    /// Has the task send a report. Without room for the question, its sender is dropped.
    pub(super) fn report(&self, sender: ReportSender) {
        self.reports.try_send(sender).ok();
    }

    /// Fails if the source cannot have a policy, and has not had one since the agent's start.
    pub(super) fn require_source(&self) -> Result<(), PolicyStartError> {
        match &*self.state.borrow() {
            Err(reason) if self.gauges.has_no_source.load(Ordering::Relaxed) => {
                Err(PolicyStartError::NoRelay(reason.clone()))
            }
            _ => Ok(()),
        }
    }

    /// Names and values, as `cproxy get counters` prints them.
    pub(super) fn gauges(&self) -> Vec<(&'static str, u64)> {
        let read = |gauge: &AtomicU64| gauge.load(Ordering::Relaxed);
        let PolicyGauges { rules, addresses, changes, .. } = &*self.gauges;
        let mut gauges = vec![
            ("policy_in_force", self.state.borrow().is_ok().into()),
            ("policy_rules", read(rules)),
            ("policy_addresses", read(addresses)),
            ("policy_changes", read(changes)),
        ];
        gauges.extend(self.existing.iter().map(|existing| ("policy_sockets_closed", existing.closed())));
        gauges.extend(self.contact.silent_seconds().map(|seconds| ("policy_silent_seconds", seconds)));
        gauges
    }

    /// Gives the task an order: to close the pod, since a clone of a snapshot is another pod, or to take addresses.
    pub(super) fn order(&self, order: PolicyOrder) {
        if let Err(mpsc::error::TrySendError::Full(order) | mpsc::error::TrySendError::Closed(order)) =
            self.orders.try_send(order)
            && let PolicyOrder::CloseAnew(Some(sender)) | PolicyOrder::Hold(sender) = order
        {
            sender.send(Err("the pod is being closed already: try it again".to_owned())).ok();
        }
    }
}

/// Attaching of the programs, by this process while it may, and by a child afterwards.
struct Hooks {
    own: PolicyHooks,
    pin_dir: PathBuf,
    cgroup: PathBuf,
    broker: Option<Arc<Broker>>,
    is_confined: bool,
}

/// Time between two looks for exempt cgroups that were made again.
const EXEMPT_INTERVAL: Duration = Duration::from_secs(5);

/// Checks settings before anything is attached.
pub(super) fn check(config: &Config) -> Result<(), PolicyStartError> {
    let settings = &config.policy;
    if settings.policy == PolicyMode::Off {
        let has_others = !settings.policy_node_ip.is_empty() || settings.policy_existing != ExistingConnections::Keep;
        if settings.policy_pod.is_some() || has_others || !settings.policy_exempt_cgroup.is_empty() {
            tracing::warn!("settings of --policy-* have no effect without --policy enforce or audit");
        }
        return Ok(());
    }
    if !config.source.manifests.is_empty() && settings.policy_pod.is_none() {
        return Err(PolicyStartError::NoPod);
    }
    exempt_cgroups(&settings.policy_exempt_cgroup)?;
    Ok(())
}

/// Checks that exempt cgroups leave calls to look at, before anything is attached to `cgroup`.
pub(super) fn check_exempt(config: &Config, cgroup: &Path) -> Result<(), PolicyStartError> {
    if config.policy.policy == PolicyMode::Off {
        return Ok(());
    }
    let dirs = &config.policy.policy_exempt_cgroup;
    for (dir, exempt) in dirs.iter().zip(exempt_cgroups(dirs)?) {
        if is_in_cgroup(cgroup, exempt.id) {
            return Err(PolicyStartError::ExemptsAll(dir.clone(), cgroup.to_owned()));
        }
    }
    Ok(())
}

fn exempt_cgroups(dirs: &[PathBuf]) -> Result<Vec<ExcludedCgroup>, CgroupError> {
    dirs.iter().map(|dir| excluded_cgroup(dir)).collect()
}

/// Warns of a policy that an earlier agent has left in force, which an agent without one does not follow.
pub(super) fn warn_of_leftover(pins: &PinDir) {
    if PolicyReader::isolating(pins).is_some() {
        tracing::warn!(
            name: "policy_left",
            "a network policy of an earlier agent is in force, and stays as it is: --policy enforce follows it, and \
             `cproxy cleanup --policy-too` removes it"
        );
    }
}

impl PolicyStartError {
    /// Whether a setting is missing, or names something that does not exist.
    pub(super) fn is_of_setting(&self) -> bool {
        match self {
            Self::NoPod
            | Self::NoRelay(_)
            | Self::ExemptsAll(..)
            | Self::Exempt(CgroupError::NotCgroup2(_) | CgroupError::RootOutOfSight(_)) => true,
            Self::Exempt(CgroupError::Io(_, error)) => {
                matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
            }
            _ => false,
        }
    }
}

impl PolicyTask {
    /// Takes over the maps, closed unless a policy is in force already.
    pub(super) async fn open(
        config: &Config,
        pins: &PinDir,
        cgroup: &Path,
        own: Vec<Address>,
        retired_queue: Arc<RetiredQueue>,
    ) -> Result<Self, PolicyStartError> {
        let own_pins = PolicyPins::new(pins);
        let mut maps = PolicyMaps::open(&own_pins)?;
        let settings = PolicySettings {
            netns_cookie: netns_cookie().map_err(PolicyStartError::Netns)?,
            exempt_cgroups: exempt_cgroups(&config.policy.policy_exempt_cgroup)?,
            is_audited: config.policy.policy == PolicyMode::Audit,
        };
        maps.configure(&settings)?;
        let hooks = Hooks {
            own: PolicyHooks::open(pins, cgroup, Path::new(OWN_NETNS))?,
            pin_dir: pins.directory().to_owned(),
            cgroup: cgroup.to_owned(),
            broker: None,
            is_confined: false,
        };
        let (state, _) = watch::channel(Err("the source has not shown the pod's policy yet".to_owned()));
        let pod = config.policy.policy_pod.clone();
        let (table, replica) = Default::default();
        let existing = (config.policy.policy_existing == ExistingConnections::Close)
            .then(|| ExistingSockets::new(pins.clone(), config.policy.policy_exempt_cgroup.clone()));
        let mut task = Self {
            maps,
            table,
            replica,
            pod,
            own,
            node: config.policy.policy_node_ip.clone(),
            hooks,
            retired_queue,
            existing,
            state,
            orders: mpsc::channel(ORDERS_WAITING_MAX),
            reports: mpsc::channel(REPORTS_WAITING_MAX),
            enforced: None,
            missing: None,
            is_new: true,
            is_closed: false,
            is_held: false,
            retry: None,
            settings,
            exempt: config.policy.policy_exempt_cgroup.clone(),
            gauges: Arc::default(),
        };
        if task.maps.has_policy()? {
            // The child that installs has attached them behind the programs that translate, but for those detached.
            task.hooks.own.attach(task.maps.enforced()?)?;
        } else {
            let closed = task.closed();
            task.enforce(&closed).await?;
            task.is_closed = true;
        }
        Ok(task)
    }

    /// Way to the task, and whether the policy is in force.
    pub(super) fn handle(&self, contact: SourceContact) -> PolicyHandle {
        PolicyHandle {
            state: self.state.subscribe(),
            orders: self.orders.0.clone(),
            reports: self.reports.0.clone(),
            gauges: self.gauges.clone(),
            existing: self.existing.clone(),
            contact,
        }
    }

    /// Way of orders to the task.
    pub(super) fn orders(&self) -> mpsc::Sender<PolicyOrder> {
        self.orders.0.clone()
    }

    /// Connections to be looked through after each change, by a task of their own; `None`: all of them stay.
    pub(super) fn existing(&self) -> Option<Arc<ExistingSockets>> {
        self.existing.clone()
    }

    /// Has a child attach the programs from now on.
    pub(super) fn confine(&mut self, broker: Option<Arc<Broker>>) {
        self.hooks.broker = broker;
        self.hooks.is_confined = true;
    }

    /// Follows the source for ever.
    pub(super) async fn run(mut self, mut feed: Feed) {
        loop {
            tokio::select! {
                updates = feed.next() => {
                    let Some(updates) = updates else { return };
                    updates.into_iter().for_each(|update| self.replica.apply(update));
                    let has_no_source = self.is_new && self.replica.has_no_relay();
                    self.gauges.has_no_source.store(has_no_source, Ordering::Relaxed);
                    self.write().await;
                }
                Some(order) = self.orders.1.recv() => self.carry_out(order, &feed).await,
                () = due(self.retry), if self.retry.is_some() => self.write().await,
                Some(sender) = self.reports.1.recv() => drop(sender.send(Some(self.report()))),
                () = sleep(EXEMPT_INTERVAL), if !self.exempt.is_empty() => self.look_at_exempt_cgroups(),
            }
        }
    }

    /// Takes over exempt cgroups that were removed and made again, as by the restart of a service. One that is not
    /// there at the moment changes nothing.
    fn look_at_exempt_cgroups(&mut self) {
        let Ok(exempt_cgroups) = exempt_cgroups(&self.exempt) else { return };
        if exempt_cgroups == self.settings.exempt_cgroups {
            return;
        }
        self.settings.exempt_cgroups = exempt_cgroups;
        match self.maps.configure(&self.settings) {
            Ok(()) => tracing::info!("an exempt cgroup was made again"),
            Err(error) => tracing::error!("exempt cgroups: {error}"),
        }
    }

    fn report(&self) -> PodPolicyReport {
        let enforced = self.enforced.as_ref().map(|EnforcedPolicy { policy, set_sizes, since }| Enforced {
            policy,
            set_sizes,
            since_seconds: since.elapsed().as_secs(),
            addresses: self.gauges.addresses.load(Ordering::Relaxed),
        });
        let missing = self.state.borrow().as_ref().err().cloned();
        let missing = missing.or_else(|| self.replica.complete(self.pod.as_ref()).err());
        let in_kernel = self.maps.enforced().unwrap_or_default();
        PodPolicyReport::new(enforced, in_kernel, self.settings.is_audited, missing)
    }

    async fn carry_out(&mut self, order: PolicyOrder, feed: &Feed) {
        let (done, outcome) = match order {
            PolicyOrder::EndHold if !self.is_held => return,
            PolicyOrder::EndHold => (self.close(feed, false).await, None),
            PolicyOrder::CloseAnew(outcome) => (self.close(feed, false).await, outcome),
            PolicyOrder::Hold(outcome) => (self.close(feed, true).await, Some(outcome)),
            PolicyOrder::SetOwn(addresses) => (self.set_own(addresses).await, None),
            PolicyOrder::Reopen(outcome) => (self.reopen().await, Some(outcome)),
        };
        let done = done.map_err(|error| error.to_string());
        if let Err(error) = &done {
            tracing::error!("the pod's policy could not be closed or enforced anew: {error}");
        }
        outcome.map(|sender| sender.send(done));
    }

    /// Takes other addresses as those of the VM, with which it may always talk.
    async fn set_own(&mut self, addresses: Vec<Address>) -> Result<(), PolicyError> {
        if self.own == addresses {
            return Ok(());
        }
        self.own = addresses;
        if self.state.borrow().is_ok() {
            self.write().await;
            return Ok(());
        }
        // The last policy of an earlier agent is not known here.
        match self.is_closed {
            true => {
                let closed = self.closed();
                self.enforce(&closed).await
            }
            false => Ok(()),
        }
    }

    /// Uses the maps and programs that are pinned now, and puts the policy in force there.
    async fn reopen(&mut self) -> Result<(), PolicyError> {
        let pins = PinDir::new(&self.hooks.pin_dir);
        self.maps = PolicyMaps::open(&PolicyPins::new(&pins))?;
        self.maps.configure(&self.settings)?;
        self.hooks.own = PolicyHooks::open(&pins, &self.hooks.cgroup, Path::new(OWN_NETNS))?;
        self.table.forget();
        self.enforced = None;
        self.write().await;
        if self.enforced.is_some() {
            return Ok(());
        }
        let closed = self.closed();
        self.enforce(&closed).await
    }

    /// Closes the pod until its policy has come anew, or until an order says so. Manifests say which pod this is, also
    /// after a restore.
    async fn close(&mut self, feed: &Feed, holds: bool) -> Result<(), PolicyError> {
        if !feed.list_anew() {
            return Ok(());
        }
        self.replica.forget();
        self.enforced = None;
        self.is_held = holds;
        let reason = if holds {
            "it is closed for a snapshot, until the VM is restored from it, or `cproxy reseed` is called"
        } else {
            "the source has not shown the pod's policy since the VM was restored"
        };
        self.state.send_replace(Err(reason.to_owned())).ok();
        let closed = self.closed();
        self.is_closed = true;
        let result = self.enforce(&closed).await;
        if result.is_err() {
            self.table.forget();
        }
        result
    }

    /// Puts the policy in force, if it is complete.
    async fn write(&mut self) {
        if self.is_held {
            return;
        }
        let (policy, set_sizes, compiled) = match self.replica.complete(self.pod.as_ref()) {
            Ok(complete) => {
                let mut policy = complete.policy.clone();
                policy.own_addresses = [&*policy.own_addresses, &self.own].concat().into();
                policy.node_addresses = [&*policy.node_addresses, &self.node].concat().into();
                let compiled = compile(&policy, |set| complete.addresses(set));
                (policy, complete.set_sizes(), compiled)
            }
            Err(missing) => return self.lack(missing),
        };
        (self.retry, self.missing) = (None, None);
        compiled.problems.iter().for_each(|problem| tracing::warn!(name: "problem", "{problem}"));
        let written = self.enforce(&compiled).await;
        match written {
            Ok(()) => {
                if self.state.borrow().is_err() {
                    let Directions { ingress, egress } = compiled.isolated;
                    let mode = if self.settings.is_audited { "audited" } else { "in force" };
                    tracing::info!(
                        name: "policy",
                        "the pod's policy is {mode}: isolated for ingress: {ingress}, egress: {egress}"
                    );
                }
                self.gauges.rules.store(policy.rules.len() as u64, Ordering::Relaxed);
                self.gauges.addresses.store(compiled.singles.len() as u64, Ordering::Relaxed);
                self.gauges.changes.fetch_add(1, Ordering::Relaxed);
                self.retired_queue.add_refused();
                self.existing.iter().for_each(|existing| existing.change());
                (self.is_new, self.is_closed) = (false, false);
                self.enforced = Some(EnforcedPolicy { policy, set_sizes, since: Instant::now() });
                drop(self.state.send_replace(Ok(())));
            }
            Err(error) => {
                self.table.forget();
                self.retry = Some(Instant::now() + RETRY_INTERVAL);
                let reason = format!("it cannot be written, and what was in force before stays: {error}");
                if self.state.borrow().as_ref().err() != Some(&reason) {
                    tracing::error!(name: "policy_failed", "the pod's policy: {reason}");
                    drop(self.state.send_replace(Err(reason)));
                }
            }
        }
    }

    /// Takes note of a policy that is not complete. One that was in force stays.
    fn lack(&mut self, missing: String) {
        if self.missing.as_ref() != Some(&missing) {
            if self.state.borrow().is_ok() {
                tracing::warn!(name: "policy_missing", "the pod's policy stays as it was: {missing}");
            } else if let Some(pod) = self.pod.as_ref().filter(|pod| self.replica.lacks(pod)) {
                let meanwhile = if self.is_closed { "all is denied" } else { "the policy of an earlier agent stays" };
                tracing::warn!(
                    name: "policy_missing",
                    "--policy-pod {pod}: the source has no such pod; until it appears, {meanwhile}"
                );
            }
        }
        self.state.send_if_modified(|state| match state {
            Err(before) if *before != missing => {
                before.clone_from(&missing);
                true
            }
            _ => false,
        });
        self.missing = Some(missing);
    }

    /// A policy that allows traffic within the VM alone.
    fn closed(&self) -> Compiled {
        let closed = PodPolicy {
            name: ObjectName::new("", ""),
            uid: "".into(),
            node_name: "".into(),
            isolated: Directions { ingress: true, egress: true },
            policies: Vec::new(),
            node_addresses: [].into(),
            own_addresses: self.own.clone().into(),
            rules: Vec::new(),
            sets: Vec::new(),
        };
        compile(&closed, |_| [])
    }

    async fn enforce(&mut self, compiled: &Compiled) -> Result<(), PolicyError> {
        let operations = self.table.plan(compiled)?;
        for operation in &operations {
            let Operation::Enforce(directions) = *operation else {
                self.maps.apply(operation)?;
                continue;
            };
            self.hooks.attach(directions).await?;
            self.maps.apply(operation)?;
            self.hooks.own.detach_others(directions)?;
        }
        Ok(())
    }
}

/// Waits until a time.
async fn due(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

impl Hooks {
    /// Attaches the programs of these directions that are not attached.
    async fn attach(&self, directions: Directions) -> Result<(), PolicyError> {
        if self.own.are_attached(directions)? {
            return Ok(());
        }
        if !self.is_confined {
            return self.own.attach(directions);
        }
        let words = ["policy".into(), "attach".into(), self.cgroup.clone().into(), text(directions).into()];
        let (broker, pin_dir) = (self.broker.clone(), self.pin_dir.clone());
        let failed = |error| LinkedError::Attach("by a child", error);
        let child = move || {
            let stdin = std::fs::File::open("/dev/null")?;
            run_child(broker.as_deref(), &pin_dir, &words, stdin.into())
        };
        let output = spawn_blocking(child).await.map_err(io::Error::other).flatten().map_err(failed)?;
        if output.status.success() {
            return Ok(());
        }
        Err(failed(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned())).into())
    }
}

/// Attaches the policy's programs, if there are any, behind all that are attached.
pub(super) fn attach_behind(pins: &PinDir, cgroup: &Path) -> Result<(), PolicyError> {
    let own = PolicyPins::new(pins);
    if own.exist() { PolicyHooks::open(pins, cgroup, Path::new(OWN_NETNS))?.attach_behind() } else { Ok(()) }
}

/// Programs of the policy in force that are not attached, as words; `None`: all are, or there is no policy. An agent
/// that `enforces` has one.
pub(super) fn detached(pins: &PinDir, cgroup: &Path, enforces: bool) -> Option<String> {
    let own = PolicyPins::new(pins);
    if enforces && !own.are_complete() {
        return Some(format!("pins of the pod's network policy were removed: {}", own.directory().display()));
    }
    let attached = || {
        let Some(reader) = PolicyReader::new(own.clone()) else { return Ok(true) };
        PolicyHooks::open(pins, cgroup, Path::new(OWN_NETNS))?.are_attached(reader.state()?.directions)
    };
    match attached() {
        Ok(true) => None,
        Ok(false) => Some("a program of the pod's network policy was detached".to_owned()),
        Err(error) => Some(format!("the programs of the pod's network policy: {error}")),
    }
}

/// Whether all pins of the policy are there.
pub(super) fn is_pinned(pins: &PinDir) -> bool {
    PolicyPins::new(pins).are_complete()
}

/// Has the task use the maps and programs that are pinned now.
pub(super) async fn reopen(orders: &mpsc::Sender<PolicyOrder>) -> Result<(), String> {
    const ENDED: &str = "the task that enforces policy has ended";
    let (sender, outcome) = oneshot::channel();
    orders.send(PolicyOrder::Reopen(sender)).await.map_err(|_| ENDED.to_owned())?;
    outcome.await.map_err(|_| ENDED.to_owned())?
}

/// Attaches the programs of the policy in force, by a child.
pub(super) async fn repair(pins: &PinDir, cgroup: &Path, broker: Option<Arc<Broker>>) -> Result<(), PolicyError> {
    let Some(reader) = PolicyReader::new(PolicyPins::new(pins)) else { return Ok(()) };
    let hooks = Hooks {
        own: PolicyHooks::open(pins, cgroup, Path::new(OWN_NETNS))?,
        pin_dir: pins.directory().to_owned(),
        cgroup: cgroup.to_owned(),
        broker,
        is_confined: true,
    };
    hooks.attach(reader.state()?.directions).await
}

/// Directions as words of a child.
fn text(directions: Directions) -> &'static str {
    match (directions.ingress, directions.egress) {
        (true, true) => "both",
        (true, false) => "ingress",
        (false, true) => "egress",
        (false, false) => "none",
    }
}

/// Implementation of `cproxy policy`, a child of the agent: loads the policy's programs, with or without those for
/// received addresses, or attaches them.
///
/// # Errors
/// The kernel refuses.
pub fn policy_child(action: &str, pin_dir: &Path, cgroup: &Path, directions: &str) -> Result<(), PolicyError> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)).ok();
    let pins = PinDir::new(pin_dir);
    match action {
        "load" => return bpf::install_policy(&pins, bpf::Features::probe(), true).map(drop),
        "receive" => {
            let cookie = netns_cookie().map_err(|error| LinkedError::Io(OWN_NETNS.into(), error))?;
            return bpf::install_receive(&pins, bpf::Features::probe(), cgroup, Path::new(OWN_NETNS), cookie);
        }
        _ => {}
    }
    let directions = Directions {
        ingress: matches!(directions, "ingress" | "both"),
        egress: matches!(directions, "egress" | "both"),
    };
    PolicyHooks::open(&pins, cgroup, Path::new(OWN_NETNS))?.attach(directions)
}
