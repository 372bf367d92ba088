//! Label and field selectors, and the requests that carry them.

use crate::codec::resource::WatchedResource;

/// Selectors of a list or watch.
#[derive(Clone, Copy, Debug)]
pub struct Selectors<'a> {
    /// Label selector; empty: none.
    pub labels: &'a str,
    /// Field selector.
    pub fields: FieldSelector<'a>,
}

/// Field selector of a list or watch.
#[derive(Clone, Copy, Debug)]
pub enum FieldSelector<'a> {
    /// None.
    Any,
    /// It only leaves out objects that the agent ignores. It is dropped if the server refuses it.
    Optional(&'a str),
    /// It keeps away objects of which there are too many.
    Required(&'a str),
}

impl Selectors<'_> {
    /// True if there is a field selector that can be dropped.
    pub(crate) fn has_optional_fields(self) -> bool {
        matches!(self.fields, FieldSelector::Optional(_))
    }

    /// These selectors without an optional field selector.
    pub(crate) fn without_optional_fields(self) -> Self {
        match self.fields {
            FieldSelector::Optional(_) => Self { fields: FieldSelector::Any, ..self },
            FieldSelector::Any | FieldSelector::Required(_) => self,
        }
    }

    /// Path and query of a request with these selectors and `parameters`.
    pub(crate) fn target<K: WatchedResource>(self, parameters: &[(&str, &str)]) -> String {
        let mut target = path::<K>();
        let selectors = [("labelSelector", self.labels), ("fieldSelector", self.fields.text())];
        let selectors = selectors.into_iter().filter(|(_, value)| !value.is_empty());
        for (index, (name, value)) in selectors.chain(parameters.iter().copied()).enumerate() {
            target.push(if index == 0 { '?' } else { '&' });
            target.push_str(name);
            target.push('=');
            push_encoded(&mut target, value);
        }
        target
    }
}

impl<'a> FieldSelector<'a> {
    /// Text of the selector; empty if there is none.
    #[must_use]
    pub fn text(self) -> &'a str {
        match self {
            Self::Any => "",
            Self::Optional(text) | Self::Required(text) => text,
        }
    }
}

/// Path of a resource in all namespaces.
fn path<K: WatchedResource>() -> String {
    let (group, version, plural) = (K::GROUP, K::VERSION, K::PLURAL);
    if group.is_empty() { format!("/api/{version}/{plural}") } else { format!("/apis/{group}/{version}/{plural}") }
}

/// Percent-encodes all bytes except unreserved ones (RFC 3986, 2.3).
fn push_encoded(target: &mut String, value: &str) {
    for byte in value.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            target.push(byte.into());
        } else {
            target.push_str(&format!("%{byte:02X}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use cproxy_core::api::{EndpointSlice, Node, Service};

    use super::*;

    #[test]
    fn selectors_and_parameters_are_encoded() {
        let services = Selectors { labels: "!a/b", fields: FieldSelector::Optional("spec.clusterIP!=None") };
        assert_eq!(
            services.target::<Service>(&[("limit", "500"), ("continue", "e+/=&é")]),
            "/api/v1/services?labelSelector=%21a%2Fb&fieldSelector=spec.clusterIP%21%3DNone&limit=500\
             &continue=e%2B%2F%3D%26%C3%A9"
        );
        let slices = Selectors { labels: "", fields: FieldSelector::Any };
        assert_eq!(slices.target::<EndpointSlice>(&[("a", "b")]), "/apis/discovery.k8s.io/v1/endpointslices?a=b");
    }

    #[test]
    fn only_an_optional_field_selector_is_dropped() {
        let target = |fields| Selectors { labels: "!a", fields }.without_optional_fields().target::<Node>(&[]);
        assert_eq!(target(FieldSelector::Optional("x=y")), "/api/v1/nodes?labelSelector=%21a");
        assert_eq!(target(FieldSelector::Required("x=y")), "/api/v1/nodes?labelSelector=%21a&fieldSelector=x%3Dy");
    }
}
