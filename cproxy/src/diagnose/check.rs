//! Requirements on kernel, machine, network and API server, and whether each is met. Nothing is changed.

mod network;
mod policy;
mod receive;
mod requirement;

use std::{
    collections::BTreeMap,
    fmt::Display,
    io,
    path::{Path, PathBuf},
};

use cproxy_core::counted;
use cproxy_datapath::{
    bpf::{
        self, CGROUPS_MAX, Environment, Features, HookPrograms, KernelReader, MapType, Mount, OtherProgram, PinDir,
        Program, ROOT_CGROUP_ID, Scope,
    },
    sockets::{self, Abilities},
};
use cproxy_wire::{ClientError, configure, diagnose, probe_nameservers};

pub(crate) use self::requirement::{Requirement, lacking, summary, text};
use self::{
    network::DNS_TIME_MAX,
    requirement::{CheckResult, degraded, from_result, missing, ok, optional, required, unknown},
};
use crate::{
    agent::{generation_id, socket_setup},
    config::ObjectSource,
    manifests::{Files, ParseOptions},
    privileges::{Rights, can_filter_system_calls},
    report::{HealthReport, Names, SourceReport},
    run_dir::{
        self, ENDED, KILLED, Life, RESPONSE_TIMEOUT, explain_silence, failure, fetch_health, fetch_problems,
        fetch_services, fetch_source, life, remedy,
    },
};

/// Subject of a check.
pub(crate) struct CheckRequest<'a> {
    /// Reason why cproxy does nothing here, if it is disabled.
    pub(crate) disabled: Option<String>,
    /// Reason why `run` refuses the settings of the machine, if it does.
    pub(crate) settings_error: Option<String>,
    /// Variables that are named like settings and are none.
    pub(crate) unknown_variables: Vec<String>,
    pub(crate) source: ObjectSource,
    pub(crate) node_name: Option<String>,
    /// cgroup2 directory that `run` would attach to; `None`: the cgroup2 root.
    pub(crate) cgroup: Option<&'a Path>,
    pub(crate) pin_dir: &'a Path,
    pub(crate) run_dir: &'a Path,
}

/// Requirements on the machine, and those on network and API server.
pub(crate) fn requirements(request: &CheckRequest<'_>) -> anyhow::Result<(Vec<Requirement>, Vec<Requirement>)> {
    Ok((of_machine(request), of_network(request)?))
}

fn of_machine(request: &CheckRequest<'_>) -> Vec<Requirement> {
    let &CheckRequest { cgroup, pin_dir, run_dir, .. } = request;
    let cgroup = Environment::cgroup2(cgroup, run_dir);
    let capabilities = Environment::capabilities();
    let kernel = Kernel { is_accessible: capabilities.is_ok() };
    let mut all = Vec::from_iter(request.disabled.clone().map(|reason| optional("enabled", degraded(reason))));
    all.extend(request.settings_error.iter().map(|error| required("settings", missing(error))));
    all.extend(
        request
            .unknown_variables
            .iter()
            .map(|name| optional("settings", degraded(format!("the variable {name} is no setting and has no effect")))),
    );
    all.extend([
        required("kernel", from_result(Environment::kernel())),
        required("capabilities", from_result(capabilities.map(|()| "enough to load and attach programs"))),
        required("cgroup2", cgroup.as_ref().map_or_else(missing, |(at, scope)| in_scope(*scope, mount(at)))),
        required("bpffs", from_result(Environment::bpffs(pin_dir).as_ref().map(mount))),
        required("run_dir", from_result(Environment::run_dir(run_dir).map(|()| run_dir.display()))),
        required("cgroup_bpf", kernel.probe(hooks)),
    ]);
    all.extend(bpf::MAP_TYPES.map(|(name, of_type)| required(format!("map_{name}"), kernel.probe(|| map(of_type)))));
    all.extend(programs(kernel));
    all.push(optional("errno_helper", kernel.probe(errno_helper)));
    let pins = PinDir::new(pin_dir);
    all.extend(socket_requirements(&pins));
    all.push(optional("restore", restore()));
    let agent = AgentState::of(run_dir, &pins);
    all.push(optional("agent", agent.result(run_dir)));
    all.push(optional("confinement", confinement(run_dir, &agent)));
    // The agent puts programs back.
    all.extend(health_of_agent(run_dir, &agent));
    all.push(required("attached", kernel.probe(|| attached(&pins, cgroup.as_ref().ok()))));
    all.push(optional("other_programs", kernel.probe(|| other_programs(&pins, cgroup.as_ref().ok()))));
    let dir = cgroup.as_ref().ok().and_then(|(at, _)| if let Mount::Present(dir) = at { Some(&**dir) } else { None });
    all.extend(policy::policy(&pins, dir, run_dir));
    all.extend(receive::receive(&pins, run_dir));
    all.push(optional("source", source(run_dir, &agent)));
    all.push(optional("problems", problems(run_dir, &agent)));
    all
}

