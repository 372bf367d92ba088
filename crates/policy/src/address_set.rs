//! Sets of addresses that policies name, in slices.

use std::fmt;

use cproxy_core::Address;
use sha2::{Digest as _, Sha256};

use crate::model::{PodSelection, PortName, Scope};

/// Addresses of a slice, at most, but for those that were chosen to be in one slice.
pub const SLICE_ADDRESSES_MAX: usize = 128;

/// First and last of all addresses.
pub(crate) const LOWEST: Address = Address::from_octets([0; 16]);
pub(crate) const HIGHEST: Address = Address::from_octets([u8::MAX; 16]);

/// Name of a set: a hash of its selector, so that all who have the same selector share the set.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SetName(u128);

/// Set with its number of slices, which is a power of two. Another number is another generation of the set: slices of
/// two generations do not make a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SetReference {
    /// Name of the set.
    pub name: SetName,
    /// Number of its slices.
    pub slices: u32,
}

/// Name of a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SliceName {
    /// Set and generation of the slice.
    pub set: SetReference,
    /// Position of the slice.
    pub index: u32,
}

/// Part of a set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressSlice {
    /// Name of the slice.
    pub name: SliceName,
    /// Sorted addresses.
    pub addresses: Vec<Address>,
}

/// Pods whose addresses are sets, by the number of a named port if there is one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GroupKey {
    /// The pods.
    pub(crate) selection: PodSelection,
    /// Port by whose number the pods are divided.
    pub(crate) port: Option<PortName>,
}

/// Hash of an address, whose leading bits are the position of its slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SliceHash(pub(crate) u32);

impl SetName {
    /// Name of the set of a group's pods with this number of the port.
    pub(crate) fn new(key: &GroupKey, number: u16) -> Self {
        let (kind, scope) = match &key.selection.scope {
            Scope::Namespace(name) => ("namespace", name.to_string()),
            Scope::Namespaces(selector) => ("namespaces", selector.to_string()),
        };
        let port = key.port.as_ref().map(|port| format!("{}/{}/{number}", port.name, port.protocol));
        let parts = [kind.to_owned(), scope, key.selection.pods.to_string(), port.unwrap_or_default()];
        let mut hasher = Sha256::new();
        for part in &parts {
            // With its length, a part cannot reach into the next.
            hasher.update((part.len() as u64).to_be_bytes());
            hasher.update(part);
        }
        let hash = hasher.finalize();
        Self(hash.iter().take(16).fold(0, |name, &byte| name << 8 | u128::from(byte)))
    }

    /// Name from its 32 hexadecimal digits.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        let name = u128::from_str_radix(text, 16).ok()?;
        (text.len() == 32 && text.bytes().all(is_digit)).then_some(Self(name))
    }
}

impl SetReference {
    /// Names of all slices.
    pub fn slice_names(self) -> impl Iterator<Item = SliceName> {
        (0..self.slices).map(move |index| SliceName { set: self, index })
    }

    /// Name of the slice that has an address.
    pub(crate) fn slice_of(self, hash: SliceHash) -> SliceName {
        SliceName { set: self, index: hash.index(self.slices) }
    }
}

impl SliceName {
    /// Name from its text, `SET-SLICES-INDEX`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.splitn(3, '-');
        let (name, slices, index) = (parts.next()?, parts.next()?, parts.next()?);
        let number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse::<u32>().ok())?;
        let set = SetReference { name: SetName::parse(name)?, slices: number(slices)? };
        let name = Self { set, index: number(index)? };
        (set.slices.is_power_of_two() && name.index < set.slices).then_some(name)
    }

    /// Hashes of the slice's addresses: the first and the last.
    pub(crate) fn hashes(self) -> (SliceHash, SliceHash) {
        let shift = shift(self.set.slices);
        let first = self.index.checked_shl(shift).unwrap_or(0);
        (SliceHash(first), SliceHash(first | 1_u32.checked_shl(shift).map_or(u32::MAX, |one| one - 1)))
    }
}

