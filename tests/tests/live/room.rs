//! The kernel's maps are as large as the data requires.

#![expect(clippy::unwrap_used, reason = "a failed call is a failed test")]

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use aya::maps::{HashMap, Map, MapData};
use cproxy_datapath::bpf::{KernelMaps, PinDir};
use cproxy_tests::{
    Done, Server, echo,
    manifest::{self, http_service},
    population::Shape,
    process::eventually,
    sandbox::Sandbox,
    seccomp,
    world::{counter, rows, start_agent},
};
use serde_json::Value;

const VIP: &str = "10.96.0.10";
const POD: &str = "10.244.0.1";
const SYNC: Duration = Duration::from_secs(20);
/// Limit on compaction: the agent waits for ten seconds before it frees memory.
const COMPACTED: Duration = Duration::from_secs(40);

fn serve(sandbox: &Sandbox) -> Server {
    sandbox.add_addresses([POD]);
    write_web(sandbox, 0);
    echo::tcp(sandbox, format!("{POD}:8080").parse::<SocketAddr>().unwrap(), "pod")
}

/// Writes the Service with the pod that answers and `others` that do not.
fn write_web(sandbox: &Sandbox, others: u16) {
    let others = (0..others).map(|pod| format!("10.245.{}.{}", pod / 250, pod % 250 + 1));
    let pods = others.chain([POD.to_owned()]);
    manifest::write(&sandbox.manifest_dir(), "web.json", http_service("web", VIP, pods));
}

/// Writes `services` more Services with `endpoints` endpoints each.
fn write_others(sandbox: &Sandbox, services: u32, endpoints: u32) {
    let objects = Shape::new(services, endpoints).objects(0..services);
    manifest::write(&sandbox.manifest_dir(), "others.json", objects);
}

fn room(sandbox: &Sandbox) -> (u64, u64) {
    (counter(sandbox, "frontends_room"), counter(sandbox, "backends_room"))
}

/// Names of the Services in the kernel's table.
fn served_services(sandbox: &Sandbox) -> BTreeSet<String> {
    let name = |row: &Value| row.get("service").and_then(Value::as_str).unwrap_or_default().to_owned();
    rows(sandbox, "services").iter().map(name).collect()
}

fn wait_for_services(sandbox: &Sandbox, count: usize) {
    eventually(SYNC, "the table follows", || {
        let now = served_services(sandbox).len();
        if now == count { Ok(()) } else { Err(format!("{now} Services, not {count}")) }
    });
}

fn wait_for_room(sandbox: &Sandbox, expected: (u64, u64)) {
    eventually(COMPACTED, "memory is given back", || {
        let now = room(sandbox);
        if now == expected { Ok(()) } else { Err(format!("{now:?}, not {expected:?}")) }
    });
}

fn ask() {
    let vip: SocketAddr = format!("{VIP}:80").parse().unwrap();
    assert_eq!(echo::ask_tcp(vip).unwrap().name, "pod");
}

/// Sizes of the maps of a small table.
fn least_room() -> (u64, u64) {
    let least = KernelMaps::LIMITS.least;
    (least.frontends.into(), least.slots.into())
}

#[test]
fn the_maps_grow_and_shrink_with_the_data_and_no_connect_fails() {
    let sandbox = Sandbox::for_test();
    let _server = serve(&sandbox);
    let mut agent = start_agent(&sandbox);
    assert_eq!(room(&sandbox), least_room());
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        let done = Done(&is_done);
        let asked = scope.spawn(|| {
            let mut asked = 0;
            while !is_done.load(Ordering::Relaxed) {
                ask();
                asked += 1;
            }
            asked
        });
        for (services, endpoints, expected) in
            [(200, 10, (512, 2_001)), (1_500, 3, (4_096, 4_501)), (2, 9_000, (4_096, 18_001))]
        {
            write_others(&sandbox, services, endpoints);
            wait_for_services(&sandbox, services as usize + 1);
            let now = room(&sandbox);
            assert!(now.0 >= expected.0 && now.1 >= expected.1, "{now:?}, not {expected:?}");
        }
        manifest::write(&sandbox.manifest_dir(), "others.json", []);
        wait_for_services(&sandbox, 1);
        wait_for_room(&sandbox, least_room());
        // A new agent uses the maps that are in force.
        write_others(&sandbox, 300, 10);
        wait_for_services(&sandbox, 301);
        agent.kill();
        agent = start_agent(&sandbox);
        assert!(room(&sandbox) >= (1_024, 3_000), "{:?}", room(&sandbox));
        drop(done);
        assert!(asked.join().unwrap() > 100);
    });
    assert_eq!(served_services(&sandbox).len(), 301);
}

