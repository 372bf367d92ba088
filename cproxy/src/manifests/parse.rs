//! The text of one manifest file: YAML with any number of documents or JSON, objects or Lists of them.

use std::collections::BTreeSet;

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::{
    k8s::objects::{EndpointSlice, Node, Service},
    model::{Event, Kind, ObjectName, Problem},
};

/// What a file says.
#[derive(Clone, Debug, Default)]
pub struct Manifest {
    /// Its Services.
    pub services: Vec<Service>,
    /// Its EndpointSlices.
    pub slices: Vec<EndpointSlice>,
    /// Its Nodes.
    pub nodes: Vec<Node>,
    /// Its objects that cannot be read: kind, name and what is wrong.
    pub unreadable: Vec<(Kind, ObjectName, String)>,
    /// What else was wrong with single objects.
    pub problems: BTreeSet<Problem>,
}

/// How deep Lists may be nested.
const LIST_DEPTH_MAX: usize = 4;
/// How many parts of a file's documents may be there by aliases: a few lines can repeat each other a billion times.
const REPEATED_MAX: usize = 100_000;

/// Reads a file's text. `file` only names it in problems.
///
/// # Errors
/// The text is neither YAML nor JSON: the first line of the parser's message.
pub fn parse(file: &str, text: &str) -> Result<Manifest, String> {
    let mut manifest = Manifest::default();
    for (index, document) in documents(text)?.into_iter().enumerate() {
        manifest.take(document, &format!("{file} (document {})", index + 1), LIST_DEPTH_MAX);
    }
    Ok(manifest)
}

/// Some manifests as complete lists of all kinds.
pub(super) fn lists<'a>(manifests: impl Iterator<Item = &'a Manifest> + Clone) -> Vec<Event> {
    let kinds = [Kind::Nodes, Kind::Services, Kind::EndpointSlices];
    let mut events = Vec::from(kinds.map(Event::ListStarted));
    // File after file: of several definitions the last counts, whether it can be read or not.
    for manifest in manifests {
        let unreadable = manifest.unreadable.iter().cloned();
        events.extend(manifest.nodes.iter().map(|node| Event::Node(Box::new(node.clone()))));
        events.extend(manifest.services.iter().map(|service| Event::Service(Box::new(service.clone()))));
        events.extend(manifest.slices.iter().map(|slice| Event::EndpointSlice(Box::new(slice.clone()))));
        events.extend(unreadable.map(|(kind, name, message)| Event::Unreadable { kind, name: Some(name), message }));
    }
    events.extend(kinds.map(Event::ListDone));
    events
}

/// JSON is YAML too, but its own reader is ten times as fast.
fn documents(text: &str) -> Result<Vec<Value>, String> {
    if text.trim_start().starts_with('{') {
        let documents = serde_json::Deserializer::from_str(text).into_iter().collect::<Result<_, _>>();
        if let Ok(documents) = documents {
            return Ok(documents);
        }
    }
    // A manifest of ten thousand Services is no attack; nesting stays bounded, and what aliases repeat.
    let options = serde_saphyr::options! {
        // Something may be named n or yes.
        strict_booleans: true,
        budget: serde_saphyr::budget! {
            max_events: usize::MAX,
            max_nodes: usize::MAX,
            max_documents: usize::MAX,
            max_recorded_anchor_events: REPEATED_MAX,
        },
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: REPEATED_MAX },
    };
    let parsed = serde_saphyr::from_multiple_with_options::<Value>(text, options);
    parsed.map_err(|error| error.to_string().lines().next().unwrap_or("not YAML").to_owned())
}

impl Manifest {
    /// The manifest as complete lists of all kinds.
    #[must_use]
    pub fn events(&self) -> Vec<Event> {
        lists(std::iter::once(self))
    }

    fn take(&mut self, document: Value, place: &str, depth: usize) {
        let field = |name: &str| document.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
        let (version, kind) = (field("apiVersion"), field("kind"));
        match (version.as_str(), kind.as_str()) {
            ("v1", "Service") => {
                let service = self.object::<Service>(document, place, Kind::Services);
                self.services.extend(service);
            }
            ("discovery.k8s.io/v1", "EndpointSlice") => {
                let slice = self.object::<EndpointSlice>(document, place, Kind::EndpointSlices).map(defaulted);
                self.slices.extend(slice);
            }
            ("v1", "Node") => {
                let node = self.object::<Node>(document, place, Kind::Nodes);
                self.nodes.extend(node);
            }
            _ if kind.ends_with("List") && depth > 0 => self.take_list(document, place, depth - 1),
            _ if document.is_null() => {}
            ("", "") => self.problem(place, "apiVersion and kind are missing; ignored".to_owned()),
            ("", kind) => self.problem(place, format!("{kind} without apiVersion; ignored")),
            (_, "") => self.problem(place, "kind is missing; ignored".to_owned()),
            (version, kind) => {
                self.problem(&format!("kind {kind}"), format!("{version} {kind} is not used by cproxy; ignored"));
            }
        }
    }

    /// The items of a typed list (`kind: ServiceList`) need not say what they are.
    fn take_list(&mut self, mut list: Value, place: &str, depth: usize) {
        let version = list.get("apiVersion").cloned();
        let kind = list.get("kind").and_then(Value::as_str).and_then(|kind| kind.strip_suffix("List")).unwrap_or("");
        let kind = Value::from(kind);
        let Some(Value::Array(items)) = list.get_mut("items").map(Value::take) else {
            return self.problem(place, "the list has no items; ignored".to_owned());
        };
        for (index, mut item) in items.into_iter().enumerate() {
            if let (Value::Object(fields), true) = (&mut item, kind != "") {
                fields.entry("kind").or_insert_with(|| kind.clone());
                fields.entry("apiVersion").or_insert_with(|| version.clone().unwrap_or_default());
            }
            self.take(item, &format!("{place}, items[{index}]"), depth);
        }
    }

