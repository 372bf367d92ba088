//! `cargo xtask dist`: a release directory with everything that users install, for each architecture. The same commit
//! and toolchain give the same bytes, in whatever directory and whenever they are made.

mod components;
mod documents;
mod files;
mod images;
mod packages;
mod provenance;
mod signature;

use std::{
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process,
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, ValueEnum};

use self::{components::Component, files::Documents, signature::Signer};
use crate::{
    advisories,
    architecture::Architecture,
    binary::{AGENT, Binary, Program, RELAY},
    image::{Stamp, read},
    kernels, manual, paths,
    publisher::{Publisher, PublisherArguments},
    run, setup,
    steps::{Step, Steps},
};

/// Variable with a release, for tests.
pub(crate) const VARIABLE: &str = "CPROXY_RELEASE";

/// File with the digests of all others.
const CHECKSUMS: &str = "SHA256SUMS";

/// End of the name of a kernel as ELF file.
const ELF_KERNEL: &str = "vmlinux";

/// Options of `dist`.
#[derive(Args)]
pub(crate) struct DistArguments {
    /// Architectures to build for; default: all
    #[arg(long, value_name = "ARCHITECTURE")]
    target: Vec<Architecture>,
    /// Release directory; default: dist/release-VERSION in cargo's output directory
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Makes only these parts
    #[arg(long, value_name = "PART")]
    only: Vec<Part>,
    /// Leaves out these parts
    #[arg(long, value_name = "PART")]
    without: Vec<Part>,
    /// Revision of the packages of this version
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    revision: u32,
    /// Uses this agent, of one architecture, instead of building one. Its debug information is in FILE.debug
    #[arg(long, value_name = "FILE")]
    agent: Option<PathBuf>,
    /// The same for the relay
    #[arg(long, value_name = "FILE")]
    relay: Option<PathBuf>,
    /// Secret key of minisign that signs the release; publisher.toml names its public key
    #[arg(long, value_name = "FILE", env = "CPROXY_RELEASE_KEY")]
    key: Option<PathBuf>,
    #[command(flatten)]
    publisher: PublisherArguments,
}

/// Part of a release.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Programs, their debug information, and archives with all of their files
    Programs,
    /// Packages for Debian, Fedora and Alpine
    Packages,
    /// OCI images, files over a root file system, initramfs, system extension, and manifests and hooks
    Images,
    /// A guest's kernel; its first build takes 10 minutes for each architecture
    Kernel,
    /// Bills of materials and licences
    Documents,
}

/// A program that is released, for one architecture.
pub(crate) struct Released {
    program: &'static Program,
    file: PathBuf,
    debug: PathBuf,
    components: Vec<Component>,
    documents: Documents,
}

/// All programs for one architecture.
pub(crate) struct Build {
    target: Architecture,
    agent: Released,
    relay: Released,
}

impl Build {
    fn programs(&self) -> [&Released; 2] {
        [&self.agent, &self.relay]
    }
}

/// The release directory while it is made. A failed release never looks like a finished one.
pub(crate) struct Release {
    out: PathBuf,
    unfinished: PathBuf,
    /// Directory for intermediate files.
    scratch: PathBuf,
    stamp: Stamp,
    revision: u32,
    publisher: Publisher,
    signer: Option<Signer>,
}

/// Version of everything in a release.
pub(crate) fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

fn kernel_name(version: &str, target: Architecture, end: &str) -> String {
    format!("cproxy-guest-kernel-{version}-{}.{end}", target.name())
}

/// Makes the release and prints its path. What is known of its dependencies changes from day to day, and the files of
/// a release do not: it is said, and in none of them.
pub(crate) fn run(arguments: &DistArguments) -> Result<()> {
    let release = make(arguments)?;
    let signature = release.join(signature::name(CHECKSUMS));
    if signature.exists() {
        run::report(format!("dist: signed: {}", signature::name(CHECKSUMS)));
    } else {
        run::report("dist: not signed: there is no key (--key)");
    }
    run::report(format!("dist: {}", advisories::state()));
    println!("{}", release.display());
    Ok(())
}

