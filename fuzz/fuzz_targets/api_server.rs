//! An API server that follows the input as a script, action by action: see `cproxy_testing::simulated`.

#![no_main]

use cproxy_testing::simulated::play;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|script: &[u8]| {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    runtime.block_on(play(script));
});
