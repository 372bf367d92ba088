//! The text of one manifest file: YAML with any number of documents or JSON, objects or Lists of them.

use std::collections::BTreeSet;

use super::document::{Content, Document, Object, Refused};
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

/// Something that a file says.
pub(super) enum Said {
    Service(Box<Service>),
    Slice(Box<EndpointSlice>),
    Node(Box<Node>),
    /// An object that cannot be read: kind, name and what is wrong.
    Unreadable(Kind, ObjectName, String),
    /// What else was wrong with a single object.
    Problem(Problem),
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
    read(file, text, |manifest: &mut Manifest, said| match said {
        Said::Service(service) => manifest.services.push(*service),
        Said::Slice(slice) => manifest.slices.push(*slice),
        Said::Node(node) => manifest.nodes.push(*node),
        Said::Unreadable(kind, name, message) => manifest.unreadable.push((kind, name, message)),
        Said::Problem(problem) => drop(manifest.problems.insert(problem)),
    })
}

/// Reads a file's text document by document; what each says goes to `take`, and is nowhere else.
///
/// JSON is YAML too, but its own reader is ten times as fast.
pub(super) fn read<Kept: Default>(file: &str, text: &str, take: impl Fn(&mut Kept, Said)) -> Result<Kept, String> {
    if text.trim_start().starts_with('{') {
        let documents = serde_json::Deserializer::from_str(text).into_iter();
        if let Ok(kept) = read_documents(file, documents, &take) {
            return Ok(kept);
        }
    }
    // A manifest of ten thousand Services is no attack; nesting stays bounded, and what aliases repeat.
    let options = serde_saphyr::options! {
        // Something may be named n or yes.
        strict_booleans: true,
        budget: serde_saphyr::budget! {
            max_reader_input_bytes: None,
            max_events: usize::MAX,
            max_nodes: usize::MAX,
            max_documents: usize::MAX,
            max_recorded_anchor_events: REPEATED_MAX,
        },
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: REPEATED_MAX },
    };
    let kept = read_documents(file, serde_saphyr::read_with_options(&mut text.as_bytes(), options), &take);
    kept.map_err(|error| error.to_string().lines().next().unwrap_or("not YAML").to_owned())
}

fn read_documents<Kept: Default, Error>(
    file: &str,
    documents: impl Iterator<Item = Result<Document, Error>>,
    take: &impl Fn(&mut Kept, Said),
) -> Result<Kept, Error> {
    let mut kept = Kept::default();
    for (index, document) in documents.enumerate() {
        let place = format!("{file} (document {})", index + 1);
        take_document(document?, &place, LIST_DEPTH_MAX, &mut |said| take(&mut kept, said));
    }
    Ok(kept)
}

impl Manifest {
    /// The manifest as complete lists of all kinds.
    pub fn events(&self) -> impl Iterator<Item = Event> {
        let unreadable = self.unreadable.iter().cloned();
        let objects = self.nodes.iter().map(|node| Event::Node(Box::new(node.clone())));
        let objects = objects.chain(self.services.iter().map(|service| Event::Service(Box::new(service.clone()))));
        let objects = objects.chain(self.slices.iter().map(|slice| Event::EndpointSlice(Box::new(slice.clone()))));
        lists(objects.chain(unreadable.map(|(kind, name, message)| Event::Unreadable {
            kind,
            name: Some(name),
            message,
        })))
    }
}

/// These as complete lists of all kinds. Of several definitions the last counts, whether it can be read or not.
pub(super) fn lists(objects: impl Iterator<Item = Event>) -> impl Iterator<Item = Event> {
    let kinds = [Kind::Nodes, Kind::Services, Kind::EndpointSlices];
    kinds.into_iter().map(Event::ListStarted).chain(objects).chain(kinds.into_iter().map(Event::ListDone))
}

fn take_document(document: Document, place: &str, depth: usize, take: &mut dyn FnMut(Said)) {
    let Document { version, kind, content } = document;
    let message = match content {
        Content::Null => return,
        Content::List(items) if depth > 0 => return take_list(items, &version, &kind, place, depth - 1, take),
        Content::Service(service) => return take(said(service, place, Kind::Services, Said::Service)),
        Content::Slice(slice) => {
            return take(said(slice, place, Kind::EndpointSlices, |slice| Said::Slice(defaulted(slice))));
        }
        Content::Node(node) => return take(said(node, place, Kind::Nodes, Said::Node)),
        Content::List(_) | Content::Unused | Content::Untyped(_) => match (version.as_str(), kind.as_str()) {
            ("", "") => "apiVersion and kind are missing; ignored".to_owned(),
            ("", kind) => format!("{kind} without apiVersion; ignored"),
            (_, "") => "kind is missing; ignored".to_owned(),
            (version, kind) => {
                // One problem for all objects of a kind that is not used.
                let message = format!("{version} {kind} is not used by cproxy; ignored");
                return take(Said::Problem(Problem::new(format_args!("kind {kind}"), "", message)));
            }
        },
    };
    take(Said::Problem(Problem::new(place, "", message)));
}

fn take_list(
    items: Option<Vec<Document>>,
    version: &str,
    kind: &str,
    place: &str,
    depth: usize,
    take: &mut dyn FnMut(Said),
) {
    let Some(items) = items else {
        return take(Said::Problem(Problem::new(place, "", "the list has no items; ignored")));
    };
    let kind = kind.strip_suffix("List").unwrap_or_default();
    for (index, item) in items.into_iter().enumerate() {
        take_document(item.of_list(version, kind), &format!("{place}, items[{index}]"), depth, take);
    }
}

fn said<T>(object: Object<T>, place: &str, kind: Kind, said: impl Fn(Box<T>) -> Said) -> Said {
    match object {
        Ok(object) => said(object),
        Err(Refused::Nameless(message)) => Said::Problem(Problem::new(place, "", message)),
        Err(Refused::Unreadable(name, message)) => Said::Unreadable(kind, name, format!("{message} ({place})")),
    }
}

/// What the API server fills in before anybody sees a slice: an unnamed port has the name "".
fn defaulted(mut slice: Box<EndpointSlice>) -> Box<EndpointSlice> {
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
