//! Parts of a program that others wrote, as cargo resolves them for its target.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
};

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::{
    architecture::Architecture,
    binary::{AGENT, Program},
    paths, run,
};

/// Options of `cargo tree`: dependencies whose code is in the program, each with its depth.
const TREE: [&str; 6] = ["--edges", "normal,no-proc-macro", "--prefix", "depth", "--format", "|{p}|{l}|{r}"];

/// Package of the programs that run in the kernel, and their feature.
const PROGRAMS: (&str, &str) = ("cproxy-ebpf", "trace");

/// A crate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Component {
    pub(crate) name: String,
    pub(crate) version: String,
    /// SPDX expression.
    pub(crate) licence: String,
    pub(crate) repository: String,
    /// SHA-256 of its archive in the registry; none for crates of this repository.
    pub(crate) checksum: Option<String>,
    /// Directory of its sources.
    pub(crate) directory: PathBuf,
    /// The components that it uses.
    pub(crate) uses: BTreeSet<String>,
}

impl Component {
    /// Its name in a bill of materials.
    pub(crate) fn purl(&self) -> String {
        purl(&self.name, &self.version)
    }

    /// Whether this repository has it.
    pub(crate) fn is_own(&self) -> bool {
        self.checksum.is_none()
    }
}

fn purl(name: &str, version: &str) -> String {
    format!("pkg:cargo/{name}@{version}")
}

/// All components of a program, itself included, by their names.
pub(crate) fn of(program: &Program, target: Architecture) -> Result<Vec<Component>> {
    let mut found = BTreeMap::new();
    let triple = target.triple();
    let mut tree = run::cargo();
    tree.args(["tree", "--locked", "--package", program.name, "--target", &triple]).args(TREE);
    parse(&run::capture(&mut tree)?, &mut found);
    if program.name == AGENT.name {
        let (package, feature) = PROGRAMS;
        let mut tree = run::cargo();
        tree.args(["tree", "--locked", "--package", package, "--features", feature, "--target", &triple]).args(TREE);
        parse(&run::capture(&mut tree)?, &mut found);
    }
    let (checksums, directories) = (checksums()?, directories()?);
    for component in found.values_mut() {
        let key = (component.name.clone(), component.version.clone());
        component.checksum = checksums.get(&key).cloned();
        component.directory = directories.get(&key).cloned().unwrap_or_default();
    }
    Ok(found.into_values().collect())
}

/// Adds the packages of the output of `cargo tree`. The dependencies of each are below its first line only.
fn parse(tree: &str, found: &mut BTreeMap<String, Component>) {
    let mut path: Vec<String> = Vec::new();
    for line in tree.lines() {
        let mut fields = line.split('|');
        let (Some(depth), Some(package)) = (fields.next().and_then(|depth| depth.parse().ok()), fields.next()) else {
            continue;
        };
        let mut words = package.split_whitespace();
        let (name, version) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let version = version.trim_start_matches('v');
        let licence = fields.next().unwrap_or_default().trim_end_matches(" (*)").replace('/', " OR ");
        let repository = fields.next().unwrap_or_default().trim_end_matches(" (*)").to_owned();
        let purl = purl(name, version);
        path.truncate(depth);
        if let Some(user) = path.last().and_then(|user| found.get_mut(user)) {
            user.uses.insert(purl.clone());
        }
        path.push(purl.clone());
        found.entry(purl).or_insert_with(|| Component {
            name: name.to_owned(),
            version: version.to_owned(),
            licence,
            repository,
            checksum: None,
            directory: PathBuf::new(),
            uses: BTreeSet::new(),
        });
    }
}

/// Name and version of a crate.
type Key = (String, String);

/// Checksums in the lock file.
fn checksums() -> Result<BTreeMap<Key, String>> {
    let file = paths::workspace().join("Cargo.lock");
    let text = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
    let packages = text.split("[[package]]").filter_map(|package| {
        let value = |key| package.lines().find_map(|line| line.strip_prefix(key)?.strip_suffix('"'));
        let key = (value("name = \"")?.to_owned(), value("version = \"")?.to_owned());
        Some((key, value("checksum = \"")?.to_owned()))
    });
    Ok(packages.collect())
}

/// Directories of the sources of all packages.
fn directories() -> Result<BTreeMap<Key, PathBuf>> {
    let metadata =
        run::capture(run::cargo().args(["metadata", "--locked", "--all-features", "--format-version", "1"]))?;
    let metadata: Value = serde_json::from_str(&metadata).context("reading the output of `cargo metadata`")?;
    let packages = metadata.get("packages").and_then(Value::as_array).into_iter().flatten();
    let directory = |package: &Value| {
        let field = |name: &str| package.get(name)?.as_str().map(str::to_owned);
        let manifest = PathBuf::from(field("manifest_path")?);
        Some(((field("name")?, field("version")?), manifest.parent()?.to_owned()))
    };
    Ok(packages.filter_map(directory).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TREE: &str = "0|a v0.2.0 (/src/a)|Apache-2.0|\n1|b v1.0.0|MIT/Apache-2.0|https://b.example\n\
        2|c v2.0.0|MIT|\n1|d v1.0.0|MIT|\n2|b v1.0.0|MIT/Apache-2.0|https://b.example (*)\n";

    #[test]
    fn a_tree_becomes_components_that_use_each_other() {
        let mut found = BTreeMap::new();
        parse(TREE, &mut found);
        let uses = |name: &str| found[name].uses.iter().map(String::as_str).collect::<Vec<_>>();
        assert_eq!(uses("pkg:cargo/a@0.2.0"), ["pkg:cargo/b@1.0.0", "pkg:cargo/d@1.0.0"]);
        assert_eq!(uses("pkg:cargo/b@1.0.0"), ["pkg:cargo/c@2.0.0"]);
        assert_eq!(uses("pkg:cargo/d@1.0.0"), ["pkg:cargo/b@1.0.0"]);
        let b = &found["pkg:cargo/b@1.0.0"];
        assert_eq!((b.licence.as_str(), b.repository.as_str()), ("MIT OR Apache-2.0", "https://b.example"));
    }

    #[test]
    fn the_agent_has_its_programs_and_what_they_are_made_of() {
        let components = of(&AGENT, Architecture::Aarch64).unwrap();
        for name in ["cproxy", "cproxy-ebpf", "aya-ebpf", "tokio", "ring"] {
            let component = components.iter().find(|component| component.name == name).unwrap();
            assert_eq!(component.is_own(), name.starts_with("cproxy"), "{name}");
            assert!(component.directory.join("Cargo.toml").exists(), "{name}");
        }
    }
}
