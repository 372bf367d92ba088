//! `cproxy-relay run`: from the configuration to the end of the process.

use std::{
    future::{pending, ready},
    io,
    path::Path,
    sync::Arc,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use cproxy_daemon::{ListenAddress, StatusListener, StatusRequest, memory, notify};
use cproxy_network::SocketSetup;
use cproxy_relay_auth::{ReviewSettings, TokenReviewer, Views};
use cproxy_wire::{
    ApiClient, ApiServer,
    file::{self, FILE_BYTES_MAX},
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::{
    runtime::{Builder, Handle},
    signal::unix::{Signal, SignalKind, signal},
    time::{interval, sleep, timeout},
};

use crate::{
    cache::Cache,
    config::{Authentication, Config},
    listen::{listener, tls::ServerTls},
    metrics_server,
    policies::PolicyService,
    relay::{Relay, ReviewClient},
    upstream,
};

/// Interval at which old events are forgotten, free memory is returned and the files of TLS are read again.
const HOUSEKEEPING_INTERVAL: Duration = Duration::from_secs(30);
/// Time for the last clients to leave, after they were asked to.
const LEAVE_TIME_MAX: Duration = Duration::from_secs(10);
/// Interval at which it is looked whether the first lists are complete.
const READY_INTERVAL: Duration = Duration::from_millis(50);

/// Follows the API server and serves clients, until SIGTERM or SIGINT.
///
/// # Errors
/// It cannot start.
pub(crate) async fn run(config: Config) -> Result<()> {
    raise_file_limit();
    let hangups = signal(SignalKind::hangup())?;
    let mut stops = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let views = read_views(config.views.as_deref())?;
    let tls = config.tls.clone().map(ServerTls::read).transpose()?.map(Arc::new);
    let server = ApiServer { kubeconfig: config.kubeconfig.clone(), ..ApiServer::default() };
    let configuration = upstream::configuration(&server).await?;
    tracing::info!("following the API server at {configuration}");
    let client = Arc::new(ApiClient::new(server, configuration, SocketSetup::new(|_| Ok(()))));
    let upstream = start_upstream_runtime().context("starting a thread")?;
    let reviewer = (config.authentication == Authentication::TokenReview)
        .then(|| ReviewClient { client: client.clone(), runtime: upstream.clone() })
        .map(|reviews| {
            Arc::new(TokenReviewer::new(
                reviews,
                ReviewSettings { audiences: config.token_audiences.clone(), ..ReviewSettings::default() },
            ))
        });
    let cache = Arc::new(Cache::new(config.history_bytes));
    let policies = config.policies.map(|source| Arc::new(PolicyService::new(source, &cache)));
    let relay = Arc::new(Relay::new(
        cache.clone(),
        policies.clone(),
        reviewer,
        views,
        config.connections_max,
        config.drain_time,
    ));
    let listeners = open_listeners(&config, tls.as_ref())?;
    if let Some(address) = config.metrics_address {
        let listener = StatusListener::open(&ListenAddress::Tcp(address));
        let listener = listener.with_context(|| format!("--metrics-bind-address {address}"))?;
        let of_metrics = relay.clone();
        let respond = move |request: StatusRequest| ready(metrics_server::respond(&of_metrics, &request));
        relay.tasks.keep("metrics", listener.serve(respond));
    }
    let of_upstream = (client.clone(), cache.clone());
    let follow = async move { upstream::follow(&of_upstream.0, &of_upstream.1).await };
    relay.tasks.keep_in(&upstream, "upstream", follow);
    if let Some(policies) = policies.clone() {
        let of_policies = (client.clone(), policies.clone());
        let follow = async move { of_policies.1.follow(&of_policies.0).await };
        relay.tasks.keep_in(&upstream, "network policies", follow);
        let cache = cache.clone();
        relay.tasks.keep_in(&upstream, "publication of policies", async move { policies.publish(&cache).await });
    }
    relay.tasks.keep("wake-up of clients", async move {
        cache.wake_clients(policies.as_ref().map(|service| &*service.policies)).await;
    });
    if let Some(reviewer) = relay.reviewer.clone() {
        relay.tasks.keep("reviews of leases", relay.leases.clone().review(reviewer));
    }
    // It ends once the relay is ready.
    drop(tokio::spawn(announce(relay.clone(), client, upstream)));
    relay.tasks.keep("housekeeping", keep_house(relay.clone(), tls.clone()));
    relay.tasks.keep("reload", reload(relay.clone(), tls, config.views.clone(), hangups));
    let serve = |listener: listener::Listener| relay.tasks.keep("listener", listener.run(relay.clone()));
    let serving: Vec<_> = listeners.into_iter().map(serve).collect();
    let name = tokio::select! {
        _ = stops.0.recv() => "SIGTERM",
        _ = stops.1.recv() => "SIGINT",
    };
    drain(&relay, name).await;
    serving.iter().for_each(tokio::task::JoinHandle::abort);
    // The sockets are closed and their paths removed when the tasks have ended.
    for task in serving {
        task.await.ok();
    }
    Ok(())
}

/// Starts a thread for all that is asked of the API server, with a runtime of its own. On the thread of the clients,
/// each step on the way of an event would wait until thousands of them have had their turn.
fn start_upstream_runtime() -> io::Result<Handle> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let handle = runtime.handle().clone();
    thread::Builder::new().name("upstream".to_owned()).spawn(move || runtime.block_on(pending::<()>()))?;
    Ok(handle)
}

/// Each client takes a descriptor.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::warn!("the limit of open files stays at {:?}: {error}", limit.current);
    }
}

