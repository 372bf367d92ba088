//! The table as it lies in BPF maps: what the agent writes and the programs read.
//!
//! Only integers and arrays cross this boundary, with explicit padding, so that both compilers agree on every byte.
//! Any change of a size, an offset or a meaning needs a new [`LAYOUT_VERSION`]: the version is part of the pin path, so
//! an agent never writes into maps that older programs read.
//!
//! ```text
//! FRONTENDS  hash   FrontendKey -> SetId
//! SETS       array  SetId       -> SetWord   (one atomic 64-bit word: where the set lies and how large it is)
//! BACKENDS   array  slot        -> Backend
//! SOCKETS    sk_storage         -> SocketState
//! ```
#![no_std]

/// Version of everything in this file; part of the pin path (`<pin-dir>/v1`).
pub const LAYOUT_VERSION: u32 = 1;

/// Most frontends (address, port, protocol) that `FRONTENDS` holds.
pub const FRONTENDS_MAX: u32 = 65_536;
/// Most sets that `SETS` holds.
pub const SETS_MAX: u32 = 65_536;
/// Most backend slots that `BACKENDS` holds.
pub const BACKENDS_MAX: u32 = 262_144;

/// `IPPROTO_TCP`.
pub const PROTOCOL_TCP: u8 = 6;
/// `IPPROTO_UDP`.
pub const PROTOCOL_UDP: u8 = 17;

/// Third word of an IPv4-mapped IPv6 address (RFC 4291, 2.5.5.2), in network order as the kernel keeps it.
pub const V4_MAPPED_WORD: u32 = u32::from_ne_bytes([0, 0, 0xff, 0xff]);

/// Puts an IPv4 address, in network order, into the one 16-byte address form.
#[inline(always)]
#[must_use]
pub const fn v4_mapped(address: u32) -> [u32; 4] {
    [0, 0, V4_MAPPED_WORD, address]
}

/// What a client connects to: the key of `FRONTENDS`. 20 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FrontendKey {
    /// Address in network order, IPv4 as IPv4-mapped.
    pub address: [u32; 4],
    /// Port in network order.
    pub port: u16,
    /// [`PROTOCOL_TCP`] or [`PROTOCOL_UDP`].
    pub protocol: u8,
    /// Padding, always 0: the kernel hashes every byte of a key.
    pub zero: u8,
}

/// Index into `SETS`: the value of `FRONTENDS`. It never changes while the frontend belongs to the same Service port, so
/// endpoints change by one atomic store into `SETS`, whatever the number of frontends.
pub type SetId = u32;

/// One backend: an element of `BACKENDS`. 20 bytes; array elements are [`BACKEND_STRIDE_BYTES`] apart.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Backend {
    /// Address in network order, in the same form as its frontend's.
    pub address: [u32; 4],
    /// Port in network order.
    pub port: u16,
    /// Padding, always 0.
    pub zero: u16,
}

/// Distance between two elements of `BACKENDS` in its mapped memory: the kernel rounds array elements up to 8 bytes
/// (kernel/bpf/arraymap.c, `array_map_alloc`).
pub const BACKEND_STRIDE_BYTES: usize = size_of::<Backend>().next_multiple_of(8);

/// Where one set of backends lies: an element of `SETS`, written and read as a single 64-bit word so that no program
/// ever sees half of a change.
///
/// Bits 0..32 are the first slot in `BACKENDS`; bits 32..48 count the eligible backends, which come first; bits 48..64
/// are reserved (0). A set without eligible backends refuses connections.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SetWord(pub u64);

impl SetWord {
    /// A set without backends.
    pub const EMPTY: Self = Self(0);

    /// A set of `count` backends from `first_slot` on.
    #[inline(always)]
    #[must_use]
    pub const fn new(first_slot: u32, count: u16) -> Self {
        Self((first_slot as u64) | ((count as u64) << 32))
    }

