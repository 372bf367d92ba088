//! Clients in VMs of their own, which ask the Service `web` again and again and print who has answered.

use std::{
    collections::{BTreeMap, BTreeSet},
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use super::{Fleet, PATIENCE, Selector};
use crate::process::{Daemon, eventually};
use crate::sandbox::Placement;

/// Time without a failed request after which none is expected any more.
const QUIET: Duration = Duration::from_secs(8);
/// Pause between two looks at the clients' output.
const LOOK: Duration = Duration::from_millis(50);

/// Clients, whose output `kubectl logs` follows.
pub struct Clients {
    logs: Vec<Daemon>,
}

impl Clients {
    /// Creates so many clients, and waits until each of them has an answer. Those with an odd number use the relay, if
    /// there is one.
    pub fn start(fleet: &Fleet<'_>, count: usize) -> Self {
        let names: Vec<_> = (1..=count).map(|number| format!("client-{number}")).collect();
        for (number, name) in names.iter().enumerate() {
            let annotations = match fleet.relay.is_some() && number % 2 == 0 {
                true => json!({"cproxy.dev/apiserver": Fleet::relay_url()}),
                false => json!({}),
            };
            fleet.apply(&Fleet::client(name, &annotations));
        }
        fleet.wait_ready(Selector::CLIENTS, count);
        let logs: Vec<_> = names.iter().map(|name| fleet.follow_logs(name)).collect();
        let clients = Self { logs };
        clients.wait_for_each("answer ");
        clients
    }

    /// Output of the client with this number, from 0 on.
    pub fn text(&self, number: usize) -> String {
        self.logs.get(number).map(Daemon::log).unwrap_or_default()
    }

    /// Waits until each client has printed a new line with this text.
    pub fn wait_for_each(&self, needle: &str) {
        let before = self.counts(needle);
        eventually(PATIENCE, format!("each client prints {needle:?}"), || {
            let now = self.counts(needle);
            let is_new = now.iter().zip(&before).all(|(now, before)| now > before);
            if is_new { Ok(()) } else { Err(self.logs.iter().map(Daemon::tail).collect::<Vec<_>>().join("\n---\n")) }
        });
    }

    /// Number of failed requests so far.
    pub fn failures(&self) -> usize {
        self.counts("failed").iter().sum()
    }

    /// Messages of the failed requests so far, with their numbers.
    pub fn messages(&self) -> BTreeMap<String, usize> {
        let text: String = self.logs.iter().map(Daemon::log).collect();
        let mut messages = BTreeMap::new();
        for message in text.lines().filter_map(|line| Some(line.split_once("failed")?.1.trim())) {
            let message = if message.is_empty() { "no answer within 3 s" } else { message };
            *messages.entry(message.to_owned()).or_default() += 1;
        }
        messages
    }

    /// Names of the pods that have answered.
    pub fn answered(&self) -> BTreeSet<String> {
        let text: String = self.logs.iter().map(Daemon::log).collect();
        text.lines().filter_map(|line| Some(line.split_once("answer ")?.1.to_owned())).collect()
    }

    fn counts(&self, needle: &str) -> Vec<usize> {
        self.logs.iter().map(|log| log.log().matches(needle).count()).collect()
    }

    /// Time from `start` to the end of the last failed request, and the number of those; no client has failed for some
    /// seconds then.
    pub fn last_failure_since(&self, start: Instant, before: usize) -> (Duration, usize) {
        let (mut count, mut last) = (before, start);
        while last.elapsed() < QUIET {
            let now = self.failures();
            if now > count {
                (count, last) = (now, Instant::now());
            }
            thread::sleep(LOOK);
        }
        (last.duration_since(start), count - before)
    }
}

impl Fleet<'_> {
    /// Follows the log of a pod with `kubectl logs`.
    pub fn follow_logs(&self, pod: &str) -> Daemon {
        let admin = self.control_plane.admin_kubeconfig();
        let command = self.control_plane.kubectl_command(&admin, &["logs", "--follow", pod]);
        Daemon::spawn(self.sandbox, "kubectl-logs", Placement::Unhooked, command)
    }
}
