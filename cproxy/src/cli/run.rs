//! `cproxy run`

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use http::Uri;
use tracing_subscriber::{filter::Targets, fmt, layer::SubscriberExt, util::SubscriberInitExt};

use super::{PinDirOption, RunDirOption};
use crate::{
    agent,
    config::{Config, Source},
    k8s::ApiServer,
};

/// Flags of `cproxy run`.
#[derive(Args, Debug)]
pub(super) struct Options {
    /// Follow the API server of this kubeconfig; without it and --manifests: of the pod's ServiceAccount
    #[arg(long, env = "CPROXY_KUBECONFIG", value_name = "FILE", conflicts_with = "manifests")]
    kubeconfig: Option<PathBuf>,
    /// Follow these files or directories (in the environment: with commas between them) instead of an API server
    #[arg(long, env = "CPROXY_MANIFESTS", value_name = "PATH", num_args = 1.., value_delimiter = ',')]
    manifests: Vec<PathBuf>,
    /// Reach the API server here, not through its ClusterIP
    #[arg(long, env = "CPROXY_APISERVER", value_name = "URL", conflicts_with = "manifests", value_parser = api_server_url)]
    apiserver: Option<Uri>,
    /// Name that the API server's certificate must have
    #[arg(long, env = "CPROXY_TLS_SERVER_NAME", value_name = "NAME", conflicts_with = "manifests")]
    tls_server_name: Option<String>,
    /// Services and slices to serve until the first complete sync
    #[arg(long, env = "CPROXY_BOOTSTRAP", value_name = "FILE")]
    bootstrap: Option<PathBuf>,
    /// cgroup2 directory to attach to; default: the cgroup2 root, mounted if need be
    #[arg(long, env = "CPROXY_CGROUP", value_name = "DIR")]
    cgroup: Option<PathBuf>,
    #[command(flatten)]
    pin: PinDirOption,
    #[command(flatten)]
    run: RunDirOption,
    /// How much to log
    #[arg(long, env = "CPROXY_LOG_LEVEL", value_name = "LEVEL", value_enum, default_value_t)]
    log_level: LogLevel,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum LogLevel {
    Error,
    Warn,
    #[default]
    Info,
    Debug,
}

fn api_server_url(text: &str) -> Result<Uri, String> {
    let url: Uri = text.parse().map_err(|error| format!("{error}; it looks like https://10.0.0.1:6443"))?;
    match (url.scheme_str(), url.host()) {
        (Some("https" | "http"), Some(_)) => Ok(url),
        _ => Err("not a URL; it looks like https://10.0.0.1:6443".to_owned()),
    }
}

pub(super) fn run(options: Options) -> anyhow::Result<()> {
    start_log(options.log_level);
    let config = config(options);
    tracing::info!("cproxy {}: {config}", env!("CARGO_PKG_VERSION"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(agent::run(config))?)
}

fn config(options: Options) -> Config {
    let source = if options.manifests.is_empty() {
        Source::ApiServer(ApiServer {
            kubeconfig: options.kubeconfig,
            url: options.apiserver,
            tls_server_name: options.tls_server_name,
        })
    } else {
        Source::Manifests(options.manifests)
    };
    Config {
        source,
        bootstrap: options.bootstrap,
        cgroup: options.cgroup,
        pin_dir: options.pin.pin_dir,
        run_dir: options.run.run_dir,
    }
}

fn start_log(level: LogLevel) {
    let level = match level {
        LogLevel::Error => tracing::Level::ERROR,
        LogLevel::Warn => tracing::Level::WARN,
        LogLevel::Info => tracing::Level::INFO,
        LogLevel::Debug => tracing::Level::DEBUG,
    };
    let is_terminal = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let format = fmt::layer().with_target(false).with_ansi(is_terminal).with_writer(std::io::stderr);
    // What libraries have to say, cproxy says in its own words.
    let own = Targets::new().with_target("cproxy", level);
    tracing_subscriber::registry().with(format).with(own).init();
}
