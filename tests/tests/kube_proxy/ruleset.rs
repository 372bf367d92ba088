//! kube-proxy's tables as `nft -j list ruleset` prints them.

use std::{collections::BTreeMap, net::IpAddr};

use cproxy_tests::kube_proxy::KubeProxy;
use serde_json::Value;

use crate::cluster::PATIENCE;

/// The name of kube-proxy's table, one in each family.
const TABLE: &str = "kube-proxy";

/// The tables of both families.
#[derive(Debug, Default)]
pub(crate) struct Ruleset {
    tables: BTreeMap<String, Table>,
}

/// One family's chains, maps and sets by name.
#[derive(Debug, Default)]
pub(crate) struct Table {
    /// Rules of each chain, each a list of statements.
    pub(crate) chains: BTreeMap<String, Vec<Vec<Value>>>,
    /// Verdicts by key.
    pub(crate) maps: BTreeMap<String, Vec<(Vec<Value>, Value)>>,
    pub(crate) sets: BTreeMap<String, Set>,
}

#[derive(Debug)]
pub(crate) struct Set {
    pub(crate) elements: Vec<Value>,
    /// Lifetime of an element in seconds.
    pub(crate) timeout: Option<u64>,
}

impl Ruleset {
    fn parse(json: &Value) -> Self {
        let mut ruleset = Self::default();
        for object in json["nftables"].as_array().expect("nft prints an array") {
            let (kind, object) = named(object);
            if object["table"] == TABLE {
                ruleset.tables.entry(text(&object["family"])).or_default().add(kind, object);
            }
        }
        ruleset
    }

    /// Waits until kube-proxy's rules satisfy `is_wanted` and returns them.
    pub(crate) fn wait(kube_proxy: &mut KubeProxy<'_>, is_wanted: impl Fn(&Self) -> bool) -> Self {
        kube_proxy.wait_rules(PATIENCE, |rules| Some(Self::parse(rules)).filter(&is_wanted))
    }

    /// The table of an address's family, if kube-proxy has written it already.
    pub(crate) fn table(&self, address: IpAddr) -> Option<&Table> {
        self.tables.get(if address.is_ipv4() { "ip" } else { "ip6" })
    }

    pub(crate) fn tables(&self) -> impl Iterator<Item = &Table> {
        self.tables.values()
    }
}

impl Table {
    fn add(&mut self, kind: &str, object: &Value) {
        let elements = || object["elem"].as_array().cloned().unwrap_or_default();
        match kind {
            "chain" => drop(self.chains.entry(text(&object["name"])).or_default()),
            "rule" => {
                let statements = object["expr"].as_array().expect("a rule has statements").clone();
                self.chains.entry(text(&object["chain"])).or_default().push(statements);
            }
            "map" => {
                let pair = |element: Value| (key(plain(&element[0])), element[1].clone());
                self.maps.insert(text(&object["name"]), elements().into_iter().map(pair).collect());
            }
            "set" => {
                let elements = elements().iter().map(|element| plain(element).clone()).collect();
                self.sets.insert(text(&object["name"]), Set { elements, timeout: object["timeout"].as_u64() });
            }
            other => panic!("kube-proxy's table has a {other}: {object}"),
        }
    }

    /// Elements of a map that kube-proxy always has.
    pub(crate) fn map(&self, name: &str) -> &[(Vec<Value>, Value)] {
        self.maps.get(name).unwrap_or_else(|| panic!("kube-proxy's table has no map {name}"))
    }

    pub(crate) fn set(&self, name: &str) -> &Set {
        self.sets.get(name).unwrap_or_else(|| panic!("kube-proxy's table has no set {name}"))
    }
}

/// An element without its comment or counters.
fn plain(element: &Value) -> &Value {
    if element["elem"].is_null() { element } else { &element["elem"]["val"] }
}

/// Name and value of an object's only field.
pub(crate) fn named(object: &Value) -> (&str, &Value) {
    let field = object.as_object().and_then(|fields| fields.iter().next());
    field.map(|(name, value)| (name.as_str(), value)).unwrap_or_else(|| panic!("{object} has no name"))
}

/// The parts of a key.
pub(crate) fn key(value: &Value) -> Vec<Value> {
    value["concat"].as_array().cloned().unwrap_or_else(|| vec![value.clone()])
}

pub(crate) fn text(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("{value} is no string")).to_owned()
}
