//! System calls of the agent that fail, and agents that are killed before or after one: lookups are right all along,
//! the next start repairs what is broken, and nothing is left behind.
//!
//! The calls are found by running the agent once. An ordinary run takes a sample of the faults, `CPROXY_SOAK=1` all,
//! and `CPROXY_FAULT=TEXT` those whose description contains the text.

#![expect(clippy::panic, clippy::unwrap_used, reason = "a failed call is a failed test")]

mod policy;
mod receive;

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet},
    fs, io,
    net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket},
    path::Path,
    time::{Duration, Instant},
};

use aya::{
    maps::{Array, Map, MapData, loaded_maps},
    programs::{loaded_links, loaded_programs},
};
use cproxy_datapath::bpf::{PinDir, SocketStates};
use cproxy_ebpf::{TCP_PLACES, TcpPlaceId, tcp_level_places};
use cproxy_tests::{
    Server, echo,
    faults::{BpfObject, Call, Injection, TracedAgent, chosen_injections, common, is_sample},
    isolation::{self, Isolation},
    manifest,
    population::Shape,
    process::{Agent, cproxy, eventually},
    sandbox::Sandbox,
    world::{Form, counter, has_pods, rows, serve_pods, start_agent, udp_connected_to, web_with, while_connecting},
};
use rustix::{net::sockopt::socket_cookie, process::Pid};

/// Pods of the Service that answers.
const PODS: [u8; 2] = [1, 2];

/// Map that programs are tried with.
const TEMPORARY: &str = "aya_global";

/// Faults in an ordinary run of a test.
const SAMPLE: usize = 5;

/// Services that are added while an agent runs: the maps have to grow for them.
const GROWTH: Shape = Shape::new(400, 5);

/// The same, few enough for the maps to stay as they are.
const WRITE: Shape = Shape::new(3, 2);

/// Limit on the time until work without a fault has been done: the agent has looked at the places for TCP sockets just
/// before, and looks again 10 s later.
const WORKED: Duration = Duration::from_secs(30);

/// Limit on the time until work that failed has been done again: memory that has run out is asked for again after half
/// a minute.
const MADE_GOOD: Duration = Duration::from_secs(60);

/// Limit on the time until what nobody refers to any more has gone from the kernel.
const FREED: Duration = Duration::from_secs(60);

/// Time for which an agent at rest makes no call, and its holdings do not change.
const AT_REST: Duration = Duration::from_millis(500);

/// Holding of an agent that looks through the sockets of other network namespaces.
const SEARCH: &str = "thread in another network namespace";

/// Holdings of an agent, with the number of each kind.
type Holdings = BTreeMap<String, usize>;

struct World {
    sandbox: Sandbox,
    _servers: Vec<Server>,
    /// Objects in the kernel that agents have made.
    made: RefCell<BTreeSet<BpfObject>>,
    /// Numbers of faults that have happened, and of all.
    faults: Cell<(usize, usize)>,
    /// Number of faults in an ordinary run.
    sample: usize,
    /// Network policy that the agents enforce.
    policy: Option<Isolation>,
    /// Further flags of the agents.
    arguments: &'static [&'static str],
}

impl World {
    fn new() -> Self {
        let sandbox = Sandbox::for_test();
        let servers = serve_pods(&sandbox, PODS);
        manifest::write(&sandbox.manifest_dir(), "web.json", web_with(PODS));
        let (made, faults) = (RefCell::default(), Cell::default());
        Self { sandbox, _servers: servers, made, faults, sample: SAMPLE, policy: None, arguments: &[] }
    }

    /// Tries few faults in an ordinary run, since each takes long.
    fn with_few_faults() -> Self {
        Self { sample: 2, ..Self::new() }
    }

    /// Starts an agent, perhaps with a fault.
    fn start(&self, injection: Option<Injection>) -> TracedAgent {
        let agent = Agent::new(&self.sandbox).manifests(self.sandbox.manifest_dir());
        let policy = if self.policy.is_some() { &isolation::ARGUMENTS[..] } else { &[] };
        TracedAgent::start_agent(&self.sandbox, agent.args(policy).args(self.arguments), injection)
    }

