//! Rule about links between documents: each leads to a file, and to a heading of it.

use std::path::{Component, Path, PathBuf};

/// Breaches of a Markdown file below `root`.
pub(super) fn breaches(root: &Path, name: &Path, content: &str) -> Vec<String> {
    let broken = targets(content).filter(|target| !leads_somewhere(root, name, content, target));
    broken.map(|target| format!("its link to `{target}` leads nowhere")).collect()
}

/// Targets of all inline links and images, without those to other sites.
pub(crate) fn targets(content: &str) -> impl Iterator<Item = &str> {
    let after = content.split("](").skip(1);
    let targets = after.filter_map(|rest| rest.split_once(')')).map(|(target, _)| target);
    targets.filter(|target| !target.contains("://") && !target.contains(char::is_whitespace))
}

fn leads_somewhere(root: &Path, name: &Path, content: &str, target: &str) -> bool {
    let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
    if file.is_empty() {
        return has_heading(content, anchor);
    }
    let path = root.join(normalized(&name.with_file_name(file)));
    let is_document = path.extension().is_some_and(|extension| extension == "md");
    if anchor.is_empty() || !is_document {
        return path.exists();
    }
    std::fs::read_to_string(path).is_ok_and(|content| has_heading(&content, anchor))
}

/// The path without `..`.
pub(crate) fn normalized(path: &Path) -> PathBuf {
    path.components().fold(PathBuf::new(), |mut path, component| {
        match component {
            Component::ParentDir => drop(path.pop()),
            component => path.push(component),
        }
        path
    })
}

fn has_heading(content: &str, anchor: &str) -> bool {
    let headings = content.lines().filter(|line| line.starts_with('#'));
    headings.map(|line| slug(line.trim_start_matches('#'))).any(|heading| heading == anchor)
}

/// Anchor of a heading, as forges make it: in lower case, with dashes for blanks, without punctuation.
pub(crate) fn slug(heading: &str) -> String {
    let kept = heading.trim().chars().filter(|char| char.is_alphanumeric() || matches!(char, ' ' | '-' | '_'));
    kept.flat_map(char::to_lowercase).map(|char| if char == ' ' { '-' } else { char }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_lead_to_files_and_headings() {
        let root = crate::paths::workspace();
        let breaches = |text: &str| breaches(&root, Path::new("docs/page.md"), text).len();
        let good =
            "## `get`: a, b\n[a](#get-a-b) ![b](../README.md) [c](../README.md#use-it) [d](https://x.example/#y)";
        assert_eq!(breaches(good), 0);
        for bad in ["[a](#b)", "[a](nowhere.md)", "[a](../README.md#nowhere)", "[a](../docs/README.md)"] {
            assert_eq!(breaches(bad), 1, "{bad}");
        }
    }
}
