//! Label selectors, from the text of a request and from an object (apimachinery/pkg/labels/selector.go and
//! pkg/apis/meta/v1/helpers.go 1.36).

use std::fmt;

use cproxy_core::{is_subdomain, sort_unique};

use crate::api;

/// Error in a selector.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct LabelSelectorError(String);

/// Selector of objects by labels, in canonical form: two that are written in another order are equal.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LabelSelector {
    /// Sorted requirements, all of which an object meets.
    requirements: Box<[Requirement]>,
}

/// Requirement on a label.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Requirement {
    key: Box<str>,
    operator: Operator,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Operator {
    Exists,
    DoesNotExist,
    In(Box<[Box<str>]>),
    /// True also without the label.
    NotIn(Box<[Box<str>]>),
    GreaterThan(i64),
    LessThan(i64),
}

impl LabelSelector {
    /// Parses the text of a request, such as `app=web,tier in (a,b)`.
    ///
    /// # Errors
    /// It is no selector.
    pub fn parse(text: &str) -> Result<Self, LabelSelectorError> {
        split(text).into_iter().map(parse_requirement).collect::<Result<Vec<_>, _>>().map(Self::new)
    }

    /// Reads the selector of an object.
    ///
    /// # Errors
    /// A requirement is invalid.
    pub fn of_object(selector: &api::LabelSelector) -> Result<Self, LabelSelectorError> {
        let equal = selector
            .match_labels
            .iter()
            .map(|(key, value)| Ok(Requirement { key: label_key(key)?, operator: Operator::In(values([value])?) }));
        let expressions = selector.match_expressions.iter().map(|expression| {
            Ok(Requirement { key: label_key(&expression.key)?, operator: Operator::of_object(expression)? })
        });
        equal.chain(expressions).collect::<Result<Vec<_>, _>>().map(Self::new)
    }

    fn new(mut requirements: Vec<Requirement>) -> Self {
        sort_unique(&mut requirements);
        Self { requirements: requirements.into() }
    }

    /// Whether it selects an object, given its labels.
    pub fn matches<'a>(&self, label: impl Fn(&str) -> Option<&'a str>) -> bool {
        self.requirements.iter().all(|requirement| requirement.operator.matches(label(&requirement.key)))
    }

    /// Removes the requirements that another selector has.
    pub fn remove(&mut self, other: &Self) {
        let requirements = std::mem::take(&mut self.requirements).into_iter();
        self.requirements = requirements.filter(|requirement| !other.requirements.contains(requirement)).collect();
    }

    /// Whether it selects everything.
    #[must_use]
    pub fn is_everything(&self) -> bool {
        self.requirements.is_empty()
    }

    /// Number of requirements.
    #[must_use]
    pub fn requirement_count(&self) -> usize {
        self.requirements.len()
    }
}

impl Operator {
    fn of_object(expression: &api::LabelSelectorRequirement) -> Result<Self, LabelSelectorError> {
        let api::LabelSelectorRequirement { key, operator, values: texts } = expression;
        let has_values = !texts.is_empty();
        match (operator.as_str(), has_values) {
            ("In", true) => Ok(Self::In(values(texts)?)),
            ("NotIn", true) => Ok(Self::NotIn(values(texts)?)),
            ("Exists", false) => Ok(Self::Exists),
            ("DoesNotExist", false) => Ok(Self::DoesNotExist),
            ("In" | "NotIn", false) => Err(LabelSelectorError(format!("{operator} of {key:?} has no values"))),
            ("Exists" | "DoesNotExist", true) => Err(LabelSelectorError(format!("{operator} of {key:?} has values"))),
            _ => Err(LabelSelectorError(format!("{operator:?} is not In, NotIn, Exists or DoesNotExist"))),
        }
    }

    fn matches(&self, value: Option<&str>) -> bool {
        let number = || value.and_then(|value| value.parse::<i64>().ok());
        match self {
            Self::Exists => value.is_some(),
            Self::DoesNotExist => value.is_none(),
            Self::In(values) => value.is_some_and(|value| values.iter().any(|other| **other == *value)),
            Self::NotIn(values) => value.is_none_or(|value| values.iter().all(|other| **other != *value)),
            Self::GreaterThan(bound) => number().is_some_and(|number| number > *bound),
            Self::LessThan(bound) => number().is_some_and(|number| number < *bound),
        }
    }
}

/// The canonical text. [`LabelSelector::parse`] reads it.
impl fmt::Display for LabelSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, Requirement { key, operator }) in self.requirements.iter().enumerate() {
            if index > 0 {
                f.write_str(",")?;
            }
            match operator {
                Operator::Exists => f.write_str(key)?,
                Operator::DoesNotExist => write!(f, "!{key}")?,
                Operator::In(values) => write!(f, "{key} in ({})", values.join(","))?,
                Operator::NotIn(values) => write!(f, "{key} notin ({})", values.join(","))?,
                Operator::GreaterThan(bound) => write!(f, "{key}>{bound}")?,
                Operator::LessThan(bound) => write!(f, "{key}<{bound}")?,
            }
        }
        Ok(())
    }
}

