//! State of cproxy on this machine, on one screen.

use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use cproxy_datapath::bpf::{PinDir, PolicyReader, read_counters};
use serde::Serialize;

use crate::{
    report::{Colour, Screen, one_line, time},
    run_dir::{
        self, ENDED, KILLED, Life, RESPONSE_TIMEOUT, explain_silence, fetch_gauges, fetch_health, fetch_policy,
        fetch_problems, fetch_source, life, ready_seconds, remedy, stopped_agent,
    },
};

/// Time over which calls are counted.
const RATE_TIME: Duration = Duration::from_secs(1);

/// Columns of a name.
const NAME_COLUMNS: usize = 12;

/// State of cproxy in the output of `cproxy status`. A part that could not be had is null.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct StatusRow {
    /// Version of this program.
    version: String,
    /// Whether an agent runs and all is well, as far as that is known.
    ok: bool,
    /// The agent: `ready`, `starting`, `stopped`, `killed` or `none`.
    agent: &'static str,
    /// Process of the agent.
    pid: Option<i32>,
    /// Seconds since the table is complete.
    ready_seconds: Option<u64>,
    /// Reason why the agent does not say more.
    silence: Option<String>,
    /// The source that the agent follows.
    source: Option<String>,
    /// Effect of the programs.
    programs: Option<String>,
    /// Network policy of the pod, if the agent enforces it, or one of an earlier agent is in force.
    policy: Option<String>,
    /// Services that the agent knows.
    services: Option<u64>,
    /// Entries of the table for frontends and ClusterIPs.
    frontends: Option<u64>,
    /// Entries of the table for backends.
    backends: Option<u64>,
    /// Objects and files with a mistake.
    problems: Option<u64>,
    /// Seconds since the backends of a Service have changed.
    last_change_seconds: Option<u64>,
    /// Calls a second.
    calls_per_second: Option<Calls>,
    /// Whether no agent is to run here, which `silence` says then.
    #[serde(skip)]
    is_disabled: bool,
    /// Reason of the last agent's end, or the remedy.
    #[serde(skip)]
    remedy: String,
    /// Whether the programs and their table are installed.
    #[serde(skip)]
    has_table: bool,
    /// States of the parts, for colours.
    #[serde(skip)]
    is_good: [bool; 2],
    #[serde(skip)]
    policy_is_good: bool,
}

/// Calls a second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
struct Calls {
    /// Calls that got a backend.
    connections: f64,
    /// Calls that failed with ECONNREFUSED.
    refusals: f64,
    /// Calls that failed with EHOSTUNREACH.
    drops: f64,
}

/// Asks kernel and agent, which takes a second. `disabled` is the reason why no agent is to run here, if there is one.
pub(crate) fn status(pin_dir: &Path, run_dir: &Path, disabled: Option<String>) -> StatusRow {
    let pins = PinDir::new(pin_dir);
    let has_table = !pins.check_installed().is_err_and(|error| error.is_absence());
    let calls_per_second = calls(&pins);
    let life = life(run_dir);
    let gauges = fetch_gauges(run_dir, RESPONSE_TIMEOUT);
    let silence = gauges.as_ref().err().map(|error| explain_silence(run_dir, error));
    let gauge = |name: &str| gauges.as_ref().ok().and_then(|gauges| gauges.get(name).copied());
    let (source, health) = (fetch_source(run_dir).ok(), fetch_health(run_dir).ok());
    let is_alive = matches!(life, Life::Alive | Life::Unknown);
    let ready_seconds = ready_seconds(run_dir).filter(|_| is_alive);
    let agent = match (life, ready_seconds) {
        (Life::Alive | Life::Unknown, _) if stopped_agent(run_dir).is_some() => "stopped",
        (Life::Alive | Life::Unknown, Some(_)) => "ready",
        (Life::Alive | Life::Unknown, None) => "starting",
        (Life::Killed, _) => "killed",
        (Life::None, _) => "none",
    };
    let disabled = disabled.filter(|_| agent == "none");
    let is_good = [source.as_ref().is_some_and(|of| of.is_good()), health.as_ref().is_some_and(|of| of.is_good())];
    let policy = fetch_policy(run_dir);
    let left = match (&policy, agent) {
        (Ok(None), _) => Some("this agent does not follow it (--policy off)"),
        (Err(_), "none" | "killed") => Some("no agent follows it"),
        _ => None,
    };
    let left = left.filter(|_| PolicyReader::isolating(&pins).is_some());
    let left = left
        .map(|why| format!("one of an earlier agent is in force, and {why}; `cproxy cleanup --policy-too` removes it"));
    let policy = policy.ok().flatten();
    let policy_is_good = left.is_none() && policy.as_ref().is_none_or(|policy| policy.missing.is_none());
    let problems = fetch_problems(run_dir).ok().map(|problems| problems.len() as u64);
    StatusRow {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ok: agent == "ready" && is_good == [true; 2] && policy_is_good && problems == Some(0),
        agent,
        pid: run_dir::agent(run_dir).ok().map(|pid| pid.as_raw_nonzero().get()),
        ready_seconds,
        is_disabled: disabled.is_some(),
        remedy: remedy(run_dir),
        silence: disabled.or(silence),
        source: source.map(|source| source.to_string()),
        programs: health.map(|health| health.to_string()),
        policy: left.or_else(|| policy.map(|policy| policy.line())),
        services: gauge("services"),
        frontends: gauge("frontends"),
        backends: gauge("backends"),
        problems,
        last_change_seconds: gauge("last_change_seconds"),
        calls_per_second,
        has_table,
        is_good,
        policy_is_good,
    }
}

