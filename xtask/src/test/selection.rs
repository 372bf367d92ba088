//! Which tests a command line names, and which test binaries can have them: only those are compiled.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

use super::suites::{SUITES, SuiteKind, UNIT};
use crate::paths;

/// Directory with a test binary for each suite.
const SUITES_DIRECTORY: &str = "tests/tests";

/// Directories of packages with unit tests.
const PACKAGES: [&str; 5] = ["cproxy", "cproxy-ebpf", "cproxy-relay", "xtask", "tests"];
const PACKAGES_DIRECTORY: &str = "crates";

/// Modules whose tests take minutes, and longer ones.
const LONG: &str = "long";
const SOAK: &str = "soak";

/// The suite whose long tests `cargo xtask vm test` runs, since they need other kernels.
const GUESTS: &str = "guests";

/// A suite, or a package of unit tests: names that are known without compiling anything.
struct Source {
    /// The suite's or the package's name.
    name: String,
    kind: SuiteKind,
    modules: BTreeSet<String>,
    functions: Vec<String>,
}

/// Test binaries to compile: those of suites, and those of the unit tests of packages.
#[derive(Default, PartialEq, Eq, Debug)]
pub(super) struct Targets {
    pub(super) suites: BTreeSet<String>,
    pub(super) packages: BTreeSet<String>,
}

/// A word of the command line.
#[derive(Clone, Debug)]
struct Word {
    text: String,
    /// Whether it names a suite, a module or a package, and so all tests in it but none whose name contains it.
    is_container: bool,
}

/// The tests that a command line names; all, if it names none.
#[derive(Clone, Debug)]
pub(super) struct Selection {
    words: Vec<Word>,
    without: Vec<String>,
    is_long: bool,
    is_soak: bool,
}

impl Selection {
    /// Reads words, which are those of the forms `SUITE`, `SUITE::TEST` and `TEST`. Parts of a path may be left out
    /// at the start; a test's name may be shortened at both ends. Returns with it the binaries that can have the tests.
    pub(super) fn new(words: &[String], without: &[String], is_long: bool, is_soak: bool) -> Result<(Self, Targets)> {
        let sources = sources()?;
        let mut targets = Targets::default();
        for word in words {
            find(word, &sources, &mut targets);
        }
        let is_all = words.is_empty();
        for source in sources.iter().filter(|_| is_all) {
            targets.add(source);
        }
        targets.suites.retain(|suite| !without.contains(suite));
        if without.iter().any(|suite| suite == UNIT) {
            targets.packages.clear();
        }
        let words = words.iter().map(|word| Word { text: word.clone(), is_container: is_container(word, &sources) });
        Ok((Self { words: words.collect(), without: without.to_vec(), is_long, is_soak }, targets))
    }

    /// Whether everything is named that runs without further flags.
    pub(super) fn is_all(&self) -> bool {
        self.words.is_empty()
    }

    /// Whether tests that take long run, too.
    pub(super) fn is_long(&self) -> bool {
        self.is_long
    }

    /// The words that name no test of these, given by suite and path.
    pub(super) fn unknown(&self, tests: &[(&str, &str)]) -> Vec<&str> {
        let is_known = |word: &&Word| tests.iter().any(|(suite, path)| word.selects(suite, path));
        self.words.iter().filter(|word| !is_known(word)).map(|word| word.text.as_str()).collect()
    }

    /// Whether a test is named, whatever its length.
    pub(super) fn names(&self, suite: &str, path: &str) -> bool {
        let is_left_out = self.without.iter().any(|other| other == suite);
        !is_left_out && (self.words.is_empty() || self.words.iter().any(|word| word.selects(suite, path)))
    }

    /// Whether a test that takes long may run, too.
    pub(super) fn allows(&self, suite: &str, path: &str) -> bool {
        let has = |module| path.split("::").any(|part| part == module);
        let is_long_allowed = self.is_long && suite != GUESTS;
        (is_long_allowed || !has(LONG)) && (self.is_soak || !has(SOAK))
    }
}

