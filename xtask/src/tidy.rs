//! Rules of this repository that no other tool knows.

mod circles;
mod commands;
mod imports;
pub(crate) mod links;
mod rooms;
mod text;
mod workflows;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};
use clap::CommandFactory as _;

use crate::{paths, run, test::suites};

/// Words that no source file may have, in two parts so that this file keeps its own rule.
const FORBIDDEN: [(&str, &str); 3] = [("to", "do!("), ("unimple", "mented!("), ("#[ig", "nore")];

/// Paths of the pure crates, and the standard library's I/O and clock, which only a lint can keep out of them.
const PURE: [&str; 2] = ["crates/core/src", "crates/policy/src"];
const PURE_FORBIDDEN: [&str; 7] =
    ["std::fs", "std::io", "std::env", "Instant::now", "SystemTime", "std::thread", "std::net::Tcp"];

/// The list of all decisions.
const DECISIONS_INDEX: &str = "README.md";

/// Pages of promises, each with its test.
const PROMISES: [&str; 2] = ["docs/reliability.md", "docs/threat-model.md"];

/// Directories without files of ours.
const SKIPPED: [&str; 2] = ["target", ".git"];

/// Fails, after naming each breach, when a file breaks a rule.
pub(crate) fn check() -> Result<()> {
    let root = paths::workspace();
    let mut files = Vec::new();
    collect(&root, &mut files)?;
    let known = known(&files)?;
    let mut breaches = Vec::new();
    for file in &files {
        let name = file.strip_prefix(&root).unwrap_or(file);
        let content = fs::read(file).with_context(|| format!("reading {}", file.display()))?;
        breaches.extend(breaches_of(name, &content));
        // Below xtask are parts of documents that lie elsewhere.
        if matches!(FileKind::of(name), Some(FileKind::Prose)) && !name.starts_with("xtask") {
            let text = String::from_utf8_lossy(&content);
            let broken = [links::breaches(&root, name, &text), known.breaches(&text)].concat();
            breaches.extend(broken.into_iter().map(|breach| format!("{}: {breach}", name.display())));
        }
    }
    let lock = |name: &str| {
        let file = root.join(name);
        fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))
    };
    breaches.extend(lock_breaches(&lock("Cargo.lock")?, &lock("fuzz/Cargo.lock")?));
    breaches.extend(decision_breaches(&decisions(&root)?));
    breaches.extend(rooms::breaches(&root)?);
    let suites: Vec<&str> = suites::names().collect();
    breaches.extend(workflows::breaches(&workflows::read(&root)?, &known.xtask, &suites));
    let tests = tests(&files)?;
    for name in PROMISES {
        let page = root.join(name);
        let text = fs::read_to_string(&page).with_context(|| format!("reading {}", page.display()))?;
        breaches.extend(promise_breaches(name, &text, &tests));
    }
    breaches.iter().for_each(run::report);
    if !breaches.is_empty() {
        bail!("{} breaches of the repository's rules", breaches.len());
    }
    Ok(())
}

/// All sources of tests, as one text.
fn tests(files: &[PathBuf]) -> Result<String> {
    let is_source = |file: &&PathBuf| matches!(FileKind::of(file), Some(FileKind::Source));
    let read = |file: &PathBuf| fs::read_to_string(file).with_context(|| format!("reading {}", file.display()));
    files.iter().filter(is_source).map(read).collect()
}

/// Names in the last column of the promises' tables that are no test's.
fn promise_breaches(name: &str, page: &str, tests: &str) -> Vec<String> {
    let columns = page.lines().filter_map(|line| line.strip_prefix('|')?.strip_suffix('|')?.rsplit_once('|'));
    let named = columns.flat_map(|(_, names)| names.split('`').skip(1).step_by(2));
    let missing = named.filter(|test| !tests.contains(&format!("fn {test}()")));
    missing.map(|test| format!("{name}: there is no test {test}")).collect()
}

/// The definition of `cargo xtask`, and the names of all packages.
fn known(files: &[PathBuf]) -> Result<commands::Known> {
    let mut packages = Vec::new();
    for file in files.iter().filter(|file| matches!(FileKind::of(file), Some(FileKind::Manifest))) {
        let manifest = fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
        packages.extend(commands::package(&manifest).map(str::to_owned));
    }
    Ok(commands::Known { xtask: crate::Arguments::command(), packages })
}

