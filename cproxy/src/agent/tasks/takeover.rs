//! End of the takeover of an older layout's table.

use std::time::Duration;

use cproxy_datapath::{
    bpf::{PinDir, end_takeover},
    sockets::has_older_socket,
};
use tokio::{task::spawn_blocking, time::sleep};

/// Pause between looks for sockets from before the takeover. There are looks only while programs are kept for them.
const PAUSE: Duration = Duration::from_secs(60);

/// Removes the programs and maps that are kept for the sockets of an older layout, once the last of them is closed.
pub(in crate::agent) async fn end(pins: PinDir) {
    loop {
        let pins = pins.clone();
        match spawn_blocking(move || end_takeover(&pins, has_older_socket)).await {
            Ok(Ok(true)) => sleep(PAUSE).await,
            Ok(Ok(false)) => return,
            Ok(Err(error)) => return tracing::warn!("the rest of an older table layout cannot be removed: {error}"),
            Err(error) => return tracing::warn!("the rest of an older table layout cannot be removed: {error}"),
        }
    }
}
