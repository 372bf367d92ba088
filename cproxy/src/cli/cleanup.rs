//! `cproxy cleanup`

use clap::Args;

use super::{PinDirOption, print};
use crate::bpf::{PinDir, Program};

/// Flags of `cproxy cleanup`.
#[derive(Args, Debug)]
pub(super) struct Options {
    #[command(flatten)]
    pin: PinDirOption,
}

pub(super) fn run(options: &Options) -> anyhow::Result<()> {
    let dir = &options.pin.pin_dir;
    let (removed, foreign) = PinDir::new(dir).remove(&Program::LINKS)?;
    for path in &foreign {
        eprintln!("cproxy: {}: not cproxy's; left alone", path.display());
    }
    print(&match removed.len() {
        0 => format!("nothing of cproxy in {}\n", dir.display()),
        count => format!("detached and removed {count} objects of {}\n", dir.display()),
    })
}
