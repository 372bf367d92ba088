//! Sources of the site: the repository's documents at their own paths, with links that hold there.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Component, Path, PathBuf},
};

use anyhow::{Context as _, Result};

use super::write;
use crate::{
    publisher::Publisher,
    tidy::links::{normalized, slug},
};

/// Directories without documents of ours.
const SKIPPED: [&str; 3] = ["target", ".git", "xtask"];

/// Chapters by their sections: files, or directories whose other files follow. What is in no section comes last.
const SECTIONS: [(&str, &[&str]); 7] = [
    (
        "Choose",
        &["docs/comparison.md", "docs/compatibility.md", "docs/sizing.md", "docs/non-goals.md", "docs/roadmap.md"],
    ),
    (
        "Install",
        &[
            "docs/releases.md",
            "docs/upgrading.md",
            "docs/integrations",
            "images/kubernetes",
            "images/kata",
            "docs/relay.md",
            "docs/relay-views.md",
        ],
    ),
    (
        "Run",
        &[
            "docs/reference.md",
            "docs/operations.md",
            "docs/network-policy.md",
            "docs/policy.md",
            "docs/policy-daemons.md",
            "docs/receive.md",
            "docs/reliability.md",
            "docs/threat-model.md",
            "SECURITY.md",
        ],
    ),
    ("Generated reference", &["reference"]),
    ("Understand", &["docs/semantics.md", "docs/kernels.md", "docs/glossary.md", "ARCHITECTURE.md"]),
    ("Measurements", &["docs/benchmarks.md", BENCHMARKS, "docs/profile.md"]),
    ("Decisions", &["docs/decisions"]),
];

/// The generated page with all tables of the benchmarks, and the directory of their results, whose files are links to
/// its sections.
pub(super) const BENCHMARKS: &str = "docs/benchmark-tables.md";
const RESULTS: &str = "docs/benchmarks";

/// Longest cell with a figure that stays on one line, such as `12.5 MiB`.
const SHORT_CELL: usize = 12;

/// Section of all other pages.
const OTHERS: &str = "Change";
/// Section of directories that pages link to.
const FILES: &str = "Files";

/// File of a directory's page.
const INDEX: &str = "index.md";
/// The same in the repository.
const README: &str = "README.md";

/// Texts of the site by their paths in it, and the files that they link to.
pub(super) struct Pages {
    root: PathBuf,
    texts: BTreeMap<PathBuf, String>,
    files: BTreeSet<PathBuf>,
    directories: BTreeSet<PathBuf>,
}

impl Pages {
    /// All documents below `root`, with the publisher's values.
    pub(super) fn collect(root: &Path, publisher: &Publisher) -> Result<Self> {
        let mut found = Vec::new();
        collect(root, &mut found)?;
        let (texts, files, directories) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
        let mut pages = Self { root: root.to_owned(), texts, files, directories };
        for path in found {
            let name = path.strip_prefix(root).unwrap_or(&path).to_owned();
            let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
            let text = publisher.fill(&text).with_context(|| path.display().to_string())?;
            let text = pages.converted(&name, &text);
            pages.texts.insert(in_site(&name), text);
        }
        Ok(pages)
    }

    /// Adds a page that no file has.
    pub(super) fn add_generated(&mut self, name: &str, text: String) {
        let text = self.converted(Path::new(name), &text);
        self.texts.insert(PathBuf::from(name), text);
    }

    /// Number of pages.
    pub(super) fn len(&self) -> usize {
        self.texts.len()
    }

    /// Writes pages, linked files and the list of chapters.
    pub(super) fn write(&mut self, source: &Path) -> Result<()> {
        for directory in std::mem::take(&mut self.directories) {
            let text = self.listing(&directory)?;
            self.texts.insert(directory.join(INDEX), text);
        }
        for (name, text) in &self.texts {
            write(&source.join(name), text)?;
        }
        for name in &self.files {
            let to = source.join(name);
            fs::create_dir_all(to.parent().unwrap_or(source)).with_context(|| format!("creating {}", to.display()))?;
            fs::copy(self.root.join(name), &to).with_context(|| format!("copying {}", name.display()))?;
        }
        write(&source.join("SUMMARY.md"), &self.summary())
    }

    /// A page with the files of a directory, which are copied.
    fn listing(&mut self, directory: &Path) -> Result<String> {
        let mut files = Vec::new();
        list(&self.root.join(directory), &mut files)?;
        let names = files.iter().map(|file| file.strip_prefix(&self.root).unwrap_or(file).to_owned());
        let names: Vec<_> = names.collect();
        let is_of_documents = names.iter().all(|name| self.texts.contains_key(&in_site(name)));
        let heading = if is_of_documents { capitalized(directory) } else { directory.display().to_string() };
        let mut text = format!("# {heading}\n\n");
        for name in names {
            let target = relative(&directory.join(INDEX), &in_site(&name));
            let inside = name.strip_prefix(directory).unwrap_or(&name).display().to_string();
            let inside = self.texts.get(&in_site(&name)).filter(|_| is_of_documents).map_or(inside, |text| title(text));
            text.push_str(&format!("- [{inside}]({target})\n"));
            // A document is a page, with converted links.
            if name.extension().is_none_or(|extension| extension != "md") {
                self.files.insert(name);
            }
        }
        Ok(text)
    }