/// Lines about network and API server. Sockets of check to the API server are marked like those of the agent, and those
/// to nameservers are like those of applications.
fn of_network(request: &CheckRequest<'_>) -> anyhow::Result<Vec<Requirement>> {
    let pins = PinDir::new(request.pin_dir);
    let setup = socket_setup(&pins);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let node = request.node_name.as_deref();
    let root = root_of_agent(request.run_dir);
    let (findings, answers) = runtime.block_on(async {
        let answers = tokio::spawn(probe_nameservers(DNS_TIME_MAX));
        let findings = match &request.source {
            ObjectSource::ApiServer(server) => match configure(server).await {
                Err(ClientError::NoServiceAccount(_)) => Err(no_api_server(AgentState::of(request.run_dir, &pins))),
                _ => Ok(diagnose(server, node, setup.clone(), &root).await),
            },
            ObjectSource::Manifests(_) => Ok(Vec::new()),
        };
        (findings, answers.await.unwrap_or_default())
    });
    let services = fetch_services(request.run_dir, RESPONSE_TIMEOUT).unwrap_or_default();
    let names: Names = services.iter().cloned().collect();
    let table = KernelReader::read_table(&pins).ok().map(|mut table| {
        names.hide_canary(&mut table);
        table
    });
    let mut all = match findings {
        Ok(findings) => findings.into_iter().map(Requirement::from).collect(),
        Err(none) => vec![optional("api_server", none)],
    };
    if let ObjectSource::Manifests(paths) = &request.source {
        all.push(required("manifests", manifests(paths)));
    }
    all.extend(network::families(table.as_ref(), &setup));
    all.push(optional("dns", network::dns(&answers, table.as_ref(), &services, is_served(&pins))));
    Ok(all)
}

/// Settings that name no API server. Those of a running agent may be others.
fn no_api_server(agent: AgentState) -> CheckResult {
    if agent.lives() {
        return ok("none is known: pass --kubeconfig or --apiserver to check the way to one");
    }
    degraded("none is known, and `cproxy run` would not start: pass --kubeconfig, --apiserver or --manifests")
}

/// Files that `run` would follow.
fn manifests(paths: &[PathBuf]) -> CheckResult {
    let files = match Files::read(paths, ParseOptions::default()) {
        Ok(files) => files,
        Err(error) => return missing(error),
    };
    let problems: Vec<_> = files.problems().collect();
    match problems.as_slice() {
        [] => ok("all files can be read"),
        [one] => degraded(one),
        [first, more @ ..] => degraded(format!("{first}; and {} more: see cproxy resolve", more.len())),
    }
}

/// Root directory of a running agent, which has a resolver of its own: that of a pod is usually a ClusterIP. This
/// process's without an agent, or where its root cannot be entered.
fn root_of_agent(run_dir: &Path) -> PathBuf {
    let root = run_dir::agent(run_dir).map(|agent| PathBuf::from(format!("/proc/{}/root", agent.as_raw_nonzero())));
    root.ok().filter(|root| root.read_dir().is_ok()).unwrap_or_else(|| "/".into())
}

