//! Packages for Debian, Fedora and Alpine, which nfpm writes from the descriptions in `images/packages`.

use std::{
    fs::{self, File},
    path::Path,
    process::Command,
    time::{Duration, UNIX_EPOCH},
};

use anyhow::{Context as _, Result};

use super::{Build, Release, files, version};
use crate::{
    architecture::Architecture,
    image::{Stamp, Tree},
    paths,
    publisher::Name,
    releases::NFPM,
    run,
};

/// Ends of the names of packages.
pub(super) const KINDS: [&str; 3] = ["deb", "rpm", "apk"];

/// Maintainer of packages that have no publisher. Debian's need one.
const MAINTAINER: &str = "cproxy";

/// A format of packages.
#[derive(Clone, Copy)]
enum Format {
    Deb,
    Rpm,
    Apk,
}

impl Format {
    const ALL: [Self; 3] = [Self::Deb, Self::Rpm, Self::Apk];

    /// Its name to nfpm.
    fn name(self) -> &'static str {
        match self {
            Self::Deb => "deb",
            Self::Rpm => "rpm",
            Self::Apk => "apk",
        }
    }

    /// Name of a package's file, as the format's own tools spell it. Alpine keeps architectures apart by directories.
    fn file(self, program: &str, revision: u32, target: Architecture) -> String {
        let version = version();
        match self {
            Self::Deb => format!("{program}_{version}-{revision}_{}.deb", target.debian()),
            Self::Rpm => format!("{program}-{version}-{revision}.{}.rpm", target.name()),
            Self::Apk => format!("{program}-{version}-r{revision}.{}.apk", target.name()),
        }
    }
}

/// Adds the packages of all programs.
pub(super) fn add(release: &Release, build: &Build, manual: &Path) -> Result<()> {
    let nfpm = NFPM.ensure()?.join("nfpm");
    let descriptions = paths::workspace().join(NFPM.home);
    let scripts = Tree::read(&descriptions.join("scripts"))?;
    for released in build.programs() {
        let program = released.program.name;
        // Descriptions name files and scripts from here on.
        let stage = release.scratch.join(format!("{program}-{}", build.target.name()));
        for directory in ["root", "scripts"] {
            let directory = stage.join(directory);
            fs::create_dir_all(&directory).with_context(|| format!("creating {}", directory.display()))?;
        }
        files::installed(released, manual)?.write(&stage.join("root"))?;
        scripts.write(&stage.join("scripts"))?;
        set_times(&stage.join("scripts"), release.stamp)?;
        for format in Format::ALL {
            let file = release.unfinished.join(format.file(program, release.revision, build.target));
            let mut command = Command::new(&nfpm);
            command.current_dir(&stage).args(["package", "--packager", format.name(), "--config"]);
            command.arg(descriptions.join(format!("{program}.yaml"))).arg("--target").arg(&file);
            command.env("CPROXY_VERSION", version()).env("CPROXY_REVISION", release.revision.to_string());
            command.env("CPROXY_ARCHITECTURE", build.target.debian());
            command.env("CPROXY_HOMEPAGE", release.publisher.get(Name::Forge).unwrap_or_default());
            command.env("CPROXY_MAINTAINER", release.publisher.get(Name::Maintainer).unwrap_or(MAINTAINER));
            command.env("SOURCE_DATE_EPOCH", release.stamp.seconds().to_string());
            run::run(run::to_stderr(&mut command)?).with_context(|| format!("writing {}", file.display()))?;
        }
    }
    Ok(())
}

/// Gives all files of a directory the time of the release: an Alpine package has the times of its scripts.
fn set_times(directory: &Path, stamp: Stamp) -> Result<()> {
    let time = UNIX_EPOCH + Duration::from_secs(u64::from(stamp.seconds()));
    for entry in fs::read_dir(directory).with_context(|| format!("reading {}", directory.display()))? {
        let path = entry.context("reading a directory entry")?.path();
        let set = File::options().write(true).open(&path).and_then(|file| file.set_modified(time));
        set.with_context(|| format!("setting the time of {}", path.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_named_as_each_system_does() {
        let version = version();
        let name = |format: Format, target| format.file("cproxy", 1, target);
        let (x86, arm) = (Architecture::X86_64, Architecture::Aarch64);
        assert_eq!(name(Format::Deb, x86), format!("cproxy_{version}-1_amd64.deb"));
        assert_eq!(name(Format::Deb, arm), format!("cproxy_{version}-1_arm64.deb"));
        assert_eq!(name(Format::Rpm, arm), format!("cproxy-{version}-1.aarch64.rpm"));
        assert_eq!(name(Format::Apk, x86), format!("cproxy-{version}-r1.x86_64.apk"));
    }
}
