//! The broker's process.

use std::{
    ffi::{CString, OsStr, OsString},
    fs::{self, File},
    io::{self, Write as _},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::{
            ffi::{OsStrExt as _, OsStringExt as _},
            fs::FileExt as _,
            net::UnixStream,
            process::{CommandExt as _, ExitStatusExt as _},
        },
    },
    path::{Path, PathBuf},
    process::{Child, Command},
};

use cproxy_daemon::unix_socket::path_in;
use cproxy_datapath::sockets::BROKER_NAME;
use rustix::{
    event::{PollFd, PollFlags, poll},
    fs::{
        AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, StatxFlags, fchmod, fcntl_setfl, fstat, mkdirat, open,
        openat, readlinkat, renameat_with, statx, unlinkat,
    },
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, bind, sockopt::socket_domain},
    process::{Pid, PidfdFlags, PidfdGetfdFlags, getppid, pidfd_getfd, pidfd_open},
};

use super::{
    CALLS, DESCRIPTORS_MAX, READY,
    allowed_paths::{AllowedPaths, Change, Parent},
    notification::{Call, Listener, Outcome, last_error},
    receive,
};

/// Modes of files that are no programs.
const DATA: Mode = Mode::RUSR.union(Mode::WUSR).union(Mode::RGRP).union(Mode::ROTH);

/// Longest path (include/uapi/linux/limits.h, `PATH_MAX`).
const PATH_BYTES_MAX: usize = 4096;

/// Longest address of a socket (include/uapi/linux/socket.h, `_K_SS_MAXSIZE`).
const ADDRESS_BYTES_MAX: usize = 128;

/// Flags with which directories are opened.
const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Bytes that are read of a path at once: it may end just before memory that is not there.
const PATH_PART_BYTES: usize = 256;

/// Signals that end the agent, and the broker with it, but not before it: its last act takes the broker.
const SURVIVED: [libc::c_int; 4] = [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM];

/// Serves the parent process, whose socket is the standard input, until that ends. The arguments are the run directory,
/// the pin directory, and files of sockets.
///
/// # Errors
/// It cannot serve; the parent is told.
pub fn serve(mut arguments: impl Iterator<Item = OsString>) -> io::Result<()> {
    for signal in SURVIVED {
        // Unlike an ignored signal, one with a handler is not ignored by children.
        let handler: extern "C" fn(libc::c_int) = survive;
        // SAFETY: the handler does nothing.
        unsafe { libc::signal(signal, handler as *const () as libc::sighandler_t) };
    }
    // It was started by a link, whose name the process has.
    CString::new(BROKER_NAME).map(|name| rustix::thread::set_name(&name)).ok();
    let mut socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut next = || arguments.next().map(PathBuf::from).ok_or(io::ErrorKind::InvalidInput);
    let (run_dir, pin_dir) = (next()?, next()?);
    let broker = match Server::new(&run_dir, &pin_dir, arguments.map(PathBuf::from)) {
        Ok(broker) => broker,
        Err(error) => {
            socket.write_all(error.to_string().as_bytes())?;
            return Err(error);
        }
    };
    socket.write_all(READY)?;
    broker.run(&socket);
    Ok(())
}

extern "C" fn survive(_: libc::c_int) {}

struct Server {
    agent: Pid,
    /// The agent's process.
    pidfd: OwnedFd,
    allowed_paths: AllowedPaths,
    /// The run directory, whose inode is no other's as long as it is open.
    _run_dir: OwnedFd,
    /// The pin directory as the agent names it.
    pin_dir: PathBuf,
}

/// Child that runs for the agent.
struct Running {
    child: Child,
    pidfd: OwnedFd,
    /// Where its end is told.
    end: File,
}

impl Server {
    fn new(run_dir: &Path, pin_dir: &Path, files: impl Iterator<Item = PathBuf>) -> io::Result<Self> {
        let agent = getppid().ok_or_else(|| io::Error::other("the agent has ended"))?;
        let pidfd = pidfd_open(agent, PidfdFlags::empty())?;
        // Permission to take descriptors and to read memory. The kernel checks it before it looks for descriptor 0.
        match pidfd_getfd(&pidfd, 0, PidfdGetfdFlags::empty()) {
            Ok(_) | Err(Errno::BADF) => {}
            Err(error) => return Err(error.into()),
        }
        File::open(format!("/proc/{agent}/mem"))?;
        let opened = open(run_dir, DIRECTORY, Mode::empty())?;
        let status = fstat(&opened)?;
        let real = |path: &Path| {
            let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
            let parent = path.parent().unwrap_or(Path::new("/")).canonicalize()?;
            Ok::<_, io::Error>(parent.join(name))
        };
        mount_id(&opened)?;
        let allowed_paths = AllowedPaths {
            run_dir: (status.st_dev, status.st_ino),
            pin_dir: pin_dir.canonicalize()?,
            files: files.map(|file| real(&file)).collect::<io::Result<_>>()?,
        };
        Ok(Self { agent, pidfd, allowed_paths, _run_dir: opened, pin_dir: pin_dir.to_owned() })
    }