    /// The slot of its first backend.
    #[inline(always)]
    #[must_use]
    pub const fn first_slot(self) -> u32 {
        self.0 as u32
    }

    /// How many eligible backends it has.
    #[inline(always)]
    #[must_use]
    pub const fn count(self) -> u32 {
        (self.0 >> 32) as u32 & 0xffff
    }
}

/// Most backends of one set: what [`SetWord`] can count.
pub const SET_BACKENDS_MAX: usize = u16::MAX as usize;

/// What cproxy knows of one socket: the value of `SOCKETS`. 4 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketState {
    /// [`SOCKET_UNTRANSLATED`] or 0.
    pub flags: u32,
}

/// This socket is the agent's own and is never translated.
pub const SOCKET_UNTRANSLATED: u32 = 1;

/// Maps a random number onto `0..count` with equal weight (up to `count` / 2^32), without a division.
#[inline(always)]
#[must_use]
pub const fn choose(random: u32, count: u32) -> u32 {
    ((random as u64 * count as u64) >> 32) as u32
}

const _: () = assert!(size_of::<FrontendKey>() == 20 && align_of::<FrontendKey>() == 4);
const _: () = assert!(size_of::<Backend>() == 20 && align_of::<Backend>() == 4);
const _: () = assert!(size_of::<SetWord>() == 8);
const _: () = assert!(size_of::<SocketState>() == 4);
const _: () = assert!(BACKEND_STRIDE_BYTES == 24);

#[cfg(feature = "user")]
mod user {
    use super::{FrontendKey, SocketState};

    // SAFETY: repr(C) with explicit padding and integers only: every byte is initialised and any bit pattern is valid.
    unsafe impl aya::Pod for FrontendKey {}
    // SAFETY: repr(C), one integer.
    unsafe impl aya::Pod for SocketState {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_word_gives_back_what_was_put_in() {
        for (first_slot, count) in [(0, 0), (1, 1), (u32::MAX, u16::MAX), (262_143, 65_535), (7, 0)] {
            let word = SetWord::new(first_slot, count);
            assert_eq!((word.first_slot(), word.count()), (first_slot, u32::from(count)));
        }
    }

    #[test]
    fn choose_covers_the_whole_range_and_nothing_else() {
        for count in [1, 2, 3, 7, 100, 65_535] {
            assert_eq!(choose(0, count), 0);
            assert_eq!(choose(u32::MAX, count), count - 1);
        }
    }

    #[test]
    fn choose_is_even() {
        let mut hits = [0u32; 7];
        (0..=u32::MAX).step_by(997).for_each(|random| hits[choose(random, 7) as usize] += 1);
        let (least, most) = (hits.iter().min().unwrap(), hits.iter().max().unwrap());
        assert!(most - least <= 2, "{hits:?}");
    }

    /// A change of this file that moves a field must come with a new layout version; the digest is of the layout as
    /// both sides see it.
    #[test]
    fn the_layout_belongs_to_its_version() {
        let layout = (
            LAYOUT_VERSION,
            [
                size_of::<FrontendKey>(),
                core::mem::offset_of!(FrontendKey, address),
                core::mem::offset_of!(FrontendKey, port),
                core::mem::offset_of!(FrontendKey, protocol),
            ],
            [size_of::<Backend>(), core::mem::offset_of!(Backend, address), core::mem::offset_of!(Backend, port)],
            [size_of::<SetId>(), size_of::<SetWord>(), size_of::<SocketState>()],
            [FRONTENDS_MAX, SETS_MAX, BACKENDS_MAX],
            SetWord::new(0x0102_0304, 0x0506).0,
        );
        assert_eq!(
            layout,
            (1, [20, 0, 16, 18], [20, 0, 16], [4, 8, 4], [65_536, 65_536, 262_144], 0x0506_0102_0304),
            "the layout changed: raise LAYOUT_VERSION and write the new layout here"
        );
    }
}
