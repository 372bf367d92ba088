//! Trouble between the agent and a real API server. Each time the table stays, connections go on, the silence is
//! counted, and the agent recovers: by resuming its watches where that is possible, by the difference to a new list
//! where it is not.

use std::{
    iter,
    net::{Ipv4Addr, SocketAddr},
    thread,
    time::{Duration, Instant},
};

use cproxy_tests::{
    audit::AuditLog,
    control_plane::{ADDRESS, NAME, PORT, role_binding},
    echo,
    manifest::Service,
    nameserver::{NameAnswer, Nameserver, program_with_nameserver},
    process::{Agent, RunningAgent, cproxy, cproxy_binary, eventually},
    relay::{Fault, Relay, RelayChange},
    sandbox::Sandbox,
};
use serde_json::{Value, json};

use crate::{
    fixture::{Cluster, PATIENCE},
    rows::{self, Row},
};

const VIP: &str = "10.96.0.10:80";
const POD: &str = "10.244.0.1:8080";
const WEB: &str = "TCP 10.96.0.10:80 10.244.0.1:8080";
const NEW: &str = "TCP 10.96.0.11:80 10.244.0.2:8080";
const LOST: &str = "TCP 10.96.0.12:80 10.244.0.3:8080";

/// Silence that a test waits for.
const SILENT_SECONDS: u64 = 5;

/// Limit on the time until an older state of etcd is noticed: 75 s, and the pauses and refusals before and after.
const RESTORED_MAX: Duration = Duration::from_secs(180);

/// Changes after a backup, more than an API server makes itself within a test.
const CHANGE_COUNT: usize = 300;

/// Objects of a long list, each with so many bytes that do not shrink.
const LONG_LIST: u8 = 20;
const OBJECT_BYTES: usize = 8_000;

/// Bytes from the server after which a connection ends: the handshake and a part of the long list.
const PART_OF_A_LIST: usize = 60_000;

/// Commands after which packets to 203.0.113.0/24 vanish.
const WAY_TO_NOWHERE: &str = "link add nowhere type veth peer name nobody
    link set nowhere up
    link set nobody up
    neighbour add 203.0.113.254 lladdr 02:00:00:00:00:01 dev nowhere
    route add 203.0.113.0/24 via 203.0.113.254 dev nowhere onlink";

fn server() -> SocketAddr {
    SocketAddr::new(ADDRESS, PORT)
}

/// A cluster, and an agent that follows it through a relay.
struct World<'s> {
    agent: RunningAgent,
    relay: Option<Relay>,
    cluster: Cluster<'s>,
    audit: AuditLog,
}

impl<'s> World<'s> {
    /// Starts an agent whose API server is the relay.
    fn start(sandbox: &'s Sandbox) -> Self {
        Self::start_with(sandbox, Relay::start(sandbox, server()), |cluster, relay| {
            let url = format!("https://{}", relay.address());
            Agent::new(sandbox).kubeconfig(cluster.control_plane.kubeconfig_at("cproxy", &url))
        })
    }

    /// Starts an agent whose HTTP proxy is the relay. Such connections it checks every 20 s.
    fn start_behind_proxy(sandbox: &'s Sandbox) -> Self {
        Self::start_with(sandbox, Relay::start_proxy(sandbox, None), |cluster, relay| {
            Agent::new(sandbox).kubeconfig(cluster.control_plane.agent_kubeconfig_with("behind-proxy", |config| {
                config["clusters"][0]["cluster"]["proxy-url"] = format!("http://{}", relay.address()).into();
            }))
        })
    }

