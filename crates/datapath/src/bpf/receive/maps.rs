//! Maps of received addresses.

use std::{io, path::PathBuf};

use aya::maps::{HashMap, LpmTrie, Map, MapData, MapError, PerCpuArray, SockHash, lpm_trie::Key};
use cproxy_core::{Address, AddressRange, Frontend, Protocol, ReceiveOp, ReceiveTable, ReceivedPort, sort_unique};
use cproxy_ebpf::{
    PROTOCOL_TCP, PROTOCOL_UDP,
    receive::{ANY_V6_ONLY, LISTENERS_MAX, ListenerKey, ReceiveCounter, ReceivedKey, ReceivedWord, SourcePrefix},
};

use super::{COUNTERS, LISTENERS, RECEIVED, ReceivePins, SOURCES};
use crate::bpf::{
    error::{TableError, root_cause},
    open::{Access, open_map},
};

/// Bits of a prefix before the address: those of the group.
const GROUP_BITS: u32 = 32;

/// Counters by their names in the JSON contract.
const NAMES: [(ReceiveCounter, &str); 6] = [
    (ReceiveCounter::Connections, "received_connections"),
    (ReceiveCounter::Datagrams, "received_datagrams"),
    (ReceiveCounter::OtherPorts, "received_other_ports"),
    (ReceiveCounter::NoListener, "received_no_listener"),
    (ReceiveCounter::ListenersLost, "received_listeners_lost"),
    (ReceiveCounter::OtherSources, "received_other_sources"),
];

/// Address and port at which a TCP socket of the pod listens that may be chosen; the zero address is that of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ListeningAt {
    /// Cookie of the network namespace.
    pub netns_cookie: u64,
    /// Address of the socket.
    pub address: Address,
    /// Its port.
    pub port: u16,
}

/// Maps of received addresses. One process writes them: it holds the lock of the pin directory.
pub struct ReceiveMaps {
    received: HashMap<MapData, ReceivedKey, u32>,
    sources: LpmTrie<MapData, SourcePrefix, u32>,
    listeners: SockHash<MapData, ListenerKey>,
}

impl ReceiveMaps {
    /// TCP sockets that listen and may be known, at most.
    pub const LISTENERS_MAX: u32 = LISTENERS_MAX;

    /// Opens the pinned maps, for writing or for reading alone.
    ///
    /// # Errors
    /// One of them cannot be opened.
    pub fn open(pins: &ReceivePins, writes: bool) -> Result<Self, TableError> {
        let access = if writes { Access::ReadWrite } else { Access::ReadOnly };
        let open = |name: &str| {
            let path = pins.object(name);
            let map = open_map(&path, access);
            map.map_err(|error| TableError::Pin(path, io::Error::other(root_cause(&error))))
        };
        let failed = |name: &'static str| move |error| TableError::Open(PathBuf::from(name), error);
        Ok(Self {
            received: HashMap::try_from(Map::HashMap(open(RECEIVED)?)).map_err(failed(RECEIVED))?,
            sources: LpmTrie::try_from(Map::LpmTrie(open(SOURCES)?)).map_err(failed(SOURCES))?,
            listeners: SockHash::try_from(Map::SockHash(open(LISTENERS)?)).map_err(failed(LISTENERS))?,
        })
    }

    /// Content of the maps, without routes.
    ///
    /// # Errors
    /// A map cannot be read.
    pub fn read(&self) -> Result<ReceiveTable, TableError> {
        let mut table = ReceiveTable::default();
        for element in self.received.iter() {
            let (key, word) = element.map_err(|error| TableError::Read(RECEIVED, error))?;
            let (address, word) = (Address::from_words(key.address), ReceivedWord(word));
            let protocol = match key.protocol {
                PROTOCOL_TCP => Protocol::Tcp,
                PROTOCOL_UDP => Protocol::Udp,
                _ => {
                    table.addresses.insert(address);
                    continue;
                }
            };
            let frontend = Frontend { address, port: key.port, protocol };
            table.ports.push(ReceivedPort { frontend, port: word.port(), group: word.group() });
        }
        for key in self.sources.keys() {
            let key = key.map_err(|error| TableError::Read(SOURCES, error))?;
            let [group, address @ ..] = key.data();
            let fixed_bits = u8::try_from(key.prefix_len().saturating_sub(GROUP_BITS)).unwrap_or(u8::MAX);
            table.sources.push((group as u16, AddressRange::new(Address::from_words(address), fixed_bits)));
        }
        Ok(table)
    }

