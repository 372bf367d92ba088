//! `cproxy completion`: shells complete commands, flags, values, and the names of an agent's Services.

use std::{env, path::Path, process::Command};

use cproxy_tests::{
    manifest::{self, http_service},
    process::{cproxy, cproxy_binary, eventually, run},
    sandbox::Placement,
    world::{SYNC, World, pod, web_with},
};

/// Prints the candidates of bash for the words behind the program.
const BASH: &str = r#"
source <("$0" completion bash)
COMP_WORDS=("$0" "$@") COMP_CWORD=$#
_cproxy
printf '%s\n' "${COMPREPLY[@]}""#;

/// The same in zsh, whose system of completions shows what the script gives to it.
const ZSH: &str = r#"
compdef() { : }
_files() { : }
_describe() { local -a all=("${(@P)2}"); print -rl -- "${(@)all%%:*}" }
source <("$0" completion zsh)
words=("$0" "$@") CURRENT=$#words
_cproxy"#;

/// The same in fish, which completes a line.
const FISH: &str = r#"
cproxy completion fish | source
complete -C (string join -- ' ' cproxy $argv[2..])"#;

/// Lines and their candidates.
const CASES: [(&[&str], &[&str]); 7] = [
    (&["ch"], &["check"]),
    (&["get", "s"], &["services", "sockets"]),
    (&["get", "services", "--wa"], &["--watch"]),
    (&["get", "-o", "y"], &["yaml"]),
    (&["explain", "def"], &["default/other", "default/web"]),
    // The agent's canary is none of them.
    (&["get", "services", "--service", ""], &["default/other", "default/web"]),
    (&["nonsense", "x"], &[]),
];

#[test]
fn shells_complete_commands_flags_values_and_names_of_services() {
    let other = http_service("other", "10.96.0.77", [pod(1).v4]);
    let world = World::builder().pods(1..=1).objects(web_with([1])).start();
    manifest::write(&world.sandbox.manifest_dir(), "other.json", other);
    eventually(SYNC, "the other Service", || {
        let names = cproxy(&world.sandbox, &["get", "services", "-o", "name"]).stdout;
        if names.contains("default/other") { Ok(()) } else { Err(names) }
    });
    let binary = cproxy_binary();
    let directory = binary.parent().map(Path::display).map(|directory| directory.to_string()).unwrap_or_default();
    let path = format!("{directory}:{}", env::var("PATH").unwrap_or_default());
    for (shell, arguments) in [("bash", ["-c", BASH]), ("zsh", ["-fc", ZSH]), ("fish", ["-Nc", FISH])] {
        for (words, expected) in CASES {
            let mut command = Command::new(shell);
            command.args(arguments).arg(&binary).args(words);
            command.env("CPROXY_RUN_DIR", world.sandbox.run_dir()).env("PATH", &path);
            let output = run(&world.sandbox, Placement::Unhooked, command, "", SYNC);
            let found: Vec<_> = output.stdout.lines().filter_map(|line| line.split('\t').next()).collect();
            let found: Vec<_> = found.into_iter().filter(|candidate| !candidate.is_empty()).collect();
            assert_eq!(found, expected, "{shell} {words:?}: {output:?}");
        }
    }
}
