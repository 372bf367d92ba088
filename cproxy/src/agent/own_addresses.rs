//! Addresses of the VM, which are compared with `loadBalancerSourceRanges`, as events.

use std::net::IpAddr;

use cproxy_core::{Address, Event};
use cproxy_network::{DetectedAddresses, OwnAddresses, SocketSetup};
use cproxy_wire::Configuration;
use tokio::{sync::mpsc, task::JoinHandle};

/// Source of the VM's addresses, which are given or detected.
pub(super) struct AddressSource {
    setup: SocketSetup,
    events: mpsc::WeakSender<Vec<Event>>,
    /// Addresses that were detected and logged last.
    reported: Option<DetectedAddresses>,
    /// Task that follows detected addresses.
    task: Option<JoinHandle<()>>,
}

impl AddressSource {
    /// A source that sends later changes to `events`.
    pub(super) fn new(setup: SocketSetup, events: mpsc::WeakSender<Vec<Event>>) -> Self {
        Self { setup, events, reported: None, task: None }
    }

    /// Present addresses: the given ones, else those that lead to the API server or by the default route, which are
    /// followed from now on.
    pub(super) fn start(&mut self, given: &[Address], api_server: Option<&Configuration>) -> Vec<Address> {
        if let Some(task) = self.task.take() {
            task.abort();
        }
        if !given.is_empty() {
            return given.to_vec();
        }
        let api_server = api_server.cloned();
        let known = move || api_server.as_ref().map(Configuration::known_addresses).unwrap_or_default();
        let addresses = OwnAddresses::detect(self.setup.clone(), known);
        if self.reported.as_ref() != Some(addresses.detected()) {
            report("own addresses", addresses.detected());
            self.reported = Some(addresses.detected().clone());
        }
        let present = pod_ips(addresses.detected());
        self.task = Some(tokio::spawn(follow(addresses, self.events.clone())));
        present
    }
}

/// The addresses as the core has them.
fn pod_ips(detected: &DetectedAddresses) -> Vec<Address> {
    detected.iter().map(Address::from).collect()
}

/// Logs the addresses, or how to name one where none is detected.
fn report(words: &str, detected: &DetectedAddresses) {
    match detected.iter().next() {
        Some(_) => tracing::info!("{words}: {detected}"),
        None => tracing::info!("no address of this VM found for loadBalancerSourceRanges; --pod-ip sets it"),
    }
}

/// Sends the addresses whenever they have changed; ends when the receiver is closed, or when changes cannot be seen.
async fn follow<ApiServer: Fn() -> Vec<IpAddr>>(
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
