//! Flows of a UDP socket: their backends, their duration, and the addresses they show.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
};

use cproxy_ebpf::{FLOW_IDLE_MAX, FLOWS_PER_SOCKET};
use cproxy_tests::manifest::Endpoint;
use serde_json::Value;

use crate::{
    play::fresh_token,
    servers::{Servers, receive, source_of},
    socket::{Socket, poll},
    world::{Case, Form, Host, MatrixSandbox, POD_PORT, PORT, host, patience, pod, ready, service, slices, vip},
};

const PLAIN: Host = host(3);

/// A Service `web` with VIP 1 and pods 1 to 3.
fn web() -> Vec<Value> {
    ready("web", 1, &[1, 2, 3])
}

/// The equivalent of `shown` with a server's own address.
fn is_server(server: SocketAddr, shown: SocketAddr) -> bool {
    (server.ip(), server.port()) == (shown.ip().to_canonical(), shown.port())
}

#[test]
fn a_backend_addressed_directly_shows_its_own_address() {
    let _world = MatrixSandbox::start(1..=3, web());
    let servers = Servers::of_pods(1..=3);
    for form in Form::ALL {
        let _case = Case::new(form);
        let (to_vip, shown_vip) = (form.address(vip(1), PORT), form.shown(vip(1), PORT));
        let direct = |server: SocketAddr| (1..=3).map(pod).find(|pod| pod.is_at(server.ip())).unwrap();

        let socket = form.udp();
        socket.connect(to_vip).unwrap();
        let (server, source) = servers.asked_by(&socket, None);
        assert_eq!((source, socket.peer().unwrap()), (shown_vip, shown_vip));
        let shown_direct = form.shown(direct(server), POD_PORT);
        socket.connect(form.address(direct(server), POD_PORT)).unwrap();
        assert_eq!(servers.asked_by(&socket, None), (server, shown_direct));
        assert_eq!(socket.peer().unwrap(), shown_direct);
        socket.connect(to_vip).unwrap();
        assert_eq!((servers.asked_by(&socket, None).1, socket.peer().unwrap()), (shown_vip, shown_vip));

        let socket = form.udp();
        let (server, source) = servers.asked_by(&socket, Some(to_vip));
        assert_eq!(source, shown_vip);
        let to_direct = form.address(direct(server), POD_PORT);
        let shown_direct = form.shown(direct(server), POD_PORT);
        assert_eq!(servers.asked_by(&socket, Some(to_direct)), (server, shown_direct), "unconnected");
        assert_eq!(servers.asked_by(&socket, Some(to_vip)), (server, shown_vip), "the VIP again");
    }
}

/// There are more VIPs than a socket's own state holds, and a host in between.
#[test]
fn a_socket_keeps_many_services_apart() {
    const MOST: u8 = 40;
    let objects = (1..=MOST).flat_map(|number| ready(&format!("web-{number}"), number, &[number]));
    let _world = MatrixSandbox::start(1..=MOST, objects);
    let servers = Servers::on((1..=MOST).map(pod).chain([PLAIN]));
    for form in Form::ALL {
        for count in [3, 8, 9, MOST] {
            let _case = Case::new(format!("{form}, {count} Services"));
            let socket = form.udp();
            for _ in 0..2 {
                ask_each(form, &servers, &socket, count);
            }
            ask_all_before_the_first_answer(form, &servers, &socket, count);
        }
    }
}

/// A flow belongs to its VIP, whichever Service has that now.
#[test]
fn flows_of_a_vip_follow_it_to_another_service() {
    let at = |name: &str, number: u8, of: u8| {
        let service = Value::from(service(name, number));
        std::iter::once(service).chain(slices(name, &[of], |_, address| Endpoint::ready(address))).collect::<Vec<_>>()
    };
    let world = MatrixSandbox::start(1..=2, [at("a", 1, 1), at("b", 2, 2)].concat());
    let servers = Servers::of_pods(1..=2);
    for form in Form::ALL {
        let _case = Case::new(form);
        world.update([at("a", 1, 1), at("b", 2, 2)].concat());
        let socket = form.udp();
        let asks = |number, of: u8, when: &str| {
            let (server, source) = servers.asked_by(&socket, Some(form.address(vip(number), PORT)));
            assert!(pod(of).is_at(server.ip()), "VIP {number} went to {server} {when}");
            assert_eq!(source, form.shown(vip(number), PORT), "{when}");
        };
        asks(1, 1, "at first");
        asks(2, 2, "at first");
        world.update([at("a", 2, 1), at("b", 1, 2)].concat());
        asks(1, 2, "after they were swapped");
        asks(2, 1, "after they were swapped");
        world.update(at("a", 2, 1));
        asks(2, 1, "beside one that is gone");
        let refused = socket.send_one(&fresh_token(), Some(form.address(vip(1), PORT)));
        assert!(refused.is_err(), "no Service has it, and no route leads there");
    }
}

