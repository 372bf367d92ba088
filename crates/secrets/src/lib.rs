//! Secrets that this process has sent or was given. Texts of servers and programs may repeat them, so they are removed
//! before a text is logged or shown. Secrets of others, such as those of a server's clients, are passed to each call.

mod decoded;

use std::{
    collections::{HashSet, VecDeque},
    iter,
    ops::Range,
    sync::{Mutex, PoisonError},
};

use base64::{Engine as _, prelude::BASE64_STANDARD_NO_PAD, prelude::BASE64_URL_SAFE_NO_PAD};
use decoded::Decoded;

/// Secrets that are remembered: those in use, and those before them that an answer may still repeat.
const REMEMBERED_MAX: usize = 8;

/// Bytes in a row that are enough of a secret to be removed. Of a shorter secret, all of it is.
pub const PIECE_BYTES: usize = 12;

/// Shortest secret that is looked for. A shorter one is part of ordinary words.
const SECRET_BYTES_MIN: usize = 4;

/// Text in the place of a secret.
const MARK: &str = "(removed)";

static REMEMBERED: Mutex<VecDeque<Box<str>>> = Mutex::new(VecDeque::new());

/// Remembers a secret of this process, such as a token, a password or the value of a header.
pub fn remember(secret: &str) {
    let mut remembered = REMEMBERED.lock().unwrap_or_else(PoisonError::into_inner);
    if secret.len() < SECRET_BYTES_MIN {
        return;
    }
    // The one that was used last is forgotten last.
    remembered.retain(|known| **known != *secret);
    if remembered.len() == REMEMBERED_MAX {
        remembered.pop_front();
    }
    remembered.push_back(secret.into());
}

/// The text without the secrets that this process remembers, in any encoding, and without what looks like a token.
#[must_use]
pub fn hidden(text: &str) -> String {
    hidden_with(text, &[])
}

/// As [`hidden`], and without these secrets, which are not remembered.
#[must_use]
pub fn hidden_with(text: &str, secrets: &[&str]) -> String {
    let remembered = REMEMBERED.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let all = remembered.iter().map(|secret| &**secret).chain(secrets.iter().copied());
    let secrets: Vec<_> = all.filter(|secret| secret.len() >= SECRET_BYTES_MIN).collect();
    if secrets.is_empty() {
        return without_tokens(text);
    }
    let forms: Vec<_> = secrets.iter().flat_map(|secret| forms(secret)).collect();
    let plain: Vec<_> = secrets.iter().map(|&secret| secret.to_owned()).collect();
    let mut found = ranges(text.as_bytes(), &forms);
    for decoded in
        [Decoded::without_escapes(text, false), Decoded::without_escapes(text, true), Decoded::from_hexadecimal(text)]
    {
        found.extend(ranges(&decoded.bytes, &plain).iter().filter_map(|range| decoded.place(range)));
    }
    without_tokens(&without(text, found))
}

/// A secret as it is, and as others may encode it.
fn forms(secret: &str) -> Vec<String> {
    let hex = |byte: u8| [byte >> 4, byte & 0xf].map(|half| char::from_digit(half.into(), 16).unwrap_or_default());
    let (mut percent, mut percent_lower, mut hexadecimal) = (String::new(), String::new(), String::new());
    for byte in secret.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                percent.push(byte.into());
                percent_lower.push(byte.into());
            }
            _ => {
                percent.extend(iter::once('%').chain(hex(byte).map(|digit| digit.to_ascii_uppercase())));
                percent_lower.extend(iter::once('%').chain(hex(byte)));
            }
        }
        hexadecimal.extend(hex(byte));
    }
    let json = serde_json::to_string(secret).unwrap_or_default();
    let others = [percent_lower, hexadecimal.to_ascii_uppercase()];
    let mut forms = vec![secret.to_owned(), percent, json.trim_matches('"').to_owned(), hexadecimal];
    forms.extend(others);
    // In base64 a secret looks different behind one or two other bytes, which the first four characters depend on.
    for before in 0..3 {
        let bytes = [vec![0; before], secret.as_bytes().to_vec()].concat();
        for encoded in [BASE64_STANDARD_NO_PAD.encode(&bytes), BASE64_URL_SAFE_NO_PAD.encode(&bytes)] {
            let start = if before == 0 { 0 } else { 4 };
            // The last character may depend on what follows.
            forms.extend(encoded.get(start..encoded.len().saturating_sub(1)).map(str::to_owned));
        }
    }
    forms.sort_unstable();
    forms.dedup();
    forms.retain(|form| form.len() >= SECRET_BYTES_MIN);
    forms
}

