//! Clients that move between two replicas which are killed meanwhile: they see the policies that follow from the
//! objects, and never an older state than before.

mod follower;
mod journal;
mod workload;

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use cproxy_tests::{
    control_plane::{ADDRESS, PORT},
    manifest,
    process::eventually,
    random::{self, Random},
    relay::{Fault, Relay},
    relay_server::RelayServer,
    sandbox::Sandbox,
};
use serde_json::json;

use self::{
    follower::Follower,
    journal::{Contents, Journal, Kind, Scope},
    workload::Workload,
};
use crate::{
    client::Client,
    fixture::{Cluster, PATIENCE, RELAY},
    policies::{cluster, of_pod},
};

/// Addresses of the replicas and of their metrics.
const REPLICAS: [(&str, &str); 2] = [(RELAY, "127.0.0.1:9443"), ("127.0.0.1:7446", "127.0.0.1:9446")];

/// Rounds of an ordinary and of a long run. In each, a replica is killed, and one learns late of changes while all
/// clients that know them come to it.
const ROUNDS: usize = 4;
const ROUNDS_IN_SOAK: usize = 60;

/// Changes of each part of a round.
const CHANGES: usize = 6;

/// Chance that a client loses its connection after a change, in percent.
const MOVES: usize = 25;

/// Views by which one account gets the policies of a node, and another one those of the pod that its token names.
const VIEWS: &str = r#"
views:
- name: hosts
  match: {usernames: ["system:serviceaccount:team:host"]}
  namespaces: all
  policy: node
- name: pods
  match: {usernames: ["system:serviceaccount:team:app"]}
  namespaces: all
"#;

#[test]
fn clients_that_move_between_replicas_never_see_an_older_policy() {
    let seed = random::seed();
    eprintln!("CPROXY_SEED={seed}");
    let sandbox = Sandbox::for_test();
    let cluster = cluster(&sandbox);
    let mut random = Random::new(seed);
    let mut workload = Workload::new(&cluster);
    let upstreams = [(); 2].map(|()| Relay::start(&sandbox, SocketAddr::new(ADDRESS, PORT)));
    let start = |index: usize| replica(&cluster, index, &upstreams[index]).start();
    let mut replicas = [0, 1].map(start);
    let followers = followers(&cluster);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let _end = End(&is_over);
        for follower in &followers {
            scope.spawn(|| follower.follow(&is_over));
        }
        for round in 0..if random::is_soak() { ROUNDS_IN_SOAK } else { ROUNDS } {
            play(&mut workload, &followers, &mut random);
            let killed = round % replicas.len();
            replicas[killed].kill();
            play(&mut workload, &followers, &mut random);
            replicas[killed] = start(killed);
            play(&mut workload, &followers, &mut random);
            let late = (round / 2) % replicas.len();
            send_to(&followers, 1 - late);
            settle(&cluster, &followers);
            upstreams[late].set_fault(Some(Fault::HoldsResponses));
            (0..CHANGES).for_each(|_| workload.change(&mut random));
            wait_for_clients(&Journal::new(&cluster), &followers);
            send_to(&followers, late);
            play(&mut workload, &followers, &mut random);
            upstreams[late].set_fault(None);
            settle(&cluster, &followers);
        }
    });
    check_histories(workload.into_journal(), &followers);
}

/// Ends the clients, also when the test fails.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn replica<'s>(cluster: &Cluster<'s>, index: usize, upstream: &Relay) -> RelayServer<'s> {
    let (listen, metrics) = REPLICAS[index];
    let server = format!("https://{}", upstream.address());
    let kubeconfig = cluster.kubeconfig("cproxy-relay", &format!("replica-{index}"), &server);
    let views = manifest::write_text(cluster.sandbox.dir(), "views.yaml", VIEWS);
    let relay = RelayServer::new(cluster.sandbox).kubeconfig(kubeconfig).metrics(metrics.parse().unwrap());
    cluster.with_tls(relay).listen(listen).arg("--policies").arg("--views").arg(views)
}

/// Clients of both kinds: a pod, and the host of several pods.
fn followers<'s>(cluster: &Cluster<'s>) -> [Follower<'s>; 4] {
    let metadata = json!({"name": "host", "namespace": "team"});
    cluster.create(&json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}));
    let of_node = ["create", "token", "host", "--namespace=team", "--bound-object-kind=Node"];
    let host = cluster.control_plane.kubectl(&[&of_node[..], &["--bound-object-name=node-1"]].concat(), "");
    let tokens = [(Scope::Pod, of_pod(cluster, "web-0")), (Scope::Node, host.trim().to_owned())];
    let kinds = [Kind::Policies, Kind::Slices];
    let follower = |number: usize| {
        let (scope, token) = &tokens[number / 2];
        let clients = REPLICAS.map(|(address, _)| {
            let client = Client::new(cluster.sandbox, format!("https://{address}"));
            client.ca_file(&cluster.control_plane.ca_file()).token(token)
        });
        Follower::new(*scope, kinds[number % 2], clients)
    };
    [0, 1, 2, 3].map(follower)
}

/// Makes changes, after some of which a client loses its connection.
fn play(workload: &mut Workload<'_, '_>, followers: &[Follower<'_>], random: &mut Random) {
    for _ in 0..CHANGES {
        workload.change(random);
        if random.percent(MOVES) {
            followers[random.below(followers.len())].disconnect(random.below(REPLICAS.len()));
        }
    }
}

fn send_to(followers: &[Follower<'_>], replica: usize) {
    followers.iter().for_each(|follower| follower.disconnect(replica));
}

/// Waits until clients and replicas have all that follows from the API server's objects.
fn settle(cluster: &Cluster<'_>, followers: &[Follower<'_>]) {
    let journal = Journal::new(cluster);
    wait_for_clients(&journal, followers);
    for follower in followers {
        for client in &follower.clients {
            wait_for(&journal, follower, "a replica", || follower.kind.contents(&client.json(follower.kind.path())));
        }
    }
}

fn wait_for_clients(journal: &Journal, followers: &[Follower<'_>]) {
    for follower in followers {
        wait_for(journal, follower, "a client", || follower.seen().known.clone());
    }
}

fn wait_for(journal: &Journal, follower: &Follower<'_>, who: &str, contents: impl Fn() -> Contents) {
    let expected = journal.expected(follower.scope, follower.kind);
    let what = format!("{who} has the {:?} of the {:?}: {expected:#?}", follower.kind, follower.scope);
    eventually(PATIENCE, what, || match contents() {
        contents if contents == expected => Ok(()),
        other => Err(format!("{other:#?}")),
    });
}

/// Checks that the states that each client has seen are states of the objects, one not older than the other.
fn check_histories(journal: Journal, followers: &[Follower<'_>]) {
    for follower in followers {
        let seen = follower.seen();
        eprintln!("{:?} of the {:?}: {seen}", follower.kind, follower.scope);
        assert!(seen.lists > 1 && seen.shown.len() > 1, "the client has moved, and has seen changes: {seen}");
        journal.states(follower.kind).check(&seen.shown);
    }
}
