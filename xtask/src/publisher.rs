//! Settings of a release's publisher, from `publisher.toml`: addresses and a key that documents, packages and images
//! name. An empty setting is named nowhere.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use toml::{Table, Value};

use crate::paths;

/// The settings of this repository.
const FILE: &str = "publisher.toml";

/// Beginning and end of the line before a paragraph that a setting replaces.
const MARK: (&str, &str) = ("<!-- publisher: ", " -->");

/// Characters of a minisign public key.
const KEY_LENGTH: usize = 56;

/// Name of a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Name {
    Forge,
    Downloads,
    Images,
    Tracker,
    Security,
    Maintainer,
    MinisignKey,
}

impl Name {
    const ALL: [Self; 7] = [
        Self::Forge,
        Self::Downloads,
        Self::Images,
        Self::Tracker,
        Self::Security,
        Self::Maintainer,
        Self::MinisignKey,
    ];

    /// The name in the file and in documents.
    fn text(self) -> &'static str {
        match self {
            Self::Forge => "forge",
            Self::Downloads => "downloads",
            Self::Images => "images",
            Self::Tracker => "tracker",
            Self::Security => "security",
            Self::Maintainer => "maintainer",
            Self::MinisignKey => "minisign-key",
        }
    }

    fn of(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|name| name.text() == text)
    }

    /// Form that a value must have and has not.
    fn breach(self, value: &str) -> Option<&'static str> {
        // Characters without a meaning in links, Markdown, and metadata of packages and images.
        let is_word = |text: &str| {
            !text.is_empty() && text.chars().all(|char| char.is_ascii_alphanumeric() || "-._~/:@+=".contains(char))
        };
        let is_url = |value: &str| value.strip_prefix("https://").is_some_and(is_word);
        let is_mail = |value: &str| value.split_once('@').is_some_and(|(user, host)| is_word(user) && is_word(host));
        let is_plain = value.chars().all(|char| char.is_alphanumeric() || char.is_ascii_graphic() || char == ' ');
        let (is_right, expected) = match self {
            Self::Forge | Self::Downloads | Self::Tracker => (is_url(value), "an https address"),
            Self::Images => {
                let is_lower = !value.contains(|char: char| char.is_uppercase() || "@+=~".contains(char));
                let is_path = !value.contains("://") && !value.ends_with('/');
                (is_word(value) && is_lower && is_path, "REGISTRY/PATH in lower case, without https://")
            }
            Self::Security => (is_url(value) || is_mail(value), "a mail address or an https address"),
            Self::Maintainer => {
                let parts = value.strip_suffix('>').and_then(|value| value.split_once(" <"));
                (parts.is_some_and(|(name, address)| !name.trim().is_empty() && is_mail(address)), "\"NAME <ADDRESS>\"")
            }
            Self::MinisignKey => {
                let is_base64 = value.chars().all(|char| char.is_ascii_alphanumeric() || "+/".contains(char));
                (value.len() == KEY_LENGTH && value.starts_with("RW") && is_base64, "a public key of minisign")
            }
        };
        (!is_right || !is_plain).then_some(expected)
    }
}

/// Option of commands that name the publisher.
#[derive(Args, Default)]
pub(crate) struct PublisherArguments {
    /// Settings of the publisher; default: publisher.toml of the repository
    #[arg(long, value_name = "FILE")]
    publisher: Option<PathBuf>,
}

impl PublisherArguments {
    pub(crate) fn read(&self) -> Result<Publisher> {
        self.publisher.as_deref().map_or_else(Publisher::of_repository, Publisher::read)
    }
}

/// The settings that are not empty.
#[derive(Debug, Default)]
pub(crate) struct Publisher {
    values: BTreeMap<Name, String>,
}

impl Publisher {
    /// The publisher that this repository names.
    pub(crate) fn of_repository() -> Result<Self> {
        Self::read(&paths::workspace().join(FILE))
    }

    fn read(file: &Path) -> Result<Self> {
        let text = fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
        Self::parse(&text).with_context(|| file.display().to_string())
    }

    fn parse(text: &str) -> Result<Self> {
        let table: Table = text.parse().context("no TOML")?;
        let mut values = BTreeMap::new();
        for (key, value) in table {
            let name = Name::of(&key).with_context(|| format!("`{key}` is no setting of a publisher"))?;
            let Value::String(value) = value else { bail!("{key}: expected a text in quotes") };
            if value.is_empty() {
                continue;
            }
            if let Some(expected) = name.breach(&value) {
                bail!("{key}: expected {expected}, not {value:?}");
            }
            values.insert(name, value);
        }
        Ok(Self { values })
    }