/// Places of these forms of secrets, and of long pieces of them.
fn ranges(text: &[u8], forms: &[String]) -> Vec<Range<usize>> {
    let (long, short): (Vec<_>, Vec<_>) = forms.iter().partition(|form| form.len() >= PIECE_BYTES);
    // Most pieces of a long secret begin with two bytes that a short text does not have in a row.
    let number = |pair: &[u8]| pair.first_chunk().map_or(0, |&bytes| usize::from(u16::from_ne_bytes(bytes)));
    let mut has_pair = vec![false; 1 << u16::BITS];
    for pair in text.windows(2) {
        has_pair.get_mut(number(pair)).into_iter().for_each(|has| *has = true);
    }
    let pieces = long.iter().flat_map(|form| form.as_bytes().windows(PIECE_BYTES));
    let pieces: HashSet<&[u8]> = pieces.filter(|piece| has_pair.get(number(piece)) == Some(&true)).collect();
    let windows = text.windows(PIECE_BYTES).enumerate();
    let mut found: Vec<_> =
        windows.filter(|(_, piece)| pieces.contains(piece)).map(|(at, _)| at..at + PIECE_BYTES).collect();
    for form in short {
        let windows = text.windows(form.len()).enumerate();
        found.extend(windows.filter(|(_, part)| *part == form.as_bytes()).map(|(at, part)| at..at + part.len()));
    }
    found
}

/// The text without these parts.
fn without(text: &str, mut found: Vec<Range<usize>>) -> String {
    found.sort_unstable_by_key(|range| range.start);
    let mut clean = String::with_capacity(text.len());
    let mut end = 0;
    for range in found {
        let first = text.floor_char_boundary(range.start);
        if first >= end {
            clean.push_str(text.get(end..first).unwrap_or_default());
            clean.push_str(MARK);
        }
        end = end.max(text.ceil_char_boundary(range.end));
    }
    clean.push_str(text.get(end..).unwrap_or_default());
    clean
}

