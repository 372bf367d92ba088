//! Releases of other projects that tests run against, built from their Go modules at the versions that the `go.mod`
//! files below `tests/` pin: etcd, Kubernetes and its tests, CoreDNS, Prometheus's promtool, Helm, and engines of
//! network policies. Real peers find mistakes that an imitation by the agent's authors would share with it. nfpm makes
//! packages, by the `go.mod` in `images/packages`.

use std::{
    fs,
    hash::{DefaultHasher, Hasher as _},
    path::{Path, PathBuf},
    process::{self, Command},
};

use anyhow::{Context as _, Result};

use crate::{paths, run, setup};

/// Programs of one release.
pub(crate) struct Release {
    /// Name in messages.
    name: &'static str,
    /// Variable with the directory of the binaries, for tests.
    pub(crate) variable: &'static str,
    /// The directory of the Go module that pins the versions.
    pub(crate) home: &'static str,
    /// The directory of its binaries in the cache.
    module: &'static str,
    /// The Go module whose version counts.
    source: &'static str,
    /// Packages of the programs.
    packages: &'static [&'static str],
    /// Whether etcd is built, too.
    has_etcd: bool,
    /// The package whose tests are built as a program.
    test_package: Option<&'static str>,
}

/// The Kubernetes that tests and benchmarks use.
pub(crate) const KUBERNETES: Release = Release {
    name: "Kubernetes",
    variable: "CPROXY_CONTROL_PLANE",
    home: "tests/control-plane",
    module: "control-plane",
    source: "k8s.io/kubernetes",
    packages: &[
        "k8s.io/kubernetes/cmd/kube-apiserver",
        "k8s.io/kubernetes/cmd/kube-proxy",
        "k8s.io/kubernetes/cmd/kubectl",
    ],
    has_etcd: true,
    test_package: None,
};

/// The oldest supported Kubernetes, for long tests.
pub(crate) const OLDEST_KUBERNETES: Release = Release {
    variable: "CPROXY_CONTROL_PLANE_OLDEST",
    home: "tests/control-plane-1.30",
    module: "control-plane-1.30",
    packages: &["k8s.io/kubernetes/cmd/kube-apiserver"],
    has_etcd: false,
    ..KUBERNETES
};

/// The rest of a control plane, for Deployments.
pub(crate) const CONTROLLERS: Release = Release {
    name: "Kubernetes's controllers and scheduler",
    variable: "CPROXY_CONTROLLERS",
    home: "tests/controllers",
    module: "controllers",
    packages: &["k8s.io/kubernetes/cmd/kube-controller-manager", "k8s.io/kubernetes/cmd/kube-scheduler"],
    has_etcd: false,
    ..KUBERNETES
};

/// A cluster's nameserver.
pub(crate) const COREDNS: Release = Release {
    name: "CoreDNS",
    variable: "CPROXY_COREDNS",
    home: "tests/coredns",
    module: "coredns",
    source: "github.com/coredns/coredns",
    packages: &["cproxy.dev/tests/coredns"],
    has_etcd: false,
    test_package: None,
};

/// A Prometheus newer than Debian's, for long tests.
pub(crate) const PROMETHEUS: Release = Release {
    name: "promtool",
    variable: "CPROXY_PROMTOOL",
    home: "tests/prometheus",
    module: "prometheus",
    source: "github.com/prometheus/prometheus",
    packages: &["github.com/prometheus/prometheus/cmd/promtool"],
    has_etcd: false,
    test_package: None,
};

/// Helm, which renders and installs the chart in tests.
pub(crate) const HELM: Release = Release {
    name: "Helm",
    variable: "CPROXY_HELM",
    home: "tests/helm",
    module: "helm",
    source: "helm.sh/helm/v3",
    packages: &["helm.sh/helm/v3/cmd/helm"],
    has_etcd: false,
    test_package: None,
};

/// Two engines of network policies, whose verdicts tests compare with cproxy's, and the cases that one generates. The
/// other judges packets, too, in a benchmark.
pub(crate) const POLICY_ENGINES: Release = Release {
    name: "kube-network-policies",
    variable: "CPROXY_POLICY_ENGINES",
    home: "tests/policies",
    module: "policies",
    source: "sigs.k8s.io/kube-network-policies",
    packages: &["cproxy.dev/tests/policies", "cproxy.dev/tests/policies/cases"],
    has_etcd: false,
    test_package: None,
};

