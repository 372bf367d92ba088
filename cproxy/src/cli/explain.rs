//! `cproxy explain`: what a call would get now, and why.

use std::{io, process::ExitCode};

use anyhow::bail;
use clap::Args;
use cproxy_datapath::bpf::{PinDir, PinError};

use super::{
    options::{Format, check_process},
    output::{print, screen},
};
use crate::{
    config::{PinDirSettings, RunDirSettings, Switch},
    diagnose::explain::{gather, json, text},
    target::Target,
};

/// Flags of `cproxy explain`.
#[derive(Args, Debug)]
pub(super) struct ExplainOptions {
    /// Destination: ADDRESS, ADDRESS:PORT, ADDRESS:PORT/udp or NAMESPACE/NAME of a Service
    #[arg(value_name = "DESTINATION")]
    target: Target,
    /// Process that would call; default: cproxy itself
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pid: Option<u32>,
    /// Also call the backends, without translation: connect by TCP, send an empty datagram by UDP
    #[arg(long)]
    probe: bool,
    /// Output format
    #[arg(short, long, env = "CPROXY_OUTPUT", value_enum, default_value_t)]
    output: Format,
    #[command(flatten)]
    pub(super) switch: Switch,
    #[command(flatten)]
    pin: PinDirSettings,
    #[command(flatten)]
    run: RunDirSettings,
}

/// Returns 1 unless all calls are answered.
pub(super) fn run(options: ExplainOptions) -> anyhow::Result<ExitCode> {
    let ExplainOptions { target, pid, probe, output, switch, pin, run } = options;
    pid.map_or(Ok(()), check_process)?;
    let pins = PinDir::new(&pin.pin_dir);
    if let Err(PinError::Io(path, error)) = pins.check_installed()
        && error.kind() == io::ErrorKind::PermissionDenied
    {
        bail!("{}: {error}; run this as root, with --pid for the calls of another user's process", path.display());
    }
    let mut facts = gather(target, pid, probe, &pins, &run.run_dir);
    if let (Err(kernel), Some(reason)) = (&mut facts.kernel, switch.disabled()) {
        *kernel = reason;
    }
    let (text, answered) = match output {
        Format::Table => text(&facts, &screen()),
        Format::Json => {
            let (mut json, answered) = json(&facts)?;
            json.push('\n');
            (json, answered)
        }
    };
    print(&text)?;
    Ok(if answered { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
