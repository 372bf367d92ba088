//! Unix sockets of guests that come and go, one for each VM whose own socket matches a pattern.
//!
//! Firecracker and Cloud Hypervisor make a socket `UDS_PATH` for each VM, and connect to `UDS_PATH_PORT` when the guest
//! connects to a port of the host (docs/vsock.md of both).

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    ffi::OsStr,
    fs, io,
    os::unix::fs::{FileTypeExt, MetadataExt, chown},
    path::{Component, Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use cproxy_access::Pattern;
use rustix::process::geteuid;
use tokio::{
    task::{AbortHandle, JoinSet},
    time::interval,
};

use crate::{
    listener::{Listener, listen_unix},
    relay::Relay,
};

/// Interval at which it is looked for sockets of new VMs.
const SCAN_INTERVAL: Duration = Duration::from_secs(1);

/// Pattern of sockets `UDS_PATH_PORT`, in which `*` stands for any characters of one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GuestSockets {
    vm_sockets: PathBuf,
    port: u32,
}

impl GuestSockets {
    /// Reads an absolute path with at least one `*`.
    ///
    /// # Errors
    /// It does not end with a port.
    pub(crate) fn parse(path: &str) -> Result<Self, String> {
        let parsed = path.rsplit_once('_').and_then(|(path, port)| Some((path, port.parse().ok()?)));
        let (path, port) = parsed.ok_or("a path with * must end with _PORT, as in unix:///run/vm/*/v.sock_6443")?;
        Ok(Self { vm_sockets: path.into(), port })
    }

    /// The path, with `*`.
    pub(crate) fn path(&self) -> PathBuf {
        self.listener_of(&self.vm_sockets)
    }

    fn listener_of(&self, vm_socket: &Path) -> PathBuf {
        let mut path = vm_socket.as_os_str().to_owned();
        path.push(format!("_{}", self.port));
        path.into()
    }

    /// Sockets of the VMs that are there.
    pub(crate) fn vm_sockets(&self) -> BTreeSet<PathBuf> {
        let mut paths = vec![PathBuf::from("/")];
        for component in self.vm_sockets.components() {
            let Component::Normal(name) = component else { continue };
            paths = match name.to_str().filter(|name| name.contains('*')) {
                Some(name) => paths.iter().flat_map(|path| self.matching(path, name)).collect(),
                None => paths.into_iter().map(|path| path.join(name)).collect(),
            };
        }
        let is_socket = |path: &PathBuf| fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket());
        paths.into_iter().filter(is_socket).collect()
    }

    /// Files of a directory whose names match, without the relay's own.
    fn matching(&self, directory: &Path, name: &str) -> Vec<PathBuf> {
        let Ok(pattern) = Pattern::try_from(name.to_owned()) else { return Vec::new() };
        let own = format!("_{}", self.port);
        let is_match = |file: &OsStr| file.to_str().is_some_and(|file| pattern.matches(file) && !file.ends_with(&own));
        let files = fs::read_dir(directory).into_iter().flatten().flatten();
        files.filter(|file| is_match(&file.file_name())).map(|file| file.path()).collect()
    }

    /// Serves guests as they come and go, for ever.
    pub(crate) async fn run(self, relay: Arc<Relay>) {
        let (mut serving, mut refused) = (HashMap::<PathBuf, AbortHandle>::new(), HashSet::new());
        let (mut tasks, mut interval) = (JoinSet::new(), interval(SCAN_INTERVAL));
        loop {
            interval.tick().await;
            while tasks.try_join_next().is_some() {}
            let found = self.vm_sockets();
            let mut closing = HashSet::new();
            // A VM of the same name may have taken the place of one that has ended, with a directory of its own.
            serving.retain(|vm_socket, task| {
                let is_there = found.contains(vm_socket) && self.listener_of(vm_socket).exists();
                if !is_there {
                    task.abort();
                    closing.insert(vm_socket.clone());
                }
                is_there
            });
            refused.retain(|vm_socket| found.contains(vm_socket));
            // A socket that closes removes its path first.
            for vm_socket in found.into_iter().filter(|path| !closing.contains(path)) {
                if serving.contains_key(&vm_socket) {
                    continue;
                }
                let path = self.listener_of(&vm_socket);
                match open(&vm_socket, &path) {
                    Ok(listener) => {
                        tracing::debug!("listening on unix://{}", path.display());
                        refused.remove(&vm_socket);
                        serving.insert(vm_socket, tasks.spawn(listener.accept(relay.clone())));
                    }
                    Err(error) => {
                        if refused.insert(vm_socket) {
                            tracing::warn!("cannot listen on unix://{}: {error}; trying again", path.display());
                        }
                    }
                }
            }
        }
    }
}

/// Listens for one VM. The socket gets the owner of the VM's own, since a VMM may run as another user.
fn open(vm_socket: &Path, path: &Path) -> io::Result<Listener> {
    let listener = listen_unix(path)?;
    let owner = fs::metadata(vm_socket)?;
    if owner.uid() != geteuid().as_raw() {
        chown(path, Some(owner.uid()), Some(owner.gid()))?;
    }
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn vms_are_found_by_their_sockets() {
        let directory = std::env::temp_dir().join(format!("cproxy-relay-vms-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        for name in ["a", "b", "other"] {
            fs::create_dir_all(directory.join("vm").join(name)).unwrap();
        }
        let sockets: Vec<_> = ["vm/a/v.sock", "vm/b/v.sock", "vm/a/v.sock_6443", "vm/other/w.sock", "c.sock"]
            .iter()
            .map(|path| UnixListener::bind(directory.join(path)).unwrap())
            .collect();
        fs::write(directory.join("file.sock"), "").unwrap();
        let found = |pattern: &str| {
            let sockets = GuestSockets::parse(&format!("{}/{pattern}", directory.display())).unwrap();
            let found = sockets.vm_sockets();
            let names = found.iter().map(|path| path.strip_prefix(&directory).unwrap().display().to_string());
            names.collect::<Vec<_>>()
        };
        assert_eq!(found("vm/*/v.sock_6443"), ["vm/a/v.sock", "vm/b/v.sock"]);
        assert_eq!(found("*/*/*_6443"), ["vm/a/v.sock", "vm/b/v.sock", "vm/other/w.sock"]);
        assert_eq!(found("*.sock_6443"), ["c.sock"]);
        assert_eq!(found("none/*_6443"), [""; 0]);
        drop(sockets);
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn a_pattern_ends_with_a_port() {
        let sockets = GuestSockets::parse("/run/vm/*/v.sock_6443").unwrap();
        assert_eq!(sockets.path(), Path::new("/run/vm/*/v.sock_6443"));
        for path in ["/run/vm/*", "/run/vm/*_", "/run/vm/*_a", "/run/vm/*_-1"] {
            assert!(GuestSockets::parse(path).unwrap_err().contains("_PORT"), "{path}");
        }
    }
}
