//! Programs from crates.io that checks and tests run, each built once into the cache.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Result;

use crate::{paths, run};

/// A program whose crate has the same name.
pub(crate) struct Tool {
    pub(crate) name: &'static str,
    pub(crate) version: &'static str,
    /// Time of the build on two cores, in words.
    pub(crate) duration: &'static str,
    /// Further options of `cargo install`.
    pub(crate) options: &'static [&'static str],
}

impl Tool {
    /// Finds the program in the cache or in `PATH`, or builds it.
    pub(crate) fn ensure(&self) -> Result<PathBuf> {
        if let Some(found) = self.find()? {
            return Ok(found);
        }
        let Self { name, version, duration, options } = self;
        let root = paths::cache()?.join(name);
        let ours = root.join("bin").join(name);
        run::report(format!("{name}: building {version}, about {duration} on two cores (done once)"));
        let mut command = run::cargo();
        command.args(["install", name, "--version", version, "--locked", "--force"]).args(options.iter());
        command.arg("--root").arg(root).env_remove("CARGO_TARGET_DIR");
        run::run_logged(&mut command, &format!("building {name}"))?;
        Ok(ours)
    }

    /// Finds the program in the cache or in `PATH`.
    pub(crate) fn find(&self) -> Result<Option<PathBuf>> {
        let ours = paths::cache()?.join(self.name).join("bin").join(self.name);
        let candidates = [Some(ours), paths::program(self.name)];
        Ok(candidates.into_iter().flatten().find(|program| self.is_good(program)))
    }

    fn is_good(&self, program: &Path) -> bool {
        run::capture(Command::new(program).arg("--version")).is_ok_and(|text| text.trim().ends_with(self.version))
    }
}
