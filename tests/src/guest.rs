//! A virtual machine with a kernel of its own, in QEMU with an emulated processor, to test images in their real
//! environment. It reaches the sandbox's network and its servers at their usual addresses.

use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader, Write},
    os::unix::{
        fs::{PermissionsExt, symlink},
        net::UnixStream,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{
    process::{Daemon, eventually},
    sandbox::{Placement, Sandbox},
};

/// Variable with the directory of the guest kernel.
pub const KERNEL_VARIABLE: &str = "CPROXY_GUEST_KERNEL";

/// Variable with the initramfs that `cargo xtask image initramfs` makes.
pub const INITRAMFS_VARIABLE: &str = "CPROXY_INITRAMFS";

/// Variable with the archive that `cargo xtask image rootfs` makes.
pub const ROOTFS_VARIABLE: &str = "CPROXY_ROOTFS";

/// Variable with the program vhost-device-vsock, the host's side of a vsock device.
const VSOCK_DEVICE_VARIABLE: &str = "CPROXY_VSOCK_DEVICE";

/// CID of a guest. Each guest has a host's side of its own, so they share it.
const VSOCK_CID: &str = "3";

/// Path of the guests' first process, which hands over to the image's `/init`.
const FIRST_PROCESS: &str = "guest/init";

/// The vendor's set-up of a guest, which runs before cproxy's.
const SET_UP: &str = r#"#!/bin/busybox sh
echo "guest: the kernel has started its first process"
/bin/busybox mkdir -p /dev /proc /sys
/bin/busybox mount -t proc proc /proc
for module in /guest/modules/*; do
    [ ! -e "$module" ] || /bin/busybox insmod "$module" || echo "guest: $module cannot be loaded"
done
/bin/busybox ip link set eth0 up 2>/dev/null &&
    /bin/busybox ip address add ${GUEST_ADDRESS:-10.0.2.15/24} dev eth0 &&
    /bin/busybox ip route add default via ${GUEST_GATEWAY:-10.0.2.2}
exec ${GUEST_INIT:-/init}
"#;

/// Number of console lines that a failed test shows.
const TAIL_LINES: usize = 60;

/// Limit on the start of QEMU, and of the host's side of a vsock device.
const QEMU_TIMEOUT: Duration = Duration::from_secs(20);

/// Limit on an answer of QEMU's monitor, and on saving or loading a guest's state.
const MONITOR_TIMEOUT: Duration = Duration::from_secs(60);

/// Pause between two reads of a console.
const FOLLOW_PAUSE: Duration = Duration::from_millis(200);

/// Number of guests so far, for unique names.
static NUMBER: AtomicU32 = AtomicU32::new(0);

/// A machine that QEMU emulates.
#[derive(Debug)]
struct Machine {
    architecture: &'static str,
    qemu: &'static str,
    options: &'static [&'static str],
    /// Its serial console to Linux.
    console: &'static str,
}

/// Machines by their architectures.
const MACHINES: [Machine; 2] = [
    Machine {
        architecture: "x86_64",
        qemu: "qemu-system-x86_64",
        options: &["-M", "q35", "-cpu", "qemu64,+rdrand"],
        console: "ttyS0",
    },
    Machine {
        architecture: "aarch64",
        qemu: "qemu-system-aarch64",
        // Graviton 2 and Altra have a descendant of this core.
        // The older interrupt controller has 8 CPUs at most.
        options: &["-M", "virt,gic-version=3", "-cpu", "cortex-a72"],
        console: "ttyAMA0",
    },
];

/// A guest kernel: the file `vmlinux` or `kernel` of a directory, and its modules in `modules`, which the guest loads
/// in the order of their names.
#[derive(Clone, Debug)]
pub struct Kernel(PathBuf);

impl Kernel {
    /// The kernel that the environment names.
    ///
    /// # Panics
    /// When the variable is not set.
    pub fn from_env() -> Self {
        Self(path_from_env(KERNEL_VARIABLE, "cargo xtask vm test"))
    }

    /// The kernel in a directory.
    pub fn at(directory: impl Into<PathBuf>) -> Self {
        Self(directory.into())
    }

    /// Path of the ELF file if there is one, which starts without firmware, as in Firecracker.
    fn file(&self) -> PathBuf {
        let elf = self.0.join("vmlinux");
        if elf.exists() { elf } else { self.0.join("kernel") }
    }

    /// Machine of its architecture, which the file `architecture` names; without it, this machine's.
    fn machine(&self) -> &'static Machine {
        let name = fs::read_to_string(self.0.join("architecture"));
        let name = name.as_deref().map_or(std::env::consts::ARCH, str::trim);
        let machine = MACHINES.iter().find(|machine| machine.architecture == name);
        machine.unwrap_or_else(|| panic!("no machine is known for a kernel of {name}"))
    }

    fn modules(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.0.join("modules")).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    }
}

/// The other end of a guest's network card.
#[derive(Debug)]
enum Network {
    /// QEMU itself, which makes the guest's connections in the sandbox.
    User,
    /// A tap device of the sandbox.
    Tap(String),
}

/// The kernel, image and parameters of a guest.
#[derive(Debug)]
pub struct GuestImage<'s> {
    sandbox: &'s Sandbox,
    kernel: Kernel,
    directory: PathBuf,
    parameters: Vec<String>,
    workload: Option<String>,
    memory_mib: u32,
    cpus: u32,
    network: Option<Network>,
    has_vsock: bool,
    has_generation_id: bool,
    instruction_shift: Option<u8>,
}

impl<'s> GuestImage<'s> {
    /// The image of `cargo xtask image initramfs` without user files.
    pub fn new(sandbox: &'s Sandbox, kernel: &Kernel) -> Self {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let directory = sandbox.dir().join(format!("guest-{number}"));
        let image = Self {
            sandbox,
            kernel: kernel.clone(),
            directory,
            parameters: Vec::new(),
            workload: None,
            memory_mib: 128,
            cpus: 1,
            network: Some(Network::User),
            has_vsock: false,
            has_generation_id: false,
            instruction_shift: None,
        };
        let modules = kernel.modules();
        modules.iter().filter_map(|path| path.file_name()?.to_str().map(|name| (path, name))).fold(
            image.program(FIRST_PROCESS, SET_UP),
            |image, (path, name)| {
                let content = fs::read(path).unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()));
                image.file(&format!("guest/modules/{name}"), content)
            },
        )
    }

    /// Adds a file.
    #[must_use]
    pub fn file(self, path: &str, content: impl AsRef<[u8]>) -> Self {
        let file = self.directory.join("files").join(path);
        let parent = file.parent().expect("a file is in a directory");
        let written = fs::create_dir_all(parent).and_then(|()| fs::write(&file, content));
        written.unwrap_or_else(|error| panic!("cannot write {}: {error}", file.display()));
        self
    }

    /// Adds an executable file.
    #[must_use]
    pub fn program(self, path: &str, content: impl AsRef<[u8]>) -> Self {
        let image = self.file(path, content);
        let file = image.directory.join("files").join(path);
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).expect("cannot change a file just written");
        image
    }

    /// Adds a symbolic link.
    #[must_use]
    pub fn link(self, path: &str, target: &str) -> Self {
        let link = self.directory.join("files").join(path);
        let parent = link.parent().expect("a link is in a directory");
        let made = fs::create_dir_all(parent).and_then(|()| symlink(target, &link));
        made.unwrap_or_else(|error| panic!("cannot make the link {}: {error}", link.display()));
        self
    }

    /// Adds the overlay for root file systems with an init system.
    #[must_use]
    pub fn rootfs(self) -> Self {
        self.unpack(&path_from_env(ROOTFS_VARIABLE, "cargo xtask vm test"), "")
    }

    /// Unpacks an archive into a directory of the image.
    #[must_use]
    pub fn unpack(self, archive: &Path, directory: &str) -> Self {
        let directory = self.directory.join("files").join(directory);
        fs::create_dir_all(&directory).expect("cannot make a directory in the sandbox's own");
        let status = Command::new("tar").arg("-C").arg(directory).arg("-xf").arg(archive).status();
        assert!(status.expect("cannot start tar").success(), "cannot unpack {}", archive.display());
        self
    }

    /// Adds a program of the host and its shared libraries, all at their own paths.
    #[must_use]
    pub fn program_of_host(self, program: &Path) -> Self {
        let libraries = Command::new("ldd").arg(program).output().expect("cannot start ldd");
        let libraries = String::from_utf8_lossy(&libraries.stdout).into_owned();
        let paths = libraries.split_whitespace().filter(|word| word.starts_with('/')).map(Path::new);
        paths.chain([program]).fold(self, |image, path| {
            let content = fs::read(path).unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()));
            let inside = path.to_str().expect("a path of UTF-8").trim_start_matches('/');
            image.program(inside, content)
        })
    }

    /// Adds a parameter to the kernel's command line.
    #[must_use]
    pub fn parameter(mut self, parameter: impl Into<String>) -> Self {
        self.parameters.push(parameter.into());
        self
    }

    /// Sets the command that the image's `/init` runs, as words without spaces in them.
    #[must_use]
    pub fn workload(mut self, words: impl Into<String>) -> Self {
        self.workload = Some(words.into());
        self
    }

    /// Sets the machine's memory; 128 MiB by default.
    #[must_use]
    pub fn memory_mib(mut self, mebibytes: u32) -> Self {
        self.memory_mib = mebibytes;
        self
    }

    /// Sets the number of CPUs; one by default.
    #[must_use]
    pub fn cpus(mut self, count: u32) -> Self {
        self.cpus = count;
        self
    }

    /// Removes the network card.
    #[must_use]
    pub fn without_network(mut self) -> Self {
        self.network = None;
        self
    }

    /// Connects the network card with a bridge of the sandbox, and gives it this address with its prefix length. The
    /// default route leads to `gateway`.
    ///
    /// # Panics
    /// With the message of `ip`, if it cannot make a tap device.
    #[must_use]
    pub fn on_bridge(mut self, bridge: &str, address: &str, gateway: &str) -> Self {
        let tap = format!("tap{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        self.sandbox.ip(&format!("tuntap add dev {tap} mode tap\nlink set dev {tap} up master {bridge}\n"));
        self.network = Some(Network::Tap(tap));
        self.parameter(format!("GUEST_ADDRESS={address}")).parameter(format!("GUEST_GATEWAY={gateway}"))
    }

    /// Adds a vsock device. A connection of the guest to a port of the host (CID 2) arrives at the unix socket
    /// [`GuestImage::vsock_socket`]; without a listener there, it times out.
    #[must_use]
    pub fn with_vsock(mut self) -> Self {
        self.has_vsock = true;
        self
    }

    /// Path of the unix socket on which the host listens for the guest's connections to a vsock port.
    pub fn vsock_socket(&self, port: u32) -> PathBuf {
        self.directory.join(format!("vsock_{port}"))
    }

    /// Path of the unix socket through which the host connects to the guest's vsock ports: the first line is
    /// `CONNECT PORT`, and so is the answer's `OK`.
    pub fn vsock_entrance(&self) -> PathBuf {
        self.directory.join("vsock")
    }

    /// Adds a device with a VM generation id, which is another one after each [`SavedGuest::restore`].
    #[must_use]
    pub fn with_generation_id(mut self) -> Self {
        self.has_generation_id = true;
        self
    }

    /// Makes the guest's clocks count executed instructions, each of 2 to the power of `shift` nanoseconds, so that
    /// times do not depend on the load of the host.
    #[must_use]
    pub fn counting_instructions(mut self, shift: u8) -> Self {
        self.instruction_shift = Some(shift);
        self
    }

    /// Starts the machine.
    ///
    /// # Panics
    /// When QEMU does not start.
    pub fn start(self) -> Guest {
        self.start_to_save()
    }

    /// Starts the machine, whose state can then be saved with [`Guest::save`].
    ///
    /// # Panics
    /// When QEMU does not start.
    pub fn start_to_save(&self) -> Guest {
        let initrd = self.initrd();
        self.write_initrd(&initrd).unwrap_or_else(|error| panic!("cannot write {}: {error}", initrd.display()));
        self.launch(&[])
    }

    fn initrd(&self) -> PathBuf {
        self.directory.join("initrd")
    }

    fn launch(&self, options: &[String]) -> Guest {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let [console, monitor] = ["console", "monitor"].map(|name| self.directory.join(format!("{name}-{number}")));
        let vsock = self.has_vsock.then(|| self.start_vsock());
        let mut command = self.command(&self.initrd(), &console);
        command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", monitor.display())).args(options);
        let mut qemu = Daemon::spawn(self.sandbox, "qemu", Placement::Unhooked, command);
        let stream = qemu.wait_until(QEMU_TIMEOUT, "QEMU waits for its console", |_| UnixStream::connect(&console));
        let console = Console::follow(stream);
        drop(qemu.wait_until(QEMU_TIMEOUT, "QEMU has a monitor", |_| UnixStream::connect(&monitor)));
        Guest { console, monitor, qemu, _vsock: vsock }
    }

    /// Starts the host's side of the vsock device.
    fn start_vsock(&self) -> Daemon {
        let mut command = Command::new(path_from_env(VSOCK_DEVICE_VARIABLE, "cargo xtask vm test"));
        command.args(["--guest-cid", VSOCK_CID]).arg("--socket").arg(self.vsock_device());
        command.arg("--uds-path").arg(self.vsock_entrance());
        let mut daemon = Daemon::spawn(self.sandbox, "vhost-device-vsock", Placement::Unhooked, command);
        daemon.wait_until(QEMU_TIMEOUT, "it waits for QEMU", |_| fs::metadata(self.vsock_device()));
        daemon
    }

    /// Path of the socket between QEMU and the host's side of the vsock device.
    fn vsock_device(&self) -> PathBuf {
        self.directory.join("vhost")
    }

    /// Writes the image followed by the archive of user files; the kernel unpacks them one after the other.
    fn write_initrd(&self, path: &Path) -> io::Result<()> {
        let mut initrd = fs::read(path_from_env(INITRAMFS_VARIABLE, "cargo xtask vm test"))?;
        initrd.resize(initrd.len().next_multiple_of(4), 0);
        let mut file = File::create(path)?;
        file.write_all(&initrd)?;
        let mut archive = Command::new("sh");
        archive.args(["-c", "find . | cpio --quiet --owner=0:0 -o -H newc"]).current_dir(self.directory.join("files"));
        let status = archive.stdin(Stdio::null()).stdout(file).status()?;
        if status.success() { Ok(()) } else { Err(io::Error::other("cpio failed")) }
    }

    fn command(&self, initrd: &Path, console: &Path) -> Command {
        let machine = self.kernel.machine();
        let mut command = Command::new(machine.qemu);
        // CPUs in turn on one thread: one that waits for a lock gives way, where threads of many CPUs would keep the
        // few of the machine from the holder.
        command.args(machine.options).args(["-accel", "tcg,thread=single", "-smp", &self.cpus.to_string()]);
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        command.arg("-m").arg(self.memory_mib.to_string());
        if let Some(shift) = self.instruction_shift {
            command.args(["-icount", &format!("shift={shift}")]);
        }
        if let Some(network) = &self.network {
            let mut device = "virtio-net-pci,netdev=net,romfile=".to_owned();
            let netdev = match network {
                Network::User => "user,id=net".to_owned(),
                Network::Tap(tap) => {
                    // Each card on a bridge has an address of its own.
                    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
                    device += &format!(",mac=52:54:00:00:{:02x}:{:02x}", number >> 8 & 0xff, number & 0xff);
                    format!("tap,id=net,ifname={tap},script=no,downscript=no")
                }
            };
            command.args(["-netdev", &netdev, "-device", &device]);
        }
        if self.has_vsock {
            // The other process reads and writes the guest's memory.
            let memory = format!("memory-backend-memfd,id=memory,share=on,size={}M", self.memory_mib);
            command.arg("-object").arg(memory).args(["-machine", "memory-backend=memory"]);
            command.arg("-chardev").arg(format!("socket,id=vsock,path={}", self.vsock_device().display()));
            command.args(["-device", "vhost-user-vsock-pci,chardev=vsock"]);
        }
        if self.has_generation_id {
            command.args(["-device", "vmgenid,guid=auto"]);
        }
        command.arg("-chardev").arg(format!("socket,id=console,server=on,path={}", console.display()));
        command.args(["-serial", "chardev:console"]);
        command.arg("-kernel").arg(self.kernel.file()).arg("-initrd").arg(initrd);
        command.arg("-append").arg(self.command_line());
        command
    }

    fn command_line(&self) -> String {
        let console = format!("console={}", self.kernel.machine().console);
        let own = [console.as_str(), "panic=-1", "reboot=t", "quiet", &format!("rdinit=/{FIRST_PROCESS}")].join(" ");
        let workload = self.workload.iter().flat_map(|words| ["--", words.as_str()]);
        let words = [own.as_str()].into_iter().chain(self.parameters.iter().map(String::as_str)).chain(workload);
        words.collect::<Vec<_>>().join(" ")
    }
}

/// The state of a machine in a file.
#[derive(Debug)]
pub struct SavedGuest<'i, 's> {
    image: &'i GuestImage<'s>,
    state: PathBuf,
}

impl SavedGuest<'_, '_> {
    /// Loads the state into a new machine, which goes on once [`Guest::resume`] is called. Connections through its
    /// network card are gone outside, as after a move to another host.
    ///
    /// # Panics
    /// When QEMU does not start, or cannot read the state.
    pub fn restore(&self) -> Guest {
        let incoming = format!("exec:cat {}", self.state.display());
        let guest = self.image.launch(&["-S".to_owned(), "-incoming".to_owned(), incoming]);
        guest.wait_status("paused");
        guest
    }
}

/// A running machine, switched off when this value is dropped.
#[derive(Debug)]
pub struct Guest {
    console: Console,
    /// Socket of QEMU's monitor.
    monitor: PathBuf,
    qemu: Daemon,
    // Ends after QEMU.
    _vsock: Option<Daemon>,
}

impl Guest {
    /// Waits for a console line that contains `needle` and returns it with its time since the start.
    ///
    /// # Panics
    /// After `timeout`, or when the machine has ended without it.
    pub fn wait_line(&mut self, needle: &str, timeout: Duration) -> (Duration, String) {
        let console = &self.console;
        let what = format!("{needle:?} on the console");
        self.qemu.wait_until(timeout, &what, |_| console.find(needle).ok_or("not there yet"))
    }

    /// Waits until the machine has ended and returns its console.
    ///
    /// # Panics
    /// After `timeout`.
    pub fn wait_end(&mut self, timeout: Duration) -> String {
        let ended = self.qemu.wait(timeout);
        assert!(ended.is_some(), "the guest did not end within {timeout:?}");
        self.console.wait_end();
        self.console.text()
    }

    /// Like [`Guest::wait_end`], but passes each console line to `show` as it comes.
    ///
    /// # Panics
    /// After `timeout`.
    pub fn follow_to_end(&mut self, timeout: Duration, mut show: impl FnMut(&str)) -> String {
        let (start, mut shown) = (Instant::now(), 0);
        while self.qemu.exit_status().is_none() {
            let lines = self.lines();
            lines.iter().skip(shown).for_each(|(_, line)| show(line));
            shown = lines.len();
            assert!(start.elapsed() < timeout, "the guest did not end within {timeout:?}");
            thread::sleep(FOLLOW_PAUSE);
        }
        self.console.wait_end();
        self.lines().iter().skip(shown).for_each(|(_, line)| show(line));
        self.console.text()
    }

    /// Types a line on the console.
    ///
    /// # Panics
    /// When the machine has ended.
    pub fn type_line(&mut self, line: &str) {
        let typed = self.console.input.write_all(format!("{line}\n").as_bytes());
        typed.unwrap_or_else(|error| panic!("cannot type {line:?}: {error}"));
    }

    /// Saves the machine's state and ends the machine. It must be one of this image.
    ///
    /// # Panics
    /// When QEMU cannot write the state.
    pub fn save<'i, 's>(mut self, image: &'i GuestImage<'s>) -> SavedGuest<'i, 's> {
        let state = image.directory.join(format!("state-{}", NUMBER.fetch_add(1, Ordering::Relaxed)));
        self.ask("stop", json!({}));
        self.ask("migrate", json!({"uri": format!("exec:cat >{}", state.display())}));
        eventually(MONITOR_TIMEOUT, "the state is saved", || {
            let progress = self.ask("query-migrate", json!({}));
            if has_status(&progress, "completed") { Ok(()) } else { Err(progress) }
        });
        self.qemu.kill();
        SavedGuest { image, state }
    }

    /// Makes a restored machine go on.
    ///
    /// # Panics
    /// When QEMU refuses.
    pub fn resume(&self) {
        self.ask("cont", json!({}));
    }

    /// Ends the machine at once.
    pub fn power_off(&mut self) {
        self.qemu.kill();
    }

    /// Connects or disconnects the network card's cable.
    ///
    /// # Panics
    /// When QEMU refuses, or without a network card.
    pub fn set_cable(&self, is_connected: bool) {
        self.ask("set_link", json!({"name": "net", "up": is_connected}));
    }

    fn wait_status(&self, status: &str) {
        eventually(MONITOR_TIMEOUT, format!("the machine is {status}"), || {
            let answer = self.ask("query-status", json!({}));
            if has_status(&answer, status) { Ok(()) } else { Err(answer) }
        });
    }

    /// Asks QEMU's monitor, and returns its answer.
    fn ask(&self, command: &str, arguments: Value) -> Value {
        let ask = || -> io::Result<Value> {
            let stream = UnixStream::connect(&self.monitor)?;
            stream.set_read_timeout(Some(MONITOR_TIMEOUT))?;
            let mut lines = BufReader::new(&stream).lines();
            let mut answer = |request: Value| -> io::Result<Value> {
                writeln!(&stream, "{request}")?;
                loop {
                    let line = lines.next().ok_or(io::ErrorKind::UnexpectedEof)??;
                    let message: Value = serde_json::from_str(&line)?;
                    // The greeting and events have neither.
                    if message.get("return").is_some() || message.get("error").is_some() {
                        return Ok(message);
                    }
                }
            };
            answer(json!({"execute": "qmp_capabilities"}))?;
            answer(json!({"execute": command, "arguments": arguments}))
        };
        let answer = ask().unwrap_or_else(|error| panic!("QEMU does not answer {command}: {error}"));
        assert!(answer.get("error").is_none(), "QEMU refuses {command}: {answer}");
        answer.get("return").cloned().unwrap_or_default()
    }

    /// The console's lines with their times.
    pub fn lines(&self) -> Vec<(Duration, String)> {
        self.console.lines().clone()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if thread::panicking() {
            let lines = self.console.lines();
            let tail = lines.iter().skip(lines.len().saturating_sub(TAIL_LINES));
            eprintln!("---- the end of the guest's console ----");
            tail.for_each(|(at, line)| eprintln!("{:8.3} {line}", at.as_secs_f64()));
        }
    }
}

/// Whether QEMU's monitor has answered with this status.
fn has_status(answer: &Value, status: &str) -> bool {
    answer.get("status").is_some_and(|is| is == status)
}

/// Lines of a serial port, each with its time.
#[derive(Debug)]
struct Console {
    lines: Arc<Mutex<Vec<(Duration, String)>>>,
    reader: Option<JoinHandle<()>>,
    input: UnixStream,
}

impl Console {
    fn follow(stream: UnixStream) -> Self {
        let lines: Arc<Mutex<Vec<_>>> = Arc::default();
        let theirs = Arc::clone(&lines);
        let start = Instant::now();
        let input = stream.try_clone().expect("cannot duplicate a descriptor");
        let read = move || {
            for line in BufReader::new(stream).split(b'\n') {
                let Ok(line) = line else { break };
                let text = String::from_utf8_lossy(&line).trim_end().to_owned();
                theirs.lock().unwrap_or_else(PoisonError::into_inner).push((start.elapsed(), text));
            }
        };
        Self { lines, reader: Some(thread::spawn(read)), input }
    }

    fn lines(&self) -> MutexGuard<'_, Vec<(Duration, String)>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, needle: &str) -> Option<(Duration, String)> {
        self.lines().iter().find(|(_, line)| line.contains(needle)).cloned()
    }

    fn text(&self) -> String {
        self.lines().iter().map(|(_, line)| format!("{line}\n")).collect()
    }

    /// Waits for the end of the machine, which closes the serial line.
    fn wait_end(&mut self) {
        if self.reader.take().is_some_and(|reader| reader.join().is_err()) {
            eprintln!("the reader of a console panicked");
        }
    }
}

/// A path that `cargo xtask` passes to tests.
///
/// # Panics
/// When the variable is not set, with the command that sets it.
pub fn path_from_env(variable: &str, verb: &str) -> PathBuf {
    let path = std::env::var_os(variable).map(PathBuf::from);
    path.unwrap_or_else(|| panic!("{variable} is not set: run `{verb}`"))
}
