//! Programs that tests build.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Runs a build, whose last arguments become `-o FILE`, and returns the file: `program-NAME` in `directory`. Tests that
/// run at the same time may build one program: each puts its own in place at once.
///
/// # Panics
/// With the compiler's output, if the build fails.
pub fn program(directory: &str, name: &str, mut build: Command) -> PathBuf {
    let program = Path::new(directory).join(format!("program-{name}"));
    let own = program.with_added_extension(std::process::id().to_string());
    let output = build.arg("-o").arg(&own).output().unwrap_or_else(|error| panic!("cannot start {build:?}: {error}"));
    assert!(output.status.success(), "{build:?} failed: {}", String::from_utf8_lossy(&output.stderr));
    fs::rename(&own, &program).unwrap_or_else(|error| panic!("cannot rename {}: {error}", own.display()));
    program
}
