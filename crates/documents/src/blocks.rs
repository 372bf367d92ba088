//! Code blocks of a Markdown text.

/// Mark of the fences around a block.
const FENCE: &str = "```";

/// A code block between fences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Text behind the opening fence, such as `sh`.
    pub info: String,
    /// Number of its first line in the document, from 1.
    pub line: usize,
    /// Its lines, without the fence's indentation.
    pub text: String,
}

/// All code blocks of a document, in order.
#[must_use]
pub fn blocks(markdown: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut open: Option<(usize, Block)> = None;
    for (number, line) in (1..).zip(markdown.lines()) {
        let trimmed = line.trim_start();
        match (&mut open, trimmed.strip_prefix(FENCE)) {
            (None, Some(info)) => {
                let block = Block { info: info.trim().to_owned(), line: number + 1, text: String::new() };
                open = Some((line.len() - trimmed.len(), block));
            }
            (Some(_), Some(_)) => blocks.extend(open.take().map(|(_, block)| block)),
            (Some((indent, block)), None) => {
                block.text.push_str(line.get(*indent..).unwrap_or(trimmed));
                block.text.push('\n');
            }
            (None, None) => {}
        }
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_their_info_place_and_text() {
        let text = "a\n```sh run\nb\n  c\n```\n1. d\n   ```\n   e\n   ```\n";
        let found: Vec<_> = blocks(text).into_iter().map(|block| (block.info, block.line, block.text)).collect();
        let block = |info: &str, line, text: &str| (info.to_owned(), line, text.to_owned());
        assert_eq!(found, [block("sh run", 3, "b\n  c\n"), block("", 8, "e\n")]);
    }
}
