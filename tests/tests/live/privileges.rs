//! Rights that the agent keeps after its start, and what it does with them.

#![expect(clippy::unwrap_used, reason = "a failed call is a failed test")]

use std::{
    fs::{self, Permissions},
    net::UdpSocket,
    os::unix::{
        fs::{PermissionsExt, chown},
        net::UnixListener,
    },
    path::Path,
    thread,
    time::Duration,
};

use cproxy_tests::{
    manifest::{self, Service, Slice, http_service},
    population::Shape,
    process::{Agent, cproxy, eventually},
    sandbox::Sandbox,
    seccomp,
    strace::RecordedAgent,
    world::{counter, rows, start_agent},
};
use rustix::process::Signal;
use serde_json::json;

const SYNC: Duration = Duration::from_secs(30);
const VIP: &str = "10.96.0.10";
const PODS: [&str; 2] = ["10.244.0.1", "10.244.0.2"];
const PORT: u16 = 53;

/// CAP_BPF, CAP_PERFMON, CAP_SYS_ADMIN, CAP_SYS_PTRACE, CAP_NET_ADMIN and CAP_DAC_READ_SEARCH.
const CAPABILITIES: u64 = 1 << 39 | 1 << 38 | 1 << 21 | 1 << 19 | 1 << 12 | 1 << 2;
const CAP_DAC_OVERRIDE: u64 = 1 << 1;

/// Calls that change a file system whatever their arguments are, by the start of their names.
const CHANGES: [&str; 16] = [
    "chmod",
    "chown",
    "creat",
    "fchmod",
    "fchown",
    "ftruncate",
    "lchown",
    "link",
    "mkdir",
    "mknod",
    "mount",
    "rename",
    "rmdir",
    "symlink",
    "truncate",
    "unlink",
];

/// Flags of open(2) that give write access, or make or change a file.
const WRITE_FLAGS: [&str; 5] = ["O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_TMPFILE"];

/// Checks each thread of a process: its capabilities, that it can gain none, and whether its calls are filtered.
#[track_caller]
fn assert_rights(pid: u32, capabilities: u64, is_filtered: bool) {
    let threads: Vec<_> = fs::read_dir(format!("/proc/{pid}/task")).unwrap().map(Result::unwrap).collect();
    assert!(!threads.is_empty());
    for thread in threads {
        // A thread may have ended.
        let Ok(status) = fs::read_to_string(thread.path().join("status")) else { continue };
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(":\t")).unwrap();
        for (name, expected) in [("CapPrm", capabilities), ("CapEff", capabilities), ("CapBnd", capabilities)] {
            assert_eq!(u64::from_str_radix(field(name), 16).unwrap(), expected, "{name} {status}");
        }
        for name in ["CapInh", "CapAmb"] {
            assert_eq!(u64::from_str_radix(field(name), 16).unwrap(), 0, "{name} {status}");
        }
        let seccomp = if is_filtered { "2" } else { "0" };
        assert_eq!([field("NoNewPrivs"), field("Seccomp")], ["1", seccomp], "{status}");
    }
}

fn write_dns(sandbox: &Sandbox, pod: &str) {
    let service = Service::new("dns").cluster_ips([VIP]).udp("dns", PORT, PORT);
    let slice = Slice::v4("dns").udp("dns", PORT).ready([pod]);
    manifest::write(&sandbox.manifest_dir(), "dns.json", [service.into(), slice.into()]);
}

/// Has a connected UDP socket closed under its owner, on a thread of the agent.
fn close_socket(sandbox: &Sandbox) {
    let closed = counter(sandbox, "sockets_closed");
    sandbox.enter();
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    socket.connect((VIP, PORT)).unwrap();
    write_dns(sandbox, PODS[1]);
    eventually(SYNC, "the socket is closed", || match counter(sandbox, "sockets_closed") {
        now if now > closed => Ok(()),
        now => Err(now),
    });
}

fn state_of_confinement(sandbox: &Sandbox) -> String {
    let check = cproxy(sandbox, &["check"]);
    check.stdout.lines().find(|line| line.contains(" confinement ")).unwrap().to_owned()
}

