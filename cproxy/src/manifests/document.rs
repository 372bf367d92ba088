//! One document of a file, reduced while it is read: of an object of many kilobytes, or of a List of ten thousand of
//! them, only the parts that cproxy uses are kept.
//!
//! The fields of an object have no order, and the items of a typed list need not name their kind. Those that do are
//! reduced at once; the others are kept until their list's kind is known.

use std::{fmt, mem};

use cproxy_core::{
    ObjectName, Problem, ResourceKind,
    api::{EndpointSlice, Node, Service},
    is_label, is_subdomain,
};
use cproxy_policy::Read;
use cproxy_wire::read_located;
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Map, Value};

use super::{
    contents::{Contents, ParseOptions},
    policy_objects::{PolicyKind, PolicyObject},
};

/// Maximum nesting of Lists.
const LIST_DEPTH_MAX: usize = 4;

const NETWORK_POLICY: &str = "NetworkPolicy";

/// Position in a file.
#[derive(Clone, Copy)]
enum Location<'a> {
    Document { file: &'a str, number: usize },
    Item { list: &'a Self, index: usize },
}

impl fmt::Display for Location<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Document { file, number } => write!(f, "{file} (document {number})"),
            Self::Item { list, index } => write!(f, "{list}, items[{index}]"),
        }
    }
}

/// Reads one document, or one item of a List.
#[derive(Clone, Copy)]
pub(super) struct DocumentReader<'a> {
    location: Location<'a>,
    /// Number of further levels of Lists that are allowed.
    depth: usize,
    options: &'a ParseOptions,
}

/// A document, or an item of a List.
#[derive(Default)]
pub(super) struct Document {
    /// `apiVersion`; empty if there is none.
    version: String,
    /// `kind`; empty if there is none.
    kind: String,
    content: Content,
}

/// Content of a document.
#[derive(Default)]
enum Content {
    /// Empty.
    Null,
    /// Object of a kind that is not used.
    #[default]
    Unused,
    /// Object without a kind; its list may name it.
    Untyped(Map<String, Value>),
    /// List with its items, if it has any.
    List(Option<Items>),
    Service(Parsed<Service>),
    Slice(Parsed<EndpointSlice>),
    Node(Parsed<Node>),
    /// Object of network policies, which is passed over if none are asked for.
    Policy(PolicyKind, Map<String, Value>),
}

/// Object, or the reason why it cannot be used.
type Parsed<T> = Result<T, ObjectError>;

/// Reason why an object cannot be used.
enum ObjectError {
    /// Missing name, with the message.
    Nameless(String),
    /// Unreadable object: its name and the message.
    Unreadable(ObjectName, String),
}

/// Rules of the API server for the names of a kind's objects.
#[derive(Clone, Copy)]
struct Names {
    kind: &'static str,
    /// Whether the objects are in namespaces.
    has_namespace: bool,
    /// Whether their names are labels of DNS. Others may have dots.
    is_label: bool,
}

/// The items of a list.
#[derive(Default)]
struct Items {
    /// Items without a kind that came before their list's kind.
    untyped: Vec<UntypedItem>,
    /// Contents of the items after the last untyped one.
    contents: Contents,
}

/// Item without a kind, with what is before it.
struct UntypedItem {
    /// Contents of the items before this one, from the last untyped one on.
    before: Contents,
    index: usize,
    document: Document,
}

/// Type of the items of a typed list; empty if the list does not name it.
#[derive(Clone, Copy, Default)]
struct ItemType<'a> {
    version: &'a str,
    kind: &'a str,
}

impl Names {
    const SERVICE: Self = Self { kind: "Service", has_namespace: true, is_label: true };
    const SLICE: Self = Self { kind: "EndpointSlice", has_namespace: true, is_label: false };
    const NODE: Self = Self { kind: "Node", has_namespace: false, is_label: false };

    fn of_policy(kind: PolicyKind) -> Self {
        let is_namespace = kind == PolicyKind::Namespaces;
        Self { kind: kind.singular(), has_namespace: !is_namespace, is_label: is_namespace }
    }
}

impl<'a> ItemType<'a> {
    fn of_list(version: &'a str, kind: &'a str) -> Self {
        Self { version, kind: kind.strip_suffix("List").unwrap_or_default() }
    }
}