    /// The text with anchors as forges make them, and links to pages of the site.
    fn converted(&mut self, name: &Path, text: &str) -> String {
        let (mut is_code, mut anchors) = (false, BTreeSet::new());
        let mut lines = Vec::new();
        for line in text.lines() {
            if line.trim_start().starts_with("```") {
                is_code = !is_code;
            }
            lines.push(match line {
                line if is_code => line.to_owned(),
                line if line.starts_with('#') => {
                    let anchor = slug(line.trim_start_matches('#'));
                    let is_first = anchors.insert(anchor.clone());
                    if is_first { format!("{line} {{#{anchor}}}") } else { line.to_owned() }
                }
                line if line.starts_with('|') => unbroken(&self.with_links(name, line)),
                line => self.with_links(name, line),
            });
        }
        lines.join("\n") + "\n"
    }

    fn with_links(&mut self, name: &Path, line: &str) -> String {
        let mut parts = line.split("](");
        let mut text = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            text.push_str("](");
            match part.split_once(')') {
                Some((target, rest)) => {
                    text.push_str(&self.link(name, target));
                    text.push(')');
                    text.push_str(rest);
                }
                None => text.push_str(part),
            }
        }
        text
    }

    /// The target of a link in the site.
    fn link(&mut self, name: &Path, target: &str) -> String {
        let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
        if file.is_empty() || target.contains("://") {
            return target.to_owned();
        }
        let path = normalized(&name.with_file_name(file));
        if path.parent() == Some(Path::new(RESULTS)) && path.extension().is_some_and(|extension| extension == "json") {
            let benchmark = path.file_stem().unwrap_or_default().to_string_lossy();
            return format!("{}#{benchmark}", relative(&in_site(name), Path::new(BENCHMARKS)));
        }
        let full = self.root.join(&path);
        let page = if full.is_dir() {
            if !full.join(README).exists() {
                self.directories.insert(path.clone());
            }
            path.join(INDEX)
        } else {
            if path.extension().is_none_or(|extension| extension != "md") && full.is_file() {
                self.files.insert(path.clone());
            }
            in_site(&path)
        };
        let link = relative(&in_site(name), &page);
        if anchor.is_empty() { link } else { format!("{link}#{anchor}") }
    }

    /// The list of chapters.
    fn summary(&self) -> String {
        let mut chapters = Chapters { pages: self, left: self.texts.keys().cloned().collect(), text: String::new() };
        chapters.add("# Summary\n\n", [PathBuf::from(INDEX)]);
        for (section, entries) in SECTIONS {
            let below = |entry: &&str| -> Vec<PathBuf> {
                let entry = Path::new(entry);
                let inside = chapters.left.iter().filter(|page| page.parent() == Some(entry)).cloned();
                [entry.to_owned(), entry.join(INDEX)].into_iter().chain(inside).collect()
            };
            let pages: Vec<_> = entries.iter().flat_map(below).collect();
            chapters.add(&format!("\n# {section}\n\n"), pages);
        }
        let has_readme = |page: &PathBuf| self.root.join(page.with_file_name(README)).exists();
        let is_document = |page: &PathBuf| has_readme(page) || !page.ends_with(INDEX);
        let (others, listings): (Vec<_>, Vec<_>) = chapters.left.iter().cloned().partition(is_document);
        chapters.add(&format!("\n# {OTHERS}\n\n"), others);
        chapters.add(&format!("\n# {FILES}\n\n"), listings);
        chapters.text
    }
}

/// List of chapters that is being written.
struct Chapters<'p> {
    pages: &'p Pages,
    /// Pages that are no chapter yet.
    left: BTreeSet<PathBuf>,
    text: String,
}

impl Chapters<'_> {
    /// Adds those of the pages that exist and are left, under a heading.
    fn add(&mut self, heading: &str, pages: impl IntoIterator<Item = PathBuf>) {
        self.text.push_str(heading);
        for page in pages {
            if !self.left.remove(&page) {
                continue;
            }
            let content = self.pages.texts.get(&page).map_or("", String::as_str);
            self.text.push_str(&format!("- [{}]({})\n", title(content), page.display()));
        }
    }
}

/// The first heading, without its anchor.
fn title(text: &str) -> String {
    let heading = text.lines().find_map(|line| line.strip_prefix("# ")).unwrap_or("Untitled");
    heading.split(" {#").next().unwrap_or(heading).to_owned()
}

/// The last part of a path, as a title.
fn capitalized(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let mut letters = name.chars();
    letters.next().into_iter().flat_map(char::to_uppercase).chain(letters).collect()
}

/// The row of a table, without breaks in cells of one figure.
fn unbroken(row: &str) -> String {
    let cell = |cell: &str| {
        let text = cell.trim();
        let is_short = text.chars().count() <= SHORT_CELL && text.starts_with(|first: char| first.is_ascii_digit());
        if is_short { format!(" {} ", text.replace(' ', "\u{a0}")) } else { cell.to_owned() }
    };
    row.split('|').map(cell).collect::<Vec<_>>().join("|")
}

