//! Histories of an API server, of relays that follow it, and of their clients. Four bytes are a step.

#![no_main]

use cproxy_testing::relay_history::play;
use libfuzzer_sys::fuzz_target;

/// Steps of one history: enough for everything, and fast.
const STEPS_MAX: usize = 300;

fuzz_target!(|input: &[u8]| {
    let (steps, _) = input.as_chunks();
    play(steps.get(..STEPS_MAX).unwrap_or(steps));
});
