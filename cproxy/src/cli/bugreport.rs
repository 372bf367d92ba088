//! `cproxy bugreport`: one tar file with all that support needs.

use std::{
    fs::{self, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt,
    path::PathBuf,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::anyhow;
use clap::Args;
use rustix::fs::OFlags;

use super::{options::Places, output::print};
use crate::diagnose::bugreport::Bugreport;

/// Flags of `cproxy bugreport`.
#[derive(Args, Debug)]
pub(super) struct BugreportOptions {
    /// File to write, which must not exist; default: cproxy-bugreport-TIME.tar in this directory
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Replace IP addresses by numbered names, the same address by the same name
    #[arg(long)]
    hide_addresses: bool,
    #[command(flatten)]
    places: Places,
}

pub(super) fn run(options: &BugreportOptions) -> anyhow::Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let path = options.file.clone().unwrap_or_else(|| format!("cproxy-bugreport-{now}.tar").into());
    let flags = OFlags::NOFOLLOW.bits().cast_signed();
    let failed = |error: io::Error| {
        let advice = if error.kind() == io::ErrorKind::AlreadyExists { "; name another file" } else { "" };
        anyhow!("--file {}: {error}{advice}", path.display())
    };
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).custom_flags(flags).open(&path);
    let report = Bugreport {
        pin_dir: &options.places.pin.pin_dir,
        run_dir: &options.places.run.run_dir,
        hides_addresses: options.hide_addresses,
        time_s: now,
    };
    if let Err(error) = report.write(io::BufWriter::new(file.map_err(failed)?)) {
        // A part would pass for the whole.
        fs::remove_file(&path).ok();
        return Err(failed(error));
    }
    print(&format!("{}\n", path.display()))
}
