//! Time from a change of a pod's label until the kernel's verdict on its address is another one.

use std::{
    io,
    net::{Ipv4Addr, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use cproxy_benches::report::Figure;
use cproxy_tests::sandbox::Sandbox;

use cproxy_benches::pod::enter;

use crate::{
    cluster::{Cluster, MOVER_ADDRESS, Scene},
    engine::PORT,
};

/// Pause between two questions to the kernel.
const PAUSE: Duration = Duration::from_micros(50);
/// Pause before a change, in which everything comes to rest.
const REST: Duration = Duration::from_millis(200);
/// Limit on a change, longer than any takes.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Times of the changes of a scene, in milliseconds.
pub(crate) struct Changes {
    pub(crate) scene: Scene,
    of_event: Vec<f64>,
    of_answer: Vec<f64>,
}

/// The figures of a scene's changes.
pub(crate) const FIGURES: [Figure<Changes>; 2] = [
    Figure {
        name: "of_event_ms",
        meaning: "from the relay's event, ms",
        of: |changes: &Changes| changes.of_event.clone(),
    },
    Figure {
        name: "of_answer_ms",
        meaning: "from the API server's answer, ms",
        of: |changes: &Changes| changes.of_answer.clone(),
    },
];

/// Has a pod enter and leave the sets of a scene.
pub(crate) fn measure(sandbox: &Sandbox, cluster: &mut Cluster<'_>, scene: Scene, count: u32) -> Result<Changes> {
    let mut agent = cluster.agent(scene)?.start();
    let client = cluster.pod(scene)?.run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)))?;
    let client = client.context("a UDP socket")?;
    enter(sandbox.cgroup_beside())?;
    let events = cluster.watch(scene)?;
    let mut changes = Changes { scene, of_event: Vec::new(), of_answer: Vec::new() };
    for number in 0..=count {
        thread::sleep(REST);
        ensure!(passes(&client)? == cluster.is_member(), "the verdict is another one than the label says");
        events.forget();
        let answered = cluster.move_pod()?;
        let begin = Instant::now();
        while passes(&client)? != cluster.is_member() {
            ensure!(begin.elapsed() < TIMEOUT, "the verdict stays: {}", agent.tail());
            thread::sleep(PAUSE);
        }
        let (seen, event) = (Instant::now(), events.first()?);
        // The first change finds cold code.
        if number > 0 {
            // The agent may have been told before this process.
            changes.of_event.push(milliseconds(seen.saturating_duration_since(event)));
            changes.of_answer.push(milliseconds(seen - answered));
        }
    }
    agent.stop();
    cluster.clean_up(scene)?;
    Ok(changes)
}

/// Whether a datagram to the pod that moves is allowed.
fn passes(client: &UdpSocket) -> Result<bool> {
    match client.send_to(b"?", (MOVER_ADDRESS, PORT)) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(false),
        Err(error) => Err(error).context("sending a datagram"),
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
