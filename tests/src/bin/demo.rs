//! The demonstration: a Service, its backends and its clients, all real, in a sandbox that is removed afterwards.
//!
//! Without arguments the agent follows a directory of manifests; with `--cluster` it follows an API server. Every
//! printed statement is checked first. If one does not hold, the demonstration says so and fails.

use std::{
    fmt::Display,
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant, SystemTime},
};

use cproxy_tests::{
    control_plane::ControlPlane,
    echo::Server,
    http,
    manifest::{self, Service, Slice},
    process::{self, Agent, Output, RunningAgent, cproxy, eventually},
    sandbox::{Placement, Sandbox},
    supervised,
};
use serde_json::{Value, json};

/// Prefix of the names of all objects of the demonstration.
const PREFIX: &str = "cproxy-demo";

/// The Service's addresses.
const VIP: &str = "10.96.0.10";
const VIP_V6: &str = "fd00:10:96::a";

/// The Service's port.
const VIP_PORT: u16 = 80;

/// The backends' port.
const BACKEND_PORT: u16 = 8080;

/// URL of the Service for curl.
const URL: &str = "http://10.96.0.10/";
const URL_V6: &str = "http://[fd00:10:96::a]/";

/// All backends.
const BACKENDS: [Backend; 3] = [
    Backend { name: "backend-1", v4: "10.244.0.1", v6: "fd00:10:244::1" },
    Backend { name: "backend-2", v4: "10.244.0.2", v6: "fd00:10:244::2" },
    Backend { name: "backend-3", v4: "10.244.0.3", v6: "fd00:10:244::3" },
];

/// Requests over IPv4 and over IPv6.
const REQUESTS: usize = 10;
const REQUESTS_V6: usize = 6;

/// Number of requests after which a backend without an answer counts as unreachable. By chance that happens once in
/// 10^17 times.
const REQUESTS_MAX: usize = 100;

/// curl's message where there is no route.
const NOWHERE: &str = "Network is unreachable";

/// curl's message where the Service has no backend.
const REFUSED: &str = "Connection refused";

/// curl's exit code if it could not connect.
const CURL_CANNOT_CONNECT: i32 = 7;

/// Limit on every wait, longer than any takes.
const PATIENCE: Duration = Duration::from_secs(10);

/// Width of the output.
const COLUMNS: usize = 105;

/// Indentation of commands and their output.
const INDENT: &str = "     ";

/// Result whose error is one sentence.
type Result<T = ()> = std::result::Result<T, String>;

fn main() -> ExitCode {
    let cluster = match std::env::args().skip(1).collect::<Vec<_>>().as_slice() {
        [] => false,
        [flag] if flag == "--cluster" => true,
        _ => {
            eprintln!("demo: the only argument is --cluster");
            return ExitCode::from(2);
        }
    };
    supervised::run(PREFIX, || demonstrate(cluster))
}

/// Runs the demonstration from the first line to the last.
fn demonstrate(cluster: bool) -> Result {
    check_machine()?;
    let outside = network_namespace()?;
    let sandbox = Sandbox::new(PREFIX);
    println!("Everything happens in a network namespace and a cgroup of its own. The flags that keep cproxy there");
    println!(
        "(--cgroup, --pin-dir, --run-dir) are left out of the commands, and {} of paths.",
        sandbox.dir().display()
    );
    let traces = [sandbox.cgroup_parent().to_owned(), sandbox.dir().to_owned()];
    introduce(&sandbox, cluster)?;
    drop(sandbox);
    let mounts = cproxy_mountinfo::list().map_err(|error| format!("cannot list mounts: {error}"))?;
    for trace in traces {
        let mounted = mounts.iter().any(|mount| mount.point.starts_with(&trace));
        ensure(!trace.exists() && !mounted, || format!("{} should be gone and is not", trace.display()))?;
    }
    ensure(network_namespace()? == outside, || "the sandbox's network namespace is still in use".to_owned())?;
    print_line("The sandbox's processes, cgroup, network namespace, mounts and files are removed: nothing is left.");
    Ok(())
}

/// Runs all steps.
fn introduce(sandbox: &Sandbox, cluster: bool) -> Result {
    let _servers = step_1_backends(sandbox)?;
    let (source, mut agent) = step_2_agent(sandbox, cluster)?;
    step_3_ask(sandbox)?;
    step_4_one_leaves(sandbox, &source)?;
    step_5_restart(sandbox, &source, &mut agent)?;
    step_6_last_leaves(sandbox, &source)?;
    step_7_clean_up(sandbox, &mut agent)
}

