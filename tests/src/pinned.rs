//! The kernel memory of pinned maps.

use std::{
    ffi::CString,
    fs, io,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use crate::sandbox::Sandbox;

/// A map's pin and memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapMemory {
    /// The name of its pin.
    pub name: String,
    /// Memory as the kernel counts it (`memlock` in fdinfo): that of the present entries or, for maps that allocate in
    /// advance, of all possible ones.
    pub bytes: u64,
}

/// All maps that are pinned in the sandbox's pin directory, by name; inner maps have pins of their own. Maps of a
/// single program, which hold its constants, have no pins and are left out.
///
/// # Panics
/// When nothing is pinned.
pub fn maps(sandbox: &Sandbox) -> Vec<MapMemory> {
    maps_in(&sandbox.pin_dir())
}

/// Like [`maps`], in any pin directory.
///
/// # Panics
/// When nothing is pinned.
pub fn maps_in(pin_dir: &Path) -> Vec<MapMemory> {
    let layouts = fs::read_dir(pin_dir).unwrap_or_else(|error| panic!("{}: {error}", pin_dir.display()));
    let pins = layouts.flatten().filter_map(|layout| fs::read_dir(layout.path()).ok()).flatten().flatten();
    let memory = |pin: fs::DirEntry| {
        let bytes = map_memory(&pin.path()).unwrap_or_else(|error| panic!("{}: {error}", pin.path().display()))?;
        Some(MapMemory { name: pin.file_name().to_string_lossy().into_owned(), bytes })
    };
    let mut maps = pins.filter_map(memory).collect::<Vec<_>>();
    assert!(!maps.is_empty(), "no maps are pinned in {}", pin_dir.display());
    maps.sort_unstable_by(|one, other| one.name.cmp(&other.name));
    maps
}

/// Memory of a pinned map; `None` for links, whose pins are in the same directory.
fn map_memory(pin: &Path) -> io::Result<Option<u64>> {
    let map = open(pin)?;
    let fdinfo = fs::read_to_string(format!("/proc/self/fdinfo/{}", map.as_raw_fd()))?;
    let field = |name| fdinfo.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    Ok(field("map_type:").and_then(|_: u64| field("memlock:")))
}

fn open(pin: &Path) -> io::Result<OwnedFd> {
    /// `BPF_OBJ_GET` of `enum bpf_cmd`, and its part of `union bpf_attr`.
    const BPF_OBJ_GET: libc::c_long = 7;
    #[repr(C)]
    struct Attr {
        pathname: u64,
        bpf_fd: u32,
        file_flags: u32,
    }
    let path = CString::new(pin.as_os_str().as_bytes())?;
    let mut attr = Attr { pathname: path.as_ptr() as u64, bpf_fd: 0, file_flags: 0 };
    // SAFETY: `attr` is a live, initialised prefix of `union bpf_attr` of this size, and the path outlives the call.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, BPF_OBJ_GET, &raw mut attr, size_of::<Attr>()) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just returned this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}
