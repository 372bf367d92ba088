//! Labels of an object in one piece of memory.

use std::{collections::BTreeMap, fmt};

/// End of a key and of a value; no label of Kubernetes has it.
const END: char = '\0';

/// Labels of an object, sorted by key.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Labels(Box<str>);

impl Labels {
    /// Labels from a map. Those that cannot be labels, since they have a NUL, are left out.
    #[must_use]
    pub fn new(labels: &BTreeMap<String, String>) -> Self {
        let possible = labels.iter().filter(|(key, value)| !key.contains(END) && !value.contains(END));
        Self(possible.flat_map(|(key, value)| [key, "\0", value, "\0"]).collect::<String>().into())
    }

    /// Value of a label.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        self.iter().find(|label| label.0 == key).map(|label| label.1)
    }

    /// Keys and values.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        let mut rest = &*self.0;
        std::iter::from_fn(move || {
            let (key, after) = rest.split_once(END)?;
            let (value, after) = after.split_once(END)?;
            rest = after;
            Some((key, value))
        })
    }
}

impl fmt::Debug for Labels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_found_by_key() {
        let of = |labels: &[(&str, &str)]| {
            Labels::new(&labels.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect())
        };
        let labels = of(&[("tier", "1"), ("app", "web"), ("empty", ""), ("a\0b", "x")]);
        assert_eq!(labels.iter().collect::<Vec<_>>(), [("app", "web"), ("empty", ""), ("tier", "1")]);
        assert_eq!([labels.get("tier"), labels.get("empty"), labels.get("web")], [Some("1"), Some(""), None]);
        assert_eq!(labels, of(&[("app", "web"), ("tier", "1"), ("empty", "")]));
        assert_eq!(of(&[]).iter().count(), 0);
    }
}
