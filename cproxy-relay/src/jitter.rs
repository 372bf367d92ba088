//! Random parts of times, so that many clients do not come together.

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
