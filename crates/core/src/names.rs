//! Names of objects.

use std::{borrow::Borrow, cmp::Ordering, collections::BTreeSet, fmt, sync::Arc};

/// Namespace and name of an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectName {
    /// Namespace of the object.
    pub namespace: Text,
    /// Name of the object.
    pub name: Arc<str>,
}

/// Namespace and name of a Service.
pub type ServiceName = ObjectName;

impl ObjectName {
    /// Name from its parts.
    pub fn new(namespace: &str, name: impl Into<Arc<str>>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

impl ServiceName {
    /// The Service of a text like `default/web`, if it may be one's name.
    #[must_use]
    pub fn of_service(text: &str) -> Option<Self> {
        let (namespace, name) = text.split_once('/')?;
        (is_label(namespace) && is_label(name)).then(|| Self::new(namespace, name))
    }
}

/// Whether a text is a DNS label, as names of namespaces and Services are (apimachinery `IsDNS1123Label`). A Service's
/// may begin with a digit, as newer API servers allow.
#[must_use]
pub fn is_label(text: &str) -> bool {
    text.len() <= 63 && is_part(text)
}

/// Whether a text is a name in DNS, as those of other objects are (apimachinery `IsDNS1123Subdomain`).
#[must_use]
pub fn is_subdomain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_part)
}

fn is_part(text: &str) -> bool {
    let belongs = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !text.is_empty() && text.bytes().all(belongs) && !text.starts_with('-') && !text.ends_with('-')
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.namespace {
            "" => f.write_str(&self.name),
            namespace => write!(f, "{namespace}/{}", self.name),
        }
    }
}

/// Interned text: one word, where a fat pointer would be two.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Text(Arc<String>);

impl PartialOrd for Text {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Text {
    /// Interned texts are mostly the same allocation, and most comparisons are of names in one namespace.
    fn cmp(&self, other: &Self) -> Ordering {
        if Arc::ptr_eq(&self.0, &other.0) { Ordering::Equal } else { self.0.cmp(&other.0) }
    }
}

impl std::ops::Deref for Text {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl From<&str> for Text {
    fn from(text: &str) -> Self {
        Self(Arc::new(text.to_owned()))
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self)
    }
}

impl Borrow<str> for Text {
    fn borrow(&self) -> &str {
        self
    }
}

/// Interned texts, such as namespaces and the names of ports: each is in memory once.
#[derive(Debug, Default)]
pub(super) struct Texts {
    known: BTreeSet<Text>,
    /// Number of texts that were left after the last removal of unused ones.
    in_use: usize,
}

impl Texts {
    /// The interned text.
    pub(super) fn share(&mut self, text: &str) -> Text {
        if let Some(known) = self.known.get(text) {
            return known.clone();
        }
        let text = Text::from(text);
        self.known.insert(text.clone());
        // Texts that come and go must not fill the memory.
        if self.known.len() > 2 * self.in_use + 64 {
            self.remove_unused();
        }
        text
    }

    /// Removes the texts that are no longer in use.
    pub(super) fn remove_unused(&mut self) {
        self.known.retain(|text| Arc::strong_count(&text.0) > 1);
        self.in_use = self.known.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_kept_as_long_as_it_is_in_use() {
        let mut texts = Texts::default();
        let (a, b) = (texts.share("n"), texts.share("n"));
        assert!(Arc::ptr_eq(&a.0, &b.0));
        for index in 0..1000 {
            drop(texts.share(&format!("gone-{index}")));
        }
        assert!(texts.known.len() < 100, "{} are remembered", texts.known.len());
        assert!(Arc::ptr_eq(&a.0, &texts.share("n").0));
    }
}