/// Whether the programs, if there are any, run for this process.
fn is_served(pins: &PinDir) -> bool {
    let mut ids = bpf::attached(pins).into_iter().filter_map(|(_, id)| id.ok());
    let Some(id) = ids.find(|id| *id != 0) else { return true };
    id == ROOT_CGROUP_ID || bpf::ProcessCgroup::of(None).is_ok_and(|own| own.ids.contains(&id))
}

/// Programs of others at our hooks, in the cgroup of the programs and in those below it.
fn other_programs(pins: &PinDir, cgroup: Option<&(Mount, Scope)>) -> CheckResult {
    let Some((Mount::Present(dir), _)) = cgroup else { return ok("none: cgroup2 is not mounted yet") };
    let HookPrograms { others, without_ours, cgroups, is_cut } = bpf::hook_programs(pins, dir, CGROUPS_MAX);
    if let Some(lost) = without_ours {
        return degraded(format!(
            "{} is below the programs' cgroup, and not all of them run there: start `cproxy run` again",
            lost.display()
        ));
    }
    if others.is_empty() {
        let seen = counted(cgroups as u64, "cgroup", "cgroups");
        return ok(format!("none in {}{seen}", if is_cut { "the first " } else { "" }));
    }
    degraded(named(&others))
}

/// Maximum number of other cproxys that the line names.
const OTHERS_NAMED_MAX: usize = 3;

/// The programs of others. Those of another cproxy, which have the names of ours, are counted.
fn named(others: &[OtherProgram]) -> String {
    let (mut cproxys, mut names) = (BTreeMap::<_, u64>::new(), Vec::new());
    for other in others {
        match &other.name {
            Some(name) if name.starts_with("cproxy_") => *cproxys.entry(&other.cgroup).or_default() += 1,
            _ => names.push(format!("{other} in {}", other.cgroup.display())),
        }
    }
    let another = |(cgroup, count): (&PathBuf, _)| {
        format!("another cproxy is attached to {} ({})", cgroup.display(), counted(count, "program", "programs"))
    };
    let more = cproxys.len().saturating_sub(OTHERS_NAMED_MAX);
    let mut parts: Vec<_> = cproxys.into_iter().take(OTHERS_NAMED_MAX).map(another).collect();
    if more != 0 {
        parts.push(format!("and {more} more"));
    }
    if !names.is_empty() {
        let names = names.join("; ");
        parts.push(format!("they run beside cproxy, and each can deny a call or change its address: {names}"));
    }
    parts.join("; ")
}

/// Requirements for closing stale sockets, which are otherwise left open and at best counted, and for freeing places.
fn socket_requirements(pins: &PinDir) -> [Requirement; 5] {
    let Abilities { udp_diag, tcp_diag, destroy, storages, places } = sockets::probe(Some(pins));
    let left = "stale ones are counted and left open";
    let refused = "stale ones are counted and left open; UDP sockets that a Service without endpoints refused stay \
                   refused until they connect anew";
    [
        ability("udp_sockets", udp_diag, "can be listed", refused),
        ability("tcp_sockets", tcp_diag, "can be listed", left),
        ability("socket_destroy", destroy, "stale sockets can be closed", refused),
        ability(
            "socket_state",
            storages,
            "can be read for all processes",
            "stale sockets are neither closed nor counted",
        ),
        ability(
            "tcp_places",
            places,
            "those of closed MPTCP sockets are freed, and more are added while there are many connections",
            "closed MPTCP sockets keep theirs, and none are added",
        ),
    ]
}

fn ability<E: Display>(name: &str, can: Result<(), E>, detail: &str, loss: &str) -> Requirement {
    optional(name, can.map_or_else(|reason| degraded(format!("{reason}; {loss}")), |()| ok(detail)))
}

/// Signs by which the agent notices that the VM was restored from a snapshot.
fn restore() -> CheckResult {
    match generation_id() {
        None => ok("noticed by steps of the clock, and by a changed network; there is no VM generation id"),
        Some(Ok(())) => ok("noticed by the VM generation id and by steps of the clock"),
        Some(Err(error)) => {
            degraded(format!("the VM generation id changes unseen: /dev/kmsg: {error}; CAP_SYSLOG gives access"))
        }
    }
}

