//! Writes man pages, and completions for bash, zsh and fish, into a directory; `cargo xtask manual DIR` runs it. A
//! program of its own, so that nothing of it is in the agent.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Command;
use clap_complete::{Shell, generate_to};
use clap_mangen::Man;

/// Section of the manual: commands of the administrator.
const SECTION: &str = "8";

/// Text of the page `cproxy` behind its flags.
const SEE_ALSO: &str = ".SH \"SEE ALSO\"\nThe reference, docs/reference.md, has settings, formats and exit codes.\n";

fn main() -> ExitCode {
    let Some(directory) = env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("cproxy-manual: pass the directory to write to");
        return ExitCode::from(2);
    };
    match write(&directory) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cproxy-manual: {}: {error}", directory.display());
            ExitCode::FAILURE
        }
    }
}

fn write(directory: &Path) -> io::Result<()> {
    let [pages, completions] = ["man", "completions"].map(|name| directory.join(name));
    fs::create_dir_all(&pages)?;
    fs::create_dir_all(&completions)?;
    let mut command = cproxy::cli::manual();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        generate_to(shell, &mut command.clone(), "cproxy", &completions)?;
    }
    // The page of each command has its help.
    command = command.disable_help_subcommand(true);
    command.build();
    write_page(&pages, command.clone(), "cproxy".to_owned())?;
    command.get_subcommands().cloned().try_for_each(|of| {
        let name = format!("cproxy-{}", of.get_name());
        write_page(&pages, of, name)
    })
}

fn write_page(pages: &Path, command: Command, name: String) -> io::Result<()> {
    let path = pages.join(format!("{name}.{SECTION}"));
    let command = command.disable_help_subcommand(true).name(name);
    let mut text = Vec::new();
    Man::new(command).section(SECTION).render(&mut text)?;
    text.extend(SEE_ALSO.as_bytes());
    fs::write(path, text)
}