impl Word {
    fn selects(&self, suite: &str, path: &str) -> bool {
        let is_below = |whole: &str| {
            whole.strip_prefix(self.text.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
        };
        let id = format!("{suite}::{path}");
        if is_below(&id) || is_below(path) {
            return true;
        }
        if self.is_container {
            return false;
        }
        // The suite is written in full; what follows may be a part of the rest.
        match self.text.split_once("::") {
            Some((first, rest)) if first == suite => path.contains(rest),
            _ => path.contains(self.text.as_str()),
        }
    }
}

impl Targets {
    fn add(&mut self, source: &Source) {
        let names = if source.kind == SuiteKind::Unit { &mut self.packages } else { &mut self.suites };
        names.insert(source.name.clone());
    }
}

/// Adds the targets that can have the tests of a word. Where no source has it, a macro may make the test: all do then.
fn find(word: &str, sources: &[Source], targets: &mut Targets) {
    let (first, last) = (word.split("::").next().unwrap_or(word), word.rsplit("::").next().unwrap_or(word));
    let is_suite = |source: &&Source| source.name == first || (first == UNIT && source.kind == SuiteKind::Unit);
    let has_module = |source: &&Source| source.modules.contains(first);
    let has_function = |source: &&Source| source.functions.iter().any(|name| name.contains(last));
    let mut found: Vec<&Source> = sources.iter().filter(is_suite).collect();
    if first == UNIT && word != UNIT {
        let package = word.split("::").nth(1).unwrap_or_default();
        let of_package: Vec<&Source> = found.iter().copied().filter(|source| source.name == package).collect();
        found = if of_package.is_empty() { found } else { of_package };
    }
    if found.is_empty() {
        found = sources.iter().filter(has_module).collect();
    }
    if found.is_empty() {
        found = sources.iter().filter(has_function).collect();
    }
    if found.is_empty() {
        found = sources.iter().collect();
    }
    found.into_iter().for_each(|source| targets.add(source));
}

fn is_container(word: &str, sources: &[Source]) -> bool {
    word == UNIT || sources.iter().any(|source| source.name == word || source.modules.contains(word))
}

fn sources() -> Result<Vec<Source>> {
    let root = paths::workspace();
    let mut sources = Vec::new();
    for suite in SUITES {
        let place = root.join(SUITES_DIRECTORY).join(suite.name);
        let mut source = Source::new(suite.name, suite.kind);
        match suite.kind {
            SuiteKind::Live if place.is_dir() => source.read_all(&place)?,
            SuiteKind::Live => source.read(&place.with_extension("rs"))?,
            SuiteKind::Fuzz | SuiteKind::Size => {}
            SuiteKind::Unit => continue,
        }
        sources.push(source);
    }
    let crates = root.join(PACKAGES_DIRECTORY);
    let packages =
        PACKAGES.iter().map(|name| root.join(name)).chain(entries(&crates)?.into_iter().filter(|p| p.is_dir()));
    for package in packages {
        let mut source = Source::new(&name_of_package(&package)?, SuiteKind::Unit);
        source.read_all(&package.join("src"))?;
        let tests = package.join("tests");
        if tests.is_dir() && !package.ends_with("tests") {
            source.read_all(&tests)?;
        }
        source.modules.clear();
        sources.push(source);
    }
    Ok(sources)
}

impl Source {
    fn new(name: &str, kind: SuiteKind) -> Self {
        Self { name: name.to_owned(), kind, modules: BTreeSet::new(), functions: Vec::new() }
    }

    fn read_all(&mut self, directory: &Path) -> Result<()> {
        for path in entries(directory)? {
            if path.is_dir() {
                self.read_all(&path)?;
            } else if path.extension() == Some(OsStr::new("rs")) {
                let stem = path.file_stem().and_then(OsStr::to_str).unwrap_or_default();
                if stem != "main" {
                    self.modules.insert(stem.to_owned());
                }
                self.read(&path)?;
            }
        }
        Ok(())
    }

