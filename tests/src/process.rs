//! Child processes that always end with their owner, the agent among them, and waits without guessed delays.

use std::{
    collections::VecDeque,
    ffi::{OsStr, OsString},
    fmt::Display,
    fs::{self, File},
    io::{self, Read, Write},
    os::{
        fd::OwnedFd,
        unix::process::{CommandExt, ExitStatusExt},
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

pub use rustix::process::Signal;
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    fs::OFlags,
    process::{Pid, PidfdFlags},
};
use serde_json::Value;

use crate::{
    program::{Program, Running, Settings, without_settings},
    sandbox::{Placement, Sandbox},
};

/// Limit on a process's end after SIGTERM.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Limit on a run of the program under test, on a machine where many others run.
pub(crate) const COMMAND_TIMEOUT: Duration = Duration::from_secs(120);

/// Number of log lines that a failed test shows.
const TAIL_LINES: usize = 40;

/// Number of log files so far, for unique names.
static LOG_NUMBER: AtomicU32 = AtomicU32::new(0);

/// Repeats `attempt` until it succeeds.
///
/// # Panics
/// After `timeout`, naming `what` and the last error.
pub fn eventually<T, E: Display>(
    timeout: Duration,
    what: impl Display,
    mut attempt: impl FnMut() -> Result<T, E>,
) -> T {
    let deadline = Instant::now() + timeout;
    let mut pause = Duration::from_millis(1);
    loop {
        match attempt() {
            Ok(value) => return value,
            Err(error) if Instant::now() >= deadline => panic!("not within {timeout:?}: {what}: {error}"),
            Err(_) => thread::sleep(pause),
        }
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

/// A child process that writes its output to a file in the sandbox. It ends when this value is dropped, and also when
/// the thread that spawned it ends, so spawn it from a thread that outlives it. When a test panics, the end of its log
/// is printed.
#[derive(Debug)]
pub struct Daemon {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Daemon {
    /// Starts `command` at `placement` in the sandbox. Messages and the log file use `name`.
    pub fn spawn(sandbox: &Sandbox, name: &str, placement: Placement, mut command: Command) -> Self {
        let log = scratch_file(sandbox, name, "log");
        let output = File::create(&log).expect("cannot create a log file in the sandbox");
        let errors = output.try_clone().expect("cannot duplicate a descriptor");
        sandbox.place(command.stdin(Stdio::null()).stdout(output).stderr(errors), placement);
        // SAFETY: the closure makes one system call, prctl, between fork and exec.
        unsafe { command.pre_exec(|| Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?)) };
        let child = command
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {name} ({}): {error}", command.get_program().display()));
        Self { name: name.to_owned(), child, log }
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Exit status of the process, if it has ended.
    pub fn exit_status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap_or_else(|error| panic!("cannot wait for {}: {error}", self.name))
    }

    /// Waits until the process ends. None after `timeout`.
    pub fn wait(&mut self, timeout: Duration) -> Option<ExitStatus> {
        wait_for(&mut self.child, timeout).unwrap_or_else(|error| panic!("cannot wait for {}: {error}", self.name))
    }

    /// Sends a signal to the process, which must be running.
    pub fn signal(&mut self, signal: Signal) {
        assert!(self.exit_status().is_none(), "{} has already ended; its log: {}", self.name, self.tail());
        rustix::process::kill_process(Pid::from_child(&self.child), signal).expect("cannot signal a child");
    }

    /// Sends SIGTERM, then SIGKILL after five seconds. Returns the exit status, even if the process had ended before.
    pub fn stop(&mut self) -> ExitStatus {
        end(&mut self.child).unwrap_or_else(|error| panic!("cannot stop {}: {error}", self.name))
    }

    /// Sends SIGKILL at once. Returns the exit status, even if the process had ended before.
    pub fn kill(&mut self) -> ExitStatus {
        // This fails only if the process has already ended.
        drop(self.child.kill());
        self.child.wait().unwrap_or_else(|error| panic!("cannot wait for {}: {error}", self.name))
    }

    /// The output of the process so far.
    pub fn log(&self) -> String {
        fs::read(&self.log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    /// The log file of the process.
    pub fn log_file(&self) -> &Path {
        &self.log
    }

    /// The last lines of the log.
    pub fn tail(&self) -> String {
        let log = self.log();
        let mut lines = VecDeque::with_capacity(TAIL_LINES);
        for line in log.lines() {
            if lines.len() == TAIL_LINES {
                lines.pop_front();
            }
            lines.push_back(line);
        }
        Vec::from(lines).join("\n")
    }

    /// Waits until the log contains `needle` and returns the line.
    ///
    /// # Panics
    /// After `timeout`, or at once when the process has ended without writing it; with the end of the log.
    pub fn wait_log(&mut self, needle: &str, timeout: Duration) -> String {
        let what = format!("{:?} in the log of {}", needle, self.name);
        self.wait_until(timeout, &what, |daemon| {
            let log = daemon.log();
            log.lines().find(|line| line.contains(needle)).map(str::to_owned).ok_or("not there yet")
        })
    }

    /// Like [`eventually`], but gives up at once when the process has ended.
    pub fn wait_until<T, E: Display>(
        &mut self,
        timeout: Duration,
        what: &str,
        mut attempt: impl FnMut(&Self) -> Result<T, E>,
    ) -> T {
        eventually(timeout, what, || {
            // The order matters: the last actions of a process count even if it has ended since.
            let ended = self.exit_status();
            let result = attempt(self);
            if let (Some(status), Err(error)) = (ended, &result) {
                panic!("{} ended ({status}) before {what}: {error}", self.name);
            }
            result
        })
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Err(error) = end(&mut self.child) {
            eprintln!("cannot stop {}: {error}", self.name);
        }
        if thread::panicking() {
            eprintln!("---- the end of the log of {} ----\n{}\n----", self.name, self.tail());
        }
    }
}

/// Waits for a child's end without polling. None after `timeout`.
fn wait_for(child: &mut Child, timeout: Duration) -> io::Result<Option<ExitStatus>> {
    if let Some(status) = child.try_wait()? {
        return Ok(Some(status));
    }
    let handle = rustix::process::pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    let deadline = Instant::now() + timeout;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        match rustix::event::poll(&mut [PollFd::new(&handle, PollFlags::IN)], Some(&left)) {
            Ok(_) => return child.try_wait(),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Sends SIGTERM, and SIGKILL if the child does not end in time.
fn end(child: &mut Child) -> io::Result<ExitStatus> {
    if let Some(status) = child.try_wait()? {
        return Ok(status);
    }
    rustix::process::kill_process(Pid::from_child(child), Signal::TERM)?;
    if let Ok(Some(status)) = wait_for(child, STOP_TIMEOUT) {
        return Ok(status);
    }
    child.kill()?;
    child.wait()
}

/// A new file name in the sandbox.
fn scratch_file(sandbox: &Sandbox, name: &str, extension: &str) -> PathBuf {
    let number = LOG_NUMBER.fetch_add(1, Ordering::Relaxed);
    sandbox.dir().join(format!("{name}-{number}.{extension}"))
}

/// The exit code and output of a command that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// Exit code; 128 plus the signal's number if a signal ended it.
    pub code: i32,
    /// Everything it wrote to stdout.
    pub stdout: String,
    /// Everything it wrote to stderr.
    pub stderr: String,
}

impl Output {
    /// The same output, if the command succeeded.
    ///
    /// # Panics
    /// With its stderr, if it did not.
    pub fn success(self) -> Self {
        assert_eq!(self.code, 0, "the command failed: {}{}", self.stdout, self.stderr);
        self
    }

    /// The same output, if the command failed with this exit code.
    ///
    /// # Panics
    /// With all that it wrote, if it did not.
    pub fn failure(self, code: i32) -> Self {
        assert_eq!(self.code, code, "{}{}", self.stdout, self.stderr);
        self
    }

    /// The JSON document on stdout of a command that succeeded.
    pub fn json(self) -> Value {
        let text = self.success().stdout;
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("not JSON ({error}): {text}"))
    }
}

/// Runs `command` at `placement` to its end, with `input` on stdin.
///
/// # Panics
/// When it cannot be started or takes longer than `timeout`.
pub fn run(sandbox: &Sandbox, placement: Placement, mut command: Command, input: &str, timeout: Duration) -> Output {
    let name = Path::new(command.get_program()).file_name().unwrap_or_default().to_string_lossy().into_owned();
    // Pipes could block either side, since they are not read or written meanwhile.
    let [stdin, stdout, stderr] = ["in", "out", "err"].map(|extension| scratch_file(sandbox, &name, extension));
    fs::write(&stdin, input).expect("cannot write a scratch file in the sandbox");
    let create = |path: &Path| File::create(path).expect("cannot create a scratch file in the sandbox");
    command.stdin(File::open(&stdin).expect("cannot open a scratch file in the sandbox"));
    command.stdout(create(&stdout)).stderr(create(&stderr));
    let mut child = sandbox
        .place(&mut command, placement)
        .spawn()
        .unwrap_or_else(|error| panic!("cannot start {}: {error}", command.get_program().display()));
    let in_time = wait_for(&mut child, timeout).expect("cannot wait for a command");
    let status = in_time.map_or_else(|| end(&mut child), Ok).expect("cannot end a command");
    let [stdout, stderr] = [stdout, stderr].map(|path| read_and_remove(&path));
    drop(fs::remove_file(&stdin));
    assert!(in_time.is_some(), "{command:?} did not end within {timeout:?}: {stderr}");
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default());
    Output { code, stdout, stderr }
}

/// Reads and removes a scratch file.
fn read_and_remove(path: &Path) -> String {
    let bytes = fs::read(path).expect("cannot read a scratch file in the sandbox");
    fs::remove_file(path).expect("cannot remove a scratch file in the sandbox");
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The program under test, from the environment variable `CPROXY_BIN`.
///
/// # Panics
/// When the variable is not set.
pub fn cproxy_binary() -> PathBuf {
    std::env::var_os("CPROXY_BIN")
        .map(PathBuf::from)
        .expect("CPROXY_BIN is not set: build the agent with `cargo xtask build` and set it to the binary's path")
}

/// Runs `cproxy` with `args` to its end, inside the sandbox. Its default cgroup, pin directory and run directory are
/// the sandbox's, by environment variables, since not every command takes every flag.
pub fn cproxy<S: AsRef<OsStr>>(sandbox: &Sandbox, args: &[S]) -> Output {
    cproxy_with_input(sandbox, args, "")
}

/// Like [`cproxy`], with input on stdin.
pub fn cproxy_with_input<S: AsRef<OsStr>>(sandbox: &Sandbox, args: &[S], input: &str) -> Output {
    run_program(sandbox, &cproxy_binary(), args, input)
}

/// Like [`cproxy`], with another program, such as the previous version.
pub fn other_cproxy<S: AsRef<OsStr>>(sandbox: &Sandbox, binary: &Path, args: &[S]) -> Output {
    run_program(sandbox, binary, args, "")
}

/// The command of [`cproxy`].
pub fn cproxy_command<S: AsRef<OsStr>>(sandbox: &Sandbox, args: &[S]) -> Command {
    command_in(sandbox, &cproxy_binary(), args)
}

/// Like [`cproxy`], with another variable in its environment.
pub fn cproxy_with_variable<S: AsRef<OsStr>>(sandbox: &Sandbox, args: &[S], (name, value): (&str, &str)) -> Output {
    let mut command = cproxy_command(sandbox, args);
    command.env(name, value);
    run(sandbox, Placement::Hooked, command, "", COMMAND_TIMEOUT)
}

/// Like [`cproxy`] outside the served cgroup, with the privileges that these arguments of setpriv leave.
pub fn cproxy_with_privileges(sandbox: &Sandbox, privileges: &[&str], args: &[&str]) -> Output {
    let inner = cproxy_command(sandbox, args);
    let mut command = Command::new("setpriv");
    command.args(privileges).arg(inner.get_program()).args(args);
    command.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
    run(sandbox, Placement::Unhooked, command, "", COMMAND_TIMEOUT)
}

fn run_program<S: AsRef<OsStr>>(sandbox: &Sandbox, binary: &Path, args: &[S], input: &str) -> Output {
    run(sandbox, Placement::Hooked, command_in(sandbox, binary, args), input, COMMAND_TIMEOUT)
}

fn command_in<S: AsRef<OsStr>>(sandbox: &Sandbox, binary: &Path, args: &[S]) -> Command {
    let mut command = without_settings(binary.to_owned());
    command.args(args);
    command.env("CPROXY_CGROUP", sandbox.cgroup());
    command.env("CPROXY_PIN_DIR", sandbox.pin_dir());
    command.env("CPROXY_RUN_DIR", sandbox.run_dir());
    command
}

/// A pipe that is full, as one that nobody reads.
#[derive(Debug)]
pub struct FullPipe {
    reader: File,
    writer: File,
}

impl FullPipe {
    /// A new one. Writes to it wait.
    ///
    /// # Panics
    /// When there is none.
    #[expect(clippy::new_without_default, reason = "it makes system calls")]
    pub fn new() -> Self {
        let (reader, writer) = rustix::pipe::pipe().expect("cannot make a pipe");
        let pipe = Self { reader: reader.into(), writer: writer.into() };
        pipe.fill();
        pipe
    }

    /// Fills it again.
    pub fn fill(&self) {
        let set = |flags| rustix::fs::fcntl_setfl(&self.writer, flags).expect("cannot change a pipe");
        set(OFlags::NONBLOCK);
        while (&self.writer).write(b"\n").is_ok() {}
        set(OFlags::empty());
    }

    /// Its end for writers.
    pub fn writer(&self) -> OwnedFd {
        self.writer.try_clone().expect("cannot duplicate a descriptor").into()
    }

    /// Reads what is there, at least a byte.
    pub fn read(&self) -> String {
        let mut bytes = vec![0; 1 << 16];
        let length = (&self.reader).read(&mut bytes).expect("a pipe can be read");
        String::from_utf8_lossy(bytes.get(..length).unwrap_or_default()).into_owned()
    }
}

/// Arguments and environment of `cproxy run`, always with the sandbox's cgroup, pin directory and run directory. By
/// default the agent is inside the cgroup that it serves, as in a guest.
pub type Agent<'s> = Program<'s, AgentSettings>;

/// A running `cproxy run`.
pub type RunningAgent = Running<AgentSettings>;

/// Directories of an agent.
#[derive(Debug)]
pub struct AgentSettings {
    cgroup: PathBuf,
    pin_dir: PathBuf,
    run_dir: PathBuf,
}

impl AgentSettings {
    fn ready(&self) -> PathBuf {
        self.run_dir.join("ready")
    }
}

impl Settings for AgentSettings {
    const NAME: &'static str = "cproxy";

    fn binary() -> PathBuf {
        cproxy_binary()
    }

    fn args(&self) -> Vec<OsString> {
        let own = [("--cgroup", &self.cgroup), ("--pin-dir", &self.pin_dir), ("--run-dir", &self.run_dir)];
        own.map(|(flag, path)| [flag.into(), path.into()]).concat()
    }

    fn forget(&self) {
        drop(fs::remove_file(self.ready()));
    }

    fn check_ready(&self) -> io::Result<()> {
        fs::metadata(self.ready()).map(drop)
    }
}

impl<'s> Agent<'s> {
    /// An agent without a source, which must be added.
    pub fn new(sandbox: &'s Sandbox) -> Self {
        let cgroup = sandbox.cgroup().to_owned();
        let settings = AgentSettings { cgroup, pin_dir: sandbox.pin_dir(), run_dir: sandbox.run_dir() };
        Self::with_settings(sandbox, Placement::Hooked, settings)
    }

    /// Adds `--manifests path`.
    #[must_use]
    pub fn manifests(self, path: impl AsRef<Path>) -> Self {
        self.arg("--manifests").arg(path.as_ref())
    }

    /// Sets another cgroup to attach to than the sandbox's.
    #[must_use]
    pub fn cgroup(mut self, path: impl Into<PathBuf>) -> Self {
        self.own.cgroup = path.into();
        self
    }

    /// Sets another pin directory than the sandbox's.
    #[must_use]
    pub fn pin_dir(mut self, path: impl Into<PathBuf>) -> Self {
        self.own.pin_dir = path.into();
        self
    }

    /// Sets another run directory than the sandbox's.
    #[must_use]
    pub fn run_dir(mut self, path: impl Into<PathBuf>) -> Self {
        self.own.run_dir = path.into();
        self
    }
}