/// Starts the HTTP servers, and shows that the Service's address leads nowhere yet.
fn step_1_backends(sandbox: &Sandbox) -> Result<Vec<Server>> {
    step(1, "Three HTTP servers in a network namespace of their own, each of which answers with its name");
    sandbox.add_addresses(BACKENDS.iter().flat_map(|backend| [backend.v4, backend.v6]));
    let mut servers = Vec::new();
    for backend in &BACKENDS {
        for address in [backend.v4, backend.v6] {
            servers.push(http::serve(sandbox, (address, BACKEND_PORT), backend.name));
        }
    }
    let [first, _, last] = BACKENDS;
    let [v4, v6] = [format!("{} to {}", first.v4, last.v4), format!("{} to {}", first.v6, last.v6)];
    print_line(format!("{} to {} listen on {v4} and {v6}, port {BACKEND_PORT}.", first.name, last.name));
    print_line(format!("No route leads to {VIP}, which is to be the Service's address:"));
    let failure = expect_failure(sandbox, URL, NOWHERE)?;
    show_failure(URL, NOWHERE, &failure);
    Ok(servers)
}

/// Makes the Service and starts the agent.
fn step_2_agent<'s>(sandbox: &'s Sandbox, cluster: bool) -> Result<(Source<'s>, RunningAgent)> {
    let source = if cluster {
        step(2, "A Kubernetes control plane, the Service default/web, and cproxy");
        Source::ControlPlane(Box::new(start_control_plane(sandbox)?))
    } else {
        step(2, "A directory of manifests with the Service default/web, and cproxy");
        Source::Manifests(sandbox.manifest_dir())
    };
    source.put(&BACKENDS);
    print_line(source.done(&BACKENDS));
    let agent = start(sandbox, &source)?;
    follow(sandbox, &BACKENDS);
    show_table(sandbox)?;
    Ok((source, agent))
}

/// Starts etcd and kube-apiserver, and checks that the agent's user has no more rights than announced.
fn start_control_plane(sandbox: &Sandbox) -> Result<ControlPlane<'_>> {
    let started = Instant::now();
    let control_plane = ControlPlane::start(sandbox);
    print_line(format!("etcd and kube-apiserver are ready after {:.1} s.", started.elapsed().as_secs_f64()));
    for (resource, allowed) in [("services", true), ("endpointslices", true), ("pods", false), ("secrets", false)] {
        let output = control_plane.try_kubectl("cproxy", &["get", resource], "");
        let as_said = if allowed { output.code == 0 } else { output.stderr.contains("(Forbidden)") };
        ensure(as_said, || {
            format!("`kubectl get {resource}` as the agent's user: {}{}", output.stdout, output.stderr)
        })?;
    }
    print_line("cproxy's user may read Services and EndpointSlices; Pods and Secrets are forbidden.");
    Ok(control_plane)
}

/// Asks all three backends through both of the Service's addresses.
fn step_3_ask(sandbox: &Sandbox) -> Result {
    step(3, "Clients in the cgroup connect to the ClusterIP, and the kernel takes them to a backend");
    ask(sandbox, URL, REQUESTS, &BACKENDS)?;
    ask(sandbox, URL_V6, REQUESTS_V6, &BACKENDS)
}

/// Removes one backend.
fn step_4_one_leaves(sandbox: &Sandbox, source: &Source<'_>) -> Result {
    let [first, second, third] = BACKENDS;
    let rest = [first, second];
    step(4, format!("{} goes away", third.name));
    change(sandbox, source, &rest);
    show_table(sandbox)?;
    ask(sandbox, URL, REQUESTS, &rest)
}

/// Stops the agent, shows that clients notice nothing, removes another backend meanwhile, and starts the agent again.
fn step_5_restart(sandbox: &Sandbox, source: &Source<'_>, agent: &mut RunningAgent) -> Result {
    let [first, second, _] = BACKENDS;
    step(5, "cproxy ends (SIGTERM), and what is in the kernel stays");
    stop(agent)?;
    table_is(sandbox, &[first, second])?;
    ask(sandbox, URL, REQUESTS, &[first, second])?;
    source.put(&[first]);
    print_line(format!("{} leaves while no agent runs. cproxy is started again and catches up:", second.name));
    *agent = start(sandbox, source)?;
    follow(sandbox, &[first]);
    ask(sandbox, URL, REQUESTS, &[first])
}