impl Document {
    fn new(fields: Map<String, Value>, items: Option<Items>) -> Self {
        let (version, kind) = (text(&fields, "apiVersion").to_owned(), text(&fields, "kind").to_owned());
        let content = match (version.as_str(), kind.as_str()) {
            ("v1", "Service") => Content::Service(parse_object(fields, Names::SERVICE)),
            ("discovery.k8s.io/v1", "EndpointSlice") => Content::Slice(parse_object(fields, Names::SLICE)),
            ("v1", "Node") => Content::Node(parse_object(fields, Names::NODE)),
            ("v1", "Namespace") => Content::Policy(PolicyKind::Namespaces, fields),
            ("v1", "Pod") => Content::Policy(PolicyKind::Pods, fields),
            ("networking.k8s.io/v1", NETWORK_POLICY) => Content::Policy(PolicyKind::NetworkPolicies, fields),
            (_, kind) if kind.ends_with("List") => Content::List(items),
            ("", _) | (_, "") => Content::Untyped(fields),
            _ => Content::Unused,
        };
        Self { version, kind, content }
    }

    pub(super) fn is_null(&self) -> bool {
        matches!(self.content, Content::Null)
    }

    /// Gives the items of a typed list (`kind: ServiceList`), which need not name their kind, the list's type.
    fn with_item_type(self, item_type: ItemType<'_>) -> Self {
        match self.content {
            Content::Untyped(mut fields) if !item_type.kind.is_empty() => {
                fields.entry("kind").or_insert_with(|| item_type.kind.into());
                fields.entry("apiVersion").or_insert_with(|| item_type.version.into());
                Self::new(fields, None)
            }
            content => Self { content, ..self },
        }
    }
}

fn text<'a>(fields: &'a Map<String, Value>, name: &str) -> &'a str {
    fields.get(name).and_then(Value::as_str).unwrap_or_default()
}

fn parse_object<T: DeserializeOwned>(fields: Map<String, Value>, names: Names) -> Parsed<T> {
    let document = Value::Object(fields);
    let name = object_name(&document, names)?;
    read_located(&document.to_string()).map_err(|error| ObjectError::Unreadable(name, error.to_string()))
}

/// Name of an object, which may be one as the API server sees it.
fn object_name(document: &Value, names: Names) -> Parsed<ObjectName> {
    let value = |name: &str| document.pointer(&format!("/metadata/{name}"));
    let metadata = |name: &str| value(name).and_then(Value::as_str).filter(|text| !text.is_empty());
    let Some(name) = metadata("name") else {
        let kind = names.kind;
        return Err(ObjectError::Nameless(match value("name") {
            Some(name) if !name.is_null() && !name.is_string() => {
                format!(
                    "{kind} with metadata.name {name}, which is no string (put it in quotes): this object is not used"
                )
            }
            _ => format!("{kind} without metadata.name: this object is not used"),
        }));
    };
    let namespace = if names.has_namespace { metadata("namespace").unwrap_or("default") } else { "" };
    let name = ObjectName::new(namespace, name);
    match invalid_name(names, &name) {
        Some(field) => Err(ObjectError::Unreadable(name, field.to_owned())),
        None => Ok(name),
    }
}

/// Whether NetworkPolicies of an `apiVersion`, which may be missing, are those of Kubernetes, of today or before 1.16.
fn is_of_kubernetes(version: &str) -> bool {
    version.is_empty() || version.starts_with("extensions/") || version.starts_with("networking.k8s.io/")
}

/// Namespace of an object that cannot be used; empty if it is not known, and for a Namespace.
fn unchecked_namespace(kind: PolicyKind, document: &Value) -> &str {
    match document.pointer("/metadata/namespace") {
        _ if kind == PolicyKind::Namespaces => "",
        None | Some(Value::Null) => "default",
        Some(namespace) => namespace.as_str().unwrap_or_default(),
    }
}

/// Error in the names of an object, as the API server finds it.
fn invalid_name(names: Names, ObjectName { namespace, name }: &ObjectName) -> Option<&'static str> {
    if names.has_namespace && !is_label(namespace) {
        return Some("metadata.namespace is not of at most 63 lower-case letters, digits and inner dashes");
    }
    if names.is_label {
        return (!is_label(name))
            .then_some("metadata.name is not of at most 63 lower-case letters, digits and inner dashes");
    }
    (!is_subdomain(name))
        .then_some("metadata.name is not of at most 253 lower-case letters, digits, inner dashes and dots")
}

