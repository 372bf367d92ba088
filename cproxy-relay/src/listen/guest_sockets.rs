//! Unix sockets of guests that come and go, one for each VM whose own socket matches a pattern.
//!
//! Firecracker and Cloud Hypervisor make a socket `UDS_PATH` for each VM, and connect to `UDS_PATH_PORT` when the guest
//! connects to a port of the host (docs/vsock.md of both).

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    ffi::{OsStr, OsString},
    fs, io, mem,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{Arc, Weak},
    time::Duration,
};

use cproxy_daemon::unix_socket::{SocketFile, identity, listen_in, open_below, status};
use cproxy_relay_auth::Pattern;
use rustix::{
    fs::{FileType, Stat},
    io::Errno,
    process::geteuid,
};
use tokio::{
    net::UnixListener,
    task::{AbortHandle, JoinSet, spawn_blocking},
    time::interval,
};

use crate::{
    listen::{acceptor::Acceptor, address::GuestPattern},
    relay::Relay,
};

/// Interval of the search for sockets of new VMs.
const SCAN_INTERVAL: Duration = Duration::from_secs(1);

/// Sockets of one pattern. A user may make many of them in a directory of his own: of more, each directory below the
/// first `*` has a share.
const SOCKETS_MAX: usize = 8_192;

/// Sockets of the VMs that match a pattern.
#[derive(Clone, Debug)]
pub(crate) struct GuestSockets {
    pattern: GuestPattern,
}

/// Sockets of VMs.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// By path.
    pub(crate) vm_sockets: BTreeMap<PathBuf, VmSocket>,
    /// Those that have no room.
    surplus: HashSet<PathBuf>,
    /// Those that no view could match, since their paths are not UTF-8.
    unnamed: HashSet<PathBuf>,
    /// Problem with the search.
    pub(crate) problem: Option<String>,
}

/// Socket of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VmSocket {
    identity: (u64, u64),
    user: u32,
}

impl GuestSockets {
    pub(crate) fn new(pattern: GuestPattern) -> Self {
        Self { pattern }
    }

    /// Sockets of the VMs that are there.
    pub(crate) fn find(&self) -> Found {
        let mut found = Found::default();
        let below = self.pattern.below_top();
        let mut paths = vec![self.pattern.top.clone()];
        let mut components = below.components();
        while let Some(component) = components.next() {
            let name = component.as_os_str();
            let Some(pattern) = name.to_str().filter(|name| name.contains('*')) else {
                paths.iter_mut().for_each(|path| path.push(name));
                continue;
            };
            let is_last = components.as_path().as_os_str().is_empty();
            let mut matching = Vec::new();
            for path in paths {
                match self.matching(&path, pattern) {
                    Ok(files) if is_last => {
                        matching.extend(files.into_iter().filter(|path| !self.pattern.is_own(path)));
                    }
                    Ok(files) => matching.extend(files),
                    Err(error) => found.problem = Some(format!("cannot look for VMs in {path:?}: {error}")),
                }
            }
            paths = matching;
        }
        for path in paths {
            let status = self.directory_of(&path).and_then(|(directory, name)| status(&directory, &name));
            let status = match status {
                Ok(status) => status,
                // It has gone meanwhile, or is behind a link.
                Err(error) if is_gone(&error) => continue,
                Err(error) => {
                    found.problem = Some(format!("cannot look for VMs at {path:?}: {error}"));
                    continue;
                }
            };
            if !FileType::from_raw_mode(status.st_mode).is_socket() {
                continue;
            }
            if path.to_str().is_none() {
                found.unnamed.insert(path);
            } else {
                found.vm_sockets.insert(path, VmSocket { identity: identity(&status), user: status.st_uid });
            }
        }
        found
    }