/// Removes the last backend.
fn step_6_last_leaves(sandbox: &Sandbox, source: &Source<'_>) -> Result {
    step(6, "The last backend goes away: the Service is still there, and refuses");
    change(sandbox, source, &[]);
    show_table(sandbox)?;
    let failure = expect_failure(sandbox, URL, REFUSED)?;
    expect_failure(sandbox, URL_V6, REFUSED)?;
    show_failure(URL, REFUSED, &failure);
    print_line(format!("curl's exit code is {CURL_CANNOT_CONNECT}, here and for {URL_V6} too."));
    Ok(())
}

/// Removes the agent's programs and maps from the kernel.
fn step_7_clean_up(sandbox: &Sandbox, agent: &mut RunningAgent) -> Result {
    step(7, "cproxy ends, and what it has put into the kernel is removed");
    stop(agent)?;
    command("cproxy cleanup");
    let output = checked("cproxy cleanup", cproxy(sandbox, &["cleanup"]))?;
    let directory = format!("{}/", sandbox.dir().display());
    let lines = output.stdout.lines().chain(output.stderr.lines());
    lines.for_each(|line| print_indented(line.replace(&directory, "")));
    ensure(!sandbox.pin_dir().exists(), || format!("{} should be gone and is not", sandbox.pin_dir().display()))?;
    expect_failure(sandbox, URL, NOWHERE)?;
    print_line(format!("No route leads to {VIP}, as before."));
    Ok(())
}

/// One of the Service's backends.
#[derive(Clone, Copy, Debug)]
struct Backend {
    name: &'static str,
    v4: &'static str,
    v6: &'static str,
}

/// Source of the agent's Services.
enum Source<'s> {
    /// A directory of files.
    Manifests(PathBuf),
    /// An API server.
    ControlPlane(Box<ControlPlane<'s>>),
}

impl Source<'_> {
    /// Makes `backends` the Service's only ones.
    fn put(&self, backends: &[Backend]) {
        let service = Service::new("web").cluster_ips([VIP, VIP_V6]).tcp("http", VIP_PORT, BACKEND_PORT);
        let v4 = Slice::v4("web").tcp("http", BACKEND_PORT).ready(backends.iter().map(|backend| backend.v4));
        let v6 = Slice::v6("web").tcp("http", BACKEND_PORT).ready(backends.iter().map(|backend| backend.v6));
        let objects = [service.into(), v4.into(), v6.into()];
        match self {
            Self::Manifests(directory) => drop(manifest::write(directory, "web.json", objects)),
            Self::ControlPlane(control_plane) => control_plane.apply(objects),
        }
    }

    /// A sentence about the effect of [`Self::put`].
    fn done(&self, backends: &[Backend]) -> String {
        let names = backends.iter().map(|backend| backend.name).collect::<Vec<_>>().join(", ");
        let names = if names.is_empty() { "none" } else { &names };
        match self {
            Self::Manifests(_) => format!("Endpoints in manifests/web.json: {names}."),
            Self::ControlPlane(_) => format!("Endpoints applied with kubectl: {names}."),
        }
    }
}

/// Starts the agent and waits until it is ready.
fn start(sandbox: &Sandbox, source: &Source<'_>) -> Result<RunningAgent> {
    let agent = Agent::new(sandbox);
    let (agent, flags) = match source {
        Source::Manifests(directory) => {
            (agent.manifests(directory), format!("--manifests {}", relative(sandbox, directory)?))
        }
        Source::ControlPlane(control_plane) => {
            let file = control_plane.agent_kubeconfig();
            let flags = format!("--kubeconfig {}", relative(sandbox, &file)?);
            (agent.kubeconfig(file), flags)
        }
    };
    command(format!("cproxy run {flags} &"));
    let started = SystemTime::now();
    let agent = agent.start();
    // The time of the file itself, since the wait polls less and less often.
    let ready = fs::metadata(sandbox.run_dir().join("ready")).and_then(|file| file.modified());
    let ready = ready.map_err(|error| format!("cannot find the time when cproxy was ready: {error}"))?;
    print_indented(format!("ready after {}", milliseconds(ready.duration_since(started).unwrap_or_default())));
    Ok(agent)
}

