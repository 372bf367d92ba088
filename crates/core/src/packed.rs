//! Rows as bytes: one small allocation for each of thousands of objects.
//!
//! Only this module's [`Writer`] makes such bytes, so reading them cannot fail; beyond their end, zeros are read.

use std::{net::IpAddr, sync::Arc};

use super::{Address, AddressRange, Family, Protocol};

/// Packed row of an object; equal if the rows are.
pub(super) type Packed = Arc<[u8]>;

/// Writes one value after the other.
#[derive(Default)]
pub(super) struct Writer(Vec<u8>);

impl Writer {
    pub(super) fn with_capacity(bytes: usize) -> Self {
        Self(Vec::with_capacity(bytes))
    }

    pub(super) fn byte(&mut self, byte: u8) {
        self.0.push(byte);
    }

    /// Writes two bytes.
    pub(super) fn short(&mut self, number: u16) {
        self.0.extend_from_slice(&number.to_be_bytes());
    }

    /// Writes seven bits to a byte, least significant first, so that small numbers are short.
    pub(super) fn number(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.0.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.0.push(number as u8);
    }

    pub(super) fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.0.extend_from_slice(text.as_bytes());
    }

    /// Writes an address of a family that the reader knows.
    pub(super) fn address(&mut self, address: Address, family: Family) {
        self.0.extend_from_slice(address.octets().get(skipped(family)..).unwrap_or_default());
    }

    /// Writes an address of either family.
    pub(super) fn any_address(&mut self, address: Address) {
        let family = address.family();
        self.byte(u8::from(family == Family::V6));
        self.address(address, family);
    }

    /// Writes the number of items, then each item.
    pub(super) fn list<T>(&mut self, items: &[T], mut write: impl FnMut(&mut Self, &T)) {
        self.number(items.len() as u64);
        items.iter().for_each(|item| write(self, item));
    }

    pub(super) fn finish(self) -> Packed {
        self.0.into()
    }

    /// The bytes, for a single owner.
    pub(super) fn finish_alone(self) -> Box<[u8]> {
        self.0.into()
    }
}

/// Reads the values of a [`Writer`] in the order in which they were written.
pub(super) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn new(packed: &'a [u8]) -> Self {
        Self(packed)
    }

    /// The bytes that have not been read.
    pub(super) fn rest(self) -> &'a [u8] {
        self.0
    }

    fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at_checked(count).unwrap_or((self.0, &[]));
        self.0 = rest;
        bytes
    }

    fn octets<const COUNT: usize>(&mut self) -> [u8; COUNT] {
        self.bytes(COUNT).first_chunk().copied().unwrap_or([0; COUNT])
    }

    pub(super) fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or_default()
    }

    pub(super) fn short(&mut self) -> u16 {
        u16::from_be_bytes([self.byte(), self.byte()])
    }

    pub(super) fn number(&mut self) -> u64 {
        let mut number = 0;
        for shift in (0..u64::BITS).step_by(7) {
            let byte = self.byte();
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                break;
            }
        }
        number
    }

    pub(super) fn port(&mut self) -> u16 {
        self.number() as u16
    }

    pub(super) fn text(&mut self) -> &'a str {
        let length = self.number() as usize;
        std::str::from_utf8(self.bytes(length)).unwrap_or_default()
    }

    pub(super) fn address(&mut self, family: Family) -> Address {
        match family {
            Family::V4 => IpAddr::from(self.octets::<4>()).into(),
            Family::V6 => Address::from_octets(self.octets()),
        }
    }

    pub(super) fn any_address(&mut self) -> Address {
        let family = if self.byte() == 0 { Family::V4 } else { Family::V6 };
        self.address(family)
    }

    pub(super) fn list<T, List: FromIterator<T>>(&mut self, mut read: impl FnMut(&mut Self) -> T) -> List {
        let count = self.number();
        (0..count).map(|_| read(self)).collect()
    }
}

/// Number of leading bytes that all addresses of a family share.
fn skipped(family: Family) -> usize {
    match family {
        Family::V4 => 12,
        Family::V6 => 0,
    }
}

impl Address {
    /// Length of an address of a family that the reader knows.
    pub(super) fn packed_bytes(family: Family) -> usize {
        size_of::<Self>() - skipped(family)
    }
}

impl AddressRange {
    pub(super) fn pack(&self, writer: &mut Writer) {
        writer.any_address(self.first);
        writer.byte(self.fixed);
    }

    pub(super) fn unpack(reader: &mut Reader<'_>) -> Self {
        Self { first: reader.any_address(), fixed: reader.byte() }
    }
}

impl Protocol {
    pub(super) fn pack(self, writer: &mut Writer) {
        writer.byte(u8::from(self == Self::Udp));
    }

    pub(super) fn unpack(reader: &mut Reader<'_>) -> Self {
        if reader.byte() == 0 { Self::Tcp } else { Self::Udp }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse_address;

    #[test]
    fn values_are_read_as_they_were_written() {
        let numbers = [0, 1, 0x7f, 0x80, 0x3fff, 0x4000, u64::from(u32::MAX), u64::MAX];
        let addresses = ["10.0.0.1", "fd00::1", "::"].map(|text| parse_address(text).unwrap());
        let mut writer = Writer::default();
        writer.list(&numbers, |writer, &number| writer.number(number));
        writer.text("näme");
        writer.text("");
        writer.list(&addresses, |writer, &address| writer.any_address(address));
        writer.address(addresses[0], Family::V4);
        writer.byte(7);
        let packed = writer.finish();
        let mut reader = Reader::new(&packed);
        assert_eq!(reader.list::<_, Vec<_>>(Reader::number), numbers);
        assert_eq!((reader.text(), reader.text()), ("näme", ""));
        assert_eq!(reader.list::<_, Vec<_>>(Reader::any_address), addresses);
        assert_eq!((reader.address(Family::V4), reader.byte()), (addresses[0], 7));
        assert_eq!((reader.byte(), reader.number(), reader.text()), (0, 0, ""), "nothing is left");
    }
}
