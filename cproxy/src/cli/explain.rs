//! `cproxy explain`: what a call would get now, and why.

use std::{io, net::IpAddr, path::Path, process::ExitCode};

use clap::{Args, error::ErrorKind};
use cproxy_datapath::bpf::{PinDir, PinError};

use super::{
    exit_codes::NOT_ANSWERED,
    options::{Format, OutputOptions, Places, check_process, parse_pid},
    output::{print, print_error, screen},
    usage_error::shorten,
};
use crate::{
    config::Switch,
    diagnose::explain::{gather, ingress, json, receive, text},
    report::pretty_json,
    target::{Target, TargetError},
};

/// Flags of `cproxy explain`.
#[derive(Args, Debug)]
pub(super) struct ExplainOptions {
    /// Address or Service: 10.96.0.10, 10.96.0.10:53/udp, default/web, web.default.svc.cluster.local
    #[arg(value_name = "DESTINATION", required_unless_present = "to")]
    destination: Option<String>,
    /// Port, if the destination has none: 80, 53/udp
    #[arg(value_name = "PORT")]
    port: Option<String>,
    /// Process that would call; default: any that cproxy serves
    #[arg(long, value_name = "PID", value_parser = parse_pid)]
    pid: Option<u32>,
    /// Peer that calls this pod: says whether the pod's network policy allows that. DESTINATION is an own address and
    /// PORT, such as 10.244.1.2:8080
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["pid", "probe"])]
    from: Option<IpAddr>,
    /// Address and port of a load balancer that a client calls, in place of DESTINATION: says whether this pod receives
    /// it, and which socket gets it. With --from, for that client
    #[arg(long, value_name = "ADDRESS:PORT", conflicts_with_all = ["destination", "pid", "probe"])]
    to: Option<String>,
    /// Also call the backends, without translation: connect by TCP, send an empty datagram by UDP
    #[arg(long)]
    probe: bool,
    #[command(flatten)]
    output: OutputOptions,
    #[command(flatten)]
    pub(super) switch: Switch,
    #[command(flatten)]
    places: Places,
}

/// Exit codes: 0 if all calls get where they should, 1 if not, 4 if that cannot be said.
pub(super) fn run(options: ExplainOptions) -> anyhow::Result<ExitCode> {
    let ExplainOptions { destination, port, pid, from, to, probe, output, switch, places } = options;
    let Places { pin, run } = places;
    let is_from_outside = to.is_some();
    let destination = destination.or(to).unwrap_or_default();
    let target = match port {
        Some(port) => Target::with_port(&destination, &port),
        None => destination.parse(),
    };
    let target = target.map_err(|error| invalid_destination(&destination, &error))?;
    pid.map_or(Ok(()), check_process)?;
    let pins = PinDir::new(&pin.pin_dir);
    if let Err(PinError::Io(path, error)) = pins.check_installed()
        && error.kind() == io::ErrorKind::PermissionDenied
    {
        let path = path.display();
        print_error(&format_args!(
            "{path}: {error}; run this as root, with --pid for the calls of another user's process"
        ));
        return Ok(ExitCode::from(NOT_ANSWERED));
    }
    if is_from_outside {
        return run_receive(from, &target, output.output, &pins, &run.run_dir);
    }
    if let Some(from) = from {
        return run_ingress(from, &target, output.output, &pins, &run.run_dir);
    }
    let mut facts = gather(target, pid, probe, &pins, &run.run_dir);
    if let (Err(kernel), Some(reason)) = (&mut facts.kernel, switch.disabled()) {
        *kernel = reason;
    }
    let (text, ok) = match output.output {
        Format::Table => text(&facts, &screen()),
        Format::Json => {
            let (mut json, ok) = json(&facts)?;
            json.push('\n');
            (json, ok)
        }
    };
    print(&text)?;
    Ok(match ok {
        Some(true) => ExitCode::SUCCESS,
        Some(false) => ExitCode::FAILURE,
        None => ExitCode::from(NOT_ANSWERED),
    })
}

/// Explains a call of a peer to this pod. Exit codes: 0 allowed, 1 denied, 4 if that cannot be said.
fn run_ingress(
    from: IpAddr,
    target: &Target,
    output: Format,
    pins: &PinDir,
    run_dir: &Path,
) -> anyhow::Result<ExitCode> {
    let not_answered = |error: &dyn std::fmt::Display| {
        print_error(error);
        Ok(ExitCode::from(NOT_ANSWERED))
    };
    let Target::Frontend(to) = target else {
        return not_answered(&format_args!(
            "--from needs an own address and port, such as 10.244.1.2:8080, not {target}"
        ));
    };
    let answer = match ingress(from, *to, pins, run_dir) {
        Some(Ok(answer)) => answer,
        Some(Err(error)) => return not_answered(&error),
        None => return not_answered(&"no network policy is enforced here: `cproxy run --policy` does that"),
    };
    match output {
        Format::Table => print(&answer.line())?,
        Format::Json => print(&format!("{}\n", pretty_json(&answer)?))?,
    }
    Ok(if answer.is_allowed() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Explains a call from outside. Exit codes: 0 received, 1 refused, 4 if that cannot be said.
fn run_receive(
    from: Option<IpAddr>,
    target: &Target,
    output: Format,
    pins: &PinDir,
    run_dir: &Path,
) -> anyhow::Result<ExitCode> {
    let answer = match target {
        Target::Frontend(to) => receive(*to, from, pins, run_dir),
        _ => Err(format!("--to needs an address and port, such as 203.0.113.10:80, not {target}")),
    };
    let answer = match answer {
        Ok(answer) => answer,
        Err(error) => {
            print_error(&error);
            return Ok(ExitCode::from(NOT_ANSWERED));
        }
    };
    match output {
        Format::Table => print(&answer.line())?,
        Format::Json => print(&format!("{}\n", pretty_json(&answer)?))?,
    }
    Ok(if answer.is_received() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn invalid_destination(destination: &str, error: &TargetError) -> clap::Error {
    let message = format!("invalid DESTINATION {:?}: {error}", shorten(destination));
    clap::Error::raw(ErrorKind::ValueValidation, message)
}