fn calls(pins: &PinDir) -> Option<Calls> {
    let read = || {
        let counters = read_counters(pins).ok()?;
        let of = |name: &str| counters.iter().find(|(known, _)| *known == name).map_or(0, |(_, count)| *count);
        Some(["forwarded", "refused", "dropped"].map(of))
    };
    let (start, before) = (Instant::now(), read()?);
    thread::sleep(RATE_TIME);
    let (after, seconds) = (read()?, start.elapsed().as_secs_f64());
    let rate = |index: usize| {
        let [before, after] = [&before, &after].map(|counts| counts.get(index).copied().unwrap_or_default());
        let tenths = (after.saturating_sub(before) as f64 / seconds * 10.0).round();
        tenths / 10.0
    };
    Some(Calls { connections: rate(0), refusals: rate(1), drops: rate(2) })
}

impl StatusRow {
    /// Whether an agent is ready and all is well.
    pub(crate) fn is_ok(&self) -> bool {
        self.ok
    }

    /// The screen.
    pub(crate) fn text(&self, screen: &Screen) -> String {
        let number = |number: Option<u64>| number.map_or_else(|| "-".to_owned(), |number| number.to_string());
        let [source_is_good, programs_are_good] = self.is_good;
        let colour = |is_good| if is_good { Colour::Green } else { Colour::Yellow };
        let mut lines = vec![("version", self.version.clone(), None)];
        let pid = self.pid.map_or_else(String::new, |pid| format!("process {pid}, "));
        let agent = match (self.agent, self.ready_seconds) {
            ("ready", Some(seconds)) => (format!("{pid}ready for {}", time(seconds)), Colour::Green),
            ("none", _) if self.is_disabled => (self.silence.clone().unwrap_or_default(), Colour::Yellow),
            ("none", _) if !self.has_table => (format!("none runs, and there is no table{}", self.remedy), Colour::Red),
            ("killed", _) => (format!("{KILLED}: start cproxy run"), Colour::Red),
            ("none", _) => (format!("{ENDED}{}", self.remedy), Colour::Red),
            ("stopped", _) => (self.silence.clone().unwrap_or_default(), Colour::Red),
            (state, _) => (format!("{pid}{state}: cproxy wait says what is missing"), Colour::Yellow),
        };
        lines.push(("agent", agent.0, Some(agent.1)));
        if let (Some(silence), "ready" | "starting") = (&self.silence, self.agent) {
            lines.push(("", silence.clone(), Some(Colour::Yellow)));
        }
        lines.extend(self.source.clone().map(|source| ("source", source, Some(colour(source_is_good)))));
        lines.extend(self.programs.clone().map(|programs| ("programs", programs, Some(colour(programs_are_good)))));
        lines.extend(self.policy.clone().map(|policy| ("policy", policy, Some(colour(self.policy_is_good)))));
        if self.silence.is_none() {
            let [frontends, backends] = [self.frontends, self.backends].map(number);
            let table = format!("{frontends} entries for frontends, {backends} for backends");
            lines.push(("services", format!("{}; {table}", number(self.services)), None));
            let changed = self.last_change_seconds.map_or_else(|| "none yet".to_owned(), |at| time(at) + " ago");
            lines.push(("last change", changed, None));
            let problems = match self.problems {
                Some(0) => ("none".to_owned(), Colour::Green),
                problems => (format!("{} (cproxy get problems)", number(problems)), Colour::Yellow),
            };
            lines.push(("problems", problems.0, Some(problems.1)));
        }
        let calls = self.calls_per_second.map(|Calls { connections, refusals, drops }| {
            format!("{connections} connections, {refusals} refusals, {drops} drops a second")
        });
        let unread = if self.has_table { "cannot be read: run this as root" } else { "none are translated" };
        lines.push(("calls", calls.unwrap_or_else(|| unread.to_owned()), None));
        let line = |(name, text, colour): &(&str, String, Option<Colour>)| {
            let name = format!("{name:NAME_COLUMNS$}");
            let name = colour.map_or_else(|| name.clone(), |colour| screen.painted(&name, colour));
            format!("{name}{}\n", screen.hanging(NAME_COLUMNS, &one_line(text)))
        };
        lines.iter().map(line).collect()
    }
}
