//! An API server with the pods that policies name, and a relay that resolves the policies, with a socket for each pod
//! whose policy it serves.

use std::{
    future::ready,
    net::Ipv4Addr,
    path::PathBuf,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use cproxy_benches::{node, pod::Pod, pods};
use cproxy_tests::{
    control_plane::ControlPlane,
    manifest,
    process::{Agent, cproxy},
    relay_server::{RelayServer, RunningRelay},
    sandbox::Sandbox,
};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use kube::Client;
use serde_json::{Map, Value, json};
use tokio::runtime::Runtime;

use crate::{engine::ALLOWED, watch};

const NAMESPACE: &str = "shop";
/// Address of the first pod that policies name.
const FIRST_MEMBER: Ipv4Addr = Ipv4Addr::new(10, 128, 0, 0);
/// The pod that enters and leaves all sets.
const MOVER: &str = "mover";
pub(crate) const MOVER_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 244, 0, 3);
/// Requests under way while pods are created.
const CONCURRENCY: usize = 32;
/// Number of the first pod here, beside those of other measurements.
const FIRST_POD: u8 = 100;
/// Limit on the time until the relay has sent a change.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Policy of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scene {
    /// The agent runs without `--policy`.
    Off,
    /// No policy selects the pod.
    NotIsolated,
    /// A policy isolates the pod in both directions, but for so many peers.
    Isolated(u32),
}

/// The API server and the relay.
pub(crate) struct Cluster<'s> {
    sandbox: &'s Sandbox,
    client: Client,
    runtime: Runtime,
    _relay: RunningRelay,
    kubeconfig: PathBuf,
    pods: Vec<(Scene, Pod)>,
    is_member: bool,
    _control_plane: ControlPlane<'s>,
}

impl Scene {
    pub(crate) fn title(self) -> String {
        match self {
            Self::Off => "without --policy".to_owned(),
            Self::NotIsolated => "not isolated".to_owned(),
            Self::Isolated(peers) => format!("isolated, {peers}"),
        }
    }

    /// The pod's name at the API server.
    fn pod(self) -> String {
        match self {
            Self::Off => "web-off".to_owned(),
            Self::NotIsolated => "web-open".to_owned(),
            Self::Isolated(peers) => format!("web-{peers}"),
        }
    }

    fn socket(self, sandbox: &Sandbox) -> PathBuf {
        sandbox.dir().join(format!("{}.sock", self.pod()))
    }
}

impl<'s> Cluster<'s> {
    /// Creates the pods and policies of these scenes, and starts the relay.
    pub(crate) fn start(sandbox: &'s Sandbox, scenes: &[Scene]) -> Result<Self> {
        sandbox.add_addresses([MOVER_ADDRESS]);
        let control_plane = ControlPlane::start(sandbox);
        node::create(sandbox, &control_plane);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let client = runtime.block_on(control_plane.client());
        let pods =
            scenes.iter().zip(FIRST_POD..).map(|(&scene, number)| Ok((scene, Pod::new(sandbox, number, ALLOWED)?)));
        let pods = pods.collect::<Result<Vec<_>>>()?;
        runtime.block_on(create(&client, &pods))?;
        let relay = start_relay(sandbox, &control_plane, scenes);
        let kubeconfig = control_plane.agent_kubeconfig();
        Ok(Self {
            sandbox,
            client,
            runtime,
            _relay: relay,
            kubeconfig,
            pods,
            is_member: false,
            _control_plane: control_plane,
        })
    }

    /// A scene's pod.
    pub(crate) fn pod(&self, scene: Scene) -> Result<&Pod> {
        Ok(&self.pods.iter().find(|(of, _)| *of == scene).context("the scene has a pod")?.1)
    }

