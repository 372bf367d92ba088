//! Blocks of commands in the documents that are marked with `sh run`: each is run as it stands in a guest, beside the
//! manifest `web.yaml` of the reference, whose endpoints answer.

use std::{
    fs,
    path::{Path, PathBuf},
};

use cproxy_documents::blocks;
use cproxy_tests::sandbox::Sandbox;
use serde_json::Value;

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

/// Constructors of a line of `cproxy check`, up to its name.
const MAKE_LINES: [&str; 2] = ["required(\"", "optional(\""];

/// Page with a configuration of Firecracker.
const FIRECRACKER: &str = "docs/integrations/firecracker.md";

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

#[test]
fn the_reference_has_each_line_of_check() {
    let diagnose = repository().join("cproxy/src/diagnose");
    let reference = fs::read_to_string(repository().join(REFERENCE)).unwrap();
    let mut sources = vec![diagnose.join("check.rs")];
    sources.extend(fs::read_dir(diagnose.join("check")).unwrap().map(|entry| entry.unwrap().path()));
    let mut names = 0;
    for path in sources {
        let source = fs::read_to_string(&path).unwrap();
        let code = source.split("#[cfg(test)]").next().unwrap();
        for line in MAKE_LINES.iter().flat_map(|call| code.split(call).skip(1)) {
            let name = line.split('"').next().unwrap();
            let is_of_many = name.starts_with("map_") || name.starts_with("program_");
            assert!(is_of_many || reference.contains(&format!("`{name}`")), "{REFERENCE} lacks `{name}`: {path:?}");
            names += 1;
        }
    }
    assert!(names > 20, "{names}");
}

#[test]
fn the_agent_takes_the_settings_of_firecrackers_configuration() {
    let sandbox = Sandbox::for_test();
    let root = guest(&sandbox);
    let page = fs::read_to_string(repository().join(FIRECRACKER)).unwrap();
    let configuration = blocks(&page).into_iter().find(|block| block.info == "json").unwrap();
    let configuration: Value = serde_json::from_str(&configuration.text).unwrap();
    let arguments = configuration["boot-source"]["boot_args"].as_str().unwrap();
    let settings: Vec<_> =
        arguments.split(' ').filter_map(|word| word.strip_prefix("cproxy.")?.split_once('=')).collect();
    assert!(!settings.is_empty(), "{arguments}");
    // An agent that refuses a setting ends and answers nobody.
    program(&root, "etc/cproxy/workload", "until cproxy get config 2>/dev/null; do sleep 0.1; done\n");
    // As Firecracker changes it for the root device, and without the time for a server that there is not.
    let command_line = format!("{arguments} cproxy.timeout=0 cproxy.on-timeout=start root=/dev/vda rw\n");
    let (_, log) = boot(&sandbox, &root, &command_line, "/init");
    for (name, value) in settings {
        let is_it = |line: &str| {
            let columns: Vec<_> = line.split_whitespace().take(2).collect();
            columns == [name, value] && line.ends_with(&format!("kernel parameter cproxy.{name}"))
        };
        assert!(log.lines().any(is_it), "{name}={value}:\n{log}");
    }
    assert!(log.contains("init: ending with 0"), "{log}");
}
