//! `cproxy cleanup`

use std::path::Path;

use clap::Args;
use cproxy_datapath::bpf::{Environment, PinDir, PolicyInForce, PolicyPins, PolicyReader, ReceivePins};
use cproxy_policy::Directions;

use super::{
    options::Places,
    output::{print, print_error},
};
use crate::{agent::remove_routes, run_dir};

/// Flags of `cproxy cleanup`.
#[derive(Args, Debug)]
pub(super) struct CleanupOptions {
    #[command(flatten)]
    places: Places,
    /// Also remove the network policy in force: nothing is denied any more
    #[arg(long)]
    policy_too: bool,
}

pub(super) fn run(options: &CleanupOptions) -> anyhow::Result<()> {
    let dir = &options.places.pin.pin_dir;
    let policy = PolicyPins::new(&PinDir::new(dir));
    if !options.policy_too
        && let Some(reader) = PolicyReader::new(policy)
    {
        let PolicyInForce { directions: Directions { ingress, egress }, is_audited, .. } = reader.state()?;
        anyhow::ensure!(
            is_audited || !(ingress || egress),
            "a network policy isolates this pod: with --policy-too, it is removed as well, and nothing is denied then"
        );
    }
    print(&match remove(dir, &options.places.run.run_dir)? {
        // The bpffs may be mounted in another mount namespace, as under `ip netns exec`.
        0 if !Environment::is_on_bpffs(dir) => {
            format!(
                "nothing of cproxy in {}: no bpf filesystem (bpffs) is mounted there, as seen from here\n",
                dir.display()
            )
        }
        0 => format!("nothing of cproxy in {}\n", dir.display()),
        count => format!("detached and removed {count} objects of {}\n", dir.display()),
    })
}

/// Detaches the programs and removes table, pins and the files of the run directory. Returns the number of objects.
pub(super) fn remove(pin_dir: &Path, run_dir: &Path) -> anyhow::Result<usize> {
    let pins = PinDir::new(pin_dir);
    let received = ReceivePins::new(&pins);
    let removed = pins.remove(|| {
        // There may be routes without pins, and kernels without routes.
        let routes = remove_routes();
        if received.exist() {
            routes?;
            received.remove()?;
        }
        PolicyPins::new(&pins).remove()
    })?;
    // No agent runs on these pins; a killed agent's files in the run directory are no longer true.
    run_dir::clear_unused(run_dir)?;
    for path in &removed.foreign {
        print_error(&format_args!("{}: not cproxy's; left alone", path.display()));
    }
    Ok(removed.objects.len())
}
