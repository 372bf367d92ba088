//! An isolated environment for a test on this machine, with a network namespace, a cgroup, a bpffs and a directory of
//! its own.

use std::{
    fmt::Display,
    fs,
    io::{self, Write},
    net::{Ipv4Addr, Ipv6Addr},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

pub use crate::netns::Netns;
use crate::{
    cgroup::ChildCgroup,
    directory::{self, Directory},
    netns::FreshNetns,
    process::eventually,
};

/// Lock that allows one sandbox at a time, since the cgroup is a property of the whole process.
static OCCUPIED: Mutex<()> = Mutex::new(());

/// Prefix of the tests' sandboxes. `cargo xtask test` looks for their remains.
pub const TEST_PREFIX: &str = "cproxy-test";

/// Limit on the time until the kernel has announced an address.
const ANNOUNCEMENT_MAX: Duration = Duration::from_secs(60);

/// Number of sandboxes so far, for unique names.
static NUMBER: AtomicU32 = AtomicU32::new(0);

/// Range of the addresses on the links of [`Sandbox::neighbour`]s.
pub const NEIGHBOURS_CIDR: &str = "198.18.0.0/15";
/// First address of that range.
const FIRST_NEIGHBOUR: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 0);
/// Number of neighbours so far, for unique subnets.
static NEIGHBOUR: AtomicU32 = AtomicU32::new(0);
/// Number of subnets with four addresses each.
const NEIGHBOURS: u32 = 1 << 15;

/// Place in which a child process runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// The sandbox's network namespace and cgroup, with the programs under test.
    Hooked,
    /// The sandbox's network namespace and this process's former cgroup, without the programs under test.
    Unhooked,
    /// The sandbox's network namespace and a cgroup like the sandbox's, without programs. A socket costs more in any
    /// cgroup but the root.
    Beside,
}

/// Removes the remains of sandboxes with this prefix whose processes were killed.
pub fn sweep(prefix: &str) {
    directory::sweep(prefix);
}

/// The sandbox. While it exists, its creator's thread is in its network namespace (as are the threads and processes
/// that this thread starts), and the whole process is in its cgroup. Dropping it undoes everything, whatever fails. The
/// next sandbox with the same prefix sweeps the remains of a killed process.
///
/// The namespace has a loopback interface that is up, and no routes.
#[derive(Debug)]
pub struct Sandbox {
    // The drop order matters: processes end, mounts and files go, the thread returns, the next sandbox may start.
    cgroup: ChildCgroup,
    directory: Directory,
    netns: FreshNetns,
    // A guard is not `Send`, so it also keeps the sandbox on its thread, as the network namespace requires.
    _occupied: MutexGuard<'static, ()>,
}

