//! Policies of pods: clients whose policy names one set of many addresses, and pods that enter and leave it.

use std::{future::ready, net::Ipv4Addr, time::Duration};

use anyhow::{Context as _, Result};
use cproxy_benches::pods;
use cproxy_tests::{
    manifest,
    relay_server::RunningRelay,
    usage::{Memory, cpu_time},
};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use kube::{Client, api::DeleteParams, core::Request};
use serde_json::{Value, json};
use tokio::{
    runtime::Runtime,
    time::{Instant, sleep_until},
};

use crate::{
    CALM, RELAY,
    clock::{between, now_ns},
    generator::Generator,
    load::{protocol::Start, receipts::Change},
    place::{Moment, Place, load_average, memory_at_rest, socket_buffers_bytes},
    rates::AtRate,
    report::Footprint,
    storms::Storm,
};

/// Addresses of the set.
const MEMBERS: usize = 10_000;
/// Pods that enter and leave it in turn.
const MOVERS: usize = 50;
/// Changes a second.
const RATE_PER_S: u32 = 5;
/// Requests under way while pods are created.
const CONCURRENCY: usize = 32;
/// Pods of a Deployment that is replaced.
const REPLACED: usize = 1_000;
/// Namespace of the pods.
const NAMESPACE: &str = "policies";
/// Name of the relay that serves policies, in tables of memory.
const WITH_POLICIES: &str = "relay, policies";
/// Address of the first pod.
const FIRST_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 128, 0, 0);
/// Pod whose policy all clients get.
const OWN_POD: &str = "web-0";

/// Views that give each client the policy of one pod.
const VIEWS: &str = "views: [{name: all, match: {usernames: ['*']}, namespaces: all, policy: {pod: policies/web-0}}]";

/// Measures clients of policies.
pub(crate) fn measure(place: &Place<'_>, clients: u32, seconds: u32) -> Result<(Footprint, AtRate, Storm)> {
    let mut pods = Pods::new(place)?;
    eprintln!("creating {MEMBERS} pods");
    pods.create()?;
    let without = place.start_relay(1, &[])?;
    let idle_without = memory_at_rest(without.pid());
    drop(without);
    let views = manifest::write_text(place.sandbox.dir(), "views.yaml", VIEWS).display().to_string();
    let relay = place.start_relay(0, &["--policies", "--views", &views])?;
    let mut generator = Generator::start(place.sandbox)?;
    let (idle, buffers) = (memory_at_rest(relay.pid()), socket_buffers_bytes());
    let mib = |memory: Memory| memory.anonymous as f64 / f64::from(1 << 20);
    eprintln!("anonymous memory without and with policies: {:.1} and {:.1} MiB", mib(idle_without), mib(idle));
    let start = Start { has_policies: true, checked: 0, nodes: 0, ..place.clients(1, clients, CALM * clients) };
    generator.start_clients(&start)?;
    generator.wait_for_lists()?;
    let buffers_bytes = socket_buffers_bytes().saturating_sub(buffers);
    let memory = memory_at_rest(relay.pid());
    let footprint = Footprint { server: WITH_POLICIES, clients, idle, memory, buffers_bytes, upstream: Vec::new() };
    eprintln!("{}", footprint.text());
    generator.record()?;
    let before = Moment::now(place, Some(&relay), &generator)?;
    let changes = pods.change(seconds)?;
    let last = changes.iter().map(|change| change.version).max().unwrap_or_default();
    let answered_ns = changes.iter().map(|change| change.answered_ns).max().unwrap_or_default();
    let settled_ns = generator.settle([0, last])?;
    let shares = Moment::now(place, Some(&relay), &generator)?.since(&before);
    let [latencies, unhurried] = generator.latencies(&changes)?;
    let time = Duration::from_secs(seconds.into()) + between(answered_ns, settled_ns);
    let events = latencies.receipts.max(1) as f64;
    eprintln!("{:.1} us of the relay's CPU for an event and client", shares.relay * time.as_secs_f64() * 1e6 / events);
    let at_rate = AtRate {
        server: RELAY,
        remark: ", policies",
        clients,
        rate_per_s: RATE_PER_S,
        events_per_s: events / time.as_secs_f64(),
        latencies,
        unhurried,
        shares,
        rest: between(answered_ns, settled_ns),
        load_average: load_average(),
    };
    eprintln!("{}", at_rate.text());
    let rollout = measure_rollout(place, &mut pods, &relay, &mut generator)?;
    eprintln!("{}", rollout.text());
    let metrics = relay.metrics();
    let metrics: Vec<_> = metrics.lines().filter(|line| line.starts_with("cproxy_relay_policy")).collect();
    eprintln!("{}", metrics.join("\n"));
    Ok((footprint, at_rate, rollout))
}

