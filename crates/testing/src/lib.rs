//! Code that unit tests, fuzz targets and suites share. No program is built with it.

#![expect(clippy::panic, clippy::unwrap_used, reason = "whatever is not as expected is a failed test")]

pub mod encoding;
#[cfg(feature = "relay")]
#[expect(clippy::expect_used, clippy::indexing_slicing, reason = "the same")]
pub mod relay_client;
#[cfg(feature = "relay")]
#[expect(clippy::expect_used, clippy::indexing_slicing, reason = "the same")]
pub mod relay_history;
pub mod responses;
#[cfg(feature = "api-server")]
#[expect(clippy::expect_used, clippy::indexing_slicing, reason = "the same")]
pub mod simulated;