fn open_listeners(config: &Config, tls: Option<&Arc<ServerTls>>) -> Result<Vec<listener::Listener>> {
    let open = |address| {
        let listener = listener::open(address, tls).with_context(|| format!("--listen {address}"))?;
        tracing::info!("listening on {address}");
        Ok(listener)
    };
    config.listen.iter().map(open).collect()
}

/// Reads the views.
///
/// # Errors
/// The file cannot be read, or is invalid.
pub(crate) fn read_views(path: Option<&Path>) -> Result<Views> {
    let Some(path) = path else { return Ok(Views::everything()) };
    let text = views_text(path)?;
    Views::parse(&path.display().to_string(), &text).context("--views")
}

fn views_text(path: &Path) -> Result<String> {
    let text = file::read(path, FILE_BYTES_MAX).and_then(|bytes| String::from_utf8(bytes).map_err(io::Error::other));
    text.with_context(|| format!("--views {}", path.display()))
}

/// Reads the views again. Views that have not changed stay shared with the clients that have them.
fn reread_views(relay: &Relay, path: Option<&Path>) -> Result<Views> {
    let Some(path) = path else { return Ok(Views::everything()) };
    let text = views_text(path)?;
    relay.views().reparse(&path.display().to_string(), &text).context("--views")
}

/// Reports, once, that clients can be served.
async fn announce(relay: Arc<Relay>, client: Arc<ApiClient>, upstream: Handle) {
    while relay.unready().is_some() {
        sleep(READY_INTERVAL).await;
    }
    tracing::info!("ready: the first lists are complete");
    notify::ready();
    drop(upstream.spawn(async move { relay.read_server_version(&client).await }));
}

async fn keep_house(relay: Arc<Relay>, tls: Option<Arc<ServerTls>>) {
    let mut interval = interval(HOUSEKEEPING_INTERVAL);
    loop {
        interval.tick().await;
        relay.cache.forget_old();
        memory::release_free_pages();
        if let Some(tls) = &tls {
            tls.reread();
        }
    }
}

/// Reads views and certificates again on SIGHUP.
async fn reload(
    relay: Arc<Relay>,
    tls: Option<Arc<ServerTls>>,
    views: Option<std::path::PathBuf>,
    mut hangups: Signal,
) {
    while hangups.recv().await.is_some() {
        if let Some(tls) = &tls {
            tls.reread();
        }
        match reread_views(&relay, views.as_deref()) {
            Ok(views) => {
                relay.set_views(views);
                tracing::info!("SIGHUP: views and certificates were read again");
            }
            Err(error) => tracing::warn!("SIGHUP: {error:#}; the views stay as they are"),
        }
    }
}

/// Moves the clients to other replicas, spread over time.
async fn drain(relay: &Relay, signal: &str) {
    let count = relay.metrics.connections.get();
    tracing::info!("{signal}: {count} connections are asked to move within {:?}", relay.drain_time);
    relay.draining.cancel();
    let empty = async {
        while relay.metrics.connections.get() > 0 {
            sleep(READY_INTERVAL).await;
        }
    };
    timeout(relay.drain_time + LEAVE_TIME_MAX, empty).await.ok();
    tracing::info!("stopping with {} connections left", relay.metrics.connections.get());
}