/// Idle flows do not keep a socket's own places for ever.
#[test]
fn a_flow_that_is_idle_gives_way_to_a_new_one() {
    const PLACES: u8 = FLOWS_PER_SOCKET as u8;
    let objects = (1..=PLACES + 3).flat_map(|number| ready(&format!("web-{number}"), number, &[number]));
    let world = MatrixSandbox::start(1..=PLACES + 3, objects);
    let servers = Servers::on((1..=PLACES + 3).map(pod));
    let socket = Form::V4.udp();
    let ask = |number| servers.asked_by(&socket, Some(Form::V4.address(vip(number), PORT)));
    for number in 1..=PLACES {
        ask(number);
    }
    assert_eq!(world.counter("udp_flows_inserted"), 0, "all have a place");
    ask(PLACES + 1);
    assert_eq!(world.counter("udp_flows_inserted"), 2, "both directions of one that has none");
    for _ in 0..FLOW_IDLE_MAX {
        ask(PLACES + 1);
    }
    assert_eq!((world.counter("udp_flows"), world.counter("udp_flows_evicted")), (2, 0));
    ask(PLACES + 2);
    assert_eq!(world.counter("udp_flows_inserted"), 2, "it has a place");
}

fn ask_each(form: Form, servers: &Servers, socket: &Socket, count: u8) {
    for number in 1..=count {
        let (server, source) = servers.asked_by(socket, Some(form.address(vip(number), PORT)));
        assert!(pod(number).is_at(server.ip()), "VIP {number} went to {server}");
        assert_eq!(source, form.shown(vip(number), PORT), "VIP {number}");
        let (_, source) = servers.asked_by(socket, Some(form.address(PLAIN, POD_PORT)));
        assert_eq!(source, form.shown(PLAIN, POD_PORT), "the host after VIP {number}");
    }
}

fn ask_all_before_the_first_answer(form: Form, servers: &Servers, socket: &Socket, count: u8) {
    let mut asked = BTreeMap::new();
    for number in 1..=count {
        let token = fresh_token();
        socket.send_one(&token, Some(form.address(vip(number), PORT))).unwrap();
        asked.insert(token, form.shown(vip(number), PORT));
    }
    let questions: Vec<_> = (1..=count).map(|_| servers.receive()).collect();
    questions.iter().rev().for_each(|question| servers.respond(question));
    let answered: BTreeMap<_, _> = (1..=count).map(|_| receive(socket)).collect();
    assert_eq!(answered, asked);
}

#[test]
fn of_two_services_with_one_common_backend_the_latest_asked_answers() {
    let _world = MatrixSandbox::start([1], [ready("a", 1, &[1]), ready("b", 2, &[1])].concat());
    let servers = Servers::of_pods([1]);
    for form in Form::ALL {
        let socket = form.udp();
        for number in [1, 2, 1, 1, 2, 2, 1] {
            let _case = Case::new(format!("{form}, VIP {number}"));
            let (_, source) = servers.asked_by(&socket, Some(form.address(vip(number), PORT)));
            assert_eq!(source, form.shown(vip(number), PORT));
        }
    }
}

/// Replies of one backend for two Services could not be told apart.
#[test]
fn two_services_with_two_common_backends_get_one_each() {
    let _world = MatrixSandbox::start([1, 2], [ready("a", 1, &[1, 2]), ready("b", 2, &[1, 2])].concat());
    let servers = Servers::of_pods([1, 2]);
    for form in Form::ALL {
        // By chance alone, all of them would be right once in 2^16 times.
        for round in 0..16 {
            let _case = Case::new(format!("{form}, round {round}"));
            let socket = form.udp();
            let ask = |number| servers.asked_by(&socket, Some(form.address(vip(number), PORT)));
            let (first, second) = (ask(1), ask(2));
            assert_ne!(first.0, second.0, "both have one backend");
            assert_eq!([first.1, second.1], [1, 2].map(|number| form.shown(vip(number), PORT)));
            assert_eq!((first, second), (ask(1), ask(2)), "again");
        }
    }
}

/// One socket of each form with its server.
struct SteadyClients<'s> {
    servers: &'s Servers,
    sockets: Vec<(Form, Socket, SocketAddr)>,
}

