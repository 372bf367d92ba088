//! Objects as large as the API allows, and larger than the table: what fits is served, what does not is named, and
//! nothing else is harmed.

#![expect(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    reason = "a test that finds something else than it expects has failed"
)]

mod fixture;

mod endpoints;
mod greedy;
mod ports;
