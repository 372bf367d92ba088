//! `cproxy trace`: each call that the programs translate, refuse or drop, as it happens.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::anyhow;
use clap::{Args, ValueEnum, error::ErrorKind};
use cproxy_core::{Protocol, ServiceName, sort_unique};
use cproxy_datapath::bpf::{Features, PinDir, TraceDestination, TraceFilter, TraceVerdict, excluded_cgroup};

use super::{
    options::{Format, OutputOptions, Places, check_process, parse_pid},
    output::{layout, print_error, print_or_end},
    wait::parse_time,
};
use crate::{
    diagnose::trace::{TraceRequest, trace},
    report::FrontendRow,
    run_dir::{RESPONSE_TIMEOUT, explain_silence, fetch_services},
    target::{Target, TargetPort},
};

/// Flags of `cproxy trace`.
#[derive(Args, Debug)]
pub(super) struct TraceOptions {
    /// Destinations: ADDRESS, ADDRESS:PORT, ADDRESS:PORT/udp or NAMESPACE/NAME of a Service; default: all
    #[arg(value_name = "DESTINATION")]
    targets: Vec<Target>,
    /// Only calls of this process
    #[arg(long, value_name = "PID", value_parser = parse_pid)]
    pid: Option<u32>,
    /// Only calls of processes in or below this cgroup2 directory
    #[arg(long, value_name = "DIR")]
    process_cgroup: Option<PathBuf>,
    /// Only these verdicts, separated by commas; default: all but `reversed`
    #[arg(long, value_name = "VERDICTS", value_enum, value_delimiter = ',')]
    verdict: Vec<VerdictName>,
    /// Only this protocol
    #[arg(long, value_name = "PROTOCOL", value_enum)]
    protocol: Option<ProtocolName>,
    /// Show connections, refusals and drops by Service instead of events, again each second
    #[arg(long, conflicts_with_all = ["targets", "pid", "process_cgroup", "verdict", "protocol", "count"])]
    summary: bool,
    /// End after this many events
    #[arg(long, value_name = "NUMBER", value_parser = parse_count)]
    count: Option<u64>,
    /// End after this time, such as 30s or 5m
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    duration: Option<Duration>,
    #[command(flatten)]
    output: OutputOptions,
    #[command(flatten)]
    places: Places,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum VerdictName {
    /// The call goes to a backend
    #[value(alias = "translated")]
    Forwarded,
    /// The call fails with ECONNREFUSED
    Refused,
    /// The call fails with EHOSTUNREACH
    Dropped,
    /// The call goes to the ClusterIP itself: its process or port is excluded
    #[value(alias = "excluded")]
    Direct,
    /// The caller sees the ClusterIP in place of the backend
    Reversed,
    /// A translated TCP socket was closed
    Closed,
    /// Network policy denies the call or what comes in, or would if it were enforced
    #[value(alias = "audited")]
    Denied,
}

impl VerdictName {
    /// The verdict of the programs that translate.
    fn verdict(self) -> Option<TraceVerdict> {
        Some(match self {
            Self::Forwarded => TraceVerdict::Forwarded,
            Self::Refused => TraceVerdict::Refused,
            Self::Dropped => TraceVerdict::Dropped,
            Self::Direct => TraceVerdict::Direct,
            Self::Reversed => TraceVerdict::Reversed,
            Self::Closed => TraceVerdict::Closed,
            Self::Denied => return None,
        })
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ProtocolName {
    Tcp,
    Udp,
}

impl ProtocolName {
    fn protocol(self) -> Protocol {
        match self {
            Self::Tcp => Protocol::Tcp,
            Self::Udp => Protocol::Udp,
        }
    }
}

fn parse_count(text: &str) -> Result<u64, String> {
    text.parse().ok().filter(|&count| count != 0).ok_or_else(|| "expected a number from 1".to_owned())
}

pub(super) fn run(options: &TraceOptions) -> anyhow::Result<()> {
    let (pins, features) = (PinDir::new(&options.places.pin.pin_dir), Features::probe());
    let request = TraceRequest {
        filter: filter(options, features)?,
        features,
        is_summary: options.summary,
        is_json: matches!(options.output.output, Format::Json),
        layout: layout(),
        count: options.count,
        duration: options.duration,
        run_dir: options.places.run.run_dir.clone(),
        print: print_or_end,
        warn: print_error,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(trace(&pins, &request));
    // The printer may wait for a reader that does not read.
    runtime.shutdown_background();
    result
}

fn filter(options: &TraceOptions, features: Features) -> anyhow::Result<TraceFilter> {
    check_pid(options.pid, features)?;
    options.pid.map_or(Ok(()), check_process)?;
    let mut destinations = Vec::new();
    for target in &options.targets {
        match target {
            Target::Service(name, port) => destinations.extend(frontends_of(name, *port, &options.places.run.run_dir)?),
            Target::Address(address) => destinations.push(TraceDestination::Address(*address)),
            Target::Frontend(frontend) => destinations.push(TraceDestination::Frontend(*frontend)),
        }
    }
    sort_unique(&mut destinations);
    check_protocols(options.protocol.map(ProtocolName::protocol), &destinations)?;
    if destinations.len() > TraceFilter::ADDRESSES_MAX {
        let (count, most) = (destinations.len(), TraceFilter::ADDRESSES_MAX);
        let message = format!("{count} addresses and ports to trace; at most {most} are possible: name fewer");
        return Err(clap::Error::raw(ErrorKind::TooManyValues, message).into());
    }
    let all = VerdictName::value_variants().iter().filter(|verdict| **verdict != VerdictName::Reversed);
    let verdicts = if options.verdict.is_empty() { all.copied().collect() } else { options.verdict.clone() };
    let cgroup = options.process_cgroup.as_deref().map(excluded_cgroup).transpose();
    Ok(TraceFilter {
        destinations,
        pid: options.pid,
        cgroup: cgroup.map_err(|error| anyhow!("--process-cgroup {error}"))?,
        protocol: options.protocol.map(ProtocolName::protocol),
        cgroup_dir: options.process_cgroup.clone(),
        denials: !options.summary && verdicts.contains(&VerdictName::Denied),
        verdicts: verdicts.into_iter().filter(|_| !options.summary).filter_map(VerdictName::verdict).collect(),
    })
}

/// Refuses a filter that would match no event.
fn check_pid(pid: Option<u32>, features: Features) -> anyhow::Result<()> {
    anyhow::ensure!(
        pid.is_none() || features.knows_process(),
        "--pid: this kernel does not tell the programs which process calls (Linux 6.1 does); use --process-cgroup"
    );
    Ok(())
}

/// Refuses a protocol that no destination has.
fn check_protocols(protocol: Option<Protocol>, destinations: &[TraceDestination]) -> clap::error::Result<()> {
    let is_possible = |destination: &TraceDestination| match destination {
        TraceDestination::Address(_) => true,
        TraceDestination::Frontend(frontend) => protocol.is_none_or(|protocol| protocol == frontend.protocol),
    };
    if destinations.is_empty() || destinations.iter().any(is_possible) {
        return Ok(());
    }
    let message = "--protocol: no DESTINATION has this protocol; one of UDP ends with /udp";
    Err(clap::Error::raw(ErrorKind::ArgumentConflict, message))
}

/// Frontends of a Service, which only the agent knows.
fn frontends_of(name: &ServiceName, port: Option<TargetPort>, run_dir: &Path) -> anyhow::Result<Vec<TraceDestination>> {
    let rows = fetch_services(run_dir, RESPONSE_TIMEOUT);
    let rows = rows.map_err(|error| anyhow!("{name}: {}", explain_silence(run_dir, &error)))?;
    let wanted = name.to_string();
    let is_wanted = |row: &&FrontendRow| row.service.as_deref() == Some(&*wanted);
    let found = rows.iter().filter(is_wanted).filter_map(FrontendRow::frontend);
    let found = found.filter(|frontend| port.is_none_or(|port| port.is_of(frontend)));
    let found: Vec<_> = found.map(TraceDestination::Frontend).collect();
    anyhow::ensure!(
        !found.is_empty(),
        "{name}: the agent serves no such Service, or not this port: cproxy get services"
    );
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_refused_where_the_kernel_does_not_tell_it() {
        let old = Features { errno_helper: false };
        assert!(check_pid(None, old).is_ok() && check_pid(Some(1), Features { errno_helper: true }).is_ok());
        let error = check_pid(Some(1), old).unwrap_err().to_string();
        assert!(error.starts_with("--pid: ") && error.ends_with("use --process-cgroup"), "{error}");
    }
}
