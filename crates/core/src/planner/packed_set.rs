//! Packed members of a set: an IPv4 backend takes 4 bytes, or 6 in a set with several ports.

use crate::{
    Address, Backend, Family, Members,
    packed::{Reader, Writer},
};

/// Bits of the first byte: all addresses are IPv4; all ports are the same, which follows once; calls are dropped.
const IS_V4: u8 = 1;
const HAS_ONE_PORT: u8 = 2;
const DROPS: u8 = 4;

/// Packed members; equal if the members are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PackedSet(Box<[u8]>);

/// The head of a packed set, and the bytes of its backends.
struct Parts<'a> {
    form: Form,
    eligible: u32,
    one_port: Option<u16>,
    backends: &'a [u8],
}

impl PackedSet {
    pub(super) fn of(members: &Members) -> Self {
        let form = Form::of(members);
        let mut writer = Writer::with_capacity(form.first_bytes() + members.backends.len() * form.backend_bytes());
        writer.byte(form.0);
        writer.number(members.eligible as u64);
        if let (true, Some(backend)) = (form.has_one_port(), members.backends.first()) {
            writer.short(backend.port);
        }
        for backend in &*members.backends {
            writer.address(backend.address, form.family());
            if !form.has_one_port() {
                writer.short(backend.port);
            }
        }
        Self(writer.finish_alone())
    }

    /// Number of backends in both runs.
    pub(super) fn count(&self) -> u32 {
        self.parts().count()
    }

    /// Number of backends in the first run.
    pub(super) fn eligible(&self) -> u32 {
        self.parts().eligible
    }

    pub(super) fn drops(&self) -> bool {
        self.parts().form.drops()
    }

    pub(super) fn unpack(&self) -> Members {
        let parts = self.parts();
        let mut reader = Reader::new(parts.backends);
        let backends = (0..parts.count()).map(|_| Backend {
            address: reader.address(parts.form.family()),
            port: parts.one_port.unwrap_or_else(|| reader.short()),
        });
        Members { backends: backends.collect(), eligible: parts.eligible as usize, drops: parts.form.drops() }
    }

    fn parts(&self) -> Parts<'_> {
        let mut reader = Reader::new(&self.0);
        let form = Form(reader.byte());
        let eligible = reader.number() as u32;
        let one_port = form.has_one_port().then(|| reader.short());
        Parts { form, eligible, one_port, backends: reader.rest() }
    }
}

impl Parts<'_> {
    fn count(&self) -> u32 {
        (self.backends.len() / self.form.backend_bytes()) as u32
    }
}

/// First byte.
#[derive(Clone, Copy)]
struct Form(u8);

impl Form {
    fn of(members: &Members) -> Self {
        let backends = &members.backends;
        let is_v4 = backends.iter().all(|backend| backend.address.family() == Family::V4);
        let has_one_port = backends.first().is_some_and(|first| backends.iter().all(|other| other.port == first.port));
        let bits = [(is_v4, IS_V4), (has_one_port, HAS_ONE_PORT), (members.drops, DROPS)];
        Self(bits.into_iter().filter(|(is_set, _)| *is_set).fold(0, |byte, (_, bit)| byte | bit))
    }

    /// IPv4 if all backends are; the 16 bytes of IPv6 hold either.
    fn family(self) -> Family {
        if self.0 & IS_V4 != 0 { Family::V4 } else { Family::V6 }
    }

    fn has_one_port(self) -> bool {
        self.0 & HAS_ONE_PORT != 0
    }

    fn drops(self) -> bool {
        self.0 & DROPS != 0
    }

    /// Length of what precedes the backends, of which fewer than 128 are eligible.
    fn first_bytes(self) -> usize {
        if self.has_one_port() { 4 } else { 2 }
    }

    fn backend_bytes(self) -> usize {
        Address::packed_bytes(self.family()) + if self.has_one_port() { 0 } else { 2 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse_address;

    #[test]
    fn members_come_back_as_they_were() {
        let backend = |text: &str, port| Backend { address: parse_address(text).unwrap(), port };
        let (v4, v6) = (backend("10.0.0.1", 0x1234), backend("fd00::1", 65_535));
        let same_port = backend("10.0.0.2", 0x1234);
        for (eligible, serving, bytes) in [
            (vec![], vec![], 2),
            (vec![v4], vec![], 4 + 4),
            (vec![v4, same_port], vec![], 4 + 2 * 4),
            (vec![v4; 200], vec![], 5 + 200 * 4),
            (vec![v6], vec![v6], 4 + 2 * 16),
            (vec![v4], vec![v6], 2 + 2 * 18),
            (vec![v4], vec![backend("10.0.0.2", 1)], 2 + 2 * 6),
        ] {
            for drops in [false, true] {
                let members = Members::new(&eligible, &serving, drops);
                let packed = PackedSet::of(&members);
                assert_eq!((packed.eligible() as usize, packed.drops()), (members.eligible, drops));
                assert_eq!((packed.unpack(), packed.0.len()), (members, bytes));
            }
        }
    }
}
