//! `cproxy completion`: bash completes commands, flags, values, and the names of an agent's Services.

use std::process::Command;

use cproxy_tests::{
    process::{cproxy_binary, run},
    sandbox::Placement,
    world::{SYNC, World},
};

/// Prints the candidates of each line of its standard input.
const SCRIPT: &str = r#"
source <("$0" completion bash)
while IFS= read -r line; do
    read -ra COMP_WORDS <<<"${line/#cproxy/$0}"
    [[ $line == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
    _cproxy
    echo "${COMPREPLY[*]}"
done"#;

#[test]
fn bash_completes_commands_flags_values_and_names_of_services() {
    let world = World::start([1]);
    let run_dir = world.sandbox.run_dir();
    let complete = |line: &str| {
        let mut command = Command::new("bash");
        command.args(["-c", SCRIPT]).arg(cproxy_binary()).env("CPROXY_RUN_DIR", &run_dir);
        run(&world.sandbox, Placement::Unhooked, command, &format!("{line}\n"), SYNC)
            .success()
            .stdout
            .trim_end()
            .to_owned()
    };
    for (line, expected) in [
        ("cproxy ch", "check"),
        ("cproxy get s", "services sockets"),
        ("cproxy get services --wa", "--watch"),
        ("cproxy get -o y", "yaml"),
        ("cproxy explain def", "default/web"),
        ("cproxy get services --service ", "default/web"),
    ] {
        assert_eq!(complete(line), expected, "{line}");
    }
}