/// Parts of a selector between the commas outside parentheses; none of an empty one.
fn split(text: &str) -> Vec<&str> {
    if text.trim().is_empty() {
        return Vec::new();
    }
    let mut depth = 0_usize;
    text.split(|character| {
        match character {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        character == ',' && depth == 0
    })
    .collect()
}

fn parse_requirement(text: &str) -> Result<Requirement, LabelSelectorError> {
    let text = text.trim();
    let syntax = || LabelSelectorError(format!("{text:?} is no requirement"));
    if let Some(key) = text.strip_prefix('!') {
        return Ok(Requirement { key: label_key(key.trim())?, operator: Operator::DoesNotExist });
    }
    if let Some(list) = text.strip_suffix(')') {
        let (head, list) = list.split_once('(').ok_or_else(syntax)?;
        let (key, word) = head.trim().rsplit_once(char::is_whitespace).ok_or_else(syntax)?;
        let values = values(list.split(',').map(str::trim))?;
        let operator = match word {
            "in" => Operator::In(values),
            "notin" => Operator::NotIn(values),
            _ => return Err(syntax()),
        };
        return Ok(Requirement { key: label_key(key.trim())?, operator });
    }
    let number = |value: &str| value.trim().parse().map_err(|_| syntax());
    let (key, operator) = if let Some((key, value)) = text.split_once("!=") {
        (key, Operator::NotIn(values([value.trim()])?))
    } else if let Some((key, value)) = text.split_once("==").or_else(|| text.split_once('=')) {
        (key, Operator::In(values([value.trim()])?))
    } else if let Some((key, value)) = text.split_once('>') {
        (key, Operator::GreaterThan(number(value)?))
    } else if let Some((key, value)) = text.split_once('<') {
        (key, Operator::LessThan(number(value)?))
    } else {
        (text, Operator::Exists)
    };
    Ok(Requirement { key: label_key(key.trim())?, operator })
}

/// Whether it is a name of at most 63 characters that begins and ends with a letter or digit.
fn is_name(text: &str) -> bool {
    let belongs = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let is_edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    bytes.len() <= 63 && text.bytes().all(belongs) && is_edge(bytes.first()) && is_edge(bytes.last())
}

fn label_key(key: &str) -> Result<Box<str>, LabelSelectorError> {
    let is_key = match key.split_once('/') {
        Some((prefix, name)) => is_subdomain(prefix) && is_name(name),
        None => is_name(key),
    };
    if is_key { Ok(key.into()) } else { Err(LabelSelectorError(format!("{key:?} is no label key"))) }
}

/// Sorted values, each once.
fn values<T: AsRef<str>>(texts: impl IntoIterator<Item = T>) -> Result<Box<[Box<str>]>, LabelSelectorError> {
    let mut values = texts.into_iter().map(|text| label_value(text.as_ref())).collect::<Result<Vec<_>, _>>()?;
    sort_unique(&mut values);
    Ok(values.into())
}

fn label_value(value: &str) -> Result<Box<str>, LabelSelectorError> {
    if value.is_empty() || is_name(value) {
        return Ok(value.into());
    }
    Err(LabelSelectorError(format!("{value:?} is no label value")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of_object(selector: serde_json::Value) -> Result<LabelSelector, LabelSelectorError> {
        LabelSelector::of_object(&serde_json::from_value(selector).unwrap())
    }

    #[test]
    fn an_object_and_a_request_have_one_canonical_form() {
        let object = of_object(json!({
            "matchLabels": {"tier": "1", "app": "web"},
            "matchExpressions": [
                {"key": "zone", "operator": "NotIn", "values": ["b", "a", "b"]},
                {"key": "old", "operator": "DoesNotExist"},
                {"key": "new", "operator": "Exists"},
                {"key": "app", "operator": "In", "values": ["web"]},
            ],
        }));
        let object = object.unwrap();
        assert_eq!(object.to_string(), "app in (web),new,!old,tier in (1),zone notin (a,b)");
        assert_eq!(LabelSelector::parse("zone notin (a, b), new,app=web,!old, tier==1"), Ok(object.clone()));
        assert_eq!(LabelSelector::parse(&object.to_string()), Ok(object));
    }

    #[test]
    fn not_in_and_does_not_exist_match_a_missing_key() {
        let matches = |text: &str, labels: &[(&str, &'static str)]| {
            let label = |key: &str| labels.iter().find(|label| label.0 == key).map(|label| label.1);
            LabelSelector::parse(text).unwrap().matches(label)
        };
        assert!(matches("a notin (x),!b,c!=y", &[]));
        assert!(matches("a,b in (x,y)", &[("a", ""), ("b", "y")]));
        assert!(!matches("a notin (x)", &[("a", "x")]));
        assert!(!matches("b in (x)", &[]));
    }

    #[test]
    fn an_invalid_selector_of_an_object_is_an_error() {
        for (operator, values, expected) in [
            ("In", json!([]), "In of \"a\" has no values"),
            ("Exists", json!(["x"]), "Exists of \"a\" has values"),
            ("Equals", json!(["x"]), "\"Equals\" is not In, NotIn, Exists or DoesNotExist"),
            ("NotIn", json!(["x y"]), "\"x y\" is no label value"),
            ("In", json!([" x"]), "\" x\" is no label value"),
        ] {
            let selector = json!({"matchExpressions": [{"key": "a", "operator": operator, "values": values}]});
            assert_eq!(of_object(selector).unwrap_err().to_string(), expected);
        }
        assert_eq!(
            of_object(json!({"matchLabels": {"a/b/c": "x"}})).unwrap_err().to_string(),
            "\"a/b/c\" is no label key"
        );
    }
}
