//! Commands of a program in a Markdown text, in code blocks and between backticks.

use clap::{
    Command,
    error::{ContextKind, ContextValue, ErrorKind},
};

use crate::blocks::{Block, blocks};

/// Characters and words that end a command in a shell.
const ENDS: [char; 7] = ['|', ';', '&', '>', '<', '(', ')'];

/// A command with its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DocumentCommand {
    /// Number of its line in the document, from 1.
    pub line: usize,
    /// Arguments behind the program's name.
    pub arguments: Vec<String>,
}

/// Commands of a program, whose name may be several words.
#[must_use]
pub fn commands(markdown: &str, program: &[&str]) -> Vec<DocumentCommand> {
    let in_blocks = blocks(markdown).into_iter().flat_map(|block| lines_of(&block));
    let spans = spans(markdown);
    let found = in_blocks.chain(spans).flat_map(|(line, text)| {
        let commands = shell_commands(&text).into_iter().filter_map(move |words| after_program(&words, program));
        commands.map(move |arguments| DocumentCommand { line, arguments }).collect::<Vec<_>>()
    });
    found.collect()
}

/// Lines of a block with their numbers, those that end with a backslash joined with the next one.
fn lines_of(block: &Block) -> Vec<(usize, String)> {
    let mut lines: Vec<(usize, String)> = Vec::new();
    let mut goes_on = false;
    for (number, line) in (block.line..).zip(block.text.lines()) {
        let (text, continues) = line.strip_suffix('\\').map_or((line, false), |text| (text, true));
        match lines.last_mut().filter(|_| goes_on) {
            Some((_, last)) => last.push_str(text),
            None => lines.push((number, text.to_owned())),
        }
        goes_on = continues;
    }
    lines
}

/// Texts between backticks outside of code blocks; they may go over the end of a line.
fn spans(markdown: &str) -> Vec<(usize, String)> {
    let blocks = blocks(markdown);
    let is_code = |number: usize| {
        let within = |block: &Block| number + 1 >= block.line && number <= block.line + block.text.lines().count();
        blocks.iter().any(within)
    };
    let prose: String = (1..)
        .zip(markdown.lines())
        .map(|(number, line)| if is_code(number) { "\n".to_owned() } else { format!("{line}\n") })
        .collect();
    let mut line = 1;
    let mut spans = Vec::new();
    for (number, text) in prose.split('`').enumerate() {
        if number % 2 == 1 {
            spans.push((line, text.replace('\n', " ")));
        }
        line += text.matches('\n').count();
    }
    spans
}

/// Words of each command of a shell line, without redirections, comments and variables before the program.
fn shell_commands(line: &str) -> Vec<Vec<String>> {
    let mut commands = vec![Vec::new()];
    let mut word = String::new();
    let mut quote = None;
    let end_word = |word: &mut String, commands: &mut Vec<Vec<String>>| {
        if let Some(command) = commands.last_mut().filter(|_| !word.is_empty()) {
            command.push(std::mem::take(word));
        }
    };
    for char in line.chars() {
        match (quote, char) {
            (Some(open), close) if open == close => quote = None,
            (Some(_), inside) => word.push(inside),
            (None, '"' | '\'') => quote = Some(char),
            (None, '#') if word.is_empty() => break,
            (None, blank) if blank.is_whitespace() => end_word(&mut word, &mut commands),
            (None, end) if ENDS.contains(&end) => {
                end_word(&mut word, &mut commands);
                commands.push(Vec::new());
            }
            (None, plain) => word.push(plain),
        }
    }
    end_word(&mut word, &mut commands);
    commands
}

/// Arguments behind the program's name, if the words are a command of it.
fn after_program(words: &[String], program: &[&str]) -> Option<Vec<String>> {
    let is_prefix = |word: &&String| *word == "$" || is_assignment(word);
    let skipped = words.iter().take_while(is_prefix).count();
    let words = words.get(skipped..)?;
    let (name, arguments) = (words.get(..program.len())?, words.get(program.len()..)?);
    let first = name.first().map(|first| first.rsplit('/').next().unwrap_or(first));
    let is_named = first == program.first().copied() && name.iter().skip(1).eq(program.iter().skip(1));
    is_named.then(|| arguments.to_vec())
}