impl<'s> SteadyClients<'s> {
    fn new(servers: &'s Servers) -> Self {
        let first = |form: Form| {
            let socket = form.udp();
            let (server, _) = servers.asked_by(&socket, Some(form.address(vip(1), PORT)));
            (form, socket, server)
        };
        Self { servers, sockets: Form::ALL.map(first).into() }
    }

    /// Sends `times` messages from each socket, which must all reach its server.
    fn assert_stay(&self, times: usize, when: &str) {
        for (form, socket, server) in &self.sockets {
            let _case = Case::new(format!("{form}, {when}"));
            for _ in 0..times {
                let answer = self.servers.asked_by(socket, Some(form.address(vip(1), PORT)));
                assert_eq!(answer, (*server, form.shown(vip(1), PORT)));
            }
        }
    }

    /// Checks that each socket's server is now one of these pods.
    fn move_to(&mut self, pods: &[u8]) {
        for (form, socket, server) in &mut self.sockets {
            let _case = Case::new(format!("{form}, after its server went"));
            let source;
            (*server, source) = self.servers.asked_by(socket, Some(form.address(vip(1), PORT)));
            assert!(pods.iter().any(|&number| pod(number).is_at(server.ip())), "{server} is none of pods {pods:?}");
            assert_eq!(source, form.shown(vip(1), PORT));
        }
    }
}

#[test]
fn a_socket_stays_with_a_backend_while_that_serves() {
    let world = MatrixSandbox::start(1..=6, web());
    let servers = Servers::of_pods(1..=6);
    let mut clients = SteadyClients::new(&servers);
    clients.assert_stay(200, "nothing changes");
    for pods in [vec![1, 2, 3, 4], vec![1, 2, 3, 4, 5, 6], vec![1, 2, 3, 6], vec![1, 2, 3]] {
        world.update(ready("web", 1, &pods));
        clients.assert_stay(10, "others come and go");
    }
    let put = |old: fn(std::net::IpAddr) -> Endpoint| {
        let all = [1, 2, 3, 4, 5, 6];
        let slices = slices("web", &all, |pod, address| if pod <= 3 { old(address) } else { Endpoint::ready(address) });
        world.update([service("web", 1).into()].into_iter().chain(slices));
    };
    put(|address| Endpoint::terminating(address, true));
    clients.assert_stay(10, "it is terminating and serves");
    SteadyClients::new(&servers).sockets.iter().for_each(|(form, _, server)| {
        assert!((4..=6).any(|number| pod(number).is_at(server.ip())), "a new socket, {form}: {server}");
    });
    put(|address| Endpoint::with(address, false, true, false));
    clients.assert_stay(10, "it is not ready and serves");
    put(|address| Endpoint::terminating(address, false));
    clients.move_to(&[4, 5, 6]);
    clients.assert_stay(10, "it has moved");
    world.update(web());
    clients.move_to(&[1, 2, 3]);
    clients.assert_stay(10, "it has moved again");
}

#[test]
fn an_answer_under_way_shows_the_vip_after_its_service_is_gone() {
    let world = MatrixSandbox::start(1..=3, web());
    let servers = Servers::of_pods(1..=3);
    let asked = Form::ALL.map(|form| {
        let socket = form.udp();
        let token = fresh_token();
        socket.send_one(&token, Some(form.address(vip(1), PORT))).unwrap();
        (form, socket, token)
    });
    let questions = asked.each_ref().map(|_| servers.receive());
    world.update([]);
    questions.iter().for_each(|question| servers.respond(question));
    for (form, socket, token) in asked {
        let _case = Case::new(form);
        assert_eq!(source_of(&socket, token), form.shown(vip(1), PORT));
        let error = socket.send_one(&token, Some(form.address(vip(1), PORT))).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENETUNREACH), "it is an address like any other now");
    }
}

#[test]
fn a_peer_that_was_not_asked_shows_its_own_address() {
    let _world = MatrixSandbox::start(1..=3, web());
    let servers = Servers::of_pods(1..=3);
    for form in Form::ALL {
        let _case = Case::new(form);
        let socket = form.udp();
        let token = fresh_token();
        socket.send_one(&token, Some(form.address(vip(1), PORT))).unwrap();
        let question = servers.receive();
        for number in (1..=3).filter(|&number| !pod(number).is_at(question.server.ip())) {
            let other = if form == Form::V6 { Form::V6 } else { Form::V4 }.address(pod(number), POD_PORT);
            servers.send(other, token, question.client);
            assert_eq!(source_of(&socket, token), form.shown(pod(number), POD_PORT), "another pod of the Service");
        }
        let beside = std::net::UdpSocket::bind((question.server.ip(), 0)).unwrap();
        beside.send_to(&token, question.client).unwrap();
        let source = source_of(&socket, token);
        assert!(is_server(beside.local_addr().unwrap(), source), "{source} is not another port of the pod");
        servers.respond(&question);
        assert_eq!(source_of(&socket, token), form.shown(vip(1), PORT));
    }
}

