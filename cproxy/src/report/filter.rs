//! Filter of rows by Service.

/// Services whose rows are shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServiceFilter {
    /// Only those of this namespace.
    pub namespace: Option<String>,
    /// Only those of this name, or of this `namespace/name`.
    pub service: Option<String>,
}

impl ServiceFilter {
    /// Whether it leaves anything out.
    #[must_use]
    pub fn is_set(&self) -> bool {
        *self != Self::default()
    }

    /// Words for those that are shown.
    #[must_use]
    pub fn words(&self) -> String {
        let namespace = self.namespace.as_ref().map(|namespace| format!("in namespace {namespace}"));
        let service = self.service.as_ref().map(|service| format!("of Service {service}"));
        service.into_iter().chain(namespace).collect::<Vec<_>>().join(" ")
    }

    /// Whether a row of this Service, `namespace/name`, is shown. A row whose Service is not known is not, if there is
    /// a filter.
    #[must_use]
    pub fn admits(&self, service: Option<&str>) -> bool {
        let Some((namespace, name)) = service.and_then(|service| service.split_once('/')) else {
            return !self.is_set();
        };
        let is_named = |wanted: &str| match wanted.split_once('/') {
            Some(wanted) => wanted == (namespace, name),
            None => wanted == name,
        };
        self.namespace.as_deref().is_none_or(|wanted| wanted == namespace)
            && self.service.as_deref().is_none_or(is_named)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespace_and_name_select_services() {
        let filter = |namespace: &str, service: &str| {
            let given = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
            ServiceFilter { namespace: given(namespace), service: given(service) }
        };
        for (namespace, service, admitted) in [
            ("", "", true),
            ("default", "", true),
            ("other", "", false),
            ("", "web", true),
            ("", "we", false),
            ("", "default/web", true),
            ("", "other/web", false),
            ("default", "web", true),
            ("other", "default/web", false),
        ] {
            assert_eq!(filter(namespace, service).admits(Some("default/web")), admitted, "{namespace} {service}");
        }
        assert!(filter("", "").admits(None) && !filter("default", "").admits(None));
    }
}