    fn start_with(sandbox: &'s Sandbox, relay: Relay, agent: impl FnOnce(&Cluster<'s>, &Relay) -> Agent<'s>) -> Self {
        let (cluster, audit) = Cluster::start_audited(sandbox);
        cluster.apply_service("web", "10.96.0.10", &["10.244.0.1"]);
        let agent = agent(&cluster, &relay).start();
        cluster.expect(&[WEB]);
        Self { agent, relay: Some(relay), cluster, audit }
    }

    fn relay(&self) -> &Relay {
        self.relay.as_ref().unwrap()
    }

    fn wait_log(&mut self, words: &str) -> String {
        self.agent.wait_log(words, PATIENCE)
    }

    /// Cuts the connection until the log has the words.
    fn cut_until(&mut self, words: &str) {
        let relay = self.relay.as_ref().unwrap();
        self.agent.wait_until(PATIENCE, words, |agent| {
            if agent.log().contains(words) {
                return Ok(());
            }
            relay.cut();
            thread::sleep(Duration::from_millis(500));
            Err("not yet")
        });
    }

    fn silent_seconds(&self) -> u64 {
        silent_seconds(self.cluster.sandbox)
    }

    /// Checks that the table stays and its age shows during a trouble, although there is a new Service, and that the
    /// agent gets that Service once the trouble has ended.
    fn survive(&mut self, begin: impl FnOnce(&mut Self), end: impl FnOnce(&mut Self)) {
        echo::while_a_client_connects(VIP, POD, || {
            begin(self);
            self.cluster.apply_service("new", "10.96.0.11", &["10.244.0.2"]);
            eventually(PATIENCE, "the silence is counted", || match self.silent_seconds() {
                SILENT_SECONDS.. => Ok(()),
                less => Err(less),
            });
            self.cluster.assert_table(&[WEB]);
            assert!(self.agent.is_ready(), "what is in force is complete");
            end(self);
            self.cluster.expect(&[WEB, NEW]);
            // The watches may have come back at different times: a change for both is confirmed at once.
            eventually(PATIENCE, "the silence has ended", || {
                self.cluster.expect(&[WEB, NEW]);
                match self.silent_seconds() {
                    SILENT_SECONDS.. => Err("not yet"),
                    _ => Ok(()),
                }
            });
        });
        assert_eq!(self.agent.exit_status(), None, "it is still the same agent");
    }
}

/// Seconds since the API server has confirmed the table.
fn silent_seconds(sandbox: &Sandbox) -> u64 {
    let counters = cproxy(sandbox, &["get", "counters", "-o", "json"]).json();
    counters["api_server_silent_seconds"].as_u64().unwrap()
}

#[test]
fn a_server_that_refuses_connections_is_resumed_without_a_list() {
    let sandbox = Sandbox::for_test();
    let mut world = World::start(&sandbox);
    let address = world.relay().address();
    let begin = |world: &mut World<'_>| {
        drop(world.relay.take());
        // A connection that the relay has not yet accepted is reset first, and the next one is refused.
        world.wait_log("Connection refused");
    };
    world.survive(begin, |world| world.relay = Some(Relay::start_at(&sandbox, address, server())));
    world.audit.assert_one_list_each();
}

#[test]
fn a_connection_with_garbage_is_given_up_and_resumed_without_a_list() {
    let sandbox = Sandbox::for_test();
    let mut world = World::start(&sandbox);
    let begin = |world: &mut World<'_>| {
        world.relay().set_fault(Some(Fault::Garbles));
        world.relay().cut();
        let line = world.wait_log("cannot watch services");
        assert!(line.contains("TLS: "), "{line}");
    };
    world.survive(begin, |world| world.relay().set_fault(None));
    world.audit.assert_one_list_each();
}

/// Makes a running connection lose data until the agent has noticed, and the connections after it.
fn lose(fault: Fault, limit: Duration) -> impl FnOnce(&mut World<'_>) {
    move |world| {
        let connections = |world: &World<'_>| {
            world.relay().history().iter().filter(|change| matches!(change, RelayChange::Opened(_))).count()
        };
        assert_eq!(connections(world), 1);
        world.relay().set_fault(Some(fault));
        eventually(limit, "the agent connects anew", || if connections(world) > 1 { Ok(()) } else { Err("not yet") });
    }
}

fn find(world: &mut World<'_>) {
    world.relay().set_fault(None);
    world.relay().cut();
}

#[test]
fn a_connection_that_loses_requests_is_given_up_and_resumed_without_a_list() {
    let sandbox = Sandbox::for_test();
    let mut world = World::start_behind_proxy(&sandbox);
    world.survive(lose(Fault::LosesRequests, PATIENCE), find);
    world.audit.assert_one_list_each();
}

#[test]
fn a_connection_that_loses_responses_is_given_up_and_resumed_without_a_list() {
    let sandbox = Sandbox::for_test();
    let mut world = World::start_behind_proxy(&sandbox);
    world.survive(lose(Fault::LosesResponses, PATIENCE), find);
    world.audit.assert_one_list_each();
}

/// Checks the same without a proxy: the kernel sees a peer that lives, and the agent checks the connection only after
/// 130 s without a bookmark.
pub(crate) fn assert_a_direct_connection_that_loses_responses_is_resumed() {
    let sandbox = Sandbox::for_test();
    let mut world = World::start(&sandbox);
    world.survive(lose(Fault::LosesResponses, Duration::from_secs(160)), find);
    world.audit.assert_one_list_each();
}