    /// Does work while clients connect. Nothing of it is felt.
    fn while_calling<R>(&self, what: &str, work: impl FnOnce() -> R) -> R {
        while_connecting(what, || match &self.policy {
            Some(policy) => policy.while_calling(what, work),
            None => work(),
        })
    }

    /// Starts an agent that gets ready.
    fn start_ready(&self) -> TracedAgent {
        let mut agent = self.start(None);
        assert!(agent.settle(), "{}", agent.log());
        agent
    }

    /// Kills an agent.
    fn kill(&self, mut agent: TracedAgent) {
        agent.kill();
        self.note(&agent);
    }

    /// Stops an agent.
    fn stop(&self, mut agent: TracedAgent) {
        agent.stop();
        self.note(&agent);
    }

    /// Kills an agent with a fault.
    fn end(&self, agent: TracedAgent) {
        let (happened, all) = self.faults.get();
        self.faults.set((happened + usize::from(agent.was_hit()), all + 1));
        self.kill(agent);
    }

    /// Random faults at these calls, until a sample of them has happened: the calls of two runs differ a little.
    fn injections(&self, name: &str, calls: &[Call]) -> impl Iterator<Item = Injection> {
        let chosen = chosen_injections(name, calls, self.sample * 2).into_iter();
        chosen.take_while(|_| !is_sample() || self.faults.get().0 < self.sample)
    }

    /// Removes everything at the end of a test. The sample of faults has happened, or nearly all of a soak.
    fn finish(&self, name: &str) {
        self.clean_up(name);
        let (happened, all) = self.faults.get();
        eprintln!("{name}: {happened} of {all} faults have happened");
        let is_enough = is_sample() && happened >= self.sample;
        assert!(is_enough || happened * 4 >= all * 3, "{name}: {happened} of {all}");
    }

    fn note(&self, agent: &TracedAgent) {
        self.made.borrow_mut().extend(agent.made());
    }

    /// Calls of an agent while `work` runs, which begins when the agent is at rest.
    fn record(&self, work: impl FnOnce()) -> Vec<Call> {
        let agent = self.start_ready();
        at_rest(|| (descriptors(agent.pid()), agent.call_count()));
        agent.take_calls();
        work();
        let calls = agent.take_calls();
        self.kill(agent);
        calls
    }

    /// Calls of an agent until it is ready.
    fn record_start(&self) -> Vec<Call> {
        let agent = self.start_ready();
        let calls = agent.take_calls();
        self.kill(agent);
        calls
    }

    /// Holdings of an agent without faults at rest: its own, those in the kernel, and those in its directories.
    fn holdings(&self, agent: &TracedAgent) -> Holdings {
        self.note(agent);
        let mut holdings = descriptors(agent.pid());
        for dir in [self.sandbox.pin_dir(), self.sandbox.run_dir()] {
            files(&dir, &mut |path| count(&mut holdings, path.display().to_string()));
        }
        self.objects().into_iter().for_each(|name| count(&mut holdings, name));
        let (mounts, dir) = (fs::read_to_string("/proc/self/mounts").unwrap_or_default(), self.sandbox.dir());
        let own = mounts.lines().filter(|line| line.contains(&*dir.to_string_lossy()));
        own.for_each(|line| count(&mut holdings, line.to_owned()));
        // The maps of a policy's generation before may be there, until the next one takes their places.
        for map in policy::GENERATIONS {
            holdings.entry(map.to_owned()).and_modify(|count| *count = (*count).min(2));
        }
        holdings
    }

    /// Holdings of an agent that has never seen a fault.
    fn reference(&self) -> Holdings {
        let agent = self.start_ready();
        // The kernel frees a map of the loader some time after its end.
        eventually(FREED, "the loader's maps are freed", || {
            if self.holdings(&agent).contains_key(TEMPORARY) { Err("not yet") } else { Ok(()) }
        });
        // It looks through the sockets of the machine after its start, which may take long.
        let reference = eventually(FREED, "no search is under way", || {
            let holdings = at_rest(|| self.holdings(&agent));
            if holdings.contains_key(SEARCH) { Err("one is") } else { Ok(holdings) }
        });
        self.stop(agent);
        reference
    }

