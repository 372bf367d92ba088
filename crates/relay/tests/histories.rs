//! Random histories of an API server, of relays and of their clients, against a naive model.

#![expect(clippy::expect_used, clippy::indexing_slicing, clippy::panic, reason = "a failed assertion is a failed test")]

#[path = "../../../fuzz/src/relay_client.rs"]
pub mod relay_client;
#[path = "../../../fuzz/src/relay_history.rs"]
pub mod relay_history;

use proptest::prelude::*;

use self::relay_history::play;

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(500) })]

    #[test]
    fn each_client_has_what_the_api_server_has_in_the_end(steps in prop::collection::vec(any::<[u8; 4]>(), 0..200)) {
        play(&steps);
    }
}