/// Rights of a running agent; without one, whether the kernel lets it limit them.
fn confinement(run_dir: &Path, state: &AgentState) -> CheckResult {
    let agent = run_dir::agent(run_dir).map(|agent| (agent, Rights::of(agent)));
    match agent {
        Err(error) if state.lives() => unknown(explain_silence(run_dir, &error)),
        Ok((_, Ok(rights))) if rights.are_confined() => ok(format!("the agent keeps {rights}")),
        Ok((_, Ok(rights))) => degraded(format!("the agent keeps {rights}; its log says why")),
        Ok((agent, Err(error))) => {
            degraded(format!("the agent cannot be looked at: /proc/{}: {error}", agent.as_raw_nonzero()))
        }
        Err(_) if can_filter_system_calls() => ok("the kernel can filter an agent's system calls"),
        Err(_) => degraded("the kernel cannot filter an agent's system calls: build it with CONFIG_SECCOMP_FILTER"),
    }
}

const NO_ACCESS: &str = "cannot be tried without the capabilities: run this as root";

/// Access to `bpf(2)`, which needs privileges.
#[derive(Clone, Copy)]
struct Kernel {
    is_accessible: bool,
}

impl Kernel {
    fn probe(self, check: impl FnOnce() -> CheckResult) -> CheckResult {
        if self.is_accessible { check() } else { unknown(NO_ACCESS) }
    }
}

fn mount(mount: &Mount) -> String {
    match mount {
        Mount::Present(dir) => dir.display().to_string(),
        Mount::Possible(dir) => format!("not mounted yet; `cproxy run` mounts it at {}", dir.display()),
    }
}

/// The place of the programs: `degraded` where not all processes are served and `--cgroup` does not ask for that.
fn in_scope(scope: Scope, place: String) -> CheckResult {
    if let Some(lost) = Environment::lost_sockets(scope) {
        return degraded(format!("{place}, {}; {lost}", scope.caveat().unwrap_or_default()));
    }
    match (scope, scope.caveat()) {
        (Scope::Confined, Some(caveat)) => degraded(format!("{place}, {caveat}")),
        (_, Some(caveat)) => ok(format!("{place}, {caveat}")),
        (_, None) => ok(place),
    }
}

fn hooks() -> CheckResult {
    let advice = |error| {
        format!(
            "the kernel refuses the smallest program: {error}; build it with CONFIG_BPF_SYSCALL and CONFIG_CGROUP_BPF, \
             and run cproxy outside user namespaces and seccomp filters"
        )
    };
    from_result(bpf::has_hooks().map(|()| "the kernel has socket address hooks").map_err(advice))
}

fn map(map_type: MapType) -> CheckResult {
    match bpf::has_map_type(map_type) {
        Ok(true) => ok("can be made"),
        Ok(false) => {
            missing("the kernel does not have this type of map; build it with CONFIG_BPF_SYSCALL and CONFIG_NET")
        }
        Err(error) => missing(format!("cannot be tried: {error}")),
    }
}

/// The programs, loaded together because they share their maps.
fn programs(kernel: Kernel) -> Vec<Requirement> {
    let all = |result: CheckResult| Program::ALL.map(|program| required(program_name(program), result.clone())).into();
    if !kernel.is_accessible {
        return all(unknown(NO_ACCESS));
    }
    let verified = |count| format!("loads, {count} instructions verified");
    let one = |(program, count): (_, Result<u32, _>)| required(program_name(program), from_result(count.map(verified)));
    match bpf::try_load(Features::probe(), bpf::ProgramSet::Plain) {
        Ok(programs) => programs.into_iter().map(one).collect(),
        Err(error) => all(missing(error)),
    }
}

fn program_name(program: Program) -> String {
    format!("program_{}", program.link)
}