    /// An agent starts without faults. It has the right table, and holds what one holds that has never seen a fault.
    fn repair(&self, what: &str, reference: &Holdings) {
        let agent = self.start_ready();
        self.check_table(what);
        eventually(FREED, format_args!("{what}: nothing is left of it"), || {
            differences(&self.holdings(&agent), reference, false)
        });
        self.stop(agent);
    }

    fn check_table(&self, what: &str) {
        let rows: Vec<_> = rows(&self.sandbox, "services").into_iter().filter(is_web).collect();
        assert!(rows.len() == 4 && rows.iter().all(|row| has_pods(row, &PODS)), "{what}: {rows:#?}");
        for form in Form::ALL {
            echo::ask_name(form.web()).unwrap_or_else(|error| panic!("{what}, repaired: {form:?}: {error}"));
        }
        if let Some(policy) = &self.policy {
            policy.check().unwrap_or_else(|error| panic!("{what}, repaired: {error}"));
        }
    }

    /// Removes everything. Nothing is left.
    fn clean_up(&self, what: &str) {
        let policy = self.policy.as_ref().map(|_| "--policy-too");
        cproxy(&self.sandbox, &["cleanup"].into_iter().chain(policy).collect::<Vec<_>>()).success();
        assert!(!self.sandbox.pin_dir().exists(), "{what}: pins are left");
        eventually(FREED, format_args!("{what}: nothing is left in the kernel"), || {
            let left = self.objects();
            if left.is_empty() { Ok(()) } else { Err(left.join(", ")) }
        });
    }

    /// Objects that agents have made and that are in the kernel, by name.
    fn objects(&self) -> Vec<String> {
        let text = |name: Option<&str>| name.unwrap_or_default().to_owned();
        let maps = loaded_maps().flatten().map(|map| (BpfObject::Map(map.id()), text(map.name_as_str())));
        let programs = loaded_programs().flatten();
        let programs = programs.map(|program| (BpfObject::Program(program.id()), text(program.name_as_str())));
        let links = loaded_links().flatten().map(|link| (BpfObject::Link(link.id()), "link".to_owned()));
        let made = self.made.borrow();
        maps.chain(programs).chain(links).filter(|(object, _)| made.contains(object)).map(|(_, name)| name).collect()
    }

    /// Does work with a running agent once for each fault of the calls that it makes for that. It is made good by that
    /// agent or, if the fault has ended it, by the next one.
    fn with_faults(
        &self,
        name: &str,
        prepare: impl Fn(),
        work: impl Fn(),
        has_worked: impl Fn() -> Result<(), String>,
    ) {
        prepare();
        let reference = self.reference();
        let record = || {
            self.record(|| {
                work();
                eventually(WORKED, name, &has_worked);
            })
        };
        let calls = record();
        prepare();
        let calls = common(calls, &record());
        for injection in self.injections(name, &calls) {
            prepare();
            let what = format!("{name}, {injection}");
            let (kills, refuses) = (injection.kills(), injection.refuses());
            let mut agent = self.start_ready();
            let (resting, _) = at_rest(|| (descriptors(agent.pid()), agent.call_count()));
            agent.inject(injection);
            self.while_calling(&what, || {
                work();
                let mut next = None;
                if kills {
                    eventually(WORKED, format_args!("{what}: the agent is killed, or makes fewer calls"), || {
                        if agent.exit_status().is_some() { Ok(()) } else { has_worked() }
                    });
                    // Last calls of the work, perhaps after its effect.
                    at_rest(|| agent.call_count());
                    agent.kill();
                    next = Some(self.start_ready());
                }
                let is_made_good = || {
                    // A kernel that refuses to close sockets is not asked again.
                    if agent.log().contains(" open: see `cproxy check`") && refuses { Ok(()) } else { has_worked() }
                };
                eventually(MADE_GOOD, format_args!("{what}: made good"), is_made_good);
                if !kills {
                    at_rest(|| agent.call_count());
                    eventually(MADE_GOOD, format_args!("{what}: made good after the last calls"), is_made_good);
                }
                assert!(!agent.log().contains("panicked"), "{what}: {}", agent.log());
                if agent.exit_status().is_none() {
                    eventually(FREED, format_args!("{what}: no descriptor is left open"), || {
                        differences(&descriptors(agent.pid()), &allowed(&resting, &self.sandbox), true)
                    });
                }
                self.end(agent);
                next.into_iter().for_each(|agent| self.kill(agent));
            });
            prepare();
            self.repair(&what, &reference);
        }
        self.finish(name);
    }
}

