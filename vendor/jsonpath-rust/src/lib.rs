//! Stands in for the crate of this name, of which kube-client asks one thing: a field of what a credential command
//! printed, as a kubeconfig's `auth-provider` names it in `token-key` and `expiry-key`. The real one brings filters,
//! functions, a parser generator and a regular expression engine, a tenth of the agent (docs/decisions/016).

use serde_json::Value;

/// A path that this cannot follow.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("only names and indexes are understood, as in $.credential.tokens[0]['access_token']")]
pub struct NotUnderstood;

/// JSON that can be asked for what is at a path.
pub trait JsonPath {
    /// The value at the path, if there is one.
    ///
    /// # Errors
    /// The path has more in it than names and indexes.
    fn query(&self, path: &str) -> Result<Vec<&Value>, NotUnderstood>;
}

impl JsonPath for Value {
    fn query(&self, path: &str) -> Result<Vec<&Value>, NotUnderstood> {
        let mut rest = path.strip_prefix('$').ok_or(NotUnderstood)?;
        let mut found = Some(self);
        while !rest.is_empty() {
            let (step, after) = Step::first(rest).ok_or(NotUnderstood)?;
            found = found.and_then(|value| step.take(value));
            rest = after;
        }
        Ok(found.into_iter().collect())
    }
}

/// One step down.
enum Step<'a> {
    Name(&'a str),
    Index(usize),
}

impl<'a> Step<'a> {
    /// The first step of a path, and what comes after it.
    fn first(path: &'a str) -> Option<(Self, &'a str)> {
        if let Some(path) = path.strip_prefix('.') {
            let (name, after) = path.split_at(path.find(['.', '[']).unwrap_or(path.len()));
            let is_name = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-');
            return (!name.is_empty() && name.chars().all(is_name)).then_some((Self::Name(name), after));
        }
        let path = path.strip_prefix('[')?;
        for quote in ['\'', '"'] {
            if let Some(path) = path.strip_prefix(quote) {
                let (name, after) = path.split_once(quote)?;
                return (!name.contains('\\')).then_some((Self::Name(name), after.strip_prefix(']')?));
            }
        }
        let (index, after) = path.split_once(']')?;
        Some((Self::Index(index.parse().ok()?), after))
    }

    fn take(self, value: &Value) -> Option<&Value> {
        match self {
            Self::Name(name) => value.as_object()?.get(name),
            Self::Index(index) => value.as_array()?.get(index),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_and_indexes_lead_to_a_value() {
        let json = json!({"credential": {"access_token": "t", "a.b": ["c", "d"]}});
        for (path, expected) in [
            ("$.credential.access_token", vec![json!("t")]),
            ("$['credential'][\"a.b\"][1]", vec![json!("d")]),
            ("$.credential['a.b'][0]", vec![json!("c")]),
            ("$", vec![json.clone()]),
            ("$.credential.id_token", vec![]),
            ("$.credential.access_token.more", vec![]),
            ("$.credential['a.b'][2]", vec![]),
            ("$.credential[0]", vec![]),
        ] {
            assert_eq!(json.query(path), Ok(expected.iter().collect()), "{path}");
        }
    }

    #[test]
    fn paths_that_are_not_understood_are_errors() {
        for path in
            ["", "credential", "$credential", "$.", "$..a", "$.*", "$[*]", "$.a[?(@.b)]", "$[-1]", "$['a", "$['a'"]
        {
            assert_eq!(json!({"a": [1]}).query(path), Err(NotUnderstood), "{path}");
        }
    }
}