/// A release of these programs, which are this machine's, for tests. Its kernel is left out.
pub(crate) fn for_tests(agent: &Binary, relay: &Binary) -> Result<PathBuf> {
    setup::for_dist_tests()?;
    make(&DistArguments {
        target: vec![Architecture::of_host()?],
        out: Some(paths::target().join("dist/release-for-tests")),
        only: Vec::new(),
        without: vec![Part::Kernel],
        revision: 1,
        agent: Some(agent.shipped.clone()),
        relay: Some(relay.shipped.clone()),
        key: None,
        publisher: PublisherArguments::default(),
    })
}

fn make(arguments: &DistArguments) -> Result<PathBuf> {
    let targets = arguments.targets()?;
    let mut steps = arguments.steps(&targets);
    let release = Release::begin(arguments)?;
    let mut builds = Vec::new();
    for target in targets {
        steps.next();
        builds.push(arguments.build(target, &release.publisher)?);
    }
    let pages = release.scratch.join("manual");
    if [Part::Programs, Part::Packages].iter().any(|part| arguments.wants(*part)) {
        manual::write(&pages)?;
    }
    for build in &builds {
        steps.next();
        release.add_architecture(arguments, build, &pages)?;
    }
    steps.next();
    release.add_common(arguments, &builds)?;
    release.finish()
}

impl DistArguments {
    fn wants(&self, part: Part) -> bool {
        (self.only.is_empty() || self.only.contains(&part)) && !self.without.contains(&part)
    }

    fn targets(&self) -> Result<Vec<Architecture>> {
        let all = Architecture::value_variants().iter().copied();
        let targets: Vec<_> = all.filter(|one| self.target.is_empty() || self.target.contains(one)).collect();
        let files = [("--agent", &self.agent), ("--relay", &self.relay)];
        if let Some((flag, _)) = files.iter().find(|(_, file)| file.is_some())
            && targets.len() != 1
        {
            bail!("{flag} is of one architecture: name it with --target");
        }
        Ok(targets)
    }

    fn steps(&self, targets: &[Architecture]) -> Steps {
        let build = |target: &Architecture| {
            let is_there = self.agent.is_some() && self.relay.is_some();
            Step::once(format!("programs for {}", target.name()), is_there, 8 * 60)
        };
        let files = |target: &Architecture| Step::new(format!("files for {}", target.name()), 60);
        let steps = targets.iter().map(build).chain(targets.iter().map(files));
        Steps::new("dist", steps.chain([Step::new("files for all architectures", 10)]).collect::<Vec<_>>())
    }

    fn build(&self, target: Architecture, publisher: &Publisher) -> Result<Build> {
        if !target.is_of_host() {
            setup::for_cross(target)?;
        }
        let agent = self.released(&AGENT, self.agent.as_deref(), target, publisher)?;
        let relay = self.released(&RELAY, self.relay.as_deref(), target, publisher)?;
        Ok(Build { target, agent, relay })
    }

    fn released(
        &self,
        program: &'static Program,
        given: Option<&Path>,
        target: Architecture,
        publisher: &Publisher,
    ) -> Result<Released> {
        let (file, debug) = match given {
            Some(file) => (file.to_owned(), file.with_extension("debug")),
            None => {
                let binary = program.build_for(target)?;
                (binary.shipped, binary.debug)
            }
        };
        let is_read = [Part::Programs, Part::Documents].iter().any(|part| self.wants(*part));
        ensure!(!is_read || debug.exists(), "{}: there is none; `cargo xtask build` makes it", debug.display());
        let components = components::of(program, target)?;
        let documents = documents::of(program, &components, publisher)?;
        Ok(Released { program, file, debug, components, documents })
    }
}

