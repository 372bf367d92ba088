//! Names of objects.

use std::{collections::BTreeSet, fmt, sync::Arc};

/// Namespace and name of an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectName {
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Arc<str>,
}

/// Namespace and name of a Service.
pub type ServiceName = ObjectName;

impl ObjectName {
    /// From its parts.
    pub fn new(namespace: impl Into<Arc<str>>, name: impl Into<Arc<str>>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Texts that many have, such as namespaces and the names of ports: each is there once.
#[derive(Debug, Default)]
pub(super) struct Texts {
    known: BTreeSet<Arc<str>>,
    /// How many there were after the last look for those that nobody has any more.
    in_use: usize,
}

impl Texts {
    /// The text as others have it.
    pub(super) fn share(&mut self, text: &Arc<str>) -> Arc<str> {
        if let Some(known) = self.known.get(text) {
            return known.clone();
        }
        self.add(text.clone());
        text.clone()
    }

    fn add(&mut self, text: Arc<str>) {
        self.known.insert(text);
        // Texts that come and go must not fill the memory.
        if self.known.len() > 2 * self.in_use + 64 {
            self.forget_unused();
        }
    }

    /// Drops those that nobody has.
    pub(super) fn forget_unused(&mut self) {
        self.known.retain(|text| Arc::strong_count(text) > 1);
        self.in_use = self.known.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_kept_as_long_as_somebody_has_it() {
        let mut texts = Texts::default();
        let (a, b) = (texts.share(&"n".into()), texts.share(&"n".into()));
        assert!(Arc::ptr_eq(&a, &b));
        for index in 0..1000 {
            drop(texts.share(&format!("gone-{index}").into()));
        }
        assert!(texts.known.len() < 100, "{} are remembered", texts.known.len());
        assert!(Arc::ptr_eq(&a, &texts.share(&"n".into())));
    }
}
