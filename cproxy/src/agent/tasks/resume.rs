//! Signs that the VM was restored from a snapshot. At rest they cost nothing; each line of the kernel's log is read.

mod clock;
mod kernel_log;

use std::{fs, future::pending, io, sync::Arc, time::Duration};

use cproxy_network::NetworkChanges;
use cproxy_wire::ApiClient;
use tokio::time::sleep;

use self::clock::ClockSteps;
pub(in crate::agent) use self::kernel_log::KernelLog;
pub use self::kernel_log::is_fork;
use super::health::ProgramHealth;
use crate::{
    mailbox::{Command, Mailbox},
    state::RestoreSign,
};

/// Shortest time between two signs that are acted upon. Each makes a new connection.
const INTERVAL_MIN: Duration = Duration::from_secs(1);

/// The kernel's log, if it can be opened. Call it inside a tokio runtime.
pub(in crate::agent) fn open_kernel_log() -> Option<KernelLog> {
    usable("new VM generation ids", KernelLog::open())
}

/// Sends a command for each sign. Never returns while the receiver lives.
pub(in crate::agent) async fn watch(
    log: Option<KernelLog>,
    mailbox: Mailbox,
    client: Option<Arc<ApiClient>>,
    health: Arc<ProgramHealth>,
) {
    let clock = usable("steps of the clock", ClockSteps::open());
    let changes = usable("changes of the network", NetworkChanges::open().map_err(io::Error::from));
    loop {
        let sign = tokio::select! {
            () = wait(log.as_ref().map(KernelLog::forked)) => RestoreSign::NewGeneration,
            () = wait(clock.as_ref().map(ClockSteps::step)) => RestoreSign::ClockStep,
            () = connection_lost(changes.as_ref(), client.as_deref(), &health) => RestoreSign::ConnectionLost,
        };
        if mailbox.tell(Command::Resume(sign)).await.is_err() {
            return;
        }
        sleep(INTERVAL_MIN).await;
    }
}

/// The source of a sign, if the kernel and the agent's rights allow it.
fn usable<T>(what: &str, source: io::Result<T>) -> Option<T> {
    source.inspect_err(|error| tracing::debug!("{what} cannot be seen: {error}")).ok()
}

/// Waits for a sign; for ever if it cannot be seen.
async fn wait(sign: Option<impl Future<Output = io::Result<()>>>) {
    if let Some(sign) = sign
        && sign.await.is_ok()
    {
        return;
    }
    pending::<()>().await;
}

/// Waits until a change of the network shows that the connection to the API server is dead. The kernel and the server
/// notice that by themselves after half a minute. Each change is also a reason to look at the programs.
async fn connection_lost(changes: Option<&NetworkChanges>, client: Option<&ApiClient>, health: &ProgramHealth) {
    let Some(changes) = changes else { return pending().await };
    while changes.wait().await.is_ok() {
        health.change();
        if let Some(client) = client
            && !client.is_alive().await
        {
            return;
        }
    }
    pending::<()>().await;
}

/// Signs that this machine has, for `cproxy check`: whether it has a VM generation id, and whether that can be seen.
pub fn generation_id() -> Option<io::Result<()>> {
    // The driver is one of ACPI's, and since 6.10 one of the platform's.
    let is_bound = |bus: &str| {
        let entries = fs::read_dir(format!("/sys/bus/{bus}/drivers/vmgenid")).into_iter().flatten().flatten();
        // Devices are links to directories, as is the module.
        entries.into_iter().any(|entry| entry.path().join("driver").exists())
    };
    ["acpi", "platform"].into_iter().any(is_bound).then(kernel_log::probe)
}
