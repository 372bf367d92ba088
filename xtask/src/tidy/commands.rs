//! Rule about commands in documents: `cargo xtask` would accept them, and `cargo test -p PACKAGE` names a package that
//! exists.
//!
//! A filter that matches no test does not fail, so a reader would not notice a wrong one.

use clap::Command;
use cproxy_documents::{breach, commands};

/// Definitions of the commands.
pub(super) struct Known {
    pub(super) xtask: Command,
    pub(super) packages: Vec<String>,
}

impl Known {
    /// Breaches of a Markdown file.
    pub(super) fn breaches(&self, content: &str) -> Vec<String> {
        let xtask = commands(content, &["cargo", "xtask"]).into_iter().filter_map(|command| {
            let why = breach(&self.xtask, &command.arguments)?;
            Some(format!("line {}: `cargo xtask {}`: {why}", command.line, command.arguments.join(" ")))
        });
        let tests = commands(content, &["cargo", "test"]).into_iter().filter_map(|command| {
            let mut after = command.arguments.iter().skip_while(|word| *word != "-p");
            let name = after.nth(1)?;
            // Placeholders are in capitals.
            let is_name = name.starts_with(|first: char| first.is_ascii_lowercase());
            (is_name && !self.packages.contains(name)).then(|| format!("there is no package `{name}`"))
        });
        xtask.chain(tests).collect()
    }
}

/// Name of the package of a manifest, if it has one.
pub(super) fn package(manifest: &str) -> Option<&str> {
    let (_, package) = manifest.split_once("[package]\n")?;
    package.lines().find_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'))
}

#[cfg(test)]
mod tests {
    use clap::Arg;

    use super::*;

    #[test]
    fn commands_name_verbs_flags_and_packages_that_exist() {
        let build = Command::new("build").arg(Arg::new("long").long("long").num_args(0));
        let known = Known { xtask: Command::new("xtask").subcommand(build), packages: vec!["core".to_owned()] };
        for good in [
            "`cargo xtask build --long`, `cargo xtask --help` or `cargo xtask`",
            "(`cargo test --lib -p core x` and `cargo test -p PACKAGE`)",
            "```\nX=$(cargo xtask build | tail -1) cargo test -p core\n```",
        ] {
            assert_eq!(known.breaches(good), [""; 0], "{good}");
        }
        let bad = "run `cargo xtask make` or `cargo xtask build --short`, then `cargo test -p model --lib`";
        let breaches = known.breaches(bad);
        assert_eq!(breaches.len(), 3, "{breaches:?}");
        assert!(breaches[0].contains("make") && breaches[1].contains("--short"), "{breaches:?}");
        assert_eq!(breaches[2], "there is no package `model`");
    }

    #[test]
    fn a_package_is_named_in_its_manifest() {
        assert_eq!(package("[package]\nversion = \"1\"\nname = \"a\"\n"), Some("a"));
        assert_eq!(package("[workspace]\nname = \"a\"\n"), None);
    }
}
