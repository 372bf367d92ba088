//! Demonstrations that can be interrupted at any moment without remains.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    process::{Command, ExitCode},
};

use rustix::process::Pid;
use tokio::signal::unix::{SignalKind, signal};

use crate::sandbox;

/// Variable that is set in the child process of [`supervise`].
const SUPERVISED: &str = "CPROXY_DEMO_SUPERVISED";

/// Runs `demonstrate`, whose sandboxes' names begin with `prefix`. An error is printed as one sentence.
pub fn run(prefix: &str, demonstrate: impl FnOnce() -> Result<(), String>) -> ExitCode {
    if std::env::var_os(SUPERVISED).is_none() {
        return supervise(prefix);
    }
    // The harness panics with sentences that say what to do; their places in the source would not help a user.
    std::panic::set_hook(Box::new(|info| {
        eprintln!("demo: {}", info.payload_as_str().unwrap_or("a part of it panicked"));
    }));
    match catch_unwind(AssertUnwindSafe(demonstrate)) {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) => {
            eprintln!("demo: {error}");
            ExitCode::FAILURE
        }
        Err(_) => ExitCode::FAILURE,
    }
}

/// Runs the demonstration in a child and removes its remains after an interruption, since a process that a signal ends
/// cannot clean up after itself.
fn supervise(prefix: &str) -> ExitCode {
    let outcome = tokio::runtime::Builder::new_current_thread().enable_all().build().and_then(|runtime| {
        let code = runtime.block_on(run_child());
        runtime.shutdown_background();
        code
    });
    sandbox::sweep(prefix);
    outcome.unwrap_or_else(|error| {
        eprintln!("demo: {error}");
        ExitCode::FAILURE
    })
}

async fn run_child() -> std::io::Result<ExitCode> {
    let [mut interrupt, mut terminate] = [signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?];
    let mut command = Command::new(std::env::current_exe()?);
    let mut child = command.args(std::env::args_os().skip(1)).env(SUPERVISED, "1").spawn()?;
    let pid = Pid::from_child(&child);
    let mut ended = tokio::task::spawn_blocking(move || child.wait());
    let number = tokio::select! {
        status = &mut ended => {
            let code = status.map_err(std::io::Error::other)??.code().and_then(|code| u8::try_from(code).ok());
            return Ok(ExitCode::from(code.unwrap_or(1)));
        }
        _ = interrupt.recv() => 2,
        _ = terminate.recv() => 15,
    };
    // The child may have ended by the same signal.
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).ok();
    ended.await.map_err(std::io::Error::other)??;
    eprintln!("demo: interrupted; removing what is left");
    Ok(ExitCode::from(128 + number))
}
