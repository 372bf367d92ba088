//! Counters of the programs.

use std::os::fd::AsFd as _;

use aya::maps::{HashMap, Map, MapError, PerCpuArray};
use cproxy_ebpf::{
    AFFINITY_MAX, AffinityKey, Counter, FlowKey, FlowValue, TCP_PLACE_CLOSED, TCP_PLACE_FREE, TCP_WITHOUT_PLACE,
    UDP_FLOWS_MAX, tcp_level_places,
};

use super::{
    error::TableError,
    open::{Access, open_map},
    pins::PinDir,
    syscalls::array_elements,
    tcp_levels::Levels,
    tcp_places::TCP_PLACES_MAX,
};

/// Their names in the JSON contract.
const NAMES: [(Counter, &str); 7] = [
    (Counter::Forwarded, "forwarded"),
    (Counter::Refused, "refused"),
    (Counter::Dropped, "dropped"),
    (Counter::StateLost, "state_lost"),
    (Counter::AffinityLost, "affinity_lost"),
    (Counter::UdpFlowsInserted, "udp_flows_inserted"),
    (Counter::UdpFlowsRemoved, "udp_flows_removed"),
];

/// Reads all counters, by name, and how full `AFFINITY`, `UDP_FLOWS` and `TCP_OWNERS` are.
///
/// # Errors
/// A map is missing or may not be used.
pub fn read_counters(pins: &PinDir) -> Result<Vec<(&'static str, u64)>, TableError> {
    let open = |name: &'static str| {
        let failed = move |error| TableError::Open(pins.object(name), error);
        Ok::<_, TableError>((open_map(&pins.object(name), Access::ReadOnly).map_err(failed)?, failed))
    };
    let (map, failed) = open("COUNTERS")?;
    let map = PerCpuArray::<_, u64>::try_from(Map::PerCpuArray(map)).map_err(failed)?;
    let sum = |counter: Counter| {
        Ok::<u64, MapError>(map.get(&(counter as u32), 0)?.iter().fold(0, |sum, &one| sum.wrapping_add(one)))
    };
    let mut counters = Vec::new();
    for (counter, name) in NAMES {
        counters.push((name, sum(counter).map_err(|error| TableError::Read("COUNTERS", error))?));
    }
    let (map, failed) = open("AFFINITY")?;
    let clients = HashMap::<_, AffinityKey, u64>::try_from(Map::LruHashMap(map)).map_err(failed)?;
    let occupied = clients.keys().filter(Result::is_ok).count() as u64;
    counters.extend([("affinity_clients", occupied), ("affinity_clients_max", AFFINITY_MAX.into())]);
    let (map, failed) = open("UDP_FLOWS")?;
    let flows = HashMap::<_, FlowKey, FlowValue>::try_from(Map::LruHashMap(map)).map_err(failed)?;
    let occupied = flows.keys().filter(Result::is_ok).count() as u64;
    let sum = |counter| sum(counter).map_err(|error| TableError::Read("COUNTERS", error));
    let remaining = sum(Counter::UdpFlowsInserted)?.saturating_sub(sum(Counter::UdpFlowsRemoved)?);
    counters.extend([
        ("udp_flows", occupied),
        ("udp_flows_max", UDP_FLOWS_MAX.into()),
        ("udp_flows_evicted", remaining.saturating_sub(occupied)),
    ]);
    let (map, _) = open("TCP_OWNERS")?;
    let owners = array_elements::<u64>(map.fd().as_fd(), 0, TCP_WITHOUT_PLACE + 1);
    let mut owners = owners.map_err(|error| TableError::Pin(pins.object("TCP_OWNERS"), error))?;
    // The last element is a counter.
    let without_place = owners.pop().unwrap_or_default();
    let mut room = owners.len();
    for level in Levels::open(pins, Access::ReadOnly)?.all()? {
        let more = array_elements::<u64>(level.owners.fd().as_fd(), 0, tcp_level_places(level.spec.level));
        owners.extend(more.map_err(|error| TableError::Pin(pins.object("TCP_OWNERS"), error))?);
        room = owners.len();
    }
    let places = owners.iter().filter(|owner| ![TCP_PLACE_FREE, TCP_PLACE_CLOSED].contains(owner)).count() as u64;
    counters.extend([
        ("tcp_places", places),
        ("tcp_places_room", room as u64),
        ("tcp_places_max", TCP_PLACES_MAX.into()),
        ("tcp_without_place", without_place),
    ]);
    Ok(counters)
}