/// Ends the agent as an init system would.
fn stop(agent: &mut RunningAgent) -> Result {
    let status = agent.stop();
    ensure(status.success(), || format!("cproxy did not end well after SIGTERM: {status}; its log: {}", agent.tail()))
}

/// Changes the Service's backends and waits until the kernel's table follows. The time shown starts at the end of the
/// change and includes the query of the table, so it is slightly too long.
fn change(sandbox: &Sandbox, source: &Source<'_>, backends: &[Backend]) {
    source.put(backends);
    let changed = Instant::now();
    follow(sandbox, backends);
    let followed = milliseconds(changed.elapsed());
    print_line(format!("{} The kernel's table follows within {followed}.", source.done(backends)));
}

/// Waits until the kernel's table forwards to `backends`.
fn follow(sandbox: &Sandbox, backends: &[Backend]) {
    eventually(PATIENCE, "the kernel's table is as it should be", || table_is(sandbox, backends));
}

/// Checks that the kernel's table forwards the Service to exactly `backends`, or refuses connections if there are none.
fn table_is(sandbox: &Sandbox, backends: &[Backend]) -> Result {
    let output = checked("cproxy get services", cproxy(sandbox, &["get", "services", "-o", "json"]))?;
    let table: Value = serde_json::from_str(&output.stdout)
        .map_err(|error| format!("`cproxy get services -o json` prints no JSON: {error}"))?;
    let v4 = backends.iter().map(|backend| backend.v4).collect::<Vec<_>>();
    let v6 = backends.iter().map(|backend| backend.v6).collect::<Vec<_>>();
    for (vip, addresses) in [(VIP, v4), (VIP_V6, v6)] {
        let action = if addresses.is_empty() { "refuse" } else { "forward" };
        let backends = addresses.iter().map(|address| json!({"address": address, "port": BACKEND_PORT}));
        let expected = json!([[VIP_PORT, "TCP", action, backends.collect::<Vec<_>>()]]);
        let rows = table.as_array().into_iter().flatten().filter(|row| field(row, "address") == vip);
        let found = rows.map(|row| ["port", "protocol", "action", "backends"].map(|name| field(row, name)));
        let found = json!(found.collect::<Vec<_>>());
        ensure(found == expected, || format!("the table should have {expected} for {vip} and has {found}"))?;
    }
    Ok(())
}

/// A field of a JSON object; null if it is missing.
fn field<'v>(object: &'v Value, name: &str) -> &'v Value {
    object.get(name).unwrap_or(&Value::Null)
}

/// Shows the kernel's table as `cproxy` prints it, with long lists of backends folded.
fn show_table(sandbox: &Sandbox) -> Result {
    command("cproxy get services");
    let output = checked("cproxy get services", cproxy(sandbox, &["get", "services"]))?;
    let column = output.stdout.lines().next().and_then(|header| header.find("BACKENDS")).unwrap_or_default();
    output.stdout.lines().flat_map(|line| fold(line, column)).for_each(print_indented);
    Ok(())
}

/// Cuts the list that starts at `column` so that no line is too long.
fn fold(line: &str, column: usize) -> Vec<String> {
    let (head, list) = line.split_at_checked(column).unwrap_or((line, ""));
    let mut lines = Vec::new();
    let mut current = head.to_owned();
    for (index, item) in list.split_inclusive(", ").enumerate() {
        if index > 0 && INDENT.len() + current.len() + item.trim_end().len() > COLUMNS {
            lines.push(current.trim_end().to_owned());
            current = " ".repeat(head.len());
        }
        current.push_str(item);
    }
    lines.push(current);
    lines
}

