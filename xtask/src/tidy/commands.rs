//! Rule about commands in documents: `cargo xtask VERB` and `cargo test -p PACKAGE` name verbs and packages that exist.
//!
//! A filter that matches no test does not fail, so a reader would not notice a wrong one.

/// Names that commands may have.
pub(super) struct Known {
    pub(super) verbs: Vec<String>,
    pub(super) packages: Vec<String>,
}

impl Known {
    /// Breaches of a Markdown file.
    pub(super) fn breaches(&self, content: &str) -> Vec<String> {
        let commands = content.lines().flat_map(|line| line.split("cargo ").skip(1));
        let unknown = commands.filter_map(|command| {
            let mut words = command.split('`').next()?.split_whitespace();
            let (kind, name, known) = match words.next()? {
                "xtask" => ("verb", words.next()?, &self.verbs),
                "test" => ("package", words.skip_while(|word| *word != "-p").nth(1)?, &self.packages),
                _ => return None,
            };
            let name = name.trim_end_matches([')', '.', ',', ';', ':']);
            // Flags have dashes first, and placeholders are in capitals.
            let is_name = name.starts_with(|first: char| first.is_ascii_lowercase());
            (is_name && !known.iter().any(|other| other == name)).then(|| format!("there is no {kind} `{name}`"))
        });
        unknown.collect()
    }
}

/// Name of the package of a manifest, if it has one.
pub(super) fn package(manifest: &str) -> Option<&str> {
    let (_, package) = manifest.split_once("[package]\n")?;
    package.lines().find_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_name_verbs_and_packages_that_exist() {
        let known = Known { verbs: vec!["build".to_owned()], packages: vec!["core".to_owned()] };
        for good in [
            "`cargo xtask build --long`, `cargo xtask --help` or `cargo xtask`",
            "(`cargo test --lib -p core x` and `cargo test -p PACKAGE`)",
            "X=$(cargo xtask build | tail -1) cargo test -p core",
        ] {
            assert_eq!(known.breaches(good), [""; 0], "{good}");
        }
        let bad = "run `cargo xtask make`, then `cargo test -p model --lib`";
        assert_eq!(known.breaches(bad), ["there is no verb `make`", "there is no package `model`"]);
    }

    #[test]
    fn a_package_is_named_in_its_manifest() {
        assert_eq!(package("[package]\nversion = \"1\"\nname = \"a\"\n"), Some("a"));
        assert_eq!(package("[workspace]\nname = \"a\"\n"), None);
    }
}
