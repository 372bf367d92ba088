//! Addresses of the VM: those that are compared with `loadBalancerSourceRanges`, as events, and those to which datagram
//! sockets are connected that are to be refused, as commands.

use std::net::IpAddr;

use cproxy_core::{Address, Event};
use cproxy_daemon::Tasks;
use cproxy_network::{DetectedAddresses, OwnAddresses, SocketSetup};
use cproxy_wire::Configuration;
use tokio::{sync::mpsc, task::JoinHandle};

use crate::mailbox::{Command, Mailbox};

/// Source of the VM's addresses, which are given or detected.
pub(in crate::agent) struct AddressSource {
    setup: SocketSetup,
    changes: ChangeSinks,
    /// Addresses that were detected and logged last.
    reported: Option<DetectedAddresses>,
    /// Task that follows detected addresses.
    task: Option<JoinHandle<()>>,
    tasks: Tasks,
}

/// Ways to the task that owns the table.
#[derive(Clone)]
struct ChangeSinks {
    events: mpsc::WeakSender<Vec<Event>>,
    mailbox: Mailbox,
}

/// Present addresses of the VM.
pub(in crate::agent) struct PresentAddresses {
    /// Addresses by which others know it: the given ones, else those that were detected.
    pub(in crate::agent) pod_ips: Vec<Address>,
    /// Addresses that were detected. Given ones may be those of a machine that translates addresses.
    pub(in crate::agent) own: Vec<Address>,
}

impl AddressSource {
    /// A source that sends later changes to `events` and the mailbox.
    pub(in crate::agent) fn new(
        setup: SocketSetup,
        events: mpsc::WeakSender<Vec<Event>>,
        mailbox: Mailbox,
        tasks: Tasks,
    ) -> Self {
        Self { setup, changes: ChangeSinks { events, mailbox }, reported: None, task: None, tasks }
    }

    /// Present addresses: those that lead to the given ones, to the API server or by the default route, which are
    /// followed from now on.
    pub(in crate::agent) fn start(
        &mut self,
        given: &[Address],
        api_server: Option<&Configuration>,
    ) -> PresentAddresses {
        if let Some(task) = self.task.take() {
            task.abort();
        }
        let api_server = api_server.cloned();
        let known = move || api_server.as_ref().map(Configuration::known_addresses).unwrap_or_default();
        let addresses =
            OwnAddresses::detect(self.setup.clone(), given.iter().map(|&given| given.into()).collect(), known);
        if self.reported.as_ref() != Some(addresses.detected()) {
            report("own addresses", addresses.detected());
            self.reported = Some(addresses.detected().clone());
        }
        let own = detected(addresses.detected());
        let is_given = !given.is_empty();
        self.task = Some(self.tasks.keep("own addresses", follow(addresses, is_given, self.changes.clone())));
        PresentAddresses { pod_ips: if is_given { given.to_vec() } else { own.clone() }, own }
    }
}

/// The addresses as the core has them.
fn detected(addresses: &DetectedAddresses) -> Vec<Address> {
    addresses.iter().map(Address::from).collect()
}

/// Logs the addresses, or how to name one where none is detected.
fn report(words: &str, detected: &DetectedAddresses) {
    match detected.iter().next() {
        Some(_) => tracing::info!("{words}: {detected}"),
        None => tracing::info!(
            "no address of this VM found for loadBalancerSourceRanges, and for datagrams that are to be refused; \
             --pod-ip sets it"
        ),
    }
}

/// Sends the addresses whenever they have changed; ends when a receiver is closed, or when changes cannot be seen.
async fn follow<ApiServer: Fn() -> Vec<IpAddr>>(
    mut own: OwnAddresses<ApiServer>,
    is_given: bool,
    ChangeSinks { events, mailbox }: ChangeSinks,
) {
    loop {
        let addresses = match own.changed().await {
            Ok(changed) => {
                report("own addresses now", changed);
                detected(changed)
            }
            Err(error) => {
                tracing::warn!(
                    "netlink: {error}; changes of the VM's addresses are not seen: send SIGHUP after one, or \
                     pass --pod-ip"
                );
                return;
            }
        };
        if mailbox.tell(Command::SetOwnAddresses(addresses.clone())).await.is_err() {
            return;
        }
        if is_given {
            continue;
        }
        let Some(events) = events.upgrade() else { return };
        if events.send(vec![Event::PodIps(addresses)]).await.is_err() {
            return;
        }
    }
}