/// The agent was killed before it put a new map in force.
#[test]
fn a_replacement_that_was_broken_off_is_no_harm() {
    let sandbox = Sandbox::for_test();
    let _server = serve(&sandbox);
    let mut agent = start_agent(&sandbox);
    agent.kill();
    let pins = PinDir::new(&sandbox.pin_dir());
    let stray: HashMap<MapData, [u8; 20], u32> = HashMap::create(7, 1).unwrap();
    let unused = ["FRONTENDS_0", "FRONTENDS_1"].map(|name| pins.object(name)).into_iter().find(|path| !path.exists());
    stray.pin(unused.as_ref().unwrap()).unwrap();
    ask();
    assert_eq!(served_services(&sandbox).len(), 1, "readers find the map in force");
    let _agent = start_agent(&sandbox);
    ask();
    write_others(&sandbox, 300, 1);
    wait_for_services(&sandbox, 301);
    ask();
    let pinned = ["FRONTENDS_0", "FRONTENDS_1"].iter().filter(|name| pins.object(name).exists()).count();
    assert_eq!(pinned, 1, "the stray one went with the next replacement");
}

/// They would leave no room for the next Service.
#[test]
fn a_map_full_of_keys_that_no_agent_writes_is_made_good() {
    const OTHER_PROTOCOL: u8 = 132;
    let sandbox = Sandbox::for_test();
    let _server = serve(&sandbox);
    let mut agent = start_agent(&sandbox);
    agent.kill();
    let pins = PinDir::new(&sandbox.pin_dir());
    let in_force = ["FRONTENDS_0", "FRONTENDS_1"].map(|name| pins.object(name)).into_iter().find(|path| path.exists());
    let map = Map::HashMap(MapData::from_pin(in_force.unwrap()).unwrap());
    let mut map: HashMap<MapData, [u8; 20], u32> = map.try_into().unwrap();
    let key = |number: u8| {
        let mut key = [number; 20];
        key[18..].copy_from_slice(&[OTHER_PROTOCOL, 0]);
        key
    };
    let strange = (0..=u8::MAX).take_while(|number| map.insert(key(*number), 7, 0).is_ok()).count();
    assert!((200..256).contains(&strange), "{strange} keys fill the map");
    let _agent = start_agent(&sandbox);
    ask();
    write_others(&sandbox, 20, 1);
    wait_for_services(&sandbox, 21);
    ask();
}

/// The pin of a replaced map cannot be removed; it takes the name that the next replacement needs.
#[test]
fn a_replacement_that_fails_leaves_the_map_in_force_as_it_is() {
    let sandbox = Sandbox::for_test();
    let _server = serve(&sandbox);
    let mut agent = start_agent(&sandbox);
    let pins = PinDir::new(&sandbox.pin_dir());
    let both = ["FRONTENDS_0", "FRONTENDS_1"].map(|name| pins.object(name));
    let in_force = both.iter().find(|path| path.exists()).unwrap();
    rustix::mount::mount_bind(in_force, in_force).unwrap();
    write_others(&sandbox, 300, 1);
    wait_for_services(&sandbox, 301);
    ask();
    assert!(both.iter().all(|path| path.exists()), "the first pin is busy");
    // The agent writes the map that the programs read.
    write_others(&sandbox, 301, 1);
    wait_for_services(&sandbox, 302);
    write_others(&sandbox, 600, 1);
    agent.wait_log("the table is read back and written anew", SYNC);
    assert!(served_services(&sandbox).len() >= 302);
    ask();
    rustix::mount::unmount(in_force, rustix::mount::UnmountFlags::empty()).unwrap();
    wait_for_services(&sandbox, 601);
    ask();
    agent.kill();
}

#[test]
fn without_memory_the_present_table_is_served_and_the_rest_is_named() {
    let sandbox = Sandbox::for_test();
    let _server = serve(&sandbox);
    start_agent(&sandbox).kill();
    thread::scope(|scope| {
        let forbidden = scope.spawn(|| {
            seccomp::forbid_maps_of_the_agent();
            let mut agent = start_agent(&sandbox);
            // There is room for 150 Services, but neither for 5,000 endpoints nor for 200 more Services.
            write_others(&sandbox, 100, 5);
            wait_for_services(&sandbox, 101);
            write_web(&sandbox, 5_000);
            let log = agent.wait_log("cannot make BACKENDS with room for", SYNC);
            assert!(log.contains("Cannot allocate memory"), "{log}");
            agent.wait_log("Service default/web: no room for 5001 more backends", SYNC);
            (0..20).for_each(|_| ask());
            assert_eq!(["services_without_room", "object_problems"].map(|name| counter(&sandbox, name)), [1, 1]);
            // The agent still follows other Services.
            write_others(&sandbox, 101, 5);
            wait_for_services(&sandbox, 102);
            write_others(&sandbox, 300, 1);
            agent.wait_log("no room for more than 256 frontends", SYNC);
            (0..20).for_each(|_| ask());
            let served = served_services(&sandbox);
            assert!(served.contains("default/web") && served.len() > 100, "{served:?}");
            agent.kill();
        });
        forbidden.join().unwrap();
    });
    let _agent = start_agent(&sandbox);
    wait_for_services(&sandbox, 301);
}
