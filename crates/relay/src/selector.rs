//! Label and field selectors of requests (apimachinery/pkg/labels/selector.go and fields/selector.go 1.36).

use cproxy_policy::LabelSelector;

use crate::{kind::Kind, object::Meta};

/// Longest selector, and most requirements and values of one.
const SELECTOR_BYTES_MAX: usize = 4096;
const REQUIREMENTS_MAX: usize = 32;

/// Error in a selector, as the API server words it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SelectorError {
    /// It cannot be parsed.
    #[error("unable to parse requirement: {0}")]
    Syntax(String),
    /// The field cannot be selected.
    #[error("field label not supported: {0}")]
    Field(String),
    /// It is too long.
    #[error("the selector has more than {SELECTOR_BYTES_MAX} bytes, or than {REQUIREMENTS_MAX} requirements or values")]
    TooLong,
}

/// Selector of objects by labels and fields.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Selector {
    labels: LabelSelector,
    fields: Vec<FieldRequirement>,
}

/// Requirement on a field.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct FieldRequirement {
    field: Field,
    value: String,
    is_equal: bool,
}

/// Field that can be selected (pkg/registry/core/service/strategy.go 1.36; metadata in all kinds).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Field {
    Name,
    Namespace,
    ClusterIp,
    ServiceType,
}

impl Selector {
    /// Parses the selectors of a request.
    ///
    /// # Errors
    /// One of them is invalid.
    pub fn parse(kind: Kind, labels: &str, fields: &str) -> Result<Self, SelectorError> {
        let selector = Self { labels: parse_labels(labels)?, fields: parse_fields(kind, fields)? }.shrunk();
        if selector.labels.requirement_count() + selector.fields.len() > REQUIREMENTS_MAX {
            return Err(SelectorError::TooLong);
        }
        Ok(selector)
    }

    /// True if it selects the object.
    #[must_use]
    pub fn matches(&self, meta: &Meta) -> bool {
        self.labels.matches(|key| meta.label(key)) && self.fields.iter().all(|requirement| requirement.matches(meta))
    }

    /// Name that it requires, if it requires one.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        let of_name = |requirement: &&FieldRequirement| requirement.field == Field::Name && requirement.is_equal;
        self.fields.iter().find(of_name).map(|requirement| &*requirement.value)
    }

    /// The selector without those requirements that all objects of the relay meet, since it follows only such objects.
    #[must_use]
    pub fn beyond(mut self, known: &Self) -> Self {
        self.labels.remove(&known.labels);
        self.fields.retain(|requirement| !known.fields.contains(requirement));
        self.shrunk()
    }

    /// Without room for more: each client keeps its own.
    fn shrunk(mut self) -> Self {
        self.fields.shrink_to_fit();
        self
    }

    /// True if it selects everything.
    #[must_use]
    pub fn is_everything(&self) -> bool {
        self.labels.is_everything() && self.fields.is_empty()
    }
}

impl FieldRequirement {
    fn matches(&self, meta: &Meta) -> bool {
        let value = match self.field {
            Field::Name => &*meta.name,
            Field::Namespace => &*meta.namespace,
            Field::ClusterIp => &*meta.cluster_ip,
            Field::ServiceType => &*meta.service_type,
        };
        (value == self.value) == self.is_equal
    }
}

fn parse_labels(text: &str) -> Result<LabelSelector, SelectorError> {
    if text.len() > SELECTOR_BYTES_MAX || text.matches(',').count() >= REQUIREMENTS_MAX {
        return Err(SelectorError::TooLong);
    }
    LabelSelector::parse(text).map_err(|error| SelectorError::Syntax(error.to_string()))
}

fn parse_fields(kind: Kind, text: &str) -> Result<Vec<FieldRequirement>, SelectorError> {
    if text.len() > SELECTOR_BYTES_MAX {
        return Err(SelectorError::TooLong);
    }
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    parts.map(|part| parse_field(kind, part)).collect()
}