#[test]
fn every_thread_keeps_the_rights_that_the_agent_needs_and_no_others() {
    let sandbox = Sandbox::for_test();
    sandbox.add_addresses(PODS);
    write_dns(&sandbox, PODS[0]);
    let agent = start_agent(&sandbox);
    assert_rights(agent.pid(), CAPABILITIES, true);
    close_socket(&sandbox);
    assert_rights(agent.pid(), CAPABILITIES, true);
    let state = state_of_confinement(&sandbox);
    assert!(state.starts_with("ok ") && state.ends_with("; no new privileges; system calls are filtered"), "{state}");
}

#[test]
fn a_unix_socket_as_the_api_server_takes_one_more_capability() {
    let sandbox = Sandbox::for_test();
    let kubeconfig = manifest::write_kubeconfig(sandbox.dir(), "https://192.0.2.1");
    let mut agent = Agent::new(&sandbox).kubeconfig(kubeconfig).args(["--apiserver", "unix:///nowhere"]).spawn();
    agent.wait_log("CAP_DAC_OVERRIDE; no new privileges; system calls are filtered", SYNC);
    assert_rights(agent.pid(), CAPABILITIES | CAP_DAC_OVERRIDE, true);
}

fn write_exec_kubeconfig(directory: &Path) -> std::path::PathBuf {
    let exec = json!({"apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never", "command": "false"});
    let config = manifest::kubeconfig(json!({"server": "https://192.0.2.1"}), json!({"exec": exec}));
    manifest::write_text(directory, "kubeconfig", &config.to_string())
}

#[test]
fn an_exec_plugin_may_make_any_system_call() {
    let sandbox = Sandbox::for_test();
    let kubeconfig = write_exec_kubeconfig(sandbox.dir());
    let mut agent = Agent::new(&sandbox).kubeconfig(kubeconfig).spawn();
    agent.wait_log("no new privileges; system calls are not filtered", SYNC);
    assert!(agent.log().contains("the exec plugin of the kubeconfig may need any"), "{}", agent.log());
    assert_rights(agent.pid(), CAPABILITIES, false);
    let state = state_of_confinement(&sandbox);
    assert!(state.starts_with("degraded ") && state.contains("system calls are not filtered"), "{state}");
}

#[test]
fn an_exec_plugin_that_comes_later_takes_another_start() {
    let sandbox = Sandbox::for_test();
    let kubeconfig = manifest::write_kubeconfig(sandbox.dir(), "https://192.0.2.1");
    let mut agent = Agent::new(&sandbox).kubeconfig(kubeconfig).spawn();
    agent.wait_log("system calls are filtered", SYNC);
    write_exec_kubeconfig(sandbox.dir());
    agent.signal(Signal::HUP);
    let line = agent.wait_log("SIGHUP: credentials from an exec plugin", SYNC);
    assert!(line.ends_with("take another start of the agent; all settings stay as they are"), "{line}");
}

/// User without rights on what the tests make.
const OTHER_UID: u32 = 65_534;