impl SliceHash {
    /// Hash of an address. Consecutive addresses are in different slices.
    pub(crate) fn new(address: Address) -> Self {
        let address = u128::from_be_bytes(address.octets());
        let folded = (address >> 64) as u64 ^ (address as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        // The end of MurmurHash3, which lets each bit of the input reach each bit of the result.
        let mixed = (folded ^ folded >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
        let mixed = (mixed ^ mixed >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
        Self((mixed >> 32) as u32)
    }

    /// Position of the slice among so many, a power of two.
    pub(crate) fn index(self, slices: u32) -> u32 {
        self.0.checked_shr(shift(slices)).unwrap_or(0)
    }
}

/// Bits of a hash that are no part of the position.
fn shift(slices: u32) -> u32 {
    u32::BITS - slices.trailing_zeros().min(u32::BITS)
}

impl GroupKey {
    /// Number of the group's port in a pod with these ports; 0 if there is no port.
    pub(crate) fn number(&self, ports: &[crate::model::ContainerPort]) -> Option<u16> {
        let Some(name) = &self.port else { return Some(0) };
        ports.iter().find(|port| port.name == *name).map(|port| port.number)
    }
}

impl fmt::Display for SetName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for SetName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for SliceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}-{}", self.set.name, self.set.slices, self.index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{model::Protocol, selector::LabelSelector};

    fn key(scope: Scope, pods: &str, port: Option<(&str, Protocol)>) -> GroupKey {
        let port = port.map(|(name, protocol)| PortName { name: name.into(), protocol });
        GroupKey { selection: PodSelection { scope, pods: LabelSelector::parse(pods).unwrap() }, port }
    }

    #[test]
    fn equal_selectors_have_one_name_and_others_have_others() {
        let shop = || Scope::Namespace("shop".into());
        let all = || Scope::Namespaces(LabelSelector::default());
        let name = |scope, pods, port, number| SetName::new(&key(scope, pods, port), number);
        let web = name(shop(), "a=1,b=2", None, 0);
        assert_eq!(name(shop(), "b=2,a=1", None, 0), web);
        // A name is for ever: replicas of two versions share it.
        assert_eq!(web.to_string(), "d49ed4cf4ff31130fd8c1784052890aa");
        assert_eq!(SetName::parse(&web.to_string()), Some(web));
        assert_eq!([SetName::parse("d2"), SetName::parse(&"+".repeat(32))], [None, None]);
        let http = Some(("http", Protocol::Tcp));
        let mut names = vec![
            web,
            name(shop(), "a=1", None, 0),
            name(all(), "a=1,b=2", None, 0),
            name(Scope::Namespaces(LabelSelector::parse("shop").unwrap()), "a=1,b=2", None, 0),
            name(shop(), "a=1,b=2", http, 80),
            name(shop(), "a=1,b=2", http, 81),
            name(shop(), "a=1,b=2", Some(("http", Protocol::Udp)), 80),
        ];
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 7);
    }

    #[test]
    fn an_address_is_in_the_slice_whose_hashes_have_its_own() {
        let set = SetName(7);
        for slices in [1_u32, 2, 8, 1024] {
            let mut counts = vec![0; slices as usize];
            for number in 0..64 * slices {
                let hash = SliceHash::new(std::net::IpAddr::from((0x0a00_0000 + number).to_be_bytes()).into());
                let name = SetReference { name: set, slices }.slice_of(hash);
                let (first, last) = name.hashes();
                assert!(name.index < slices && first <= hash && hash <= last, "{name} {hash:?}");
                counts[name.index as usize] += 1;
            }
            assert!(counts.iter().all(|count| (24..=112).contains(count)), "{counts:?}");
        }
        assert_eq!(SliceHash(u32::MAX).index(1), 0);
    }
}
