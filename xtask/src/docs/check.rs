//! Links of the rendered site: each leads to a file of it, and to an element of that file.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};

use crate::{run, tidy::links::normalized};

/// Pages that the renderer makes for itself, with links relative to other places.
const OWN: [&str; 3] = ["404.html", "print.html", "toc.html"];

/// Checks all links and returns their number.
pub(super) fn links(site: &Path) -> Result<usize> {
    let mut pages = BTreeMap::new();
    collect(site, &mut pages)?;
    let ids: BTreeMap<&Path, BTreeSet<&str>> =
        pages.iter().map(|(path, text)| (path.as_path(), attributes(text, "id").collect())).collect();
    let (mut checked, mut broken) = (0, Vec::new());
    let own = |path: &Path| path.file_name().is_some_and(|name| OWN.iter().any(|own| name == *own));
    for (path, text) in pages.iter().filter(|(path, _)| !own(path)) {
        for target in attributes(text, "href").chain(attributes(text, "src")).filter(|target| is_local(target)) {
            checked += 1;
            if !leads_somewhere(path, target, &ids) {
                broken.push(format!("{}: `{target}` leads nowhere", path.display()));
            }
        }
    }
    broken.iter().for_each(run::report);
    if !broken.is_empty() {
        bail!("{} broken links in the site", broken.len());
    }
    Ok(checked)
}

fn collect(directory: &Path, pages: &mut BTreeMap<PathBuf, String>) -> Result<()> {
    for entry in fs::read_dir(directory).with_context(|| format!("reading {}", directory.display()))? {
        let path = entry.context("reading a directory entry")?.path();
        if path.is_dir() {
            collect(&path, pages)?;
        } else if path.extension().is_some_and(|extension| extension == "html") {
            let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
            pages.insert(path, text);
        }
    }
    Ok(())
}

/// Values of an attribute.
fn attributes<'t>(html: &'t str, name: &str) -> impl Iterator<Item = &'t str> {
    let start = format!(" {name}=\"");
    let values: Vec<_> = html.split(start.as_str()).skip(1).filter_map(|rest| rest.split('"').next()).collect();
    values.into_iter()
}

fn is_local(target: &str) -> bool {
    !target.contains("://") && !target.starts_with("data:") && !target.starts_with("mailto:") && !target.is_empty()
}

fn leads_somewhere(page: &Path, target: &str, ids: &BTreeMap<&Path, BTreeSet<&str>>) -> bool {
    let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
    let path = if file.is_empty() { page.to_path_buf() } else { normalized(&page.with_file_name(file)) };
    match ids.get(path.as_path()) {
        Some(ids) => anchor.is_empty() || ids.contains(anchor),
        None => path.exists(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_lead_to_files_and_to_their_elements() {
        let site = std::env::temp_dir().join(format!("cproxy-docs-{}", std::process::id()));
        fs::create_dir_all(site.join("docs")).unwrap();
        fs::write(site.join("a.html"), "<h1 id=\"x\"></h1><a href=\"docs/b.html#y\">b</a>").unwrap();
        let b = |target: &str| {
            fs::write(site.join("docs/b.html"), format!("<h1 id=\"y\"></h1><a href=\"{target}\">a</a>")).unwrap();
            links(&site)
        };
        for good in ["../a.html", "../a.html#x", "#y", "https://example.com/#z"] {
            assert!(b(good).is_ok(), "{good}");
        }
        for bad in ["a.html", "../a.html#y", "#x", "../c.png"] {
            assert!(b(bad).is_err(), "{bad}");
        }
        fs::remove_dir_all(&site).unwrap();
    }
}