    /// An agent of a scene.
    pub(crate) fn agent(&self, scene: Scene) -> Result<Agent<'s>> {
        let agent = self.pod(scene)?.agent(self.sandbox).kubeconfig(&self.kubeconfig);
        let agent = agent.args(["--apiserver", &format!("unix://{}", scene.socket(self.sandbox).display())]);
        Ok(if scene == Scene::Off { agent } else { agent.args(["--policy", "enforce"]) })
    }

    /// Removes what an agent of a scene has left.
    pub(crate) fn clean_up(&self, scene: Scene) -> Result<()> {
        let pins = self.pod(scene)?.pin_dir.display().to_string();
        cproxy(self.sandbox, &["cleanup", "--policy-too", "--pin-dir", &pins]).success();
        Ok(())
    }

    /// Has the mover enter all sets, or leave them; then the time of the API server's answer.
    pub(crate) fn move_pod(&mut self) -> Result<Instant> {
        self.is_member = !self.is_member;
        let (labels, client) = (self.mover_labels(), &self.client);
        self.runtime.block_on(pods::set_labels(client, (NAMESPACE, MOVER), &labels))?;
        Ok(Instant::now())
    }

    /// Whether the mover is in all sets.
    pub(crate) fn is_member(&self) -> bool {
        self.is_member
    }

    fn mover_labels(&self) -> Value {
        let value = if self.is_member { json!("yes") } else { Value::Null };
        let names = self.pods.iter().filter_map(|(scene, _)| label(*scene));
        names.map(|name| (name, value.clone())).collect::<Map<_, _>>().into()
    }

    /// Follows the slices of a scene as its agent does.
    pub(crate) fn watch(&self, scene: Scene) -> Result<Events> {
        let socket = scene.socket(self.sandbox);
        let (sender, events) = mpsc::channel();
        let mut stream = watch::open(&socket)?;
        thread::spawn(move || while watch::next(&mut stream).is_some_and(|at| sender.send(at).is_ok()) {});
        Ok(Events(events))
    }
}

/// Times at which parts of a watch have come.
pub(crate) struct Events(mpsc::Receiver<Instant>);

impl Events {
    /// Forgets those so far.
    pub(crate) fn forget(&self) {
        while self.0.try_recv().is_ok() {}
    }

    /// The first one since.
    pub(crate) fn first(&self) -> Result<Instant> {
        self.0.recv_timeout(TIMEOUT).context("the relay has sent nothing")
    }
}

/// Label of the peers of a scene.
fn label(scene: Scene) -> Option<String> {
    if let Scene::Isolated(peers) = scene { Some(format!("in-{peers}")) } else { None }
}

async fn create(client: &Client, pods: &[(Scene, Pod)]) -> Result<()> {
    pods::create_namespace(client, NAMESPACE).await?;
    for (scene, pod) in pods {
        let name = scene.pod();
        pods::create(client, (NAMESPACE, &name), &json!({"web": name}), "node-0", pod.address).await?;
        let Some(label) = label(*scene) else { continue };
        let peers = json!([{"podSelector": {"matchLabels": {label: "yes"}}}]);
        let spec = json!({
            "podSelector": {"matchLabels": {"web": name}}, "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": peers}], "egress": [{"to": peers}],
        });
        pods::create_policy(client, (NAMESPACE, &name), &spec).await?;
    }
    pods::create(client, (NAMESPACE, MOVER), &json!({}), "node-0", MOVER_ADDRESS).await?;
    let sizes: Vec<_> = pods.iter().filter_map(|(scene, _)| Some((label(*scene)?, peers(*scene)))).collect();
    let members = sizes.iter().map(|(_, peers)| *peers).max().unwrap_or_default();
    eprintln!("creating {members} pods");
    let one = |number: u32| {
        let labels = sizes.iter().filter(|(_, peers)| number < *peers).map(|(label, _)| (label.clone(), json!("yes")));
        let labels = Value::from(labels.collect::<Map<_, _>>());
        async move {
            let (name, node) = (format!("member-{number}"), format!("node-{}", number % 100));
            let address = Ipv4Addr::from_bits(FIRST_MEMBER.to_bits() + number);
            pods::create(client, (NAMESPACE, &name), &labels, &node, address).await
        }
    };
    stream::iter((0..members).map(one)).buffer_unordered(CONCURRENCY).try_for_each(|()| ready(Ok(()))).await
}

fn peers(scene: Scene) -> u32 {
    if let Scene::Isolated(peers) = scene { peers } else { 0 }
}

fn start_relay(sandbox: &Sandbox, control_plane: &ControlPlane<'_>, scenes: &[Scene]) -> RunningRelay {
    let sockets = scenes.iter().map(|scene| format!("unix://{}", scene.socket(sandbox).display()));
    let sockets = sockets.collect::<Vec<_>>().join(",");
    let views = scenes.iter().map(|scene| {
        json!({
            "name": scene.pod(), "match": {"unixPaths": [scene.socket(sandbox)]}, "namespaces": "all",
            "policy": {"pod": format!("{NAMESPACE}/{}", scene.pod())},
        })
    });
    let views = json!({"views": views.collect::<Vec<_>>()}).to_string();
    let views = manifest::write_text(sandbox.dir(), "views.yaml", &views).display().to_string();
    let relay = RelayServer::new(sandbox).kubeconfig(control_plane.admin_kubeconfig()).listen(sockets);
    relay.without_authentication().args(["--policies", "--views", &views]).start()
}
