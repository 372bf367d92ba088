//! Unix sockets of guests that come and go, one for each VM whose own socket matches a pattern.
//!
//! Firecracker and Cloud Hypervisor make a socket `UDS_PATH` for each VM, and connect to `UDS_PATH_PORT` when the guest
//! connects to a port of the host (docs/vsock.md of both).

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    ffi::{OsStr, OsString},
    fs, io,
    os::fd::OwnedFd,
    path::{Component, Path, PathBuf},
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

use crate::{listen::listener::Listener, relay::Relay};

/// Interval at which it is looked for sockets of new VMs.
const SCAN_INTERVAL: Duration = Duration::from_secs(1);

/// Sockets of one pattern. Somebody may make many of them in a directory of his own: of more, each directory below the
/// first `*` has a share.
const SOCKETS_MAX: usize = 8_192;

/// Pattern of sockets `UDS_PATH_PORT`, in which `*` stands for any characters of one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GuestSockets {
    /// Directory above all names with a `*`, whose own path may have symbolic links.
    top: PathBuf,
    vm_sockets: PathBuf,
    port: u32,
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
    /// Reads an absolute path with at least one `*`.
    ///
    /// # Errors
    /// It does not end with a port.
    pub(crate) fn parse(path: &str) -> Result<Self, String> {
        let parsed = path.rsplit_once('_').and_then(|(path, port)| Some((path, port.parse().ok()?)));
        let (path, port) = parsed.ok_or("a path with * must end with _PORT, as in unix:///run/vm/*/v.sock_6443")?;
        let has_no_star = |component: &Component<'_>| !component.as_os_str().to_string_lossy().contains('*');
        let path = Path::new(path);
        Ok(Self { top: path.components().take_while(has_no_star).collect(), vm_sockets: path.to_owned(), port })
    }

    /// The path, with `*`.
    pub(crate) fn path(&self) -> PathBuf {
        self.with_port(self.vm_sockets.as_os_str()).into()
    }

    fn with_port(&self, vm_socket: &OsStr) -> OsString {
        let mut name = vm_socket.to_owned();
        name.push(format!("_{}", self.port));
        name
    }

    /// Sockets of the VMs that are there.
    pub(crate) fn find(&self) -> Found {
        let mut found = Found::default();
        let below = self.vm_sockets.strip_prefix(&self.top).unwrap_or(&self.vm_sockets);
        let mut paths = vec![self.top.clone()];
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
                    Ok(files) if is_last => matching.extend(files.into_iter().filter(|path| !self.is_own(path))),
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
        found.problem = Some(format!("more than {sockets_max} VMs match {}", self.path().display()));
        let mut counts = HashMap::<OsString, usize>::new();
        let mut ranked: Vec<_> = found
            .vm_sockets
            .keys()
            .cloned()
            .map(|path| {
                let below = path.strip_prefix(&self.top).ok().and_then(|path| path.components().next());
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
            Err(error) if is_gone(&error) && directory != self.top => return Ok(Vec::new()),
            files => files?.collect::<io::Result<Vec<_>>>()?,
        };
        Ok(files.into_iter().filter(|file| is_match(&file.file_name())).map(|file| file.path()).collect())
    }

    /// Whether a file is named like a socket of the relay.
    fn is_own(&self, path: &Path) -> bool {
        path.as_os_str().as_encoded_bytes().ends_with(format!("_{}", self.port).as_bytes())
    }

    /// Directory of a file below `top`, reached without symbolic links, and the file's name.
    fn directory_of(&self, path: &Path) -> io::Result<(OwnedFd, OsString)> {
        let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        // The name of a single pattern is directly below.
        let below = directory.strip_prefix(&self.top).unwrap_or(Path::new(""));
        Ok((open_below(&self.top, below)?, name.to_owned()))
    }

    /// Listens for one VM. The socket gets the owner of the VM's own, since a VMM may run as another user.
    fn listen(&self, path: &Path) -> io::Result<(UnixListener, SocketFile)> {
        let (directory, name) = self.directory_of(path)?;
        let owner: Stat = status(&directory, &name)?;
        let own = self.with_port(&name);
        let (listener, file) = listen_in(directory, &own, &path.with_file_name(&own))?;
        if owner.st_uid != geteuid().as_raw() {
            file.give(&owner)?;
        }
        Ok((listener, file))
    }

    /// Serves guests as they come and go, for ever.
    pub(crate) async fn run(self, relay: Arc<Relay>) {
        let mut serving = HashMap::<PathBuf, Serving>::new();
        let (mut refused, mut unnamed) = (HashSet::new(), HashSet::new());
        let (mut tasks, mut interval, mut problem) = (JoinSet::new(), interval(SCAN_INTERVAL), None);
        loop {
            interval.tick().await;
            while tasks.try_join_next().is_some() {}
            let (sockets, files) = (self.clone(), serving.iter().map(Serving::of).collect::<Vec<_>>());
            let look = move || {
                let gone: HashSet<_> =
                    files.into_iter().filter(|(_, file)| !is_there(file)).map(|(of, _)| of).collect();
                (sockets.find(), gone)
            };
            let Ok((mut found, gone)) = spawn_blocking(look).await else { continue };
            // A VM that was not found is there until it is known that it has gone.
            let is_complete = found.problem.is_none();
            self.share(&mut found, SOCKETS_MAX);
            if let Some(text) = found.problem.as_ref().filter(|_| found.problem != problem) {
                tracing::warn!("{text}");
            }
            problem = found.problem;
            for path in found.unnamed.difference(&unnamed) {
                tracing::warn!("{path:?} is not served: its path is not UTF-8; rename it");
            }
            unnamed = found.unnamed;
            let mut closing = HashSet::new();
            // Another VM may have taken the place of one that has ended.
            serving.retain(|path, serving| {
                let vm_socket = found.vm_sockets.get(path);
                let is_same = vm_socket.map_or(!is_complete, |vm_socket| *vm_socket == serving.vm_socket);
                let is_there = is_same && !gone.contains(path) && !found.surplus.contains(path);
                if !is_there {
                    serving.task.abort();
                    closing.insert(path.clone());
                }
                is_there
            });
            refused.retain(|path| found.vm_sockets.contains_key(path));
            // A socket that closes removes its file first.
            for (path, vm_socket) in found.vm_sockets.into_iter().filter(|(path, _)| !closing.contains(path)) {
                if serving.contains_key(&path) || serving.len() >= SOCKETS_MAX {
                    continue;
                }
                let (sockets, vm) = (self.clone(), path.clone());
                let Ok(listening) = spawn_blocking(move || sockets.listen(&vm)).await else { continue };
                match listening {
                    Ok((listener, file)) => {
                        tracing::debug!("listening on unix://{}", file.path().display());
                        refused.remove(&path);
                        let file = Arc::new(file);
                        let listener = Listener::Unix(listener, file.clone());
                        let task = tasks.spawn(listener.accept(relay.clone()));
                        serving.insert(path, Serving { vm_socket, file: Arc::downgrade(&file), task });
                    }
                    Err(error) => {
                        let listener = self.with_port(path.as_os_str());
                        if refused.insert(path) {
                            tracing::warn!("cannot listen on {listener:?}: {error}; trying again");
                        }
                    }
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

    #[test]
    fn vms_are_found_by_their_sockets() {
        let directory = std::env::temp_dir().join(format!("cproxy-relay-vms-{}", std::process::id()));
        for name in ["a", "b", "other"] {
            fs::create_dir_all(directory.join("vm").join(name)).unwrap();
        }
        let sockets: Vec<_> = ["vm/a/v.sock", "vm/b/v.sock", "vm/a/v.sock_6443", "vm/other/w.sock", "c.sock"]
            .iter()
            .map(|path| UnixListener::bind(directory.join(path)).unwrap())
            .collect();
        fs::write(directory.join("file.sock"), "").unwrap();
        symlink("b", directory.join("vm/link")).unwrap();
        symlink("../b/v.sock", directory.join("vm/other/v.sock")).unwrap();
        let found = |pattern: &str| {
            let found = GuestSockets::parse(&format!("{}/{pattern}", directory.display())).unwrap().find();
            assert_eq!(found.problem, None);
            let paths = found.vm_sockets.keys().map(|path| path.strip_prefix(&directory).unwrap());
            paths.map(|path| path.display().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(found("vm/*/v.sock_6443"), ["vm/a/v.sock", "vm/b/v.sock"]);
        assert_eq!(found("*/*/*_6443"), ["vm/a/v.sock", "vm/b/v.sock", "vm/other/w.sock"]);
        assert_eq!(found("*.sock_6443"), ["c.sock"]);
        assert_eq!(found("vm/*/none/v.sock_6443"), [""; 0]);
        let missing = GuestSockets::parse(&format!("{}/none/*_6443", directory.display())).unwrap().find();
        assert!(missing.vm_sockets.is_empty() && missing.problem.unwrap().contains("/none\": "));
        drop(sockets);
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
        let found = GuestSockets::parse(&format!("{}/*/v.sock_6443", directory.display())).unwrap().find();
        assert_eq!(found.vm_sockets.into_keys().collect::<HashSet<_>>(), HashSet::from(named));
        assert_eq!((found.unnamed, found.problem), (HashSet::from([unnamed]), None));
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn one_directory_takes_no_room_from_others() {
        let sockets = GuestSockets::parse("/run/vm/*/*.sock_6443").unwrap();
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

    #[test]
    fn a_pattern_ends_with_a_port() {
        let sockets = GuestSockets::parse("/run/vm/*/v.sock_6443").unwrap();
        assert_eq!((sockets.path(), sockets.top.as_path()), ("/run/vm/*/v.sock_6443".into(), Path::new("/run/vm")));
        for path in ["/run/vm/*", "/run/vm/*_", "/run/vm/*_a", "/run/vm/*_-1"] {
            assert!(GuestSockets::parse(path).unwrap_err().contains("_PORT"), "{path}");
        }
    }
}
