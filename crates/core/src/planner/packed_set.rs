//! Packed members of a set: an IPv4 backend takes 4 bytes, or 6 in a set with several ports.

use crate::{
    Address, Backend, Family, Members,
    packed::{Reader, Writer},
};

/// Bits of the first byte: all addresses are IPv4; all ports are the same, which follows once.
const IS_V4: u8 = 1;
const HAS_ONE_PORT: u8 = 2;

/// Packed members; equal if the members are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PackedSet {
    backends: Box<[u8]>,
    pub(super) eligible: u32,
    pub(super) drops: bool,
}

impl PackedSet {
    pub(super) fn of(members: &Members) -> Self {
        let form = Form::of(&members.backends);
        let mut writer = Writer::with_capacity(form.first_bytes() + members.backends.len() * form.backend_bytes());
        writer.byte(form.0);
        if let (true, Some(backend)) = (form.has_one_port(), members.backends.first()) {
            writer.short(backend.port);
        }
        for backend in &*members.backends {
            writer.address(backend.address, form.family());
            if !form.has_one_port() {
                writer.short(backend.port);
            }
        }
        Self { backends: writer.finish_alone(), eligible: members.eligible as u32, drops: members.drops }
    }

    /// Number of backends in both runs.
    pub(super) fn count(&self) -> u32 {
        let form = self.form();
        let bytes = self.backends.len().saturating_sub(form.first_bytes());
        (bytes / form.backend_bytes()) as u32
    }

    fn form(&self) -> Form {
        Form(self.backends.first().copied().unwrap_or_default())
    }

    pub(super) fn unpack(&self) -> Members {
        let (mut reader, form) = (Reader::new(&self.backends), self.form());
        reader.byte();
        let one_port = form.has_one_port().then(|| reader.short());
        let backends = (0..self.count()).map(|_| Backend {
            address: reader.address(form.family()),
            port: one_port.unwrap_or_else(|| reader.short()),
        });
        Members { backends: backends.collect(), eligible: self.eligible as usize, drops: self.drops }
    }
}

/// First byte.
#[derive(Clone, Copy)]
struct Form(u8);

impl Form {
    fn of(backends: &[Backend]) -> Self {
        let is_v4 = backends.iter().all(|backend| backend.address.family() == Family::V4);
        let has_one_port = backends.first().is_some_and(|first| backends.iter().all(|other| other.port == first.port));
        Self(if is_v4 { IS_V4 } else { 0 } | if has_one_port { HAS_ONE_PORT } else { 0 })
    }

    /// IPv4 if all backends are; the 16 bytes of IPv6 hold either.
    fn family(self) -> Family {
        if self.0 & IS_V4 != 0 { Family::V4 } else { Family::V6 }
    }

    fn has_one_port(self) -> bool {
        self.0 & HAS_ONE_PORT != 0
    }

    /// Length of what precedes the backends.
    fn first_bytes(self) -> usize {
        if self.has_one_port() { 3 } else { 1 }
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
            (vec![], vec![], 1),
            (vec![v4], vec![], 3 + 4),
            (vec![v4, same_port], vec![], 3 + 2 * 4),
            (vec![v6], vec![v6], 3 + 2 * 16),
            (vec![v4], vec![v6], 1 + 2 * 18),
            (vec![v4], vec![backend("10.0.0.2", 1)], 1 + 2 * 6),
        ] {
            let members = Members::new(&eligible, &serving, true);
            let packed = PackedSet::of(&members);
            assert_eq!((packed.unpack(), packed.backends.len()), (members, bytes));
        }
    }
}
