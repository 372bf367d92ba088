//! A memory limit for a process and its children, by either version of the controller.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use crate::sandbox::Sandbox;

/// A memory cgroup with a limit, removed when this is dropped. Its processes must have ended by then.
#[derive(Debug)]
pub struct MemoryLimit {
    path: PathBuf,
    is_v1: bool,
    launcher: PathBuf,
}

impl MemoryLimit {
    /// A limit for `program`.
    ///
    /// # Panics
    /// When this machine has no memory controller, or it may not be used.
    pub fn new(sandbox: &Sandbox, bytes: u64, program: &Path) -> Self {
        let (root, is_v1) = controller();
        let path = root.join(sandbox.dir().file_name().expect("the sandbox has a name")).with_extension("memory");
        fs::create_dir(&path).unwrap_or_else(|error| panic!("cannot create {}: {error}", path.display()));
        let launcher = sandbox.dir().join("limited");
        let limit = Self { path, is_v1, launcher };
        let file = if is_v1 { "memory.limit_in_bytes" } else { "memory.max" };
        limit.write(file, &bytes.to_string()).expect("cannot set a memory limit");
        // Swap must not hide that the limit is reached; not every kernel counts it.
        let swap = if is_v1 { ("memory.memsw.limit_in_bytes", bytes) } else { ("memory.swap.max", 0) };
        drop(limit.write(swap.0, &swap.1.to_string()));
        let members = limit.path.join("cgroup.procs");
        // "0" is the writing process.
        let script = format!("#!/bin/sh\necho 0 > '{}' && exec '{}' \"$@\"\n", members.display(), program.display());
        fs::write(&limit.launcher, script).expect("cannot write to the sandbox");
        let mode = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&limit.launcher, mode).expect("cannot make a file of the sandbox executable");
        limit
    }

    /// Directory of the cgroup.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Script that runs the program within the limit, with its own arguments.
    pub fn launcher(&self) -> &Path {
        &self.launcher
    }

    /// Peak memory use.
    ///
    /// # Panics
    /// When the kernel does not report it (before 5.19 with the second version).
    pub fn peak_bytes(&self) -> u64 {
        let text = self.read(if self.is_v1 { "memory.max_usage_in_bytes" } else { "memory.peak" });
        text.trim().parse().expect("the peak of a memory cgroup is a number")
    }

    /// Number of processes that the kernel has killed because of the limit.
    ///
    /// # Panics
    /// When the kernel does not report it (before 4.13 with the first version).
    pub fn killed(&self) -> u64 {
        let text = self.read(if self.is_v1 { "memory.oom_control" } else { "memory.events" });
        let count = text.lines().find_map(|line| line.strip_prefix("oom_kill ")).and_then(|count| count.parse().ok());
        count.unwrap_or_else(|| panic!("the kernel does not count the processes that it kills: {text}"))
    }

    fn read(&self, file: &str) -> String {
        let path = self.path.join(file);
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()))
    }

    fn write(&self, file: &str, text: &str) -> io::Result<()> {
        fs::write(self.path.join(file), text)
    }
}

impl Drop for MemoryLimit {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.path) {
            eprintln!("sandbox: the memory cgroup {} stays: {error}", self.path.display());
        }
    }
}

/// The root of the memory cgroups, and whether they are of the first version.
fn controller() -> (PathBuf, bool) {
    let mounts = cproxy_mountinfo::list().expect("cannot read the kernel's list of mounts");
    if let Some(mount) =
        mounts.iter().find(|mount| mount.kind == b"cgroup" && mount.point.join("memory.usage_in_bytes").exists())
    {
        return (mount.point.clone(), true);
    }
    let second = mounts.into_iter().find(|mount| mount.kind == b"cgroup2").expect("no cgroup file system is mounted");
    fs::write(second.point.join("cgroup.subtree_control"), "+memory").expect(
        "no memory controller: use a kernel with CONFIG_MEMCG, where neither cgroup_disable nor a container hides it",
    );
    (second.point, false)
}
