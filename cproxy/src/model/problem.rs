//! What is wrong with an object, as a value.

use std::fmt;

/// One thing that is wrong with one object. It never stops anything else.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// The object: kind and namespace/name, or a file.
    pub object: String,
    /// The field, as a path from the object's root; empty if it is the object as a whole.
    pub field: String,
    /// What is wrong and what was done about it.
    pub message: String,
}

impl Problem {
    /// A problem of a field of an object.
    pub fn new(object: impl fmt::Display, field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { object: printable(&object.to_string()), field: field.into(), message: printable(&message.into()) }
    }
}

/// Names come from outside: one must not begin a new line of a log, steer a terminal, or turn what follows around.
#[must_use]
pub fn printable(text: &str) -> String {
    let steers = |char: char| {
        let turns = matches!(char, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        char.is_control() || turns
    };
    text.replace(steers, "\u{fffd}")
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.field.as_str() {
            "" => write!(f, "{}: {}", self.object, self.message),
            field => write!(f, "{}: {field}: {}", self.object, self.message),
        }
    }
}