/// The kernel distributes datagrams to such sockets by a hash; the receiving socket's own state decides the shown
/// address.
#[test]
fn sockets_that_share_a_port_have_flows_of_their_own() {
    let _world = MatrixSandbox::start([1], ready("web", 1, &[1]));
    let servers = Servers::of_pods([1]);
    for form in Form::ALL {
        let mut shown = BTreeSet::new();
        // All rounds give the answer to the same one of the two once in 2^31 times.
        for round in 0..32 {
            let _case = Case::new(format!("{form}, round {round}"));
            let sockets = sharing_a_port(form);
            let token = fresh_token();
            sockets[0].send_one(&token, Some(form.address(vip(1), PORT))).unwrap();
            servers.respond(&servers.receive());
            let index = poll(&sockets, libc::POLLIN, patience()).unwrap().expect("one of them has got it");
            let expected = [form.shown(vip(1), PORT), form.shown(pod(1), POD_PORT)][index];
            assert_eq!(source_of(&sockets[index], token), expected);
            shown.insert(expected);
            if shown.len() == 2 {
                break;
            }
        }
        assert_eq!(shown.len(), 2, "{form}: the kernel gave all answers to one socket");
    }
}

fn sharing_a_port(form: Form) -> [Socket; 2] {
    let sockets = [form.udp(), form.udp()];
    let any = if form == Form::V4 { "0.0.0.0:0" } else { "[::]:0" };
    let mut address: SocketAddr = any.parse().unwrap();
    for socket in &sockets {
        socket.set_option(libc::SOL_SOCKET, libc::SO_REUSEPORT, 1).unwrap();
        socket.bind(address).unwrap();
        address.set_port(socket.local().unwrap().port());
    }
    sockets
}

#[test]
fn sixty_four_sockets_get_the_answers_to_their_own_questions() {
    let _world = MatrixSandbox::start(1..=6, [web(), ready("other", 2, &[4, 5, 6])].concat());
    let servers = Servers::of_pods(1..=6);
    let sockets: Vec<_> = Form::ALL.into_iter().cycle().take(64).map(|form| (form, form.udp())).collect();
    let mut servers_of = BTreeMap::new();
    for round in 0..4 {
        let mut asked = BTreeMap::new();
        for number in [1, 2] {
            for (index, (form, socket)) in sockets.iter().enumerate() {
                let token = fresh_token();
                socket.send_one(&token, Some(form.address(vip(number), PORT))).unwrap();
                asked.insert(token, (index, number));
            }
        }
        let mut questions: Vec<_> = asked.iter().map(|_| servers.receive()).collect();
        questions.sort_by_key(|question| (question.client.port(), std::cmp::Reverse(question.token)));
        for question in &questions {
            let (index, number) = asked[&question.token];
            let server = *servers_of.entry((index, number)).or_insert(question.server);
            assert_eq!(server, question.server, "round {round}, socket {index}, VIP {number}");
            servers.respond(question);
        }
        for (index, (form, socket)) in sockets.iter().enumerate() {
            for _ in [1, 2] {
                let (token, source) = receive(socket);
                let (owner, number) = asked[&token];
                let _case = Case::new(format!("round {round}, socket {index}, {form}, VIP {number}"));
                assert_eq!((owner, source), (index, form.shown(vip(number), PORT)));
            }
        }
    }
}

/// The state of a socket ends with it, not with its number.
#[test]
fn a_reused_descriptor_has_no_flows_of_its_former_socket() {
    let _world = MatrixSandbox::start([1], ready("web", 1, &[1]));
    let servers = Servers::of_pods([1]);
    for form in Form::ALL {
        let _case = Case::new(form);
        for connected in [false, true] {
            let socket = form.udp();
            let number = socket.raw();
            let to = form.address(vip(1), PORT);
            if connected {
                socket.connect(to).unwrap();
            }
            servers.asked_by(&socket, Some(to).filter(|_| !connected));
            drop(socket);
            let socket = form.udp();
            assert_eq!(socket.raw(), number, "the kernel takes the lowest number");
            assert_eq!(socket.peer().unwrap_err().raw_os_error(), Some(libc::ENOTCONN));
            let (_, source) = servers.asked_by(&socket, Some(form.address(pod(1), POD_PORT)));
            assert_eq!(source, form.shown(pod(1), POD_PORT));
        }
    }
}
