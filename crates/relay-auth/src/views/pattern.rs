//! Patterns of clients.

use std::{fmt, ops::RangeInclusive};

use serde::{
    Deserialize, Deserializer,
    de::{Error, Visitor},
};

/// Text in which `*` stands for any characters, or none.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Pattern(String);

/// Longest pattern.
const PATTERN_BYTES_MAX: usize = 4096;

/// Text that is no pattern.
#[derive(Debug, thiserror::Error)]
pub enum PatternError {
    /// It is empty.
    #[error("a pattern is empty; `*` matches everything")]
    Empty,
    /// It has too many bytes.
    #[error("a pattern has {0} bytes; at most {PATTERN_BYTES_MAX} are allowed")]
    TooLong(usize),
}

impl TryFrom<String> for Pattern {
    type Error = PatternError;

    fn try_from(text: String) -> Result<Self, PatternError> {
        match text.len() {
            0 => Err(PatternError::Empty),
            length if length > PATTERN_BYTES_MAX => Err(PatternError::TooLong(length)),
            _ => Ok(Self(text)),
        }
    }
}

impl Pattern {
    /// Whether it matches the whole text.
    #[must_use]
    pub fn matches(&self, text: &str) -> bool {
        let mut parts = self.0.split('*');
        let Some(rest) = parts.next().and_then(|first| text.strip_prefix(first)) else { return false };
        let Some(last) = parts.next_back() else { return rest.is_empty() };
        // The first place of each part leaves the most for those after it.
        let rest = parts.try_fold(rest, |rest, part| rest.split_once(part).map(|(_, after)| after));
        rest.is_some_and(|rest| rest.ends_with(last))
    }
}

/// Pattern of the path of a Unix socket.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Pattern")]
pub(super) struct PathPattern(pub(super) Pattern);

impl TryFrom<Pattern> for PathPattern {
    type Error = String;

    fn try_from(pattern: Pattern) -> Result<Self, String> {
        if pattern.0.starts_with(['/', '*']) {
            Ok(Self(pattern))
        } else {
            Err(format!("{:?} matches no path; begin with / or *", pattern.0))
        }
    }
}

/// Context ids of guests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CidRange(pub(super) RangeInclusive<u32>);

/// The context id that stands for any.
const CID_ANY: u32 = u32::MAX;

impl CidRange {
    fn parse(text: &str) -> Option<Self> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        Self::new(number(first)?, number(last)?)
    }

    fn new(first: u32, last: u32) -> Option<Self> {
        (first <= last && last < CID_ANY).then_some(Self(first..=last))
    }
}

/// A number without a sign.
fn number(text: &str) -> Option<u32> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then_some(text)?.parse().ok()
}

impl<'de> Deserialize<'de> for CidRange {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(CidRangeVisitor)
    }
}

struct CidRangeVisitor;

impl Visitor<'_> for CidRangeVisitor {
    type Value = CidRange;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(r#"a context id such as 3, or a range of them such as "10-20""#)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<CidRange, E> {
        let invalid =
            || E::custom(format!(r#"{text:?} is neither a context id such as 3 nor a range such as "10-20""#));
        CidRange::parse(text).ok_or_else(invalid)
    }

    fn visit_u64<E: Error>(self, cid: u64) -> Result<CidRange, E> {
        self.visit_str(&cid.to_string())
    }

    fn visit_i64<E: Error>(self, cid: i64) -> Result<CidRange, E> {
        self.visit_str(&cid.to_string())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pattern(text: &str) -> Pattern {
        text.to_owned().try_into().unwrap()
    }

    /// Matching by trying every length for each star.
    fn naive(pattern: &[u8], text: &[u8]) -> bool {
        match pattern {
            [] => text.is_empty(),
            [b'*', pattern @ ..] => (0..=text.len()).any(|length| naive(pattern, &text[length..])),
            [byte, pattern @ ..] => text.first() == Some(byte) && naive(pattern, &text[1..]),
        }
    }

    proptest! {
        #[test]
        fn a_pattern_matches_as_a_naive_search_does(text in "[abü]{0,8}", stars in "[abü*]{1,8}") {
            prop_assert_eq!(pattern(&stars).matches(&text), naive(stars.as_bytes(), text.as_bytes()));
        }

        #[test]
        fn a_range_of_context_ids_is_what_it_says(first in 0..100_u32, last in 0..100_u32, cid in 0..100_u32) {
            let range = CidRange::parse(&format!("{first}-{last}"));
            prop_assert_eq!(range.is_some(), first <= last);
            if let Some(CidRange(range)) = range {
                prop_assert_eq!(range.contains(&cid), first <= cid && cid <= last);
            }
        }
    }

    #[test]
    fn parts_may_not_overlap() {
        assert!(!pattern("ab*ba").matches("aba"));
        assert!(!pattern("a*b*b").matches("ab"));
        assert!(pattern("*").matches(""));
    }

    #[test]
    fn context_ids_are_numbers_and_ranges() {
        let range = |text| CidRange::parse(text).map(|range| range.0);
        assert_eq!(range("3"), Some(3..=3));
        assert_eq!(range("3-4294967294"), Some(3..=4_294_967_294));
        for text in ["", "-", "3-", "-3", "+3", "4-3", "4294967295", "4294967296", "3-4-5", " 3", "3 - 4", "x"] {
            assert_eq!(range(text), None, "{text:?}");
        }
    }
}
