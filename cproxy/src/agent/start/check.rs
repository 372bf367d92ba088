//! First phase: gives up capabilities, reads and checks all input, and takes locks and listeners.

use std::{path::Path, sync::Arc};

use cproxy_core::{NodeContext, Store};
use cproxy_daemon::unix_socket::SocketFile;
use cproxy_datapath::bpf::{Environment, PinDir, PinLock, lock_pins};
use tokio::net::UnixListener;

use crate::{
    agent::{
        error::AgentError,
        loop_settings::{check_canary, loop_settings},
        policy,
        source::{self, CheckedSource},
        tasks::resume::{self, KernelLog},
        timeline::{Phase, Timeline},
    },
    config::{Config, LoopSettings, PolicyMode},
    manifests::{self, ParseOptions},
    privileges,
    run_dir::RunDir,
    status_http::StatusHttp,
};

/// Agent whose input and machine are checked. Nothing is attached.
pub(in crate::agent) struct Checked {
    pub(super) config: Config,
    pub(super) input: Input,
    pub(super) kernel_log: Option<KernelLog>,
    pub(super) environment: Environment,
    /// Held until the end: the only agent on these pins. The run directory has a lock of its own.
    pub(super) lock: PinLock,
    pub(super) run_dir: RunDir,
    pub(super) listener: UnixListener,
    pub(super) socket: Arc<SocketFile>,
    pub(super) status_http: StatusHttp,
    pub(super) timeline: Timeline,
}

/// Input of the agent.
pub(super) struct Input {
    pub(super) node: NodeContext,
    pub(super) bootstrap: Option<Store>,
    pub(super) settings: LoopSettings,
    pub(super) source: CheckedSource,
}

impl Checked {
    /// Gives up capabilities, for which there must be one thread, and checks all input before anything is attached.
    pub(in crate::agent) async fn new(config: Config) -> Result<Self, AgentError> {
        let mut timeline = Timeline::start();
        // Opening the kernel's log takes a capability that nothing else needs.
        let kernel_log = resume::open_kernel_log();
        if let Err(error) = privileges::give_up_capabilities(&config) {
            tracing::warn!("not all capabilities can be given up: {error}");
        }
        check_canary(&config)?;
        let input = Input::read(&config).await?;
        let (cgroup, pin_dir, run_dir) = (config.cgroup.cgroup.as_deref(), &config.pins.pin_dir, &config.run.run_dir);
        if PinDir::new(pin_dir).check_installed().is_err() {
            // Nothing is made there for an agent that cannot start.
            RunDir::check_unused(run_dir)?;
        }
        let environment = Environment::prepare(cgroup, pin_dir, run_dir)?;
        policy::check_exempt(&config, &environment.cgroup)?;
        let lock = lock_pins(&PinDir::new(&environment.pin_dir))?;
        let run_dir = RunDir::claim(run_dir)?;
        let (listener, socket) = run_dir.listen()?;
        let monitoring = &config.monitoring;
        let [metrics, health] = [&monitoring.metrics_bind_address, &monitoring.healthz_bind_address];
        let status_http = StatusHttp::open(metrics.as_ref(), health.as_ref())?;
        timeline.end(Phase::Prepare);
        Ok(Self { config, input, kernel_log, environment, lock, run_dir, listener, socket, status_http, timeline })
    }
}

impl Input {
    async fn read(config: &Config) -> Result<Self, AgentError> {
        let node = config.node_context();
        policy::check(config)?;
        let has_policies = config.policy.policy != PolicyMode::Off;
        let options = ParseOptions { node_name: node.node_name.clone(), has_policies, ..ParseOptions::default() };
        let bootstrap = config.bootstrap.bootstrap.as_deref();
        let bootstrap = bootstrap.map(|path| read_bootstrap(path, &node, &options)).transpose()?;
        let settings = loop_settings(config)?;
        let source = source::check(&config.source.source(), options).await?;
        if let CheckedSource::Manifests(_, files) = &source
            && let Some(problem) = files.missing_node()
        {
            tracing::warn!("{problem}");
        }
        Ok(Self { node, bootstrap, settings, source })
    }
}

fn read_bootstrap(path: &Path, node: &NodeContext, options: &ParseOptions) -> Result<Store, AgentError> {
    let failed = |message: String| AgentError::Bootstrap(path.to_owned(), message);
    // A FIFO would keep the agent waiting.
    let text = cproxy_wire::file::read(path, u64::MAX).map_err(|error| failed(error.to_string()))?;
    let text = String::from_utf8(text).map_err(|error| failed(error.to_string()))?;
    let contents = manifests::parse(&path.display().to_string(), &text, options).map_err(failed)?;
    let mut store = Store::new(node.clone());
    let problems: Vec<_> = contents.events().flat_map(|event| store.apply(event)).collect();
    contents.problems().chain(&problems).for_each(|problem| tracing::warn!("bootstrap: {problem}"));
    Ok(store)
}
