//! The report of `e2e.test` about its specs.

use std::{fs, path::Path};

use serde_json::Value;

/// Outcomes of specs.
pub(crate) struct Report {
    specs: Vec<Spec>,
}

struct Spec {
    /// Whether it is a spec, and not a step before or after all of them.
    is_it: bool,
    name: String,
    state: String,
    seconds: f64,
    message: String,
}

impl Report {
    /// Reads Ginkgo's report in JSON.
    pub(crate) fn read(file: &Path) -> Self {
        let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let report: Value = serde_json::from_str(&text).unwrap();
        let suites = report.as_array().unwrap().iter();
        let specs = suites.flat_map(|suite| suite["SpecReports"].as_array().into_iter().flatten());
        Self { specs: specs.map(Spec::read).filter(|spec| spec.is_it || spec.has_failed()).collect() }
    }

    pub(crate) fn passed(&self) -> Vec<&str> {
        self.of_state("passed").map(|spec| &*spec.name).collect()
    }

    /// Specs that have run and not passed, and steps around them that have failed.
    pub(crate) fn failed(&self) -> Vec<String> {
        let failed = self.specs.iter().filter(|spec| spec.has_failed());
        failed.map(|spec| format!("{}: {}: {}", spec.name, spec.state, spec.message)).collect()
    }

    /// Specs that were left out and have a word in their name.
    pub(crate) fn skipped_of(&self, word: &str) -> Vec<&str> {
        let names = self.of_state("skipped").map(|spec| &*spec.name);
        names.filter(|name| name.contains(word)).collect()
    }

    /// Each spec that has run, with its time.
    pub(crate) fn table(&self) -> String {
        let ran = self.specs.iter().filter(|spec| spec.state != "skipped");
        ran.map(|spec| format!("{:>7.1} s  {}  {}\n", spec.seconds, spec.state, spec.name)).collect()
    }

    fn of_state<'a>(&'a self, state: &'a str) -> impl Iterator<Item = &'a Spec> {
        self.specs.iter().filter(move |spec| spec.state == state)
    }
}

impl Spec {
    fn read(spec: &Value) -> Self {
        let mut words: Vec<&str> = texts(&spec["ContainerHierarchyTexts"]).collect();
        words.push(text(&spec["LeafNodeText"]));
        Self {
            is_it: spec["LeafNodeType"] == "It",
            name: words.join(" "),
            state: text(&spec["State"]).to_owned(),
            seconds: spec["RunTime"].as_f64().unwrap_or_default() / 1e9,
            message: text(&spec["Failure"]["Message"]).to_owned(),
        }
    }

    fn has_failed(&self) -> bool {
        !["passed", "skipped", "pending"].contains(&&*self.state)
    }
}

fn texts(value: &Value) -> impl Iterator<Item = &str> {
    value.as_array().into_iter().flatten().map(text)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
