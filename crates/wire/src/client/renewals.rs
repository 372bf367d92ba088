//! New connections with other options or new credentials, for which the old connection serves until they stand.

#[cfg(test)]
mod tests;

use std::{future::pending, time::Duration};

use cproxy_network::NetworkChanges;
use tokio::time::{Instant, sleep, timeout};

use crate::{
    backoff::jitter,
    client::api_client::ApiClient,
    credentials::configuration::{ApiServer, Configuration},
};

/// Shortest and longest time for one attempt of [`ApiClient::renew`]. It is short at first, so that the next one finds
/// a network that has come back. A server that many clients ask at once needs longer.
const ATTEMPT_MIN: Duration = Duration::from_secs(2);
const ATTEMPT_MAX: Duration = Duration::from_secs(30);
/// Shortest and longest pause between two attempts, without jitter.
const RENEWAL_PAUSE_MIN: Duration = Duration::from_millis(250);
const RENEWAL_PAUSE_MAX: Duration = Duration::from_secs(15);
/// Shortest attempt or pause that a change of the network ends.
const UNDISTURBED: Duration = Duration::from_secs(1);

impl ApiClient {
    /// Replaces the options, which were read as `configuration`, and connects anew. The old connection serves until
    /// the new one stands. Attempts to connect as before end, and so do pauses before another attempt.
    pub async fn reconfigure(&self, options: ApiServer, configuration: Configuration) {
        self.renewal.set_options(options, configuration);
        self.status.report_renewal();
        let mut session = self.session.lock().await;
        // An earlier caller, who has waited, may have connected with the last replacement.
        let is_pending = self.renewal.is_some();
        if is_pending && let Err(error) = self.connect(&mut session).await {
            tracing::warn!("the new configuration of the API server cannot be used yet: {error}");
        }
    }

    /// Reads the credentials again and connects anew, until that succeeds: for a machine that was restored from a
    /// snapshot, whose network may come later. The old connection serves until the new one stands, if it still can.
    /// Many clients that are restored together begin after different delays.
    pub async fn renew(&self, delay: Duration) {
        let Some(_only) = self.renewal.begin() else {
            // The other one begins anew.
            self.renewal.request();
            self.renewal.interrupt();
            return;
        };
        sleep(delay).await;
        self.renewal.request();
        let start = Instant::now();
        loop {
            let changes = NetworkChanges::open();
            let elapsed = start.elapsed();
            let attempt = async {
                if self.try_to_renew((elapsed / 2).clamp(ATTEMPT_MIN, ATTEMPT_MAX)).await {
                    return true;
                }
                let pause = (elapsed / 4).clamp(RENEWAL_PAUSE_MIN, RENEWAL_PAUSE_MAX);
                sleep(pause + jitter(pause)).await;
                false
            };
            tokio::select! {
                is_renewed = attempt => if is_renewed && !self.renewal.is_some() { return },
                () = changed_after(UNDISTURBED, changes.as_ref().ok()) => {}
            }
        }
    }

    /// Connects anew within this time, if no request has done so. Returns whether there is a new connection.
    async fn try_to_renew(&self, limit: Duration) -> bool {
        // A request that tries to connect, perhaps without a network, tries anew.
        self.renewal.interrupt();
        let connected = timeout(limit, async {
            let mut session = self.session.lock().await;
            let is_pending = session.must_renew() || self.renewal.is_some();
            !is_pending || matches!(self.connect(&mut session).await, Ok((_, true)))
        });
        let is_renewed = matches!(connected.await, Ok(true));
        if is_renewed {
            self.status.report_renewal();
        }
        is_renewed
    }
}

/// Waits for a change of the network, of which those in this first time count at its end.
async fn changed_after(time: Duration, changes: Option<&NetworkChanges>) {
    sleep(time).await;
    match changes {
        Some(changes) if changes.wait().await.is_ok() => {}
        _ => pending().await,
    }
}
