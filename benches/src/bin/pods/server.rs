//! The API server with its Pods: requests that create, change, list and watch them.

use std::{
    ops::Range,
    process,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use cproxy_network::SocketSetup;
use cproxy_policy::api;
use cproxy_relay_core::PolicyObject;
use cproxy_tests::{control_plane::ControlPlane, usage::cpu_time};
use cproxy_wire::{
    ApiClient, ApiServer, Decoded, FieldSelector, Selectors, Subscriber, WatchEvent, configure, follow_resource,
};
use futures_util::AsyncBufReadExt as _;
use http::{
    Request,
    header::{ACCEPT, ACCEPT_ENCODING},
};
use kube::{
    Client,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::Value;
use tokio::{
    runtime::Runtime,
    sync::Notify,
    task::{AbortHandle, JoinSet},
    time::{Instant, sleep, sleep_until},
};

use crate::objects;

/// Number of requests under way at a time.
const AT_ONCE: usize = 128;

/// Time for the last events to arrive.
const ARRIVAL: Duration = Duration::from_secs(2);

const PODS: &str = "/api/v1/namespaces/default/pods";

/// Cost of one list.
pub(crate) struct List {
    pub(crate) api_server_cpu: Duration,
    pub(crate) client_cpu: Duration,
    pub(crate) time: Duration,
    /// Bytes of the body as they are sent; `None` where the client does not count them.
    pub(crate) bytes: Option<u64>,
}

/// Client with all rights, and the process of the server.
pub(crate) struct Server<'a> {
    control_plane: &'a ControlPlane<'a>,
    pid: u32,
    runtime: Runtime,
    client: Client,
    pods: usize,
    /// Number of changes so far.
    changes: usize,
}

/// Watch of all Pods whose events are counted and dropped.
pub(crate) struct Watcher {
    task: AbortHandle,
    pub(crate) counts: Arc<Counts>,
}

#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) bytes: AtomicU64,
    pub(crate) events: AtomicU64,
}

impl<'a> Server<'a> {
    /// The server of a control plane, without Pods.
    pub(crate) fn new(control_plane: &'a ControlPlane<'a>) -> Result<Self> {
        let pid = control_plane.api_server_pid().context("the API server does not run")?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let client = runtime.block_on(control_plane.client());
        Ok(Self { control_plane, pid, runtime, client, pods: 0, changes: 0 })
    }

    /// Creates Pods until there are `pods`.
    pub(crate) fn create_pods(&mut self, pods: usize) -> Result<()> {
        let begin = Instant::now();
        self.runtime.block_on(self.create(self.pods..pods))?;
        self.pods = pods;
        eprintln!("{pods} Pods: the last were created in {:.0} s", begin.elapsed().as_secs_f64());
        Ok(())
    }

    /// CPU time of the server so far.
    pub(crate) fn cpu(&self) -> Duration {
        cpu_time(self.pid)
    }

    async fn create(&self, pods: Range<usize>) -> Result<()> {
        let mut creating = JoinSet::new();
        for pod in pods {
            if creating.len() >= AT_ONCE {
                creating.join_next().await.context("no request is under way")???;
            }
            let client = self.client.clone();
            creating.spawn(async move {
                let body = objects::pod(pod).to_string().into_bytes();
                client.request_text(kube::core::Request::new(PODS).create(&PostParams::default(), body)?).await?;
                change_status(client, pod, 0).await
            });
        }
        while let Some(created) = creating.join_next().await {
            created??;
        }
        Ok(())
    }

    /// Changes the status of Pods in turn, at a rate, and waits for their events. Returns how many changes there were.
    pub(crate) fn change(&mut self, rate_per_s: u32, time: Duration) -> Result<usize> {
        let (begin, first) = (Instant::now(), self.changes);
        let count = (f64::from(rate_per_s) * time.as_secs_f64()) as usize;
        self.runtime.block_on(async {
            let mut changing = JoinSet::new();
            for change in 0..count {
                sleep_until(begin + Duration::from_secs_f64(change as f64 / f64::from(rate_per_s))).await;
                let number = first + change;
                changing.spawn(change_status(self.client.clone(), number * 7 % self.pods, 1 + number));
            }
            while let Some(changed) = changing.join_next().await {
                changed??;
            }
            sleep_until(begin + time).await;
            sleep(ARRIVAL).await;
            anyhow::Ok(())
        })?;
        self.changes += count;
        Ok(count)
    }

    /// Lists all Pods in protobuf, as the server's cache has them, and drops them. `encoding` is what is accepted.
    pub(crate) fn list(&self, encoding: &'static str) -> Result<List> {
        self.measure(async {
            let counts = Counts::default();
            let request = get("/api/v1/pods?resourceVersion=0", "application/vnd.kubernetes.protobuf", encoding)?;
            let body = self.client.request_stream(request).await?;
            count(body, &counts, false).await?;
            Ok(Some(counts.bytes.into_inner()))
        })
    }