fn is_web(row: &serde_json::Value) -> bool {
    row.get("service").and_then(serde_json::Value::as_str) == Some("default/web")
}

fn count(holdings: &mut Holdings, kind: String) {
    *holdings.entry(kind).or_default() += 1;
}

/// Descriptors and threads of a process, by kind.
fn descriptors(process: Pid) -> Holdings {
    let process = process.as_raw_pid();
    let mut holdings = Holdings::new();
    for descriptor in fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten() {
        let Ok(link) = fs::read_link(descriptor.path()) else { continue };
        let link = link.to_string_lossy();
        let kind = link.split_once(":[").map_or(&*link, |(kind, _)| kind);
        count(&mut holdings, format!("descriptor of {kind}"));
    }
    // Threads that are in another network namespace than the process.
    let own = fs::read_link(format!("/proc/{process}/ns/net")).ok();
    for thread in fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten() {
        if fs::read_link(thread.path().join("ns/net")).ok() != own {
            count(&mut holdings, SEARCH.to_owned());
        }
    }
    holdings
}

/// Holdings of an agent at rest that has added places for TCP sockets meanwhile: owners and peers of each level.
fn allowed(resting: &Holdings, sandbox: &Sandbox) -> Holdings {
    let mut allowed = resting.clone();
    let levels = SocketStates::open(&PinDir::new(&sandbox.pin_dir())).unwrap().further_levels();
    *allowed.entry("descriptor of anon_inode:bpf-map".to_owned()).or_default() += 2 * levels;
    allowed
}

/// A value of an agent once it has not changed for a while.
fn at_rest<T: PartialEq + Clone>(read: impl Fn() -> T) -> T {
    let mut present = (read(), Instant::now());
    eventually(MADE_GOOD, "the agent is at rest", || {
        let now = read();
        if now != present.0 {
            present = (now, Instant::now());
        }
        if present.1.elapsed() >= AT_REST { Ok(present.0.clone()) } else { Err("not yet") }
    })
}

/// An error with the differences; of what there is less of only if that counts.
fn differences(now: &Holdings, reference: &Holdings, may_be_less: bool) -> Result<(), String> {
    let kinds: BTreeSet<_> = now.keys().chain(reference.keys()).collect();
    let of = |holdings: &Holdings, kind: &String| holdings.get(kind).copied().unwrap_or_default();
    let numbers = kinds.into_iter().map(|kind| (kind, of(now, kind), of(reference, kind)));
    let differ = |now: usize, before: usize| now > before || (now < before && !may_be_less);
    let text: Vec<_> = numbers
        .filter(|&(_, now, before)| differ(now, before))
        .map(|(kind, now, before)| format!("{kind}: {now}, not {before}"))
        .collect();
    if text.is_empty() { Ok(()) } else { Err(text.join("; ")) }
}

/// All files below a directory.
fn files(dir: &Path, each: &mut impl FnMut(&Path)) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        each(&entry.path());
        if entry.path().is_dir() {
            files(&entry.path(), each);
        }
    }
}

