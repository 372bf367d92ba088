//! API servers that misbehave: one in memory and in simulated time, and others over real connections.

mod api_server;
mod http2;
