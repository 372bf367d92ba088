//! Blocks of commands in the documents that are marked with `sh run`: each is run as it stands in a guest, beside the
//! manifest `web.yaml` of the reference, whose endpoints answer.

use std::{
    fs,
    path::{Path, PathBuf},
};

use cproxy_documents::blocks;
use cproxy_tests::sandbox::Sandbox;

use crate::{
    repository,
    root::{boot, guest, program},
};

/// Mark of a block that is run.
const MARK: &str = "sh run";

/// Page with the manifest.
const REFERENCE: &str = "docs/reference.md";

/// Start of the script of each block.
const PRELUDE: &str = "export PATH=/usr/bin:/bin:/usr/sbin:/sbin\n\
    mount -t sysfs sysfs /sys; mount -t cgroup2 cgroup2 /sys/fs/cgroup; mount -t bpf bpf /sys/fs/bpf\n\
    mkdir -p /tmp/www\n\
    echo the endpoint answers >/tmp/www/index.html; httpd -h /tmp/www -p 8080; cd /etc/cproxy\n\
    set -e\n";

fn documents(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        let (path, kind) = (entry.path(), entry.file_type().unwrap());
        if kind.is_dir() && !path.ends_with("target") && !path.ends_with(".git") {
            documents(&path, found);
        } else if kind.is_file() && path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
}

#[test]
fn marked_commands_of_the_documents_can_be_run_as_they_stand() {
    let sandbox = Sandbox::for_test();
    ["10.244.0.1", "10.244.0.2"].iter().for_each(|address| sandbox.add_address(address));
    let root = guest(&sandbox);
    let reference = fs::read_to_string(repository().join(REFERENCE)).unwrap();
    let manifest = blocks(&reference).into_iter().find(|block| block.text.contains("name: web-1")).unwrap();
    fs::write(root.join("etc/cproxy/web.yaml"), manifest.text).unwrap();
    let mut found = Vec::new();
    documents(repository(), &mut found);
    let mut run = 0;
    for path in found {
        let text = fs::read_to_string(&path).unwrap();
        for block in blocks(&text).into_iter().filter(|block| block.info == MARK) {
            run += 1;
            program(&root, "etc/cproxy/first", &format!("{PRELUDE}{}echo all of it was run\n", block.text));
            let (_, log) = boot(&sandbox, &root, "quiet\n", "/etc/cproxy/first");
            let place = format!("{}:{}", path.display(), block.line);
            assert!(log.contains("\nall of it was run\n"), "{place}: {log}");
        }
    }
    assert_ne!(run, 0, "no block is marked with `{MARK}`");
}
