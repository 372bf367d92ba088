//! The kernel's own BTF, which our programs need nothing of, and which aya reads all the same (`EbpfLoader::new`): 17
//! MB of memory and most of the time that installing takes.

use std::{io, path::Path};

use rustix::{
    mount::{MountFlags, MountPropagationFlags, mount, mount_change},
    thread::{UnshareFlags, unshare_unsafe},
};

const DIR: &str = "/sys/kernel/btf";

/// Hides it from this process, by an empty directory over it in a mount namespace of its own. Meant for the short-lived
/// process that installs; where it may not, it takes longer.
///
/// # Errors
/// There is none, or no namespace of its own is to be had.
pub fn hide_kernel_btf() -> io::Result<()> {
    if !Path::new(DIR).exists() {
        return Err(io::ErrorKind::NotFound.into());
    }
    // SAFETY: of what this process has, only the mounts become its own.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?;
    // Nothing of what follows is seen outside.
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?;
    Ok(mount("none", DIR, "tmpfs", MountFlags::RDONLY, None)?)
}
