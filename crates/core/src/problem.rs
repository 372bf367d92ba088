//! Problems of objects, as values.

use std::fmt;

/// Maximum number of frontends that a problem names; it only counts the others.
pub(super) const FRONTENDS_NAMED_MAX: usize = 3;
/// Maximum number of list items that a problem names.
const ITEMS_NAMED_MAX: usize = 11;

/// The first of `count` names: "a", "a and b", "a, b and 7 more".
pub(super) fn some_of(first: &[impl fmt::Display], count: usize) -> String {
    let named: Vec<_> = first.iter().map(ToString::to_string).collect();
    match (count.saturating_sub(named.len()), named.split_last()) {
        (0, Some((last, []))) => last.clone(),
        (0, Some((last, before))) => format!("{} and {last}", before.join(", ")),
        (more, _) => format!("{} and {more} more", named.join(", ")),
    }
}

/// Error in one object. It never affects other objects.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// The object: kind and namespace/name, or a file.
    pub object: String,
    /// Path of the field from the object's root; empty for the object as a whole.
    pub field: String,
    /// Error and its consequence.
    pub message: String,
}

/// Maximum length of a message in characters: an object may quote a megabyte.
const MESSAGE_CHARS_MAX: usize = 1_024;

impl Problem {
    /// A problem of a field of an object.
    pub fn new(object: impl fmt::Display, field: impl Into<String>, message: impl Into<String>) -> Self {
        let message = shortened(printable(&message.into()));
        Self { object: printable(&object.to_string()), field: field.into(), message }
    }
}

/// Start of a very long message, or the whole of a shorter one.
#[must_use]
pub fn shortened(mut message: String) -> String {
    if let Some((end, _)) = message.char_indices().nth(MESSAGE_CHARS_MAX) {
        message.truncate(end);
        message.push_str("...");
    }
    message
}

/// Problems of one object while it is parsed. Items of a list with the same reason are one problem, which names the
/// first of them and counts the others.
#[derive(Default)]
pub(super) struct Findings(Vec<Finding>);

struct Finding {
    /// Path of the field, or of the list with the items.
    field: String,
    reason: String,
    items: Option<Items>,
}

struct Items {
    first_index: usize,
    /// Rest of an item's path.
    rest: &'static str,
    count: usize,
    subjects: Vec<String>,
}

impl Findings {
    /// Records a problem of a field.
    pub(super) fn field(&mut self, field: &str, message: &str) {
        self.0.push(Finding { field: field.to_owned(), reason: message.to_owned(), items: None });
    }

    /// Records a problem of a list item. The reason is the same text for all items that share it.
    pub(super) fn item(
        &mut self,
        (list, index, rest): (&str, usize, &'static str),
        subject: impl fmt::Display,
        reason: &str,
    ) {
        let same = self.0.iter_mut().filter(|finding| finding.field == list && finding.reason == reason);
        if let Some(items) = same.filter_map(|finding| finding.items.as_mut()).find(|items| items.rest == rest) {
            items.count += 1;
            if items.subjects.len() < ITEMS_NAMED_MAX {
                items.subjects.push(format!("[{index}] {subject}"));
            }
            return;
        }
        let items = Items { first_index: index, rest, count: 1, subjects: vec![subject.to_string()] };
        self.0.push(Finding { field: list.to_owned(), reason: reason.to_owned(), items: Some(items) });
    }

    /// The problems of the object with this kind and name.
    pub(super) fn into_problems(self, object: fmt::Arguments<'_>) -> Vec<Problem> {
        self.0.into_iter().map(|finding| finding.problem(object)).collect()
    }
}

impl Finding {
    fn problem(self, object: fmt::Arguments<'_>) -> Problem {
        let Self { field, reason, items } = self;
        let Some(Items { first_index, rest, count, subjects }) = items else {
            return Problem::new(object, field, reason);
        };
        let others = subjects.get(1..).unwrap_or_default();
        let likewise = match count {
            1 => String::new(),
            _ => format!(" (likewise {})", some_of(others, count - 1)),
        };
        let subject = subjects.first().map_or("", String::as_str);
        Problem::new(object, format!("{field}[{first_index}]{rest}"), format!("{subject}{reason}{likewise}"))
    }
}

/// A number with its noun.
#[must_use]
pub fn counted(count: u64, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

/// Printable form of a name from outside, which must not begin a new line of a log, steer a terminal or reverse the
/// text after it.
#[must_use]
pub fn printable(text: &str) -> String {
    text.replace(is_steering, "\u{fffd}")
}

/// Whether a character begins a line, steers a terminal or reverses the text after it.
#[must_use]
pub fn is_steering(char: char) -> bool {
    let turns = matches!(char, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    char.is_control() || turns
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.field.as_str() {
            "" => write!(f, "{}: {}", self.object, self.message),
            field => write!(f, "{}: {field}: {}", self.object, self.message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_with_one_reason_are_one_problem() {
        let mut findings = Findings::default();
        findings.field("spec.type", "strange");
        for index in 0..13 {
            findings.item(("spec.externalIPs", index, ""), format_args!("\"x{index}\""), " is not a valid IP address");
            findings.item(("status.ingress", index, ".ip"), format_args!("\"y{index}\""), " is not a valid IP address");
        }
        findings.item(("spec.externalIPs", 7, ""), "\"::1\"", " is a loopback address");
        let problems: Vec<_> =
            findings.into_problems(format_args!("Service a/b")).iter().map(ToString::to_string).collect();
        let named =
            |name: &str| (1..11).map(|index| format!("[{index}] \"{name}{index}\"")).collect::<Vec<_>>().join(", ");
        assert_eq!(
            problems,
            [
                "Service a/b: spec.type: strange".to_owned(),
                format!(
                    "Service a/b: spec.externalIPs[0]: \"x0\" is not a valid IP address (likewise {} and 2 more)",
                    named("x")
                ),
                format!(
                    "Service a/b: status.ingress[0].ip: \"y0\" is not a valid IP address (likewise {} and 2 more)",
                    named("y")
                ),
                "Service a/b: spec.externalIPs[7]: \"::1\" is a loopback address".to_owned(),
            ]
        );
    }

    #[test]
    fn a_message_has_a_bound() {
        let problem = Problem::new("Service a/b", "", "é".repeat(1 << 20));
        assert_eq!(problem.message.chars().count(), MESSAGE_CHARS_MAX + 3);
    }
}