impl Sandbox {
    /// Makes a sandbox called `<prefix>-<pid>-<n>`, once the one before it is gone.
    ///
    /// # Panics
    /// With one sentence, when the machine lacks something: root, cgroup2, bpffs, or the command `ip`.
    pub fn new(prefix: &str) -> Self {
        let occupied = OCCUPIED.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(
            rustix::process::geteuid().is_root(),
            "namespaces, cgroups and BPF need root: run this again as root, for example through sudo"
        );
        let name = format!("{prefix}-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        directory::sweep(prefix);
        let netns = FreshNetns::enter();
        let directory = Directory::create(&name);
        let cgroup = ChildCgroup::enter(&name);
        let sandbox = Self { cgroup, directory, netns, _occupied: occupied };
        sandbox.ip("link set lo up\n");
        sandbox
    }

    /// A sandbox of a test.
    ///
    /// # Panics
    /// As [`Sandbox::new`].
    pub fn for_test() -> Self {
        Self::new(TEST_PREFIX)
    }

    /// Cgroup that holds the sandbox's others, and none of anybody else.
    pub fn cgroup_parent(&self) -> &Path {
        &self.cgroup.parent
    }

    /// Cgroup of this process, to which programs are attached.
    pub fn cgroup(&self) -> &Path {
        &self.cgroup.path
    }

    /// Cgroup of [`Placement::Beside`].
    pub fn cgroup_beside(&self) -> &Path {
        &self.cgroup.beside
    }

    /// The sandbox's directory: logs and scratch files.
    pub fn dir(&self) -> &Path {
        &self.directory.path
    }

    /// A directory on the sandbox's bpffs, which does not exist yet.
    pub fn pin_dir(&self) -> PathBuf {
        self.directory.path.join("bpf/cproxy")
    }

    /// An empty directory for `ready` and the agent's socket.
    pub fn run_dir(&self) -> PathBuf {
        self.directory.path.join("run")
    }

    /// An empty directory for manifests.
    pub fn manifest_dir(&self) -> PathBuf {
        self.directory.path.join("manifests")
    }

    /// Network namespace of the sandbox; other threads may keep clones.
    pub fn netns(&self) -> &Netns {
        &self.netns.inside
    }

    /// Former network namespace of this thread.
    pub fn outside(&self) -> &Netns {
        &self.netns.outside
    }

    /// Moves the calling thread, not the sandbox's own, into the sandbox's network namespace for good.
    pub fn enter(&self) {
        self.netns().enter().expect("cannot enter the sandbox's network namespace");
    }

    /// Adds an address to the loopback interface.
    pub fn add_address(&self, address: impl Display) {
        self.add_addresses([address]);
    }

    /// Adds addresses to the loopback interface, all at once, and waits until the kernel has announced them.
    pub fn add_addresses<A: Display>(&self, addresses: impl IntoIterator<Item = A>) {
        let addresses: Vec<_> = addresses.into_iter().map(|address| address.to_string()).collect();
        let line = |address: &String| {
            let rest = if address.contains(':') { "/128 dev lo nodad" } else { "/32 dev lo" };
            format!("address add {address}{rest}\n")
        };
        self.ip(&addresses.iter().map(line).collect::<String>());
        let v6: Vec<Ipv6Addr> = addresses.iter().filter_map(|address| address.parse().ok()).collect();
        if !v6.is_empty() {
            self.wait_for_announcement(&v6);
        }
    }

    /// Waits until the kernel has announced these addresses and their local routes. For IPv6, a worker of all network
    /// namespaces does that, on a busy machine later than the program that the announcement would disturb starts.
    fn wait_for_announcement(&self, addresses: &[Ipv6Addr]) {
        eventually(ANNOUNCEMENT_MAX, "the kernel announces the addresses", || {
            let mut ip = Command::new("ip");
            ip.args(["-6", "route", "show", "table", "local"]).stdin(Stdio::null());
            let output = self.place(&mut ip, Placement::Unhooked).output().expect("cannot run `ip` (of iproute2)");
            let routes = String::from_utf8_lossy(&output.stdout);
            let address = |line: &str| line.strip_prefix("local ")?.split(' ').next()?.parse::<Ipv6Addr>().ok();
            let local: Vec<_> = routes.lines().filter_map(address).collect();
            if addresses.iter().all(|address| local.contains(address)) { Ok(()) } else { Err(routes.into_owned()) }
        });
    }

    /// Makes `program` start inside the sandbox's network namespace and cgroup, whichever thread spawns it.
    pub fn child_in(&self, mut program: Command) -> Command {
        self.place(&mut program, Placement::Hooked);
        program
    }

    /// Makes `program` start at `placement`, whichever thread spawns it.
    ///
    /// # Panics
    /// When the cgroup is gone.
    pub fn place<'c>(&self, program: &'c mut Command, placement: Placement) -> &'c mut Command {
        let netns = self.netns().clone();
        let cgroup = match placement {
            Placement::Hooked => &self.cgroup.path,
            Placement::Unhooked => &self.cgroup.origin,
            Placement::Beside => &self.cgroup.beside,
        };
        let members = cgroup.join("cgroup.procs");
        let members = fs::OpenOptions::new()
            .write(true)
            .open(&members)
            .unwrap_or_else(|error| panic!("cannot open {}: {error}", members.display()));
        let move_self = move || {
            netns.enter()?;
            // "0" is the writing process.
            (&members).write_all(b"0")
        };
        // SAFETY: between fork and exec the closure only makes the system calls setns and write on descriptors that
        // are already open; it takes no lock and allocates nothing.
        unsafe { program.pre_exec(move_self) }
    }

    /// A network namespace beside the sandbox's, with a link to it, a default route over that link, and `addresses` on
    /// its loopback interface. It ends with its last handle.
    ///
    /// # Panics
    /// With the message of `ip`, if it fails.
    pub fn neighbour<A: Display>(&self, addresses: impl IntoIterator<Item = A>) -> Netns {
        let number = NEIGHBOUR.fetch_add(1, Ordering::Relaxed) % NEIGHBOURS;
        let [near, far] = [1, 2].map(|host| Ipv4Addr::from_bits(FIRST_NEIGHBOUR.to_bits() + number * 4 + host));
        let netns = Netns::create();
        let path = netns.path();
        self.ip(&format!(
            "link add near{number} type veth peer name far netns {}\n\
             address add {near}/30 dev near{number}\n\
             link set near{number} up\n",
            path.display()
        ));
        let own = addresses.into_iter().map(|address| format!("address add {address}/32 dev lo\n"));
        let commands = format!(
            "link set lo up\naddress add {far}/30 dev far\nlink set far up\nroute add default via {near}\n{}",
            own.collect::<String>()
        );
        netns.run(|| self.run_ip(&commands, |ip| ip));
        netns
    }

    /// An empty network namespace beside the sandbox's. It ends with its last handle.
    pub fn empty_neighbour(&self) -> Netns {
        Netns::create()
    }

    /// Runs iproute2 `commands`, one a line, inside a neighbour.
    ///
    /// # Panics
    /// With the message of `ip`, if it fails.
    pub fn ip_in(&self, neighbour: &Netns, commands: &str) {
        neighbour.run(|| self.run_ip(commands, |ip| ip));
    }

    /// A network namespace with a macvlan interface on the link of a neighbour, like that of a pod on its node: its
    /// packets pass the neighbour's interface, but not its network stack. `number` distinguishes several of them.
    ///
    /// # Errors
    /// The message of `ip`: the kernel may have no macvlan.
    pub fn behind_macvlan(&self, neighbour: &Netns, number: u8) -> io::Result<Netns> {
        let pod = Netns::create();
        let link = neighbour.run(|| Command::new("ip").args(["-oneline", "link", "show", "far"]).output())?;
        let link = String::from_utf8_lossy(&link.stdout).into_owned();
        // `ip` accepts an interface's index as its name. The other end of the link is in this namespace.
        let near = link.split_once("far@").and_then(|(_, rest)| rest.split_once(':')).map(|(near, _)| near);
        let near = near.ok_or_else(|| io::Error::other(format!("no link called far: {link}")))?;
        let (gateway, address) = (format!("10.200.{number}.1"), format!("10.200.{number}.2"));
        let add = format!("link add pod link far netns {} type macvlan mode bridge\n", pod.path().display());
        neighbour.run(|| self.try_ip(&add, |ip| ip))?;
        let up = format!(
            "link set lo up\naddress add {address}/24 dev pod\nlink set pod up\nroute add default via {gateway}\n"
        );
        pod.run(|| self.try_ip(&up, |ip| ip))?;
        self.netns().run(|| self.try_ip(&format!("address add {gateway}/24 dev {near}\n"), |ip| ip))?;
        Ok(pod)
    }

    /// Runs iproute2 `commands`, one a line, inside the sandbox.
    ///
    /// # Panics
    /// With the message of `ip`, if it fails.
    pub fn ip(&self, commands: &str) {
        self.run_ip(commands, |ip| self.place(ip, Placement::Unhooked));
    }

    /// Runs iproute2 `commands`, one a line, in the calling thread's network namespace.
    ///
    /// # Panics
    /// With the message of `ip`, if it fails.
    pub(crate) fn ip_here(&self, commands: &str) {
        self.run_ip(commands, |ip| ip);
    }

    fn run_ip(&self, commands: &str, place: impl Fn(&mut Command) -> &mut Command) {
        self.try_ip(commands, place).unwrap_or_else(|error| panic!("`ip` (of iproute2): {error}"));
    }

    fn try_ip(&self, commands: &str, place: impl Fn(&mut Command) -> &mut Command) -> io::Result<()> {
        let batch = self.dir().join("ip-batch");
        fs::write(&batch, commands)?;
        let mut ip = Command::new("ip");
        ip.arg("-batch").arg(&batch).stdin(Stdio::null());
        let output = place(&mut ip).output()?;
        let complaint = || io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned());
        if output.status.success() { Ok(()) } else { Err(complaint()) }
    }
}