impl<'a> DocumentReader<'a> {
    /// Reader of a document of `file`; the first has the number 1.
    pub(super) fn new(file: &'a str, number: usize, options: &'a ParseOptions) -> Self {
        Self { location: Location::Document { file, number }, depth: LIST_DEPTH_MAX, options }
    }

    /// Reader of an item of this reader's List.
    fn item(&self, index: usize) -> DocumentReader<'_> {
        DocumentReader {
            location: Location::Item { list: &self.location, index },
            depth: self.depth.saturating_sub(1),
            options: self.options,
        }
    }

    /// Adds the contents of a document of this reader.
    pub(super) fn collect(&self, document: Document, contents: &mut Contents) {
        let Document { version, kind, content } = document;
        let message = match content {
            Content::Null => return,
            Content::List(Some(items)) if self.depth > 0 => {
                return self.collect_items(items, ItemType::of_list(&version, &kind), contents);
            }
            Content::List(None) if self.depth > 0 => "the list has no items: this object is not used".to_owned(),
            Content::Service(service) => {
                return self.collect_object(service, ResourceKind::Services, contents, Contents::add_service);
            }
            Content::Slice(slice) => {
                return self.collect_object(slice, ResourceKind::EndpointSlices, contents, Contents::add_slice);
            }
            Content::Node(node) => return self.collect_object(node, ResourceKind::Nodes, contents, Contents::add_node),
            Content::Policy(kind, fields) if self.options.has_policies => {
                return self.collect_policy_object(kind, fields, contents);
            }
            Content::Policy(..) => return,
            Content::List(_) => {
                // It may have had policies.
                contents.add_unknown_policy(self.options);
                format!("Lists are nested more than {LIST_DEPTH_MAX} deep: this one is not used")
            }
            Content::Unused | Content::Untyped(_) => match (version.as_str(), kind.as_str()) {
                ("", "") => "apiVersion and kind are missing: this object is not used".to_owned(),
                ("", kind) => format!("{kind} without apiVersion: this object is not used"),
                (_, "") => "kind is missing: this object is not used".to_owned(),
                (version, NETWORK_POLICY) if self.options.has_policies => {
                    format!("{kind} of {version} where networking.k8s.io/v1 is used: this object is not used")
                }
                (version, "Service" | "Node") => {
                    format!("{kind} of {version} where v1 is used: this object is not used")
                }
                (version, "EndpointSlice") => {
                    format!("{kind} of {version} where discovery.k8s.io/v1 is used: this object is not used")
                }
                (version, kind) => {
                    // One problem for all objects of a kind that is not used.
                    let used = match self.options.has_policies {
                        false => "Services, EndpointSlices and Nodes",
                        true => "Services, EndpointSlices, Nodes, NetworkPolicies, Pods and Namespaces",
                    };
                    let message = format!("not used: cproxy reads only {used}");
                    return contents.add_problem(format_args!("kind {kind} ({version})"), &message);
                }
            },
        };
        if kind == NETWORK_POLICY && is_of_kubernetes(&version) {
            contents.add_unknown_policy(self.options);
        }
        contents.add_problem(self.location, &message);
    }

    fn collect_items(&self, items: Items, item_type: ItemType<'_>, contents: &mut Contents) {
        for UntypedItem { before, index, document } in items.untyped {
            contents.append(before);
            self.item(index).collect(document.with_item_type(item_type), contents);
        }
        contents.append(items.contents);
    }

    fn collect_policy_object(&self, kind: PolicyKind, fields: Map<String, Value>, contents: &mut Contents) {
        let document = Value::Object(fields);
        let unread = |name| PolicyObject::Unreadable(kind, ObjectName::new(unchecked_namespace(kind, &document), name));
        let object = object_name(&document, Names::of_policy(kind)).and_then(|name| {
            PolicyObject::read(kind, &document).map_err(|message| ObjectError::Unreadable(name, message))
        });
        match object {
            Ok(Some(Read { value, problems })) => contents.add_policy_object(value, problems, self.location),
            // Objects without a name have been refused.
            Ok(None) => {}
            Err(ObjectError::Nameless(message)) => {
                contents.add_problem(self.location, &message);
                contents.add_policy_object(unread(""), Vec::new(), self.location);
            }
            Err(ObjectError::Unreadable(name, message)) => {
                let effect = match kind {
                    PolicyKind::Namespaces => "its labels are not known, and no selector of namespaces matches it",
                    PolicyKind::NetworkPolicies | PolicyKind::Pods => "this object is not used",
                };
                let problem =
                    Problem::new(format_args!("{} {name}", kind.singular()), "", format!("{message}: {effect}"));
                contents.add_policy_object(unread(&name.name), vec![problem], self.location);
            }
        }
    }

    fn collect_object<T>(
        &self,
        object: Parsed<T>,
        kind: ResourceKind,
        contents: &mut Contents,
        add: fn(&mut Contents, T, &ParseOptions),
    ) {
        match object {
            Ok(object) => add(contents, object, self.options),
            Err(ObjectError::Nameless(message)) => contents.add_problem(self.location, &message),
            Err(ObjectError::Unreadable(name, message)) => {
                contents.add_unreadable(kind, name, format!("{message} ({})", self.location));
            }
        }
    }
}