/// Sends at least `requests` requests to `url`, and more until each of `backends` has answered. No other server may
/// answer.
fn ask(sandbox: &Sandbox, url: &str, requests: usize, backends: &[Backend]) -> Result {
    command(format!("{}   # {requests} times", shown_curl("-sS", url)));
    let mut counts = backends.iter().map(|backend| (backend.name, 0_usize)).collect::<Vec<_>>();
    let mut total = 0;
    while total < requests || counts.iter().any(|(_, count)| *count == 0) {
        ensure(total < REQUESTS_MAX, || {
            format!("of {total} requests to {url}, one backend got none: {}", shares(&counts))
        })?;
        let output = curl(sandbox, url);
        ensure(output.code == 0, || format!("curl {url} exits with {}: {}", output.code, output.stderr.trim()))?;
        let answer = output.stdout.trim_end();
        let Some((_, count)) = counts.iter_mut().find(|(name, _)| *name == answer) else {
            return Err(format!("{url} was answered by {answer:?}, which is none of the Service's backends"));
        };
        *count += 1;
        total += 1;
    }
    let more = if total > requests { format!("   ({total} requests, until each had answered)") } else { String::new() };
    print_indented(format!("{}{more}", shares(&counts)));
    Ok(())
}

/// A text with the number of answers of each backend.
fn shares(counts: &[(&str, usize)]) -> String {
    counts.iter().map(|(name, count)| format!("{name}: {count}")).collect::<Vec<_>>().join("   ")
}

/// Requests `url` once, which must fail for `reason`, and returns curl's message.
fn expect_failure(sandbox: &Sandbox, url: &str, reason: &str) -> Result<String> {
    let output = curl(sandbox, url);
    let line = output.stderr.lines().find(|line| line.contains(reason));
    let (Some(line), CURL_CANNOT_CONNECT) = (line, output.code) else {
        let answer = format!("{}{}", output.stdout, output.stderr);
        return Err(format!("curl {url} should fail with \"{reason}\", but exits with {}: {answer}", output.code));
    };
    Ok(line.to_owned())
}

/// Shows the result of [`expect_failure`].
fn show_failure(url: &str, reason: &str, line: &str) {
    command(format!("{} 2>&1 | grep '{reason}'", shown_curl("-v", url)));
    print_indented(line);
}

/// Runs the real curl once in the agent's cgroup. The reason of a failure is on stderr.
fn curl(sandbox: &Sandbox, url: &str) -> Output {
    let mut command = Command::new("curl");
    // A user's .curlrc or proxies must not affect the request.
    command.args(["-q", "-sSv", "-g", "--noproxy", "*", "--max-time", "5", url]).env("LC_ALL", "C");
    process::run(sandbox, Placement::Hooked, command, "", PATIENCE)
}

/// The curl command as a user would type it.
fn shown_curl(flags: &str, url: &str) -> String {
    if url.contains('[') { format!("curl {flags} -g '{url}'") } else { format!("curl {flags} {url}") }
}

/// The output of a command that must have succeeded.
fn checked(what: &str, output: Output) -> Result<Output> {
    ensure(output.code == 0, || format!("`{what}` exits with {}: {}", output.code, output.stderr.trim()))?;
    Ok(output)
}

/// Checks the demonstration's requirements that the sandbox does not check.
fn check_machine() -> Result {
    ensure(rustix::process::geteuid().is_root(), || {
        "namespaces, cgroups and BPF need root: run this again as root, for example through sudo".to_owned()
    })?;
    let curl = Command::new("curl").arg("--version").stdin(Stdio::null()).output();
    curl.map(drop).map_err(|error| format!("cannot run `curl`: install it ({error})"))
}

/// Network namespace of this thread.
fn network_namespace() -> Result<PathBuf> {
    let link = "/proc/thread-self/ns/net";
    fs::read_link(link).map_err(|error| format!("cannot read {link}: mount /proc ({error})"))
}

/// A path below the sandbox's directory, without the directory.
fn relative(sandbox: &Sandbox, path: &Path) -> Result<String> {
    let below = path.strip_prefix(sandbox.dir()).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(below.display().to_string())
}

/// Fails with a sentence unless a condition holds.
fn ensure(so: bool, sentence: impl FnOnce() -> String) -> Result {
    if so { Ok(()) } else { Err(sentence()) }
}

/// A short time in milliseconds.
fn milliseconds(time: Duration) -> String {
    format!("{} ms", time.as_millis())
}

/// Prints the heading of a step, after an empty line.
fn step(number: u32, title: impl Display) {
    println!("\n{number}. {title}");
}

/// Prints a sentence within a step.
fn print_line(sentence: impl Display) {
    println!("   {sentence}");
}

/// Prints a command as a user would type it.
fn command(line: impl Display) {
    println!("   $ {line}");
}

/// Prints a line of a command's output.
fn print_indented(line: impl Display) {
    println!("{INDENT}{line}");
}
