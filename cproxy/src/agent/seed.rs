//! Seed of the choice of backends, which differs between copies of a snapshot.

use rustix::{
    fs::{Mode, OFlags, open},
    io::{self, Errno},
    ioctl::{NoArg, Opcode, ioctl, opcode},
    rand::{GetRandomFlags, getrandom},
    time::{ClockId, clock_gettime},
};

/// RNDRESEEDCRNG (linux/random.h).
const RESEED: Opcode = opcode::none(b'R', 0x07);

/// A new seed.
///
/// Copies of a snapshot have the same state of random numbers. The kernel mixes the processor's into it every minute,
/// after each new VM generation id where it has a driver for that, and on request. Where it may not be asked, the
/// clocks still differ: no two copies take the same nanoseconds from the snapshot to here.
pub(super) fn new_seed() -> io::Result<u64> {
    match reseed_kernel() {
        Ok(()) => {}
        Err(error) => tracing::debug!("the kernel's random numbers cannot be reseeded: {error}"),
    }
    let mut bytes = [0; size_of::<u64>()];
    getrandom(&mut bytes, GetRandomFlags::INSECURE)?;
    let clocks = [ClockId::Monotonic, ClockId::Realtime].map(|clock| clock_gettime(clock).tv_nsec.cast_unsigned());
    Ok(clocks.into_iter().fold(u64::from_ne_bytes(bytes), mixed))
}

/// Has the kernel mix the processor's random numbers and its entropy into its own. Needs CAP_SYS_ADMIN.
fn reseed_kernel() -> Result<(), Errno> {
    let device = open("/dev/urandom", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    // SAFETY: the operation has no argument.
    let operation = unsafe { NoArg::<RESEED>::new() };
    // SAFETY: the device's operation with that code reads and writes no memory of this process.
    unsafe { ioctl(&device, operation) }
}

/// Mixes a number into a seed, each bit into about half of the bits (the finalizer of MurmurHash3).
fn mixed(seed: u64, number: u64) -> u64 {
    let mut bits = seed ^ number;
    for factor in [0xff51_afd7_ed55_8ccd, 0xc4ce_b9fe_1a85_ec53] {
        bits = (bits ^ bits >> 33).wrapping_mul(factor);
    }
    bits ^ bits >> 33
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nanosecond_makes_another_seed() {
        let seeds: std::collections::BTreeSet<_> = (0..1000).map(|nanoseconds| mixed(7, nanoseconds) >> 56).collect();
        // A random byte out of 256 is missing with a probability of 2 percent.
        assert!(seeds.len() > 230, "{}", seeds.len());
        assert_ne!(new_seed().unwrap(), new_seed().unwrap());
    }
}
