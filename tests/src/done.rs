//! End signal for threads that run beside a test.

use std::sync::atomic::{AtomicBool, Ordering};

/// Guard that tells threads to stop when it is dropped, also when the test fails. Otherwise a wait for them would never
/// end.
#[derive(Debug)]
pub struct Done<'d>(pub &'d AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
