//! An OCI image layout (opencontainers/image-spec) with an image of one layer: one program, and nothing else. It can
//! have the same image for several architectures.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use super::{
    AGENT, RELAY, Written, digest, gzip,
    stamp::{Stamp, revision},
    tar,
    tree::Tree,
};
use crate::{
    architecture::Architecture,
    publisher::{Name, Publisher},
};

/// The file that makes a directory a layout.
const LAYOUT: &str = "oci-layout";

/// Program that an image has.
pub(crate) struct Program {
    path: &'static str,
    title: &'static str,
    /// User and group by number: the image has no /etc/passwd.
    user: &'static str,
    licenses: &'static str,
    /// Form of the image, as `cargo xtask image` names it.
    form: &'static str,
}

/// The agent. Loading programs, attaching them to the machine's cgroup and closing other processes' sockets takes
/// capabilities that runtimes give to root alone.
pub(crate) const AGENT_IMAGE: Program = Program {
    path: AGENT,
    title: "cproxy",
    user: "0:0",
    // The agent's, and the BPF programs' in it.
    licenses: "Apache-2.0 AND (MIT OR GPL-2.0-only)",
    form: "oci",
};

/// The relay.
pub(crate) const RELAY_IMAGE: Program =
    Program { path: RELAY, title: "cproxy-relay", user: "65532:65532", licenses: "Apache-2.0", form: "relay" };

/// Writes the layout in place of an earlier one, for one architecture.
pub(crate) fn write(
    dir: PathBuf,
    image: &Program,
    architecture: Architecture,
    program: Vec<u8>,
    stamp: Stamp,
    publisher: &Publisher,
) -> Result<Written> {
    let mut layout = Layout::create(dir)?;
    let labels = labels(image, stamp, publisher);
    let mut manifest = layout.image(image, architecture, program, stamp, &labels)?;
    name(&mut manifest);
    layout.finish(manifest)
}

/// The same for each architecture, behind one index, from which runtimes choose theirs.
pub(crate) fn write_for_all(
    dir: PathBuf,
    image: &Program,
    programs: Vec<(Architecture, Vec<u8>)>,
    stamp: Stamp,
    publisher: &Publisher,
) -> Result<Written> {
    let mut layout = Layout::create(dir)?;
    let labels = labels(image, stamp, publisher);
    let mut manifests = Vec::new();
    for (architecture, program) in programs {
        manifests.push(layout.image(image, architecture, program, stamp, &labels)?);
    }
    let index = index(&manifests, Some(&labels));
    let mut index = layout.blob("application/vnd.oci.image.index.v1+json", &text(&index)?)?;
    name(&mut index);
    layout.finish(index)
}

/// Gives a descriptor the name by which tools find it in the layout.
fn name(descriptor: &mut Value) {
    if let Some(descriptor) = descriptor.as_object_mut() {
        descriptor.insert("annotations".into(), json!({"org.opencontainers.image.ref.name": version()}));
    }
}

fn index(manifests: &[Value], labels: Option<&BTreeMap<String, String>>) -> Value {
    let mut index = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": manifests,
    });
    if let (Some(index), Some(labels)) = (index.as_object_mut(), labels) {
        index.insert("annotations".into(), json!(labels));
    }
    index
}

/// Removes an earlier layout, and nothing else.
fn clear(dir: &Path) -> Result<()> {
    if !dir.exists() {
        return Ok(());
    }
    if !dir.join(LAYOUT).is_file() {
        bail!("{} is there and is no OCI image layout: move it away", dir.display());
    }
    fs::remove_dir_all(dir).with_context(|| format!("removing {}", dir.display()))
}

/// A layout on its way.
pub(super) struct Layout {
    dir: PathBuf,
    bytes: u64,
}

impl Layout {
    /// In place of an earlier one.
    pub(super) fn create(dir: PathBuf) -> Result<Self> {
        clear(&dir)?;
        Ok(Self { dir, bytes: 0 })
    }

    fn file(&mut self, name: &str, content: &[u8]) -> Result<()> {
        let path = self.dir.join(name);
        let made = path.parent().map_or(Ok(()), fs::create_dir_all);
        made.and_then(|()| fs::write(&path, content)).with_context(|| format!("writing {}", path.display()))?;
        self.bytes += content.len() as u64;
        Ok(())
    }

