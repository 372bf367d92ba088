//! Text for people: lines that fit the terminal, and coloured states.

use super::Layout;

/// Terminal, file or pipe that a text is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Screen {
    /// Space for tables and lines.
    pub layout: Layout,
    /// Whether states have colours.
    pub has_colours: bool,
}

/// Colour of a state (ECMA-48, 8.3.117).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colour {
    /// All is well.
    Green,
    /// Something is less than it could be, or is not known.
    Yellow,
    /// Something does not work.
    Red,
}

impl Screen {
    /// A file or a pipe: long lines, without colours.
    pub const PLAIN: Self = Self { layout: Layout::Plain, has_colours: false };

    /// A word in a colour, if there are colours.
    #[must_use]
    pub fn painted(&self, word: &str, colour: Colour) -> String {
        let code = match colour {
            Colour::Green => 32,
            Colour::Yellow => 33,
            Colour::Red => 31,
        };
        if self.has_colours { format!("\x1b[{code}m{word}\x1b[0m") } else { word.to_owned() }
    }

    /// Text in lines that fit behind an indentation, which the first line has already.
    #[must_use]
    pub fn hanging(&self, indent: usize, text: &str) -> String {
        let Layout::Columns(columns) = self.layout else { return text.to_owned() };
        cproxy_daemon::hanging(columns, indent, text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_hangs_behind_its_indentation() {
        let screen = Screen { layout: Layout::Columns(34), has_colours: true };
        assert_eq!(
            screen.hanging(4, "one two three four five six seven eight"),
            "one two three four five six\n    seven eight"
        );
        assert_eq!(screen.hanging(30, "one two three"), "one two three", "there is no room");
        assert_eq!(Screen::PLAIN.hanging(4, &"word ".repeat(50)), "word ".repeat(50));
        let long = "x".repeat(60);
        assert_eq!(screen.hanging(4, &format!("a {long} b")), format!("a\n    {long}\n    b"));
        assert_eq!(screen.painted("ok", Colour::Green), "\x1b[32mok\x1b[0m");
        assert_eq!(Screen::PLAIN.painted("ok", Colour::Red), "ok");
    }
}