fn collect(directory: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(directory).with_context(|| format!("reading {}", directory.display()))? {
        let entry = entry.context("reading a directory entry")?;
        let kind = entry.file_type().context("reading a file's type")?;
        let name = entry.file_name();
        if kind.is_dir() && !SKIPPED.iter().any(|skipped| name == *skipped) {
            collect(&entry.path(), files)?;
        } else if kind.is_file() && FileKind::of(&entry.path()).is_some() {
            files.push(entry.path());
        }
    }
    Ok(())
}

/// A file that rules apply to.
enum FileKind {
    Manifest,
    Source,
    Prose,
}

impl FileKind {
    fn of(file: &Path) -> Option<Self> {
        match file.extension()?.to_str()? {
            "rs" => Some(Self::Source),
            "md" => Some(Self::Prose),
            "toml" if file.ends_with("Cargo.toml") => Some(Self::Manifest),
            _ => None,
        }
    }
}

fn breaches_of(name: &Path, content: &[u8]) -> Vec<String> {
    let content = String::from_utf8_lossy(content);
    let breaches = match FileKind::of(name) {
        Some(FileKind::Manifest) => manifest_breaches(name, &content),
        Some(FileKind::Source) => [source_breaches(name, &content), text::of_source(&content)].concat(),
        Some(FileKind::Prose) => text::of_prose(&content),
        None => Vec::new(),
    };
    breaches.into_iter().map(|breach| format!("{}: {breach}", name.display())).collect()
}

fn manifest_breaches(name: &Path, content: &str) -> Vec<String> {
    let is_root = name == Path::new("Cargo.toml");
    let inherits = content.contains("[lints]\nworkspace = true\n");
    if is_root || inherits { Vec::new() } else { vec!["lacks `[lints] workspace = true`".to_owned()] }
}

fn source_breaches(name: &Path, content: &str) -> Vec<String> {
    let words = FORBIDDEN.iter().map(|(start, end)| format!("{start}{end}"));
    let mut breaches: Vec<String> = words
        .filter(|word| content.contains(word))
        .map(|word| format!("has `{word}`; finish it or leave it out"))
        .collect();
    if !content.starts_with("//!") {
        breaches.push("starts without a `//!` comment that says what it is for".to_owned());
    }
    if PURE.iter().any(|path| name.starts_with(path)) {
        let program = content.split("#[cfg(test)]").next().unwrap_or_default();
        let words = PURE_FORBIDDEN.iter().filter(|word| program.contains(**word));
        breaches.extend(words.map(|word| format!("has `{word}`, which ARCHITECTURE.md rules out here")));
    }
    breaches
}

/// The files of `docs/decisions`, by name.
fn decisions(root: &Path) -> Result<BTreeMap<String, String>> {
    let directory = root.join("docs/decisions");
    let mut pages = BTreeMap::new();
    for entry in fs::read_dir(&directory).with_context(|| format!("reading {}", directory.display()))? {
        let path = entry.context("reading a directory entry")?.path();
        let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        pages.insert(path.file_name().unwrap_or_default().to_string_lossy().into_owned(), text);
    }
    Ok(pages)
}

/// Decisions are numbered without gaps, have one form of title, and are all in the index.
fn decision_breaches(pages: &BTreeMap<String, String>) -> Vec<String> {
    let index = pages.get(DECISIONS_INDEX).map_or("", String::as_str);
    let mut breaches = Vec::new();
    for (number, (file, text)) in (1..).zip(pages.iter().filter(|(file, _)| *file != DECISIONS_INDEX)) {
        let title = text.lines().next().and_then(|line| line.strip_prefix(&format!("# {number}. ")));
        match title.filter(|_| file.starts_with(&format!("{number:03}-"))) {
            None => breaches
                .push(format!("docs/decisions/{file}: is not number {number}, or has no title `# {number}. ...`")),
            Some(title) => {
                let line = format!("- [{number:03}]({file}) {title}");
                if !index.lines().any(|other| other == line) {
                    breaches.push(format!("docs/decisions/{DECISIONS_INDEX}: lacks the line `{line}`"));
                }
            }
        }
    }
    breaches
}