impl Release {
    fn begin(arguments: &DistArguments) -> Result<Self> {
        let publisher = arguments.publisher.read()?;
        let signer = arguments.key.as_deref().map(|key| Signer::new(key, &publisher)).transpose()?;
        let default = || paths::target().join(format!("dist/release-{}", version()));
        let out = arguments.out.clone().unwrap_or_else(default);
        ensure!(
            !out.exists() || out.join(CHECKSUMS).is_file(),
            "{} is there and is no release: move it away",
            out.display()
        );
        let beside = |what: &str| {
            let mut name = out.file_name().unwrap_or_default().to_owned();
            name.push(format!(".{what}-{}", process::id()));
            out.with_file_name(name)
        };
        let (unfinished, scratch) = (beside("unfinished"), beside("scratch"));
        for directory in [&unfinished, &scratch] {
            fs::create_dir_all(directory).with_context(|| format!("creating {}", directory.display()))?;
        }
        let (stamp, revision) = (Stamp::find()?, arguments.revision);
        Ok(Self { out, unfinished, scratch, stamp, revision, publisher, signer })
    }

    fn add(&self, name: &str, content: &[u8]) -> Result<()> {
        self.add_with_mode(name, content, 0o644)
    }

    fn add_program(&self, name: &str, content: &[u8]) -> Result<()> {
        self.add_with_mode(name, content, 0o755)
    }

    fn add_with_mode(&self, name: &str, content: &[u8], mode: u32) -> Result<()> {
        let path = self.unfinished.join(name);
        let written = fs::write(&path, content);
        let set = written.and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(mode)));
        set.with_context(|| format!("writing {}", path.display()))
    }

    fn add_architecture(&self, arguments: &DistArguments, build: &Build, manual: &Path) -> Result<()> {
        if arguments.wants(Part::Programs) {
            files::add(self, build, manual)?;
        }
        if arguments.wants(Part::Packages) {
            packages::add(self, build, manual)?;
        }
        if arguments.wants(Part::Images) {
            images::add(self, build)?;
        }
        if arguments.wants(Part::Documents) {
            documents::add(self, build)?;
        }
        if arguments.wants(Part::Kernel) {
            self.add_kernel(build.target)?;
        }
        Ok(())
    }

    /// Adds the guest's kernel in the forms that it has.
    fn add_kernel(&self, target: Architecture) -> Result<()> {
        let built = kernels::built(target, &[])?;
        let files = [(kernels::KERNEL, target.kernel_image()), (kernels::ELF, ELF_KERNEL)];
        for (from, to) in files.into_iter().filter(|(from, _)| built.join(from).exists()) {
            self.add(&kernel_name(version(), target, to), &read(&built.join(from))?)?;
        }
        Ok(())
    }

    fn add_common(&self, arguments: &DistArguments, builds: &[Build]) -> Result<()> {
        if arguments.wants(Part::Images) {
            images::add_common(self, builds)?;
        }
        if arguments.wants(Part::Documents) {
            documents::add_common(self)?;
        }
        Ok(())
    }

    /// Gives the directory, and the packages in it, which nfpm writes, the modes that they have with any umask.
    fn open_to_all(&self) -> Result<()> {
        let entries = fs::read_dir(&self.unfinished).and_then(Iterator::collect::<io::Result<Vec<_>>>);
        let entries = entries.with_context(|| format!("reading {}", self.unfinished.display()))?;
        let is_package =
            |path: &PathBuf| path.extension().is_some_and(|kind| packages::KINDS.iter().any(|k| kind == *k));
        let packages = entries.into_iter().map(|entry| entry.path()).filter(is_package).map(|path| (path, 0o644));
        [(self.unfinished.clone(), 0o755)].into_iter().chain(packages).try_for_each(|(path, mode)| {
            let set = fs::set_permissions(&path, fs::Permissions::from_mode(mode));
            set.with_context(|| format!("changing the mode of {}", path.display()))
        })
    }

    /// Adds provenance, checksums and their signature, and puts the release in place of an earlier one.
    fn finish(self) -> Result<PathBuf> {
        provenance::add(&self)?;
        self.add(CHECKSUMS, provenance::checksums(&self.unfinished)?.as_bytes())?;
        self.signer.as_ref().map_or(Ok(()), |signer| signer.sign(&self.unfinished.join(CHECKSUMS)))?;
        self.open_to_all()?;
        if self.out.exists() {
            fs::remove_dir_all(&self.out).with_context(|| format!("removing {}", self.out.display()))?;
        }
        let renamed = fs::rename(&self.unfinished, &self.out);
        renamed.with_context(|| format!("writing {}", self.out.display()))?;
        Ok(self.out.clone())
    }
}

