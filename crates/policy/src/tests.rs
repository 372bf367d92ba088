//! Objects in, verdicts out: the rules as cases, and random clusters against an oracle.

mod bounds;
mod cases;
pub(crate) mod compiled;
mod oracle;
mod random;
mod world;