#[test]
fn a_right_that_is_taken_away_is_named_and_the_watches_go_on_once_it_is_back() {
    let sandbox = Sandbox::for_test();
    let mut world = World::start(&sandbox);
    let begin = |world: &mut World<'_>| {
        world.cluster.control_plane.kubectl(&["delete", "clusterrolebinding", "cproxy-cproxy"], "");
        world.cut_until("not permitted to watch services: grant the verbs list and watch");
    };
    world.survive(begin, |world| world.cluster.control_plane.apply([role_binding("cproxy", "cproxy")]));
    world.audit.assert_one_list_each();
}

#[test]
fn lists_that_break_off_change_nothing_and_the_difference_to_the_first_complete_one_is_applied() {
    let sandbox = Sandbox::for_test();
    let mut world = World::start(&sandbox);
    let rows: Vec<_> = (0..LONG_LIST).map(|number| format!("TCP 10.96.1.{number}:80 refuse")).collect();
    for number in 0..LONG_LIST {
        let (name, vip) = (format!("long-{number}"), format!("10.96.1.{number}"));
        let mut service: Value = Service::new(&name).cluster_ips([vip]).tcp("http", 80, 8080).into();
        let text: String = iter::repeat_with(fastrand::alphanumeric).take(OBJECT_BYTES).collect();
        service["metadata"]["annotations"] = json!({"text": text});
        world.cluster.apply(service);
    }
    let all = |more: &[&'static str]| {
        let mut all: Vec<&str> = [WEB].into_iter().chain(more.iter().copied()).collect();
        all.extend(rows.iter().map(String::as_str));
        all.into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    let expect = |world: &World<'_>, rows: &[String]| {
        world.cluster.expect(&rows.iter().map(String::as_str).collect::<Vec<_>>());
    };
    expect(&world, &all(&[]));
    echo::while_a_client_connects(VIP, POD, || {
        world.relay().set_fault(Some(Fault::EndsAfter(PART_OF_A_LIST)));
        // After a restart, every watch is too old.
        world.cluster.control_plane.kill_api_server();
        world.cluster.start_api_server();
        world.cluster.apply_service("new", "10.96.0.11", &["10.244.0.2"]);
        world.agent.wait_until(PATIENCE, "two lists have broken off", |agent| {
            match agent.log().matches("cannot list services").count() {
                2.. => Ok(()),
                less => Err(less),
            }
        });
        assert!(world.agent.log().contains("closed in the middle of the response"), "{}", world.agent.log());
        let kernel = rows::in_kernel(&sandbox).iter().map(Row::to_string).collect::<Vec<_>>();
        assert!(all(&[]).iter().all(|row| kernel.contains(row)), "{kernel:#?}");
        assert!(world.silent_seconds() > 0);
        assert!(world.agent.is_ready(), "what is in force is complete");
        world.relay().set_fault(None);
        expect(&world, &all(&[NEW]));
    });
    assert_eq!(world.agent.exit_status(), None, "it is still the same agent");
}

/// An agent that is ahead of a backup of etcd, which lacks a Service, for longer than a test takes.
fn start_ahead_of_backup(sandbox: &Sandbox) -> (Cluster<'_>, RunningAgent) {
    let mut cluster = Cluster::start(sandbox);
    cluster.apply_service("web", "10.96.0.10", &["10.244.0.1"]);
    cluster.control_plane.back_up();
    let url = cluster.control_plane.server_url();
    cluster.use_server(&url);
    let agent = cluster.start_agent();
    cluster.apply_service("lost", "10.96.0.12", &["10.244.0.3"]);
    for number in 0..CHANGE_COUNT {
        for (kind, name) in [("Service", "lost"), ("EndpointSlice", "lost-ipv4")] {
            cluster.patch(kind, name, json!({"metadata": {"annotations": {"number": number.to_string()}}}));
        }
    }
    cluster.expect(&[WEB, LOST]);
    (cluster, agent)
}

/// Goes back to the backup, and creates another Service.
fn restore_backup(cluster: &mut Cluster<'_>) {
    cluster.control_plane.restore();
    let url = cluster.control_plane.server_url();
    cluster.use_server(&url);
    cluster.apply_service("new", "10.96.0.11", &["10.244.0.2"]);
}

