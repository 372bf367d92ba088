//! Rules about lines: their length, the first word of a doc comment, and names of tests.

/// The limit of rustfmt, which leaves comments and strings alone.
const COLUMNS_MAX: usize = 120;

/// First words of doc comments that ask for a thing instead of naming it.
const RIDDLES: [&str; 4] = ["What", "Who", "Whom", "Whose"];

/// Breaches of a Rust file.
pub(super) fn of_source(content: &str) -> Vec<String> {
    let too_long = numbered(content).filter(|(_, line)| is_too_long(line)).map(too_long);
    too_long.chain(riddles(content)).chain(test_names(content)).collect()
}

/// Breaches of a Markdown file. Rows of tables, headings, code and lines with nothing but a link may be longer.
pub(super) fn of_prose(content: &str) -> Vec<String> {
    let mut is_code = false;
    let prose = numbered(content).filter(|(_, line)| {
        let line = line.trim_start();
        let is_fence = line.starts_with("```") || line.starts_with("~~~");
        is_code ^= is_fence;
        !is_code && !is_fence && !line.starts_with(['|', '#']) && !is_link(line)
    });
    prose.filter(|(_, line)| is_too_long(line)).map(too_long).collect()
}

fn numbered(content: &str) -> impl Iterator<Item = (usize, &str)> {
    (1..).zip(content.lines())
}

fn is_too_long(line: &str) -> bool {
    line.chars().count() > COLUMNS_MAX
}

fn too_long((number, line): (usize, &str)) -> String {
    format!("line {number} has {} columns, the limit is {COLUMNS_MAX}", line.chars().count())
}

/// Doc comments that open with a riddle.
fn riddles(content: &str) -> impl Iterator<Item = String> {
    let lines = numbered(content).map(|(number, line)| (number, doc_text(line)));
    let before = std::iter::once(None).chain(content.lines().map(doc_text));
    lines.zip(before).filter_map(|((number, text), before)| {
        let word = text?.split(|c: char| !c.is_alphanumeric()).next()?;
        let is_riddle = before.is_none() && RIDDLES.contains(&word);
        is_riddle.then(|| format!("line {number}: a doc comment opens with `{word}`; name the thing"))
    })
}

/// Tests whose names ask for a behaviour instead of stating it.
fn test_names(content: &str) -> impl Iterator<Item = String> {
    let is_test = std::iter::once(false).chain(content.lines().map(|line| line.trim_start().starts_with("#[")));
    let functions = numbered(content).zip(is_test).filter(|(_, is_test)| *is_test);
    functions.filter_map(|((number, line), _)| {
        let name = line.trim_start().trim_start_matches("async ").strip_prefix("fn ")?;
        let is_riddle = name.starts_with("what_") || name.starts_with("who_");
        is_riddle.then(|| format!("line {number}: a test's name opens with `what_` or `who_`; state the behaviour"))
    })
}

/// The text of a line of a doc comment.
fn doc_text(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let text = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"))?;
    (!text.starts_with('/')).then(|| text.trim_start())
}

/// Whether a line, without the mark of a list or a quotation, is one link or image, whose text is kept on one line.
fn is_link(line: &str) -> bool {
    let line = line.trim_start_matches(['-', '*', '>', ' ', '!', '<']);
    let is_address = line.starts_with("http") && !line.contains(' ');
    let is_reference = line.starts_with('[') && line.split_once("]: ").is_some_and(|(_, rest)| !rest.contains(' '));
    let end = line.trim_end_matches(['.', ',', ';', ':']);
    let is_inline = end.starts_with('[') && end.ends_with(')') && end.matches("](").count() == 1 && {
        end.split_once("](").is_some_and(|(_, address)| !address.contains(' '))
    };
    is_address || is_reference || is_inline
}

#[cfg(test)]
mod tests {
    use super::*;

    fn long(start: &str) -> String {
        format!("{start}{}", " word".repeat(25))
    }

    #[test]
    fn lines_of_sources_are_as_long_as_the_limit() {
        assert_eq!(of_source(&"ä".repeat(COLUMNS_MAX)), [""; 0]);
        let breaches = of_source(&format!("//! x\n    \"{}\"\n", "x".repeat(COLUMNS_MAX)));
        assert_eq!(breaches, ["line 2 has 126 columns, the limit is 120"]);
    }

    #[test]
    fn prose_is_wrapped() {
        let breaches = of_prose(&format!("# T\n\n{}\n{}\n", long("Some"), long("- a")));
        assert_eq!(breaches.len(), 2);
        assert!(breaches[0].starts_with("line 3 has 129 columns"), "{breaches:?}");
    }

    #[test]
    fn tables_headings_and_code_may_be_longer() {
        let text = ["| a |", "## b", "```\nc", "```\n\n~~~ sh\nd", "~~~\n  | e |"].map(long).join("\n");
        assert_eq!(of_prose(&text), [""; 0]);
        assert_eq!(of_prose(&format!("{text}\n\n{}", long("after"))).len(), 1);
    }

    #[test]
    fn a_link_by_itself_may_be_longer() {
        let address = format!("https://example.org/{}", "x".repeat(COLUMNS_MAX));
        for line in [
            address.clone(),
            format!("<{address}>"),
            format!("- [some text]({address})."),
            format!("![a chart]({address})"),
            format!("[name]: {address}"),
        ] {
            assert_eq!(of_prose(&line), [""; 0], "{line}");
        }
        for line in [format!("see {address}"), format!("[a]({address}) and more"), format!("[a](b) and [c]({address})")]
        {
            assert_eq!(of_prose(&line).len(), 1, "{line}");
        }
    }

    #[test]
    fn doc_comments_name_the_thing() {
        for riddle in
            ["//! What it is.\n", "//! A.\n\n    /// Who answers\n", "//! A.\n\n/// Whose\n", "//! Whom, too.\n"]
        {
            assert_eq!(of_source(riddle).len(), 1, "{riddle}");
        }
        let good =
            "//! Whatever.\n//! What follows is no opening.\n\n// What a comment\n//// What a line\n/// The whole\n";
        assert_eq!(of_source(good), [""; 0]);
    }

    #[test]
    fn names_of_tests_state_the_behaviour() {
        let test = |name: &str| format!("//! A.\n\n    #[test]\n    fn {name}() {{\n");
        assert_eq!(
            of_source(&test("what_comes_goes")),
            ["line 4: a test's name opens with `what_` or `who_`; state the behaviour"]
        );
        assert_eq!(of_source(&test("who_answers").replace("fn ", "async fn ")).len(), 1);
        assert_eq!(of_source(&test("whatever_comes_goes")), [""; 0]);
        assert_eq!(of_source("//! A.\n\nfn what_comes_goes() {}\n"), [""; 0]);
    }
}