/// The fuzz targets have a lock file of their own: what is fuzzed must be what is shipped.
fn lock_breaches(shipped: &str, fuzzed: &str) -> Vec<String> {
    let shipped: Vec<_> = packages(shipped).collect();
    let is_other =
        |package: &(&str, &str)| shipped.iter().any(|(name, _)| *name == package.0) && !shipped.contains(package);
    let advice = "copy Cargo.lock to fuzz/Cargo.lock and run `cargo metadata --manifest-path fuzz/Cargo.toml`";
    let others = packages(fuzzed).filter(is_other);
    others
        .map(|(name, version)| format!("fuzz/Cargo.lock: has {name} {version}, Cargo.lock has not; {advice}"))
        .collect()
}

/// The names and versions in a lock file.
fn packages(lock: &str) -> impl Iterator<Item = (&str, &str)> {
    lock.split("[[package]]").filter_map(|package| {
        let value = |key| package.lines().find_map(|line| line.strip_prefix(key)?.strip_suffix('"'));
        Some((value("name = \"")?, value("version = \"")?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_inherit_the_lints() {
        let member = Path::new("xtask/Cargo.toml");
        assert!(breaches_of(member, b"[lints]\nworkspace = true\n").is_empty());
        assert_eq!(breaches_of(member, b"[package]\n").len(), 1);
        assert!(breaches_of(Path::new("Cargo.toml"), b"[workspace]\n").is_empty());
    }

    #[test]
    fn sources_are_finished_and_say_what_they_are_for() {
        let file = Path::new("a.rs");
        assert!(breaches_of(file, b"//! Why.\n").is_empty());
        assert_eq!(breaches_of(file, b"fn main() {}\n").len(), 1);
        assert_eq!(breaches_of(file, format!("//! Why.\n{}{})\n", "to", "do!(").as_bytes()).len(), 1);
    }

    #[test]
    fn the_core_stays_pure() {
        let breaches = |name: &str| breaches_of(Path::new(name), b"//! Files.\n\nuse std::fs;").len();
        assert_eq!((breaches("crates/core/src/store.rs"), breaches("crates/wire/src/dns.rs")), (1, 0));
    }

    #[test]
    fn the_fuzzed_versions_are_the_shipped_ones() {
        let lock = |packages: &[(&str, &str)]| -> String {
            let package = |(name, version): &(&str, &str)| {
                format!("[[package]]\nname = \"{name}\"\nversion = \"{version}\"\ndependencies = [\n \"x\",\n]\n\n")
            };
            packages.iter().map(package).collect()
        };
        let shipped = lock(&[("a", "1.0.0"), ("b", "1.0.0"), ("b", "2.0.0")]);
        assert_eq!(lock_breaches(&shipped, &lock(&[("a", "1.0.0"), ("b", "2.0.0"), ("fuzzer", "3.0.0")])), [""; 0]);
        let breaches = lock_breaches(&shipped, &lock(&[("a", "1.0.1")]));
        assert!(breaches.len() == 1 && breaches[0].starts_with("fuzz/Cargo.lock: has a 1.0.1"), "{breaches:?}");
    }

    #[test]
    fn each_promise_has_a_test_that_is_there() {
        let page = "| promise | test |\n|---|---|\n| `a` holds | `it_holds`, `it_held` |\n";
        assert_eq!(promise_breaches("docs/a.md", page, "fn it_holds() {}\nfn it_held() {}"), [""; 0]);
        assert_eq!(promise_breaches("docs/a.md", page, "fn it_holds() {}"), ["docs/a.md: there is no test it_held"]);
    }

    #[test]
    fn decisions_are_numbered_titled_and_listed() {
        let page = |file: &str, text: &str| (file.to_owned(), text.to_owned());
        let index = page("README.md", "# Decisions\n\n- [001](001-a.md) A\n");
        let good = BTreeMap::from([page("001-a.md", "# 1. A\n"), index.clone()]);
        assert_eq!(decision_breaches(&good), [""; 0]);
        let bad = BTreeMap::from([
            page("001-a.md", "# A\n"),
            page("002-b.md", "# 2. B\n"),
            page("004-d.md", "# 4. D\n"),
            index,
        ]);
        assert_eq!(decision_breaches(&bad).len(), 3, "no number, not listed, a gap");
    }
}
