//! Addresses of the VM, which are compared with `loadBalancerSourceRanges`, as events.

use std::net::IpAddr;

use cproxy_core::{Address, Event};
use cproxy_network::{DetectedAddresses, OwnAddresses};
use tokio::sync::mpsc;

/// The addresses as the core has them.
pub(super) fn pod_ips(detected: &DetectedAddresses) -> Vec<Address> {
    detected.iter().map(Address::from).collect()
}

/// Logs the addresses, or how to name one where none is detected.
pub(super) fn report(words: &str, detected: &DetectedAddresses) {
    match detected.iter().next() {
        Some(_) => tracing::info!("{words}: {detected}"),
        None => tracing::info!("no address of this VM found for loadBalancerSourceRanges; --pod-ip sets it"),
    }
}

/// Sends the addresses whenever they have changed; ends when the receiver is closed, or when changes cannot be seen.
pub(super) async fn follow<ApiServer: Fn() -> Vec<IpAddr>>(
    mut own: OwnAddresses<ApiServer>,
    events: mpsc::WeakSender<Vec<Event>>,
) {
    loop {
        let event = match own.changed().await {
            Ok(detected) => {
                report("own addresses now", detected);
                Event::PodIps(pod_ips(detected))
            }
            Err(error) => {
                tracing::warn!(
                    "netlink: {error}; changes of the VM's addresses are not seen: restart the agent after one, or \
                     pass --pod-ip"
                );
                return;
            }
        };
        let Some(events) = events.upgrade() else { return };
        if events.send(vec![event]).await.is_err() {
            return;
        }
    }
}
