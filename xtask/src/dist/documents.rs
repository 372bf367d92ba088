//! Documents about a program: the licences of everything in it, and its bill of materials (CycloneDX).

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::{Build, Component, Release, Released, files::Documents, version};
use crate::{
    binary::Program,
    image::{digest, read},
    paths,
    publisher::Publisher,
    run, sizes,
};

/// Beginnings of the names of files with licences, in capitals.
const LICENCES: [&str; 6] = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE"];

/// Parts that come with the compilers instead of cargo's dependencies.
const OF_COMPILERS: &str = "\
The Rust standard library (MIT OR Apache-2.0, https://www.rust-lang.org) and the GNU C Library (LGPL-2.1-or-later,
https://www.gnu.org/software/libc) are linked into the program. Its sources and the build that `cargo xtask build` runs
let you link it with a changed C library.
";

/// Licences of everything in a program.
pub(super) fn of(program: &Program, components: &[Component], publisher: &Publisher) -> Result<Documents> {
    let text = |name: &str| text(name, publisher);
    Ok(Documents {
        readme: text("README.md")?,
        security: text("SECURITY.md")?,
        changelog: text("CHANGELOG.md")?,
        licence: text("LICENSE")?,
        licences: licences(program, components)?.into_bytes(),
    })
}

/// A document of the repository, with the publisher's values.
pub(super) fn text(name: &str, publisher: &Publisher) -> Result<Vec<u8>> {
    let text = fs::read_to_string(paths::workspace().join(name)).with_context(|| format!("reading {name}"))?;
    Ok(publisher.fill(&text).with_context(|| name.to_owned())?.into_bytes())
}

/// The texts of all licences, each with the components that have it.
fn licences(program: &Program, components: &[Component]) -> Result<String> {
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut list = String::new();
    for component in components {
        let name = format!("{} {}", component.name, component.version);
        list += &format!("{name}: {} {}\n", component.licence, component.repository);
        let files = licence_files(&component.directory)?;
        if files.is_empty() && !component.is_own() {
            list += "    Its package has no text of its licence.\n";
        }
        for file in files {
            let text = String::from_utf8_lossy(&read(&file)?).replace('\r', "");
            texts.entry(text.trim_end().to_owned()).or_default().push(name.clone());
        }
    }
    let mut all = format!("Licences of everything in {} {}\n\n{list}\n{OF_COMPILERS}", program.name, version());
    let mut texts: Vec<_> = texts.into_iter().map(|(text, names)| (names, text)).collect();
    texts.sort();
    for (mut names, text) in texts {
        names.dedup();
        all += &format!("\n{}\n{}\n\n{text}\n", "-".repeat(80), names.join(", "));
    }
    Ok(all)
}

/// Files with licences in a crate's directory, sorted.
fn licence_files(directory: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(directory).with_context(|| format!("reading {}", directory.display()))?;
    let is_licence = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
        path.is_file() && LICENCES.iter().any(|start| name.starts_with(start))
    };
    let mut files: Vec<_> = entries.flatten().map(|entry| entry.path()).filter(is_licence).collect();
    files.sort();
    Ok(files)
}

/// Adds the bills of materials and the licences of the programs.
pub(super) fn add(release: &Release, build: &Build) -> Result<()> {
    for released in build.programs() {
        let name = format!("{}-{}-linux-{}", released.program.name, version(), build.target.name());
        let bill = bill(release, build, released)?;
        let text = serde_json::to_vec_pretty(&bill).context("writing JSON")?;
        release.add(&format!("{name}.cdx.json"), &text)?;
        release.add(&format!("{name}-licences.txt"), &released.documents.licences)?;
    }
    Ok(())
}

/// Adds the documents about all programs.
pub(super) fn add_common(release: &Release) -> Result<()> {
    ["LICENSE", "CHANGELOG.md", "SECURITY.md"]
        .iter()
        .try_for_each(|name| release.add(name, &text(name, &release.publisher)?))
}

