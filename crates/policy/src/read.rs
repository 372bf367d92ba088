//! Objects to the resolver's input. A mistake in an object is reported as a problem of its field, and the part of a
//! rule that has it matches nothing.

mod pod;
mod policy;
#[cfg(test)]
mod tests;

use cproxy_core::{Address, ObjectName, Problem, parse_address};

use crate::{
    api::{Metadata, Namespace as NamespaceObject, NetworkPolicy, Pod as PodObject},
    labels::Labels,
    model::{Namespace, Pod, Policy, Protocol},
};

/// Label with the name of a namespace, which the API server sets.
const NAMESPACE_NAME: &str = "kubernetes.io/metadata.name";

/// Content of an object, and its problems.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Read<T> {
    /// The content.
    pub value: T,
    /// Mistakes in the object.
    pub problems: Vec<Problem>,
}

impl Policy {
    /// Reads a NetworkPolicy; `None` if it has no name.
    #[must_use]
    pub fn read(object: &NetworkPolicy) -> Option<Read<Self>> {
        let name = object_name(&object.metadata)?;
        Some(with_problems(format!("NetworkPolicy {name}"), |problems| policy::read(name, object, problems)))
    }
}

impl Pod {
    /// Reads a Pod; `None` if it has no name.
    #[must_use]
    pub fn read(object: &PodObject) -> Option<Read<Self>> {
        let name = object_name(&object.metadata)?;
        Some(with_problems(format!("Pod {name}"), |problems| pod::read(name, object, problems)))
    }
}

impl Namespace {
    /// Reads a Namespace; `None` if it has no name.
    #[must_use]
    pub fn read(object: &NamespaceObject) -> Option<Self> {
        let name = Some(&*object.metadata.name).filter(|name| !name.is_empty())?;
        let mut labels = object.metadata.labels.clone();
        // Manifests may lack what the API server sets.
        labels.insert(NAMESPACE_NAME.to_owned(), name.to_owned());
        Some(Self { name: name.into(), labels: Labels::new(&labels) })
    }
}

/// Problems of one object while it is read.
struct Problems {
    object: String,
    found: Vec<Problem>,
}

impl Problems {
    /// Records a mistake in a field.
    fn add(&mut self, field: impl Into<String>, message: impl Into<String>) {
        self.found.push(Problem::new(&self.object, field, message));
    }
}

fn with_problems<T>(object: String, read: impl FnOnce(&mut Problems) -> T) -> Read<T> {
    let mut problems = Problems { object, found: Vec::new() };
    let value = read(&mut problems);
    Read { value, problems: problems.found }
}

fn object_name(metadata: &Metadata) -> Option<ObjectName> {
    let namespace = if metadata.namespace.is_empty() { "default" } else { &metadata.namespace };
    (!metadata.name.is_empty()).then(|| ObjectName::new(namespace, &*metadata.name))
}

fn protocol(text: &str) -> Option<Protocol> {
    match text {
        "" | "TCP" => Some(Protocol::Tcp),
        "UDP" => Some(Protocol::Udp),
        "SCTP" => Some(Protocol::Sctp),
        _ => None,
    }
}

/// Number of a port, if it may be one.
fn port_number(number: i32) -> Option<u16> {
    u16::try_from(number).ok().filter(|&number| number > 0)
}

/// Addresses of a list, each once; the mistakes are recorded.
fn addresses<'a>(texts: impl Iterator<Item = &'a str>, field: &str, problems: &mut Problems) -> Box<[Address]> {
    let mut addresses = Vec::new();
    for (index, text) in texts.enumerate() {
        match parse_address(text).filter(|address| !address.is_special()) {
            Some(address) if !addresses.contains(&address) => addresses.push(address),
            Some(_) => {}
            None => problems.add(format!("{field}[{index}].ip"), format!("{text:?} is no address of a host; ignored")),
        }
    }
    addresses.into()
}
