//! A control plane that many tests use, one after the other. The listening unix socket, which several of these share,
//! is standard input.

use std::{
    io,
    os::{fd::AsFd as _, unix::net::UnixListener},
    process::ExitCode,
};

use cproxy_tests::shared;
use rustix::process::Signal;

fn main() -> ExitCode {
    // Without the one who listens, nobody comes.
    let follows = rustix::process::set_parent_process_death_signal(Some(Signal::TERM));
    match follows.map_err(io::Error::from).and_then(|()| io::stdin().as_fd().try_clone_to_owned()) {
        Ok(socket) => {
            shared::serve(&UnixListener::from(socket));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("shared-control-plane: {error}");
            ExitCode::FAILURE
        }
    }
}
