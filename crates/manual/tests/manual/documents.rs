//! Command lines of agent and relay in the repository's documents: the programs would accept them.

#![expect(clippy::unwrap_used, reason = "a failed call is a failed test")]

use std::{
    fs,
    path::{Path, PathBuf},
};

use cproxy_documents::{breach, commands};

/// Directories without documents of ours, and decisions, which also name commands that were not made.
const SKIPPED: [&str; 3] = ["target", ".git", "docs/decisions"];

fn documents(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.is_symlink() && !SKIPPED.iter().any(|skipped| path.ends_with(skipped)) {
            documents(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
}

#[test]
fn the_programs_accept_the_command_lines_of_the_documents() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut found = Vec::new();
    documents(&root, &mut found);
    let programs = [cproxy::cli::manual(), cproxy_relay::cli::manual()];
    let (mut checked, mut breaches) = (0, Vec::new());
    for path in found {
        let text = fs::read_to_string(&path).unwrap();
        for program in &programs {
            for command in commands(&text, &[program.get_name()]) {
                checked += 1;
                let breach = breach(program, &command.arguments);
                let place = path.strip_prefix(&root).unwrap().display();
                let (line, name) = (command.line, program.get_name());
                breaches
                    .extend(breach.map(|why| format!("{place}:{line}: {name} {}: {why}", command.arguments.join(" "))));
            }
        }
    }
    assert!(checked > 200, "only {checked} commands were found");
    assert!(breaches.is_empty(), "{}", breaches.join("\n"));
}
