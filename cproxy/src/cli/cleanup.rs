//! `cproxy cleanup`

use std::path::Path;

use clap::Args;
use cproxy_datapath::bpf::{Environment, PinDir};

use super::{
    options::Places,
    output::{print, print_error},
};
use crate::run_dir;

/// Flags of `cproxy cleanup`.
#[derive(Args, Debug)]
pub(super) struct CleanupOptions {
    #[command(flatten)]
    places: Places,
}

pub(super) fn run(options: &CleanupOptions) -> anyhow::Result<()> {
    let dir = &options.places.pin.pin_dir;
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
    let removed = PinDir::new(pin_dir).remove()?;
    // No agent runs on these pins; a killed agent's files in the run directory are no longer true.
    run_dir::clear_unused(run_dir)?;
    for path in &removed.foreign {
        print_error(&format_args!("{}: not cproxy's; left alone", path.display()));
    }
    Ok(removed.objects.len())
}