/// The tests with which Kubernetes tests clusters, and the program in its images for tests.
pub(crate) const E2E: Release = Release {
    name: "Kubernetes's e2e.test",
    variable: "CPROXY_E2E",
    home: "tests/e2e",
    module: "e2e",
    packages: &["k8s.io/kubernetes/test/images/agnhost"],
    has_etcd: false,
    test_package: Some("k8s.io/kubernetes/test/e2e"),
    ..KUBERNETES
};

/// A provider whose pods are network namespaces.
pub(crate) const NETPOL_PROVIDER: Release = Release {
    name: "the provider of network namespaces, virtual-kubelet",
    variable: "CPROXY_NETPOL_PROVIDER",
    home: "tests/netpol",
    module: "netpol",
    source: "github.com/virtual-kubelet/virtual-kubelet",
    packages: &["cproxy.dev/tests/netpol"],
    has_etcd: false,
    test_package: None,
};

/// Writer of packages for Debian, Fedora and Alpine.
pub(crate) const NFPM: Release = Release {
    name: "nfpm",
    variable: "CPROXY_NFPM",
    home: "images/packages",
    module: "nfpm",
    source: "github.com/goreleaser/nfpm/v2",
    packages: &["github.com/goreleaser/nfpm/v2/cmd/nfpm"],
    has_etcd: false,
    test_package: None,
};

/// The start of the name of a directory that is being built, before the process's id.
pub(crate) const BUILDING: &str = "building-";

/// The package of etcd's program.
const ETCD: &str = "go.etcd.io/etcd/server/v3";

/// Builds missing binaries of the control plane and prints their directory.
pub(crate) fn run() -> Result<()> {
    println!("{}", KUBERNETES.ensure()?.display());
    Ok(())
}

/// A version, and the directory of its binaries.
struct Place {
    version: String,
    parent: PathBuf,
    directory: PathBuf,
}

impl Release {
    /// The Go module that pins the versions.
    pub(crate) fn source(&self) -> PathBuf {
        paths::workspace().join(self.home)
    }

    /// The version that the Go module pins.
    pub(crate) fn version(&self) -> Option<String> {
        self.place().ok().map(|place| place.version)
    }

    /// Whether the binaries are there.
    pub(crate) fn is_built(&self) -> bool {
        self.place().is_ok_and(|place| place.directory.is_dir())
    }

    /// The directory of the binaries, built if they are missing or of other versions.
    pub(crate) fn ensure(&self) -> Result<PathBuf> {
        let Place { version, parent, directory } = self.place()?;
        let name = self.name;
        if directory.is_dir() {
            run::report(format!("releases: found {name} {version} in {}", directory.display()));
            return Ok(directory);
        }
        setup::for_releases()?;
        run::report(format!("releases: building {name} {version} from source, 3 to 6 minutes on two cores (once)"));
        self.build(&version, &directory)?;
        remove_others(&parent, &directory)?;
        run::report(format!("releases: built {}", directory.display()));
        Ok(directory)
    }

    fn place(&self) -> Result<Place> {
        let file = self.source().join("go.mod");
        let module = read(&file)?;
        let version = version_of(&module, self.source);
        let version = version.with_context(|| format!("{} names no {}", file.display(), self.source))?.to_owned();
        let parent = paths::cache()?.join(self.module);
        let mut inputs = vec![module, read(&self.source().join("go.sum"))?];
        inputs.extend(own_sources(&self.source())?);
        let directory = parent.join(key(&version, &inputs.iter().map(String::as_str).collect::<Vec<_>>()));
        Ok(Place { version, parent, directory })
    }

    /// Builds beside the final place and renames, so that an interrupted build never looks like a finished one.
    fn build(&self, version: &str, directory: &Path) -> Result<()> {
        let temporary = directory.with_file_name(format!("{BUILDING}{}", process::id()));
        fs::create_dir_all(&temporary).with_context(|| format!("creating {}", temporary.display()))?;
        let building = format!("building {}", self.name);
        run::run_logged(self.go_build(version, &temporary.join("")).args(self.packages), &building)?;
        if self.has_etcd {
            run::run_logged(self.go_build(version, &temporary.join("etcd")).arg(ETCD), "building etcd")?;
        }
        if let Some(package) = self.test_package {
            let program = temporary.join(format!("{}.test", package.rsplit('/').next().unwrap_or(package)));
            run::run_logged(self.go(&["test", "-c"], version, &program).arg(package), &building)?;
        }
        match fs::rename(&temporary, directory) {
            Err(_) if directory.is_dir() => Ok(()), // another process was faster; what it built is the same
            renamed => renamed.with_context(|| format!("renaming {} to {}", temporary.display(), directory.display())),
        }
    }