    /// Leaves at most this many sockets: of each directory below the first `*` as many, or all that it has.
    fn share(&self, found: &mut Found, sockets_max: usize) {
        if found.vm_sockets.len() <= sockets_max {
            return;
        }
        found.problem = Some(format!("more than {sockets_max} VMs match {}", self.pattern.path().display()));
        let mut counts = HashMap::<OsString, usize>::new();
        let mut ranked: Vec<_> = found
            .vm_sockets
            .keys()
            .cloned()
            .map(|path| {
                let below = path.strip_prefix(&self.pattern.top).ok().and_then(|path| path.components().next());
                let count =
                    counts.entry(below.map(|name| name.as_os_str().to_owned()).unwrap_or_default()).or_default();
                *count += 1;
                (*count, path)
            })
            .collect();
        ranked.sort();
        found.surplus = ranked.split_off(sockets_max).into_iter().map(|(_, path)| path).collect();
        found.vm_sockets.retain(|path, _| !found.surplus.contains(path));
    }

    /// Files of a directory whose names match. VMs come and go, so it may be missing.
    fn matching(&self, directory: &Path, name: &str) -> io::Result<Vec<PathBuf>> {
        let pattern = Pattern::try_from(name.to_owned()).map_err(io::Error::other)?;
        let is_match = |file: &OsStr| pattern.matches(&file.to_string_lossy());
        let files = match fs::read_dir(directory) {
            Err(error) if is_gone(&error) && directory != self.pattern.top => return Ok(Vec::new()),
            files => files?.collect::<io::Result<Vec<_>>>()?,
        };
        Ok(files.into_iter().filter(|file| is_match(&file.file_name())).map(|file| file.path()).collect())
    }

    /// Directory of a file below `top`, reached without symbolic links, and the file's name.
    fn directory_of(&self, path: &Path) -> io::Result<(OwnedFd, OsString)> {
        let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        // The name of a single pattern is directly below.
        let below = directory.strip_prefix(&self.pattern.top).unwrap_or(Path::new(""));
        Ok((open_below(&self.pattern.top, below)?, name.to_owned()))
    }

    /// Listens for one VM. The socket gets the owner of the VM's own, since a VMM may run as another user.
    fn listen(&self, path: &Path) -> io::Result<(UnixListener, SocketFile)> {
        let (directory, name) = self.directory_of(path)?;
        let owner: Stat = status(&directory, &name)?;
        let own = self.pattern.with_port(&name);
        let (listener, file) = listen_in(directory, &own, &path.with_file_name(&own))?;
        if owner.st_uid != geteuid().as_raw() {
            file.give(&owner)?;
        }
        Ok((listener, file))
    }

    /// Serves guests as they come and go, for ever.
    pub(crate) async fn run(self, relay: Arc<Relay>) {
        let mut guests = Guests::new(self);
        let mut interval = interval(SCAN_INTERVAL);
        loop {
            interval.tick().await;
            guests.follow(&relay).await;
        }
    }
}

/// Guests that are served, and what has been logged about others.
struct Guests {
    sockets: GuestSockets,
    /// By the path of the VM's socket.
    serving: HashMap<PathBuf, Serving>,
    tasks: JoinSet<()>,
    /// VMs whose listener cannot be opened.
    refused: HashSet<PathBuf>,
    unnamed: HashSet<PathBuf>,
    problem: Option<String>,
}

impl Guests {
    fn new(sockets: GuestSockets) -> Self {
        Self {
            sockets,
            serving: HashMap::new(),
            tasks: JoinSet::new(),
            refused: HashSet::new(),
            unnamed: HashSet::new(),
            problem: None,
        }
    }

