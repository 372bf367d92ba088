//! Start of the agent in three phases, each of which is made from the one before: the compiler keeps their order.
//!
//! - [`check::Checked`]: has given up capabilities, and holds checked input, locks and listeners. Nothing is attached.
//! - [`install::Installed`]: the programs are attached, the source is started, and the table is open. System calls are
//!   not filtered yet.
//! - [`run::Running`]: system calls are filtered, and all background tasks run. Those of the source and of the own
//!   addresses have run since the phase before.

mod check;
mod install;
mod run;

pub(super) use self::check::Checked;