fn errno_helper() -> CheckResult {
    match bpf::has_errno_helper() {
        Ok(true) => ok("refused calls fail with ECONNREFUSED or EHOSTUNREACH"),
        Ok(false) => degraded(
            "refused calls fail with EPERM, not with ECONNREFUSED or EHOSTUNREACH; Linux 6.1 and newer let these hooks \
             call bpf_set_retval",
        ),
        Err(error) => missing(format!("cannot be tried: {error}")),
    }
}

/// Current cgroup of the hooks, if `cproxy run` attached them before.
fn attached(pins: &PinDir, cgroup: Option<&(Mount, Scope)>) -> CheckResult {
    match pins.check_installed() {
        Err(error) if error.is_absence() => return ok("not installed"),
        Err(error) => return missing(error),
        Ok(()) => {}
    }
    let mut cgroup_id = 0;
    for (program, id) in bpf::attached(pins) {
        match id {
            Ok(0) => return missing(format!("{}: its cgroup is gone; start `cproxy run` again", program.link)),
            Ok(id) => cgroup_id = id,
            Err(error) => return missing(format!("{}: {error}; start `cproxy run` again", program.link)),
        }
    }
    match cgroup {
        Some((Mount::Present(dir), scope)) if is_cgroup(dir, cgroup_id) => {
            in_scope(*scope, format!("to {}", dir.display()))
        }
        _ if cgroup_id == ROOT_CGROUP_ID => ok("to the cgroup root"),
        _ => degraded(format!(
            "to another cgroup, with id {cgroup_id}: only processes in and below it are served; \
             `find /sys/fs/cgroup -inum {cgroup_id}` names it"
        )),
    }
}

const ANOTHER_VERSION: &str = "the running agent is of another version and does not say";

/// Source that a running agent follows.
fn source(run_dir: &Path, state: &AgentState) -> CheckResult {
    let report = |report: SourceReport| if report.is_good() { ok(report) } else { degraded(report) };
    fetch_source(run_dir).map_or_else(|error| no_report(run_dir, state, &error), report)
}

/// Objects and files with a mistake.
fn problems(run_dir: &Path, state: &AgentState) -> CheckResult {
    match fetch_problems(run_dir).as_deref() {
        Err(error) => no_report(run_dir, state, error),
        Ok([]) => ok("none of objects and files"),
        Ok([one]) => degraded(format!("{}: {}", one.object, one.problem)),
        Ok([first, more @ ..]) => {
            let problem = format!("{}: {}", first.object, first.problem);
            degraded(format!("{problem}; and {} more: see cproxy get problems", more.len()))
        }
    }
}

/// State of the agent, as any user may learn it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AgentState {
    /// It lives, as far as this user may learn that.
    Lives(Life),
    /// None lives, and the programs of one are in force.
    HasEnded(Life),
    /// None has run, or its programs were removed.
    NotThere,
}

impl AgentState {
    fn of(run_dir: &Path, pins: &PinDir) -> Self {
        match life(run_dir) {
            life @ (Life::Alive | Life::Unknown) => Self::Lives(life),
            life @ Life::Killed => Self::HasEnded(life),
            Life::None if pins.check_installed().is_err_and(|error| error.is_absence()) => Self::NotThere,
            life @ Life::None => Self::HasEnded(life),
        }
    }

    fn lives(self) -> bool {
        matches!(self, Self::Lives(_))
    }

    fn result(self, run_dir: &Path) -> CheckResult {
        match self {
            Self::Lives(Life::Alive)
                if let Err(error) = fetch_source(run_dir)
                    && error.kind() == io::ErrorKind::TimedOut =>
            {
                degraded(explain_silence(run_dir, &error))
            }
            Self::Lives(Life::Unknown) => {
                unknown("only root can learn whether it runs: its file `alive` is not its socket")
            }
            Self::Lives(_) => ok("runs"),
            Self::HasEnded(Life::Killed) => degraded(format!("{KILLED}: start cproxy run")),
            Self::HasEnded(_) => degraded(format!("{ENDED}{}", remedy(run_dir))),
            Self::NotThere => match failure(run_dir) {
                Some(reason) => degraded(format!("the last one has ended: {reason}")),
                None => ok("none has been started"),
            },
        }
    }
}