    fn go_build(&self, version: &str, output: &Path) -> Command {
        self.go(&["build"], version, output)
    }

    fn go(&self, words: &[&str], version: &str, output: &Path) -> Command {
        let mut command = Command::new("go");
        command.current_dir(self.source()).env("CGO_ENABLED", "0").args(words);
        command.args(["-trimpath", "-buildvcs=false", "-ldflags", &linker_flags(version), "-o"]).arg(output);
        command
    }
}

fn read(file: &Path) -> Result<String> {
    fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))
}

/// Go files of the pinning module itself, in the order of their names.
fn own_sources(directory: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(directory).with_context(|| format!("reading {}", directory.display()))?;
    let mut files = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "go"));
    files.sort();
    files.iter().map(|file| read(file)).collect()
}

/// Name of a set of binaries, from everything that determines their content.
fn key(version: &str, inputs: &[&str]) -> String {
    let mut hasher = DefaultHasher::new();
    for input in inputs.iter().copied().chain([linker_flags(version).as_str()]) {
        hasher.write(input.as_bytes());
        hasher.write_u8(0xff);
    }
    format!("{version}-{:016x}", hasher.finish())
}

/// Strips the binaries and gives them the version that a release build would have: without it kube-apiserver calls
/// itself v0.0.0 and clients that look at the version misjudge it.
fn linker_flags(version: &str) -> String {
    let mut numbers = version.trim_start_matches('v').split('.');
    let (major, minor) = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
    let package = "k8s.io/component-base/version";
    format!("-s -w -X {package}.gitVersion={version} -X {package}.gitMajor={major} -X {package}.gitMinor={minor}")
}

/// Removes earlier versions and interrupted builds.
pub(crate) fn remove_others(parent: &Path, keep: &Path) -> Result<()> {
    for entry in fs::read_dir(parent).with_context(|| format!("reading {}", parent.display()))? {
        let path = entry.context("reading a directory entry")?.path();
        if path != keep && !is_being_built(&path) {
            fs::remove_dir_all(&path).with_context(|| format!("removing {}", path.display()))?;
        }
    }
    Ok(())
}

/// Whether a running process is building into this directory.
fn is_being_built(path: &Path) -> bool {
    let builder = path.file_name().and_then(|name| name.to_str()?.strip_prefix(BUILDING));
    builder.is_some_and(|process| Path::new("/proc").join(process).exists())
}

/// The version that a go.mod requires of `module`.
fn version_of<'a>(go_mod: &'a str, module: &str) -> Option<&'a str> {
    go_mod.lines().find_map(|line| {
        let mut words = line.trim().trim_start_matches("require ").split_whitespace();
        (words.next() == Some(module)).then(|| words.next())?.filter(|version| version.starts_with('v'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GO_MOD: &str = "module x\n\ngo 1.26.0\n\ntool (\n\tk8s.io/kubernetes/cmd/kubectl\n)\n\nrequire (\n\
        \tk8s.io/kubernetes v1.36.1 // indirect\n\tk8s.io/api v0.36.1\n)\nreplace k8s.io/api => k8s.io/api v0.36.1\n";

    #[test]
    fn the_version_comes_from_the_require_line() {
        assert_eq!(version_of(GO_MOD, "k8s.io/kubernetes"), Some("v1.36.1"));
        assert_eq!(version_of("require k8s.io/kubernetes v1.2.3\n", "k8s.io/kubernetes"), Some("v1.2.3"));
        assert_eq!(version_of(GO_MOD, "k8s.io/kubelet"), None);
    }

    #[test]
    fn the_key_changes_with_each_input() {
        let key_of = |module, sums| key("v1.36.1", &[module, sums]);
        assert_eq!(key_of("a", "b"), key_of("a", "b"));
        assert_ne!(key_of("a", "b"), key_of("ab", ""));
        assert_ne!(key_of("a", "b"), key_of("a", "c"));
    }

    #[test]
    fn only_a_live_process_keeps_its_unfinished_build() {
        assert!(is_being_built(Path::new(&format!("/c/building-{}", process::id()))));
        assert!(!is_being_built(Path::new("/c/building-4294967295")) && !is_being_built(Path::new("/c/v1.36.0-0")));
    }

    #[test]
    fn binaries_say_their_version() {
        let flags = linker_flags("v1.36.1");
        assert!(flags.contains("gitVersion=v1.36.1") && flags.contains("gitMajor=1") && flags.contains("gitMinor=36"));
    }
}
