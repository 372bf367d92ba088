//! Calls that each wait for a grace period, made at the same time.

use std::{panic::resume_unwind, thread};

/// Runs a call for each item, all at the same time, and returns the outcomes in their order. Where no thread can be
/// had, they are run one after the other.
pub(super) fn together<T: Copy + Send, R: Send>(items: &[T], call: impl Fn(T) -> R + Sync) -> Vec<R> {
    let Some((&last, others)) = items.split_last() else { return Vec::new() };
    let call = &call;
    thread::scope(|scope| {
        // Their stacks are of the usual size: the C library keeps them for the next threads.
        let spawn = |&item: &T| (thread::Builder::new().spawn_scoped(scope, move || call(item)), item);
        let running: Vec<_> = others.iter().map(spawn).collect();
        let last = call(last);
        let ended = running.into_iter().map(|(spawned, item)| match spawned {
            Ok(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
            Err(_) => call(item),
        });
        ended.chain([last]).collect()
    })
}
