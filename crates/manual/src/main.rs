//! Writes man pages, completions for bash, zsh and fish, and reference pages into a directory (`cargo xtask manual
//! DIR`), and the settings into documents and images of the repository (`cargo xtask manual --update`). A program of
//! its own, so that nothing of it is in the agent.

mod json;
mod metrics;
mod reference;
mod settings;

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Command;
use clap_mangen::Man;
use cproxy::cli::Shell;

/// Section of the manual: commands of the administrator.
const SECTION: &str = "8";

/// Text of the page `cproxy` behind its flags.
const SEE_ALSO: &str = ".SH \"SEE ALSO\"\nThe reference, docs/reference.md, has settings, formats and exit codes.\n";

fn main() -> ExitCode {
    let arguments: Vec<_> = env::args_os().skip(1).collect();
    let (directory, written) = match arguments.as_slice() {
        [flag, repository] if flag == "--update" => (PathBuf::from(repository), update(repository.as_ref())),
        [directory] => (PathBuf::from(directory), write(directory.as_ref())),
        _ => {
            eprintln!("cproxy-manual: pass the directory to write to, or --update and the repository");
            return ExitCode::from(2);
        }
    };
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cproxy-manual: {}: {error}", directory.display());
            ExitCode::FAILURE
        }
    }
}

/// Writes the settings into documents and images of a repository, and prints the files that have changed.
fn update(repository: &Path) -> io::Result<()> {
    settings::update(repository)?.iter().for_each(|path| println!("{}", path.display()));
    Ok(())
}

fn write(directory: &Path) -> io::Result<()> {
    let [pages, completions] = ["man", "completions"].map(|name| directory.join(name));
    fs::create_dir_all(&pages)?;
    fs::create_dir_all(&completions)?;
    for shell in Shell::ALL {
        fs::write(completions.join(shell.file_name()), shell.script())?;
    }
    let mut command = cproxy::cli::manual();
    // The page of each command has its help.
    command = command.disable_help_subcommand(true);
    command.build();
    write_page(&pages, command.clone(), "cproxy".to_owned())?;
    command.get_subcommands().cloned().try_for_each(|of| {
        let name = format!("cproxy-{}", of.get_name());
        write_page(&pages, of, name)
    })?;
    write_reference(&directory.join("reference"))
}

/// Pages in Markdown: commands and metrics of agent and relay; settings, exit codes and JSON of the agent.
fn write_reference(directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    let agent = cproxy::cli::manual();
    fs::write(directory.join("cproxy.md"), reference::commands(&agent))?;
    fs::write(directory.join("settings.md"), reference::settings(&agent))?;
    fs::write(directory.join("exit-codes.md"), reference::exit_codes())?;
    fs::write(directory.join("json.md"), json::page(cproxy::cli::schemas()))?;
    fs::write(directory.join("metrics.md"), metrics::page("cproxy", &cproxy::status_http::every_metric()))?;
    fs::write(directory.join("relay-metrics.md"), metrics::page("cproxy-relay", &cproxy_relay::every_metric()))?;
    fs::write(directory.join("cproxy-relay.md"), reference::commands(&cproxy_relay::cli::manual()))
}

fn write_page(pages: &Path, command: Command, name: String) -> io::Result<()> {
    let path = pages.join(format!("{name}.{SECTION}"));
    let command = command.disable_help_subcommand(true).name(name);
    let mut text = Vec::new();
    Man::new(command).section(SECTION).render(&mut text)?;
    text.extend(SEE_ALSO.as_bytes());
    fs::write(path, text)
}
