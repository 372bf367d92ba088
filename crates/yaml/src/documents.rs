//! Splits YAML text into its documents. The parser takes several at once only from a reader, with tables of every
//! encoding, or as values that are all in memory together.

/// Documents of `text`, each with the number of bytes before it. Some may be empty.
///
/// No line within a document may begin as a marker does (YAML 1.2.2, 9.1), so this needs no parser.
pub(super) fn documents(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut start = 0;
    std::iter::from_fn(move || {
        let rest = text.get(start..).filter(|rest| !rest.is_empty())?;
        let document = rest.get(..first_length(rest))?;
        let before = start;
        start += document.len();
        Some((before, document))
    })
}

/// Length of the first document: up to the start of the next one, or to its own end marker.
fn first_length(text: &str) -> usize {
    let (mut length, mut has_begun, mut has_ended) = (0, false, false);
    for line in text.split_inclusive(['\n', '\r']) {
        let is_rest_of_break = line == "\n";
        if (has_begun && is_marker(line, "---")) || (has_ended && !is_rest_of_break) {
            break;
        }
        length += line.len();
        has_begun |= !is_before_document(line);
        has_ended |= is_marker(line, "...");
    }
    length
}

fn is_marker(line: &str, marker: &str) -> bool {
    line.strip_prefix(marker).is_some_and(|rest| rest.is_empty() || rest.starts_with([' ', '\t', '\n', '\r']))
}

/// Whether a line may be above a document's `---`: empty, a comment or a directive.
fn is_before_document(line: &str) -> bool {
    let line = line.trim_start_matches('\u{feff}');
    line.starts_with('%') || line.trim_start().is_empty() || line.trim_start().starts_with('#')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_end_at_markers_and_nowhere_else() {
        for (text, expected) in [
            ("", &[][..]),
            ("a: 1", &["a: 1"]),
            ("a: 1\n---\nb: 2\n", &["a: 1\n", "---\nb: 2\n"]),
            ("---\na: 1\n--- # two\nb: 2\n---", &["---\na: 1\n", "--- # two\nb: 2\n", "---"]),
            ("---\r\na: 1\r\n---\r\nb: 2\r\n", &["---\r\na: 1\r\n", "---\r\nb: 2\r\n"]),
            ("a: 1\r---\rb: 2\r", &["a: 1\r", "---\rb: 2\r"]),
            ("\u{feff}# first\n\n%YAML 1.2\n---\na: 1\n", &["\u{feff}# first\n\n%YAML 1.2\n---\na: 1\n"]),
            ("a: 1\n...\n%YAML 1.2\n---\nb: 2\n", &["a: 1\n...\n", "%YAML 1.2\n---\nb: 2\n"]),
            ("a: 1\r\n...\r\nb: 2\r\n", &["a: 1\r\n...\r\n", "b: 2\r\n"]),
            ("---\n---\n", &["---\n", "---\n"]),
            ("--- {a: 1}\n--- |\n text\n", &["--- {a: 1}\n", "--- |\n text\n"]),
            ("a: |\n  ---\n  b\n---b: 2\n----\n", &["a: |\n  ---\n  b\n---b: 2\n----\n"]),
        ] {
            let all: Vec<_> = documents(text).collect();
            assert_eq!(all.iter().map(|(_, document)| *document).collect::<Vec<_>>(), expected, "{text:?}");
            assert!(all.iter().all(|(start, document)| text[*start..].starts_with(document)), "{text:?}");
        }
    }
}