    /// Until the agent ends.
    fn run(&self, socket: &UnixStream) {
        let (mut listener, mut running) = (None::<Listener>, Vec::<Running>::new());
        loop {
            let descriptors = [Some(socket.as_fd()), listener.as_ref().map(AsFd::as_fd)].into_iter().flatten();
            let descriptors = descriptors.chain(running.iter().map(|running| running.pidfd.as_fd()));
            let mut polled: Vec<_> = descriptors.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
            match poll(&mut polled, None) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(_) => return,
            }
            let mut events = polled.iter().map(PollFd::revents).collect::<Vec<_>>().into_iter();
            let of_socket = events.next().unwrap_or(PollFlags::empty());
            if let Some(listener) = &listener {
                match events.next().unwrap_or(PollFlags::empty()) {
                    none if none.is_empty() => {}
                    // The thread may have been killed meanwhile.
                    calls if calls.contains(PollFlags::IN) => {
                        if let Ok(call) = listener.next() {
                            listener.answer(&call, self.make(listener, &call));
                        }
                    }
                    _ => return,
                }
            }
            running.retain_mut(|running| events.next().unwrap_or(PollFlags::empty()).is_empty() || !running.tell_end());
            if of_socket.is_empty() {
                continue;
            }
            let Ok((words, descriptors)) = receive(socket) else { return };
            match words.as_slice() {
                [] => return,
                [calls] if calls == CALLS && listener.is_none() => {
                    listener = descriptors.into_iter().next().map(Listener::new);
                }
                words => running.extend(self.start(words, descriptors)),
            }
        }
    }

    /// Starts a child. Where that fails, the agent sees the end of the descriptors.
    fn start(&self, words: &[OsString], descriptors: Vec<OwnedFd>) -> Option<Running> {
        let [stdin, stdout, stderr, end] = <[OwnedFd; DESCRIPTORS_MAX]>::try_from(descriptors).ok()?;
        let mut command = child_command(words, &self.pin_dir)?;
        let child = command.env_clear().stdin(stdin).stdout(stdout).stderr(stderr).spawn().ok()?;
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).ok()?;
        // Nothing here waits for who reads it.
        fcntl_setfl(&end, OFlags::NONBLOCK).ok()?;
        Some(Running { child, pidfd, end: end.into() })
    }

    /// Makes a call in a thread's place.
    fn make(&self, listener: &Listener, call: &Call) -> Result<Outcome, Errno> {
        let [first, second, third, fourth, fifth, _] = call.arguments;
        let name = |directory, path| {
            let path = read_path(call.thread, path)?;
            check_waiting(listener, call)?;
            name_of(call.thread, directory, &path)
        };
        match call.number {
            #[cfg(target_arch = "x86_64")]
            libc::SYS_open => self.create(&name(HERE, first)?, second, third),
            libc::SYS_openat => self.create(&name(first, second)?, third, fourth),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_unlink => self.remove(&name(HERE, first)?, AtFlags::empty()),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_rmdir => self.remove(&name(HERE, first)?, AtFlags::REMOVEDIR),
            libc::SYS_unlinkat => self.remove(&name(first, second)?, AtFlags::from_bits_retain(word(third))),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_mkdir => self.make_directory(&name(HERE, first)?, second),
            libc::SYS_mkdirat => self.make_directory(&name(first, second)?, third),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_rename => self.rename(&name(HERE, first)?, &name(HERE, second)?, 0),
            libc::SYS_renameat => self.rename(&name(first, second)?, &name(third, fourth)?, 0),
            libc::SYS_renameat2 => self.rename(&name(first, second)?, &name(third, fourth)?, fifth),
            libc::SYS_pidfd_getfd => self.duplicate(call, first, second, third),
            libc::SYS_fchmod => self.set_mode(call, first, second),
            libc::SYS_bind => self.bind(listener, call, [first, second, third]),
            _ => Err(Errno::NOSYS),
        }
    }

    fn create(&self, name: &Name, flags: u64, mode: u64) -> Result<Outcome, Errno> {
        self.check(name, Change::Create)?;
        let flags = OFlags::from_bits_retain(word(flags)) | OFlags::EXCL | OFlags::CLOEXEC;
        // No program, and none that runs as root for others.
        let mode = Mode::from_raw_mode(word(mode)) & DATA;
        Ok(Outcome::Descriptor(openat(&name.parent, &name.name, flags, mode)?))
    }

    fn remove(&self, name: &Name, flags: AtFlags) -> Result<Outcome, Errno> {
        let is_directory = flags.contains(AtFlags::REMOVEDIR);
        self.check(name, if is_directory { Change::RemoveDirectory } else { Change::Remove })?;
        unlinkat(&name.parent, &name.name, flags).map(|()| Outcome::Done)
    }

    fn make_directory(&self, name: &Name, mode: u64) -> Result<Outcome, Errno> {
        self.check(name, Change::MakeDirectory)?;
        mkdirat(&name.parent, &name.name, Mode::from_raw_mode(word(mode))).map(|()| Outcome::Done)
    }

    fn rename(&self, from: &Name, to: &Name, flags: u64) -> Result<Outcome, Errno> {
        self.check(from, Change::Rename)?;
        self.check(to, Change::Rename)?;
        let flags = RenameFlags::from_bits_retain(word(flags));
        if flags.is_empty() {
            return rustix::fs::renameat(&from.parent, &from.name, &to.parent, &to.name).map(|()| Outcome::Done);
        }
        renameat_with(&from.parent, &from.name, &to.parent, &to.name, flags).map(|()| Outcome::Done)
    }

    /// Duplicates a descriptor of another process if it is an internet socket: others count as closed.
    fn duplicate(&self, call: &Call, process: u64, number: u64, flags: u64) -> Result<Outcome, Errno> {
        let process = self.descriptor(call, process)?;
        let flags = PidfdGetfdFlags::from_bits_retain(word(flags));
        let descriptor = pidfd_getfd(&process, word(number).cast_signed(), flags)?;
        match socket_domain(&descriptor) {
            Ok(AddressFamily::INET | AddressFamily::INET6) => Ok(Outcome::Descriptor(descriptor)),
            _ => Err(Errno::BADF),
        }
    }

    /// Sets the mode of a socket, which its file gets when it is bound.
    fn set_mode(&self, call: &Call, number: u64, mode: u64) -> Result<Outcome, Errno> {
        let socket = self.descriptor(call, number)?;
        if FileType::from_raw_mode(fstat(&socket)?.st_mode) != FileType::Socket {
            return Err(Errno::PERM);
        }
        fchmod(&socket, Mode::from_raw_mode(word(mode))).map(|()| Outcome::Done)
    }

    /// Binds a socket to an address. Only a unix socket's may be a file.
    fn bind(&self, listener: &Listener, call: &Call, arguments: [u64; 3]) -> Result<Outcome, Errno> {
        let [number, address, length] = arguments;
        let length = usize::try_from(word(length)).ok().filter(|length| *length <= ADDRESS_BYTES_MAX);
        let address = read_memory(call.thread, address, length.ok_or(Errno::INVAL)?)?;
        check_waiting(listener, call)?;
        let socket = self.descriptor(call, number)?;
        if let Some(path) = path_of(&address) {
            let name = name_of(call.thread, HERE, path)?;
            self.check(&name, Change::Bind)?;
            let address = SocketAddrUnix::new(path_in(&name.parent, &name.name))?;
            return bind(&socket, &address).map(|()| Outcome::Done);
        }
        // SAFETY: the address lives until the call returns, and the kernel reads no more than its length.
        match unsafe { libc::bind(socket.as_raw_fd(), address.as_ptr().cast(), address.len() as libc::socklen_t) } {
            0 => Ok(Outcome::Done),
            _ => Err(last_error()),
        }
    }

    /// Descriptor of the agent itself.
    fn descriptor(&self, call: &Call, number: u64) -> Result<OwnedFd, Errno> {
        let number = word(number).cast_signed();
        if number < 0 {
            return Err(Errno::BADF);
        }
        if !fs::exists(format!("/proc/{}/task/{}", self.agent, call.thread)).unwrap_or_default() {
            return Err(Errno::PERM);
        }
        pidfd_getfd(&self.pidfd, number, PidfdGetfdFlags::empty())
    }

    fn check(&self, name: &Name, change: Change) -> Result<(), Errno> {
        let status = fstat(&name.parent)?;
        let (identity, mount) = ((status.st_dev, status.st_ino), mount_id(&name.parent)?);
        let parent = Parent { path: &name.parent_path, identity, mount };
        if self.allowed_paths.allow(parent, &name.name, change, mount_of) { Ok(()) } else { Err(Errno::PERM) }
    }
}

