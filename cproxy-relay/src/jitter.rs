//! Random numbers: parts of times, so that many clients do not come together, and what tells processes apart.

use std::time::Duration;

/// Random time below a bound.
pub(crate) fn jitter(bound: Duration) -> Duration {
    bound.mul_f64(f64::from(random()) / (f64::from(u32::MAX) + 1.0))
}

fn random() -> u32 {
    let mut bytes = [0; 4];
    // Without random numbers, clients come together; the relay goes on.
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()).ok();
    u32::from_ne_bytes(bytes)
}

/// Number that tells this process from others.
pub(crate) fn process_number() -> u64 {
    let since_1970 = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
    u64::from(random()) << 32 | u64::from(random() ^ since_1970.subsec_nanos())
}
