//! Servers of control planes that tests share (tests/src/shared.rs), in processes of their own.

use std::{
    env,
    ffi::OsStr,
    fs::{self, File},
    io::Write as _,
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::PathBuf,
    process::{self, Child, Command},
};

use anyhow::{Context as _, Result};

use super::{job, products::Product, suites::Need};
use crate::{paths, run};

/// Variable with the path of the socket.
const VARIABLE: &str = "CPROXY_SHARED_CONTROL_PLANES";

/// Number of servers: each takes 400 MB, and keeps a processor busy for seconds while it starts.
const SERVERS: usize = 2;

/// Number of tests for which sharing pays.
const TESTS_MIN: usize = 6;

/// The socket, and the servers once the control plane is built.
pub(super) struct SharedControlPlanes {
    /// The socket's directory, whose name a later run sweeps if this one is killed.
    directory: PathBuf,
    servers: Vec<Child>,
}

impl SharedControlPlanes {
    /// Wanted if many tests have these needs.
    pub(super) fn wanted(needs: &[&[Need]]) -> Option<Self> {
        let number = needs.iter().filter(|needs| needs.contains(&Need::ControlPlane)).count();
        let directory = env::temp_dir().join(format!("cproxy-test-{}-control-planes", process::id()));
        (number >= TESTS_MIN).then(|| Self { directory, servers: Vec::new() })
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("socket")
    }

    /// Starts the servers after the product that they need.
    pub(super) fn start_after(&mut self, product: &Product) -> Result<()> {
        let (Need::ControlPlane, Ok(variables)) = (product.need, &product.variables) else { return Ok(()) };
        fs::create_dir(&self.directory).with_context(|| format!("creating {}", self.directory.display()))?;
        let socket = self.socket();
        let listener = UnixListener::bind(&socket).with_context(|| format!("binding {}", socket.display()))?;
        let listener = OwnedFd::from(listener);
        for number in 0..SERVERS {
            let mut command = Command::new(paths::target().join("debug/shared-control-plane"));
            let log = job::directory().join(format!("shared-control-plane-{number}.log"));
            fs::create_dir_all(job::directory()).context("creating the directory of logs")?;
            let log = File::create(&log).with_context(|| format!("creating {}", log.display()))?;
            command.stdin(listener.try_clone().context("sharing a socket")?);
            command.stdout(log.try_clone().context("sharing a log")?).stderr(log);
            command.envs(variables.iter().map(|(name, value)| (name, value)));
            self.servers.push(command.spawn().with_context(|| run::cannot_start(&command))?);
        }
        Ok(())
    }

    /// The variable for a test with these needs.
    pub(super) fn variable(&self, needs: &[Need]) -> Option<(&'static OsStr, PathBuf)> {
        let is_used = !self.servers.is_empty() && needs.contains(&Need::ControlPlane);
        is_used.then(|| (OsStr::new(VARIABLE), self.socket()))
    }

    fn end(&mut self) {
        for _ in &self.servers {
            // Each takes one request and ends.
            let asked = UnixStream::connect(self.socket()).and_then(|mut stream| writeln!(stream, "end"));
            if let Err(error) = asked {
                run::report(format!("a server of control planes does not answer: {error}"));
            }
        }
        for server in &mut self.servers {
            server.wait().ok();
        }
        fs::remove_dir_all(&self.directory).ok();
    }
}

impl Drop for SharedControlPlanes {
    fn drop(&mut self) {
        self.end();
    }
}
