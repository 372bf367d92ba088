//! Packed members of a set: an IPv4 backend takes 6 bytes.

use crate::{
    Backend, Family, Members,
    packed::{Reader, Writer},
};

/// Packed members; equal if the members are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PackedSet {
    backends: Box<[u8]>,
    pub(super) eligible: u32,
    pub(super) drops: bool,
}

impl PackedSet {
    pub(super) fn of(members: &Members) -> Self {
        let family = family_of(&members.backends);
        let mut writer = Writer::with_capacity(1 + members.backends.len() * backend_bytes(family));
        writer.byte(u8::from(family == Family::V6));
        for backend in &*members.backends {
            writer.address(backend.address, family);
            let [high, low] = backend.port.to_be_bytes();
            writer.byte(high);
            writer.byte(low);
        }
        Self { backends: writer.finish_alone(), eligible: members.eligible as u32, drops: members.drops }
    }

    /// Number of backends in both runs.
    pub(super) fn count(&self) -> u32 {
        let bytes = self.backends.len().saturating_sub(1);
        (bytes / backend_bytes(self.family())) as u32
    }

    fn family(&self) -> Family {
        if self.backends.first() == Some(&0) { Family::V4 } else { Family::V6 }
    }

    pub(super) fn unpack(&self) -> Members {
        let mut reader = Reader::new(&self.backends);
        reader.byte();
        let family = self.family();
        let backends = (0..self.count()).map(|_| Backend {
            address: reader.address(family),
            port: u16::from_be_bytes([reader.byte(), reader.byte()]),
        });
        Members { backends: backends.collect(), eligible: self.eligible as usize, drops: self.drops }
    }
}

/// IPv4 if all backends are; the 16 bytes of IPv6 hold either.
fn family_of(backends: &[Backend]) -> Family {
    let is_v4 = backends.iter().all(|backend| backend.address.family() == Family::V4);
    if is_v4 { Family::V4 } else { Family::V6 }
}

fn backend_bytes(family: Family) -> usize {
    match family {
        Family::V4 => 6,
        Family::V6 => 18,
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
        for (eligible, serving) in [(vec![], vec![]), (vec![v4], vec![]), (vec![v6], vec![v6]), (vec![v4], vec![v6])] {
            let members = Members::new(&eligible, &serving, true);
            assert_eq!(PackedSet::of(&members).unpack(), members);
        }
    }
}
