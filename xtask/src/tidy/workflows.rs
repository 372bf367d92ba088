//! Rules about the workflows of a forge: they call commands that exist, and the jobs of each change together do what
//! `.ci/run` does, each suite once.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context as _, Result};
use clap::Command;
use cproxy_documents::breach;

const DIRECTORY: &str = ".github/workflows";

/// The workflow of each change.
const CHANGES: &str = "test.yml";

/// Ends of lines that the workflow of each change has besides those with suites. The second has no `sudo` before it:
/// unit tests need neither root nor setup.
const ALSO: [&str; 2] = ["env cargo xtask lint", "run: cargo test --workspace --lib"];

/// The command that looks for known vulnerabilities, and what a workflow with it has: they become known without any
/// change, and come with a change of dependencies.
const ADVISORIES: (&str, [&str; 2]) = ("cargo xtask advisories", ["schedule:", "paths: [Cargo.lock, deny.toml]"]);

/// The workflows, by name.
pub(super) fn read(root: &Path) -> Result<BTreeMap<String, String>> {
    let directory = root.join(DIRECTORY);
    let mut workflows = BTreeMap::new();
    for entry in fs::read_dir(&directory).with_context(|| format!("reading {}", directory.display()))? {
        let path = entry.context("reading a directory entry")?.path();
        let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        workflows.insert(path.file_name().unwrap_or_default().to_string_lossy().into_owned(), text);
    }
    Ok(workflows)
}

/// Breaches, given the definition of `cargo xtask` and the names of all suites.
pub(super) fn breaches(workflows: &BTreeMap<String, String>, xtask: &Command, suites: &[&str]) -> Vec<String> {
    let mut breaches = Vec::new();
    for (name, workflow) in workflows {
        let unknown = lines(workflow).filter_map(|line| breach(xtask, &arguments(line, "cargo xtask")?));
        breaches.extend(unknown.map(|why| format!("{DIRECTORY}/{name}: {why}")));
    }
    let (command, marks) = ADVISORIES;
    let checks =
        |text: &&String| [command].iter().chain(&marks).all(|part| lines(text).any(|line| line.contains(part)));
    if workflows.values().find(checks).is_none() {
        breaches.push(format!(
            "{DIRECTORY}: no workflow has `{command}` with {}",
            marks.map(|mark| format!("`{mark}`")).join(" and ")
        ));
    }
    let changes = workflows.get(CHANGES).map_or("", String::as_str);
    breaches.extend(coverage_breaches(changes, suites).into_iter().map(|why| format!("{DIRECTORY}/{CHANGES}: {why}")));
    breaches
}

/// Suites that are not in exactly one job, words that are no suites, and commands that no job has.
fn coverage_breaches(workflow: &str, suites: &[&str]) -> Vec<String> {
    let words: Vec<String> = lines(workflow).filter_map(|line| arguments(line, "cargo xtask test")).flatten().collect();
    let count = |suite: &str| words.iter().filter(|word| *word == suite).count();
    let others = words.iter().filter(|word| !suites.contains(&word.as_str()));
    let mut breaches: Vec<String> = others.map(|word| format!("{word} is no suite")).collect();
    let wrong = suites.iter().map(|suite| (suite, count(suite))).filter(|(_, count)| *count != 1);
    breaches.extend(wrong.map(|(suite, count)| format!("the suite {suite} is in {count} jobs, not in one")));
    let missing = ALSO.iter().filter(|command| !lines(workflow).any(|line| line.ends_with(*command)));
    breaches.extend(missing.map(|command| format!("no job has `{command}`")));
    breaches
}

fn lines(workflow: &str) -> impl Iterator<Item = &str> {
    workflow.lines().map(str::trim).filter(|line| !line.starts_with('#'))
}

/// The words after a command, up to the next command of the line.
fn arguments(line: &str, command: &str) -> Option<Vec<String>> {
    let words = line.split_once(command)?.1.split_whitespace();
    Some(words.take_while(|word| !["|", "||", "&&", ";"].contains(word)).map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: &str = "- run: sudo env cargo xtask lint\n- run: cargo test --workspace --lib\n\
        - run: sudo env cargo xtask test a b\n# cargo xtask test b\n- run: cargo xtask test c\n";

    #[test]
    fn each_suite_is_in_one_job() {
        assert_eq!(coverage_breaches(ALL, &["a", "b", "c"]), [""; 0]);
        assert_eq!(coverage_breaches(ALL, &["a", "b", "c", "d"]), ["the suite d is in 0 jobs, not in one"]);
        assert_eq!(coverage_breaches(ALL, &["a", "b"]), ["c is no suite"]);
        let twice = format!("{ALL}- run: cargo xtask test a\n");
        assert_eq!(coverage_breaches(&twice, &["a", "b", "c"]), ["the suite a is in 2 jobs, not in one"]);
    }

    #[test]
    fn the_jobs_also_lint_and_run_unit_tests_without_root() {
        let breaches = coverage_breaches("- run: cargo xtask test a", &["a"]);
        assert_eq!(breaches, ALSO.map(|command| format!("no job has `{command}`")));
        let as_root = ALL.replace("cargo test", "sudo cargo test");
        assert_eq!(coverage_breaches(&as_root, &["a", "b", "c"]), ["no job has `run: cargo test --workspace --lib`"]);
    }

    #[test]
    fn vulnerabilities_are_looked_for_each_night_and_with_each_change_of_dependencies() {
        let (command, [night, change]) = ADVISORIES;
        let xtask = Command::new("xtask").subcommand(Command::new("advisories"));
        let is_missing = |parts: &[&str]| {
            let workflows = BTreeMap::from([("a.yml".to_owned(), parts.join("\n"))]);
            breaches(&workflows, &xtask, &[]).iter().any(|why| why.contains("no workflow has"))
        };
        assert!(!is_missing(&[night, change, command]));
        for parts in [[night, change], [night, command], [change, command]] {
            assert!(is_missing(&parts), "{parts:?}");
        }
    }

    #[test]
    fn commands_exist() {
        let xtask = Command::new("xtask").subcommand(Command::new("make"));
        let workflows = |verb| BTreeMap::from([("a.yml".to_owned(), format!("x=$(cargo xtask {verb} | tail -n 1)"))]);
        let unknown = |verb| breaches(&workflows(verb), &xtask, &[]).iter().any(|why| why.contains("a.yml"));
        assert_eq!((unknown("make"), unknown("brew")), (false, true));
    }
}
