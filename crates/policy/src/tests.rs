//! Objects in, verdicts out.

mod compiled;
