//! Signals held back from a thread.

use std::{mem::MaybeUninit, ptr};

/// All signals blocked for this thread, until it is dropped. The verifier gives up with EAGAIN when one is pending
/// (kernel/bpf/verifier.c, `do_check`), and a question about a feature of the kernel that ends so counts as a no.
pub(super) struct SignalsBlocked {
    before: libc::sigset_t,
}

impl SignalsBlocked {
    pub(super) fn new() -> Self {
        let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: sigfillset initialises the set that it is given.
        unsafe { libc::sigfillset(all.as_mut_ptr()) };
        // SAFETY: both point to sets, and the first one is initialised.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) };
        // SAFETY: the call fails for another first argument only, and so has written the former set.
        Self { before: unsafe { before.assume_init() } }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: the set is the thread's former one, and the one before it is not asked for.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut()) };
    }
}