fn is_assignment(word: &str) -> bool {
    word.split_once('=').is_some_and(|(name, _)| name.chars().all(|char| char.is_ascii_uppercase() || char == '_'))
}

/// Reason why the program would not accept the arguments. Words in capitals stand for values, and a text in prose may
/// leave out what a command requires.
#[must_use]
pub fn breach(definition: &Command, arguments: &[String]) -> Option<String> {
    let is_pattern = |argument: &String| argument.contains("...") || argument.starts_with('[');
    let arguments: Vec<_> = arguments.iter().take_while(|argument| !is_pattern(argument)).collect();
    // The verb itself may stand for any.
    if arguments.first().is_some_and(|first| is_placeholder(first)) {
        return None;
    }
    let words = [definition.get_name().to_owned()].into_iter().chain(arguments.iter().map(|word| (*word).clone()));
    let error = definition.clone().try_get_matches_from(words).err()?;
    let has_placeholder = arguments.iter().any(|argument| is_placeholder(argument));
    match error.kind() {
        ErrorKind::UnknownArgument | ErrorKind::InvalidSubcommand => {}
        ErrorKind::ValueValidation | ErrorKind::InvalidValue if !has_placeholder && !lacks_value(&error) => {}
        _ => return None,
    }
    Some(error.to_string().lines().next().unwrap_or_default().to_owned())
}

/// Whether an option has no value, as in a text that only names the option.
fn lacks_value(error: &clap::Error) -> bool {
    matches!(error.get(ContextKind::InvalidValue), Some(ContextValue::String(value)) if value.is_empty())
}

/// Whether a word stands for a value: it is in capitals, or a part of it is.
fn is_placeholder(word: &str) -> bool {
    let parts = word.split(|char: char| !char.is_ascii_alphanumeric() && char != '_');
    parts.into_iter().any(|part| !part.is_empty() && part.chars().all(|char| char.is_ascii_uppercase() || char == '_'))
}

#[cfg(test)]
mod tests {
    use clap::{Arg, ArgAction};

    use super::*;

    fn words(markdown: &str) -> Vec<String> {
        commands(markdown, &["tool"]).into_iter().map(|command| command.arguments.join(" ")).collect()
    }

    #[test]
    fn commands_are_found_in_blocks_and_between_backticks() {
        let text = "Run `tool a` or\n`tool b\n--c`, not `other tool`.\n\n```\n$ tool d --e \"f g\"   # and so on\n\
                    X=1 tool h && /usr/bin/tool i | tail\nP=$(tool j) tools k\ntool l \\\n    --m >n &\n```\n\
                    `tool o`\n";
        assert_eq!(words(text), ["d --e f g", "h", "i", "j", "l --m", "a", "b --c", "o"]);
        let lines: Vec<_> = commands(text, &["tool"]).into_iter().map(|command| command.line).collect();
        assert_eq!(lines, [6, 7, 7, 8, 9, 1, 2, 12]);
    }

    #[test]
    fn a_program_may_have_two_words() {
        assert_eq!(commands("`cargo tool a`", &["cargo", "tool"])[0].arguments, ["a"]);
        assert_eq!(commands("`cargo other a`", &["cargo", "tool"]), []);
    }

    #[test]
    fn unknown_verbs_flags_and_values_are_breaches() {
        let level = Arg::new("level").long("level").value_parser(["low", "high"]);
        let run = Command::new("run").arg(level).arg(Arg::new("file").required(true));
        let quiet = Arg::new("quiet").short('q').action(ArgAction::SetTrue);
        let tool = Command::new("tool").subcommand(run).arg(quiet);
        let breach = |line: &str| breach(&tool, &line.split(' ').map(str::to_owned).collect::<Vec<_>>());
        for good in [
            "run",
            "run --level",
            "run --level low FILE",
            "run --level LEVEL x",
            "-q",
            "run [--other]",
            "VERB --x",
            "run ...",
        ] {
            assert_eq!(breach(good), None, "{good}");
        }
        for bad in ["walk", "run --leval low x", "run --level middle x"] {
            assert!(breach(bad).is_some(), "{bad}");
        }
    }
}