fn parse_field(kind: Kind, text: &str) -> Result<FieldRequirement, SelectorError> {
    let (name, value, is_equal) = if let Some((name, value)) = text.split_once("!=") {
        (name, value, false)
    } else if let Some((name, value)) = text.split_once("==").or_else(|| text.split_once('=')) {
        (name, value, true)
    } else {
        return Err(SelectorError::Syntax(format!("invalid selector: {text:?}; can't understand {text:?}")));
    };
    let field = match (kind, name) {
        (_, "metadata.name") => Field::Name,
        (Kind::Services | Kind::EndpointSlices, "metadata.namespace") => Field::Namespace,
        (Kind::Services, "spec.clusterIP") => Field::ClusterIp,
        (Kind::Services, "spec.type") => Field::ServiceType,
        _ => return Err(SelectorError::Field(name.chars().take(64).collect())),
    };
    Ok(FieldRequirement { field, value: value.to_owned(), is_equal })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meta(labels: &[(&str, &str)]) -> Meta {
        let mut labels: Vec<_> = labels.iter().map(|&(key, value)| (key.into(), value.into())).collect();
        labels.sort();
        Meta {
            namespace: "default".into(),
            name: "web".into(),
            version: 1,
            labels: labels.into(),
            cluster_ip: "10.96.0.1".into(),
            service_type: "ClusterIP".into(),
        }
    }

    fn selects(labels: &str, fields: &str, meta: &Meta) -> bool {
        Selector::parse(Kind::Services, labels, fields).unwrap().matches(meta)
    }

    #[test]
    fn labels_are_selected_by_equality_by_sets_and_by_order() {
        let web = meta(&[("app", "web"), ("example.com/tier", "1"), ("empty", "")]);
        for yes in [
            "",
            "app",
            "app=web",
            "app==web",
            " app = web ",
            "app!=db",
            "!none",
            "none!=x",
            "app in (db, web)",
            "app notin (db)",
            "none notin (a)",
            "example.com/tier>0",
            "example.com/tier<2",
            "empty=",
            "app,!none",
            "app in (a,web),example.com/tier in (1)",
        ] {
            assert!(selects(yes, "", &web), "{yes}");
        }
        for no in [
            "none",
            "app=db",
            "app!=web",
            "!app",
            "app in (db)",
            "app notin (web)",
            "example.com/tier>1",
            "none>0",
            "app>0",
            "none in ()",
            "app,none",
        ] {
            assert!(!selects(no, "", &web), "{no}");
        }
    }

    #[test]
    fn fields_are_selected_by_equality() {
        let web = meta(&[]);
        for yes in
            ["", "metadata.name=web", "spec.clusterIP!=None,spec.type!=ExternalName", "metadata.namespace==default"]
        {
            assert!(selects("", yes, &web), "{yes}");
        }
        for no in ["metadata.name=w", "metadata.name!=web", "spec.clusterIP=None"] {
            assert!(!selects("", no, &web), "{no}");
        }
    }

    #[test]
    fn an_invalid_selector_is_an_error() {
        let parse = |labels: &str, fields: &str| Selector::parse(Kind::Nodes, labels, fields);
        for labels in ["a b", "!", "a in b", "a in (b", "a of (b)", "=b", "a=b=c", "a>b", "ä", ",", "a,,b"] {
            assert!(matches!(parse(labels, ""), Err(SelectorError::Syntax(_))), "{labels}");
        }
        assert_eq!(parse("", "spec.type=x"), Err(SelectorError::Field("spec.type".to_owned())));
        assert!(matches!(parse("", "metadata.name"), Err(SelectorError::Syntax(_))));
        assert_eq!(parse(&"a,".repeat(3000), ""), Err(SelectorError::TooLong));
        assert_eq!(parse(&["a"; 33].join(","), ""), Err(SelectorError::TooLong));
        assert_eq!(parse(&format!("a in ({})", ["b"; 33].join(",")), ""), Err(SelectorError::TooLong));
    }

    #[test]
    fn requirements_that_all_objects_meet_are_left_out() {
        let parse = |labels: &str, fields: &str| Selector::parse(Kind::Services, labels, fields).unwrap();
        let known = parse("!a", "spec.clusterIP!=None,spec.type!=ExternalName");
        assert!(parse("!a", "spec.clusterIP!=None").beyond(&known).is_everything());
        assert_eq!(parse("!a,!b", "").beyond(&known), parse("!b", ""));
        assert_eq!(parse("", "metadata.name=web").beyond(&known).name(), Some("web"));
    }
}
