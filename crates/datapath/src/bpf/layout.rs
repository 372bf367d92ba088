//! The layout of the maps belongs to its version: any agent of a version reads the maps in the pin directory of that
//! version, also those of another build.

use std::{collections::BTreeMap, fmt::Write};

use aya_obj::{Map, Object};
use cproxy_ebpf::{LAYOUT_VERSION, layout, policy::POLICY_LAYOUT_VERSION, receive::RECEIVE_LAYOUT_VERSION};

use super::object::ProgramSet;

/// 64-bit FNV-1a.
fn fingerprint(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

fn describe(name: &str, map: &Map, text: &mut String) {
    let (kind, key, value) = (map.map_type(), map.key_size(), map.value_size());
    let (entries, flags) = (map.max_entries(), map.map_flags());
    writeln!(text, "map {name} type {kind} key {key} value {value} entries {entries} flags {flags}").unwrap();
    if let Some(inner) = map.inner() {
        describe(&format!("{name}, inner"), &inner, text);
    }
}

/// Every field of every type that lies in a map, every constant and function that both sides share, and every map of
/// the programs' object but those of another version.
fn text_of(describe_shared: fn(layout::LineSink<'_>), set: ProgramSet, of_others: &[&str]) -> String {
    let mut text = String::new();
    describe_shared(&mut |of, name, value| writeln!(text, "{of} {name} {value}").unwrap());
    let object = Object::parse(&set.object().unwrap()).unwrap();
    let maps: BTreeMap<_, _> = object.maps.iter().filter(|(name, _)| !of_others.contains(&&***name)).collect();
    maps.into_iter().for_each(|(name, map)| describe(name, map, &mut text));
    text
}

#[test]
fn the_layout_belongs_to_its_version() {
    let text = text_of(layout::describe, ProgramSet::Plain, &[]);
    let found = (LAYOUT_VERSION, fingerprint(&text));
    let message = "the layout has changed: raise LAYOUT_VERSION and write its fingerprint here";
    assert_eq!(found, (8, 0xdd8e_d319_c2b1_8cda), "{message}; the layout is now\n{text}");
}

#[test]
fn the_layout_of_network_policy_belongs_to_its_version() {
    let text = text_of(layout::policy::describe, ProgramSet::Policy, &["OWN_ADDRESSES", "SOCKETS"]);
    let found = (POLICY_LAYOUT_VERSION, fingerprint(&text));
    let message =
        "the layout of network policy has changed: raise POLICY_LAYOUT_VERSION and write its fingerprint here";
    assert_eq!(found, (1, 0x3fb0_08ba_b38b_5260), "{message}; the layout is now\n{text}");
}

#[test]
fn the_layout_of_received_addresses_belongs_to_its_version() {
    let of_others = ["OWN_ADDRESSES", "SOCKETS"];
    let mut text = text_of(layout::receive::describe, ProgramSet::Receive, &of_others);
    let is_of_policy = |line: &&str| !line.starts_with("map POLICY_");
    text = text.lines().filter(is_of_policy).map(|line| format!("{line}\n")).collect();
    let found = (RECEIVE_LAYOUT_VERSION, fingerprint(&text));
    let message =
        "the layout of received addresses has changed: raise RECEIVE_LAYOUT_VERSION and write its fingerprint here";
    assert_eq!(found, (1, 0x08be_1ac1_f23c_0bd2), "{message}; the layout is now\n{text}");
}
