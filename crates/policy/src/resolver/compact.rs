//! Values of pods in the form that is the smallest for nearly all.

use cproxy_core::Address;

/// Identity of an object: 16 bytes if it is a UUID.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Uid {
    Uuid([u8; 16]),
    Text(Box<str>),
}

/// Addresses of a pod: mostly one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Addresses {
    One([Address; 1]),
    List(Box<[Address]>),
}

impl Uid {
    pub(super) fn new(text: Box<str>) -> Self {
        // Only the canonical form, whose text can be made again.
        match u128::from_str_radix(&text.replace('-', ""), 16).map(Self::of_number) {
            Ok(uid) if uid.text() == text => uid,
            _ => Self::Text(text),
        }
    }

    fn of_number(number: u128) -> Self {
        Self::Uuid(number.to_be_bytes())
    }

    pub(super) fn text(&self) -> Box<str> {
        let bytes = match self {
            Self::Uuid(bytes) => bytes,
            Self::Text(text) => return text.clone(),
        };
        let number = u128::from_be_bytes(*bytes);
        let part = |shift: u32, digits: u32| number >> shift & ((1 << (4 * digits)) - 1);
        let [a, b, c, d, e] = [part(96, 8), part(80, 4), part(64, 4), part(48, 4), part(0, 12)];
        format!("{a:08x}-{b:04x}-{c:04x}-{d:04x}-{e:012x}").into()
    }
}

impl Addresses {
    pub(super) fn new(addresses: Box<[Address]>) -> Self {
        match *addresses {
            [one] => Self::One([one]),
            _ => Self::List(addresses),
        }
    }
}

impl std::ops::Deref for Addresses {
    type Target = [Address];

    fn deref(&self) -> &[Address] {
        match self {
            Self::One(one) => one,
            Self::List(list) => list,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_has_its_text_again() {
        const CANONICAL: &str = "6f1d0c3e-8a5b-4c2d-9e7f-00000000abcd";
        assert!(matches!(Uid::new(CANONICAL.into()), Uid::Uuid(_)));
        for text in
            [CANONICAL, "", "x", "6F1D0C3E-8a5b-4c2d-9e7f-00000000abcd", "00000000000000000000000000000001", "+1"]
        {
            assert_eq!(&*Uid::new(text.into()).text(), text);
        }
    }
}