#[test]
fn a_unix_socket_that_comes_later_is_taken_only_if_the_agent_may_write_to_it() {
    let sandbox = Sandbox::for_test();
    let kubeconfig = manifest::write_kubeconfig(sandbox.dir(), "https://192.0.2.1");
    let set = |server: &str| manifest::write_text(sandbox.dir(), "settings", &format!("apiserver = {server}\n"));
    let file = set("https://192.0.2.1");
    let mut agent = Agent::new(&sandbox).kubeconfig(kubeconfig).env("CPROXY_CONFIG", &file).spawn();
    agent.wait_log("system calls are filtered", SYNC);
    let listen = |name: &str, owner, mode| {
        let path = sandbox.dir().join(name);
        let listener = UnixListener::bind(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        chown(&path, Some(owner), None).unwrap();
        listener.set_nonblocking(true).unwrap();
        (listener, format!("unix://{}", path.display()))
    };
    let is_reached = |listener: &UnixListener| listener.accept().map(drop).map_err(|error| error.to_string());

    let (theirs, address) = listen("theirs", OTHER_UID, 0o755);
    let missing = format!("unix://{}", sandbox.dir().join("missing").display());
    for (address, why) in [(&address, "Permission denied"), (&missing, "No such file or directory")] {
        set(&format!("https://192.0.2.2,{address}"));
        agent.signal(Signal::HUP);
        let line = agent.wait_log(&format!("SIGHUP: --apiserver {address}: "), SYNC);
        assert!(line.contains(why) && line.contains("CAP_DAC_OVERRIDE"), "{line}");
        assert!(line.ends_with("takes another start of the agent; all settings stay as they are"), "{line}");
    }
    assert!(!agent.log().contains("settings were read again"), "{}", agent.log());
    is_reached(&theirs).unwrap_err();

    let (shared, address) = listen("shared", OTHER_UID, 0o777);
    set(&address);
    agent.signal(Signal::HUP);
    agent
        .wait_log(&format!("settings were read again: --apiserver changed from https://192.0.2.1/ to {address}"), SYNC);
    eventually(SYNC, "the agent connects to the socket that all may write to", || is_reached(&shared));

    let (own, address) = listen("own", 0, 0o755);
    set(&address);
    agent.signal(Signal::HUP);
    agent.wait_log(&format!("to {address}"), SYNC);
    eventually(SYNC, "the agent connects to root's socket", || is_reached(&own));

    // The socket in force is not checked again, also while it is away.
    fs::remove_file(sandbox.dir().join("own")).unwrap();
    agent.signal(Signal::HUP);
    agent.wait_log("settings were read again: no setting has changed", SYNC);
}

#[test]
fn a_kernel_without_filters_is_no_obstacle_and_named() {
    let sandbox = Sandbox::for_test();
    manifest::write(&sandbox.manifest_dir(), "web.json", http_service("web", VIP, PODS));
    thread::scope(|scope| {
        let limited = scope.spawn(|| {
            seccomp::forbid_filters();
            let mut agent = start_agent(&sandbox);
            let line = agent.wait_log("system calls are not filtered: ", SYNC);
            assert!(line.contains("it needs CONFIG_SECCOMP_FILTER"), "{line}");
            agent.kill();
        });
        limited.join().unwrap();
    });
}

/// Errors of system calls.
#[cfg(target_arch = "x86_64")]
const EPERM: i64 = -(libc::EPERM as i64);
#[cfg(target_arch = "x86_64")]
const EBADF: i64 = -(libc::EBADF as i64);
#[cfg(target_arch = "x86_64")]
const EEXIST: i64 = -(libc::EEXIST as i64);
#[cfg(target_arch = "x86_64")]
const ENOSYS: i64 = -(libc::ENOSYS as i64);

/// Runs code in the filtered agent, so to speak, which tries to change files that are not the agent's.
#[cfg(target_arch = "x86_64")]
#[test]
fn code_in_the_agent_changes_no_file_takes_no_descriptor_and_starts_no_program() {
    use std::{
        io::{BufRead as _, BufReader},
        os::unix::fs::PermissionsExt as _,
        process::{Command, Stdio},
    };

    use cproxy_tests::injected::{
        Argument::{self, Number, Text},
        Stopped,
    };
    const CREATE: i64 = (libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL) as i64;
    const HERE: i64 = libc::AT_FDCWD as i64;
    /// Commands of fcntl(2) (include/uapi/asm-generic/fcntl.h).
    const F_SETSIG: libc::c_int = 10;
    const F_SETOWN_EX: libc::c_int = 15;
    // Commands of bpf(2) (include/uapi/linux/bpf.h).
    const BPF_PROG_LOAD: i64 = 5;
    const BPF_BTF_LOAD: i64 = 18;
    const BPF_LINK_CREATE: i64 = 28;
    const BPF_LINK_UPDATE: i64 = 29;
    let sandbox = Sandbox::for_test();
    manifest::write(&sandbox.manifest_dir(), "web.json", http_service("web", VIP, PODS));
    let mut agent = start_agent(&sandbox);
    agent.wait_log("system calls are filtered", SYNC);
    let path = |name: &str| sandbox.dir().join(name).to_str().unwrap().to_owned();
    let (victim, evil, own) = (path("victim"), path("evil"), sandbox.run_dir().join("own"));
    fs::write(&victim, "before").unwrap();
    let own = own.to_str().unwrap();
    let pin = sandbox.pin_dir().join("..").join("other");
    // Another process with a file that is open for writing, and with a socket.
    let file = fs::OpenOptions::new().write(true).open(&victim).unwrap();
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let descriptor = |owner: &dyn std::os::fd::AsRawFd| Number(owner.as_raw_fd().into());
    // A mount namespace in which another file system is on the path of the pin directory, with the victim in it.
    let (pins, above) = (path("bpf/cproxy"), path("bpf"));
    let script = format!(
        "mount -t tmpfs none {above} && mkdir {pins} && mount --bind {} {pins} && echo ready && exec sleep 1000",
        sandbox.dir().join("elsewhere").display()
    );
    fs::create_dir(sandbox.dir().join("elsewhere")).unwrap();
    fs::write(path("elsewhere/victim"), "before").unwrap();
    let mut namespace = Command::new("unshare");
    namespace.args(["--mount", "sh", "-c", &script]).stdout(Stdio::piped());
    let mut namespace = namespace.spawn().unwrap();
    assert_eq!(BufReader::new(namespace.stdout.take().unwrap()).lines().next().unwrap().unwrap(), "ready");
    let elsewhere = format!("/proc/{}/root{pins}", namespace.id());
    {
        let stopped = Stopped::new(agent.pid());
        let call = |number, arguments: &[Argument<'_>]| stopped.call(number, arguments);
        assert_eq!(call(libc::SYS_openat, &[Number(HERE), Text(&evil), Number(CREATE), Number(0o644)]), EPERM);
        let created = call(libc::SYS_openat, &[Number(HERE), Text(own), Number(CREATE), Number(0o6777)]);
        assert!(created > 2, "{created}");
        assert_eq!(fs::metadata(own).unwrap().permissions().mode() & 0o7777, 0o644);
        assert_eq!(call(libc::SYS_openat, &[Number(HERE), Text(own), Number(CREATE), Number(0o644)]), EEXIST);
        // Its own new file cannot take the place of another one, by no form of the call and no detour.
        let detour = format!("{}/../{}", sandbox.run_dir().display(), victim.rsplit('/').next().unwrap());
        let other = format!("/proc/self/root{victim}");
        for target in [&victim, &detour, &other] {
            assert_eq!(call(libc::SYS_rename, &[Text(own), Text(target)]), EPERM, "{target}");
            let at = [Number(HERE), Text(own), Number(HERE), Text(target), Number(0)];
            assert_eq!(call(libc::SYS_renameat, &at), EPERM, "{target}");
            assert_eq!(call(libc::SYS_renameat2, &at), EPERM, "{target}");
            assert_eq!(call(libc::SYS_unlink, &[Text(target)]), EPERM, "{target}");
            assert_eq!(call(libc::SYS_unlinkat, &[Number(HERE), Text(target), Number(0)]), EPERM, "{target}");
        }
        assert_eq!(call(libc::SYS_mkdir, &[Text(&evil), Number(0o755)]), EPERM);
        assert_eq!(call(libc::SYS_mkdir, &[Text(pin.to_str().unwrap()), Number(0o755)]), EPERM);
        assert_eq!(call(libc::SYS_fchmod, &[Number(created), Number(0o777)]), EPERM);
        // Descriptors of this process: of the file, and of the socket.
        let process = call(libc::SYS_pidfd_open, &[Number(std::process::id().into()), Number(0)]);
        assert!(process > 2, "{process}");
        assert_eq!(call(libc::SYS_pidfd_getfd, &[Number(process), descriptor(&file), Number(0)]), EBADF);
        let duplicate = call(libc::SYS_pidfd_getfd, &[Number(process), descriptor(&socket), Number(0)]);
        assert!(duplicate > 2, "{duplicate}");
        assert_eq!(call(libc::SYS_unlink, &[Text(&format!("{elsewhere}/victim"))]), EPERM);
        let renamed = [Text(&format!("{elsewhere}/victim")), Text(&format!("{elsewhere}/other"))];
        assert_eq!(call(libc::SYS_rename, &renamed), EPERM);
        assert_eq!(call(libc::SYS_mkdir, &[Text(&format!("{elsewhere}/new")), Number(0o755)]), EPERM);
        // A socket's file is a file.
        let bind = |path: &str| {
            let unix = call(libc::SYS_socket, &[Number(libc::AF_UNIX.into()), Number(libc::SOCK_STREAM.into())]);
            assert!(unix > 2, "{unix}");
            let address = format!("\u{1}\0{path}");
            call(libc::SYS_bind, &[Number(unix), Text(&address), Number(address.len() as i64 + 1)])
        };
        assert_eq!(bind(&evil), EPERM);
        assert_eq!(bind(&format!("{own}.sock")), 0);
        assert_eq!(call(libc::SYS_unlink, &[Text(&format!("{own}.sock"))]), 0);
        assert_eq!(call(libc::SYS_unlink, &[Text(own)]), 0);
        // No signal to others.
        let other = Number(namespace.id().into());
        assert_eq!(call(libc::SYS_tgkill, &[other, other, Number(libc::SIGABRT.into())]), ENOSYS);
        for command in [libc::F_SETOWN, F_SETSIG, F_SETOWN_EX] {
            assert_eq!(call(libc::SYS_fcntl, &[Number(0), Number(command.into()), other]), ENOSYS, "{command}");
        }
        // Neither a process nor a program of either kind.
        assert_eq!(call(libc::SYS_clone, &[Number(libc::SIGCHLD.into()), Number(0)]), ENOSYS);
        assert_eq!(call(libc::SYS_fork, &[]), ENOSYS);
        assert_eq!(call(libc::SYS_execve, &[Text("/bin/true"), Number(0), Number(0)]), ENOSYS);
        for command in [BPF_PROG_LOAD, BPF_BTF_LOAD, BPF_LINK_CREATE, BPF_LINK_UPDATE] {
            assert_eq!(call(libc::SYS_bpf, &[Number(command), Number(0), Number(0)]), ENOSYS, "{command}");
        }
    }
    assert_eq!(fs::read_to_string(&victim).unwrap(), "before");
    assert!(!Path::new(&evil).exists());
    assert_eq!(fs::read_to_string(path("elsewhere/victim")).unwrap(), "before");
    namespace.kill().unwrap();
    namespace.wait().unwrap();
    // It works as before.
    cproxy(&sandbox, &["check"]).success();
    agent.signal(Signal::TERM);
    eventually(SYNC, "the agent removes its files", || match sandbox.run_dir().join("ready").exists() {
        true => Err(""),
        false => Ok(()),
    });
}

/// Whether a traced call changes a file system, or may do so later through the descriptor that it opens.
fn may_write(call: &str) -> bool {
    let is_open = call.starts_with("open") && WRITE_FLAGS.iter().any(|flag| call.contains(flag));
    is_open || call.starts_with("bpf(BPF_OBJ_PIN") || CHANGES.iter().any(|name| call.starts_with(name))
}

#[test]
fn after_its_start_the_agent_writes_to_its_directories_alone_and_misses_no_system_call() {
    let sandbox = Sandbox::for_test();
    sandbox.add_addresses(PODS);
    write_dns(&sandbox, PODS[0]);
    let mut agent = RecordedAgent::start(&sandbox);
    assert!(agent.settle(), "{}", agent.log());
    let is_ready = || sandbox.run_dir().join("ready").exists();
    // All that an agent does in its life: its maps grow, settings are read again, seeds change, sockets are closed.
    manifest::write(&sandbox.manifest_dir(), "others.json", Shape::new(200, 10).objects(0..200));
    eventually(SYNC, "the table grows", || match rows(&sandbox, "services").len() {
        201 => Ok(()),
        now => Err(now),
    });
    agent.signal(Signal::HUP);
    let has_reloaded = || if agent.log().contains("settings were read again") { Ok(()) } else { Err(agent.log()) };
    eventually(SYNC, "settings are read again", has_reloaded);
    cproxy(&sandbox, &["reseed"]).success();
    eventually(SYNC, "the agent is ready again", || if is_ready() { Ok(()) } else { Err("") });
    close_socket(&sandbox);
    agent.signal(Signal::TERM);
    eventually(SYNC, "the agent ends", || if agent.has_ended() { Ok(()) } else { Err("") });

    let trace = agent.trace();
    let (_, after) = trace.split_once("seccomp(SECCOMP_SET_MODE_FILTER").unwrap();
    let calls: Vec<_> = after.lines().skip(1).filter_map(|line| Some(line.split_once(' ')?.1.trim_start())).collect();
    let own = [sandbox.run_dir(), sandbox.pin_dir()].map(|dir| dir.to_str().unwrap().to_owned());
    let writes: Vec<_> = calls.iter().filter(|call| may_write(call)).collect();
    for call in &writes {
        assert!(own.iter().any(|dir| call.contains(dir.as_str())), "{call}");
    }
    for expected in ["bpf(BPF_OBJ_PIN", "renameat", "unlink", "openat"] {
        assert!(writes.iter().any(|call| call.starts_with(expected)), "{expected}: {writes:#?}");
    }
    // The C library does without clone3, whose arguments no filter can see.
    let missed = |call: &&&str| call.contains("= -1 ENOSYS") && !call.contains("clone3");
    assert_eq!(calls.iter().filter(missed).collect::<Vec<_>>(), Vec::<&&str>::new());
}
