//! The random objects and their changes.

use std::{
    fmt,
    time::{Duration, Instant},
};

use cproxy_tests::{process::eventually, random::Random};
use serde_json::Value;

use crate::{
    api::Objects,
    cluster::{PATIENCE, ZONES},
    services::Service,
    slices::{HINTS, Hints, Slice},
};

/// Namespaces and the Services in each, with the same names in both.
const NAMESPACES: [&str; 2] = ["default", "other"];
const NAMES: [&str; 4] = ["a", "b", "c", "d"];

/// Number of address sets. There are more than Services, so that addresses are released, stay unused, and go to another
/// Service.
const NUMBERS: usize = 12;

/// Time for which an object waits for its node ports.
const PORTS_PATIENCE: Duration = Duration::from_secs(20);

pub(crate) struct Universe {
    random: Random,
    services: Vec<Service>,
    slices: Vec<Slice>,
    /// Topology hints of each Service's endpoints.
    hints: Vec<Hints>,
    zone: Option<&'static str>,
}

/// One change.
pub(crate) enum Change {
    Put(Put),
    Delete(Value),
    Zone(Option<&'static str>),
}

/// New state of an object.
pub(crate) struct Put {
    object: Value,
    how: How,
    /// Ingresses of a Service's load balancer.
    ingresses: Option<Value>,
    /// Whether the object is a slice that leaves its Service without being deleted.
    leaves_service: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Create,
    Update,
    /// Deletes and creates it at once.
    Recreate,
}

impl Universe {
    pub(crate) fn new(seed: u64) -> Self {
        let names = NAMESPACES.iter().flat_map(|&namespace| NAMES.map(|name| (namespace, name)));
        let services = names.map(|(namespace, name)| Service::new(namespace, name)).collect::<Vec<_>>();
        let slices = services
            .iter()
            .enumerate()
            .flat_map(|(number, service)| Slice::all(service.namespace, service.name, number));
        let (slices, hints) = (slices.collect(), vec![Hints::None; services.len()]);
        Self { random: Random::new(seed), services, slices, hints, zone: None }
    }

    /// Current zone of the node.
    pub(crate) fn zone(&self) -> Option<&'static str> {
        self.zone
    }

    /// Changes that create the initial objects.
    pub(crate) fn population(&mut self) -> Vec<Change> {
        let mut changes = vec![self.move_node()];
        for index in 0..self.services.len() {
            self.hints[index] = self.random.weighted(&HINTS);
            changes.push(self.new_service(index, How::Create));
        }
        changes.extend((0..self.slices.len()).map(|index| self.new_slice(index)));
        changes
    }

    /// The next few changes. The node moves at most once, since its zone shows that a move was seen.
    pub(crate) fn next_changes(&mut self) -> Vec<Change> {
        let mut changes = Vec::new();
        for _ in 0..=self.random.below(3) {
            changes.push(self.next_change());
            if matches!(changes.last(), Some(Change::Zone(_))) {
                break;
            }
        }
        changes
    }

    fn next_change(&mut self) -> Change {
        match self.random.weighted(&[(45, 0), (45, 1), (10, 2)]) {
            0 => self.change_service(),
            1 => self.change_slice(),
            _ => self.move_node(),
        }
    }

    fn move_node(&mut self) -> Change {
        let zones = [None, Some(""), Some(ZONES[0]), Some(ZONES[1]), Some(ZONES[2])];
        let others = zones.into_iter().filter(|zone| *zone != self.zone).collect::<Vec<_>>();
        self.zone = self.random.pick(&others);
        Change::Zone(self.zone)
    }

    fn change_service(&mut self) -> Change {
        let index = self.random.below(self.services.len());
        if !self.services[index].exists {
            return self.new_service(index, How::Create);
        }
        match self.random.weighted(&[(5, 0), (5, 1), (90, 2)]) {
            0 => {
                self.services[index].exists = false;
                Change::Delete(self.services[index].object())
            }
            1 => self.new_service(index, How::Recreate),
            _ => {
                let (service, random) = (&mut self.services[index], &mut self.random);
                let before = (service.object(), service.ingresses());
                while (service.object(), service.ingresses()) == before {
                    service.change(random);
                }
                self.put_service(index, How::Update)
            }
        }
    }

