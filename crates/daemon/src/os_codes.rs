//! Numbers of system errors, which the standard library puts behind their texts.

use std::borrow::Cow;

const START: &str = " (os error ";

/// The text without these numbers: `No such file or directory (os error 2)` says nothing more with them.
#[must_use]
pub fn without_os_codes(text: &str) -> Cow<'_, str> {
    let mut pieces = text.split(START);
    let first = pieces.next().unwrap_or_default();
    if first.len() == text.len() {
        return text.into();
    }
    let mut plain = first.to_owned();
    for piece in pieces {
        match piece.split_once(')') {
            Some((code, rest)) if code.bytes().all(|byte| byte.is_ascii_digit()) => plain.push_str(rest),
            _ => plain.extend([START, piece]),
        }
    }
    plain.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_numbers_are_left_out() {
        for (text, expected) in [
            ("a: No such file or directory (os error 2); b (os error 13)", "a: No such file or directory; b"),
            ("(os error 2) (os error x) (os error 3", "(os error 2) (os error x) (os error 3"),
            ("", ""),
        ] {
            assert_eq!(without_os_codes(text), expected);
        }
    }
}