/// Path in the site: a README is the page of its directory.
fn in_site(name: &Path) -> PathBuf {
    if name.file_name().is_some_and(|file| file == README) { name.with_file_name(INDEX) } else { name.to_owned() }
}

/// Path of `to` as seen from the page `from`.
fn relative(from: &Path, to: &Path) -> String {
    let of = |path: &Path| -> Vec<String> {
        let names = path.components().filter(|part| matches!(part, Component::Normal(_)));
        names.map(|part| part.as_os_str().to_string_lossy().into_owned()).collect()
    };
    let (from, to) = (of(from.parent().unwrap_or(Path::new(""))), of(to));
    let common = from.iter().zip(&to).take_while(|(from, to)| from == to).count();
    let up = from.iter().skip(common).map(|_| "..".to_owned());
    up.chain(to.into_iter().skip(common)).collect::<Vec<_>>().join("/")
}

fn collect(directory: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(directory).with_context(|| format!("reading {}", directory.display()))? {
        let entry = entry.context("reading a directory entry")?;
        let (path, kind) = (entry.path(), entry.file_type().context("reading a file's type")?);
        let is_skipped = SKIPPED.iter().any(|skipped| entry.file_name() == *skipped);
        if kind.is_dir() && !is_skipped {
            collect(&path, found)?;
        } else if kind.is_file() && path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
    Ok(())
}

/// All files below a directory, also through links.
fn list(directory: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    let entries = fs::read_dir(directory).with_context(|| format!("reading {}", directory.display()))?;
    let mut paths: Vec<_> = entries.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect();
    paths.sort();
    for path in paths {
        if path.is_dir() {
            list(&path, found)?;
        } else if path.is_file() {
            found.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_lead_from_page_to_page() {
        let link = |from: &str, to: &str| relative(Path::new(from), Path::new(to));
        assert_eq!(link("index.md", "docs/a.md"), "docs/a.md");
        assert_eq!(link("docs/a.md", "index.md"), "../index.md");
        assert_eq!(link("docs/x/a.md", "docs/y/b.md"), "../y/b.md");
    }

    #[test]
    fn every_document_is_a_chapter_of_the_site_once() {
        let pages = Pages::collect(&crate::paths::workspace(), &Publisher::default()).unwrap();
        let summary = pages.summary();
        for page in pages.texts.keys() {
            assert_eq!(summary.matches(&format!("]({})\n", page.display())).count(), 1, "{}", page.display());
        }
        assert!(summary.contains("- [Reference](docs/reference.md)") && summary.contains("\n# Decisions\n"));
    }

    #[test]
    fn chapters_have_titles_of_their_own() {
        let mut pages = Pages::collect(&crate::paths::workspace(), &Publisher::default()).unwrap();
        for directory in std::mem::take(&mut pages.directories) {
            let text = pages.listing(&directory).unwrap();
            pages.texts.insert(directory.join(INDEX), text);
        }
        let mut titles: Vec<_> = pages.texts.values().map(|text| title(text)).collect();
        titles.sort();
        assert!(titles.windows(2).all(|pair| pair[0] != pair[1]), "{titles:?}");
        assert!(titles.iter().all(|title| !title.starts_with("docs/")), "{titles:?}");
    }

    #[test]
    fn figures_in_tables_are_not_broken() {
        let row = "| resident memory at rest | 12.5 MiB | `a b` |";
        assert_eq!(unbroken(row), "| resident memory at rest | 12.5\u{a0}MiB | `a b` |");
        assert_eq!(unbroken("|---|---:|"), "|---|---:|");
    }

    #[test]
    fn results_of_benchmarks_are_links_to_their_tables() {
        let mut pages = Pages::collect(&crate::paths::workspace(), &Publisher::default()).unwrap();
        let link = |pages: &mut Pages, from: &str, to: &str| pages.link(Path::new(from), to);
        assert_eq!(link(&mut pages, "docs/benchmarks.md", "benchmarks/wrk.json"), "benchmark-tables.md#wrk");
        assert_eq!(
            link(&mut pages, "README.md", "docs/benchmarks/wrk-throughput.svg"),
            "docs/benchmarks/wrk-throughput.svg"
        );
    }

    #[test]
    fn pages_keep_the_anchors_and_links_of_the_forge() {
        let mut pages = Pages::collect(&crate::paths::workspace(), &Publisher::default()).unwrap();
        let text = "# A: b\n[c](../README.md#use-it) [d](../images/kernel/cproxy.config) [e](#f)\n```\n# g](h)\n```\n";
        let converted = pages.converted(Path::new("docs/x.md"), text);
        let expected = "# A: b {#a-b}\n[c](../index.md#use-it) [d](../images/kernel/cproxy.config) [e](#f)\n\
                        ```\n# g](h)\n```\n";
        assert_eq!(converted, expected);
        assert!(pages.files.contains(Path::new("images/kernel/cproxy.config")));
    }
}
