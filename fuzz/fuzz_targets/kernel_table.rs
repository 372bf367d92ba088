//! A table that an agent finds in pinned maps, written by a broken agent or by somebody else. The first byte of an
//! input is the state of the cluster that an earlier agent has written; the next one is the number of changes, of four
//! bytes each, that were made to the maps behind its back. Each further byte is a state that the new agent follows.
//! After each of them, programs find what a full recomputation says.

#![no_main]

use std::sync::LazyLock;

use cproxy_core::{
    Capacity, Event, FrontendSource, KernelTable, Limits, NodeContext, ResourceKind, Store, TablePlanner, resolve,
};
use cproxy_datapath::bpf::{KernelMaps, decode_table};
use cproxy_fuzz::kernel_maps::SimulatedMaps;
use libfuzzer_sys::fuzz_target;
use serde_json::json;

const LEAST: Capacity = Capacity { frontends: 8, sets: 4, slots: 8 };
const LIMITS: Limits = Limits { least: LEAST, ..KernelMaps::LIMITS };

/// All Services, then the slices of each: to read them anew would take nearly all of the time.
static OBJECTS: LazyLock<Vec<Event>> = LazyLock::new(|| {
    let slices = (0..3).flat_map(|index| (0..8).map(move |endpoints| slice(index, endpoints)));
    (0..3).map(service).chain(slices).collect()
});

/// More of them would only make the input slow.
const STATES_MAX: usize = 8;

fuzz_target!(|input: &[u8]| {
    let Some((&[before, changes], rest)) = input.split_first_chunk() else { return };
    let (damage, states) = rest.split_at((usize::from(changes) * 4).min(rest.len()));
    let mut maps = SimulatedMaps::new(LEAST);
    let mut store = Store::new(NodeContext::default());
    follow(&mut store, before);
    maps.apply(&TablePlanner::new(LIMITS, KernelTable::default()).sync(&store));
    check(&maps, &store);
    damage.as_chunks().0.iter().for_each(|change| maps.damage(*change));
    let mut planner = TablePlanner::new(LIMITS, decode_table(&maps).unwrap());
    let (first, states) = states.split_first().unwrap_or((&before, &[]));
    follow(&mut store, *first);
    store.take_dirty();
    maps.apply(&planner.sync(&store));
    check(&maps, &store);
    for state in states.iter().take(STATES_MAX) {
        follow(&mut store, *state);
        let dirty = store.take_dirty();
        maps.apply(&planner.update(&store, dirty));
        check(&maps, &store);
        if state & 0x80 != 0 {
            maps.apply(&planner.compact());
            check(&maps, &store);
        }
    }
    assert_eq!(planner.sync(&store), [], "a full sync finds nothing to do");
});

/// Replaces all objects by those of a state: three bits for the Services that exist, three for their endpoints.
fn follow(store: &mut Store, state: u8) {
    let (services, endpoints) = (state & 7, state >> 3 & 7);
    let mut list = |kind, objects: Vec<Event>| {
        store.apply(Event::ListStarted(kind));
        objects.into_iter().for_each(|object| drop(store.apply(object)));
        store.apply(Event::ListDone(kind));
    };
    let present = || (0..3u8).filter(|index| services & 1 << index != 0);
    list(ResourceKind::Nodes, Vec::new());
    let objects = |of: &dyn Fn(u8) -> usize| present().map(|index| OBJECTS[of(index)].clone()).collect();
    list(ResourceKind::Services, objects(&|index| usize::from(index)));
    list(ResourceKind::EndpointSlices, objects(&|index| 3 + usize::from(index * 8 + endpoints)));
}

fn service(index: u8) -> Event {
    let (v4, v6) = (format!("10.96.0.{index}"), format!("fd00::{index}"));
    let [ips, families] =
        if index == 1 { [json!([v4, v6]), json!(["IPv4", "IPv6"])] } else { [json!([v4]), json!(["IPv4"])] };
    let object = json!({
        "metadata": {"name": format!("s{index}"), "namespace": "n"},
        "spec": {"clusterIP": v4, "clusterIPs": ips, "ipFamilies": families,
                 "sessionAffinity": if index == 2 { "ClientIP" } else { "None" },
                 "ports": [{"name": "a", "port": 80}, {"name": "b", "port": 53, "protocol": "UDP"}]},
    });
    Event::Service(serde_json::from_value(object).unwrap())
}

fn slice(index: u8, endpoints: u8) -> Event {
    let endpoint = |host: u8| {
        let is_ending = host & 1 != 0;
        json!({"addresses": [format!("10.0.{index}.{host}")],
               "conditions": {"ready": !is_ending, "serving": true, "terminating": is_ending}})
    };
    let object = json!({
        "metadata": {"name": format!("e{index}"), "namespace": "n",
                     "labels": {"kubernetes.io/service-name": format!("s{index}")}},
        "addressType": "IPv4",
        "ports": [{"name": "a", "port": 8080}, {"name": "b", "port": 5353, "protocol": "UDP"}],
        "endpoints": (0..endpoints).map(endpoint).collect::<Vec<_>>(),
    });
    Event::EndpointSlice(serde_json::from_value(object).unwrap())
}

fn check(maps: &SimulatedMaps, store: &Store) {
    let rows = resolve(store);
    let cluster_ips = rows.iter().filter(|row| row.source == FrontendSource::ClusterIp);
    let cluster_ips: Vec<_> = cluster_ips.map(|row| row.frontend.address).collect();
    maps.check(&rows, &cluster_ips);
}
