//! Many agents that start within a second, and the API server's response times to another client meanwhile.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow};
use cproxy_benches::subject::SUBJECT;
use cproxy_tests::control_plane::ControlPlane;
use kube::{Client, api::GetParams, core::Request};
use tokio::runtime::Runtime;

use crate::{
    measure::{self, Group, Plan, Start},
    place::{BYSTANDER, Place},
};

/// Time from one request of the bystander to the next.
pub(crate) const PERIOD: Duration = Duration::from_millis(20);

/// Results of one burst.
pub(crate) struct Burst {
    pub(crate) group: Group,
    pub(crate) start: Start,
    /// Response times of a bystander, before and from the start until all are ready.
    pub(crate) responses_before: Vec<Duration>,
    pub(crate) responses: Vec<Duration>,
}

/// Client that reads one Service again and again.
struct Bystander {
    is_done: Arc<AtomicBool>,
    thread: JoinHandle<Result<Vec<(Instant, Duration)>>>,
}

pub(crate) fn measure(place: &mut Place<'_>, group: Group, plan: &Plan) -> Result<Burst> {
    measure::restart_alone(place, plan)?;
    let bystander = Bystander::start(&place.control_plane)?;
    // The API server's idle CPU time includes that for the bystander.
    let idle = place.idle_rate(plan.idle)?;
    let before = Instant::now();
    let (fleet, start) = measure::start_once(place, group, plan.rest, idle)?;
    let responses = bystander.end()?;
    let started = fleet.started;
    drop(fleet);
    place.clear()?;
    let all_ready = started + start.ready.iter().max().copied().unwrap_or_default();
    let times = |from: Option<Instant>, to: Instant| {
        let within = responses.iter().filter(move |(at, _)| from.is_none_or(|from| *at >= from) && *at < to);
        within.map(|(_, time)| *time).collect()
    };
    Ok(Burst { group, responses_before: times(None, before), responses: times(Some(started), all_ready), start })
}

impl Bystander {
    fn start(control_plane: &ControlPlane<'_>) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting tokio")?;
        let client = runtime.block_on(control_plane.client_for(BYSTANDER));
        let is_done = Arc::new(AtomicBool::new(false));
        let flag = is_done.clone();
        let thread = thread::spawn(move || read_repeatedly(&runtime, &client, &flag));
        Ok(Self { is_done, thread })
    }

    /// Moments of the requests, with their response times.
    fn end(self) -> Result<Vec<(Instant, Duration)>> {
        self.is_done.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("the bystander has panicked"))?
    }
}

/// Sends a request in each period, but none while an earlier one has no response.
fn read_repeatedly(runtime: &Runtime, client: &Client, is_done: &AtomicBool) -> Result<Vec<(Instant, Duration)>> {
    let read = || {
        let request = Request::new("/api/v1/namespaces/default/services").get(SUBJECT, &GetParams::default())?;
        runtime.block_on(client.request_text(request)).context("the bystander's request")
    };
    // The first request makes the connection.
    read()?;
    let mut responses = Vec::new();
    while !is_done.load(Ordering::Relaxed) {
        let sent = Instant::now();
        read()?;
        let time = sent.elapsed();
        responses.push((sent, time));
        thread::sleep(PERIOD.saturating_sub(time));
    }
    Ok(responses)
}