/// Fails if the thread waits no more: the memory that was read may be another process's.
fn check_waiting(listener: &Listener, call: &Call) -> Result<(), Errno> {
    if listener.is_waiting(call) { Ok(()) } else { Err(Errno::INTR) }
}

/// The name that a thread means by a path, with its directory opened.
fn name_of(thread: u32, directory: u64, path: &[u8]) -> Result<Name, Errno> {
    let (parent, name) = split(path);
    let proc = format!("/proc/{thread}");
    let parent = match (parent.strip_prefix(b"/proc/self/"), word(directory).cast_signed()) {
        (Some(rest), _) => Path::new(&proc).join(OsStr::from_bytes(rest)),
        (None, libc::AT_FDCWD) => Path::new(&proc).join("cwd").join(OsStr::from_bytes(parent)),
        (None, number) => Path::new(&proc).join("fd").join(number.to_string()).join(OsStr::from_bytes(parent)),
    };
    let parent = open(&parent, DIRECTORY, Mode::empty())?;
    let parent_path = readlinkat(CWD, format!("/proc/self/fd/{}", parent.as_raw_fd()), Vec::new())?;
    let parent_path = OsString::from_vec(parent_path.into_bytes()).into();
    Ok(Name { parent, parent_path, name: OsString::from_vec(name.to_owned()) })
}