    fn new_service(&mut self, index: usize, how: How) -> Change {
        self.services[index].exists = false;
        let is_free = |number: &usize| self.services.iter().all(|service| !service.exists || service.number != *number);
        let free = (1..=NUMBERS).filter(is_free).collect::<Vec<_>>();
        let number = self.random.pick(&free);
        self.services[index].draw(&mut self.random, number);
        self.put_service(index, how)
    }

    fn put_service(&self, index: usize, how: How) -> Change {
        let service = &self.services[index];
        Change::Put(Put { object: service.object(), how, ingresses: service.ingresses(), leaves_service: false })
    }

    fn change_slice(&mut self) -> Change {
        let index = self.random.below(self.slices.len());
        if !self.slices[index].exists {
            return self.new_slice(index);
        }
        let before = self.slices[index].clone();
        if self.random.percent(8) {
            self.slices[index].exists = false;
            return Change::Delete(before.object());
        }
        if self.random.percent(10) {
            self.hints[before.number] = self.random.weighted(&HINTS);
        }
        while self.slices[index].object() == before.object() {
            self.change_one_thing(index);
        }
        let service = before.visible_service();
        self.put_slice(index, How::Update, service.is_some() && self.slices[index].service != service)
    }

    fn change_one_thing(&mut self, index: usize) {
        if self.random.percent(8) {
            let siblings = self.slices.iter().filter(|slice| slice.is_sibling(&self.slices[index]));
            let sibling = self.random.pick(&siblings.collect::<Vec<_>>()).clone();
            self.slices[index].copy_from(&mut self.random, &sibling);
        } else {
            let hints = self.hints[self.slices[index].number];
            self.slices[index].change(&mut self.random, hints, &NAMES);
        }
    }

    fn new_slice(&mut self, index: usize) -> Change {
        let hints = self.hints[self.slices[index].number];
        self.slices[index].draw(&mut self.random, hints);
        self.put_slice(index, How::Create, false)
    }

    fn put_slice(&self, index: usize, how: How, leaves_service: bool) -> Change {
        Change::Put(Put { object: self.slices[index].object(), how, ingresses: None, leaves_service })
    }
}

impl Change {
    pub(crate) fn apply(&self, objects: &Objects) {
        match self {
            Self::Put(put) => put.apply(objects),
            Self::Delete(object) => objects.delete(object),
            Self::Zone(zone) => objects.set_zone(*zone),
        }
    }

    pub(crate) fn leaves_service(&self) -> bool {
        matches!(self, Self::Put(Put { leaves_service: true, .. }))
    }
}

impl Put {
    fn apply(&self, objects: &Objects) {
        match self.how {
            How::Create => self.create(objects),
            // An update that the API forbids becomes a deletion and a creation.
            How::Update => objects.replace(&self.object).unwrap_or_else(|_| self.recreate(objects)),
            How::Recreate => self.recreate(objects),
        }
        if let Some(ingresses) = &self.ingresses {
            objects.set_ingresses(&self.object, ingresses);
        }
    }

    fn recreate(&self, objects: &Objects) {
        objects.delete(&self.object);
        self.create(objects);
    }

    /// Creates the object. In observed cases, the API server released a Service's node ports some time after the
    /// Service was gone, or not within a minute: it repairs its allocations after several. Then others are taken.
    fn create(&self, objects: &Objects) {
        let start = Instant::now();
        eventually(PATIENCE, format_args!("it is created: {}", self.object), || {
            let created = objects.create(&self.object);
            if created.is_err() && start.elapsed() > PORTS_PATIENCE {
                return objects.create(&without_node_ports(&self.object));
            }
            created
        });
    }
}

/// The object with node ports that the API server chooses.
fn without_node_ports(object: &Value) -> Value {
    let mut object = object.clone();
    let ports = object.pointer_mut("/spec/ports").and_then(Value::as_array_mut);
    for port in ports.into_iter().flatten().filter_map(Value::as_object_mut) {
        port.remove("nodePort");
    }
    object
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Put(Put { object, how, ingresses, .. }) => {
                write!(f, "{how:?} {object}")?;
                ingresses.as_ref().map_or(Ok(()), |ingresses| write!(f, " with ingresses {ingresses}"))
            }
            Self::Delete(object) => {
                write!(f, "Delete {} {}", object["kind"], object["metadata"])
            }
            Self::Zone(zone) => write!(f, "the node's zone is {zone:?}"),
        }
    }
}
