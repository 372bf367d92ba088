//! Which objects are asked for, and how that is written in a request.

use super::resources::WatchedResource;

/// Which objects of a kind are asked for.
#[derive(Clone, Copy)]
pub(super) struct Selectors<'a> {
    pub(super) labels: &'a str,
    pub(super) fields: Fields<'a>,
}

/// Which fields they have.
#[derive(Clone, Copy)]
pub(super) enum Fields<'a> {
    /// Whichever.
    Any,
    /// This spares what nobody looks at. A server that refuses it is asked without it.
    Sparing(&'a str),
    /// These, or too much would come.
    Only(&'a str),
}

impl Selectors<'_> {
    /// Something is left out that could as well be sent.
    pub(super) fn is_sparing(self) -> bool {
        matches!(self.fields, Fields::Sparing(_))
    }

    /// The same without what only spares something.
    pub(super) fn with_all_fields(self) -> Self {
        match self.fields {
            Fields::Sparing(_) => Self { fields: Fields::Any, ..self },
            Fields::Any | Fields::Only(_) => self,
        }
    }

    /// The path and query of a request.
    pub(super) fn target<K: WatchedResource>(self, more: &[(&str, &str)]) -> String {
        let mut target = path::<K>();
        let selectors = [("labelSelector", self.labels), ("fieldSelector", self.fields.text())];
        let selectors = selectors.into_iter().filter(|(_, value)| !value.is_empty());
        for (index, (name, value)) in selectors.chain(more.iter().copied()).enumerate() {
            target.push(if index == 0 { '?' } else { '&' });
            target.push_str(name);
            target.push('=');
            push_encoded(&mut target, value);
        }
        target
    }
}

impl<'a> Fields<'a> {
    /// The selector; empty if there is none.
    pub(super) fn text(self) -> &'a str {
        match self {
            Self::Any => "",
            Self::Sparing(text) | Self::Only(text) => text,
        }
    }
}

/// Path of a kind's collection in all namespaces.
fn path<K: WatchedResource>() -> String {
    let (group, version, plural) = (K::GROUP, K::VERSION, K::PLURAL);
    if group.is_empty() { format!("/api/{version}/{plural}") } else { format!("/apis/{group}/{version}/{plural}") }
}

/// Percent-encodes all but what needs it nowhere.
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
    fn what_is_asked_for_is_encoded() {
        let services = Selectors { labels: "!a/b", fields: Fields::Sparing("spec.clusterIP!=None") };
        assert_eq!(
            services.target::<Service>(&[("limit", "500"), ("continue", "e+/=&é")]),
            "/api/v1/services?labelSelector=%21a%2Fb&fieldSelector=spec.clusterIP%21%3DNone&limit=500\
             &continue=e%2B%2F%3D%26%C3%A9"
        );
        let slices = Selectors { labels: "", fields: Fields::Any };
        assert_eq!(slices.target::<EndpointSlice>(&[("a", "b")]), "/apis/discovery.k8s.io/v1/endpointslices?a=b");
    }

    #[test]
    fn only_what_spares_something_is_left_out() {
        let target = |fields| Selectors { labels: "!a", fields }.with_all_fields().target::<Node>(&[]);
        assert_eq!(target(Fields::Sparing("x=y")), "/api/v1/nodes?labelSelector=%21a");
        assert_eq!(target(Fields::Only("x=y")), "/api/v1/nodes?labelSelector=%21a&fieldSelector=x%3Dy");
    }
}
