//! Background task that closes connections which a change of the policy no longer allows.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use cproxy_core::counted;
use cproxy_datapath::{
    bpf::PinDir,
    sockets::{ClosedDenied, close_denied},
};
use tokio::{sync::Notify, task::spawn_blocking, time::sleep};

/// Pause after a pass, as a multiple of its CPU time, so that passes use a third of a percent of one CPU.
const PAUSE_FACTOR: u32 = 299;
/// Pauses after a pass that has closed or left sockets, and the longest of the others.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Connections of the pod that are looked through after each change of its policy.
#[derive(Debug)]
pub(in crate::agent) struct ExistingSockets {
    pins: PinDir,
    exempt: Vec<PathBuf>,
    changed: Notify,
    closed: AtomicU64,
}

impl ExistingSockets {
    pub(super) fn new(pins: PinDir, exempt: Vec<PathBuf>) -> Arc<Self> {
        Arc::new(Self { pins, exempt, changed: Notify::new(), closed: AtomicU64::new(0) })
    }

    /// Has the sockets looked through. The policy is in force.
    pub(super) fn change(&self) {
        self.changed.notify_one();
    }

    /// Number of sockets that were closed.
    pub(super) fn closed(&self) -> u64 {
        self.closed.load(Ordering::Relaxed)
    }

    /// Runs for ever.
    pub(in crate::agent) async fn run(self: Arc<Self>) {
        let mut left_before = 0;
        loop {
            self.changed.notified().await;
            let of_pass = self.clone();
            let pass = spawn_blocking(move || close_denied(&of_pass.pins, &of_pass.exempt)).await;
            let pass = pass.map_err(|error| error.to_string());
            let pause = match pass.and_then(|pass| pass.map_err(|error| error.to_string())) {
                Ok(ClosedDenied { closed, left, cpu }) => {
                    self.closed.fetch_add(closed, Ordering::Relaxed);
                    if closed != 0 {
                        let sockets = counted(closed, "socket", "sockets");
                        tracing::info!(name: "policy_closed", "closed {sockets} that the pod's policy does not allow");
                        // Those that were opened meanwhile, by calls that had begun before.
                        self.change();
                    }
                    if left != 0 && left != left_before {
                        let sockets = counted(left, "socket", "sockets");
                        tracing::warn!(
                            name: "policy_left_open",
                            "{sockets} that the pod's policy does not allow cannot be closed: see `cproxy check`"
                        );
                    }
                    left_before = left;
                    if closed == 0 { (cpu * PAUSE_FACTOR).min(PAUSE_MAX) } else { PAUSE_MAX }
                }
                Err(error) => {
                    tracing::warn!(
                        name: "policy_closing_failed",
                        "connections that the policy does not allow: {error}; tried again in {PAUSE_MAX:?}"
                    );
                    self.change();
                    PAUSE_MAX
                }
            };
            sleep(pause).await;
        }
    }
}
