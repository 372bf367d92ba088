//! The agent and its programs in this machine's kernel: real system calls, real sockets, objects from manifests or from
//! an API server that misbehaves. Each module is a suite with a question of its own (tests/README.md).

mod bad_input;
mod bad_server;
mod cgroups;
mod check;
mod claims;
mod connects;
mod frontends;
mod get;
mod health;
mod log;
mod lost_objects;
mod manifests;
mod other_users;
mod places;
mod policy;
mod policy_check;
mod policy_claims;
mod policy_kills;
mod policy_sockets;
mod policy_starts;
mod privileges;
mod receive;
mod refused;
mod resolve_policy;
mod room;
mod secrets;
mod settings;
mod stale;
mod start;
mod trace;
