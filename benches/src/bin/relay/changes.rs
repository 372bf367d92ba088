//! Changes of EndpointSlices at a rate.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context as _, Result};
use cproxy_tests::{
    control_plane::ControlPlane,
    population::{Shape, SliceId},
};
use kube::{
    Client,
    api::{Patch, PatchParams, PostParams},
    core::Request,
};
use serde_json::{Value, json};
use tokio::{
    runtime::Runtime,
    task::JoinSet,
    time::{Instant, sleep_until},
};

use crate::{clock::now_ns, load::receipts::Change};

/// Client that changes slices, the first of a population in turn. There is one, so that each change is a new one.
pub(crate) struct Changer {
    runtime: Runtime,
    client: Client,
    pub(crate) shape: Shape,
    /// Number of changes of Services so far.
    services_changed: u32,
    /// Number of changes of each slice so far.
    replacements: BTreeMap<usize, u32>,
    /// Version and first address of each slice that has changed.
    pub(crate) changed: BTreeMap<String, (u64, String)>,
}

impl Changer {
    pub(crate) fn new(control_plane: &ControlPlane<'_>, shape: Shape) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        #[expect(clippy::expect_used, reason = "without a runtime there is no benchmark")]
        let runtime = runtime.expect("cannot start tokio");
        let client = runtime.block_on(control_plane.client());
        Self { runtime, client, shape, services_changed: 0, replacements: BTreeMap::new(), changed: BTreeMap::new() }
    }

    /// Connects anew, to an API server that was started again.
    pub(crate) fn reconnect(&mut self, control_plane: &ControlPlane<'_>) {
        self.client = self.runtime.block_on(control_plane.client());
    }

    /// Changes a Service and a slice. Returns the versions.
    pub(crate) fn change_both(&mut self) -> Result<[u64; 2]> {
        self.services_changed += 1;
        let service = self.runtime.block_on(label_service(&self.client, self.shape, self.services_changed))?;
        let slice = self.changes(1.0, 1, 1)?.pop().context("no change was made")?;
        Ok([service, slice.version])
    }

    /// Makes changes of this many slices in turn, at a rate, and waits for all answers.
    pub(crate) fn changes(&mut self, rate_per_s: f64, count: u32, objects: usize) -> Result<Vec<Change>> {
        let ids: Vec<SliceId> = self.shape.cycle().take(objects).collect();
        let mut planned = Vec::new();
        for (index, id) in ids.iter().enumerate().cycle().take(count as usize) {
            let replacements = self.replacements.entry(index).or_default();
            *replacements += 1;
            planned.push(self.shape.slice(*id, *replacements));
        }
        let made = self.runtime.block_on(make_all(&self.client, planned, rate_per_s))?;
        let mut changes = Vec::new();
        for (change, address) in made {
            let known = self.changed.get(&change.name).map_or(0, |(version, _)| *version);
            if change.version > known {
                self.changed.insert(change.name.clone(), (change.version, address));
            }
            changes.push(change);
        }
        Ok(changes)
    }
}

async fn make_all(client: &Client, planned: Vec<Value>, rate_per_s: f64) -> Result<Vec<(Change, String)>> {
    let (begin, mut sending, mut made) = (Instant::now(), JoinSet::new(), Vec::new());
    for (index, slice) in planned.into_iter().enumerate() {
        sleep_until(begin + Duration::from_secs_f64(index as f64 / rate_per_s)).await;
        sending.spawn(make(client.clone(), slice));
        while let Some(done) = sending.try_join_next() {
            made.push(done.context("a task has panicked")??);
        }
    }
    while let Some(done) = sending.join_next().await {
        made.push(done.context("a task has panicked")??);
    }
    Ok(made)
}

/// Gives the first Service another label. Returns the version.
async fn label_service(client: &Client, shape: Shape, number: u32) -> Result<u64> {
    let name = shape.objects(0..1).find_map(|object| text_at(&object, "/metadata/name")).context("no Service")?;
    let request = Request::new("/api/v1/namespaces/default/services");
    let labels = json!({ "metadata": { "labels": { "change": number.to_string() } } });
    let request = request.patch(&name, &PatchParams::default(), &Patch::Merge(labels))?;
    let answer: Value = client.request(request).await.with_context(|| format!("changing {name}"))?;
    version(&answer)
}

fn text_at(value: &Value, pointer: &str) -> Option<String> {
    value.pointer(pointer).and_then(Value::as_str).map(str::to_owned)
}

fn version(object: &Value) -> Result<u64> {
    let version = text_at(object, "/metadata/resourceVersion").and_then(|version| version.parse().ok());
    version.context("an answer without a version")
}

/// Makes a change. Returns the first address, too.
async fn make(client: Client, slice: Value) -> Result<(Change, String)> {
    let name = text_at(&slice, "/metadata/name").context("a slice without a name")?;
    let address = text_at(&slice, "/endpoints/0/addresses/0").context("a slice without an endpoint")?;
    let request = Request::new("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices");
    let request = request.replace(&name, &PostParams::default(), slice.to_string().into_bytes())?;
    let sent_ns = now_ns();
    let answer = client.request_text(request).await.with_context(|| format!("changing {name}"))?;
    let answered_ns = now_ns();
    let answer: Value = serde_json::from_str(&answer).context("reading an answer")?;
    Ok((Change { name, version: version(&answer)?, sent_ns, answered_ns }, address))
}
