//! Random histories of an API server, of relays and of their clients, against a naive model.

use cproxy_testing::relay_history::play;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(500) })]

    #[test]
    fn each_client_has_what_the_api_server_has_in_the_end(steps in prop::collection::vec(any::<[u8; 4]>(), 0..200)) {
        play(&steps);
    }
}
