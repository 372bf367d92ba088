//! The files of a release, read by the tools of those that take them, and made twice.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use cproxy_tests::process::cproxy_binary;
use serde_json::Value;

use crate::machine::{agent_package, release, release_file};

/// Runs a command to its end and returns its output.
fn output(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A directory that is removed when it is dropped.
pub(crate) struct Scratch(pub(crate) PathBuf);

impl Scratch {
    pub(crate) fn new(name: &str) -> Self {
        let directory = std::env::temp_dir().join(format!("cproxy-test-{}-{name}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        Self(directory)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

/// Names of the files in a directory.
fn names(directory: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// Asserts that both directories have the same files, byte for byte.
pub(crate) fn assert_same(first: &Path, second: &Path) {
    let all = names(first);
    assert!(!all.is_empty());
    assert_eq!(all, names(second));
    let differs = |name: &&String| fs::read(first.join(name)).unwrap() != fs::read(second.join(name)).unwrap();
    let others: Vec<_> = all.iter().filter(differs).collect();
    assert!(others.is_empty(), "made twice, these differ: {others:?}");
}

fn version() -> String {
    let version = output(text(&cproxy_binary()), &["version"]);
    version.split_whitespace().nth(1).unwrap().to_owned()
}

fn xtask() -> String {
    std::env::var("CPROXY_XTASK").expect("CPROXY_XTASK is not set: run `cargo xtask test`")
}

/// Options that make a release of the tested programs, without a kernel.
fn of_tested_programs() -> Vec<String> {
    let relay = std::env::var("CPROXY_RELAY_BIN").expect("CPROXY_RELAY_BIN is not set: run `cargo xtask test`");
    let agent = cproxy_binary();
    let options =
        ["dist", "--without", "kernel", "--target", std::env::consts::ARCH, "--agent", text(&agent), "--relay"];
    options.into_iter().map(str::to_owned).chain([relay]).collect()
}

/// Runs `cargo xtask` without a terminal; returns whether it succeeded, and its output.
fn run_xtask(options: &[String]) -> (bool, String) {
    let output = Command::new(xtask()).args(options).env_remove("CPROXY_RELEASE_KEY").stdin(Stdio::null()).output();
    let output = output.unwrap();
    let text = String::from_utf8_lossy(&[output.stderr, output.stdout].concat()).into_owned();
    (output.status.success(), text)
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn the_same_programs_give_the_same_files_at_another_time_and_place() {
    let scratch = Scratch::new("twice");
    let xtask = xtask();
    let options = of_tested_programs();
    // The release of all tests is the first one. Another directory, umask, time zone and language must not show.
    let second = scratch.0.join("second/release");
    fs::create_dir_all(second.parent().unwrap()).unwrap();
    let script = "umask 077; export TZ=Asia/Tokyo LC_ALL=C.UTF-8; exec \"$@\" 2>&1";
    let options = options.iter().map(String::as_str).chain(["--out", text(&second)]);
    let said = output("sh", &["-c", script, "sh", &xtask].into_iter().chain(options).collect::<Vec<_>>());
    assert_same(&release(), &second);
    // Advisories change from day to day: the command prints their number, and no file has it.
    let lines: Vec<_> = said.lines().rev().take(3).collect();
    assert!(lines[0] == text(&second) && lines[1].starts_with("dist: advisories: "), "{said}");
    assert_eq!(lines[2], "dist: not signed: there is no key (--key)", "{said}");
}

#[test]
fn a_publisher_is_named_and_its_key_signs_the_release() {
    let scratch = Scratch::new("publisher");
    let path = |name: &str| scratch.0.join(name);
    let key = |name: &str| {
        let (secret, public) = (path(&format!("{name}.key")), path(&format!("{name}.pub")));
        output("minisign", &["-G", "-W", "-s", text(&secret), "-p", text(&public)]);
        (text(&secret).to_owned(), fs::read_to_string(public).unwrap().lines().last().unwrap().to_owned())
    };
    let ((secret, public), (other, _)) = (key("release"), key("other"));
    let (publisher, out) = (path("publisher.toml"), path("release"));
    let settings = |key: &str| {
        let settings = "forge = 'https://forge.example/cproxy'\nsecurity = 'security@publisher.example'\n\
                        maintainer = 'A Team <team@publisher.example>'\n";
        fs::write(&publisher, format!("{settings}minisign-key = '{key}'\n")).unwrap();
    };
    let dist = |secret: &str| {
        let more = ["--out", text(&out), "--publisher", text(&publisher), "--key", secret];
        run_xtask(&of_tested_programs().into_iter().chain(more.map(str::to_owned)).collect::<Vec<_>>())
    };

    settings("");
    let (is_made, said) = dist(&secret);
    assert!(!is_made && said.contains("publisher.toml names no `minisign-key`"), "{said}");
    settings(&public);
    let (is_made, said) = dist(&other);
    assert!(!is_made && !out.exists() && said.contains("publisher.toml names another key than that of"), "{said}");
    let (is_made, said) = dist(&secret);
    assert!(is_made && said.contains("\ndist: signed: SHA256SUMS.minisig\n"), "{said}");

    let verifies = || {
        let script =
            "cd \"$1\" && minisign -V -q -P \"$2\" -m SHA256SUMS && sha256sum --quiet --strict --check SHA256SUMS";
        let verify = Command::new("sh").args(["-c", script, "sh", text(&out), &public]).output();
        verify.unwrap().status.success()
    };
    assert!(verifies());
    let changed = |name: &str| {
        let bytes = fs::read(out.join(name)).unwrap();
        fs::write(out.join(name), [&bytes[..], b"\n"].concat()).unwrap();
        let is_noticed = !verifies();
        fs::write(out.join(name), bytes).unwrap();
        is_noticed
    };
    for name in ["SHA256SUMS", "SECURITY.md", &format!("cproxy-{}.intoto.json", version())] {
        assert!(changed(name), "a change of {name} is not noticed");
    }
    assert!(verifies());

    let security = fs::read_to_string(out.join("SECURITY.md")).unwrap();
    assert!(security.contains("security@publisher.example") && !security.contains("no publisher"), "{security}");
    let package = names(&out).into_iter().find(|name| name.starts_with("cproxy_") && name.ends_with(".deb")).unwrap();
    let fields = output("dpkg-deb", &["--field", text(&out.join(package))]);
    for line in ["Maintainer: A Team <team@publisher.example>", "Homepage: https://forge.example/cproxy"] {
        assert!(fields.lines().any(|other| other == line), "{line}: {fields}");
    }
    let image = format!("oci-archive:{}:{}", out.join(format!("cproxy-{}-oci.tar", version())).display(), version());
    let config: Value = serde_json::from_str(&output("skopeo", &["inspect", "--config", &image])).unwrap();
    let source = config.pointer("/config/Labels/org.opencontainers.image.source").and_then(Value::as_str);
    assert_eq!(source, Some("https://forge.example/cproxy"), "{config}");
}

#[test]
fn without_a_publisher_no_file_has_an_address_of_one() {
    let security = fs::read_to_string(release().join("SECURITY.md")).unwrap();
    assert!(security.contains("This build names no publisher") && !security.contains("<!--"), "{security}");
    let fields = output("dpkg-deb", &["--field", text(&agent_package())]);
    assert!(!fields.contains("Homepage") && fields.contains("\nMaintainer: cproxy\n"), "{fields}");
}

#[test]
fn the_documents_and_the_files_that_they_name_are_in_an_archive_of_their_own() {
    let list = output("tar", &["-tzf", text(&release_file("cproxy-deploy-", ".tar.gz"))]);
    for file in [
        "README.md",
        "docs/reference.md",
        "docs/images/where-cproxy-sits.svg",
        "images/init",
        "images/kata/prestart/10-cproxy",
        "images/kernel/cproxy.config",
        "images/kubernetes/overlays/baked-in/kustomization.yaml",
        "images/monitoring/rules.yaml",
        "images/peer-pods/kata-agent.service.d/10-cproxy.conf",
    ] {
        assert!(list.lines().any(|line| line == file), "{file}: {list}");
    }
}

#[test]
fn checksums_and_provenance_name_every_file() {
    let checked = output("sh", &["-c", "cd \"$1\" && sha256sum --strict --check SHA256SUMS", "sh", text(&release())]);
    assert!(checked.lines().all(|line| line.ends_with(": OK")), "{checked}");
    let mut all = names(&release());
    assert!(all.remove("SHA256SUMS"));
    assert_eq!(checked.lines().filter_map(|line| line.strip_suffix(": OK")).collect::<BTreeSet<_>>().len(), all.len());

    let path = release_file("cproxy-", ".intoto.json");
    let statement = json(&path);
    assert!(all.remove(path.file_name().unwrap().to_str().unwrap()));
    let subjects = statement.get("subject").and_then(Value::as_array).unwrap();
    let subject = |subject: &Value| subject.get("name").and_then(Value::as_str).unwrap().to_owned();
    assert_eq!(subjects.iter().map(subject).collect::<BTreeSet<_>>(), all);
    let predicate = statement.pointer("/predicate/buildDefinition").unwrap();
    let commit = predicate.pointer("/externalParameters/commit").and_then(Value::as_str).unwrap();
    assert!(commit.trim_end_matches("-dirty").len() == 40, "{commit}");
    assert!(predicate.pointer("/internalParameters/toolchain/rustc").is_some());
    let materials = predicate.get("resolvedDependencies").and_then(Value::as_array).unwrap();
    let names: Vec<_> = materials.iter().map(|material| material.get("uri").and_then(Value::as_str).unwrap()).collect();
    assert!(names.iter().any(|name| name.starts_with("pkg:deb/debian/busybox-static")), "{names:?}");
}

#[test]
fn the_program_names_its_debug_information_and_the_archive_has_it() {
    let scratch = Scratch::new("debug");
    let archive = release_file("cproxy-debug-", ".tar.gz");
    output("tar", &["-C", text(&scratch.0), "-xf", text(&archive)]);
    let debug = scratch.0.join("usr/lib/debug/usr/bin/cproxy.debug");
    let link = output("readelf", &["--string-dump=.gnu_debuglink", text(&cproxy_binary())]);
    assert!(link.contains("cproxy.debug"), "{link}");
    let id = |path: &Path| {
        let notes = output("readelf", &["--notes", text(path)]);
        notes.lines().find_map(|line| line.trim().strip_prefix("Build ID: ").map(str::to_owned)).expect("a build id")
    };
    assert_eq!(id(&debug), id(&cproxy_binary()));
    let symbols = output("readelf", &["--symbols", "--wide", text(&debug)]);
    assert!(symbols.lines().any(|line| line.contains(" FUNC ") && line.contains("cproxy")), "no symbols");
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    for path in [&debug, &cproxy_binary()] {
        let bytes = fs::read(path).unwrap();
        let here = text(here).as_bytes();
        assert!(!bytes.windows(here.len()).any(|part| part == here), "{} has a path of its build", path.display());
    }
}

#[test]
fn the_archive_has_all_that_an_installation_by_hand_needs() {
    let name = format!("cproxy-{}-linux-{}", version(), std::env::consts::ARCH);
    let list = output("tar", &["-tzvf", text(&release().join(format!("{name}.tar.gz")))]);
    for (mode, path) in [
        ("-rwxr-xr-x", "bin/cproxy"),
        ("-rw-r--r--", "etc/cproxy/cproxy.conf"),
        ("-rw-r--r--", "systemd/cproxy.service"),
        ("-rw-r--r--", "systemd/cproxy-wait.service"),
        ("-rwxr-xr-x", "init.d/cproxy"),
        ("-rw-r--r--", "logrotate.d/cproxy"),
        ("-rwxr-xr-x", "openrc/cproxy-wait"),
        ("-rwxr-xr-x", "s6/cproxy/run"),
        ("-rw-r--r--", "man/cproxy-run.8"),
        ("-rw-r--r--", "completions/_cproxy"),
        ("-rw-r--r--", "README.md"),
        ("-rw-r--r--", "LICENSE"),
        ("-rw-r--r--", "licences.txt"),
    ] {
        let is_it = |line: &&str| line.starts_with(mode) && line.ends_with(&format!(" {name}/{path}"));
        assert!(list.lines().any(|line| is_it(&line)), "{mode} {path}:\n{list}");
    }
    let program = release().join(&name);
    assert_eq!(program.metadata().unwrap().permissions().mode() & 0o777, 0o755);
    assert!(fs::read(program).unwrap() == fs::read(cproxy_binary()).unwrap(), "another program");
}

#[test]
fn a_bill_of_materials_has_all_components_with_versions_licences_and_hashes() {
    for (program, expected) in [("cproxy", "aya"), ("cproxy-relay", "hyper")] {
        let path = release().join(format!("{program}-{}-linux-{}.cdx.json", version(), std::env::consts::ARCH));
        let bill = json(&path);
        assert_eq!(bill.get("bomFormat").and_then(Value::as_str), Some("CycloneDX"));
        let components = bill.get("components").and_then(Value::as_array).unwrap();
        let of = |component: &Value, field: &str| component.pointer(field).and_then(Value::as_str).map(str::to_owned);
        assert!(components.iter().any(|component| of(component, "/name").as_deref() == Some(expected)));
        let mut references: BTreeSet<_> = bill
            .pointer("/metadata/component/bom-ref")
            .and_then(Value::as_str)
            .into_iter()
            .map(str::to_owned)
            .collect();
        for component in components {
            for field in ["/name", "/version", "/licenses/0/expression"] {
                assert!(of(component, field).is_some_and(|value| !value.is_empty()), "{field}: {component}");
            }
            assert!(of(component, "/purl").is_none() || of(component, "/hashes/0/content").unwrap().len() == 64);
            assert!(references.insert(of(component, "/bom-ref").unwrap()), "twice: {component}");
        }
        let dependencies = bill.get("dependencies").and_then(Value::as_array).unwrap();
        for dependency in dependencies {
            let on = dependency.get("dependsOn").and_then(Value::as_array).into_iter().flatten();
            let named = on.chain(dependency.get("ref"));
            assert!(named.filter_map(Value::as_str).all(|name| references.contains(name)), "{dependency}");
        }
    }
}

#[test]
fn debians_tools_read_the_packages() {
    let package = agent_package();
    let fields = output("dpkg-deb", &["--field", text(&package)]);
    let architecture = output("dpkg", &["--print-architecture"]);
    for line in
        ["Package: cproxy".to_owned(), format!("Version: {}-1", version()), format!("Architecture: {architecture}")]
    {
        assert!(fields.contains(line.trim()), "{line}: {fields}");
    }
    let list = output("dpkg-deb", &["--contents", text(&package)]);
    assert!(list.lines().all(|line| line.contains(" root/root ")), "{list}");
}

#[test]
fn fedoras_tools_read_the_packages() {
    let package = release_file(&format!("cproxy-{}-1.", version()), ".rpm");
    let query = |arguments: &[&str]| {
        output("rpm", &[&["--query", "--package", "--nosignature"], arguments, &[text(&package)]].concat())
    };
    let format = "%{NAME} %{VERSION} %{RELEASE} %{ARCH} %{BUILDHOST}";
    let expected = format!("cproxy {} 1 {} cproxy", version(), std::env::consts::ARCH);
    assert_eq!(query(&["--queryformat", format]), expected);
    assert_eq!(query(&["--configfiles"]).trim(), "/etc/cproxy/cproxy.conf");
    let files = query(&["--list"]);
    for file in [
        "/usr/bin/cproxy",
        "/usr/lib/systemd/system/cproxy.service",
        "/usr/lib/systemd/system/cproxy-wait.service",
        "/usr/share/man/man8/cproxy.8.gz",
        "/usr/share/zsh/site-functions/_cproxy",
    ] {
        assert!(files.lines().any(|line| line == file), "{file}: {files}");
    }
    assert!(!files.contains("/etc/init.d") && !files.contains("/etc/logrotate.d"), "{files}");
    let scripts = query(&["--scripts"]);
    for part in ["preinstall", "postinstall", "preuninstall", "postuninstall"] {
        assert!(scripts.contains(&format!("{part} scriptlet")), "{part}: {scripts}");
    }
    let scratch = Scratch::new("rpm");
    // Names in the archive are absolute.
    let unpack =
        "cd \"$1\" && rpm2cpio \"$2\" | cpio --quiet --extract --make-directories --no-absolute-filenames 2>/dev/null";
    output("sh", &["-c", unpack, "sh", text(&scratch.0), text(&package)]);
    assert!(fs::read(scratch.0.join("usr/bin/cproxy")).unwrap() == fs::read(cproxy_binary()).unwrap());
}

#[test]
fn an_alpine_package_has_its_parts() {
    let package = release_file(&format!("cproxy-{}-r1.", version()), ".apk");
    // Three archives, one behind the other, of which the last one alone ends as an archive does.
    let list = output("sh", &["-c", "tar -tzf \"$1\" --ignore-zeros", "sh", text(&package)]);
    for file in [
        ".PKGINFO",
        ".post-install",
        ".post-upgrade",
        ".pre-deinstall",
        "usr/bin/cproxy",
        "etc/init.d/cproxy",
        "etc/init.d/cproxy-wait",
        "etc/logrotate.d/cproxy",
    ] {
        assert!(list.lines().any(|line| line == file), "{file}: {list}");
    }
    let about = output("sh", &["-c", "tar -xzOf \"$1\" --ignore-zeros .PKGINFO", "sh", text(&package)]);
    for line in ["pkgname = cproxy".to_owned(), format!("pkgver = {}-r1", version())] {
        assert!(about.lines().any(|other| other == line), "{line}: {about}");
    }
    let script = output("sh", &["-c", "tar -xzOf \"$1\" --ignore-zeros etc/init.d/cproxy", "sh", text(&package)]);
    assert!(script.starts_with("#!/sbin/openrc-run\n"), "{script}");
}

#[test]
fn container_tools_find_this_machines_image_in_the_index() {
    for (program, user) in [("cproxy", "0:0"), ("cproxy-relay", "65532:65532")] {
        let archive = release().join(format!("{program}-{}-oci.tar", version()));
        let image = format!("oci-archive:{}:{}", archive.display(), version());
        let config = output("skopeo", &["inspect", "--config", &image]);
        assert!(config.contains(&format!("\"User\": \"{user}\"")), "{config}");
        let raw: Value = serde_json::from_str(&output("skopeo", &["inspect", "--raw", &image])).unwrap();
        let platform = raw.pointer("/manifests/0/platform/architecture").and_then(Value::as_str);
        assert_eq!(platform, Some(output("dpkg", &["--print-architecture"]).trim()), "{raw}");
    }
}

#[test]
fn a_system_extension_has_usr_alone_and_names_its_system() {
    let scratch = Scratch::new("extension");
    let extension = release_file("cproxy_", ".raw");
    let root = scratch.0.join("cproxy");
    output("unsquashfs", &["-quiet", "-no-progress", "-dest", text(&root), text(&extension)]);
    assert_eq!(names(&root), BTreeSet::from(["usr".to_owned()]));
    let about = fs::read_to_string(root.join("usr/lib/extension-release.d/extension-release.cproxy")).unwrap();
    assert!(about.starts_with("ID=_any\nARCHITECTURE="), "{about}");
    assert_eq!(root.join("usr/bin/cproxy").metadata().unwrap().permissions().mode() & 0o777, 0o755);
}

#[test]
fn a_release_never_replaces_another_directory() {
    let scratch = Scratch::new("precious");
    fs::write(scratch.0.join("precious"), "").unwrap();
    let xtask = xtask();
    let made = Command::new(&xtask).args(["dist", "--out"]).arg(&scratch.0).output().unwrap();
    let said = String::from_utf8_lossy(&made.stderr).into_owned();
    assert!(!made.status.success() && said.contains("is there and is no release: move it away"), "{said}");
    assert_eq!(names(&scratch.0), BTreeSet::from(["precious".to_owned()]));
    let made = Command::new(&xtask).args(["dist", "--agent", "/nowhere"]).output().unwrap();
    let said = String::from_utf8_lossy(&made.stderr).into_owned();
    assert!(!made.status.success() && said.contains("--agent is of one architecture: name it with --target"), "{said}");
}