/// Accepts values that are neither map nor null as unused.
macro_rules! accept_unused {
    ($type:ty: $($visit:ident($($value:ty)?),)*) => {
        $(
            fn $visit<E>(self $(, _: $value)?) -> Result<$type, E> {
                Ok(<$type>::default())
            }
        )*
    };
}

impl<'de> DeserializeSeed<'de> for DocumentReader<'_> {
    type Value = Document;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Document, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for DocumentReader<'_> {
    type Value = Document;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a Kubernetes object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Document, A::Error> {
        let (mut fields, mut items) = (Map::new(), None);
        while let Some(key) = map.next_key::<String>()? {
            if key == "items" {
                if items.is_some() {
                    return Err(A::Error::custom("items of a list are there twice"));
                }
                items = map.next_value_seed(ItemsReader::new(&self, &fields))?;
            } else if fields.insert(key, map.next_value()?).is_some() && items.is_some() {
                // The items were read with the type that the list had then.
                return Err(A::Error::custom("a field of a list is there twice"));
            }
        }
        Ok(Document::new(fields, items))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Document, A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Document::default())
    }

    fn visit_unit<E>(self) -> Result<Document, E> {
        Ok(Document { content: Content::Null, ..Document::default() })
    }

    accept_unused!(Document: visit_bool(bool), visit_i64(i64), visit_u64(u64), visit_f64(f64), visit_str(&str),);
}

/// Reader of `items`, if the object is a list.
struct ItemsReader<'a> {
    /// Reader of the object that contains the items.
    list: &'a DocumentReader<'a>,
    /// Type of items that do not name their own; `None` if it is not known yet.
    item_type: Option<ItemType<'a>>,
    is_used: bool,
}

impl<'a> ItemsReader<'a> {
    /// Reader for a list with these `fields` before `items`.
    fn new(list: &'a DocumentReader<'a>, fields: &'a Map<String, Value>) -> Self {
        let (version, kind) = (text(fields, "apiVersion"), text(fields, "kind"));
        let is_known = !version.is_empty() && !kind.is_empty();
        Self {
            list,
            item_type: is_known.then(|| ItemType::of_list(version, kind)),
            is_used: list.depth > 0 && (kind.is_empty() || kind.ends_with("List")),
        }
    }
}

impl<'de> DeserializeSeed<'de> for ItemsReader<'_> {
    type Value = Option<Items>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Option<Items>, D::Error> {
        if self.is_used {
            return deserializer.deserialize_any(self);
        }
        IgnoredAny::deserialize(deserializer).map(|IgnoredAny| None)
    }
}

impl<'de> Visitor<'de> for ItemsReader<'_> {
    type Value = Option<Items>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of Kubernetes objects")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Option<Items>, A::Error> {
        let mut items = Items::default();
        for index in 0.. {
            let item = self.list.item(index);
            let Some(document) = seq.next_element_seed(item)? else { break };
            if self.item_type.is_none() && matches!(document.content, Content::Untyped(_)) {
                let before = mem::take(&mut items.contents);
                items.untyped.push(UntypedItem { before, index, document });
            } else {
                item.collect(document.with_item_type(self.item_type.unwrap_or_default()), &mut items.contents);
            }
        }
        Ok(Some(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Option<Items>, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(None)
    }

    accept_unused!(
        Option<Items>: visit_unit(), visit_bool(bool), visit_i64(i64), visit_u64(u64), visit_f64(f64), visit_str(&str),
    );
}
