//! Packages that bring a service along, for their programs alone: the service is neither started nor enabled.

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path, process::Command};

use anyhow::{Context as _, Result};

use crate::{paths, run};

/// Script that Debian's packages ask before they start a service; 101 forbids it.
const POLICY: &str = "/usr/sbin/policy-rc.d";
const NO: &str = "#!/bin/sh\nexit 101\n";

/// Runs `install`, which installs packages with these services, and leaves the services as if there were none.
pub(super) fn without_starting(services: &[&str], install: impl FnOnce() -> Result<()>) -> Result<()> {
    let policy = Policy::forbid()?;
    let installed = install();
    drop(policy);
    installed?;
    services.iter().try_for_each(|service| disable(service))
}

/// Forbids packages to start services until dropped. Where the machine has a policy already, that one holds.
struct Policy {
    is_ours: bool,
}

impl Policy {
    fn forbid() -> Result<Self> {
        let is_ours = !Path::new(POLICY).exists();
        let policy = Self { is_ours };
        if is_ours {
            fs::write(POLICY, NO).with_context(|| format!("writing {POLICY}"))?;
            let mode = fs::Permissions::from_mode(0o755);
            fs::set_permissions(POLICY, mode).with_context(|| format!("making {POLICY} executable"))?;
        }
        Ok(policy)
    }
}

impl Drop for Policy {
    fn drop(&mut self) {
        if self.is_ours
            && let Err(error) = fs::remove_file(POLICY)
        {
            run::report(format!("{POLICY} stays, and keeps services from starting: remove it ({error})"));
        }
    }
}

/// The next boot does not start it, either. The policy that the machine had may have let it start.
fn disable(service: &str) -> Result<()> {
    if let Some(program) = paths::program("update-rc.d") {
        run::run_logged(Command::new(program).args([service, "disable"]), &format!("disabling {service}"))?;
    }
    if let Some(program) = paths::program("invoke-rc.d") {
        // Refused where it may not be stopped because it may not be started.
        run::capture(Command::new(program).args([service, "stop"])).ok();
    }
    Ok(())
}
