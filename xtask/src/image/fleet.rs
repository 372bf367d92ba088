//! Images of the pods of `cargo xtask fleet`, in one OCI image layout that takes the place of a registry.

use std::path::{Path, PathBuf};

use anyhow::Result;
use serde_json::{Value, json};

use super::{
    BUSYBOX, busybox, default_out, digest, gzip,
    oci::{Layout, text},
    read,
    stamp::Stamp,
    tar,
    tree::Tree,
};
use crate::{architecture::Architecture, setup};

/// Image of servers and clients: this machine's static busybox.
const BUSYBOX_IMAGE: &str = "fleet.cproxy.dev/busybox";
/// Image of the cluster's nameserver.
const COREDNS_IMAGE: &str = "fleet.cproxy.dev/coredns";
/// Path of the program in it.
const COREDNS: &str = "coredns";

/// Writes the layout with this CoreDNS.
pub(crate) fn fleet_images(coredns: &Path) -> Result<PathBuf> {
    setup::for_images()?;
    let dir = default_out().join("fleet");
    let stamp = Stamp::find()?;
    let mut layout = Layout::create(dir.clone())?;
    let mut nameserver = Tree::default();
    nameserver.add_program(COREDNS, read(coredns)?);
    let manifests = [
        add(&mut layout, BUSYBOX_IMAGE, &with_busybox()?, &json!(["/bin/sh"]), stamp)?,
        add(&mut layout, COREDNS_IMAGE, &nameserver, &json!([format!("/{COREDNS}")]), stamp)?,
    ];
    layout.list(&manifests)?;
    Ok(dir)
}

fn with_busybox() -> Result<Tree> {
    let (program, applets) = busybox()?;
    let mut tree = Tree::default();
    applets.lines().for_each(|applet| tree.add_link(applet, format!("/{BUSYBOX}")));
    tree.add_program(BUSYBOX, program);
    Ok(tree)
}

/// Adds an image of one layer and returns its descriptor.
fn add(layout: &mut Layout, name: &str, tree: &Tree, entrypoint: &Value, stamp: Stamp) -> Result<Value> {
    let unpacked = tar::archive(tree, stamp)?;
    let layer = layout.blob("application/vnd.oci.image.layer.v1.tar+gzip", &gzip(&unpacked)?)?;
    let config = json!({
        "created": stamp.text(),
        "architecture": Architecture::of_host()?.debian(),
        "os": "linux",
        "config": {"Entrypoint": entrypoint, "Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [digest(&unpacked)]},
    });
    let config = layout.blob("application/vnd.oci.image.config.v1+json", &text(&config)?)?;
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config,
        "layers": [layer],
    });
    let mut descriptor = layout.blob("application/vnd.oci.image.manifest.v1+json", &text(&manifest)?)?;
    if let Some(fields) = descriptor.as_object_mut() {
        fields.insert("annotations".into(), json!({"org.opencontainers.image.ref.name": name}));
    }
    Ok(descriptor)
}
