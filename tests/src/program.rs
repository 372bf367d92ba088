//! Arguments and environment of a program under test: what the agent ([`Agent`](crate::process::Agent)) and the relay
//! ([`RelayServer`](crate::relay_server::RelayServer)) have in common.

use std::{
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
    process::Command,
};

use crate::sandbox::Sandbox;

/// A program in a sandbox before its start, with `S`, the settings that only it has.
#[derive(Debug)]
pub struct Program<'s, S> {
    pub(crate) sandbox: &'s Sandbox,
    pub(crate) own: S,
    binary: Option<PathBuf>,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
}

impl<'s, S> Program<'s, S> {
    pub(crate) fn with_settings(sandbox: &'s Sandbox, own: S) -> Self {
        Self { sandbox, own, binary: None, args: Vec::new(), env: Vec::new() }
    }

    /// Sets another program than that of the environment, such as the previous version.
    #[must_use]
    pub fn binary(mut self, path: impl Into<PathBuf>) -> Self {
        self.binary = Some(path.into());
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

    /// The command `run` with the arguments in `own` before all others, and without any setting of the caller's
    /// environment.
    pub(crate) fn run_command(self, default: fn() -> PathBuf, own: impl IntoIterator<Item = OsString>) -> Command {
        let mut command = without_settings(self.binary.unwrap_or_else(default));
        command.arg("run").args(own).args(self.args).envs(self.env);
        command
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