/// The text without what looks like a token of others.
fn without_tokens(text: &str) -> String {
    let is_token = |word: &str| {
        let mut parts = word.split('.');
        let is_part = |part: &str| {
            part.len() > 8 && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
        };
        // A JSON Web Token (RFC 7519): its first part is the start of a JSON object in base64.
        word.starts_with("eyJ") && parts.clone().count() == 3 && parts.all(is_part)
    };
    let is_end = |char: char| !(char.is_ascii_alphanumeric() || matches!(char, '.' | '-' | '_' | '+' | '/'));
    let mut clean = String::with_capacity(text.len());
    let mut follows_scheme = false;
    for piece in text.split_inclusive(is_end) {
        let (word, end) = piece
            .char_indices()
            .next_back()
            .filter(|(_, last)| is_end(*last))
            .map_or((piece, ""), |(at, _)| piece.split_at(at));
        let is_secret = is_token(word) || follows_scheme && !word.is_empty();
        clean.push_str(if is_secret { MARK } else { word });
        clean.push_str(end);
        if !word.is_empty() {
            follows_scheme = word.eq_ignore_ascii_case("bearer") || word.eq_ignore_ascii_case("token") && end == "=";
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use base64::prelude::{BASE64_STANDARD, BASE64_URL_SAFE};
    use proptest::prelude::*;

    use super::*;

    const TOKEN: &str = "k8s-aws-v1.aHR0cHM6Ly9zdHMuZXU/with+signs=and more";

    #[test]
    fn a_secret_is_removed_in_every_encoding_and_in_pieces() {
        let header = format!("Authorization: Bearer {TOKEN}");
        for (text, what) in [
            (TOKEN.to_owned(), "as it is"),
            (BASE64_STANDARD.encode(TOKEN), "base64"),
            (BASE64_URL_SAFE.encode(TOKEN), "base64 for URLs"),
            (BASE64_STANDARD.encode(&header), "base64 of more"),
            (BASE64_STANDARD.encode(format!("x{header}")), "base64 of more, one byte later"),
            (BASE64_STANDARD.encode(format!("xx{header}")), "base64 of more, two bytes later"),
            (TOKEN.replace('/', "%2F").replace('+', "%2B").replace('=', "%3D").replace(' ', "%20"), "percent"),
            (TOKEN.replace('/', "%2f").replace('+', "%2b").replace('=', "%3d").replace(' ', "%20"), "percent, small"),
            (TOKEN.bytes().map(|byte| format!("{byte:02x}")).collect(), "hexadecimal"),
            (TOKEN.bytes().map(|byte| format!("{byte:02X}")).collect(), "hexadecimal, capital"),
            (TOKEN[..20].to_owned(), "a piece"),
        ] {
            let clean = hidden_with(&format!("refused: {text}: why"), &[TOKEN]);
            assert!(clean.starts_with("refused: ") && clean.ends_with(": why"), "{what}: {clean}");
            let has_piece = |form: &String| {
                form.as_bytes()
                    .windows(PIECE_BYTES)
                    .any(|piece| clean.as_bytes().windows(PIECE_BYTES).any(|other| other == piece))
            };
            assert!(clean.contains(MARK) && !forms(TOKEN).iter().any(has_piece), "{what}: {clean}");
        }
        assert_eq!(hidden_with("user:hunter2 is wrong", &["hunter2"]), "user:(removed) is wrong");
        assert_eq!(
            hidden_with("nothing to see in this ordinary message", &[TOKEN]),
            "nothing to see in this ordinary message"
        );
    }

    #[test]
    fn a_password_with_special_characters_is_removed_as_others_write_it() {
        let password = "p&s/<Q7>é 'z\"9+%";
        for (text, what) in [
            (r#"p\u0026s/\u003cQ7\u003eé 'z\"9+%"#, "JSON of Go"),
            (r#"p&s\/<Q7>\u00e9 'z\"9+%"#, "JSON of Python and PHP"),
            ("p&amp;s/&lt;Q7&gt;é &#39;z&quot;9+%", "HTML"),
            ("p%26s%2F%3CQ7%3E%C3%A9+%27z%229%2B%25", "a form"),
            ("p%26s/%3CQ7%3E%C3%A9%20%27z%229+%25", "a path"),
            (r#"p&s/<Q7>\xc3\xa9 'z"9+%"#, "C"),
            ("70:26:73:2f:3c:51:37:3e:c3:a9:20:27:7a:22:39:2b:25", "hexadecimal with colons"),
            ("70 26 73 2F 3C 51 37 3E C3 A9 20 27 7A 22 39 2B 25", "hexadecimal with blanks"),
        ] {
            let clean = hidden_with(&format!("refused <{text}>; why"), &[password]);
            assert_eq!(clean, "refused <(removed)>; why", "{what}");
        }
    }

    #[test]
    fn a_remembered_secret_is_removed_everywhere_and_forgotten_when_others_are_in_use() {
        remember("a-remembered-secret");
        assert_eq!(hidden("it has a-remembered-secret, as sent"), "it has (removed), as sent");
        remember("abc");
        assert_eq!(hidden("abc"), "abc", "too short to be told from a word");
        for number in 0..REMEMBERED_MAX {
            remember(&format!("another secret, number {number}"));
            remember("a-secret-in-use");
        }
        let remembered = REMEMBERED.lock().unwrap();
        assert_eq!(remembered.len(), REMEMBERED_MAX);
        assert!(remembered.iter().any(|secret| **secret == *"a-secret-in-use"), "{remembered:?}");
        assert!(!remembered.iter().any(|secret| **secret == *"a-remembered-secret"), "{remembered:?}");
    }

    #[test]
    fn tokens_of_others_are_removed() {
        let token = format!("eyJ{}.{}.{}", "a".repeat(20), "b".repeat(20), "c-_".repeat(9));
        for (text, expected) in [
            (format!("token {token}, and more\n"), "token (removed), and more\n"),
            ("Authorization: Bearer abc-123/+=\nnext".to_owned(), "Authorization: Bearer (removed)=\nnext"),
            ("https://h/?token=abc123&a=b, a token of".to_owned(), "https://h/?token=(removed)&a=b, a token of"),
            ("a.b.c eyJshort.x.y 10.0.0.1:80".to_owned(), "a.b.c eyJshort.x.y 10.0.0.1:80"),
        ] {
            assert_eq!(hidden(&text), expected);
        }
    }

    proptest! {
        /// Texts and secrets of any characters: no panic, and never the whole secret.
        #[test]
        fn no_text_keeps_a_whole_secret(before in ".{0,20}", secret in ".{4,40}", after in ".{0,20}") {
            let clean = hidden_with(&format!("{before}{secret}{after}"), &[&secret]);
            prop_assume!(!MARK.contains(&secret));
            prop_assert!(!clean.contains(&secret) || secret.len() < SECRET_BYTES_MIN, "{clean}");
        }
    }
}
