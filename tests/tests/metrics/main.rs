//! Endpoints for metrics and health checks: their content in each state of the agent, to real scrapers and to clients
//! that misbehave.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a failed call is a failed test")]

mod client;
mod clients;
mod health;
mod monitoring;
mod scrape;
mod start;