/// Replaces pods as fast as the API server takes it, which is faster than a Deployment does.
fn measure_rollout(
    place: &Place<'_>,
    pods: &mut Pods,
    relay: &RunningRelay,
    generator: &mut Generator,
) -> Result<Storm> {
    let (counts, cpu, begin) = (generator.counts()?, cpu_time(relay.pid()), Instant::now());
    let server_cpu = cpu_time(place.api_server()?);
    pods.replace()?;
    let replaced = begin.elapsed();
    // Clients have the whole rollout when they have a change that came after it.
    let after = pods.change(1)?;
    generator.settle([0, after.iter().map(|change| change.version).max().unwrap_or_default()])?;
    let (time, new) = (begin.elapsed(), generator.counts()?);
    let relay_cpu = cpu_time(relay.pid()).saturating_sub(cpu);
    let server_cpu = cpu_time(place.api_server()?).saturating_sub(server_cpu);
    eprintln!(
        "{REPLACED} pods replaced in {:.1} s: {} events, {:.1} for each client; CPU of the API server {:.1} s",
        replaced.as_secs_f64(),
        new.events - counts.events,
        (new.events - counts.events) as f64 / f64::from(generator.clients),
        server_cpu.as_secs_f64()
    );
    Ok(Storm {
        name: format!("rollout of {REPLACED} pods of the set"),
        clients: generator.clients,
        time,
        relay_cpu,
        peak_bytes: Memory::of(relay.pid()).peak,
        lists: new.lists - counts.lists,
        bystander: None,
    })
}

/// Pods at the API server.
struct Pods {
    runtime: Runtime,
    client: Client,
    changed: usize,
}

impl Pods {
    fn new(place: &Place<'_>) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let client = runtime.block_on(place.control_plane.client());
        Ok(Self { runtime, client, changed: 0 })
    }

    fn create(&mut self) -> Result<()> {
        let client = self.client.clone();
        self.runtime.block_on(async move {
            pods::create_namespace(&client, NAMESPACE).await?;
            let spec = json!({
                "podSelector": {"matchLabels": {"app": "web"}},
                "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "member"}}}]}],
            });
            pods::create_policy(&client, (NAMESPACE, "members"), &spec).await?;
            let member = |number| (format!("member-{number}"), if number < MEMBERS { "member" } else { "mover" });
            let names = (0..MEMBERS + MOVERS).map(member).chain([(OWN_POD.to_owned(), "web")]);
            let create = |(number, (name, app))| create_pod(client.clone(), number, name, app);
            let pods = stream::iter(names.enumerate()).map(create).buffer_unordered(CONCURRENCY);
            pods.try_for_each(|()| ready(Ok(()))).await
        })
    }

    /// Replaces members by others, each new one before an old one goes.
    fn replace(&self) -> Result<()> {
        let client = &self.client;
        let replace = |index: usize| async move {
            let number = MEMBERS + MOVERS + 1 + index;
            create_pod(client.clone(), number, format!("new-{index}"), "member").await?;
            let path = format!("/api/v1/namespaces/{NAMESPACE}/pods");
            let request =
                Request::new(path).delete(&format!("member-{index}"), &DeleteParams::default().grace_period(0))?;
            client.request::<Value>(request).await.context("deleting a pod").map(drop)
        };
        self.runtime.block_on(async {
            let replaced = stream::iter(0..REPLACED).map(replace).buffer_unordered(CONCURRENCY);
            replaced.try_for_each(|()| ready(Ok(()))).await
        })
    }

    /// Has pods enter and leave the set at a rate.
    fn change(&mut self, seconds: u32) -> Result<Vec<Change>> {
        let mut changes = Vec::new();
        let begin = Instant::now();
        for index in 0..RATE_PER_S * seconds {
            let due = begin + Duration::from_secs(index.into()) / RATE_PER_S;
            let (name, enters) =
                (format!("member-{}", MEMBERS + self.changed % MOVERS), (self.changed / MOVERS).is_multiple_of(2));
            self.changed += 1;
            let client = self.client.clone();
            changes.push(self.runtime.block_on(async move {
                sleep_until(due).await;
                let app = if enters { "member" } else { "mover" };
                let sent_ns = now_ns();
                let answer = pods::set_labels(&client, (NAMESPACE, &name), &json!({"app": app})).await?;
                let version = answer.pointer("/metadata/resourceVersion").and_then(Value::as_str);
                let version =
                    version.and_then(|version| version.parse().ok()).context("an answer without a version")?;
                anyhow::Ok(Change { name, version, sent_ns, answered_ns: now_ns() })
            })?);
        }
        Ok(changes)
    }
}

async fn create_pod(client: Client, number: usize, name: String, app: &'static str) -> Result<()> {
    let (labels, node) = (json!({"app": app}), format!("node-{}", number % 100));
    let address = Ipv4Addr::from_bits(FIRST_ADDRESS.to_bits() + number as u32);
    pods::create(&client, (NAMESPACE, &name), &labels, &node, address).await
}