    /// Lists all Pods as the relay does: decompressed, cut into objects, and decoded to what policies need.
    pub(crate) fn list_as_relay(&self) -> Result<List> {
        let options = ApiServer {
            kubeconfig: Some(self.control_plane.admin_kubeconfig()),
            addresses: Vec::new(),
            tls_server_name: None,
        };
        self.measure(async {
            let configuration = configure(&options).await?;
            let client = ApiClient::new(options.clone(), configuration, SocketSetup::new(|_| Ok(())));
            let done = Arc::new(Notify::new());
            let mut lister = Lister { done: done.clone(), pods: 0 };
            tokio::select! {
                () = follow_resource(&client, ALL, &mut lister) => {}
                () = done.notified() => {}
            }
            ensure!(lister.pods == self.pods, "{} of {} Pods were listed", lister.pods, self.pods);
            Ok(None)
        })
    }

    fn measure(&self, list: impl Future<Output = Result<Option<u64>>>) -> Result<List> {
        let (before, own_before, begin) = (self.cpu(), cpu_time(process::id()), Instant::now());
        let bytes = self.runtime.block_on(list)?;
        let time = begin.elapsed();
        let client_cpu = cpu_time(process::id()).saturating_sub(own_before);
        Ok(List { api_server_cpu: self.cpu().saturating_sub(before), client_cpu, time, bytes })
    }

    /// Starts a watch of all Pods from now on, on a connection of its own.
    pub(crate) fn watch(&self) -> Result<Watcher> {
        self.runtime.block_on(async {
            let client = self.control_plane.client().await;
            let text = client.request_text(get("/api/v1/pods?limit=1", "application/json", "identity")?).await?;
            let list: Value = serde_json::from_str(&text)?;
            let version = list.pointer("/metadata/resourceVersion").and_then(Value::as_str);
            let version = version.context("a list without a version")?;
            let target = format!(
                "/api/v1/pods?watch=true&allowWatchBookmarks=true&timeoutSeconds=3600&resourceVersion={version}"
            );
            let accepted = "application/vnd.kubernetes.protobuf;stream=watch";
            let body = client.request_stream(get(&target, accepted, "identity")?).await?;
            let counts = Arc::new(Counts::default());
            let own = counts.clone();
            let task = tokio::spawn(async move {
                if let Err(error) = count(body, &own, true).await {
                    eprintln!("a watch has failed: {error:#}");
                }
            });
            Ok(Watcher { task: task.abort_handle(), counts })
        })
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn get(target: &str, accepted: &str, encoding: &str) -> Result<Request<Vec<u8>>> {
    Ok(Request::get(target).header(ACCEPT, accepted).header(ACCEPT_ENCODING, encoding).body(Vec::new())?)
}

async fn change_status(client: Client, pod: usize, changes: usize) -> Result<()> {
    let patch = Patch::Merge(objects::status(pod, changes));
    let request = kube::core::Request::new(PODS);
    let request = request.patch_subresource("status", &objects::name(pod), &PatchParams::default(), &patch)?;
    client.request_text(request).await.map(drop).with_context(|| format!("changing {}", objects::name(pod)))
}

/// Counts bytes until the body ends and, if it is a watch, events: each has its length before it, in 4 bytes.
async fn count(body: impl futures_util::AsyncBufRead, counts: &Counts, is_watch: bool) -> Result<()> {
    let mut body = std::pin::pin!(body);
    let (mut length, mut length_bytes, mut left) = (0_usize, 0, 0);
    loop {
        let piece = body.fill_buf().await?;
        let size = piece.len();
        if size == 0 {
            return Ok(());
        }
        let mut rest = piece;
        while is_watch && !rest.is_empty() {
            if left > 0 {
                let taken = left.min(rest.len());
                rest = rest.split_at(taken).1;
                left -= taken;
            } else if let Some((&byte, after)) = rest.split_first() {
                (length, length_bytes, rest) = (length << 8 | usize::from(byte), length_bytes + 1, after);
                if length_bytes == 4 {
                    counts.events.fetch_add(1, Relaxed);
                    (left, length, length_bytes) = (length, 0, 0);
                }
            }
        }
        body.as_mut().consume(size);
        counts.bytes.fetch_add(size as u64, Relaxed);
    }
}

/// All Pods.
const ALL: Selectors<'static> = Selectors { labels: "", fields: FieldSelector::Any };

/// Pod as the relay decodes it.
type Pod = PolicyObject<api::Pod>;

/// Counts the Pods of a list.
struct Lister {
    done: Arc<Notify>,
    pods: usize,
}

impl Subscriber<Pod> for Lister {
    const SPREADS_LISTS: bool = false;
    const LISTS_AFTER_FAILURE: bool = true;

    async fn publish(&mut self, event: WatchEvent<Pod>) {
        match event {
            WatchEvent::Listed(Decoded::Object(_)) => self.pods += 1,
            WatchEvent::ListDone(_) => self.done.notify_one(),
            WatchEvent::Failed(message) => eprintln!("{message}"),
            _ => {}
        }
    }
}
