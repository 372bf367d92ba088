//! Where a release comes from: a statement in the form of in-toto with a predicate of SLSA, and checksums, which a
//! signature may be about. A forge that builds a release signs a statement of its own.

use std::{collections::BTreeMap, fs, path::Path, process::Command};

use anyhow::{Context as _, Result};
use clap::ValueEnum as _;
use serde_json::{Value, json};

use super::{Release, version};
use crate::{
    architecture::Architecture,
    image::{busybox_for, digest, read, stamp},
    paths,
    publisher::Name,
    releases::NFPM,
    run,
};

/// Form of the parameters below, as a part of the source.
const BUILD_TYPE: &str = "xtask-dist-v1";
/// Builder: the command itself, wherever it runs, as a part of the source.
const BUILDER: &str = "xtask";

/// Files that determine dependencies, besides the commit that has them.
const LOCKS: [&str; 2] = ["Cargo.lock", "images/packages/go.sum"];

/// Lines for `sha256sum --check`, for all files of a directory.
pub(super) fn checksums(directory: &Path) -> Result<String> {
    Ok(digests(directory)?.into_iter().map(|(name, digest)| format!("{digest}  {name}\n")).collect())
}

/// Adds the statement about all files that are there.
pub(super) fn add(release: &Release) -> Result<()> {
    let statement = statement(release, &digests(&release.unfinished)?)?;
    let text = serde_json::to_vec_pretty(&statement).context("writing JSON")?;
    release.add(&format!("cproxy-{}.intoto.json", version()), &text)
}

/// Names of files and their digests.
fn digests(directory: &Path) -> Result<BTreeMap<String, String>> {
    let entries = fs::read_dir(directory).with_context(|| format!("reading {}", directory.display()))?;
    let digests = entries.map(|entry| {
        let path = entry.context("reading a directory entry")?.path();
        let digest = digest(&read(&path)?).trim_start_matches("sha256:").to_owned();
        Ok((path.file_name().unwrap_or_default().to_string_lossy().into_owned(), digest))
    });
    digests.collect()
}

fn statement(release: &Release, digests: &BTreeMap<String, String>) -> Result<Value> {
    let subjects: Vec<_> =
        digests.iter().map(|(name, digest)| json!({"name": name, "digest": {"sha256": digest}})).collect();
    let commit = stamp::revision().unwrap_or_default();
    let source = release.publisher.get(Name::Forge).map_or_else(|| "git:cproxy".to_owned(), |url| format!("git+{url}"));
    let mut materials = vec![json!({"uri": source, "digest": {"gitCommit": commit}})];
    for lock in LOCKS {
        let digest = digest(&read(&paths::workspace().join(lock))?);
        materials.push(json!({"uri": lock, "digest": {"sha256": digest.trim_start_matches("sha256:")}}));
    }
    for target in Architecture::value_variants() {
        // The only program of others in a release.
        if digests.keys().any(|name| name.starts_with("cproxy-initramfs-") && name.contains(target.name())) {
            let digest = digest(&busybox_for(*target)?);
            let uri = format!("pkg:deb/debian/busybox-static?arch={}", target.debian());
            materials.push(json!({"uri": uri, "digest": {"sha256": digest.trim_start_matches("sha256:")}}));
        }
    }
    Ok(json!({
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subjects,
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": format!("{source}#{BUILD_TYPE}"),
                "externalParameters": {"version": version(), "commit": commit, "revision": release.revision},
                "internalParameters": {"sourceDateEpoch": release.stamp.seconds(), "toolchain": toolchain()},
                "resolvedDependencies": materials,
            },
            "runDetails": {"builder": {"id": format!("{source}#{BUILDER}")}},
        },
    }))
}

/// Versions of the tools that make the files; those that are missing made none.
fn toolchain() -> BTreeMap<String, String> {
    let tools: [(&str, &[&str]); 7] = [
        ("rustc", &["--version"]),
        ("cargo", &["--version"]),
        ("gcc", &["--version"]),
        ("aarch64-linux-gnu-gcc", &["--version"]),
        ("ld.bfd", &["--version"]),
        ("sqfstar", &["-version"]),
        ("go", &["version"]),
    ];
    let first = |(tool, arguments): (&str, &[&str])| {
        let output = run::capture(Command::new(tool).current_dir(paths::workspace()).args(arguments)).ok()?;
        Some((tool.to_owned(), output.lines().next()?.to_owned()))
    };
    let mut versions: BTreeMap<_, _> = tools.into_iter().filter_map(first).collect();
    if let Ok(text) = paths::toolchain_file().and_then(|file| Ok(fs::read_to_string(file)?)) {
        let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        let version = |program: &str| run::capture(Command::new(program).arg("--version")).ok();
        for (key, name) in [("rustc", "rustc for BPF"), ("linker", "bpf-linker")] {
            versions.extend(value(key).and_then(version).map(|version| (name.to_owned(), version.trim().to_owned())));
        }
    }
    versions.extend(NFPM.version().map(|version| ("nfpm".to_owned(), version)));
    versions
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_in_the_form_of_sha256sum() {
        let directory = std::env::temp_dir().join(format!("cproxy-checksums-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        for name in ["b", "a"] {
            fs::write(directory.join(name), "abc").unwrap();
        }
        let checksums = checksums(&directory);
        fs::remove_dir_all(&directory).unwrap();
        let digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(checksums.unwrap(), format!("{digest}  a\n{digest}  b\n"));
    }
}
