//! Fields of the Go structs of k8s.io/api and k8s.io/apimachinery v0.36.1, in their order. The struct tags, and
//! generated.proto beside them, have numbers and names; Go's type and `omitempty` decide about the rule.

mod discovery;
mod meta;
mod node;
mod service;

pub(crate) use self::{discovery::ENDPOINT_SLICE, node::NODE, service::SERVICE};

/// Fields of a message.
pub(crate) type Schema = [Field];

/// Field of a message.
#[derive(Debug)]
pub(crate) struct Field {
    /// Number in protobuf.
    pub(crate) number: u32,
    /// Name in JSON.
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    pub(crate) rule: Rule,
}

/// Type of a field, or of the items of a list or map.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Text,
    Bool,
    Int32,
    Int64,
    /// metav1.Time.
    Time,
    /// resource.Quantity.
    Quantity,
    /// intstr.IntOrString.
    IntOrString,
    /// metav1.FieldsV1.
    Fields,
    Message(&'static Schema),
}

/// Go's declaration of a field, which decides whether JSON has it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rule {
    /// A value without `omitempty`, or a struct with it, which Go never regards as empty: JSON always has the field.
    Always,
    /// A value with `omitempty`, or a Time with `omitzero`: only if it is not zero.
    NotZero,
    /// A pointer with `omitempty`: only if protobuf has the field, zero or not.
    Pointer,
    /// A slice with `omitempty`: only if it is not empty.
    List,
    /// A slice without `omitempty`: null if it is empty.
    ListOrNull,
    /// A map from strings with `omitempty`: only if it is not empty.
    Map,
}

const fn always(number: u32, name: &'static str, kind: Kind) -> Field {
    Field { number, name, kind, rule: Rule::Always }
}

const fn not_zero(number: u32, name: &'static str, kind: Kind) -> Field {
    Field { number, name, kind, rule: Rule::NotZero }
}

const fn pointer(number: u32, name: &'static str, kind: Kind) -> Field {
    Field { number, name, kind, rule: Rule::Pointer }
}

const fn list(number: u32, name: &'static str, kind: Kind) -> Field {
    Field { number, name, kind, rule: Rule::List }
}

const fn list_or_null(number: u32, name: &'static str, kind: Kind) -> Field {
    Field { number, name, kind, rule: Rule::ListOrNull }
}

const fn map(number: u32, name: &'static str, kind: Kind) -> Field {
    Field { number, name, kind, rule: Rule::Map }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Deepest nesting of messages: a Node's status, config, assigned, configMap.
    const DEPTH_MAX: usize = 5;

    fn check(schema: &Schema, depth: usize) {
        assert!(depth <= DEPTH_MAX, "messages are nested too deeply");
        let numbers = schema.iter().map(|field| field.number).collect::<BTreeSet<_>>();
        let names = schema.iter().map(|field| field.name).collect::<BTreeSet<_>>();
        assert_eq!((numbers.len(), names.len()), (schema.len(), schema.len()), "{names:?}");
        assert!(!numbers.contains(&0) && !names.contains(""));
        for field in schema {
            check_field(field);
            if let Kind::Message(schema) = field.kind {
                check(schema, depth + 1);
            }
        }
    }

    fn check_field(field: &Field) {
        let is_map_value = matches!(field.kind, Kind::Text | Kind::Quantity);
        assert!(is_map_value || !matches!(field.rule, Rule::Map), "{field:?}");
        let has_no_zero = matches!(field.kind, Kind::Message(_) | Kind::Quantity | Kind::IntOrString | Kind::Fields);
        assert!(!has_no_zero || !matches!(field.rule, Rule::NotZero), "{field:?}");
    }

    #[test]
    fn no_number_or_name_occurs_twice_and_no_message_contains_itself() {
        for schema in [SERVICE, ENDPOINT_SLICE, NODE] {
            check(schema, 1);
        }
    }
}
