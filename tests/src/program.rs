//! A program under test: what the agent ([`Agent`](crate::process::Agent)) and the relay
//! ([`RelayServer`](crate::relay_server::RelayServer)) have in common, from their arguments to their readiness.

use std::{
    ffi::{OsStr, OsString},
    io,
    ops::{Deref, DerefMut},
    os::{fd::OwnedFd, unix::process::CommandExt as _},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use crate::{
    netns::Netns,
    process::Daemon,
    sandbox::{Placement, Sandbox},
};

/// Limit on a start, on a busy machine.
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// Pause between two polls for readiness where the time is measured.
const READY_POLL: Duration = Duration::from_micros(500);

/// The settings that only one program has, and what follows from them.
pub trait Settings {
    /// Name of the program, also in messages and of its log file.
    const NAME: &'static str;

    /// The program of the environment.
    fn binary() -> PathBuf;

    /// Arguments of `run`, before all others.
    fn args(&self) -> Vec<OsString>;

    /// Removes what an earlier process has left that would pass for the readiness of the next one.
    fn forget(&self) {}

    /// Whether it is ready.
    ///
    /// # Errors
    /// It is not: the reason.
    fn check_ready(&self) -> io::Result<()>;
}

/// A program in a sandbox before its start.
#[derive(Debug)]
pub struct Program<'s, S> {
    sandbox: &'s Sandbox,
    pub(crate) own: S,
    placement: Placement,
    netns: Option<Netns>,
    binary: Option<PathBuf>,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    stderr: Option<OwnedFd>,
}

impl<'s, S: Settings> Program<'s, S> {
    pub(crate) fn with_settings(sandbox: &'s Sandbox, placement: Placement, own: S) -> Self {
        let (netns, binary, args, env, stderr) = Default::default();
        Self { sandbox, own, placement, netns, binary, args, env, stderr }
    }

    /// Sets another program than that of the environment, such as the previous version.
    #[must_use]
    pub fn binary(mut self, path: impl Into<PathBuf>) -> Self {
        self.binary = Some(path.into());
        self
    }

    /// Sets another placement of the program itself.
    #[must_use]
    pub fn placement(mut self, placement: Placement) -> Self {
        self.placement = placement;
        self
    }

    /// Sets another network namespace than the sandbox's.
    #[must_use]
    pub fn netns(mut self, netns: &Netns) -> Self {
        self.netns = Some(netns.clone());
        self
    }

    /// Adds `--kubeconfig path`.
    #[must_use]
    pub fn kubeconfig(self, path: impl AsRef<Path>) -> Self {
        self.arg("--kubeconfig").arg(path.as_ref())
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<A: AsRef<OsStr>>(self, args: impl IntoIterator<Item = A>) -> Self {
        args.into_iter().fold(self, Self::arg)
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.env.push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Sets its standard error, in place of the log file.
    #[must_use]
    pub fn stderr(mut self, stderr: OwnedFd) -> Self {
        self.stderr = Some(stderr);
        self
    }

    /// Starts it, and waits for nothing.
    pub fn spawn(self) -> Running<S> {
        let (sandbox, placement) = (self.sandbox, self.placement);
        let (command, own) = self.command();
        Running { daemon: Daemon::spawn(sandbox, S::NAME, placement, command), own }
    }

    /// Starts it, and waits until it is ready.
    ///
    /// # Panics
    /// When it ends, or is not ready in time; then the end of its log is printed.
    pub fn start(self) -> Running<S> {
        let mut running = self.spawn();
        running.wait_ready(START_TIMEOUT);
        running
    }

    /// The same. Returns also the time since just before the start, to half a millisecond.
    ///
    /// # Panics
    /// After `timeout`, or when it has ended.
    pub fn start_and_time(self, timeout: Duration) -> (Running<S>, Duration) {
        let started = Instant::now();
        let mut running = self.spawn();
        while !running.is_ready() {
            assert!(started.elapsed() < timeout, "not ready within {timeout:?}: {}", running.tail());
            assert!(running.exit_status().is_none(), "{} has ended: {}", S::NAME, running.tail());
            thread::sleep(READY_POLL);
        }
        (running, started.elapsed())
    }

    /// Its command, without any setting of the caller's environment.
    pub(crate) fn command(self) -> (Command, S) {
        self.own.forget();
        let binary = self.binary.unwrap_or_else(S::binary);
        let mut command = without_settings(if self.netns.is_some() { "nsenter".into() } else { binary.clone() });
        if let Some(netns) = &self.netns {
            // nsenter executes the program under the same process ID.
            command.arg(format!("--net={}", netns.path().display())).arg(binary);
        }
        command.arg("run").args(self.own.args()).args(self.args).envs(self.env);
        if let Some(stderr) = self.stderr {
            // It replaces the log file, which a command gets later.
            // SAFETY: the closure makes one system call, dup3, between fork and exec.
            unsafe { command.pre_exec(move || Ok(rustix::stdio::dup2_stderr(&stderr)?)) };
        }
        (command, self.own)
    }
}

/// A running program. It ends when this value is dropped.
#[derive(Debug)]
pub struct Running<S> {
    daemon: Daemon,
    pub(crate) own: S,
}

impl<S: Settings> Running<S> {
    /// Waits until it is ready. Returns the time since this call.
    ///
    /// # Panics
    /// After `timeout`, or at once when it has ended.
    pub fn wait_ready(&mut self, timeout: Duration) -> Duration {
        let started = Instant::now();
        self.daemon.wait_until(timeout, &format!("{} is ready", S::NAME), |_| self.own.check_ready());
        started.elapsed()
    }

    /// Whether it is ready now.
    pub fn is_ready(&self) -> bool {
        self.own.check_ready().is_ok()
    }
}

impl<S> Deref for Running<S> {
    type Target = Daemon;

    fn deref(&self) -> &Daemon {
        &self.daemon
    }
}

impl<S> DerefMut for Running<S> {
    fn deref_mut(&mut self) -> &mut Daemon {
        &mut self.daemon
    }
}

/// A command without any setting of the caller's environment.
pub(crate) fn without_settings(binary: PathBuf) -> Command {
    let mut command = Command::new(binary);
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"CPROXY_")) {
        command.env_remove(name);
    }
    command
}