    pub(crate) fn get(&self, name: Name) -> Option<&str> {
        self.values.get(&name).map(String::as_str)
    }

    /// A document with this publisher's values: a line `<!-- publisher: TEXT -->` goes, and if each `{SETTING}` in its
    /// text has a value, the text replaces the paragraph that follows.
    pub(crate) fn fill(&self, document: &str) -> Result<String> {
        let mut lines = Vec::new();
        let mut is_replaced = false;
        for line in document.lines() {
            if let Some(template) = line.strip_prefix(MARK.0).and_then(|rest| rest.strip_suffix(MARK.1)) {
                let text = self.text(template)?;
                is_replaced = text.is_some();
                lines.extend(text);
            } else {
                is_replaced &= !line.is_empty();
                if !is_replaced {
                    lines.push(line.to_owned());
                }
            }
        }
        Ok(lines.join("\n") + "\n")
    }

    /// A text with the values of its settings; none if one of them is empty.
    fn text(&self, template: &str) -> Result<Option<String>> {
        let mut parts = template.split('{');
        let mut text = parts.next().unwrap_or_default().to_owned();
        let mut is_complete = true;
        for part in parts {
            let split = part.split_once('}').and_then(|(key, rest)| Some((Name::of(key)?, rest)));
            let (name, rest) = split.with_context(|| format!("`{{{part}` names no setting of a publisher"))?;
            is_complete &= self.get(name).is_some();
            text.push_str(self.get(name).unwrap_or_default());
            text.push_str(rest);
        }
        Ok(is_complete.then_some(text))
    }

    /// The key that releases are signed with.
    pub(crate) fn key(&self) -> Result<&str> {
        self.get(Name::MinisignKey)
            .with_context(|| format!("{FILE} names no `minisign-key`, and without it nobody can verify a signature"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "RWQCV/cuhgOWWL7qW+G9NPUG7G3PhFf9o0QZKm8hfdzgjrNRHn1V1itL";

    #[test]
    fn the_file_of_the_repository_has_each_setting_once() {
        let file = paths::workspace().join(FILE);
        let table: Table = fs::read_to_string(file).unwrap().parse().unwrap();
        assert_eq!(table.keys().map(|key| Name::of(key).unwrap()).collect::<Vec<_>>().len(), Name::ALL.len());
        Publisher::of_repository().unwrap();
    }

    #[test]
    fn values_have_the_form_of_their_setting() {
        for good in [
            "forge = \"https://forge.example/cproxy\"",
            "images = \"registry.example/team\"",
            "security = \"security@example.org\"",
            "maintainer = \"A Team <team@example.org>\"",
            &format!("minisign-key = \"{KEY}\""),
            "tracker = \"\"",
        ] {
            assert!(Publisher::parse(good).is_ok(), "{good}");
        }
        for (bad, expected) in [
            ("forge = \"forge.example\"", "forge: expected an https address, not \"forge.example\""),
            ("forge = \"https://a\\nb\"", "forge: expected an https address"),
            ("images = \"https://registry.example\"", "images: expected REGISTRY/PATH"),
            ("forge = \"https://\"", "forge: expected an https address"),
            ("downloads = \"https://a.example/b c)\"", "downloads: expected an https address"),
            ("images = \"registry.example/Team\"", "images: expected REGISTRY/PATH"),
            ("security = \"@\"", "security: expected a mail address"),
            ("maintainer = \" <>\"", "maintainer: expected \"NAME <ADDRESS>\""),
            ("minisign-key = \"RW\"", "minisign-key: expected a public key of minisign"),
            (&format!("minisign-key = \"RW{}\"", "`".repeat(54)), "minisign-key: expected a public key of minisign"),
            ("forge = 1", "forge: expected a text in quotes"),
            ("fogre = \"\"", "`fogre` is no setting of a publisher"),
        ] {
            let error = Publisher::parse(bad).unwrap_err().to_string();
            assert!(error.contains(expected), "{bad}: {error}");
        }
    }

    #[test]
    fn a_paragraph_is_replaced_when_all_of_its_settings_have_values() {
        let document = "# A\n\n<!-- publisher: Write to {security}. -->\nNobody\nis named.\n\nB\n";
        let filled = |settings: &str| Publisher::parse(settings).unwrap().fill(document).unwrap();
        assert_eq!(filled(""), "# A\n\nNobody\nis named.\n\nB\n");
        assert_eq!(filled("security = \"a@b.example\""), "# A\n\nWrite to a@b.example.\n\nB\n");
        let error = Publisher::default().fill("<!-- publisher: {nobody} -->\n").unwrap_err().to_string();
        assert!(error.contains("`{nobody}` names no setting"), "{error}");
    }
}