/// Starts an agent with a fault. If it gets ready all the same, it serves.
fn start_with(world: &World, injection: &Injection, what: &str) {
    let mut agent = world.start(Some(injection.clone()));
    let is_ready = agent.settle();
    assert!(!agent.log().contains("panicked"), "{what}: {}", agent.log());
    if is_ready {
        for form in Form::ALL {
            echo::ask_name(form.web()).unwrap_or_else(|error| panic!("{what}: {error}: {}", agent.log()));
        }
        if let Some(policy) = &world.policy {
            policy.check().unwrap_or_else(|error| panic!("{what}: {error}: {}", agent.log()));
        }
    } else if !injection.kills() {
        assert!(
            agent.exit_status().is_some_and(|status| matches!(status.code(), Some(1 | 2))),
            "{what}: {:?}",
            agent.exit_status()
        );
    }
    world.end(agent);
}

/// Starts agents for the first time, each with another fault, and then one without.
fn first_starts(world: &World) {
    let reference = world.reference();
    world.clean_up("without a fault");
    let calls = world.record_start();
    for injection in world.injections("first start", &calls) {
        world.clean_up("before");
        let what = format!("first start, {injection}");
        start_with(world, &injection, &what);
        world.repair(&what, &reference);
    }
    world.finish("first start");
}

/// Starts agents where one was before, each with another fault, and then one without.
fn restarts(world: &World) {
    let reference = world.reference();
    let calls = world.record_start();
    for injection in world.injections("restart", &calls) {
        let what = format!("restart, {injection}");
        world.while_calling(&what, || {
            start_with(world, &injection, &what);
            world.repair(&what, &reference);
        });
    }
    world.finish("restart");
}

#[test]
fn a_first_start_with_a_fault_can_be_repeated() {
    first_starts(&World::new());
}

#[test]
fn a_restart_with_a_fault_is_not_felt() {
    restarts(&World::new());
}

#[test]
fn a_write_with_a_fault_is_not_felt_and_made_good() {
    let world = World::new();
    let dir = world.sandbox.manifest_dir();
    world.with_faults(
        "write",
        || drop(manifest::write(&dir, "more.json", [])),
        || drop(manifest::write(&dir, "more.json", WRITE.objects(0..WRITE.services))),
        || has_rows(&world, WRITE.services as usize + 4),
    );
}

#[test]
fn a_removal_with_a_fault_is_not_felt_and_made_good() {
    let world = World::new();
    let dir = world.sandbox.manifest_dir();
    world.with_faults(
        "removal",
        || drop(manifest::write(&dir, "more.json", WRITE.objects(0..WRITE.services))),
        || drop(manifest::write(&dir, "more.json", [])),
        || has_rows(&world, 4),
    );
}

#[test]
fn a_growth_with_a_fault_is_not_felt_and_made_good() {
    let world = World::new();
    let dir = world.sandbox.manifest_dir();
    world.with_faults(
        "growth",
        || {
            // Maps that have grown stay so.
            cproxy(&world.sandbox, &["cleanup"]).success();
            manifest::write(&dir, "more.json", []);
        },
        || drop(manifest::write(&dir, "more.json", GROWTH.objects(0..GROWTH.services))),
        || has_rows(&world, GROWTH.services as usize + 4),
    );
}

#[test]
fn a_pass_with_a_fault_closes_the_sockets_later() {
    let world = World::new();
    let dir = world.sandbox.manifest_dir();
    let socket = RefCell::new(None::<UdpSocket>);
    world.with_faults(
        "pass",
        || drop(manifest::write(&dir, "web.json", web_with(PODS))),
        || {
            *socket.borrow_mut() = Some(udp_connected_to(Form::V4, PODS[1]));
            manifest::write(&dir, "web.json", web_with(PODS[..1].to_vec()));
        },
        || match socket.borrow().as_ref().map(UdpSocket::peer_addr) {
            // The kernel disconnects sockets that are closed from outside.
            Some(Err(error)) if error.kind() == io::ErrorKind::NotConnected => Ok(()),
            other => Err(format!("the socket is open: {other:?}")),
        },
    );
}

/// Connections that are held: more than a quarter of the first places for TCP sockets, so that there are to be more.
const CROWD: usize = 600;

/// Connections that are held in the second level of places when it is to go.
const HIGH: usize = 40;

/// Connections that are held.
struct Crowd {
    connections: RefCell<Vec<TcpStream>>,
    /// A connected socket that uses no place, and its other end. The agent leaves it places that are written to be its
    /// own.
    filler: [TcpStream; 2],
}

