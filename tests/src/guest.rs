//! A virtual machine with a kernel of its own, in QEMU, which emulates the processor: what is in an image is tried where it
//! will run. It reaches the sandbox's network, and through it whatever listens there, at the addresses it has there.

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

use crate::{
    process::Daemon,
    sandbox::{Placement, Sandbox},
};

/// Names the directory of the guest kernel.
pub const KERNEL_VARIABLE: &str = "CPROXY_GUEST_KERNEL";

/// Names the initramfs that `cargo xtask image initramfs` makes.
pub const INITRAMFS_VARIABLE: &str = "CPROXY_INITRAMFS";

/// Names the archive that `cargo xtask image rootfs` makes.
pub const ROOTFS_VARIABLE: &str = "CPROXY_ROOTFS";

/// How the first process of these guests is called; it hands over to `/init` of the image.
const FIRST_PROCESS: &str = "guest/init";

/// What the vendor's part of a guest does before cproxy's begins.
const SET_UP: &str = r#"#!/bin/busybox sh
echo "guest: the kernel has started its first process"
/bin/busybox mkdir -p /dev /proc /sys
/bin/busybox mount -t proc proc /proc
for module in /guest/modules/*; do
    [ ! -e "$module" ] || /bin/busybox insmod "$module" || echo "guest: $module cannot be loaded"
done
/bin/busybox ip link set eth0 up 2>/dev/null &&
    /bin/busybox ip address add 10.0.2.15/24 dev eth0 &&
    /bin/busybox ip route add default via 10.0.2.2
exec ${GUEST_INIT:-/init}
"#;

/// How much of a console is shown when a test fails.
const TAIL_LINES: usize = 60;

/// How long QEMU may take to begin.
const QEMU_TIMEOUT: Duration = Duration::from_secs(20);

/// Between two looks at a console.
const FOLLOW_PAUSE: Duration = Duration::from_millis(200);

/// Tells the guests of one process apart.
static NUMBER: AtomicU32 = AtomicU32::new(0);

/// A guest kernel: the file `vmlinux` of a directory, or `kernel`, and the modules, in `modules`, that it is to load, in the
/// order of their names.
#[derive(Clone, Debug)]
pub struct Kernel(PathBuf);

impl Kernel {
    /// The one that the environment names.
    ///
    /// # Panics
    /// When it does not.
    pub fn from_env() -> Self {
        Self(path_from_env(KERNEL_VARIABLE, "cargo xtask vm test"))
    }

    /// The one in this directory.
    pub fn at(directory: impl Into<PathBuf>) -> Self {
        Self(directory.into())
    }

    /// The ELF file where there is one: started without firmware, as Firecracker does.
    fn file(&self) -> PathBuf {
        let elf = self.0.join("vmlinux");
        if elf.exists() { elf } else { self.0.join("kernel") }
    }

    fn modules(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.0.join("modules")).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    }
}

/// What a guest is to be started with.
#[derive(Debug)]
pub struct GuestImage<'s> {
    sandbox: &'s Sandbox,
    kernel: Kernel,
    directory: PathBuf,
    parameters: Vec<String>,
    workload: Option<String>,
    memory_mib: u32,
    has_network: bool,
    counts_instructions: bool,
}

impl<'s> GuestImage<'s> {
    /// The image as `cargo xtask image initramfs` makes it, and nothing of the user's.
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
            has_network: true,
            counts_instructions: false,
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

    /// Adds a file that can be run.
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

    /// Unpacks over it what goes over the root file system of a guest with an init system.
    #[must_use]
    pub fn rootfs(self) -> Self {
        self.unpack(&path_from_env(ROOTFS_VARIABLE, "cargo xtask vm test"), "")
    }

    /// Unpacks an archive into one of its directories.
    #[must_use]
    pub fn unpack(self, archive: &Path, directory: &str) -> Self {
        let directory = self.directory.join("files").join(directory);
        fs::create_dir_all(&directory).expect("cannot make a directory in the sandbox's own");
        let status = Command::new("tar").arg("-C").arg(directory).arg("-xf").arg(archive).status();
        assert!(status.expect("cannot start tar").success(), "cannot unpack {}", archive.display());
        self
    }

    /// Adds a program of this machine at its own path, and the shared libraries it asks for at theirs.
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

    /// What the image's `/init` runs: words without spaces in them.
    #[must_use]
    pub fn workload(mut self, words: impl Into<String>) -> Self {
        self.workload = Some(words.into());
        self
    }

    /// The machine's memory; 128 MiB if nothing is said.
    #[must_use]
    pub fn memory_mib(mut self, mebibytes: u32) -> Self {
        self.memory_mib = mebibytes;
        self
    }

    /// No network card.
    #[must_use]
    pub fn without_network(mut self) -> Self {
        self.has_network = false;
        self
    }

    /// A nanosecond of the guest's clocks is an instruction that its processor has carried out: what is timed in it is not an
    /// emulator's speed on a busy machine.
    #[must_use]
    pub fn counting_instructions(mut self) -> Self {
        self.counts_instructions = true;
        self
    }

    /// Switches the machine on.
    ///
    /// # Panics
    /// When QEMU does not start.
    pub fn start(self) -> Guest {
        let initrd = self.directory.join("initrd");
        self.write_initrd(&initrd).unwrap_or_else(|error| panic!("cannot write {}: {error}", initrd.display()));
        let socket = self.directory.join("console");
        let mut qemu = Daemon::spawn(self.sandbox, "qemu", Placement::Unhooked, self.command(&initrd, &socket));
        let stream = qemu.wait_until(QEMU_TIMEOUT, "QEMU waits for its console", |_| UnixStream::connect(&socket));
        Guest { console: Console::follow(stream), qemu }
    }

    /// The image with the user's files unpacked over it: what a kernel does with archives one behind the other.
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
        let mut command = Command::new("qemu-system-x86_64");
        command.args(["-M", "q35", "-accel", "tcg", "-cpu", "qemu64,+rdrand", "-smp", "1"]);
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        command.arg("-m").arg(self.memory_mib.to_string());
        if self.counts_instructions {
            command.args(["-icount", "shift=0"]);
        }
        if self.has_network {
            command.args(["-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile="]);
        }
        command.arg("-chardev").arg(format!("socket,id=console,server=on,path={}", console.display()));
        command.args(["-serial", "chardev:console"]);
        command.arg("-kernel").arg(self.kernel.file()).arg("-initrd").arg(initrd);
        command.arg("-append").arg(self.command_line());
        command
    }

    fn command_line(&self) -> String {
        let own = ["console=ttyS0", "panic=-1", "reboot=t", "quiet", &format!("rdinit=/{FIRST_PROCESS}")].join(" ");
        let workload = self.workload.iter().flat_map(|words| ["--", words.as_str()]);
        let words = [own.as_str()].into_iter().chain(self.parameters.iter().map(String::as_str)).chain(workload);
        words.collect::<Vec<_>>().join(" ")
    }
}

/// A running machine. It is switched off when this value is dropped.
#[derive(Debug)]
pub struct Guest {
    console: Console,
    qemu: Daemon,
}

impl Guest {
    /// Waits until the console has a line with `needle` in it; the line, and when it came, counted from the start.
    ///
    /// # Panics
    /// After `timeout`, or when the machine has ended without it.
    pub fn wait_line(&mut self, needle: &str, timeout: Duration) -> (Duration, String) {
        let console = &self.console;
        let what = format!("{needle:?} on the console");
        self.qemu.wait_until(timeout, &what, |_| console.find(needle).ok_or("not there yet"))
    }

    /// Waits until the machine has ended; its console.
    ///
    /// # Panics
    /// After `timeout`.
    pub fn wait_end(&mut self, timeout: Duration) -> String {
        let ended = self.qemu.wait(timeout);
        assert!(ended.is_some(), "the guest did not end within {timeout:?}");
        self.console.wait_end();
        self.console.text()
    }

    /// As [`Guest::wait_end`], and shows each line of the console when it comes.
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

    /// What the console has, and when it came.
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

/// What a serial line brings, each line with its time.
#[derive(Debug)]
struct Console {
    lines: Arc<Mutex<Vec<(Duration, String)>>>,
    reader: Option<JoinHandle<()>>,
}

impl Console {
    fn follow(stream: UnixStream) -> Self {
        let lines: Arc<Mutex<Vec<_>>> = Arc::default();
        let theirs = Arc::clone(&lines);
        let start = Instant::now();
        let read = move || {
            for line in BufReader::new(stream).split(b'\n') {
                let Ok(line) = line else { break };
                let text = String::from_utf8_lossy(&line).trim_end().to_owned();
                theirs.lock().unwrap_or_else(PoisonError::into_inner).push((start.elapsed(), text));
            }
        };
        Self { lines, reader: Some(thread::spawn(read)) }
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

    /// The machine has ended, and with it the serial line.
    fn wait_end(&mut self) {
        if self.reader.take().is_some_and(|reader| reader.join().is_err()) {
            eprintln!("the reader of a console panicked");
        }
    }
}

pub(crate) fn path_from_env(variable: &str, verb: &str) -> PathBuf {
    let path = std::env::var_os(variable).map(PathBuf::from);
    path.unwrap_or_else(|| panic!("{variable} is not set: run `{verb}`"))
}