/// Effect of the programs, which a running agent has just tried, and its background tasks.
fn health_of_agent(run_dir: &Path, state: &AgentState) -> [Requirement; 2] {
    let (hooks, tasks) = match fetch_health(run_dir) {
        Ok(report) => (hooks_of_agent(&report), tasks_of_agent(&report)),
        Err(error) => (no_report(run_dir, state, &error), no_report(run_dir, state, &error)),
    };
    [required("hooks", hooks), optional("tasks", tasks)]
}

fn hooks_of_agent(report: &HealthReport) -> CheckResult {
    match (report.is_good(), report.is_whole()) {
        (true, true) => ok(report),
        (true, false) => degraded(report),
        (false, _) => missing(report),
    }
}

fn tasks_of_agent(report: &HealthReport) -> CheckResult {
    match report.ended_tasks.as_slice() {
        [] => ok("all background tasks of the agent run"),
        names => degraded(format!("tasks of the agent have ended: {}; start it again", names.join(", "))),
    }
}

/// Result where the agent does not report.
fn no_report(run_dir: &Path, state: &AgentState, error: &io::Error) -> CheckResult {
    match (error.kind(), state) {
        (io::ErrorKind::InvalidData, _) => degraded(ANOTHER_VERSION),
        (_, AgentState::NotThere) => ok("no agent has been started"),
        (_, AgentState::HasEnded(_)) => degraded("no agent runs, which would say"),
        (io::ErrorKind::TimedOut, AgentState::Lives(_)) => unknown("only the agent knows, and it does not answer"),
        (_, AgentState::Lives(_)) => unknown(explain_silence(run_dir, error)),
    }
}

fn is_cgroup(dir: &Path, id: u64) -> bool {
    bpf::cgroup_id(dir).is_ok_and(|its| its == id)
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        io::{Read, Write},
        os::unix::net::UnixListener,
        thread,
    };

    use super::*;

    #[test]
    fn tasks_that_have_ended_are_named() {
        // As an earlier agent reports.
        let mut report =
            HealthReport::read(&serde_json::json!({"differences": [], "canary": "reached", "repairs": 0})).unwrap();
        assert_eq!(tasks_of_agent(&report), ok("all background tasks of the agent run"));
        report.ended_tasks = vec!["reload".to_owned(), "source".to_owned()];
        assert_eq!(tasks_of_agent(&report), degraded("tasks of the agent have ended: reload, source; start it again"));
    }

    #[test]
    fn the_source_is_that_of_a_running_agent_of_any_version() {
        let dir = std::env::temp_dir().join(format!("cproxy-source-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let source = |dir: &Path| source(dir, &AgentState::Lives(Life::Alive));
        let listener = UnixListener::bind(dir.join("cproxy.sock")).unwrap();
        let follows = |choice, seconds| {
            let server = serde_json::json!({
                "server": "https://api/", "choice": choice, "silent_seconds": seconds, "view": "all"
            });
            serde_json::json!({"api_server": server}).to_string()
        };
        for (answer, expected) in [
            (follows(1, 5), ok("follows https://api/ (its 1st choice), last confirmed 5 s ago, view all")),
            (follows(2, 5), degraded("follows https://api/ (its 2nd choice), last confirmed 5 s ago, view all")),
            (r#"{"manifests":["a"]}"#.to_owned(), ok("manifests a")),
            ("error: the requests are: a, b\n".to_owned(), degraded(ANOTHER_VERSION)),
            (String::new(), degraded(ANOTHER_VERSION)),
        ] {
            let found = thread::scope(|scope| {
                scope.spawn(|| {
                    let (mut stream, _) = listener.accept().unwrap();
                    stream.read_exact(&mut [0; 7]).unwrap();
                    stream.write_all(answer.as_bytes()).unwrap();
                });
                source(&dir)
            });
            assert_eq!(found, expected, "{answer}");
        }
        fs::remove_dir_all(&dir).unwrap();
    }
}