    /// Takes a step. Routes are not the maps'.
    ///
    /// # Errors
    /// The kernel refuses, and the maps are as they were.
    pub fn apply(&mut self, op: ReceiveOp) -> Result<(), TableError> {
        let written = match op {
            ReceiveOp::AddSource(group, range) => self.sources.insert(&prefix(group, range), 1, 0),
            ReceiveOp::RemoveSource(group, range) => self.sources.remove(&prefix(group, range)),
            ReceiveOp::SetPort(ReceivedPort { frontend, port, group }) => {
                self.received.insert(key(frontend), ReceivedWord::new(port, group).0, 0)
            }
            ReceiveOp::RemovePort(frontend) => self.received.remove(&key(frontend)),
            ReceiveOp::AddAddress(address) => self.received.insert(ReceivedKey::of_address(address.words()), 0, 0),
            ReceiveOp::RemoveAddress(address) => self.received.remove(&ReceivedKey::of_address(address.words())),
            ReceiveOp::AddRoute(_) | ReceiveOp::RemoveRoute(_) => Ok(()),
        };
        written.map_err(|error| TableError::Write(format!("{op:?}"), error))
    }

    /// Where TCP sockets listen that may be chosen.
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn listening(&self) -> Result<Vec<ListeningAt>, TableError> {
        let keys = self.listeners.keys().collect::<Result<Vec<_>, _>>();
        let keys = keys.map_err(|error| TableError::Read(LISTENERS, error))?;
        let mut listening: Vec<_> = keys.into_iter().map(ListeningAt::from).collect();
        sort_unique(&mut listening);
        Ok(listening)
    }
}

impl ListeningAt {
    /// Whether the socket is on all addresses of IPv6, and takes no IPv4.
    #[must_use]
    pub fn is_v6_only(&self) -> bool {
        self.address.words() == ANY_V6_ONLY
    }
}

impl From<ListenerKey> for ListeningAt {
    fn from(key: ListenerKey) -> Self {
        let ListenerKey { netns_cookie, address, port, .. } = key;
        Self { netns_cookie, address: Address::from_words(address), port }
    }
}

/// Counters by name.
///
/// # Errors
/// The map cannot be read.
pub fn receive_counters(pins: &ReceivePins) -> Result<Vec<(&'static str, u64)>, TableError> {
    let failed = |error: MapError| TableError::Read(COUNTERS, error);
    let map = open_map(&pins.object(COUNTERS), Access::ReadOnly).map_err(failed)?;
    let map = PerCpuArray::<_, u64>::try_from(Map::PerCpuArray(map)).map_err(failed)?;
    let sum = |counter: ReceiveCounter| {
        Ok::<u64, MapError>(map.get(&(counter as u32), 0)?.iter().fold(0, |sum, &one| sum.wrapping_add(one)))
    };
    NAMES.into_iter().map(|(counter, name)| Ok((name, sum(counter).map_err(failed)?))).collect()
}

fn key(Frontend { address, port, protocol }: Frontend) -> ReceivedKey {
    let protocol = match protocol {
        Protocol::Tcp => PROTOCOL_TCP,
        Protocol::Udp => PROTOCOL_UDP,
    };
    ReceivedKey { address: address.words(), port, protocol, padding: 0 }
}

fn prefix(group: u16, range: AddressRange) -> Key<SourcePrefix> {
    let [a, b, c, d] = range.first().words();
    Key::new(GROUP_BITS + u32::from(range.fixed_bits()), [group.into(), a, b, c, d])
}
