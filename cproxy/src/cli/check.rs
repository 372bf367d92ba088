//! `cproxy check`: one line for each requirement on kernel, machine, network and API server. Changes nothing.

use std::path::PathBuf;

use anyhow::bail;
use clap::{Args, ValueEnum};

use super::{
    machine_settings::unknown_variables,
    options::Places,
    output::{print, screen},
};
use crate::{
    config::{NodeNameSettings, SourceSettings, Switch},
    diagnose::check::{self, CheckRequest, lacking, summary, text},
    report::{Layout, Screen, pretty_json},
};

/// Flags of `cproxy check`.
#[derive(Args, Debug)]
pub(super) struct CheckOptions {
    /// Output format
    #[arg(short, long, env = "CPROXY_OUTPUT", value_enum, default_value_t)]
    output: CheckFormat,
    #[command(flatten)]
    pub(super) switch: Switch,
    #[command(flatten)]
    source: SourceSettings,
    #[command(flatten)]
    node: NodeNameSettings,
    /// cgroup2 directory that `run` would attach to; default: the cgroup2 root
    #[arg(long, value_name = "DIR")]
    cgroup: Option<PathBuf>,
    #[command(flatten)]
    places: Places,
    /// Reason why `run` refuses the settings of the machine
    #[arg(skip)]
    pub(super) settings_error: Option<String>,
}

/// Output format of `cproxy check`.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum CheckFormat {
    /// Aligned columns; features of the kernel that are there are one line
    #[default]
    #[value(alias = "name")]
    Table,
    /// Aligned columns, a line for each requirement
    Wide,
    /// JSON, which is YAML, too
    #[value(alias = "yaml")]
    Json,
}

pub(super) fn run(options: &CheckOptions) -> anyhow::Result<()> {
    let request = CheckRequest {
        disabled: options.switch.disabled(),
        settings_error: options.settings_error.clone(),
        unknown_variables: unknown_variables(&super::command()),
        source: options.source.source(),
        node_name: options.node.name(),
        cgroup: options.cgroup.as_deref(),
        pin_dir: &options.places.pin.pin_dir,
        run_dir: &options.places.run.run_dir,
    };
    let (mut requirements, of_network) = check::requirements(&request)?;
    let of_machine = requirements.len();
    requirements.extend(of_network);
    let screen = match options.output {
        CheckFormat::Wide => Screen { layout: Layout::Wide, ..screen() },
        CheckFormat::Table | CheckFormat::Json => screen(),
    };
    let has_all = lacking(&requirements).is_empty();
    let last = if has_all { format!("\n{}\n", screen.hanging(0, &summary(&requirements))) } else { String::new() };
    print(&match options.output {
        CheckFormat::Table | CheckFormat::Wide => text(&requirements, &screen) + &last,
        CheckFormat::Json => format!("{}\n", pretty_json(&requirements)?),
    })?;
    let (of_machine, of_network) = requirements.split_at(of_machine);
    match lacking(of_machine).as_slice() {
        [] => match lacking(of_network).as_slice() {
            [] => Ok(()),
            names => bail!("cannot follow the API server: missing {}", names.join(", ")),
        },
        ["hooks"] => bail!("the programs do not work; the line `hooks` has the cause"),
        ["attached"] => bail!("the programs are not attached as they should be: start `cproxy run` again"),
        names => bail!("cannot run here: missing {}", names.join(", ")),
    }
}
