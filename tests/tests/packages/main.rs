//! A release: its files, and its packages in a Debian of their own, with a running systemd and with OpenRC, and its
//! archive in a root with busybox alone. The table and the settings survive an upgrade, and whatever is in a package's
//! way is named.
//!
//! Packages for Fedora and Alpine are read, not installed: this machine's system has no use for them.

#![expect(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that finds something else than it expects has failed"
)]

mod lifecycle;
mod machine;
mod release;
mod trouble;
mod without_systemd;

mod long;
