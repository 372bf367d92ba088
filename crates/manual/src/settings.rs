//! Settings in documents and images: the tables of docs/reference.md and the example file.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs, io, mem,
    path::{Path, PathBuf},
};

use clap::{Arg, Command};
use cproxy::config::{Applies, SETTINGS, Setting, SourceSettings, WaitSettings};

use crate::reference::{code, default};

/// Makes a file from what it is now.
type Make = fn(&Command, &str) -> Result<String, String>;

/// Files of the repository that have settings.
const FILES: [(&str, Make); 2] =
    [("docs/reference.md", with_blocks), ("images/rootfs/etc/cproxy/cproxy.conf", example)];

/// Lines of a page around what is made from settings. The first ends with the names of groups, or with [`AT_ONCE`].
const BEGIN: &str = "<!-- settings: ";
const END: &str = "<!-- end of settings -->";
const AT_ONCE: &str = "at once";

/// Longest line of text.
const COLUMNS: usize = 120;

/// First lines of the example file.
const HEAD: &str = "\
# Settings of cproxy, one name and value per line, lists with commas. Each setting is the flag of the same name; see
# `cproxy run --help` and `cproxy wait --help`. Flags win over the environment (CPROXY_APISERVER), which wins over the
# kernel's command line (cproxy.apiserver=https://10.0.0.1:6443), which wins over this file.
";

/// Writes the files of a repository anew that are not as the settings are. Returns these.
pub(crate) fn update(repository: &Path) -> io::Result<Vec<PathBuf>> {
    let program = cproxy::cli::manual();
    let mut updated = Vec::new();
    for (name, make) in FILES {
        let path = repository.join(name);
        let before = fs::read_to_string(&path)?;
        let now = make(&program, &before).map_err(io::Error::other)?;
        if now != before {
            fs::write(&path, now)?;
            updated.push(path);
        }
    }
    Ok(updated)
}

/// The page, with each block made anew.
fn with_blocks(program: &Command, page: &str) -> Result<String, String> {
    let mut made = String::new();
    let (mut is_inside, mut has) = (false, BTreeSet::new());
    for line in page.lines() {
        is_inside &= line != END;
        if !is_inside {
            writeln!(made, "{line}").ok();
        }
        if let Some(names) = line.strip_prefix(BEGIN).and_then(|line| line.strip_suffix(" -->")) {
            is_inside = true;
            has.extend(names.split(", "));
            made.push_str(&if names == AT_ONCE { at_once() } else { table(program, names)? });
        }
    }
    let groups = SETTINGS.iter().filter_map(|group| group.name.strip_suffix("Settings"));
    match groups.into_iter().find(|group| !has.contains(group)) {
        Some(group) => Err(format!("no line `{BEGIN}NAMES -->` of docs/reference.md names the group {group}")),
        None => Ok(made),
    }
}

/// Table of the groups of these names.
fn table(program: &Command, names: &str) -> Result<String, String> {
    let mut table = "\n| flag | default | effect |\n|---|---|---|\n".to_owned();
    for name in names.split(", ") {
        let group = SETTINGS.iter().find(|group| group.name.strip_suffix("Settings") == Some(name));
        let group = group.ok_or_else(|| format!("there is no group of settings {name:?}"))?;
        for setting in group.settings {
            let flag = flag(program, setting)?;
            let default = if default(flag).is_empty() { setting.manual.without.to_owned() } else { default(flag) };
            writeln!(table, "| {} | {default} | {} |", code(&form(flag)), setting.manual.effect).ok();
        }
    }
    Ok(table + "\n")
}

/// Settings of which a change counts at once, without those of the source, which make a new connection.
fn at_once() -> String {
    let all = SETTINGS.iter().flat_map(|group| group.settings).filter(|setting| setting.applies == Applies::OnReload);
    let names: Vec<_> = all.filter(|of| !SourceSettings::SETTINGS.contains(of)).map(|of| code(of.name)).collect();
    filled("", &format!("{}.", names.join(", ")))
}

/// The example file: each setting with its help, as a comment.
fn example(program: &Command, _: &str) -> Result<String, String> {
    let mut file = HEAD.to_owned();
    for group in SETTINGS {
        let title = group.title.trim();
        write!(file, "\n{}", filled("## ", title.trim_end_matches('.'))).ok();
        for setting in group.settings {
            let flag = flag(program, setting)?;
            let help = flag.get_help().map(ToString::to_string).unwrap_or_default();
            let values = values(flag);
            let values = if values.is_empty() { String::new() } else { format!(" ({})", values.join(", ")) };
            file.push_str(&filled("# ", &format!("{help}{values}")));
            let default = default(flag).replace('`', "");
            let value = if setting.manual.example.is_empty() { &default } else { setting.manual.example };
            writeln!(file, "#{} = {value}", setting.name).ok();
        }
    }
    Ok(file)
}

/// Flag of a setting.
fn flag<'a>(program: &'a Command, setting: &Setting) -> Result<&'a Arg, String> {
    let command = if WaitSettings::SETTINGS.contains(setting) { "wait" } else { "run" };
    let mut flags = program.find_subcommand(command).into_iter().flat_map(Command::get_arguments);
    let flag = flags.find(|flag| flag.get_long() == Some(setting.name));
    flag.ok_or_else(|| format!("{command} has no flag --{}", setting.name))
}

fn values(flag: &Arg) -> Vec<String> {
    flag.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect()
}

/// The flag, with its values or their name.
fn form(flag: &Arg) -> String {
    let names = flag.get_value_names().unwrap_or_default().iter().map(ToString::to_string).collect::<Vec<_>>();
    let values = values(flag);
    let value = if values.is_empty() { names.join(" ") } else { values.join("|") };
    let count = flag.get_num_args().unwrap_or_default();
    let value = if count.min_values() == 0 { format!("[{value}]") } else { value };
    let many = if count.max_values() > 1 { "..." } else { "" };
    format!("--{} {value}{many}", flag.get_long().unwrap_or_default())
}

/// Text in lines that begin with `start`.
fn filled(start: &str, text: &str) -> String {
    let (mut lines, mut line) = (String::new(), start.to_owned());
    for word in text.split(' ') {
        if line.len() + word.len() >= COLUMNS {
            writeln!(lines, "{}", line.trim_end()).ok();
            start.clone_into(&mut line);
        }
        write!(line, "{word} ").ok();
    }
    let line = mem::take(&mut line);
    writeln!(lines, "{}", line.trim_end()).ok();
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_and_images_have_the_settings_of_today() {
        let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let program = cproxy::cli::manual();
        for (name, make) in FILES {
            let file = fs::read_to_string(repository.join(name)).unwrap();
            assert!(make(&program, &file).unwrap() == file, "{name}: run `cargo xtask manual --update`");
        }
    }

    #[test]
    fn the_reference_has_each_setting() {
        let reference = include_str!("../../../docs/reference.md");
        for setting in SETTINGS.iter().flat_map(|group| group.settings) {
            let row = format!("| `--{} ", setting.name);
            assert!(reference.lines().any(|line| line.starts_with(&row)), "docs/reference.md has no row {row}");
        }
    }
}
