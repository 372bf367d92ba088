//! Errors of the command line.

/// An error of clap as one line: its first paragraph, which says what is wrong, without `error: `.
#[must_use]
pub fn usage_error_line(error: &str) -> String {
    let lines: Vec<_> = error.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
    lines.join(" ").trim_start_matches("error: ").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_paragraph_becomes_one_line() {
        let error =
            "error: invalid value 'a' for '--b <B>'\n  [possible values: c, d]\n\nFor more information, try it\n";
        assert_eq!(usage_error_line(error), "invalid value 'a' for '--b <B>' [possible values: c, d]");
        assert_eq!(usage_error_line(""), "");
    }
}