    fn object<T: DeserializeOwned>(&mut self, document: Value, place: &str, kind: Kind) -> Option<T> {
        let value = |name: &str| document.pointer(&format!("/metadata/{name}"));
        let metadata = |name: &str| value(name).and_then(Value::as_str).filter(|text| !text.is_empty());
        let Some(name) = metadata("name") else {
            let kind = kind.singular();
            let message = match value("name") {
                Some(name) if !name.is_null() && !name.is_string() => {
                    format!("{kind} with metadata.name {name}, which is no string (put it in quotes); ignored")
                }
                _ => format!("{kind} without metadata.name; ignored"),
            };
            self.problem(place, message);
            return None;
        };
        let name = ObjectName::new(metadata("namespace").unwrap_or("default"), name);
        match serde_path_to_error::deserialize(document) {
            Ok(object) => Some(object),
            Err(error) => {
                self.unreadable.push((kind, name, format!("{error} ({place})")));
                None
            }
        }
    }

    /// One problem for all objects of a kind that is not used.
    fn problem(&mut self, place: &str, message: String) {
        self.problems.insert(Problem::new(place, "", message));
    }
}

/// What the API server fills in before anybody sees a slice: an unnamed port has the name "".
fn defaulted(mut slice: EndpointSlice) -> EndpointSlice {
    for port in slice.ports.iter_mut().flatten() {
        port.name.get_or_insert_default();
    }
    slice
}

#[cfg(test)]
mod tests {
    use super::*;

    const SERVICE: &str = "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {clusterIP: 10.0.0.1}\n";
    const SLICE: &str =
        "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: web-1}\nports: [{port: 80}]\n";

    fn counts(text: &str) -> (usize, usize, usize) {
        let manifest = parse("f", text).unwrap();
        let wrong = manifest.problems.len() + manifest.unreadable.len();
        (manifest.services.len(), manifest.slices.len(), wrong)
    }

    #[test]
    fn documents_and_lists_are_read_in_every_form() {
        for (text, expected) in [
            (SERVICE.to_owned(), (1, 0, 0)),
            (format!("---\n{SERVICE}---\n{SLICE}"), (1, 1, 0)),
            (format!("# only a comment\n---\n{SERVICE}---\n"), (1, 0, 0)),
            (r#"{"apiVersion":"v1","kind":"Service","metadata":{"name":"a"}}"#.to_owned(), (1, 0, 0)),
            (r#"{"apiVersion":"v1","kind":"List","items":[{"apiVersion":"v1","kind":"Service","metadata":{"name":"a"}},{"apiVersion":"v1","kind":"Pod"},{"apiVersion":"v1","kind":"Service"}]}"#.to_owned(), (1, 0, 2)),
            (r#"{"apiVersion":"v1","kind":"ServiceList","items":[{"metadata":{"name":"a"}}]}"#.to_owned(), (1, 0, 0)),
            ("kind: Service\napiVersion: v1\nmetadata: {name: a}\nspec: {ports: [{port: high}]}".to_owned(), (0, 0, 1)),
            ("apiVersion: v1\nkind: Node\nmetadata: {name: n}".to_owned(), (0, 0, 0)),
            ("just: words".to_owned(), (0, 0, 1)),
            ("a plain sentence".to_owned(), (0, 0, 1)),
            (String::new(), (0, 0, 0)),
        ] {
            assert_eq!(counts(&text), expected, "{text}");
        }
    }

    #[test]
    fn text_that_is_no_yaml_is_an_error_of_one_line() {
        for text in ["{", "a: [", "\t: :\n- x: {", "kind: \"Service"] {
            let error = parse("f", text).unwrap_err();
            assert!(!error.is_empty() && !error.contains('\n'), "{text:?}: {error:?}");
        }
    }

    /// A few hundred bytes must not take seconds and most of a microVM's memory.
    #[test]
    fn aliases_of_aliases_end_somewhere() {
        let bomb = |levels: u8| {
            let name = |level: u8| char::from(b'a' + level);
            let list = |item: &str| [item; 9].join(",");
            let level = |n: u8| format!("{}: &{} [{}]\n", name(n), name(n), list(&format!("*{}", name(n - 1))));
            format!("a: &a [{}]\n{}", list("x"), (1..levels).map(level).collect::<String>())
        };
        assert!(parse("f", &bomb(3)).is_ok());
        let error = parse("f", &bomb(6)).unwrap_err();
        assert!(error.contains("budget") && !error.contains('\n'), "{error}");
    }

    #[test]
    fn a_port_without_a_name_is_the_unnamed_port() {
        let manifest = parse("f", SLICE).unwrap();
        assert_eq!(manifest.slices[0].ports.as_ref().unwrap()[0].name.as_deref(), Some(""));
    }

    #[test]
    fn lists_in_lists_end_somewhere() {
        let mut text = "{}".to_owned();
        for _ in 0..40 {
            text = format!(r#"{{"kind":"List","items":[{text}]}}"#);
        }
        assert!(parse("f", &text).is_ok());
    }
}