/// A bill of materials: components from the lock file, with the bytes that the program has of each.
fn bill(release: &Release, build: &Build, released: &Released) -> Result<Value> {
    let linked = sizes::linked(&released.debug)?;
    let program = released.program.name;
    let digest = digest(&read(&released.file)?);
    let digest = digest.trim_start_matches("sha256:");
    let (own, others): (Vec<_>, Vec<_>) = released.components.iter().partition(|component| component.name == program);
    let root = own.first().with_context(|| format!("cargo tree does not name {program}"))?;
    let compilers = compilers()?;
    let components: Vec<_> = others.iter().map(|other| component(other, &linked)).chain(compilers.clone()).collect();
    let mut dependencies: Vec<_> = released
        .components
        .iter()
        .map(|component| json!({"ref": component.purl(), "dependsOn": component.uses}))
        .collect();
    dependencies.extend(compilers.iter().map(|compiler| json!({"ref": compiler.get("bom-ref")})));
    Ok(json!({
        "$schema": "http://cyclonedx.org/schema/bom-1.5.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": serial_number(digest),
        "version": 1,
        "metadata": {
            "timestamp": release.stamp.text(),
            "component": {
                "type": "application",
                "bom-ref": root.purl(),
                "name": program,
                "version": version(),
                "licenses": [{"expression": root.licence}],
                "hashes": [{"alg": "SHA-256", "content": digest}],
                "properties": [{"name": "cproxy:target", "value": build.target.triple()}],
            },
        },
        "components": components,
        "dependencies": dependencies,
    }))
}

fn component(component: &Component, linked: &BTreeMap<String, u64>) -> Value {
    let bytes = linked.get(&component.name.replace('-', "_")).copied().unwrap_or_default();
    let mut value = json!({
        "type": "library",
        "bom-ref": component.purl(),
        "name": component.name,
        "version": component.version,
        "licenses": [{"expression": component.licence}],
        "properties": [{"name": "cproxy:linked-bytes", "value": bytes.to_string()}],
    });
    if let (Some(value), Some(checksum)) = (value.as_object_mut(), &component.checksum) {
        value.insert("purl".into(), json!(component.purl()));
        value.insert("hashes".into(), json!([{"alg": "SHA-256", "content": checksum}]));
    }
    if let (Some(value), false) = (value.as_object_mut(), component.repository.is_empty()) {
        value.insert("externalReferences".into(), json!([{"type": "vcs", "url": component.repository}]));
    }
    value
}

/// Libraries that come with the compilers and are linked into each program.
fn compilers() -> Result<Vec<Value>> {
    let library = |name: &str, version: &str, licence: &str| {
        let reference = format!("{name}@{version}");
        let licences = json!([{"expression": licence}]);
        json!({"type": "library", "bom-ref": reference, "name": name, "version": version, "licenses": licences})
    };
    let rust = run::capture(Command::new("rustc").current_dir(paths::workspace()).arg("--version"))?;
    let rust = rust.split_whitespace().nth(1).unwrap_or_default().to_owned();
    let libc = run::capture(Command::new("ldd").arg("--version"))?;
    let libc = libc.lines().next().and_then(|line| line.split_whitespace().last()).unwrap_or_default().to_owned();
    Ok(vec![library("rust-std", &rust, "MIT OR Apache-2.0"), library("glibc", &libc, "LGPL-2.1-or-later")])
}

/// A UUID that the program's digest determines (RFC 9562, version 8).
fn serial_number(digest: &str) -> String {
    let part = |from: usize, to: usize| digest.get(from..to).unwrap_or_default();
    format!("urn:uuid:{}-{}-8{}-a{}-{}", part(0, 8), part(8, 12), part(13, 16), part(17, 20), part(20, 32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_serial_number_is_a_uuid_of_the_program() {
        let digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(serial_number(digest), "urn:uuid:ba7816bf-8f01-8fea-a141-40de5dae2223");
    }

    #[test]
    fn each_licence_is_there_once_with_all_that_have_it() {
        let directory = std::env::temp_dir().join(format!("cproxy-licences-{}", std::process::id()));
        let component = |name: &str| {
            let directory = directory.join(name);
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("LICENSE-MIT"), "the text\r\n").unwrap();
            Component {
                name: name.to_owned(),
                version: "1.0.0".to_owned(),
                licence: "MIT".to_owned(),
                repository: String::new(),
                checksum: Some(String::new()),
                directory,
                uses: std::collections::BTreeSet::new(),
            }
        };
        let text = licences(&crate::binary::AGENT, &["a", "b"].map(component));
        fs::remove_dir_all(&directory).unwrap();
        let text = text.unwrap();
        assert!(text.ends_with("\na 1.0.0, b 1.0.0\n\nthe text\n"), "{text}");
        assert_eq!(text.matches("the text").count(), 1);
    }
}