impl Running {
    /// Tells that the child has ended. False if it has not.
    fn tell_end(&mut self) -> bool {
        let Ok(Some(status)) = self.child.try_wait() else { return false };
        self.end.write_all(&status.into_raw().to_ne_bytes()).ok();
        true
    }
}

/// A child of the agent.
pub(super) fn child_command(words: &[OsString], pin_dir: &Path) -> Option<Command> {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("cproxy").args(child_arguments(words, pin_dir)?);
    Some(command)
}

/// Arguments of a child that the agent may have started: no other pin directory, and no other command.
fn child_arguments(words: &[OsString], pin_dir: &Path) -> Option<Vec<OsString>> {
    let (command, words) = words.split_first()?;
    let of_pins = [command.clone(), "--pin-dir".into(), pin_dir.into()];
    let own = match (command.to_str()?, words) {
        ("install", [cgroup, counters]) => {
            ["--cgroup".into(), cgroup.clone(), "--service-counters".into(), counters.clone()].to_vec()
        }
        ("policy", [action, cgroup, directions]) => [
            "--action".into(),
            action.clone(),
            "--cgroup".into(),
            cgroup.clone(),
            "--directions".into(),
            directions.clone(),
        ]
        .to_vec(),
        // After the two dashes there are no flags.
        ("canary", routes) => [OsString::from("--")].into_iter().chain(routes.iter().cloned()).collect(),
        _ => return None,
    };
    Some(of_pins.into_iter().chain(own).collect())
}

/// `AT_FDCWD` as an argument.
const HERE: u64 = libc::AT_FDCWD as u32 as u64;

/// Name in a directory.
struct Name {
    parent: OwnedFd,
    /// The kernel's path of it.
    parent_path: PathBuf,
    name: OsString,
}

/// The lower half of an argument: the kernel looks at no more.
fn word(argument: u64) -> u32 {
    argument as u32
}

/// Directory and name of a path. What has no name, such as a path that ends with a slash, has an empty one.
fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(slash) => path.split_at(slash + 1),
        None => (b"", path),
    }
}

/// Number of the mount that a path leads to now.
fn mount_of(directory: &Path) -> Option<u64> {
    mount_id(open(directory, DIRECTORY, Mode::empty()).ok()?).ok()
}