impl Crowd {
    fn new() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        Self { connections: RefCell::default(), filler: [listener.accept().unwrap().0, client] }
    }

    fn connect(&self, count: usize) {
        self.connections.borrow_mut().extend((0..count).map(|_| TcpStream::connect(Form::V4.web()).unwrap()));
    }

    fn clear(&self) {
        self.connections.borrow_mut().clear();
    }

    /// Fills the places of the first level that are free, or frees them again.
    fn fill(&self, sandbox: &Sandbox, is_full: bool) {
        let filler = socket_cookie(&self.filler[0]).unwrap();
        let (from, to) = if is_full { (0, filler) } else { (filler, 0) };
        let owners = MapData::from_pin(PinDir::new(&sandbox.pin_dir()).object("TCP_OWNERS")).unwrap();
        let mut owners = Array::<_, u64>::try_from(Map::Array(owners)).unwrap();
        for place in 0..TCP_PLACES {
            if owners.get(&place, 0).unwrap() == from {
                owners.set(place, to, 0).unwrap();
            }
        }
    }

    fn keep_names(&self) -> Result<(), String> {
        let crowd = self.connections.borrow();
        let shows_pod = |socket: &&TcpStream| socket.peer_addr().unwrap() != Form::V4.web();
        crowd.iter().find(shows_pod).map_or(Ok(()), |socket| panic!("{socket:?} has lost its name"))
    }

    /// The agent is to add places: many sockets live, and one finds none.
    fn need_more(&self, sandbox: &Sandbox) {
        self.connect(CROWD);
        self.fill(sandbox, true);
        self.connect(1);
    }

    /// Whether there are more places. Until then, one more socket finds none.
    fn has_more(&self, sandbox: &Sandbox) -> Result<(), String> {
        has_room(sandbox, TCP_PLACES + tcp_level_places(1)).inspect_err(|_| self.connect(1))
    }
}

fn has_room(sandbox: &Sandbox, expected: u32) -> Result<(), String> {
    let room = counter(sandbox, "tcp_places_room");
    if room == u64::from(expected) { Ok(()) } else { Err(format!("room for {room}, not {expected}")) }
}

#[test]
fn more_places_with_a_fault_come_later_and_no_connection_loses_its_name() {
    let world = World::with_few_faults();
    let crowd = Crowd::new();
    world.with_faults(
        "more places",
        || {
            crowd.clear();
            cproxy(&world.sandbox, &["cleanup"]).success();
        },
        || crowd.need_more(&world.sandbox),
        || crowd.keep_names().and_then(|()| crowd.has_more(&world.sandbox)),
    );
}

#[test]
fn fewer_places_with_a_fault_come_later_and_no_connection_loses_its_name() {
    let world = World::with_few_faults();
    let (crowd, sandbox) = (Crowd::new(), &world.sandbox);
    world.with_faults(
        "fewer places",
        || {
            crowd.clear();
            cproxy(sandbox, &["cleanup"]).success();
            let agent = start_agent(sandbox);
            crowd.need_more(sandbox);
            eventually(WORKED, "more places", || crowd.has_more(sandbox));
            drop(agent);
            crowd.clear();
            crowd.fill(sandbox, true);
            crowd.connect(HIGH);
            crowd.fill(sandbox, false);
            let owners = SocketStates::open(&PinDir::new(&sandbox.pin_dir())).unwrap().tcp_owners().unwrap();
            let high: BTreeSet<_> =
                owners.iter().filter(|at| TcpPlaceId(at.place).level() > 0).map(|at| at.owner).collect();
            assert!(crowd.connections.borrow().iter().all(|socket| high.contains(&socket_cookie(socket).unwrap())));
        },
        || {},
        || crowd.keep_names().and_then(|()| has_room(sandbox, TCP_PLACES)),
    );
}

fn has_rows(world: &World, expected: usize) -> Result<(), String> {
    let count = rows(&world.sandbox, "services").len();
    if count == expected { Ok(()) } else { Err(format!("{count} rows, not {expected}")) }
}