    fn read(&mut self, file: &Path) -> Result<()> {
        let text = fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
        self.functions.extend(text.lines().filter_map(function_of));
        Ok(())
    }
}

/// The name of the function that a line begins.
fn function_of(line: &str) -> Option<String> {
    let (_, rest) =
        line.trim_start().split_once("fn ").filter(|(before, _)| before.is_empty() || *before == "async ")?;
    rest.split_once(['(', '<']).map(|(name, _)| name.to_owned())
}

fn entries(directory: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(directory).with_context(|| format!("reading {}", directory.display()))?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

/// The name of the package in a directory.
pub(super) fn name_of_package(directory: &Path) -> Result<String> {
    let file = directory.join("Cargo.toml");
    let text = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
    let name = text.lines().find_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'));
    Ok(name.with_context(|| format!("{} names no package", file.display()))?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selection(words: &[&str]) -> (Selection, Targets) {
        let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        Selection::new(&words, &[], false, false).unwrap()
    }

    #[test]
    fn a_suite_is_named_whole_and_alone() {
        let (selection, targets) = selection(&["cluster"]);
        assert_eq!(targets.suites.into_iter().collect::<Vec<_>>(), ["cluster"]);
        assert!(targets.packages.is_empty());
        assert!(selection.names("cluster", "changes::a_test"));
        assert!(!selection.names("relay", "a_cluster"), "its name in another one's");
    }

    #[test]
    fn a_test_is_found_by_a_part_of_its_name_in_the_binaries_that_have_it() {
        let (selection, targets) = selection(&["exclusive_tests_are_alone"]);
        assert_eq!(targets.packages.into_iter().collect::<Vec<_>>(), ["xtask"]);
        assert!(targets.suites.is_empty());
        assert!(selection.names(UNIT, "xtask::test::queue::tests::exclusive_tests_are_alone_and_last"));
        assert!(!selection.names(UNIT, "xtask::test::queue::tests::tests_that_cannot_run_are_taken_out"));
    }

    #[test]
    fn modules_and_packages_are_named_too() {
        let (by_module, targets) = selection(&["changes::a_service"]);
        assert!(targets.suites.contains("cluster"));
        assert!(by_module.names("cluster", "changes::a_service_is_followed"));
        assert!(!by_module.names("cluster", "lists::a_service_is_followed"));
        let (by_package, targets) = selection(&["cproxy-core"]);
        assert_eq!(targets.packages.into_iter().collect::<Vec<_>>(), ["cproxy-core"]);
        assert!(by_package.names(UNIT, "cproxy-core::store::tests::any"));
        assert!(!by_package.names(UNIT, "cproxy-wire::store::tests::any"));
        let (by_both, targets) = selection(&["unit::cproxy-core::planner"]);
        assert_eq!(targets.packages.into_iter().collect::<Vec<_>>(), ["cproxy-core"]);
        assert!(by_both.names(UNIT, "cproxy-core::planner::tests::any"));
    }

    #[test]
    fn a_word_that_no_source_has_may_be_made_by_a_macro() {
        let (_, targets) = selection(&["no_such_test_anywhere_in_the_sources_of_this"]);
        assert!(targets.suites.len() > 10 && targets.packages.len() > 10);
    }

    #[test]
    fn long_tests_need_a_flag_and_those_of_guests_another_command() {
        let short = selection(&[]).0;
        assert!(short.names("cluster", "long::a") && !short.allows("cluster", "long::a"));
        assert!(!short.allows("cluster", "soak::a") && short.allows("cluster", "changes::a"));
        let long = Selection { is_long: true, ..short };
        assert!(long.allows("cluster", "trouble::long::a") && !long.allows("guests", "long::a"));
    }

    #[test]
    fn functions_are_seen_at_the_start_of_a_line() {
        assert_eq!(function_of("    fn a_test() {").as_deref(), Some("a_test"));
        assert_eq!(function_of("async fn of<'a>(x: &'a str)").as_deref(), Some("of"));
        assert_eq!(function_of("// a fn of() of old"), None);
        assert_eq!(function_of("let of = 1;"), None);
    }
}
