//! The end of what a thread does again and again beside a test.

use std::sync::atomic::{AtomicBool, Ordering};

/// Tells threads to stop when it is dropped, also when the test fails: whoever waits for them would wait for ever.
#[derive(Debug)]
pub struct Done<'d>(pub &'d AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
