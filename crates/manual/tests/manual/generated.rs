//! The generated manual: each command and flag is in it, and the programs that read it accept it.

#![expect(clippy::unwrap_used, reason = "a failed call is a failed test")]

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// Directory with the manual, which goes away with the value.
struct Manual(PathBuf);

impl Manual {
    fn generate(name: &str) -> Self {
        let directory = std::env::temp_dir().join(format!("cproxy-manual-{name}-{}", std::process::id()));
        let status = Command::new(env!("CARGO_BIN_EXE_cproxy-manual")).arg(&directory).status().unwrap();
        assert!(status.success());
        Self(directory)
    }

    fn files(&self, kind: &str) -> BTreeSet<PathBuf> {
        fs::read_dir(self.0.join(kind)).unwrap().map(|entry| entry.unwrap().path()).collect()
    }
}

impl Drop for Manual {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap()
}

#[test]
fn every_command_and_flag_has_a_page() {
    let manual = Manual::generate("all");
    let (pages, completions) = (manual.files("man"), manual.files("completions"));
    let names: Vec<_> = completions.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
    assert_eq!(names, ["_cproxy", "cproxy.bash", "cproxy.fish"]);
    let cli = cproxy::cli::manual();
    let mut commands = 0;
    for command in cli.get_subcommands() {
        commands += 1;
        let name = command.get_name();
        let page = text(&manual.0.join(format!("man/cproxy-{name}.8")));
        let overview = text(&manual.0.join("man/cproxy.8"));
        assert!(overview.contains(&format!("cproxy\\-{name}(8)")), "{name} is missing in the overview");
        let shown = command.get_arguments().filter(|flag| !flag.is_hide_set());
        for flag in shown.filter_map(clap::Arg::get_long) {
            let escaped = format!("\\-\\-{}", flag.replace('-', "\\-"));
            assert!(page.contains(&escaped), "--{flag} is missing in the page of {name}");
        }
    }
    assert!(commands >= 9, "{commands}");
    assert_eq!(pages.len(), commands + 1);
    for path in &pages {
        // Hidden commands: the agent alone runs them.
        assert!(!text(path).contains("`run` does this in a child process"), "{}", path.display());
    }
}

/// Output of a program with this file. `None`: the machine does not have the program.
fn output(program: &str, arguments: &[&str], file: &Path) -> Option<Output> {
    match Command::new(program).args(arguments).arg(file).env("LC_ALL", "C.UTF-8").output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        output => Some(output.unwrap()),
    }
}

#[test]
fn man_and_the_shells_accept_what_is_generated() {
    let manual = Manual::generate("accepted");
    for page in manual.files("man") {
        let readers = [("man", &["--warnings", "--local-file"][..]), ("mandoc", &["-T", "lint", "-W", "error"])];
        for (program, arguments) in readers {
            let Some(output) = output(program, arguments, &page) else { continue };
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && errors.is_empty(), "{program} {}: {errors}", page.display());
        }
    }
    let completions = manual.0.join("completions");
    for (shell, file) in [("bash", "cproxy.bash"), ("zsh", "_cproxy"), ("fish", "cproxy.fish")] {
        let Some(output) = output(shell, &["-n"], &completions.join(file)) else { continue };
        assert!(output.status.success(), "{shell}: {}", String::from_utf8_lossy(&output.stderr));
    }
}