/// Number of the mount that a descriptor was opened on (statx(2), Linux 5.8). As long as it is open, no other mount of
/// any namespace has it.
fn mount_id(directory: impl AsFd) -> Result<u64, Errno> {
    let status = statx(directory, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?;
    if status.stx_mask & StatxFlags::MNT_ID.bits() == 0 { Err(Errno::NOSYS) } else { Ok(status.stx_mnt_id) }
}

/// Path of a unix socket's address; `None` if it has none in the file system.
fn path_of(address: &[u8]) -> Option<&[u8]> {
    let (family, path) = address.split_first_chunk()?;
    let path = path.split(|byte| *byte == 0).next().filter(|path| !path.is_empty())?;
    (libc::c_int::from(u16::from_ne_bytes(*family)) == libc::AF_UNIX).then_some(path)
}

/// Bytes of a thread's memory.
fn read_memory(thread: u32, address: u64, length: usize) -> Result<Vec<u8>, Errno> {
    let mut bytes = vec![0; length];
    let memory = File::open(format!("/proc/{thread}/mem")).map_err(|_| Errno::FAULT)?;
    memory.read_exact_at(&mut bytes, address).map_err(|_| Errno::FAULT)?;
    Ok(bytes)
}

/// Path in a thread's memory.
fn read_path(thread: u32, address: u64) -> Result<Vec<u8>, Errno> {
    let failed = |_| Errno::FAULT;
    let memory = File::open(format!("/proc/{thread}/mem")).map_err(failed)?;
    let mut path = Vec::new();
    while path.len() < PATH_BYTES_MAX {
        let mut part = [0; PATH_PART_BYTES];
        let length = memory.read_at(&mut part, address.wrapping_add(path.len() as u64)).map_err(failed)?;
        let part = part.get(..length).filter(|part| !part.is_empty()).ok_or(Errno::FAULT)?;
        if let Some(end) = part.iter().position(|byte| *byte == 0) {
            path.extend_from_slice(part.get(..end).unwrap_or_default());
            return Ok(path);
        }
        path.extend_from_slice(part);
    }
    Err(Errno::NAMETOOLONG)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_chooses_neither_command_nor_pin_directory() {
        let arguments = |words: &[&str]| {
            let words: Vec<_> = words.iter().map(OsString::from).collect();
            let arguments = child_arguments(&words, Path::new("/pins"))?;
            Some(arguments.iter().map(|argument| argument.to_str().unwrap()).collect::<Vec<_>>().join(" "))
        };
        assert_eq!(
            arguments(&["install", "/sys/fs/cgroup", "on"]).unwrap(),
            "install --pin-dir /pins --cgroup /sys/fs/cgroup --service-counters on"
        );
        assert_eq!(
            arguments(&["canary", "--pin-dir=/others", "TCP,a,b"]).unwrap(),
            "canary --pin-dir /pins -- --pin-dir=/others TCP,a,b"
        );
        assert_eq!(
            arguments(&["policy", "attach", "/sys/fs/cgroup", "both"]).unwrap(),
            "policy --pin-dir /pins --action attach --cgroup /sys/fs/cgroup --directions both"
        );
        for refused in [
            &[][..],
            &["exec", "sh"],
            &["policy", "attach", "/sys/fs/cgroup"],
            &["install", "/sys/fs/cgroup", "on", "--pin-dir=/others"],
        ] {
            assert_eq!(arguments(refused), None, "{refused:?}");
        }
    }

    #[test]
    fn a_path_is_split_at_its_last_slash() {
        for (path, directory, name) in [
            ("/a/b", "/a/", "b"),
            ("/b", "/", "b"),
            ("b", "", "b"),
            ("a/b/", "a/b/", ""),
            ("/a/..", "/a/", ".."),
            ("", "", ""),
        ] {
            assert_eq!(split(path.as_bytes()), (directory.as_bytes(), name.as_bytes()), "{path}");
        }
    }

    #[test]
    fn the_path_of_a_unix_socket_is_known() {
        let address = |family: libc::c_int, rest: &[u8]| [&(family as u16).to_ne_bytes()[..], rest].concat();
        assert_eq!(path_of(&address(libc::AF_UNIX, b"/run/a\0\0")), Some(&b"/run/a"[..]));
        assert_eq!(path_of(&address(libc::AF_UNIX, b"a")), Some(&b"a"[..]));
        assert_eq!(path_of(&address(libc::AF_UNIX, b"\0abstract")), None);
        assert_eq!(path_of(&address(libc::AF_UNIX, b"")), None);
        assert_eq!(path_of(&address(libc::AF_INET, b"/run/a")), None);
        assert_eq!(path_of(b"/"), None);
    }

    #[test]
    fn a_path_is_read_from_memory() {
        let own = rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
        let address = |text: &[u8]| text.as_ptr().expose_provenance() as u64;
        let (short, long) = (b"/run/cproxy/ready\0".to_vec(), vec![b'x'; PATH_BYTES_MAX + PATH_PART_BYTES]);
        assert_eq!(read_path(own, address(&short)).unwrap(), b"/run/cproxy/ready");
        assert_eq!(read_path(own, address(&long)), Err(Errno::NAMETOOLONG));
        assert_eq!(read_path(own, 0), Err(Errno::FAULT));
    }
}
