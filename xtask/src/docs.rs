//! `cargo xtask docs`: the repository's documents as a site. Pages are copied as they are, so there is one text of
//! each; reference pages are generated from the programs' definitions. Every link of the site is checked.

mod check;
mod pages;
mod values;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};
use clap::Args;

use self::pages::Pages;
use crate::{
    bench, paths,
    publisher::PublisherArguments,
    run,
    setup::{self, tool::Tool},
};

/// The program that renders the site. Tests do not need it.
const MDBOOK: Tool = Tool {
    name: "mdbook",
    version: "0.5.4",
    duration: "a minute",
    options: &["--no-default-features", "--features", "search", "--config", "profile.release.opt-level=0"],
};

/// The book's settings, which a directory of ours has.
const SETTINGS: &str = "book.toml";

/// Settings of the book. Chapters have no numbers: a page may stand in more than one order.
const BOOK: &str = r#"[book]
title = "cproxy"
description = "Kubernetes Services for pods in microVMs"
language = "en"

[build]
build-dir = "site"
create-missing = false

[output.html]
no-section-label = true
smart-punctuation = false
additional-css = ["site.css"]
"#;

/// Where the settings expect the styles. They add to those of the renderer: room for tables, a shadow where there are
/// further columns, and charts and tables for small screens.
const STYLES: &str = "site.css";
const CSS: &str = ":root { --content-max-width: 940px; }
.table-wrapper {
    scrollbar-width: thin;
    background:
        linear-gradient(to left, var(--bg) 50%, transparent) right / 50px 100% no-repeat local,
        linear-gradient(to left, rgb(128 128 128 / 60%), transparent) right / 14px 100% no-repeat scroll;
}
.table-wrapper table { margin-inline: 0; font-size: 0.85em; font-variant-numeric: tabular-nums; }
.table-wrapper th { padding: 3px 7px; vertical-align: bottom; }
.table-wrapper td { padding: 3px 7px; vertical-align: top; }
.content img { height: auto; }
@media (max-width: 700px) {
    .table-wrapper table { font-size: 0.8em; }
    .table-wrapper th, .table-wrapper td { padding: 3px 6px; }
}
";

/// Where the site goes.
#[derive(Args)]
pub(crate) struct DocsArguments {
    /// Output directory; default: docs in cargo's output directory
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    publisher: PublisherArguments,
}

/// Builds the site, checks its links and prints its path.
pub(crate) fn run(arguments: &DocsArguments) -> Result<()> {
    let out = arguments.out.clone().unwrap_or_else(|| paths::target().join("docs"));
    ensure!(
        !out.exists() || out.join(SETTINGS).is_file(),
        "{}: neither new nor a site of before: name another directory",
        out.display()
    );
    fs::create_dir_all(&out).with_context(|| format!("creating {}", out.display()))?;
    setup::for_building()?;
    let mdbook = MDBOOK.ensure()?;
    let source = out.join("src");
    write(&out.join(SETTINGS), BOOK)?;
    write(&out.join(STYLES), CSS)?;
    for directory in [&source, &out.join("site")] {
        fs::remove_dir_all(directory).ok();
    }
    let mut pages = Pages::collect(&paths::workspace(), &arguments.publisher.read()?)?;
    pages.add_generated("reference/xtask.md", xtask_page());
    pages.add_generated(pages::BENCHMARKS, bench::docs::details()?);
    pages.add_generated("reference/chart.md", values::page(&paths::workspace())?);
    for (name, text) in generated(&out.join("manual"))? {
        pages.add_generated(&format!("reference/{name}"), text);
    }
    pages.write(&source)?;
    run::run(run::to_stderr(Command::new(mdbook).arg("build").arg(&out))?)?;
    let site = out.join("site");
    let checked = check::links(&site)?;
    run::report(format!("docs: {} pages, {checked} links checked", pages.len()));
    println!("{}", site.join("index.html").display());
    Ok(())
}

/// Reference pages from the definitions of agent and relay.
fn generated(manual: &Path) -> Result<Vec<(String, String)>> {
    let mut generator = run::cargo();
    generator.args(["run", "--quiet", "--package", "cproxy-manual", "--"]).arg(manual);
    run::run(run::to_stderr(&mut generator)?)?;
    let directory = manual.join("reference");
    let mut found = Vec::new();
    for entry in fs::read_dir(&directory).with_context(|| format!("reading {}", directory.display()))? {
        let path = entry.context("reading a directory entry")?.path();
        let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        found.push((path.file_name().unwrap_or_default().to_string_lossy().into_owned(), text));
    }
    Ok(found)
}

/// Verbs of this program.
fn xtask_page() -> String {
    use clap::CommandFactory as _;
    let definition = crate::Arguments::command();
    let mut page = "# Commands of cargo xtask\n\nThis page is generated from the program's definition.\n".to_owned();
    for verb in definition.get_subcommands() {
        let help = verb.clone().bin_name(format!("cargo xtask {}", verb.get_name())).render_long_help();
        page.push_str(&format!("\n## cargo xtask {}\n\n```\n{}\n```\n", verb.get_name(), help.to_string().trim_end()));
    }
    page
}

fn write(path: &Path, text: &str) -> Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).with_context(|| format!("creating {}", parent.display()))?;
    }
    fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}
