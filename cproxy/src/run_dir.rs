//! Run directory: the protocol between an agent and the commands beside it.
//!
//! # Files
//!
//! The agent writes each of them as a whole, under another name first, and removes those of the agent before it.
//!
//! | file | meaning | content |
//! |---|---|---|
//! | `lock` | locked while an agent runs; stays | nothing |
//! | `ready` | the table has been complete since the start or a restore | id of the boot, if the kernel has one |
//! | `limited` | the programs are attached below the cgroup root | one line: place and consequence |
//! | `failed` | the last agent could not start, or has ended by itself | one line: the reason |
//! | `unusable` | as `failed`, if another attempt on this machine would fail in the same way | one line: the reason |
//! | `alive` | socket to which any user can connect while an agent lives | |
//! | `cproxy.sock` | socket of the running agent | |
//!
//! The id of the boot matters on a lasting file system, where `ready` may outlive the machine.
//!
//! # Requests
//!
//! The socket provides facts that only the agent has; all others are in the kernel. A client sends one line and reads
//! the response up to the end of the connection.
//!
//! | request | response |
//! |---|---|
//! | `services` | frontends as in the JSON contract, with names and without backends, which the kernel has |
//! | `gauges` | gauges of the agent as a JSON object |
//! | `source` | source of the agent as a JSON object |
//! | `explain TARGET` | the agent's view of an address or a Service as a JSON object |
//! | `problems` | present problems of objects and files as a JSON array |
//! | `health` | health of the programs as a JSON object, after a look at them |
//! | `config` | settings in force as a JSON array, each with its origin |
//! | `log` | the last lines of the log |
//! | `log-level LEVEL` | `ok`, or `error: ` and the reason |
//! | `reseed` | `ok`, once backends are chosen from a new seed and `ready` has gone, or `error: ` and the reason |
//! | any other | `error: ` and the names of the requests |
//!
//! `reseed` is for a VM that was restored from a snapshot: otherwise all copies of the snapshot choose the same
//! backends, since the kernel's random numbers in BPF are the same in each. With an API server, the agent also connects
//! anew, and `ready` comes back when it has compared the objects.

mod client;
mod connection;
mod files;
mod life;
mod lock;
mod owner;
mod protocol;
mod server;
mod wait;

pub use client::{
    exchange, explain_silence, fetch_config, fetch_explanation, fetch_gauges, fetch_health, fetch_log, fetch_policy,
    fetch_problems, fetch_received, fetch_services, fetch_source, request_log_level, request_reseed, stopped_agent,
};
pub use connection::agent;
pub use files::{read_states, ready_seconds};
pub use life::{ENDED, KILLED, Life, failure, life, remedy};
pub use owner::{Failure, RunDir, RunDirError, clear_unused, record_failure};
pub use protocol::RESPONSE_TIMEOUT;
pub use server::{respond, serve};
pub use wait::{Conditions, WaitError, read_limits, wait};