/// Checks that the kernel has what the restored etcd has.
fn has_restored_table(sandbox: &Sandbox) -> Result<(), String> {
    let kernel = rows::in_kernel(sandbox).iter().map(Row::to_string).collect::<Vec<_>>();
    let has = |row: &str| kernel.iter().any(|one| one == row);
    if has(NEW) && !has(LOST) { Ok(()) } else { Err(format!("{kernel:#?}")) }
}

#[test]
fn an_older_state_of_etcd_is_noticed_by_a_watch_that_shows_nothing() {
    let sandbox = Sandbox::for_test();
    let (mut cluster, mut agent) = start_ahead_of_backup(&sandbox);
    echo::while_a_client_connects(VIP, POD, || {
        restore_backup(&mut cluster);
        eventually(RESTORED_MAX, "the silence is counted", || match silent_seconds(&sandbox) {
            30.. => Ok(()),
            less => Err(less),
        });
        assert!(agent.is_ready());
        eventually(RESTORED_MAX, "the agent has what etcd has", || has_restored_table(&sandbox));
        cluster.expect(&[WEB, NEW]);
    });
    for resource in ["services", "endpointslices"] {
        agent.wait_log(&format!("has not confirmed the {resource} since their watch was resumed"), PATIENCE);
    }
    assert_eq!(agent.exit_status(), None, "it is still the same agent");
}

#[test]
fn a_reseeded_agent_is_not_ready_before_it_has_the_older_state_of_etcd() {
    let sandbox = Sandbox::for_test();
    let (mut cluster, mut agent) = start_ahead_of_backup(&sandbox);
    echo::while_a_client_connects(VIP, POD, || {
        restore_backup(&mut cluster);
        // It has removed `ready` when it returns.
        cproxy(&sandbox, &["reseed"]).success();
        let start = Instant::now();
        agent.wait_ready(PATIENCE);
        has_restored_table(&sandbox).expect("a table that was compared");
        println!("the agent was ready again after {:?}", start.elapsed());
        cluster.expect(&[WEB, NEW]);
    });
    assert_eq!(agent.exit_status(), None, "it is still the same agent");
}

mod long {
    use super::*;

    #[test]
    fn a_name_that_lies_changes_nothing_and_a_new_address_is_followed_without_a_list() {
        let sandbox = Sandbox::for_test();
        let [old, new, closed, stranger, nameserver] = [1, 2, 3, 4, 53].map(|last| Ipv4Addr::new(127, 0, 0, last));
        let one = |address| NameAnswer::Addresses(vec![address]);
        let names = Nameserver::start(&sandbox, nameserver, one(old));
        let program = program_with_nameserver(&sandbox, "agent", &cproxy_binary(), nameserver);
        let mut world = World::start_with(&sandbox, Relay::start(&sandbox, server()), |cluster, relay| {
            let url = format!("https://{NAME}:{}", relay.address().port());
            Agent::new(&sandbox).binary(program).kubeconfig(cluster.control_plane.kubeconfig_at("cproxy", &url))
        });
        let port = world.relay().address().port();
        let _stranger = echo::tcp(&sandbox, (stranger, port), "no API server");
        sandbox.ip(WAY_TO_NOWHERE);
        let vanished = (1..=30).map(|last| Ipv4Addr::new(203, 0, 113, last)).collect();
        let begin = |world: &mut World<'_>| {
            for (number, (answer, words)) in [
                (one(closed), "127.0.0.3:"),
                (one(stranger), "TLS: "),
                (NameAnswer::NoName, "cannot resolve api.test: no nameserver has an address for it"),
                (NameAnswer::Silence, "no answer in time"),
                (NameAnswer::Addresses(vanished), "no answer within 3s"),
            ]
            .into_iter()
            .enumerate()
            {
                names.set(answer);
                world.relay().cut();
                // A change of the network ends the pause before the next attempt.
                sandbox.add_address(format!("198.51.100.{number}"));
                // An attempt to connect takes up to half a minute, and so may one that is under way.
                world.agent.wait_log(words, PATIENCE * 3);
            }
        };
        world.survive(begin, |world| {
            let relay = Relay::start_at(&sandbox, SocketAddr::new(new.into(), port), server());
            names.set(one(new));
            // An attempt with the wrong addresses may be under way.
            eventually(PATIENCE * 2, "the agent connects to the new address", || {
                if relay.open_count() > 0 {
                    return Ok(());
                }
                sandbox.ip("address add 198.51.100.9/32 dev lo\naddress del 198.51.100.9/32 dev lo");
                thread::sleep(Duration::from_millis(500));
                Err("not yet")
            });
            world.relay = Some(relay);
        });
        world.audit.assert_one_list_each();
    }
}
