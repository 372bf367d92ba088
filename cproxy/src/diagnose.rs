//! Answers for people who look for a fault: what a call gets, what the machine lacks, each call as it happens, and a
//! report of all that. They ask a running agent over its run directory, and read the kernel.

pub(crate) mod bugreport;
pub(crate) mod check;
pub mod explain;
pub(crate) mod policy;
pub(crate) mod status;
pub(crate) mod trace;