    /// Writes the image for an architecture and returns the descriptor of its manifest.
    fn image(
        &mut self,
        image: &Program,
        architecture: Architecture,
        program: Vec<u8>,
        stamp: Stamp,
        labels: &BTreeMap<String, String>,
    ) -> Result<Value> {
        let mut tree = Tree::default();
        tree.add_program(image.path, program);
        let unpacked = tar::archive(&tree, stamp)?;
        let layer = self.blob("application/vnd.oci.image.layer.v1.tar+gzip", &gzip(&unpacked)?)?;
        let config = config(image, labels, &digest(&unpacked), architecture, stamp);
        let config = self.blob("application/vnd.oci.image.config.v1+json", &text(&config)?)?;
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": config,
            "layers": [layer],
            "annotations": labels,
        });
        let mut manifest = self.blob("application/vnd.oci.image.manifest.v1+json", &text(&manifest)?)?;
        if let Some(descriptor) = manifest.as_object_mut() {
            descriptor.insert("platform".into(), json!({"os": "linux", "architecture": architecture.debian()}));
        }
        Ok(manifest)
    }

    /// Writes the files that make the directory a layout, with one entry.
    fn finish(mut self, entry: Value) -> Result<Written> {
        let digest = entry.get("digest").and_then(Value::as_str).unwrap_or_default().to_owned();
        self.list(&[entry])?;
        Ok(Written { path: self.dir, bytes: self.bytes, digest })
    }

    /// Writes the files that make the directory a layout, with these entries.
    pub(super) fn list(&mut self, entries: &[Value]) -> Result<()> {
        self.file("index.json", &text(&index(entries, None))?)?;
        self.file(LAYOUT, &text(&json!({"imageLayoutVersion": "1.0.0"}))?)
    }

    /// Writes a content under its digest and returns its descriptor.
    pub(super) fn blob(&mut self, media_type: &str, content: &[u8]) -> Result<Value> {
        let digest = digest(content);
        self.file(&format!("blobs/{}", digest.replace(':', "/")), content)?;
        Ok(json!({"mediaType": media_type, "digest": digest, "size": content.len()}))
    }
}

pub(super) fn text(value: &Value) -> Result<Vec<u8>> {
    serde_json::to_vec(value).context("writing JSON")
}

fn config(
    image: &Program,
    labels: &BTreeMap<String, String>,
    layer: &str,
    architecture: Architecture,
    stamp: Stamp,
) -> Value {
    json!({
        "created": stamp.text(),
        // Go and Debian have the same names.
        "architecture": architecture.debian(),
        "os": "linux",
        "config": {
            "User": image.user,
            "Entrypoint": [format!("/{}", image.path)],
            "Cmd": ["run"],
            "Env": ["PATH=/usr/bin"],
            "WorkingDir": "/",
            "Labels": labels,
        },
        "rootfs": {"type": "layers", "diff_ids": [layer]},
        "history": [{"created": stamp.text(), "created_by": format!("cargo xtask image {}", image.form)}],
    })
}

/// Labels of the image; unknown ones are left out.
fn labels(image: &Program, stamp: Stamp, publisher: &Publisher) -> BTreeMap<String, String> {
    let known = [
        ("title", Some(image.title.to_owned())),
        ("version", Some(version().to_owned())),
        ("created", Some(stamp.text())),
        ("revision", revision()),
        ("source", publisher.get(Name::Forge).map(str::to_owned)),
        ("licenses", Some(image.licenses.to_owned())),
    ];
    known.into_iter().filter_map(|(name, value)| Some((format!("org.opencontainers.image.{name}"), value?))).collect()
}

fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_layout_is_removed() {
        let dir = std::env::temp_dir().join(format!("cproxy-oci-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("precious"), "").unwrap();
        let error = clear(&dir).unwrap_err().to_string();
        assert!(error.ends_with("is no OCI image layout: move it away"), "{error}");
        fs::write(dir.join(LAYOUT), "{}").unwrap();
        clear(&dir).unwrap();
        assert!(!dir.exists());
    }
}
