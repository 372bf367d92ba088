//! Two builds of a release from the same commit: for all architectures, in directories of different lengths, one after
//! the other.

use std::{fs, path::Path, process::Command};

use crate::release::{Scratch, assert_same};

/// Clones the repository and makes a release there. Returns its directory.
fn release_of_clone(directory: &Path) -> std::path::PathBuf {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let clone = directory.join("source");
    let run = |command: &mut Command| {
        let status = command.status().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        assert!(status.success(), "{command:?}: {status}");
    };
    fs::create_dir_all(directory).unwrap();
    run(Command::new("git").args(["clone", "--quiet"]).arg(repository).arg(&clone));
    let mut dist = Command::new("cargo");
    dist.current_dir(&clone).args(["xtask", "dist", "--without", "kernel", "--out"]).arg(directory.join("release"));
    // These are of the cargo that runs this test.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if (text.starts_with("CARGO") && text != "CARGO_HOME") || text.starts_with("CPROXY_") {
            dist.env_remove(&name);
        }
    }
    run(&mut dist);
    directory.join("release")
}

#[test]
fn two_builds_in_different_directories_give_the_same_release() {
    let scratch = Scratch::new("builds");
    let first = release_of_clone(&scratch.0.join("a"));
    let second = release_of_clone(&scratch.0.join("another-directory/with-a-longer-name"));
    assert_same(&first, &second);
}
