//! Selectors by the namespaces in which they select.

use std::collections::BTreeMap;

use cproxy_core::Text;

use crate::{labels::Labels, model::Scope, selector::LabelSelector};

/// Ids of selectors.
#[derive(Default)]
pub(super) struct ScopeIndex {
    /// Those of one namespace.
    of_namespaces: BTreeMap<Text, Vec<u32>>,
    /// Those of namespaces with such labels, so that each selector of namespaces is evaluated once.
    of_selectors: BTreeMap<LabelSelector, Vec<u32>>,
}

impl ScopeIndex {
    pub(super) fn insert(&mut self, scope: &Scope, id: u32) {
        match scope {
            Scope::Namespace(name) => self.of_namespaces.entry(name.clone()).or_default().push(id),
            Scope::Namespaces(selector) => self.of_selectors.entry(selector.clone()).or_default().push(id),
        }
    }

    pub(super) fn remove(&mut self, scope: &Scope, id: u32) {
        match scope {
            Scope::Namespace(name) => remove_from(&mut self.of_namespaces, name, id),
            Scope::Namespaces(selector) => remove_from(&mut self.of_selectors, selector, id),
        }
    }

    /// Ids of those that select in a namespace with these labels.
    pub(super) fn of<'a>(&'a self, namespace: &str, labels: Option<&'a Labels>) -> impl Iterator<Item = u32> + 'a {
        let own = self.of_namespaces.get(namespace).into_iter();
        let matches =
            move |selector: &LabelSelector| labels.is_some_and(|labels| selector.matches(|key| labels.get(key)));
        let others = self.of_selectors.iter().filter(move |(selector, _)| matches(selector)).map(|(_, ids)| ids);
        own.chain(others).flatten().copied()
    }
}

fn remove_from<K: Ord>(map: &mut BTreeMap<K, Vec<u32>>, key: &K, id: u32) {
    let Some(ids) = map.get_mut(key) else { return };
    ids.retain(|other| *other != id);
    if ids.is_empty() {
        map.remove(key);
    }
}