    /// Looks for VMs once: ends the listeners of those that are gone and opens some for those that are new.
    async fn follow(&mut self, relay: &Arc<Relay>) {
        while self.tasks.try_join_next().is_some() {}
        let Some((mut found, gone)) = self.look().await else { return };
        // A VM that was not found is there until it is known that it has gone.
        let is_complete = found.problem.is_none();
        self.sockets.share(&mut found, SOCKETS_MAX);
        self.report(&mut found);
        let closing = self.end_gone(&found, &gone, is_complete);
        self.refused.retain(|path| found.vm_sockets.contains_key(path));
        // A socket that closes removes its file first.
        for (path, vm_socket) in found.vm_sockets.into_iter().filter(|(path, _)| !closing.contains(path)) {
            if !self.serving.contains_key(&path) && self.serving.len() < SOCKETS_MAX {
                self.serve(path, vm_socket, relay).await;
            }
        }
    }

    /// Sockets of VMs, and those of the VMs whose listener's file is gone.
    async fn look(&self) -> Option<(Found, HashSet<PathBuf>)> {
        let (sockets, files) = (self.sockets.clone(), self.serving.iter().map(Serving::of).collect::<Vec<_>>());
        let look = move || {
            let gone = files.into_iter().filter(|(_, file)| !is_there(file)).map(|(of, _)| of).collect();
            (sockets.find(), gone)
        };
        spawn_blocking(look).await.ok()
    }

    /// Logs each problem once.
    fn report(&mut self, found: &mut Found) {
        if let Some(text) = found.problem.as_ref().filter(|_| found.problem != self.problem) {
            tracing::warn!("{text}");
        }
        self.problem = found.problem.take();
        for path in found.unnamed.difference(&self.unnamed) {
            tracing::warn!("{path:?} is not served: its path is not UTF-8; rename it");
        }
        self.unnamed = mem::take(&mut found.unnamed);
    }

    /// Ends the listeners of VMs that are gone, or in whose place is another one. Returns their paths.
    fn end_gone(&mut self, found: &Found, gone: &HashSet<PathBuf>, is_complete: bool) -> HashSet<PathBuf> {
        let mut closing = HashSet::new();
        self.serving.retain(|path, serving| {
            let vm_socket = found.vm_sockets.get(path);
            let is_same = vm_socket.map_or(!is_complete, |vm_socket| *vm_socket == serving.vm_socket);
            let is_there = is_same && !gone.contains(path) && !found.surplus.contains(path);
            if !is_there {
                serving.task.abort();
                closing.insert(path.clone());
            }
            is_there
        });
        closing
    }

    /// Listens for a VM, and serves it.
    async fn serve(&mut self, path: PathBuf, vm_socket: VmSocket, relay: &Arc<Relay>) {
        let (sockets, vm) = (self.sockets.clone(), path.clone());
        let Ok(listening) = spawn_blocking(move || sockets.listen(&vm)).await else { return };
        match listening {
            Ok((listener, file)) => {
                tracing::debug!("listening on unix://{}", file.path().display());
                self.refused.remove(&path);
                let file = Arc::new(file);
                let task = self.tasks.spawn(Acceptor::Unix(listener, file.clone()).run(relay.clone()));
                self.serving.insert(path, Serving { vm_socket, file: Arc::downgrade(&file), task });
            }
            Err(error) => {
                let listener = self.sockets.pattern.with_port(path.as_os_str());
                if self.refused.insert(path) {
                    tracing::warn!("cannot listen on {listener:?}: {error}; trying again");
                }
            }
        }
    }
}