impl Drop for Release {
    fn drop(&mut self) {
        // After a failure these are of no use, and the failure is what matters.
        for directory in [&self.unfinished, &self.scratch] {
            fs::remove_dir_all(directory).ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use cproxy_documents::blocks;
    use serde_json::Value;

    use super::*;

    /// Directory of guides, and the one with Firecracker's configuration.
    const GUIDES: &str = "docs/integrations";
    const FIRECRACKER: &str = "firecracker.md";

    /// Objects of Firecracker's configuration file with the fields that it requires, and others, by the definitions of
    /// its API 1.17 (src/firecracker/swagger/firecracker.yaml). It refuses a field that it does not know.
    const FIELDS: [(&str, &[&str], &[&str]); 5] = [
        ("boot-source", &["kernel_image_path"], &["boot_args", "initrd_path"]),
        ("drives", &["drive_id", "is_root_device", "path_on_host", "is_read_only"], &["partuuid", "cache_type"]),
        ("network-interfaces", &["iface_id", "host_dev_name"], &["guest_mac", "mtu"]),
        ("vsock", &["guest_cid", "uds_path"], &[]),
        ("machine-config", &["vcpu_count", "mem_size_mib"], &["smt", "track_dirty_pages", "huge_pages"]),
    ];

    /// Names of a release's images and kernels, with the word that documents have for the version.
    fn names() -> Vec<String> {
        let kernels = [
            (Architecture::X86_64, Architecture::X86_64.kernel_image()),
            (Architecture::X86_64, ELF_KERNEL),
            (Architecture::Aarch64, Architecture::Aarch64.kernel_image()),
        ];
        let kernels = kernels.into_iter().map(|(target, end)| kernel_name("VERSION", target, end));
        images::names("VERSION").into_iter().chain(kernels).collect()
    }

    fn guide(name: &str) -> String {
        fs::read_to_string(paths::workspace().join(GUIDES).join(name)).unwrap()
    }

    #[test]
    fn guides_name_files_that_a_release_has() {
        let names = names();
        let mut named = 0;
        for entry in fs::read_dir(paths::workspace().join(GUIDES)).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let text = guide(&name);
            let is_part = |char: char| char.is_ascii_alphanumeric() || "-_.".contains(char);
            let words = text.split(|char| !is_part(char)).map(|word| word.trim_end_matches('.'));
            let of_release = words.filter(|word| word.starts_with("cproxy-") && word.contains("VERSION"));
            for word in of_release {
                named += 1;
                assert!(names.iter().any(|name| name == word), "{name}: a release has no {word}, but {names:?}");
            }
        }
        assert!(named > 10, "{named}");
    }

    #[test]
    fn firecrackers_configuration_has_its_fields_and_files_of_a_release() {
        let found = blocks(&guide(FIRECRACKER)).into_iter().filter(|block| block.info == "json");
        let configurations: Vec<Value> = found.map(|block| serde_json::from_str(&block.text).unwrap()).collect();
        assert_eq!(configurations.len(), 1);
        let object = configurations[0].as_object().unwrap();
        assert_eq!(object.len(), FIELDS.len());
        for (name, required, optional) in FIELDS {
            let value = &object[name];
            let objects = value.as_array().map_or_else(|| vec![value], |list| list.iter().collect());
            assert!(!objects.is_empty(), "{name}");
            for object in objects {
                let fields: Vec<_> = object.as_object().unwrap().keys().map(String::as_str).collect();
                let is_known = |field: &&str| required.contains(field) || optional.contains(field);
                assert!(required.iter().all(|field| fields.contains(field)), "{name}: {fields:?}");
                assert!(fields.iter().all(is_known), "{name}: {fields:?}");
            }
        }
        let kernel = object["boot-source"]["kernel_image_path"].as_str().unwrap().to_owned();
        assert_eq!(kernel, kernel_name("VERSION", Architecture::X86_64, ELF_KERNEL));
    }
}
