//! Status of the agent over HTTP, for monitoring: `/metrics`, `/healthz`, `/livez` and `/readyz`.
//!
//! It has a thread of its own, so that it answers while the agent's loop hangs. It asks that loop for its state, with a
//! time limit, and changes nothing. Without an address there is neither thread nor state.

mod health;
mod metrics;
mod process;
mod services;

use std::{io, path::Path, sync::Arc, thread, time::SystemTime};

use cproxy_daemon::{
    ListenAddress, MetricsFormat, StatusListener, StatusRequest, StatusResponse, Tasks, unix_socket::SocketFile,
};
use cproxy_datapath::bpf::{PinDir, ServiceCounters};
use health::Probes;
pub use metrics::{every_metric, meaning};
use tokio::{runtime::Builder, time::timeout};

use crate::{
    mailbox::{Mailbox, Query},
    run_dir::RESPONSE_TIMEOUT,
    state::{ServiceCalls, Status},
};

/// Name of the thread.
const THREAD: &str = "endpoints";
/// Its stack, which is small in a release.
const STACK_BYTES: usize = 512 << 10;

/// Paths that a listener serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Paths {
    metrics: bool,
    health: bool,
}

/// Listeners that do not serve yet.
#[derive(Debug, Default)]
pub struct StatusHttp {
    listeners: Vec<(StatusListener, Paths)>,
    files: Vec<Arc<SocketFile>>,
}

/// Failure to open an address.
#[derive(Debug, thiserror::Error)]
#[error("{flag} {address}: {error}; {}", advice(.error))]
pub struct StatusHttpError {
    flag: &'static str,
    address: ListenAddress,
    /// The system's error.
    pub(crate) error: io::Error,
}

fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "choose a port from 1024, or a path that belongs to the agent's user: the agent has no further rights"
        }
        _ => "choose another address",
    }
}

/// Files of the unix sockets, removed when this is dropped.
#[derive(Debug)]
pub struct StatusHttpFiles(Vec<Arc<SocketFile>>);

impl Drop for StatusHttpFiles {
    fn drop(&mut self) {
        // The thread that serves has them, too.
        self.0.iter().for_each(|file| file.close());
    }
}

impl StatusHttp {
    /// Opens the listeners; one if both addresses are the same. Call it inside a tokio runtime.
    ///
    /// # Errors
    /// An address is in use or cannot be bound.
    pub fn open(metrics: Option<&ListenAddress>, health: Option<&ListenAddress>) -> Result<Self, StatusHttpError> {
        let mut status_http = Self::default();
        let is_shared = metrics == health;
        let first =
            if is_shared { "--metrics-bind-address and --healthz-bind-address" } else { "--metrics-bind-address" };
        for (flag, address, paths) in [
            (first, metrics, Paths { metrics: true, health: is_shared }),
            ("--healthz-bind-address", health.filter(|_| !is_shared), Paths { metrics: false, health: true }),
        ] {
            let Some(address) = address else { continue };
            let opened = StatusListener::open(address);
            let listener = opened.map_err(|error| StatusHttpError { flag, address: address.clone(), error })?;
            tracing::info!(name: "listening", "{flag}: listening on {}", listener.address(address));
            status_http.files.extend(listener.file().cloned());
            status_http.listeners.push((listener, paths));
        }
        Ok(status_http)
    }

    /// Whether there is no listener.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.listeners.is_empty()
    }

    /// Files of its unix sockets.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|file| &**file.path())
    }

    /// Serves for ever, on a thread that is started. Without a listener there is none.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(self, mailbox: Mailbox, pins: PinDir, tasks: Tasks) -> io::Result<StatusHttpFiles> {
        if !self.is_empty() {
            let runtime = Builder::new_current_thread().enable_all().build()?;
            let started = SystemTime::now();
            let server = Arc::new(Server { mailbox, pins, started, probes: Probes::default() });
            let serve = move || {
                runtime.block_on(async move {
                    for (listener, paths) in self.listeners {
                        let server = server.clone();
                        let respond = move |request| server.clone().respond(request, paths);
                        tasks.keep("metrics and health checks", listener.serve(respond));
                    }
                    std::future::pending::<()>().await;
                });
            };
            drop(thread::Builder::new().name(THREAD.to_owned()).stack_size(STACK_BYTES).spawn(serve)?);
        }
        Ok(StatusHttpFiles(self.files))
    }
}

/// State of the server.
struct Server {
    /// Way to the task that owns the table.
    mailbox: Mailbox,
    pins: PinDir,
    /// Time at which the agent was started.
    started: SystemTime,
    probes: Probes,
}

impl Server {
    async fn respond(self: Arc<Self>, request: StatusRequest, paths: Paths) -> StatusResponse {
        match &*request.path {
            "/metrics" if paths.metrics => self.metrics(MetricsFormat::of_accept(request.accept.as_deref())).await,
            "/healthz" if paths.health => self.probes.healthz(self.status().await.as_ref()),
            "/livez" if paths.health => self.probes.livez(self.status().await.as_ref()),
            "/readyz" if paths.health => health::readyz(self.status().await.as_ref()),
            _ => StatusResponse::text(404, paths.list()),
        }
    }

    /// State of the agent; `None` if its loop hangs.
    async fn status(&self) -> Option<Status> {
        let status = timeout(RESPONSE_TIMEOUT, self.mailbox.ask(Query::Status)).await;
        status.ok()?.ok()
    }

    /// Calls by Service, if the programs count them.
    async fn service_calls(&self) -> Vec<ServiceCalls> {
        let counters = ServiceCounters::read(&self.pins).map_err(|error| tracing::debug!("metrics: {error}"));
        let Ok(Some(counters)) = counters else { return Vec::new() };
        let query = |sender| Query::ServiceCalls(counters, sender);
        let calls = timeout(RESPONSE_TIMEOUT, self.mailbox.ask(query)).await;
        calls.ok().and_then(Result::ok).unwrap_or_default()
    }

    async fn metrics(&self, format: MetricsFormat) -> StatusResponse {
        match self.status().await {
            Some(status) => {
                let mut kernel = metrics::Kernel::read(&self.pins);
                kernel.calls = self.service_calls().await;
                let body = metrics::text(format, &status, &kernel, &self.probes, self.started);
                StatusResponse { code: 200, content_type: format.content_type(), body }
            }
            None => StatusResponse::text(503, health::NO_ANSWER),
        }
    }
}

impl Paths {
    fn list(self) -> &'static str {
        match (self.metrics, self.health) {
            (true, true) => "see /metrics, /healthz, /livez and /readyz\n",
            (true, false) => "see /metrics\n",
            (false, _) => "see /healthz, /livez and /readyz\n",
        }
    }
}