/// Whether the error says that a file is not there, or is reached through a link.
fn is_gone(error: &io::Error) -> bool {
    let is_link = error.raw_os_error() == Some(Errno::LOOP.raw_os_error());
    is_link || matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Listener of a VM.
struct Serving {
    vm_socket: VmSocket,
    file: Weak<SocketFile>,
    task: AbortHandle,
}

impl Serving {
    /// Path of the VM's socket, and the file.
    fn of((path, serving): (&PathBuf, &Self)) -> (PathBuf, Weak<SocketFile>) {
        (path.clone(), serving.file.clone())
    }
}

fn is_there(file: &Weak<SocketFile>) -> bool {
    file.upgrade().is_some_and(|file| file.is_there())
}

#[cfg(test)]
mod tests {
    use std::os::unix::{ffi::OsStrExt as _, fs::symlink, net::UnixListener};

    use super::*;

    fn sockets(pattern: &str) -> GuestSockets {
        GuestSockets::new(pattern.parse().unwrap())
    }

    #[test]
    fn vms_are_found_by_their_sockets() {
        let directory = std::env::temp_dir().join(format!("cproxy-relay-vms-{}", std::process::id()));
        for name in ["a", "b", "other"] {
            fs::create_dir_all(directory.join("vm").join(name)).unwrap();
        }
        let bound: Vec<_> = ["vm/a/v.sock", "vm/b/v.sock", "vm/a/v.sock_6443", "vm/other/w.sock", "c.sock"]
            .iter()
            .map(|path| UnixListener::bind(directory.join(path)).unwrap())
            .collect();
        fs::write(directory.join("file.sock"), "").unwrap();
        symlink("b", directory.join("vm/link")).unwrap();
        symlink("../b/v.sock", directory.join("vm/other/v.sock")).unwrap();
        let found = |pattern: &str| {
            let found = sockets(&format!("{}/{pattern}", directory.display())).find();
            assert_eq!(found.problem, None);
            let paths = found.vm_sockets.keys().map(|path| path.strip_prefix(&directory).unwrap());
            paths.map(|path| path.display().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(found("vm/*/v.sock_6443"), ["vm/a/v.sock", "vm/b/v.sock"]);
        assert_eq!(found("*/*/*_6443"), ["vm/a/v.sock", "vm/b/v.sock", "vm/other/w.sock"]);
        assert_eq!(found("*.sock_6443"), ["c.sock"]);
        assert_eq!(found("vm/*/none/v.sock_6443"), [""; 0]);
        let missing = sockets(&format!("{}/none/*_6443", directory.display())).find();
        assert!(missing.vm_sockets.is_empty() && missing.problem.unwrap().contains("/none\": "));
        drop(bound);
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn only_a_path_that_is_not_utf_8_keeps_a_vm_from_being_served() {
        let directory = std::env::temp_dir().join(format!("cproxy-relay-names-{}", std::process::id()));
        let vm = |name: &[u8]| {
            let vm = directory.join(OsStr::from_bytes(name));
            fs::create_dir_all(&vm).unwrap();
            (vm.join("v.sock"), UnixListener::bind(vm.join("v.sock")).unwrap())
        };
        let named = ["a b", "a\nb", "\u{202e}", ".a", "a_6443", "*", "\u{fffd}"].map(|name| vm(name.as_bytes()).0);
        let unnamed = vm(b"a\xff").0;
        let found = sockets(&format!("{}/*/v.sock_6443", directory.display())).find();
        assert_eq!(found.vm_sockets.into_keys().collect::<HashSet<_>>(), HashSet::from(named));
        assert_eq!((found.unnamed, found.problem), (HashSet::from([unnamed]), None));
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn one_directory_takes_no_room_from_others() {
        let sockets = sockets("/run/vm/*/*.sock_6443");
        let vm_socket = VmSocket { identity: (0, 0), user: 0 };
        let many = (0..100).map(|number| format!("/run/vm/a/{number:03}.sock"));
        let others = ["/run/vm/b/x.sock", "/run/vm/b/y.sock", "/run/vm/c/x.sock"].map(str::to_owned);
        let vm_sockets = many.chain(others.clone()).map(|path| (path.into(), vm_socket)).collect();
        let mut found = Found { vm_sockets, ..Found::default() };
        sockets.share(&mut found, 103);
        assert_eq!((found.vm_sockets.len(), found.surplus.len(), &found.problem), (103, 0, &None));
        sockets.share(&mut found, 10);
        assert!(found.problem.is_some());
        assert!(others.iter().all(|path| found.vm_sockets.contains_key(Path::new(path))));
        assert_eq!((found.vm_sockets.len(), found.surplus.len()), (10, 93));
    }
}
